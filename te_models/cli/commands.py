"""The command line: te-models list | plan | verify | finetune | generate | bench | convert.

A user's mistake ends with exit code 2 and one line on stderr; set TE_MODELS_DEBUG=1 for the traceback. Heavy imports
happen inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from te_models.config.model import config_fields
from te_models.config.presets import PRESETS, get_preset, list_presets
from te_models.config.recipe import get_recipe, list_recipes, recipe_fields
from te_models.config.training import TrainConfig
from te_models.errors import TeModelsError, UsageError, unknown

TRAIN_FIELDS = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
TRAIN_HELP = {f.name: f.metadata["help"] for f in dataclasses.fields(TrainConfig)}


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
    except TeModelsError as error:
        return _fail(error, str(error), error.exit_code)
    except (ValueError, OSError) as error:  # of Python and of libraries, for bad input
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
        click.option("--fp8-params/--no-fp8-params", default=None, help="Keep the weights of FP8 layers in FP8 alone."),
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


def build_model(
    preset: str | None, model: str | None, options: dict[str, Any], build: Any = None, **defaults: Any
) -> Any:
    """The model that the options choose, made by `build` (CausalLM); None among them means not given.

    `defaults`: options of CausalLM that hold where none is given, as in a resumed run.
    """
    from te_models.causal_lm import CausalLM  # noqa: PLC0415

    if (preset is None) == (model is None):
        raise click.UsageError("give either --preset NAME or --model DIR")
    given = {name: _plain(name, value) for name, value in options.items() if value is not None}
    if "recipe" in given:
        defaults.pop("fp8_params", None)  # another recipe may have no such weights
    given = {**defaults, **given}
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
@click.option("--memory", is_flag=True, help="The predicted memory of training instead, and what fits on which GPU.")
@click.option("--batch-size", default=TRAIN_FIELDS["batch_size"], show_default=True, help="With --memory, as the rest.")
@click.option("--seq-len", default=TRAIN_FIELDS["seq_len"], show_default=True)
@click.option("--gradient-accumulation", default=TRAIN_FIELDS["gradient_accumulation"], show_default=True)
@click.option("--optimizer", default=TRAIN_FIELDS["optimizer"], show_default=True)
@click.option("--activation-checkpointing", default="none", show_default=True, metavar="MODE")
@click.option("--activation-offload/--no-activation-offload", default=False)
@click.option("--gpus", default=1, show_default=True, help="Among how many FSDP shares the model.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
def plan(preset: str | None, model: str | None, memory: bool, as_json: bool, **options: Any) -> None:
    """Which layer runs in what precision, on which engine, and why; or what memory training takes."""
    names = ("batch_size", "seq_len", "gradient_accumulation", "optimizer", "gpus")
    if not memory and (given := [n for n in names if _given(n)]):
        raise click.UsageError(f"--{given[0].replace('_', '-')} changes no precision: add --memory, or leave it out")
    training = {name: options.pop(name) for name in names}
    if preset is not None:
        options["device"] = options["device"] or "meta"
    from te_models.training.report import speed_rows  # noqa: PLC0415

    built = build_model(preset, model, options)
    _show(built.plan_memory(**training) if memory else built.plan(), as_json)
    if not (memory or as_json):
        click.echo("\n" + "\n".join(f"{name}: {text}" for name, text in speed_rows(built, TrainConfig()).items()))


def _given(name: str) -> bool:
    """Whether the user gave this option."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _show(result: Any, as_json: bool) -> None:
    """Print what has tables and `to_dict`."""
    from rich.console import Console  # noqa: PLC0415

    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(result, highlight=False)


