"""Options shared by several commands, grouped help, and construction of the model that the options describe."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from te_models.config.data import split_pair
from te_models.config.recipe import AUTO, FIELDS
from te_models.config.settings import EVERYDAY, Setting
from te_models.config.shipped import file_is_no_model
from te_models.errors import OutOfMemory, UsageError, for_stream, for_terminal
from te_models.files.atomic import first_line
from te_models.planning.printable import Printable, Terminal
from te_models.training.settings import SETTINGS, SHAPE, TABLES

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM
    from te_models.config.model import ModelConfig

LAST_GROUPS = (FIELDS, SHAPE)
# Example values of required options, by metavar.
EXAMPLES = {"DIR": "exported", "NAME": "gated-nano", "PATH": "notes.txt", "N": "100"}
HELP_ALL = "te_models.cli.help_all"  # in a context's meta: show every group
CHOSEN = "te_models.cli.chosen"  # the models whose checkpoint was named

Function = TypeVar("Function", bound=Callable[..., object])
Decorator = Callable[[Function], Function]


class Option(click.Option):
    """An option listed under the heading `group` in the help of its command, with the `range` of its numbers."""

    def __init__(
        self, *declarations: Any, group: str = EVERYDAY, range: str = "", **attributes: Any
    ) -> None:
        super().__init__(*declarations, **attributes)
        self.group = group
        self.range = range

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what the help appends: the range, and of a default in words no parentheses, which click adds."""
        extra = super().get_help_extra(ctx) | ({"range": self.range} if self.range else {})
        return extra | (
            {"default": self.show_default} if isinstance(self.show_default, str) else {}
        )


class Command(click.Command):
    """A command whose --help lists the everyday options and whose --help-all lists all others below them, by group.

    If memory runs out, it ends with one line that suggests remedies.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        # A command whose options are all everyday ones has no more to show.
        if any(_group(parameter) != EVERYDAY for parameter in self.params):
            self.params.append(
                Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all_help,
                    help="Show every option and exit.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line; a name without its option is answered with the options that take one."""
        # Else click would answer "Got unexpected extra argument" and not say which option takes it.
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            raise click.UsageError(_missing(error.param)) from None
        if not ctx.args or ctx.resilient_parsing:
            return rest
        # A bare word is mostly a preset, a model or data.
        takers = {"preset": "--preset NAME", "model": "--model DIR", "data": "--data PATH"}
        takers_here = []
        for name, taker in takers.items():
            if any(name == parameter.name for parameter in self.params):
                takers_here.append(taker)
        option = " or ".join(takers_here) or "what --help lists"
        raise click.UsageError(
            f"unexpected {ctx.args[0]!r}: give it to an option, such as {option}"
        )

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (MemoryError, RuntimeError) as error:
            # CUDA's error is a RuntimeError as others are; the message tells.
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory ({first_line(error)}): {_memory_advice(ctx)}"
            ) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group of options; without --help-all, the first and the names of the others."""
        groups: dict[str, list[tuple[str, str]]] = {EVERYDAY: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(_group(parameter), []).append(record)
        # In the order in which the command declares its groups, but for the long lists of fields.
        others = sorted(
            groups.keys() - {EVERYDAY},
            key=lambda title: (title in LAST_GROUPS, list(groups).index(title)),
        )
        for title in [EVERYDAY, *(others if ctx.meta.get(HELP_ALL) else ())]:
            with formatter.section(title):
                formatter.write_dl(groups[title])
        if others and not ctx.meta.get(HELP_ALL):
            formatter.write_paragraph()
            more = "; ".join(f"{title} ({len(groups[title])})" for title in others)
            formatter.write_text(f"More options with --help-all: {more}.")


def _group(parameter: click.Parameter) -> str:
    """Return the heading of an option in the help."""
    return parameter.group if isinstance(parameter, Option) else EVERYDAY


def _missing(parameter: click.Parameter | None) -> str:
    """Return what to give for a required option that is not given: its help says what that is."""
    assert isinstance(parameter, click.Option) and parameter.help is not None
    flag = parameter.opts[0]
    kind = str(parameter.metavar)
    about = parameter.help.split(": ")[0].rstrip(".")
    return f"give {flag} {kind}, such as {flag} {EXAMPLES[kind]}: {about[:1].lower()}{about[1:]}"


def _show_all_help(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether Python, the CPU allocator or the CUDA allocator of PyTorch ran out of memory."""
    # By name, since a command that never imported torch cannot have its error.
    names = {kind.__name__ for kind in type(error).__mro__}  # without an import of torch
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(
        error
    )


