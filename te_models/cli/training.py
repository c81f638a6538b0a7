"""Options that `te-models pretrain` and `te-models finetune` share, and the run that they describe."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from te_models.cli.options import (
    Decorator,
    build_options,
    chained,
    compile_option,
    data_option,
    given_options,
    is_given,
    memory_options,
    option,
    out_option,
    recipe_option,
    tokenizer_option,
    train_options,
)
from te_models.config.data import DATA_HELP
from te_models.errors import UsageError
from te_models.training.settings import resumed_settings, run_settings

INTERRUPTED = 130  # exit code after Ctrl-C, as shells give it; SIGTERM asks to save and stop, which is no failure


def training_options(learning_rate: str, lora: bool) -> Decorator:
    """Add the options of a run; `learning_rate` is the text of its default, `lora` shows those of adapters."""
    lora_option = functools.partial(option, hidden=not lora)
    return chained(
        option("--data", multiple=True, metavar="PATH[:WEIGHT]", help=DATA_HELP["data"]),
        out_option("Folder of the run; default: runs/<model>-<recipe>."),
        option("--resume", is_flag=False, flag_value="", metavar="[DIR]",
               help="Continue the run in this folder; without DIR that in --out, or the only one of the model."),
        train_options(learning_rate=learning_rate, parallel="auto"),
        recipe_option,
        lora_option("--lora", type=int, metavar="RANK",
               help="Train low-rank adapters of this rank, such as 16, and freeze the model's weights."),
        lora_option("--lora-targets", metavar="NAMES", group="LoRA",
               help="Modules with adapters, such as q_proj,v_proj; default: all linears of every block."),
        lora_option("--lora-alpha", type=float, group="LoRA",
               help="Updates are multiplied by alpha / rank; default: twice the rank."),
        lora_option("--lora-dropout", type=float, default=0.0, group="LoRA",
               help="Probability with which an adapter's input is dropped."),
        lora_option("--merge/--no-merge", default=False, group="LoRA",
               help="At the end, also save the model with the adapters in its weights, in the folder merged/."),
        lora_option("--merge-dtype", metavar="DTYPE", group="LoRA",
               help="Dtype of these weights: bfloat16, float16 or float32, in which no small update vanishes; default: "
               "the model's."),
        build_options,
        tokenizer_option,
        memory_options(group="Training"),
        compile_option,
        data_option("--eval-data", multiple=True, metavar="PATH", help=DATA_HELP["eval_data"]),
        data_option("--eval-split", type=float, metavar="SHARE", help=DATA_HELP["eval_split"]),
        data_option("--columns", metavar="NAMES", help=DATA_HELP["columns"]),
        data_option("--truncate", metavar="WAY", help=DATA_HELP["truncate"]),
        data_option("--packing", metavar="NAME", help=DATA_HELP["packing"]),
        data_option("--chat-template", metavar="FILE", help=DATA_HELP["chat_template"]),
        data_option("--streaming/--no-streaming", default=None, help=DATA_HELP["streaming"]),
        data_option("--data-workers", type=click.IntRange(min=0), default=2, help=DATA_HELP["num_workers"]),
        option("--log", metavar="NAMES", group="Evaluation and checkpoints",
               help="Send metrics also to tensorboard, wandb or trackio: one or more names, separated by commas."),
        data_option("--sample-tokens", type=click.IntRange(min=0), default=200,
                    help="Length of the samples printed at the end; 0: none. By default they also take at most a tenth "
                    "of the run's time."),
    )  # fmt: skip


def run_training(command: str, file: str | None, resume: str | None, options: Mapping[str, Any]) -> int:
    """Run `command` with the options that the user gave; return the exit code."""
    given = given_options({name: value for name, value in options.items() if is_given(name)})
    if resume is not None and file is not None:
        raise UsageError(f"give either {file} or --resume: a run's folder has its own run.toml")
    if resume and "out" in given:
        raise UsageError(f"give the folder once: --resume {resume} or --resume --out {given['out']}")
    if file is not None and Path(file).is_dir():
        raise UsageError(f"{file} is a folder: {file}/run.toml runs it once more, and --resume {file} continues it")
    called = click.get_current_context().obj or ""  # as main() was called
    if resume is None:
        settings = run_settings(command, given, Path(file) if file is not None else None)
    else:
        settings = resumed_settings(command, given, Path(resume) if resume else None)
    from te_models.training.finetune import finetune  # noqa: PLC0415  imports torch

    settings = dataclasses.replace(settings, called=called)
    return INTERRUPTED if finetune(settings, resume=resume is not None).signal == signal.SIGINT else 0
