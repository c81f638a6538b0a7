"""The options of sampling, which `generate` and `chat` share."""

import functools
import io
import secrets
import sys
from typing import Any

import click

from te_models.cli.options import chained, option
from te_models.errors import UsageError, for_terminal
from te_models.generation.options import GenerationSettings

# Keywords of `stream_text` that have an option of the same name.
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_strings", "seed")

TEMPERATURE = 0.8  # of sampling without --temperature

chat_template_option = option(
    "--chat-template",
    metavar="FILE|NAME",
    help="Jinja file, or chatml, llama3 or gemma, for conversations; default: the tokenizer's own template.",
)

_option = functools.partial(option, group="Sampling")

sampling_options = chained(
    _option("--max-new-tokens", default=200, help="Maximum number of tokens to generate."),
    _option("--greedy", is_flag=True, help="Take the likeliest token at every step."),
    _option(
        "--temperature",
        type=float,
        show_default=str(TEMPERATURE),
        help="Below 1 likely tokens become likelier, above 1 less so; 0 is --greedy.",
    ),
    _option("--top-k", type=int, help="Sample among the K likeliest tokens."),
    _option(
        "--top-p", type=float, help="Sample from the smallest set of tokens of this probability."
    ),
    _option(
        "--min-p",
        type=float,
        help="Sample among tokens with at least this share of the likeliest token's probability.",
    ),
    _option(
        "--stop",
        "stop_strings",
        multiple=True,
        metavar="TEXT",
        help="End before this text; may be repeated.",
    ),
    _option(
        "--seed", type=int, help="Seed of the random numbers; default: a different one every time."
    ),
)


def take_sampling(options: dict[str, object]) -> dict[str, Any]:
    """Remove the options of sampling from `options`; return them as keywords of `stream_text`.

    Raises:
        UsageError: one of them is out of range, or has no effect beside --greedy or --temperature 0.
    """
    sampling: dict[str, Any] = {name: options.pop(name) for name in SAMPLING}
    greedy = bool(options.pop("greedy"))
    if sampling["temperature"] == 0:
        greedy = True
        sampling["temperature"] = None
    sampling["do_sample"] = not greedy
    # 1.0 leaves the logits as they are, of which a greedy choice takes the largest.
    if sampling["temperature"] is None:
        sampling["temperature"] = 1.0 if greedy else TEMPERATURE
    # Its checks, before the model is loaded.
    GenerationSettings(
        **{name: value for name, value in sampling.items() if name != "max_new_tokens"}
    )
    if sampling["seed"] is None and not greedy:
        # PyTorch's random numbers begin alike in every process.
        sampling["seed"] = secrets.randbits(63)
    return sampling


def utf8_text(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the text that was given; the callback of an option with text for the model."""
    return None if value is None else _decoded(value, parameter.opts[0])


def input_line() -> str | None:
    """Return the next line of standard input, without its end; None after the last."""
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        # Decode bytes as Python decodes arguments; not possible after the first line.
        sys.stdin.reconfigure(errors="surrogateescape")
    line = sys.stdin.readline()
    return _decoded(line.removesuffix("\n"), "a line of standard input") if line else None


def _decoded(text: str, place: str) -> str:
    """Return `text`; a UsageError if it was not UTF-8, since Python keeps bytes that are not as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{place} is not UTF-8 text (character {error.start + 1}): convert it to UTF-8"
        ) from None
    return text


def show_piece(piece: str) -> None:
    """Print a piece of an answer; to a terminal, as `for_terminal`, and to a file or a pipe as it is."""
    click.echo(for_terminal(piece) if sys.stdout.isatty() else piece, nl=False)