def _memory_advice(ctx: click.Context) -> str:
    """Return the command that shows the memory of this run, and the options that lower it."""
    names = [parameter.name for parameter in ctx.command.params]
    group = ctx.find_root().command
    # Only commands that train have a plan; others load a model and run it.
    if (
        "steps" not in names
        or "gradient_accumulation" not in names
        or not isinstance(group, click.Group)
    ):
        return "use a smaller model or batch, shorter sequences, or --fp8-params"
    command = []
    plans = {parameter.name for parameter in group.commands["plan"].params}
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        # Options that `plan` lacks, such as --out, would be refused there.
        if parameter.name not in plans or value is None or not is_given(parameter.name):
            continue
        if isinstance(value, bool):
            # A switch is given by its name alone: --NAME or --no-NAME.
            command.append((parameter.opts if value else parameter.secondary_opts)[0])
        elif isinstance(value, Mapping):
            # A table is given as one option per entry.
            command += [
                text for pair in value.items() for text in (parameter.opts[0], "=".join(pair))
            ]
        else:
            command += [parameter.opts[0], str(value)]
    return (
        f"`{shlex.join(['te-models', 'plan', '--memory', *command])}` shows what takes it; lower --batch-size or "
        "--seq-len, or add --activation-checkpointing full, --fp8-params, --optimizer-offload or --activation-offload"
    )


