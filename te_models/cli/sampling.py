"""The options of sampling, which `generate` and `chat` share."""

from __future__ import annotations

import functools
import sys
from typing import Any

import click

from te_models.cli.options import chained, option

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_strings", "seed")

_option = functools.partial(option, group="Sampling")

sampling_options = chained(
    _option("--max-new-tokens", default=200, help="Maximum number of tokens to generate."),
    _option("--greedy", is_flag=True, help="Take the likeliest token at every step."),
    _option("--temperature", default=0.8, help="Divisor of the logits: below 1 sharper, above 1 flatter."),
    _option("--top-k", type=int, help="Sample among the K likeliest tokens."),
    _option("--top-p", type=float, help="Sample from the smallest set of tokens of this probability."),
    _option("--min-p", type=float,
            help="Sample among tokens with at least this share of the likeliest token's probability."),
    _option("--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    _option("--seed", type=int, help="Seed of the random numbers; default: a different one every time."),
)  # fmt: skip


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of sampling from `options`; return them as keywords of `stream_text`."""
    return {name: options.pop(name) for name in SAMPLING} | {"do_sample": not options.pop("greedy")}


def show_piece(piece: str) -> None:
    """Print a piece of an answer; on a terminal, without control characters, which it would obey."""
    from te_models.generation.text import for_terminal  # noqa: PLC0415  imports torch

    click.echo(for_terminal(piece) if sys.stdout.isatty() else piece, nl=False)
