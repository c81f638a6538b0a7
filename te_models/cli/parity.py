"""`te-models parity`: the difference between a model as trained and as served."""

import click

from te_models.cli.before_tuning import base_model, base_option, rounding_option
from te_models.cli.options import (
    Command,
    build_trained_model,
    is_given,
    json_option,
    model_options,
    one_source_option,
    option,
    setting_option,
    setting_options,
    show,
)
from te_models.config.settings import EVERYDAY


@click.command(cls=Command)
@option(
    "--export",
    "exports",
    multiple=True,
    metavar="FORMAT|DIR",
    help="Format of `te-models export`, or an exported folder; may be repeated; default: every format.",
)
@one_source_option("Text or records to compare on, as for finetune --data.", required=True)
@option("--batches", default=8, help="Sequences of --data.")
@option("--seq-len", default=512, help="Tokens per sequence.")
@setting_options("columns", "truncate", group=EVERYDAY)
@rounding_option
@base_option
@json_option
@model_options
@setting_option("tokenizer")
def parity(
    preset: str | None,
    model: str | None,
    exports: tuple[str, ...],
    data: str,
    batches: int,
    seq_len: int,
    columns: str,
    truncate: str,
    rounding: str,
    base: str | None,
    as_json: bool,
    tokenizer: str | None,
    **options: object,
) -> None:
    """Compare a model as it will be served with the trained one.

    Measures how far apart their probabilities are; serving is emulated.
    """
    from te_models.serving.formats import FORMATS  # noqa: PLC0415  imports torch
    from te_models.serving.parity import parity as run  # noqa: PLC0415
    from te_models.serving.parity import read_batches  # noqa: PLC0415

    if exports and not any(name in FORMATS for name in exports):
        for name in ("rounding", "base"):
            if is_given(name):
                raise click.UsageError(
                    f"--{name} is about exports that parity writes, and --export names written ones alone: leave it out"
                )
    built = build_trained_model(preset, model, options)
    token_batches = read_batches(
        built,
        data,
        tokenizer=tokenizer or model,
        count=batches,
        seq_len=seq_len,
        columns=columns,
        truncate=truncate,
    )
    result = run(
        built,
        built.origin,
        exports=exports,
        batches=token_batches,
        rounding=rounding,
        base=base_model(built, model, base),
    )
    show(result, as_json)
