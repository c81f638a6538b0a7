"""Options shared by several commands, grouped help, and construction of the model that the options describe."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from te_models.config.model import ModelConfig, config_fields
from te_models.config.recipe import AUTO, FIELD_HELP, list_recipes, recipe_fields
from te_models.config.training import TrainConfig
from te_models.errors import OutOfMemory, UsageError, for_terminal
from te_models.files.atomic import first_line
from te_models.planning.printable import Printable, Terminal

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM

TRAIN_GROUPS = {  # heading of the help -> fields of TrainConfig; the others are everyday options
    "Training": (
        "gradient_accumulation", "recipe_schedule", "cache_fp8_weights", "calibrate", "cuda_graph", "memory_check",
        "deterministic",
    ),
    "Optimizer": (
        "optimizer", "optimizer_options", "optimizer_offload", "schedule", "final_learning_rate", "warmup_steps",
        "decay_steps", "weight_decay", "clip_grad_norm",
    ),
    "Evaluation and checkpoints": ("eval_every", "eval_batches", "patience", "keep_best", "save_every", "keep_last"),
    "Several processes": (
        "parallel", "tensor_parallel_size", "sequence_parallel", "reshard_after_forward", "prefetch_blocks",
        "reduce_dtype", "collective_timeout",
    ),
}  # fmt: skip
MEMORY_OPTIONS = {  # of a training run, which `plan --memory` also accepts
    "preset", "model", "recipe", "fp8_params", "batch_size", "seq_len", "gradient_accumulation", "optimizer",
    "optimizer_options", "optimizer_offload", "lora", "activation_checkpointing", "activation_offload",
    *config_fields(), *recipe_fields(),
}  # fmt: skip
LAST_GROUPS = ("Recipe fields", "Model shape")
HELP_ALL = "te_models.cli.help_all"  # in a context's meta: show every group
TRAIN_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]


class Option(click.Option):
    """An option listed under the heading `group` in the help of its command."""

    def __init__(self, *declarations: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.group = group


class Command(click.Command):
    """A command whose --help lists the everyday options and whose --help-all lists all others below them, by group.

    If memory runs out, it ends with one line that suggests remedies.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        if any(_group(parameter) != "Options" for parameter in self.params):
            self.params.append(
                Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all_help,
                       help="Show every option and exit.")
            )  # fmt: skip

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(f"out of memory ({first_line(error)}): {_memory_advice(ctx)}") from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group of options; without --help-all, the first and the names of the others."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(_group(parameter), []).append(record)
        others = sorted(
            groups.keys() - {"Options"}, key=lambda title: (title in LAST_GROUPS, list(groups).index(title))
        )
        for title in ["Options", *(others if ctx.meta.get(HELP_ALL) else ())]:
            with formatter.section(title):
                formatter.write_dl(groups[title])
        if others and not ctx.meta.get(HELP_ALL):
            formatter.write_paragraph()
            more = "; ".join(f"{title} ({len(groups[title])})" for title in others)
            formatter.write_text(f"More options with --help-all: {more}.")


def _group(parameter: click.Parameter) -> str:
    """Return the heading of an option in the help."""
    return parameter.group if isinstance(parameter, Option) else "Options"


