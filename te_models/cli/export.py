"""`te-models export`: write a quantized checkpoint for a server."""

import click

from te_models.cli.before_tuning import base_model, base_option, rounding_option
from te_models.cli.convert import with_master_weights
from te_models.cli.options import (
    Command,
    build_trained_model,
    model_options,
    one_source_option,
    option,
    out_option,
    overwrite_option,
    refuse_all_but,
    refuse_to_replace,
    refuse_without,
    setting_option,
    setting_options,
    show_choice,
    show_line,
)
from te_models.config.settings import EVERYDAY
from te_models.errors import check_known

OF_DATA = ("batches", "seq_len", "columns", "truncate", "tokenizer")


@click.command(cls=Command)
@out_option("Folder to write.", required=True)
@overwrite_option
@option(
    "--format",
    help="Format: fp8-block, fp8-tensor, fp8-channel, mxfp8, nvfp4, bf16, or stored, which copies a run's base "
    "unchanged and its adapters. Default: fp8-block, or fp8-channel for a "
    "model of which servers read no blocks, since its sizes are no multiples of 128.",
)
@one_source_option("Text or records that set the scales of inputs, for fp8-tensor and nvfp4.")
@option("--batches", default=8, help="Sequences of --data to measure on.")
@option("--seq-len", default=512, help="Tokens per sequence of --data.")
@setting_options("columns", "truncate", group=EVERYDAY)
@rounding_option
@base_option
@model_options
@setting_option("tokenizer")
def export(
    preset: str | None,
    model: str | None,
    out: str,
    overwrite: bool,
    format: str | None,
    data: str | None,
    batches: int,
    seq_len: int,
    columns: str,
    truncate: str,
    rounding: str,
    base: str | None,
    tokenizer: str | None,
    **options: object,
) -> None:
    """Write a quantized model for vLLM, SGLang and transformers."""
    from te_models.interop.hub import local_folder  # noqa: PLC0415
    from te_models.saving.checkpoint_choice import ADAPTER_FOLDER  # noqa: PLC0415
    from te_models.saving.pretrained import adapter_folder  # noqa: PLC0415
    from te_models.serving.export import default_format  # noqa: PLC0415  imports torch
    from te_models.serving.formats import FORMATS  # noqa: PLC0415
    from te_models.serving.parity import read_batches, read_ids  # noqa: PLC0415
    from te_models.serving.unchanged_base import UNCHANGED, export_unchanged  # noqa: PLC0415

    if format is not None:
        # Before the model is read, which may take minutes.
        check_known("format", format, [*FORMATS, UNCHANGED])
    if format == UNCHANGED:
        if model is None:
            raise click.UsageError(
                f"--format {UNCHANGED} writes a base with adapters: give --model"
            )
        refuse_all_but(
            ("model", "out", "format"),
            f"has no part in --format {UNCHANGED}, which copies a base unchanged",
        )
        show_choice(model)
        files = export_unchanged(adapter_folder(local_folder(model)), out)
        show_line(
            f"{out}: {len(files)} files of the base, unchanged; adapters in {out}/{ADAPTER_FOLDER}"
        )
        return
    refuse_without("--data PATH", data, OF_DATA)
    refuse_to_replace(out, overwrite, model)
    if format is not None and FORMATS[format].storage is None:
        options = with_master_weights(model, options)
    built = build_trained_model(preset, model, options)
    if format is None:
        format = default_format(built, built.origin)
    if data is not None and not FORMATS[format].static:
        choices = " or ".join(name for name in FORMATS if FORMATS[name].static)
        raise click.UsageError(
            f"--data sets the scales of inputs, and {format} stores none: leave it out, or choose {choices}"
        )
    calibration = None
    if data is not None:
        read = read_batches(
            built,
            data,
            tokenizer=tokenizer or model,
            count=batches,
            seq_len=seq_len,
            columns=columns,
            truncate=truncate,
        )
        calibration = read_ids(read)
    # After the data: a mistake in it should not cost the time of reading a second model.
    before = base_model(built, model, base)
    result = built.export(
        out, format=format, calibration=calibration, rounding=rounding, base=before
    )
    show_line(
        f"{out}: {format}, {len(result.quantized)} linears quantized, {len(result.ignored)} not"
    )
    if result.survival is not None:
        for line in result.survival.lines(rounding):
            show_line(line)
    for note in result.notes:
        show_line(f"note: {note}")
