"""`te-models data preview`: look at data as a run would learn it."""

from pathlib import Path

import click

from te_models.cli.options import (
    Command,
    json_option,
    option,
    setting_option,
    setting_options,
    show,
    show_line,
)
from te_models.config.data import DataConfig
from te_models.config.model import ModelConfig
from te_models.config.settings import EVERYDAY
from te_models.errors import TeModelsError
from te_models.files.atomic import replace_text


@click.group()
def data() -> None:
    """Look at data before a run."""


@data.command(cls=Command)
@setting_option("data", help="File, folder, glob, URL or Hub dataset. Repeatable.")
@setting_option(
    "model", help="Model whose tokenizer, chat template and context are used; default: bytes."
)
@option("--records", default=3, help="Records to show as text.")
@option("--limit", default=10_000, help="Most records to read.")
@option(
    "--html",
    metavar="FILE",
    help="Write the preview to this file as well, as a page for a browser.",
)
@setting_options("seq_len", "tokenizer", "chat_template", "columns", group=EVERYDAY)
@setting_options("truncate", "special_tokens", "on_bad_record", group=EVERYDAY)
@json_option
def preview(
    data: tuple[str, ...] | None,
    model: str | None,
    records: int,
    limit: int,
    html: str | None,
    seq_len: int,
    tokenizer: str | None,
    as_json: bool,
    **options: str,
) -> None:
    """Show the first records with the learned parts marked.

    Counts lengths, and what a run would cut, skip or leave out.
    """
    settings = DataConfig(data=data or (), **options)
    from te_models.data.dataset import check_fit  # noqa: PLC0415  imports torch
    from te_models.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from te_models.inspect.data_preview import preview as run  # noqa: PLC0415
    from te_models.inspect.data_preview_html import preview_html  # noqa: PLC0415

    text_tokenizer = load_tokenizer(tokenizer or model)
    config = None if model is None else _shape(model)
    context = None
    if config is not None:
        context = config.longest_sequence
        # A run gives the model rows for --special-tokens, and for no others.
        check_fit(text_tokenizer, config)
    result = run(settings, text_tokenizer, seq_len, records=records, limit=limit, context=context)
    if html is not None:
        replace_text(Path(html), preview_html(result))
    show(result, as_json)
    if html is not None:
        # With --json standard output holds one JSON document and nothing else.
        show_line(f"\npage: {html}", err=as_json)


def _shape(model: str) -> ModelConfig | None:
    """Return the shape of a model; say why, and return None, if that is not known."""
    from te_models.saving.pretrained import trained_shape  # noqa: PLC0415  imports torch

    try:
        return trained_shape(model)
    except TeModelsError as error:
        # A folder may hold a tokenizer alone, or adapters that do not tell the shape of their base.
        show_line(
            f"the context of {model} is not known, so --seq-len alone says what fits: {error}",
            err=True,
        )
        return None
