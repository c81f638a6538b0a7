"""`te-models plan`: precision per layer, or the memory of training, before anything is allocated."""

import json
from typing import Any

import click

from te_models.cli.options import (
    Command,
    build_model,
    is_given,
    json_option,
    model_options,
    option,
    setting_option,
    setting_options,
    show,
)
from te_models.config.settings import EVERYDAY
from te_models.config.training import TrainConfig

TRAINING = (
    "batch_size",
    "seq_len",
    "gradient_accumulation",
    "optimizer",
    "optimizer_options",
    "optimizer_offload",
)
ACTIVATIONS = ("activation_checkpointing", "activation_offload")


@click.command(cls=Command)
@model_options
@option(
    "--memory",
    is_flag=True,
    help="Predict the memory of training instead, and list the GPUs it fits on.",
)
@json_option
@setting_options(*TRAINING, *ACTIVATIONS, group="With --memory")
@option("--gpus", default=1, group="With --memory", help="Number of GPUs that FSDP shards over.")
@option(
    "--lora",
    default=0,
    metavar="RANK",
    group="With --memory",
    help="Count the training of low-rank adapters of this rank instead of all weights.",
)
@option(
    "--lora-experts", is_flag=True, group="With --memory", help="Count adapters on experts too."
)
@setting_option(
    "expert_parallel_size",
    help="Show which experts each of this many processes would hold.",
    group=EVERYDAY,
)
def plan(
    preset: str | None, model: str | None, memory: bool, as_json: bool, **options: Any
) -> None:
    """Show the precision of each linear, or the memory of training.

    Nothing is trained, and of a preset nothing is built.
    """
    names = (*TRAINING, "gpus", "lora", "lora_experts")
    if not memory and (given := [name for name in names if is_given(name)]):
        raise click.UsageError(
            f"--{given[0].replace('_', '-')} changes no precision: add --memory, or leave it out"
        )
    training = {name: options.pop(name) for name in names}
    shared = TrainConfig(expert_parallel_size=options.pop("expert_parallel_size"))
    lora, own = training.pop("lora"), training.pop("optimizer_options")
    if preset is not None:
        options["device"] = options["device"] or "meta"
    built = build_model(preset, model, options, merge=True)
    if memory:
        from te_models.optim import resolve_options  # noqa: PLC0415  imports torch

        training["optimizer_options"] = resolve_options(training["optimizer"], own)
        show(built.plan_memory(**training, lora_rank=lora), as_json)
        return
    from te_models.training.report import speed_rows  # noqa: PLC0415  imports torch

    precision, speed = built.plan(), speed_rows(built, shared)
    if as_json:
        step = dict(layer="step", gemm=None, precision=None, engine=built.engine)
        rows = [{**step, "module": name, "reason": text} for name, text in speed.items()]
        click.echo(json.dumps([*precision.to_dict(), *rows], indent=1))
        return
    show(precision, as_json=False)
    click.echo("\n" + "\n".join(f"{name}: {text}" for name, text in speed.items()))
