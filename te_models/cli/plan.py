"""`te-models plan`: precision per layer, or the memory of training, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from te_models.cli.from_record import advice_of, from_record_option, shape_of, try_step_option
from te_models.cli.options import (
    Command,
    build_model,
    given_shape,
    is_given,
    json_option,
    model_options,
    option,
    seq_len_for,
    setting_option,
    setting_options,
    show,
    show_line,
)
from te_models.config.base_weights import DEQUANTIZED, FORM_NAMES, STORED
from te_models.config.gpus import Gpu, get_gpu, suited, why_not
from te_models.config.presets import get_preset
from te_models.config.recipe import AUTO
from te_models.config.settings import EVERYDAY
from te_models.config.training import TrainConfig

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM
    from te_models.planning.memory_plan import MemoryPlan

TRAINING = (
    "batch_size",
    "seq_len",
    "gradient_accumulation",
    "optimizer",
    "optimizer_options",
    "optimizer_offload",
)
DIVISION = (
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "fp8_dispatch",
)
ADAPTERS = ("lora", "lora_experts")
ACTIVATIONS = ("activation_checkpointing", "activation_offload")


@click.command(cls=Command)
@model_options
@option(
    "--memory",
    is_flag=True,
    help="Predict the memory of training instead, and list the GPUs it fits on.",
)
@from_record_option
@try_step_option
@json_option
@setting_options(*TRAINING, *ACTIVATIONS, group="With --memory")
@option("--gpus", default=1, group="With --memory", help="Number of GPUs that share the run.")
@setting_options(
    "tensor_parallel_size",
    group="With --memory",
    help="Number of those that share each layer; FSDP shards over the others.",
)
@setting_options(
    "context_parallel_size",
    group="With --memory",
    help="Number of those that share the tokens of each sequence; with 1 GPU: that many with a whole model each (ddp).",
)
@setting_options("sequence_parallel", "fp8_dispatch", group="With --memory")
@option(
    "--lora",
    default=0,
    metavar="RANK",
    group="With --memory",
    show_default=False,
    help="Count the training of low-rank adapters of this rank instead of all weights; default: of a folder with "
    "adapters theirs, as the other options of their run, else 0.",
)
@option(
    "--lora-experts", is_flag=True, group="With --memory", help="Count adapters on experts too."
)
@option(
    "--gpu",
    default=None,
    metavar="NAME",
    help="Plan for a GPU that need not be here, such as 'RTX 5090': which recipes run on it, and what fits.",
)
@setting_option(
    "expert_parallel_size",
    help="Show which experts each of this many processes would hold; with --memory, of --gpus.",
    group=EVERYDAY,
)
def plan(
    preset: str | None,
    model: str | None,
    memory: bool,
    gpu: str | None,
    from_record: str | None,
    try_step: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the precision of each linear, or the memory of training.

    Nothing is trained, and of a preset nothing is built. With --from-record it first says which recipe, and which
    precision of single linears, the record of a short run speaks for; without a model it is about that run's.
    """
    memory_options = _memory_options(options, memory)
    division = TrainConfig(expert_parallel_size=options.pop("expert_parallel_size"))
    # Of a saved model it is an option of loading; a preset has no weights that could be stored in a form.
    base_weights = None if preset is None else _form_of_preset(options.pop("base_weights"))
    if base_weights is not None and not memory:
        raise click.UsageError(
            "--base-weights of a preset changes no precision: add --memory, or leave it out"
        )
    if try_step and from_record is None:
        raise click.UsageError("--try-step tries the advice of --from-record RUN: give both")
    card = None if gpu is None else get_gpu(gpu)
    if card is not None and options["engine"] == "native":
        raise click.UsageError(
            "--engine native runs on the GPU that is here, and --gpu plans for another: leave out one of them"
        )
    if preset is not None or card is not None:
        # Nothing is computed, so nothing is allocated.
        options["device"] = options["device"] or "meta"
    advice = None
    if from_record is not None:
        config = shape_of(preset, model, given_shape(options))
        advice = advice_of(from_record, config, options, card, try_step)
        options["recipe"] = advice.recipe
        if preset is None and model is None:
            model = from_record
    if card is not None:
        if advice is None:
            options["recipe"] = _recipe_on(card, preset, options)
        # The native engine has only the recipes of the GPU that is here.
        options["engine"] = "emulated"
    of_run = _settings_of_run(model) if memory and model is not None else {}
    for name, value in of_run.items():
        (options if name in ACTIVATIONS else memory_options)[name] = value
    # A plan of precision is about linears, and one of memory about the adapters that are trained beside them.
    built = build_model(preset, model, options, merge=not memory)
    memory_plan = None
    if memory:
        memory_options["expert_parallel_size"] = division.expert_parallel_size
        if "seq_len" not in of_run:
            memory_options["seq_len"] = seq_len_for(built.config, memory_options["seq_len"])
        memory_plan = _planned_memory(built, memory_options, base_weights)
    advice_document = None
    if advice is not None:
        advice_document = advice.to_dict()
        if not as_json:
            show(advice, as_json=False)
            click.echo()
    if card is not None:
        _show_for_gpu(built, card, memory_plan, as_json, advice_document)
    elif memory_plan is None:
        _show_precision(built, division, as_json, advice_document)
    elif as_json:
        _echo_json(memory_plan.to_dict(), advice_document)
    else:
        show(memory_plan, as_json=False)


