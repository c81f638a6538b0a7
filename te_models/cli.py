"""The command line: te-models list | plan | finetune | generate | convert.

A user's mistake ends with exit code 2 and one line on stderr; set TE_MODELS_DEBUG=1 for the traceback. Heavy imports
happen inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from te_models.config import config_fields
from te_models.presets import PRESETS, get_preset, list_presets
from te_models.recipe import get_recipe, list_recipes, recipe_fields
from te_models.train_config import TrainConfig

TRAIN_FIELDS = {f.name: f.default for f in dataclasses.fields(TrainConfig)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = cli.main(arguments, prog_name="te-models", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        return _fail(error, error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return _fail(None, "stopped", code=130)
    except (ValueError, OSError, RuntimeError) as error:
        if type(error).__name__ in ("Diverged", "LostPeer"):
            return _fail(error, str(error), code=1)
        if isinstance(error, RuntimeError) and type(error).__name__ != "SaveError":
            raise
        return _fail(error, str(error))


def _fail(error: BaseException | None, message: str, code: int = 2) -> int:
    if error is not None and os.environ.get("TE_MODELS_DEBUG"):
        raise error
    rank = f" [rank {os.environ['RANK']}]" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    click.echo(f"te-models{rank}: {' '.join(message.split())}", err=True)
    return code


class Sections(click.Command):
    """A command whose help shows the fields of recipe and config after its own options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in three sections."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Recipe fields": [], "Config fields": []}
        for parameter in self.get_params(ctx):
            name, record = parameter.name, parameter.get_help_record(ctx)
            if record is not None:
                place = (
                    "Recipe fields"
                    if name in recipe_fields()
                    else "Config fields"
                    if name in config_fields()
                    else "Options"
                )
                sections[place].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose a model: --preset or --model, recipe, engine and every field of recipe and config."""
    for name, kind in reversed(config_fields().items()):
        if (scalar := _click_type(kind)) is not None:  # lists with an entry a layer have no flag
            command = _field_option(name, scalar)(command)
    for name, check in reversed(recipe_fields().items()):
        command = _field_option(name, click.Choice([str(c) for c in check]) if isinstance(check, tuple) else check)(
            command
        )
    for option in reversed((
        click.option("--preset", metavar="NAME", help=f"One of {', '.join(list_presets())}."),
        click.option("--model", metavar="DIR", help="A saved model, or the folder of a run (its newest checkpoint)."),
        click.option("--recipe", metavar="NAME|FILE", help=f"One of {', '.join(list_recipes())}, or a TOML file."),
        click.option("--engine", default="auto", show_default=True, metavar="NAME", help="auto, native or emulated."),
        click.option("--device", help="Such as cpu or cuda:1; the first GPU if there is one."),
    )):  # fmt: skip
        command = option(command)
    return command


def _field_option(name: str, kind: Any) -> Callable[..., Any]:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", default=None)
    return click.option(flag, type=kind, default=None)


def _click_type(kind: Any) -> Any:
    """int for `int | None`, and so on; None for what one value cannot say."""
    return next((t for t in (bool, int, float, str) if t is kind or t in getattr(kind, "__args__", ())), None)


def build_model(preset: str | None, model: str | None, options: dict[str, Any], build: Any = None) -> Any:
    """The model that the options choose, made by `build` (CausalLM); None among them means not given."""
    from te_models.model import CausalLM  # noqa: PLC0415

    if (preset is None) == (model is None):
        raise click.UsageError("give either --preset NAME or --model DIR")
    given = {name: _plain(name, value) for name, value in options.items() if value is not None}
    if model is not None:
        return CausalLM.from_pretrained(model, build=build, **given)
    assert preset is not None
    return CausalLM.from_preset(preset, build=build, **given)


def _plain(name: str, value: Any) -> Any:
    """A choice among numbers comes from the command line as a string."""
    check = recipe_fields().get(name)
    return next((c for c in check if str(c) == value), value) if isinstance(check, tuple) else value


@click.group()
@click.version_option(package_name="te-models", prog_name="te-models")
def cli() -> None:
    """Gated-attention models in FP8: Transformer Engine on a GPU, its numbers anywhere."""


@cli.command("list")
def list_command() -> None:
    """Presets and recipes."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    presets = Table(title="presets", title_justify="left", box=None)
    for column in ("name", "parameters", "hidden", "layers", "heads (kv)", "intermediate", "gate"):
        presets.add_column(column, justify="left" if column in ("name", "gate") else "right")
    for name in PRESETS:
        c = get_preset(name)
        heads = f"{c.num_attention_heads} ({c.num_key_value_heads})"
        shape = (f"{c.num_parameters:,}", f"{c.hidden_size}", f"{c.num_hidden_layers}", heads, f"{c.intermediate_size}")
        presets.add_row(name, *shape, c.attention_gate)
    recipes = Table(title="recipes", title_justify="left", box=None)
    for column in ("name", "Transformer Engine class", "native hardware", "what"):
        recipes.add_column(column)
    for name in list_recipes():
        r = get_recipe(name)
        recipes.add_row(name, r.scheme, r.hardware, r.description)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(presets)
    console.print()
    console.print(recipes)


