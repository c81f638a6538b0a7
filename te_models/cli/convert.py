"""`te-models convert`: rewrite a model in another format."""

from collections.abc import Mapping
from pathlib import Path

import click

from te_models.cli.options import (
    Command,
    build_model,
    is_given,
    option,
    out_option,
    overwrite_option,
    refuse_to_replace,
    show_line,
)
from te_models.config.presets import get_preset
from te_models.errors import check_known


@click.command(cls=Command)
@option("--model", metavar="DIR", help="Saved model, Hugging Face folder, or name on the hub.")
@out_option("Folder to write.", required=True)
@overwrite_option
@option("--format", default="hf", help="hf: for transformers; te: with recipe and FP8 state.")
@option("--recipe", metavar="NAME|FILE", help="Recipe to save with the model (te).")
@option("--dtype", help="bfloat16, float16 or float32; default: as saved.")
@option(
    "--attention-gate",
    help="Give an ungated model a gate that changes no output: elementwise or headwise.",
)
@option(
    "--beside",
    metavar="DIR",
    help="Folder of a multimodal release, whose other tensors are copied (hf).",
)
@option(
    "--te-checkpoint",
    metavar="PATH",
    help="state_dict of Transformer Engine modules: .pt or safetensors.",
)
@option("--preset", metavar="NAME", help="Shape of --te-checkpoint.")
def convert(
    model: str | None,
    preset: str | None,
    te_checkpoint: str | None,
    out: str,
    overwrite: bool,
    format: str,
    dtype: str | None,
    beside: str | None,
    **options: object,
) -> None:
    """Convert a model between te-models and Hugging Face.

    Its tokenizer comes along.
    """
    from te_models.interop.te_checkpoint import read_te_checkpoint  # noqa: PLC0415
    from te_models.model.dtypes import DTYPES  # noqa: PLC0415
    from te_models.saving.load_model import load_te_checkpoint  # noqa: PLC0415
    from te_models.saving.pretrained import FORMATS  # noqa: PLC0415

    check_known("format", format, FORMATS)
    if format != "te" and options["recipe"] is not None:
        raise click.UsageError(
            f"--format {format} has no place for a recipe: leave --recipe out, or give --format te"
        )
    refuse_to_replace(out, overwrite, model, format)
    if beside is not None and Path(beside).resolve() == Path(out).resolve():
        raise click.UsageError(f"--out {out} is the folder of --beside: give another one")
    if dtype is not None:
        check_known("dtype", dtype, DTYPES)
    if (preset is None) != (te_checkpoint is None):
        raise click.UsageError("--preset NAME and --te-checkpoint PATH go together")
    # Nothing is computed, so any machine will do, and host memory is usually the larger.
    keywords = {**options, "engine": "emulated", "device": "cpu", "dtype": dtype and DTYPES[dtype]}
    te_state = None if te_checkpoint is None else read_te_checkpoint(te_checkpoint)
    if preset is not None and te_state is not None:
        keywords["recipe"] = options["recipe"] or te_state.recipe(
            get_preset(preset).num_hidden_layers
        )
    if format == "hf":
        keywords = with_master_weights(model, keywords)
    built = build_model(preset, model, keywords, merge=True)
    if te_state is not None:
        load_te_checkpoint(built, te_state)
    built.save_pretrained(out, format=format, beside=beside)
    show_line(
        f"{out}: {built.config.num_parameters:,} parameters in {str(built.dtype).removeprefix('torch.')}"
    )


def with_master_weights(model: str | None, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a model whose weights are to be written in 16 bits or more.

    The checkpoint of a run with --fp8-params has the optimizer's weights in BF16, of which the FP8 weights are a
    rounding. Adapters were tuned on the FP8 weights of their base, and go with them.
    """
    from te_models.interop.hub import local_folder  # noqa: PLC0415  imports torch
    from te_models.saving.pretrained import adapter_folder  # noqa: PLC0415

    if model is None or is_given("fp8_params"):
        return dict(options)
    if adapter_folder(local_folder(model)) is not None:
        return dict(options)
    return {**options, "fp8_params": False}
