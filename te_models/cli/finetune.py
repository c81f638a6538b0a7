"""`te-models finetune`: train an existing model on your own data."""

from __future__ import annotations

import click

from te_models.cli.options import Command, model_option, option
from te_models.cli.training import run_training, training_options


@click.command(cls=Command)
@click.argument("file", required=False, metavar="[RUN.TOML]")
@model_option
@option("--preset", hidden=True, help="Refused: a preset has no weights.")
@training_options("finetune")
def finetune(file: str | None, resume: str | None, **options: object) -> int:
    """Fine-tune a model on your data, in full or with --lora.

    Evaluates, saves, draws the loss curve, and prints answers to held-out prompts before and after.

    RUN.TOML is the record of an earlier run, or a file of your own like it; options override its settings.
    """
    return run_training("finetune", file, resume, options)