def option(*declarations: str, group: str = EVERYDAY, **attributes: object) -> Decorator:
    """Add one option; `click.option` with a group, which shows a default other than None."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*declarations, cls=Option, group=group, **attributes)


def one_source_option(help: str, **attributes: Any) -> Decorator:
    """Add --data for a command that reads one source, which refuses a second."""

    def only(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
        if len(values) > 1:
            raise UsageError(
                f"give --data once, not {len(values)} times: a folder or a glob names several files"
            )
        return values[0] if values else None

    return option("--data", metavar="PATH", multiple=True, callback=only, help=help, **attributes)


def chained(*options: Decorator) -> Decorator:
    """Combine decorators into one that adds their options in this order."""

    def decorate(command: Function) -> Function:
        # click lists options from the last decorator to the first.
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def setting_option(name: str, **attributes: Any) -> Decorator:
    """Add the option of a setting, as it is declared but for `attributes`; a bool gets a `--no-` twin.

    Values out of range are refused where the setting is used, in the same words as in run.toml.
    """
    declared = SETTINGS[name]
    kind = SETTINGS[name].kinds[0]
    shown: bool | str = declared.shown or declared.default not in (None, "", ())
    keywords: dict[str, Any] = dict(
        help=declared.help, group=declared.group, default=declared.default, show_default=shown
    )
    keywords |= dict(
        metavar=declared.metavar
        or (f"[{'|'.join(map(str, declared.choices))}]" if declared.choices else None)
    )
    keywords |= {"callback": CALLBACKS[name]} if name in CALLBACKS else {}
    # An option that may stand alone, such as --profile, or take a value.
    if declared.bare is not None:
        keywords |= dict(is_flag=False, flag_value=declared.bare, metavar=f"[{declared.metavar}]")
    if kind is bool and str in declared.kinds:
        return _switch_or_mode(declared, name, keywords | attributes)
    # Repeated: each use adds an entry.
    if kind in (tuple, dict):
        keywords |= dict(multiple=True, default=None, show_default=False)
    elif kind is bool:
        return option(
            f"{declared.flag}/--no-{declared.flag[2:]}",
            name,
            **keywords | {"metavar": None} | attributes,
        )
    else:
        keywords |= dict(type=kind, range=declared.range)
    if attributes.get("required"):
        del keywords["default"]  # click takes one of None as given
    return option(declared.flag, name, **keywords | attributes)


def _switch_or_mode(one: Setting, name: str, keywords: dict[str, Any]) -> Decorator:
    """Add the option of a setting that is on or off or a mode: `--NAME`, `--NAME MODE` and `--no-NAME`."""
    off = f"te_models.cli.no_{name}"  # in a context's meta: whether --no-NAME is given

    def switch_off(ctx: click.Context, parameter: click.Parameter, switched_off: bool) -> None:
        if switched_off:
            ctx.meta[off] = True
            ctx.params[name] = False  # also where a mode came before it

    def read(ctx: click.Context, parameter: click.Parameter, mode: str | None) -> str | bool | None:
        # The option that is not given is read last.
        if mode is None and off in ctx.meta:
            return False
        return mode

    modes = [choice for choice in one.choices if isinstance(choice, str)]
    keywords |= dict(is_flag=False, flag_value=modes[0], type=click.Choice(modes), callback=read)
    keywords |= dict(metavar=f"[{'|'.join(modes)}]")
    without = option(
        f"--no-{one.flag[2:]}",
        f"no_{name}",
        is_flag=True,
        expose_value=False,
        callback=switch_off,
        group=one.group,
        help=f"Turn off {one.flag}.",
    )
    return chained(option(one.flag, name, **keywords), without)


def setting_options(*names: str, **attributes: Any) -> Decorator:
    """Add the options of several settings."""
    return chained(*(setting_option(name, **attributes) for name in names))


def _table(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str] | None:
    """Return the table that a repeatable option NAME=VALUE gives; None without one."""
    form = "PATTERN=RECIPE, as in *.down_proj=bf16"
    return dict(split_pair(parameter.opts[0], value, form) for value in values) or None


def _real_device(ctx: click.Context, parameter: click.Parameter, device: str | None) -> str | None:
    """Return the name of a device; raise a UsageError for "meta", which computes nothing."""
    if device == "meta":
        raise UsageError("--device meta has no numbers: give cpu, cuda or cuda:N")
    return device


def _model_folder(ctx: click.Context, parameter: click.Parameter, model: str | None) -> str | None:
    """Return the name of a model; raise a UsageError for a file, before it is read as a tokenizer."""
    if model is not None and Path(model).is_file():
        raise file_is_no_model(Path(model))
    return model


CALLBACKS = {"device": _real_device, "precision": _table, "model": _model_folder}
SCALARS = (bool, int, float, str)
FIELD_NAMES = [name for name in TABLES["recipe"] if name != "recipe"]
# Options for single values; lists and groups are set in run.toml.
SHAPE_NAMES = [name for name, one in TABLES["shape"].items() if one.kinds[0] in SCALARS]
preset_option = setting_option("preset")
model_option = setting_option("model")
recipe_option = setting_option("recipe", default=None, show_default=False)
build_options = setting_options(
    "engine", "device", "fp8_params", "base_weights", *FIELD_NAMES, *SHAPE_NAMES
)
model_options = chained(preset_option, model_option, recipe_option, build_options)


def out_option(help: str, **attributes: Any) -> Decorator:
    """Add the option of the folder to write; where it cannot be one it is refused before anything else is done."""
    return option("--out", metavar="DIR", callback=_folder_to_write, help=help, **attributes)


def _folder_to_write(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """Return the folder; raise a UsageError if a file is in the way, or if it would be in a folder named ~."""
    if value is not None:
        # A shell replaces ~ where a word begins with it, and so not in --out=~/runs; ./~/runs names such a folder.
        home = os.path.expanduser(value)
        if value.startswith("~") and home != value:
            whole = shlex.quote(home)
            raise UsageError(f"--out {value}: the shell has not replaced ~: give --out {whole}")
        parents = (Path(value), *Path(value).parents)
        # The nearest parent that exists: a file anywhere on the way would fail only once the work is done.
        path = next(path for path in parents if os.path.lexists(path) or path == path.parent)
        if not path.is_dir():
            raise UsageError(f"--out {value}: {path} is not a folder: give another one")
    return value


overwrite_option = option("--overwrite", is_flag=True, help="Replace a model that --out holds.")


def refuse_to_replace(out: str, overwrite: bool, model: str | None, format: str = "hf") -> None:
    """Raise a UsageError if `out` is the folder of `model`, or holds something that the user did not give up.

    `format` is "te" where a folder of our own is written, else "hf". The save refuses other files too, but only once
    the model has been read.
    """
    from te_models.interop.hf_writing import refuse_other_files  # noqa: PLC0415  imports torch
    from te_models.saving.checkpoint_choice import describe_content, holds_model  # noqa: PLC0415
    from te_models.saving.folder import refuse_foreign_files  # noqa: PLC0415

    folder = Path(out).resolve()
    if model is not None and Path(model).resolve() == folder:
        raise click.UsageError(f"--out {out} is the folder of --model: give another one")
    if not overwrite and holds_model(folder):
        raise UsageError(f"{out} already holds a model: add --overwrite or give another --out")
    if not holds_model(folder) and (content := describe_content(folder)):
        raise UsageError(f"{out} already holds {content}: give another --out")
    refuse = refuse_foreign_files if format == "te" else refuse_other_files
    refuse(folder)


json_option = option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def is_given(name: str) -> bool:
    """Return whether the user gave this option of the command that runs."""
    return (
        click.get_current_context().get_parameter_source(name)
        is click.core.ParameterSource.COMMANDLINE
    )


def refuse_without(source: str, given: str | None, names: Sequence[str]) -> None:
    """Raise a UsageError for an option about a source, such as "--data PATH", that is not given."""
    for name in names:
        if given is None and is_given(name):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{flag} is about {source.split()[0]}: add {source}, or leave it out"
            )


def refuse_all_but(names: Collection[str], reason: str) -> None:
    """Raise a UsageError for any option that the user gave and that is not among `names`; the reason follows it."""
    for parameter in click.get_current_context().command.params:
        name = parameter.name or ""
        if name not in names and is_given(name):
            raise click.UsageError(f"{parameter.opts[0]} {reason}: leave it out")


def seq_len_for(config: ModelConfig, seq_len: int) -> int:
    """Return the tokens of a row: `seq_len`, or where the user did not give it, no more than the model reads."""
    return seq_len if is_given("seq_len") else min(seq_len, config.longest_sequence)


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave."""
    return {name: value for name, value in options.items() if value is not None}