def _memory_options(options: dict[str, Any], memory: bool) -> dict[str, Any]:
    """Take the options of --memory out of `options`; return them by name.

    Raises:
        UsageError: one of them is given without --memory.
    """
    names = (*TRAINING, *DIVISION, "gpus", *ADAPTERS)
    for name in names:
        if is_given(name) and not memory:
            raise click.UsageError(
                f"--{name.replace('_', '-')} changes no precision: add --memory, or leave it out"
            )
    taken = {name: options.pop(name) for name in names}
    for name in ADAPTERS:
        if not is_given(name):
            del taken[name]  # the model has adapters or not
    return taken


def _settings_of_run(model: str) -> dict[str, Any]:
    """Return the settings of the run that trained the adapters in a folder, but for those that the user gave.

    Empty for a run that trained all weights: it left a model that other runs start from, with settings of their own.
    """
    from te_models.saving.pretrained import adapter_folder  # noqa: PLC0415  imports torch
    from te_models.training.run_settings import read_run_file, run_file_above  # noqa: PLC0415

    adapters = adapter_folder(model)
    file = None if adapters is None else run_file_above(adapters)
    if file is None:
        return {}
    saved = read_run_file(file)
    show_line(f"{model}: options that are not given are those of its run, in {file}", err=True)
    settings = {}
    for name in (*TRAINING, *ACTIVATIONS):
        if name in saved and not is_given(name):
            settings[name] = saved[name]
    return settings


def _planned_memory(
    model: CausalLM, memory_options: dict[str, Any], base_weights: str | None
) -> MemoryPlan:
    """Return the memory plan of a model under the options of --memory, by name."""
    from te_models.optim import resolve_options  # noqa: PLC0415  imports torch

    keywords = dict(memory_options)
    # Left out where it was not given, so that the adapters in the model count.
    if "lora" in keywords:
        keywords["lora_rank"] = keywords.pop("lora")
    keywords["optimizer_options"] = resolve_options(
        keywords["optimizer"], keywords["optimizer_options"]
    )
    # Left out where it was not given, so that a folder's own form decides.
    if base_weights is not None:
        keywords["base_weights"] = base_weights
    return model.plan_memory(**keywords)


def _form_of_preset(base_weights: str | None) -> str | None:
    """Return the form of the weights under the adapters in the plan of a preset; None: they are not quantized."""
    if base_weights == STORED:
        raise click.UsageError(
            f"a preset has no stored weights: give --base-weights {', '.join(FORM_NAMES)}, the form of a release"
        )
    return None if base_weights == DEQUANTIZED else base_weights


def _show_precision(
    model: CausalLM, division: TrainConfig, as_json: bool, advice: dict[str, Any] | None
) -> None:
    """Print the precision of each linear, and which kernels a step runs on this machine."""
    from te_models.training.report import speed_rows  # noqa: PLC0415  imports torch

    precision = model.plan()
    speed = speed_rows(model, division)
    if model.recipe.quantized:
        speed["FP8 speed"] = _fp8_speed(model)
    if as_json:
        step = dict(layer="step", gemm=None, precision=None, engine=model.engine)
        rows = [{**step, "module": name, "reason": text} for name, text in speed.items()]
        _echo_json([*precision.to_dict(), *rows], advice)
        return
    show(precision, as_json=False)
    click.echo("\n" + "\n".join(f"{name}: {text}" for name, text in speed.items()))


def _fp8_speed(model: CausalLM) -> str:
    """Return the measured speed of the model's recipe near its size on this machine's GPU, or that there is no GPU."""
    import torch  # noqa: PLC0415  is slow

    from te_models.config.measured_speed import gain  # noqa: PLC0415  only here

    if not torch.cuda.is_available():
        return "this machine has no GPU: --gpu NAME tells what is measured on one"
    return gain(torch.cuda.get_device_name(), model.config, model.recipe.name).text


def _recipe_on(gpu: Gpu, preset: str | None, options: Mapping[str, Any]) -> Any:
    """Return the recipe of the plan: the one of --recipe, or of a preset without it the best on that GPU."""
    recipe = options["recipe"]
    # "auto" would choose for the GPU that is here.
    if preset is None or recipe not in (None, AUTO):
        return recipe
    from te_models.model.recipe_fit import best_on  # noqa: PLC0415  imports torch

    return best_on(gpu, get_preset(preset, **given_shape(options)))[0].name


def _echo_json(plan: object, advice: dict[str, Any] | None) -> None:
    """Print a plan as JSON: alone, or as {"advice": ..., "plan": ...}."""
    document = plan if advice is None else {"advice": advice, "plan": plan}
    click.echo(json.dumps(document, indent=1))


def _show_for_gpu(
    model: CausalLM,
    gpu: Gpu,
    memory: MemoryPlan | None,
    as_json: bool,
    advice: dict[str, Any] | None = None,
) -> None:
    """Print the recipes that run on a GPU, which need not be here, then the plan of precision or of memory."""
    from te_models.inspect.gpu_plan import plan_for_gpu  # noqa: PLC0415  imports torch

    on_gpu = plan_for_gpu(gpu, model.config, memory)
    if as_json:
        if memory is None:
            plan_document = {"precision": model.plan().to_dict()}
        else:
            plan_document = {"memory": memory.to_dict()}
        _echo_json({**on_gpu.to_dict(), **plan_document}, advice)
        return
    show(on_gpu, as_json=False)
    if memory is not None:
        show(memory, as_json=False)
        return
    reason = why_not(suited(model.recipe, gpu), gpu.capability)
    verdict = f"does not run, {reason}" if reason else "runs"
    title = f"recipe {model.recipe.name} on {gpu.name}: {verdict}"
    show(replace(model.plan(), title=title), as_json=False)
