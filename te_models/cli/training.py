"""`te-models pretrain`, which trains a preset from random weights, and `te-models finetune`, for an existing model."""

import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from te_models.cli.from_record import advice_of, from_record_option, shape_of
from te_models.cli.options import (
    SHAPE_NAMES,
    Command,
    Decorator,
    chained,
    given_options,
    is_given,
    model_option,
    option,
    out_option,
    preset_option,
    setting_option,
    show,
)
from te_models.config.shipped import list_shipped
from te_models.config.shipped_runs import run_file
from te_models.errors import UsageError
from te_models.training.run_settings import resumed_settings, run_settings
from te_models.training.settings import LEARNING_RATE, SETTINGS, TABLES, RunSettings

# The order of the groups of options in the help.
ORDER = ("training", "recipe", "lora", "model", "data", "run")
# Settings whose options are declared below, one by one.
DECLARED_BELOW = ("data", "out", "command", "preset", "model")
INTERRUPTED = 130  # exit code after Ctrl-C, as shells give it; SIGTERM asks to save and stop, which is no failure


def training_options(command: str) -> Decorator:
    """Add the options of a run: every setting but those that the command itself declares."""
    rate = _short(LEARNING_RATE[command])
    if command == "finetune":
        rate += f", with --lora {_short(LEARNING_RATE['lora'])}"
    # `pretrain` refuses adapters with a reason of its own, so it has their options, but does not list them.
    # Setting -> attributes of its option that differ from the setting's.
    attributes: dict[str, dict[str, object]] = {}
    for name in TABLES["lora"]:
        attributes[name] = {"hidden": command == "pretrain"}
    attributes["learning_rate"] = {"show_default": rate}
    attributes["recipe"] = {"default": None, "show_default": False}
    names = []
    for title in ORDER:
        for name in TABLES[title]:
            if name not in DECLARED_BELOW:
                names.append(name)
    return chained(
        setting_option("data"),
        out_option(SETTINGS["out"].help),
        option(
            "--resume",
            is_flag=False,
            flag_value="",
            metavar="[DIR]",
            help="Continue the run in this folder; without DIR that in --out, or the only one of the model.",
        ),
        from_record_option,
        *(setting_option(name, **attributes.get(name, {})) for name in (*names, *SHAPE_NAMES)),
    )


def _short(rate: float) -> str:
    """Return a learning rate as people write it, such as 2e-5."""
    return f"{rate:.0e}".replace("e-0", "e-")


def run_training(
    command: str, file: str | None, resume: str | None, options: Mapping[str, Any]
) -> int:
    """Run `command` with the options that the user gave; return the exit code."""
    from_record = options["from_record"]
    options = {name: value for name, value in options.items() if name != "from_record"}
    user_options = given_options({name: value for name, value in options.items() if is_given(name)})
    _check_places(file, resume, user_options)
    command_line = click.get_current_context().obj or ""  # which main() noted
    if from_record is not None and resume is not None:
        raise UsageError(
            f"--from-record {from_record} chooses the recipe of a new run: leave it out of --resume"
        )
    # In Python and in the file of a run 0 means that the steps decide.
    if user_options.get("epochs") == 0 and "steps" not in user_options:
        raise UsageError(
            "--epochs 0 trains nothing: give passes over the data, such as 1, or --steps"
        )
    if from_record is not None:
        # Preset and shape may be in the file.
        settings = run_settings(command, user_options, Path(file) if file is not None else None)
        shape = {name: settings.build[name] for name in TABLES["shape"] if name in settings.build}
        config = shape_of(settings.preset, settings.model, shape)
        advice = advice_of(from_record, config, {**options, **settings.build})
        user_options["recipe"] = advice.recipe
        # Under torchrun every process reads the record, and one prints.
        if os.environ.get("RANK", "0") == "0":
            show(advice, as_json=False)
    if resume is None:
        settings = run_settings(
            command, user_options, Path(file) if file is not None else None, command_line
        )
        _ask_for_data(settings)
    else:
        settings = resumed_settings(
            command, user_options, Path(resume) if resume else None, command_line
        )
    # Last: importing torch takes seconds, and a mistake in the options should be told at once.
    from te_models.training.finetune import finetune  # noqa: PLC0415  imports torch

    result = finetune(settings, resume=resume is not None)
    return INTERRUPTED if result.signal == signal.SIGINT else 0