def given_shape(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model's shape that the user gave."""
    return {name: options[name] for name in SHAPE_NAMES if is_given(name)}


def build_model(
    preset: str | None, model: str | None, options: Mapping[str, object], merge: bool = False
) -> CausalLM:
    """Build the model that the options describe: keywords of CausalLM, and fields of recipe and config, or None.

    A run with adapters gives the model with them in it, as it was trained; with `merge`, in its weights.
    """
    from te_models.causal_lm import CausalLM  # noqa: PLC0415  imports torch

    if (preset is None) == (model is None):
        raise click.UsageError("give either --preset NAME or --model DIR")
    keywords = given_options(options)
    if preset is not None:
        refuse_base_weights(keywords)
        return CausalLM.from_preset(preset, **keywords)
    assert model is not None
    show_choice(model)
    return CausalLM.from_pretrained(model, merge_adapters=merge, **keywords)


def refuse_base_weights(options: Mapping[str, object]) -> None:
    """Raise a UsageError if the options of a command that builds a preset have --base-weights."""
    if "base_weights" in options:
        raise click.UsageError(
            "--base-weights is for --model: a preset has no weights of a quantized release"
        )


def show_choice(model: str) -> None:
    """Say once, on standard error, which checkpoint of a run is taken, and why."""
    from te_models.saving.checkpoint_choice import describe_choice  # noqa: PLC0415  imports torch

    context = click.get_current_context(silent=True)
    already_shown = set() if context is None else context.meta.setdefault(CHOSEN, set())
    if model in already_shown:
        return
    already_shown.add(model)
    line = describe_choice(model)
    if line is not None:
        show_line(line, err=True)


def build_trained_model(
    preset: str | None, model: str | None, options: Mapping[str, object]
) -> CausalLM:
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
    stream = sys.stderr if err else sys.stdout
    click.echo(for_stream(for_terminal(text), stream), err=err)


def show(result: Printable, as_json: bool) -> None:
    """Print a result as tables or as JSON."""
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        console().print(result)