@cli.command(cls=Sections)
@model_options
def plan(preset: str | None, model: str | None, **options: Any) -> None:
    """Which layer runs in what precision, on which engine, and why."""
    from rich.console import Console  # noqa: PLC0415

    if preset is not None:
        options["device"] = options["device"] or "meta"
    Console(width=None if sys.stdout.isatty() else 140).print(build_model(preset, model, options).plan())


def train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option a field of TrainConfig."""
    for name, default in reversed(TRAIN_FIELDS.items()):
        command = click.option(f"--{name.replace('_', '-')}", default=default, show_default=True)(command)
    return command


@cli.command(cls=Sections)
@model_options
@click.option(
    "--activation-checkpointing",
    default="none",
    show_default=True,
    metavar="MODE",
    help="none, selective, full or N: every N-th block.",
)
@click.option("--compile/--no-compile", default=True, help="Fuse elementwise operations (on a GPU).", show_default=True)
@click.option(
    "--data", metavar="PATH", help="Text, JSONL or Parquet, a file or a folder; default: Python's own docs and sources."
)
@click.option(
    "--tokenizer", metavar="PATH", help="A Hugging Face tokenizer.json; default: the model's own, else bytes."
)
@train_options
@click.option("--out", metavar="DIR", help="The run's folder; default: runs/<model>-<recipe>.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out.")
@click.option("--sample-tokens", default=200, show_default=True, help="Length of the sample printed at the end.")
def finetune(preset: str | None, model: str | None, **options: Any) -> None:
    """Fine-tune a model on text; evaluates, saves, draws the loss curve and prints a sample."""
    from te_models.finetune import finetune as run  # noqa: PLC0415

    train = {name: options.pop(name) for name in TRAIN_FIELDS}
    own = {name: options.pop(name) for name in ("data", "tokenizer", "out", "resume", "sample_tokens")}
    if options["recipe"] is None and model is None:
        options["recipe"] = "bf16"
    build = functools.partial(build_model, preset, model, options)
    run(build, device=options["device"], model_folder=model, label=preset, train=train, **own)


@cli.command(cls=Sections)
@model_options
@click.option("--prompt", help="The text to continue; with --chat what to say first.")
@click.option(
    "--chat", is_flag=True, help="Talk: apply the tokenizer's chat template; without --prompt, a line a turn."
)
@click.option("--system", help="With --chat: the system message.")
@click.option(
    "--tokenizer", metavar="PATH", help="A Hugging Face tokenizer.json; default: the model's own, else bytes."
)
@click.option("--max-new-tokens", default=200, show_default=True)
@click.option("--greedy", is_flag=True, help="Take the likeliest token every time.")
@click.option("--temperature", default=0.8, show_default=True)
@click.option("--top-k", type=int, help="Sample from this many likeliest tokens.")
@click.option("--top-p", type=float, help="Sample from the smallest set of this mass.")
@click.option("--min-p", type=float, help="Sample from those at least this times as likely as the likeliest.")
@click.option("--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--seed", type=int)
def generate(
    preset: str | None,
    model: str | None,
    prompt: str | None,
    chat: bool,
    system: str | None,
    tokenizer: str | None,
    **options: Any,
) -> None:
    """Continue a prompt, or talk to a chat model."""
    from te_models.converse import load_chat, tell  # noqa: PLC0415

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_strings", "seed")
    sampling = {name: options.pop(name) for name in names} | {"do_sample": not options.pop("greedy")}
    if prompt is None and not chat:
        raise click.UsageError("give --prompt TEXT, or --chat")
    if prompt == "":
        raise ValueError("the prompt is empty: give at least one token")
    words, template = load_chat(tokenizer, model, chat)
    lines = [prompt] if prompt is not None else (line.rstrip("\n") for line in sys.stdin)
    tell(
        build_model(preset, model, options),
        words,
        template,
        lines,
        system,
        lambda t: click.echo(t, nl=False),
        **sampling,
    )


@cli.command()
@click.option(
    "--model", required=True, metavar="DIR", help="A saved model, a Hugging Face folder, or a name on the hub."
)
@click.option("--out", required=True, metavar="DIR", help="The folder to write.")
@click.option("--format", default="hf", show_default=True, help="hf: for transformers; te: with recipe and FP8 state.")
@click.option("--recipe", metavar="NAME|FILE", help="The recipe to save with (te).")
@click.option("--dtype", help="bfloat16, float16 or float32; default: as saved.")
@click.option("--attention-gate", help="Give an ungated model a gate that changes no output: elementwise or headwise.")
def convert(model: str, out: str, format: str, dtype: str | None, **options: Any) -> None:
    """Rewrite a model between our format and Hugging Face's; its tokenizer comes along."""
    import torch  # noqa: PLC0415

    from te_models.errors import unknown  # noqa: PLC0415
    from te_models.saved import FORMATS  # noqa: PLC0415

    dtypes = ("bfloat16", "float16", "float32")
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if dtype not in (*dtypes, None):
        raise unknown("dtype", dtype, dtypes)
    given = {**options, "engine": "emulated", "device": "cpu", "dtype": dtype and getattr(torch, dtype)}
    built = build_model(None, model, given)
    built.save_pretrained(out, format=format)
    click.echo(f"{out}: {built.config.num_parameters:,} parameters in {str(built.dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    sys.exit(main())