def _check_places(file: str | None, resume: str | None, user_options: Mapping[str, Any]) -> None:
    """Raise a UsageError if the paths of a run, of its settings, of a model and of data are mixed up.

    Args:
        file: the argument RUN.TOML.
        resume: the value of --resume; "" without a folder.
        user_options: the settings that the user gave.
    """
    out = user_options.get("out")
    model = user_options.get("model")
    # By the real paths, since a link may lead to the same folder.
    if out is not None and model is not None and os.path.realpath(out) == os.path.realpath(model):
        raise UsageError(
            f"--out {out} is the folder of the model, whose place the run would take: give another"
        )
    if file is not None and not Path(file).exists():
        raise UsageError(
            f"unexpected {file}: the one argument is RUN.TOML, a file of settings, and this is no file"
        )
    if resume is not None and file is not None:
        raise UsageError(f"give either {file} or --resume: a run's folder has its own run.toml")
    if resume and out is not None:
        once = [shlex.join(["--resume", resume]), shlex.join(["--resume", "--out", str(out)])]
        raise UsageError(f"give the folder once: {' or '.join(once)}")
    if file is None or not Path(file).is_dir():
        return
    if Path(file, "run.toml").exists():
        again = shlex.quote(f"{file}/run.toml")
        raise UsageError(
            f"{file} is a folder: {again} runs it once more, and --resume {shlex.quote(file)} continues it"
        )
    folder = shlex.quote(file)
    raise UsageError(
        f"{file} is a folder: a model is given as --model {folder}, data as --data {folder}"
    )


def _ask_for_data(settings: RunSettings) -> None:
    """Raise a UsageError if the user gives a model and no data: the default data suits only models that we ship."""
    own_model = settings.model is not None and settings.model not in list_shipped()
    if own_model and not settings.data.data:
        raise UsageError(
            "give --data PATH, the records or texts to learn; python-docstrings (records) and python-docs (texts) are "
            "on every machine"
        )


@click.command(cls=Command)
@click.argument("file", required=False, metavar="[RUN.TOML]")
@preset_option
@option(
    "--run", metavar="NAME", help="In place of RUN.TOML: a run that `te-models list --runs` names."
)
@option("--model", hidden=True, help="Refused: finetune starts from a model.")
@training_options("pretrain")
def pretrain(file: str | None, run: str | None, resume: str | None, **options: object) -> int:
    """Train a preset from random weights.

    Evaluates, saves, draws the loss curve, and continues three openings of held-out texts.

    RUN.TOML is the record of an earlier run, or a file of your own like it, also as .yaml; options override its
    settings.
    """
    if run is not None:
        if file is not None or resume is not None:
            raise UsageError(
                f"give --run {run}, a RUN.TOML or --resume: each has all settings of a run"
            )
        file = str(run_file(run))
    return run_training("pretrain", file, resume, options)


@click.command(cls=Command)
@click.argument("file", required=False, metavar="[RUN.TOML]")
@model_option
@option("--preset", hidden=True, help="Refused: a preset has no weights.")
@training_options("finetune")
def finetune(file: str | None, resume: str | None, **options: object) -> int:
    """Fine-tune a model on your data, in full or with --lora.

    Evaluates, saves, draws the loss curve, and prints answers to held-out prompts before and after.

    RUN.TOML is the record of an earlier run, or a file of your own like it, also as .yaml; options override its
    settings.
    """
    return run_training("finetune", file, resume, options)
