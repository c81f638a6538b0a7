"""`te-models pretrain`: train a preset from random weights."""

from __future__ import annotations

import click

from te_models.cli.options import Command, option, preset_option
from te_models.cli.training import run_training, training_options


@click.command(cls=Command)
@click.argument("file", required=False, metavar="[RUN.TOML]")
@preset_option
@option("--model", hidden=True, help="Refused: finetune starts from a model.")
@training_options("pretrain")
def pretrain(file: str | None, resume: str | None, **options: object) -> int:
    """Train a preset from random weights.

    Evaluates, saves, draws the loss curve, and continues three openings of held-out texts.

    RUN.TOML is the record of an earlier run, or a file of your own like it; options override its settings.
    """
    return run_training("pretrain", file, resume, options)
