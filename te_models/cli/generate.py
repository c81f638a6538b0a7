"""`te-models generate`: continue a prompt, or answer lines of a conversation."""

import click

from te_models.cli.options import Command, build_model, model_options, option, setting_option
from te_models.cli.sampling import (
    chat_template_option,
    input_line,
    sampling_options,
    show_piece,
    take_sampling,
    utf8_text,
)
from te_models.errors import UsageError


@click.command(cls=Command)
@option("--prompt", callback=utf8_text, help="Text to continue; with --chat, the user's message.")
@option(
    "--chat",
    is_flag=True,
    help="Apply the tokenizer's chat template; without --prompt, answer each line of standard input.",
)
@option("--system", callback=utf8_text, help="System message, with --chat.")
@chat_template_option
@model_options
@setting_option("tokenizer")
@sampling_options
def generate(
    preset: str | None,
    model: str | None,
    prompt: str | None,
    chat: bool,
    system: str | None,
    chat_template: str | None,
    tokenizer: str | None,
    **options: object,
) -> None:
    """Continue a prompt, or answer it with --chat.

    `te-models chat` also has commands, such as /reset.
    """
    from te_models.data.dataset import check_fit  # noqa: PLC0415  imports torch
    from te_models.data.named_templates import use_template  # noqa: PLC0415
    from te_models.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from te_models.generation.conversation import Conversation  # noqa: PLC0415
    from te_models.generation.text import stream_text  # noqa: PLC0415

    sampling = take_sampling(options)
    if prompt is None and not chat:
        raise click.UsageError("give --prompt TEXT, or --chat")
    if prompt == "":
        raise click.UsageError("the prompt is empty: give at least one token")
    for name, value in (("--system", system), ("--chat-template", chat_template)):
        if value is not None and not chat:
            raise UsageError(f"{name} is for a conversation: give --chat too, or leave it out")
    text_tokenizer = load_tokenizer(tokenizer or model)
    if chat_template is not None:
        use_template(text_tokenizer, chat_template)
    if chat:
        text_tokenizer.chat_template()  # fail before the model is loaded
    network = build_model(preset, model, options)
    check_fit(text_tokenizer, network.config)
    talk = Conversation(network, text_tokenizer, system) if chat else None
    for line in [prompt] if prompt is not None else iter(input_line, None):
        if talk is not None:
            pieces = talk.answer(line, **sampling)
        else:
            pieces = stream_text(network, text_tokenizer, line, **sampling)
        first = next(pieces, "")  # errors in the prompt appear here, before anything is printed
        show_piece(first if talk else line + first)
        for piece in pieces:
            show_piece(piece)
        click.echo()
