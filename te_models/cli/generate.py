"""`te-models generate`: continue a prompt, or answer lines of a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from te_models.cli.options import Command, build_model, model_options, option, sampling_option, tokenizer_option
from te_models.errors import UsageError

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM
    from te_models.data.tokenizer import Tokenizer

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_strings", "seed")


@click.command(cls=Command)
@option("--prompt", help="Text to continue; with --chat, the user's message.")
@option(
    "--chat",
    is_flag=True,
    help="Apply the tokenizer's chat template; without --prompt, answer each line of standard input.",
)
@option("--system", help="System message, with --chat.")
@model_options
@tokenizer_option
@sampling_option("--max-new-tokens", default=200, help="Most tokens to generate.")
@sampling_option("--greedy", is_flag=True, help="Take the likeliest token at every step.")
@sampling_option("--temperature", default=0.8, help="Divisor of the logits: below 1 sharper, above 1 flatter.")
@sampling_option("--top-k", type=int, help="Sample among the K likeliest tokens.")
@sampling_option("--top-p", type=float, help="Sample from the smallest set of tokens of this probability.")
@sampling_option(
    "--min-p", type=float, help="Sample among tokens with at least this share of the likeliest token's probability."
)
@sampling_option("--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@sampling_option("--seed", type=int, help="Seed of the random numbers; default: a different one every time.")
def generate(
    preset: str | None, model: str | None, prompt: str | None, chat: bool, system: str | None, tokenizer: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Continue a prompt, or talk to a chat model."""
    from te_models.data.tokenizer import load_tokenizer  # noqa: PLC0415  imports torch

    sampling = {name: options.pop(name) for name in SAMPLING} | {"do_sample": not options.pop("greedy")}
    if prompt is None and not chat:
        raise click.UsageError("give --prompt TEXT, or --chat")
    if prompt == "":
        raise UsageError("the prompt is empty: give at least one token")
    words = load_tokenizer(tokenizer or model)
    if chat:
        words.chat_template()  # fail before the model is loaded
    lines = [prompt] if prompt is not None else (line.rstrip("\n") for line in sys.stdin)
    answer_lines(build_model(preset, model, options), words, lines, chat, system, sampling)


def answer_lines(
    model: CausalLM,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    chat: bool,
    system: str | None,
    sampling: dict[str, Any],
) -> None:
    """Print the answer to each line as it is generated; without `chat`, the line and its continuation."""
    from te_models.data.dataset import check_vocabulary  # noqa: PLC0415  imports torch
    from te_models.generation.text import stream_text  # noqa: PLC0415

    check_vocabulary(tokenizer, model.config.vocab_size)
    messages = [{"role": "system", "content": system}] if system else []
    for line in lines:
        prompt: str | Sequence[int] = line
        if chat:
            messages.append({"role": "user", "content": line})
            prompt = tokenizer.apply_chat_template(messages)
        pieces = stream_text(model, tokenizer, prompt, **sampling)
        answer = next(pieces, "")  # errors in the prompt appear here, before anything is printed
        click.echo(answer if chat else line + answer, nl=False)
        for piece in pieces:
            click.echo(piece, nl=False)
            answer += piece
        click.echo()
        messages.append({"role": "assistant", "content": answer})
