"""Samples of a run: prompts from its evaluation data, and the model's answers to them before and after training."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.tokenizer_base import Tokenizer, text_after
from te_models.generation.options import GenerationOptions
from te_models.generation.text import stream_text
from te_models.model.targets import IGNORED
from te_models.training.evaluation import Batch, evaluate
from te_models.training.parallel import Parallel
from te_models.training.run_data import RunData
from te_models.training.settings import SETTINGS, RunSettings

SAMPLES = 3
SHARE = 0.1  # of a run's time that samples take, before and after together, unless their length was asked for
OPENING = 24  # maximum tokens of a text to use as prompt, where the data has no prompts; half of a short text
READABLE = 256  # tokens: a longer prompt is used only if there is no shorter one
LINE = 40  # characters: an answer that time cuts shorter than this is not shown
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
    is_whole: dict[Prompt, bool] = {}  # each prompt once: a short evaluation repeats its records
    for batch in batches:
        for whole, prompt in _prompts(batch, tokenizer.eos_token_id):
            if len(prompt.ids) <= longest:
                is_whole[prompt] = whole or is_whole.get(prompt, False)
    prompts = list(is_whole)
    whole_prompts = [prompt for prompt in prompts if is_whole[prompt]]
    whole_answered = [prompt for prompt in whole_prompts if prompt.reference]
    choices = [  # the best first
        [prompt for prompt in whole_answered if len(prompt.ids) <= READABLE],
        whole_answered,
        [prompt for prompt in prompts if prompt.reference],
        whole_prompts,
        prompts,
    ]
    chosen = next((choice for choice in choices if len(choice) >= count), prompts)
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
        # A record ends with the end-of-text token; no token has the id -1.
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
    # To the end of the first answer: a conversation may have later ones.
    stop = counted.index(False, first) if False in counted[first:] else len(ids)
    answer = tuple(token for token in ids[first:stop] if token != end)
    return Prompt(tuple(ids[:first]), answer) if answer else None


class Sampler:
    """Answers of a model to prompts of its evaluation data.

    An answer has at most `tokens` tokens and is greedy, so that before and after are comparable; the continuation of an
    opening is sampled with `options["seed"]`.

    The time of the answers is bounded once their first tokens are there. Each prompt has an equal share of it; an
    answer that is still shorter than LINE then takes of the others' shares, since a word or two say nothing, and is
    left out if all of the time is not enough. An answer that is cut ends in "...".

    Args:
        model, tokenizer: whose answers.
        prompts: what they answer.
        tokens: maximum number of tokens of each.
        options: of generation.
        agree: returns the first process's answer to a question of all processes. Processes of a sharded model answer
            together, and would otherwise stop at different tokens.
        bounded: whether the samples of a run may take only SHARE of its time.
    """

    cut = False  # whether an answer was cut or left out

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        tokens: int,
        options: GenerationOptions,
        agree: Callable[[bool], bool] = bool,
        bounded: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = list(prompts)
        self.tokens = tokens
        self.options = options
        self.agree = agree
        self.bounded = bounded
        self.before: list[str] = []
        self._share_ends = self._end = math.inf  # times: of the present answer, and of all
        self._late = False  # whether the present answer was cut

    def answer(self, prompt: Prompt) -> Generator[str, None, None]:
        """Yield the answer to a prompt in pieces."""
        # With a reference the likeliest answer is compared with it; the opening of a text is continued at random.
        options: GenerationOptions = {**self.options, "do_sample": not prompt.reference}
        if options["do_sample"]:
            options["temperature"] = 0.8
        else:
            options.pop("seed", None)  # nothing is drawn
        room = self.model.config.longest_sequence - len(prompt.ids)
        length = 0
        self._late = False
        pieces = stream_text(
            self.model, self.tokenizer, prompt.ids, min(self.tokens, room), **options
        )
        with contextlib.closing(pieces):
            for piece in pieces:
                yield piece
                length += len(piece)
                # A few words say nothing: an answer that is still so short takes of the time of the others.
                end = self._end if length < LINE else self._share_ends
                if self.agree(time.monotonic() > end):
                    self.cut = self._late = True
                    yield "..."
                    return

    def answers(self, seconds: float) -> Iterator[tuple[Prompt, Iterator[str]]]:
        """Yield each prompt with its answer in pieces, until `seconds` are over; `Sampler` says which are left out."""
        self._end = time.monotonic() + seconds
        for number, prompt in enumerate(self.prompts):
            now = time.monotonic()
            self._share_ends = now + (self._end - now) / (len(self.prompts) - number)
            if self.agree(now > self._end):
                self.cut = True
                return
            pieces = _first_lines(self.answer(prompt))
            begun: list[str] = []
            for piece in pieces:
                begun.append(piece)
                if len("".join(begun)) >= LINE:
                    break
            # An answer that ends by itself may be shorter.
            if self._late and len("".join(begun).removesuffix("...")) < LINE:
                return
            yield prompt, itertools.chain(begun, pieces)

    def note_before_training(self, console: Console, batch: Batch, config: TrainConfig) -> None:
        """Note the answers before the first step, in a share of the time that the run is expected to take.

        A step takes about three times as long as a forward pass of the evaluation batch `batch`.
        """
        status = "answering prompts of the evaluation data before the first step"
        # A spinner takes over sys.stdout too (te_models.training.progress.progress).
        with contextlib.nullcontext() if console.quiet else console.status(status):
            seconds = math.inf
            if self.bounded:
                begun = time.monotonic()
                evaluate(self.model, [batch])
                forward = time.monotonic() - begun
                expected = 3 * forward * config.steps * config.gradient_accumulation
                seconds = SHARE / 2 * expected
            self.note_before(seconds)

    def show_after_training(self, console: Console, seconds: float) -> None:
        """Print the answers of the model that has been trained for so many seconds."""
        share = SHARE / 2 if self.before else SHARE
        self.show(console, share * seconds if self.bounded else math.inf)

    def note_before(self, seconds: float = math.inf) -> None:
        """Note the answers of the model as it is now, within `seconds`, to be shown beside the later ones."""
        self.before = ["".join(pieces) for _, pieces in self.answers(seconds)]

    def show(self, console: Console, seconds: float = math.inf) -> None:
        """Print each prompt with the earlier answer and the one in the data, and stream the present answer.

        The answers take at most `seconds` together.
        """
        shown = 0
        for prompt, pieces in self.answers(seconds):
            shown += 1
            before = self.before[shown - 1] if shown <= len(self.before) else None
            title = f"\nsample {shown} of {len(self.prompts)}, from the evaluation data"
            console.print(Text(title, "bold"))
            kind = "prompt" if prompt.reference else "opening"
            _block(console, kind, _shortened(text_after(self.tokenizer, (), prompt.ids)), "dim")
            if prompt.reference:
                reference = text_after(self.tokenizer, prompt.ids, prompt.reference)
                _block(console, "answer in the data", reference, "dim")
            if before is not None:
                _block(console, "before", before, "dim")
            title = "answer" if prompt.reference else "goes on"
            console.print(Text(title if before is None else "after", "bold green"))
            begun = False
            for piece in pieces:
                # Blank lines at the beginning would look as if there was no answer.
                visible = piece if begun else piece.lstrip("\n")
                console.print(visible, end="", soft_wrap=True)
                begun = begun or bool(visible)
            console.print("" if begun else Text("(nothing)"))
        if self.cut:
            bound = "\nsamples take at most a tenth of a run's time"
            if shown == 0:
                bound += ", too little for an answer here"
            option = f"--sample-tokens {self.tokens} writes all {len(self.prompts)} whole"
            console.print(Text(f"{bound}: {option}", "dim"))


def run_sampler(
    settings: RunSettings, model: CausalLM, data: RunData, processes: Parallel
) -> Sampler | None:
    """Return the sampler of a run; None if it prints no samples or this process has no part in them.

    With a sharded model all processes take part, with whole copies the first.
    """
    tokens = settings.sample_tokens
    if not tokens or not (processes.sharded or processes.ranks.first):
        return None
    longest = model.config.longest_sequence
    prompts = held_out_prompts(
        data.eval_batches, data.tokenizer, longest - min(tokens, longest // 4)
    )
    options: GenerationOptions = {"seed": processes.config.seed}
    agree: Callable[[bool], bool] = bool
    if processes.sharded:
        options["cuda_graph"] = False  # collectives are not captured
        first_prompts = processes.ranks.from_first(lambda: prompts)
        prompts = [Prompt(tuple(ids), tuple(reference)) for ids, reference in first_prompts]
        agree = functools.partial(_first_answer, processes)
    chosen = "sample_tokens" in settings.set_by_user or tokens != SETTINGS["sample_tokens"].default
    return Sampler(model, data.tokenizer, prompts, tokens, options, agree=agree, bounded=not chosen)


def _first_answer(processes: Parallel, answer: bool) -> bool:
    """Return the answer of the first process, on every process."""
    return processes.ranks.gather(answer)[0]


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
