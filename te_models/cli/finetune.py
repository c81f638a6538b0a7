"""`te-models finetune`: train on text, from data to a printed sample."""

from __future__ import annotations

import functools
from typing import Any

import click

from te_models.cli.options import (
    TRAIN_FIELDS,
    Command,
    build_model,
    compile_option,
    data_option,
    is_given,
    memory_options,
    model_options,
    option,
    out_option,
    tokenizer_option,
    train_options,
)

RUN_OPTIONS = ("data", "streaming", "packing", "data_workers", "tokenizer", "out", "resume", "sample_tokens")


@click.command(cls=Command)
@option(
    "--data",
    metavar="PATH",
    help="Text, JSONL or Parquet: a file, folder, glob or URL; default: Python's documentation and sources.",
)
@out_option("Folder of the run; default: runs/<model>-<recipe>.")
@option("--resume", is_flag=True, help="Continue from the newest checkpoint in --out.")
@train_options()
@model_options
@tokenizer_option
@memory_options(group="Training")
@compile_option
@data_option(
    "--streaming/--no-streaming",
    default=None,
    help="Read the data while training; default: if it exceeds 1 GiB, is compressed, or is a glob or URL.",
)
@data_option(
    "--packing", default="stream", metavar="NAME", help="stream, or documents: attend only within each document."
)
@data_option("--data-workers", default=2, help="Processes that encode streamed data ahead.")
@data_option("--sample-tokens", default=200, help="Length of the sample printed at the end; 0: no sample.")
def finetune(preset: str | None, model: str | None, **options: Any) -> None:
    """Fine-tune a model on text; evaluates, saves, draws the loss curve and prints a sample."""
    from te_models.training.finetune import finetune as run  # noqa: PLC0415  imports torch

    train = {name: options.pop(name) for name in TRAIN_FIELDS}
    own = {name: options.pop(name) for name in RUN_OPTIONS}
    options = {name: value if is_given(name) else None for name, value in options.items()}
    build = functools.partial(build_model, preset, model, options)
    place = dict(device=options["device"], model_folder=model, label=preset, recipe=options["recipe"])
    run(build, **place, train=train, **own)