def _show_all_help(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether Python, the CPU allocator or the CUDA allocator of PyTorch ran out of memory."""
    names = {kind.__name__ for kind in type(error).__mro__}  # without an import of torch
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _memory_advice(ctx: click.Context) -> str:
    """Return the command that shows the memory of this run, and the options that lower it."""
    names = [parameter.name for parameter in ctx.command.params]
    if "steps" not in names or "gradient_accumulation" not in names:
        return "use a smaller model or batch, shorter sequences, or --fp8-params"
    given = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if parameter.name not in MEMORY_OPTIONS or value is None or not is_given(parameter.name):
            continue
        if isinstance(value, bool):
            given.append((parameter.opts if value else parameter.secondary_opts)[0])
        elif isinstance(value, Mapping):
            given += [text for pair in value.items() for text in (parameter.opts[0], "=".join(pair))]
        else:
            given += [parameter.opts[0], str(value)]
    return (
        f"`{shlex.join(['te-models', 'plan', '--memory', *given])}` shows what takes it; lower --batch-size or "
        "--seq-len, or add --activation-checkpointing full, --fp8-params, --optimizer-offload or --activation-offload"
    )


def real_device(device: str | None) -> str | None:
    """Return the name of a device; raise a UsageError for "meta", which computes nothing."""
    if device == "meta":
        raise UsageError("--device meta has no numbers: give cpu, cuda or cuda:N")
    return device


def option(*declarations: str, group: str = "Options", **attributes: Any) -> Decorator:
    """Add one option; `click.option` with a group, which shows a default other than None."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*declarations, cls=Option, group=group, **attributes)


data_option = functools.partial(option, group="Data")


def one_source_option(help: str, **attributes: Any) -> Decorator:
    """Add --data for a command that reads one source, which refuses a second."""

    def only(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
        if len(values) > 1:
            raise UsageError(f"give --data once, not {len(values)} times: a folder or a glob names several files")
        return values[0] if values else None

    return option("--data", metavar="PATH", multiple=True, callback=only, help=help, **attributes)


def chained(*options: Decorator) -> Decorator:
    """Combine decorators into one that adds their options in this order."""

    def decorate(command: Function) -> Function:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def flag(name: str, kind: Any, **attributes: Any) -> Decorator:
    """Add the option of a field, in kebab case; a bool gets a `--no-` twin."""
    text = f"--{name.replace('_', '-')}"
    if kind is bool:
        return option(f"{text}/--no-{text[2:]}", **attributes)
    return option(text, type=kind, **attributes)


def _field_options() -> Iterator[Decorator]:
    """Yield a flag per field of a recipe, and of ModelConfig unless it is a list with one entry per layer."""
    for name, check in recipe_fields().items():
        kind = click.Choice([str(value) for value in check]) if isinstance(check, tuple) else check
        how: dict[str, Any] = dict(group="Recipe fields", help=FIELD_HELP[name])
        if check is dict:
            yield flag(name, str, multiple=True, metavar="PATTERN=RECIPE", callback=_table, **how)
        else:
            yield flag(name, kind, default=None, **how)
    types = config_fields()
    for field in dataclasses.fields(ModelConfig):
        if kind := _scalar(types[field.name]):
            yield flag(field.name, kind, default=None, group="Model shape", help=field.metadata["help"])


def _table(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Return the table that a repeatable option NAME=VALUE gives; None without one."""
    pairs = [value.partition("=") for value in values]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise UsageError(f"{parameter.opts[0]} {name}{equals}{value}: write PATTERN=RECIPE, as in *.down_proj=bf16")
    return {name: value for name, _, value in pairs} or None


def _scalar(kind: Any) -> type | None:
    """Return the type of a flag: int for `int | None`, and so on; None for a type that one flag cannot express."""
    return next((t for t in (bool, int, float, str) if t is kind or t in get_args(kind)), None)


preset_option = option(
    "--preset", metavar="NAME", help="Model shape with random weights: `te-models list` has the names."
)
model_option = option(
    "--model", metavar="NAME",
    help="Saved model, run folder (its newest checkpoint), Hugging Face folder or name, or a shipped model.",
)  # fmt: skip
RECIPES = ", ".join(list_recipes())
RECIPE_HELP = (
    f"Scheme of te.Linear: {RECIPES}, a TOML file, or auto (the default): the model's own; a new one runs in FP8 where "
    "that saves time (mxfp8 on Blackwell, current on Hopper and Ada, from a hidden size of 2048), else in bf16."
)
recipe_option = option("--recipe", metavar="NAME|FILE", help=RECIPE_HELP)
build_options = chained(
    option("--engine", default="auto", metavar="NAME", group="Model",
           help="auto, native (Transformer Engine) or emulated (its numbers on any device)."),
    option("--device", group="Model", callback=lambda _, __, device: real_device(device),
           help="Device, such as cpu or cuda:1; default: the first GPU, else the CPU."),
    option("--fp8-params/--no-fp8-params", default=None, group="Model",
           help="Store the weights of FP8 layers in FP8 only, without a BF16 copy."),
    *_field_options(),
)  # fmt: skip
model_options = chained(preset_option, model_option, recipe_option, build_options)


def train_options(*names: str, group: str | None = None, **defaults: str) -> Decorator:
    """Add the flags of these fields of TrainConfig (all of them without names), with its defaults and help texts.

    `defaults` are the texts that the help shows for fields whose default depends on the command.
    """
    groups = {name: title for title, members in TRAIN_GROUPS.items() for name in members}
    return chained(*(
        flag(
            field.name, type(field.default), default=field.default,
            group=group or groups.get(field.name, "Options"), help=field.metadata["help"],
            show_default=defaults.get(field.name, True),
        )
        for field in (TRAIN_FIELDS[name] for name in names or TRAIN_FIELDS)
    ))  # fmt: skip


def memory_options(group: str) -> Decorator:
    """Add the options that trade memory for time."""
    return chained(
        option("--activation-checkpointing", default="none", metavar="MODE", group=group,
               help="Recompute activations: none, selective (most of each MLP), full, or N for every N-th block."),
        option("--activation-offload/--no-activation-offload", default=False, group=group,
               help="Store the activations that backward needs in host memory."),
    )  # fmt: skip


compile_option = option(
    "--compile/--no-compile", default=True, group="Model",
    help="Fuse elementwise operations with torch.compile (on a GPU).",
)  # fmt: skip


def out_option(help: str, **attributes: Any) -> Decorator:
    """Add the option of the folder to write; a file in its place is refused before anything else is done."""
    return option("--out", metavar="DIR", callback=_refuse_file, help=help, **attributes)


def _refuse_file(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        parents = (Path(value), *Path(value).parents)
        path = next(path for path in parents if os.path.lexists(path) or path == path.parent)
        if not path.is_dir():
            raise UsageError(f"--out {value}: {path} is not a folder: give another one")
    return value


tokenizer_option = option(
    "--tokenizer", metavar="PATH", help="Hugging Face tokenizer.json; default: the model's own, else bytes."
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def is_given(name: str) -> bool:
    """Return whether the user gave this option of the command that runs."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave; choices among numbers, which arrive as strings, as numbers."""
    return {name: _number(name, value) for name, value in options.items() if value is not None}


def _number(name: str, value: Any) -> Any:
    check = recipe_fields().get(name)
    return next((choice for choice in check if str(choice) == value), value) if isinstance(check, tuple) else value


def build_model(preset: str | None, model: str | None, options: Mapping[str, Any], merge: bool = False) -> CausalLM:
    """Build the model that the options describe: keywords of CausalLM, and fields of recipe and config, or None.

    A run with adapters gives the model with them in it, as it was trained; with `merge`, in its weights.
    """
    from te_models.causal_lm import CausalLM  # noqa: PLC0415  imports torch
    from te_models.saving.pretrained import adapter_folder  # noqa: PLC0415

    if (preset is None) == (model is None):
        raise click.UsageError("give either --preset NAME or --model DIR")
    given = given_options(options)
    if preset is not None:
        return CausalLM.from_preset(preset, **given)
    assert model is not None
    if (adapters := adapter_folder(model)) is not None:
        from te_models.training.lora_run import load_adapted, load_merged  # noqa: PLC0415  needs peft

        return (load_merged if merge else load_adapted)(adapters, **given)
    return CausalLM.from_pretrained(model, **given)


def build_trained_model(preset: str | None, model: str | None, options: Mapping[str, Any]) -> CausalLM:
    """Build a model to be served, with the adapters of a run in its weights: under BF16 if it has no recipe of its own.

    The recipe decides which layers are quantized, which should not depend on this machine.
    """
    from te_models.saving.pretrained import adapter_folder, read_shape  # noqa: PLC0415  imports torch

    if options["recipe"] in (None, AUTO):
        new = model is None or (adapter_folder(model) is None and read_shape(model).recipe is None)
        options = {**options, "recipe": "bf16" if new else AUTO}
    return build_model(preset, model, options, merge=True)


def console(width: int = 140) -> Terminal:
    """Return a console of the terminal's width, or of this one where the output is not a terminal."""
    return Terminal(width=None if sys.stdout.isatty() else width)


def show_line(text: str, err: bool = False) -> None:
    """Print a line that may name what others named."""
    click.echo(for_terminal(text), err=err)


def show(result: Printable, as_json: bool) -> None:
    """Print a result as tables or as JSON."""
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        console().print(result, highlight=False)