@cli.command(cls=Sections)
@model_options
@click.option("--batch-size", default=TRAIN_FIELDS["batch_size"], show_default=True)
@click.option("--seq-len", default=TRAIN_FIELDS["seq_len"], show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def verify(preset: str | None, model: str | None, batch_size: int, seq_len: int, as_json: bool, **options: Any) -> int:
    """Whether FP8 really ran in each GEMM, how exact it was, and whether it paid on this device at this size."""
    from te_models.inspect.verify import sample_config  # noqa: PLC0415
    from te_models.inspect.verify import verify as run  # noqa: PLC0415

    if options["recipe"] is None and model is None:
        options["recipe"] = "delayed"
    if preset is None:
        found = run(build_model(None, model, options), batch_size, seq_len)
    else:  # the plan is the whole model's, the trial that of one layer of each precision
        whole = build_model(preset, model, {**options, "engine": "emulated", "device": "meta"})
        place = dict(engine=options["engine"], device=options["device"])
        sample = type(whole)(sample_config(whole.config, whole.recipe), recipe=whole.recipe, **place)
        found = run(sample, batch_size, seq_len, whole.plan())
    _show(found, as_json)
    return 1 if found.failures else 0


def train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option a field of TrainConfig."""
    for name, default in reversed(TRAIN_FIELDS.items()):
        flag = f"--{name.replace('_', '-')}"
        flag = f"{flag}/--no-{flag[2:]}" if isinstance(default, bool) else flag
        command = click.option(flag, default=default, show_default=True, help=TRAIN_HELP[name])(command)
    return command


@cli.command(cls=Sections)
@model_options
@click.option(
    "--activation-checkpointing",
    default="none",
    show_default=True,
    metavar="MODE",
    help="none, selective (most of each MLP), full or N: every N-th block.",
)
@click.option(
    "--activation-offload/--no-activation-offload",
    default=False,
    show_default=True,
    help="What blocks keep for backward waits in the CPU's memory.",
)
@click.option("--compile/--no-compile", default=True, help="Fuse elementwise operations (on a GPU).", show_default=True)
@click.option(
    "--data",
    metavar="PATH",
    help="Text, JSONL or Parquet: file, folder, glob or URL; default: Python's docs and sources.",
)
@click.option(
    "--streaming/--no-streaming",
    default=None,
    help="Read the data as it goes; default: if it is larger than a GiB, compressed, a glob or a URL.",
)
@click.option(
    "--packing",
    default="stream",
    show_default=True,
    metavar="NAME",
    help="stream, or documents: attend inside each alone.",
)
@click.option("--data-workers", default=2, show_default=True, help="Processes that encode streamed data ahead.")
@click.option(
    "--tokenizer", metavar="PATH", help="A Hugging Face tokenizer.json; default: the model's own, else bytes."
)
@train_options
@click.option("--out", metavar="DIR", help="The run's folder; default: runs/<model>-<recipe>.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out.")
@click.option("--sample-tokens", default=200, show_default=True, help="Length of the sample printed at the end.")
def finetune(preset: str | None, model: str | None, **options: Any) -> None:
    """Fine-tune a model on text; evaluates, saves, draws the loss curve and prints a sample."""
    from te_models.training.finetune import finetune as run  # noqa: PLC0415

    train = {name: options.pop(name) for name in TRAIN_FIELDS}
    names = ("data", "streaming", "packing", "data_workers", "tokenizer", "out", "resume", "sample_tokens")
    own = {name: options.pop(name) for name in names}
    options = {name: value if _given(name) else None for name, value in options.items()}
    build = functools.partial(build_model, preset, model, options)
    place = dict(device=options["device"], model_folder=model, label=preset, recipe=options["recipe"])
    run(build, **place, train=train, **own)


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
    from te_models.cli.generate import load_chat, tell  # noqa: PLC0415

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_strings", "seed")
    sampling = {name: options.pop(name) for name in names} | {"do_sample": not options.pop("greedy")}
    if prompt is None and not chat:
        raise click.UsageError("give --prompt TEXT, or --chat")
    if prompt == "":
        raise UsageError("the prompt is empty: give at least one token")
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


@cli.command(cls=Sections)
@model_options
@click.option(
    "--recipes", default="bf16,delayed,current", show_default=True, help="With +fused, +eager, ...: a way to run."
)
@click.option("--peers", default="none", show_default=True, help="torch, torchao, te-layer, te-layer-bf16.")
@click.option("--batch-size", default=8, show_default=True)
@click.option("--seq-len", default=2048, show_default=True)
@click.option("--steps", default=15, show_default=True, help="Timed rounds; every variant runs once in each.")
@click.option("--warm-up", default=3, show_default=True, help="Steps of each variant that do not count.")
@click.option("--compile/--no-compile", default=True, help="Fuse elementwise operations (on a GPU).", show_default=True)
@click.option("--out", metavar="DIR", help="Write bench.json and bench.png there.")
def bench(preset: str | None, model: str | None, recipes: str, peers: str, out: str | None, **options: Any) -> None:
    """Time a training step under several recipes, beside other ways to train, in one process."""
    import torch  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    from te_models.inspect.bench import bench as run  # noqa: PLC0415
    from te_models.inspect.bench_report import bench_table, write_bench  # noqa: PLC0415

    if preset is None or model is not None or options.pop("recipe") is not None:
        raise click.UsageError("bench takes --preset NAME and --recipes A,B,...")
    given = {name: _plain(name, value) for name, value in options.items() if value is not None}
    config = get_preset(preset, **{name: given.pop(name) for name in list(given) if name in config_fields()})
    device = torch.device(given.pop("device", None) or ("cuda" if torch.cuda.is_available() else "cpu"))
    console = Console(width=None if sys.stdout.isatty() else 160)
    names = [
        [name.strip() for name in text.split(",") if name.strip() not in ("", "none")] for text in (recipes, peers)
    ]
    with console.status("") as status:
        result = run(config, names[0], names[1], device=device, progress=status.update, **given)
    console.print(bench_table(result))
    if out is not None:
        console.print(f"plot: {write_bench(result, out, preset)}", soft_wrap=True, markup=False, highlight=False)


@cli.command()
@click.option("--model", metavar="DIR", help="A saved model, a Hugging Face folder, or a name on the hub.")
@click.option("--preset", metavar="NAME", help="The shape of --te-checkpoint.")
@click.option(
    "--te-checkpoint", metavar="PATH", help="A state_dict of Transformer Engine's modules: .pt or safetensors."
)
@click.option("--out", required=True, metavar="DIR", help="The folder to write.")
@click.option("--format", default="hf", show_default=True, help="hf: for transformers; te: with recipe and FP8 state.")
@click.option("--recipe", metavar="NAME|FILE", help="The recipe to save with (te).")
@click.option("--dtype", help="bfloat16, float16 or float32; default: as saved.")
@click.option("--attention-gate", help="Give an ungated model a gate that changes no output: elementwise or headwise.")
def convert(
    model: str | None, preset: str | None, te_checkpoint: str | None, out: str, format: str, dtype: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Rewrite a model between our format and Hugging Face's; its tokenizer comes along."""
    import torch  # noqa: PLC0415

    from te_models.checkpoint.pretrained import FORMATS, load_te_checkpoint, read_te_checkpoint  # noqa: PLC0415

    dtypes = ("bfloat16", "float16", "float32")
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if dtype not in (*dtypes, None):
        raise unknown("dtype", dtype, dtypes)
    given = {**options, "engine": "emulated", "device": "cpu", "dtype": dtype and getattr(torch, dtype)}
    found = None
    if (preset is None) != (te_checkpoint is None):
        raise click.UsageError("--preset NAME and --te-checkpoint PATH go together")
    if preset is not None and te_checkpoint is not None:
        found = read_te_checkpoint(te_checkpoint)
        given["recipe"] = options["recipe"] or found.recipe(get_preset(preset).num_hidden_layers)
    built = build_model(preset, model, given)
    if found is not None:
        load_te_checkpoint(built, found)
    built.save_pretrained(out, format=format)
    click.echo(f"{out}: {built.config.num_parameters:,} parameters in {str(built.dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    sys.exit(main())
