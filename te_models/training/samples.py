"""Samples of a run: prompts from its evaluation data, and the model's answers to them before and after training."""

import contextlib
import math
import time
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.data.tokenizer import Tokenizer, text_after
from te_models.generation.options import GenerationOptions
from te_models.generation.text import stream_text
from te_models.model.targets import IGNORED
from te_models.training.evaluation import Batch

SAMPLES = 3
SHARE = 0.1  # of a run's time that samples take, before and after together, unless their length was asked for
OPENING = 24  # maximum tokens of a text to use as prompt, where the data has no prompts; half of a short text
READABLE = 256  # tokens: a longer prompt is used only if there is no shorter one
MAX_LINES = 14  # shown of a prompt, and of an answer


class Prompt(NamedTuple):
    """The beginning of a record that training does not see."""

    ids: tuple[int, ...]
    reference: tuple[int, ...] = ()  # the answer in the data; empty for the opening of a text


def held_out_prompts(
    batches: Sequence[Batch], tokenizer: Tokenizer, longest: int, count: int = SAMPLES
) -> list[Prompt]:
    """Return `count` prompts from evaluation batches, spread evenly; fewer if there are fewer.

    A prompt is the part of a record before the first tokens that the loss counts; for plain text it is the opening.
    Records with an answer come before those without, and whole ones before those that a window may have cut.

    `batches` have input_ids and labels, int64 [B, S], perhaps document_ids; the end-of-text token of `tokenizer` ends a
    record; a prompt has at most `longest` tokens.
    """
    found = [
        (whole, prompt)
        for batch in batches
        for whole, prompt in _prompts(batch, tokenizer.eos_token_id)
        if len(prompt.ids) <= longest
    ]
    found = list(dict.fromkeys(found))  # a short evaluation repeats its records
    choices = [[p for whole, p in found if whole and p.reference and len(p.ids) <= READABLE]]
    choices += [
        [p for whole, p in found if whole and p.reference],
        [p for _, p in found if p.reference],
    ]
    choices += [[p for whole, p in found if whole], [p for _, p in found]]
    chosen = next((prompts for prompts in choices if len(prompts) >= count), choices[-1])
    count = min(count, len(chosen))
    return [chosen[number * len(chosen) // count] for number in range(count)]


def _prompts(batch: Batch, end: int | None) -> Iterator[tuple[bool, Prompt]]:
    """Yield a prompt per record of a batch, and whether the record is whole for certain."""
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        edges = _edges(ids, batch["document_ids"][row] if "document_ids" in batch else None, end)
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            prompt = _prompt(
                ids[start:stop].tolist(), (labels[start:stop] != IGNORED).tolist(), end
            )
            if prompt is not None:
                yield start > 0 and stop < len(ids), prompt


def _edges(ids: Tensor, documents: Tensor | None, end: int | None) -> list[int]:
    """Return where the records of a window begin, and its length."""
    if documents is not None:
        after = (documents[1:] != documents[:-1]).nonzero().flatten() + 1
    else:
        after = (ids == (-1 if end is None else end)).nonzero().flatten() + 1
    return sorted({0, *after.tolist(), len(ids)})


def _prompt(ids: list[int], counted: list[bool], end: int | None) -> Prompt | None:
    """Return the prompt of one record, None if it has none or the loss counts none of its tokens."""
    if True not in counted:
        return None
    first = counted.index(True)
    if first < 2:  # of a text: packed by documents, the loss leaves out its first token
        whole = [token for token in ids if token != end]
        return Prompt(tuple(whole[: min(OPENING, len(whole) // 2)])) if len(whole) > 3 else None
    stop = counted.index(False, first) if False in counted[first:] else len(ids)
    answer = tuple(token for token in ids[first:stop] if token != end)
    return Prompt(tuple(ids[:first]), answer) if answer else None


class Sampler:
    """Answers of a model to prompts of its evaluation data.

    An answer has at most `tokens` tokens and is greedy, so that before and after are comparable; the continuation of an
    opening is sampled with `options["seed"]`. All processes of a sharded model take part, with the same prompts.
    `seconds` bounds the time that each answer takes, once its first tokens are there; an answer that it cuts ends in
    "...".
    """

    bounded = False  # whether the samples of a run may take only a share of its time
    seconds = math.inf
    cut = False  # whether an answer was cut

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        tokens: int,
        options: GenerationOptions,
    ) -> None:
        self.model, self.tokenizer, self.tokens, self.options = model, tokenizer, tokens, options
        self.prompts = list(prompts)
        self.before: list[str] = []

    def answer(self, prompt: Prompt) -> Generator[str, None, None]:
        """Yield the answer to a prompt in pieces."""
        options: GenerationOptions = {**self.options, "do_sample": not prompt.reference}
        if options["do_sample"]:
            options["temperature"] = 0.8
        room = self.model.config.longest_sequence - len(prompt.ids)
        begun = time.monotonic()
        pieces = stream_text(
            self.model, self.tokenizer, prompt.ids, min(self.tokens, room), **options
        )
        with contextlib.closing(pieces):
            for piece in pieces:
                yield piece
                if time.monotonic() - begun > self.seconds:
                    self.cut = True
                    yield "..."
                    return

    def take_at_most(self, seconds: float) -> None:
        """Bound the time of the next answers to all prompts together."""
        self.seconds = seconds / max(1, len(self.prompts))

    def note_before(self, seconds: float = math.inf) -> None:
        """Note the answers of the model as it is now, within `seconds`, to be shown beside the later ones."""
        self.take_at_most(seconds)
        self.before = ["".join(_first_lines(self.answer(prompt))) for prompt in self.prompts]

    def show(self, console: Console, seconds: float = math.inf) -> None:
        """Print each prompt with the earlier answer and that in the data, and stream the present answer.

        The answers take at most `seconds` together.
        """
        self.take_at_most(seconds)
        for number, prompt in enumerate(self.prompts, start=1):
            kind = "prompt" if prompt.reference else "opening"
            console.print(
                Text(f"\nsample {number} of {len(self.prompts)}, from the evaluation data", "bold")
            )
            _block(console, kind, _shortened(text_after(self.tokenizer, (), prompt.ids)), "dim")
            if prompt.reference:
                _block(
                    console,
                    "answer in the data",
                    text_after(self.tokenizer, prompt.ids, prompt.reference),
                    "dim",
                )
            if self.before:
                _block(console, "before", self.before[number - 1], "dim")
            console.print(
                Text(
                    "after" if self.before else "answer" if prompt.reference else "goes on",
                    "bold green",
                )
            )
            begun = False
            for piece in _first_lines(self.answer(prompt)):
                shown = piece if begun else piece.lstrip("\n")
                console.print(shown, end="", soft_wrap=True)
                begun = begun or bool(shown)
            console.print("" if begun else Text("(nothing)"))
        if self.cut:
            said = f"samples take at most a tenth of a run's time: --sample-tokens {self.tokens} writes them whole"
            console.print(Text(f"\n{said}", "dim"))


def _block(console: Console, title: str, text: str, style: str) -> None:
    console.print(Text(title, "bold"))
    console.print(Text(text.strip("\n") or "(nothing)", style), soft_wrap=True)


def _first_lines(pieces: Generator[str, None, None]) -> Iterator[str]:
    """Yield the first lines of an answer, and stop generating there, since an untrained model may never stop."""
    lines = 0
    with contextlib.closing(pieces):
        for piece in pieces:
            for part in piece.splitlines(keepends=True):
                if lines == MAX_LINES:
                    yield "..."
                    return
                yield part
                lines += part.endswith("\n")


def _shortened(text: str) -> str:
    """Return the last lines of a prompt."""
    lines = text.strip("\n").splitlines()
    return "\n".join(["...", *lines[-MAX_LINES:]] if len(lines) > MAX_LINES else lines)
