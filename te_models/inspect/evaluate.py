"""The quality of a model under one or several recipes: its loss on data and its scores on tasks, in one table each."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.data.bad_records import BadRecords
from te_models.data.dataset import TokenDataset, check_fit
from te_models.data.documents import Document, ignored_lines, unused_lines
from te_models.data.encoding import encode_documents
from te_models.data.named_templates import use_template
from te_models.data.python_docstrings import PYTHON_DOCSTRINGS, read_documents
from te_models.data.tokenizer_base import CONTEXT, Tokenizer, text_after
from te_models.errors import CheckpointError, DataError, check_least
from te_models.fp8.scaling_state import fp8_state
from te_models.model.decoder_of import decoder_of
from te_models.planning.printable import Printable
from te_models.training.evaluation import Batch, count_targets, evaluate, to_device

SEQ_LEN = 1024  # default, unless the model's maximum is less
CALIBRATION = 2  # training forwards: the second has scales that the first one found


@dataclass(frozen=True)
class RecipeLoss:
    """The loss under one recipe."""

    recipe: str
    loss: float = math.nan  # mean cross-entropy in nats per counted token
    tokens: int = 0  # that the loss counts; 0 if the recipe was not run
    text_bytes: int = 0  # of UTF-8 that these tokens stand for
    seconds: float = math.nan  # of the forward passes
    note: str = ""  # how the scales were found, or why the recipe was not run

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text, (tokens / bytes) * loss / ln 2, which models of any tokenizer share.

        Source: Gao et al. 2020, The Pile (arXiv 2101.00027).
        """
        if self.text_bytes:
            return self.loss * self.tokens / (self.text_bytes * math.log(2))
        return math.nan


@dataclass(frozen=True)
class Score:
    """One metric of one task under one recipe; `error` is its standard error, None if the task gives none."""

    recipe: str
    task: str
    metric: str
    value: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.error:.4f}" if self.error is not None else "")


@dataclass(frozen=True)
class Evaluation(Printable):
    """Losses and scores of one model. Print it for tables; `to_dict` returns plain JSON values."""

    model: str
    data: str  # its name; "" if only tasks were run
    losses: tuple[RecipeLoss, ...]  # one per recipe, refused ones included
    scores: tuple[Score, ...] = ()  # one per recipe, task and metric
    remarks: tuple[str, ...] = ()  # lines about the data, such as records that were too long
    width: ClassVar[int] = 120

    @property
    def refused(self) -> list[RecipeLoss]:
        """The recipes that could not run here, each with the reason as its note."""
        return [row for row in self.losses if not row.tokens]

    def to_dict(self) -> dict[str, object]:
        """Return the tables as plain JSON values; null where a recipe was not run."""
        losses = []
        for loss in self.losses:
            row: dict[str, Any] = asdict(loss) | dict(
                perplexity=loss.perplexity, bits_per_byte=loss.bits_per_byte
            )
            for name, value in row.items():
                if value != value:  # NaN, which JSON lacks
                    row[name] = None
            losses.append(row)
        scores = [asdict(score) for score in self.scores]
        return dict(
            model=self.model, data=self.data, losses=losses, scores=scores, remarks=self.remarks
        )

    def __rich__(self) -> Group:
        parts: list[Any] = []
        if self.data:
            parts += [
                Text(f"{self.model} on {self.data}", "bold"),
                *map(Text, self.remarks),
                self._loss_table(),
            ]
            parts += [Text(f"{row.recipe}: {row.note}") for row in self.losses if row.note]
        if self.scores:
            parts += [
                *([Text()] if parts else []),
                Text(f"{self.model} on tasks", "bold"),
                self._score_table(),
            ]
        return Group(*parts)

    def _loss_table(self) -> Table:
        first = next((row for row in self.losses if row.tokens), None)
        columns = ["nats per token", "perplexity", "bits per byte", "tokens"]
        columns += [f"against {first.recipe}"] if first and len(self.losses) > 1 else []
        table = _table("recipe", *columns)
        for row in self.losses:
            cells = [
                f"{row.loss:.4f}",
                f"{row.perplexity:,.3f}",
                f"{row.bits_per_byte:.4f}",
                f"{row.tokens:,}",
            ]
            if first and len(self.losses) > 1:
                cells.append("" if row is first else f"{100 * (row.loss / first.loss - 1):+.2f} %")
            table.add_row(row.recipe, *(cells if row.tokens else ["-"] * len(cells)))
        return table

    def _score_table(self) -> Table:
        recipes = dict.fromkeys(score.recipe for score in self.scores)
        cells = {(score.task, score.metric, score.recipe): str(score) for score in self.scores}
        table = _table("task", *recipes)
        for task, metric in dict.fromkeys((score.task, score.metric) for score in self.scores):
            table.add_row(
                f"{task}, {metric}", *(cells.get((task, metric, recipe), "-") for recipe in recipes)
            )
        return table


def _table(first: str, *numbers: str) -> Table:
    return Table(
        first, *(Column(name, justify="right") for name in numbers), box=None, pad_edge=False
    )


def evaluate_recipes(
    load: Callable[[str | None], CausalLM],
    recipes: Sequence[str | None],
    tokenizer: Tokenizer,
    *,
    model: str,
    data: str | None = None,
    score: Callable[[CausalLM], list[Score]] | None = None,
    progress: Callable[[str], None] = lambda line: None,
    columns: str = "",
    on_bad_record: str = "raise",
    truncate: str = "drop",
    chat_template: str | None = None,
    **sizes: Any,
) -> Evaluation:
    """Measure a model under each recipe, on the same tokens; one model at a time is in memory.

    Args:
        load: builds the model under one of `recipes`, names or TOML files; None for its own.
        model: its name, for the title.
        tokenizer: gets the `chat_template`, if one is given.
        data: its path, as for finetune; None for scores only. `columns`, `on_bad_record`, `truncate` and
            `chat_template` are as in DataConfig.
        score: runs tasks on a model.
        progress: called with a line per stage.
        sizes: keywords of `make_batches`.
    """
    if chat_template is not None:
        use_template(tokenizer, chat_template)
    bad = BadRecords(skip=on_bad_record == "skip")
    # Without data, to find scales on, for recipes that need some.
    remarks: list[str] = []
    documents = None if data is None else read_documents(data, columns, bad, remarks)
    if documents is not None:
        remarks += unused_lines(documents, truncate, chat_template)
    losses = []
    scores = []
    batches = []
    text_bytes = 0
    for name in recipes:
        progress(f"loading the model under {name or 'its own recipe'}")
        try:
            network = load(name)
        # An error of this recipe alone leaves the others to evaluate, unless the model itself is damaged.
        except ValueError as error:
            if len(recipes) == 1 or isinstance(error, CheckpointError | DataError):
                raise
            losses.append(RecipeLoss(str(name), note=str(error)))
            continue
        if documents is None and needs_scales(network):
            documents = read_documents(PYTHON_DOCSTRINGS, "", bad)
        if documents is not None and not batches:
            # With the first model, whose longest sequence bounds them; all recipes see the same tokens.
            batches, of_batches = make_batches(
                documents, tokenizer, network, truncate=truncate, bad=bad, **sizes
            )
            remarks += of_batches
            text_bytes = sum(counted_bytes(batch, tokenizer) for batch in batches)
        if batches:
            progress(f"{network.recipe.name}: {sum(map(count_targets, batches)):,} tokens")
        note = calibrate(network, batches)
        if data is not None:
            losses.append(measure_loss(network, batches, text_bytes, note))
        if score is not None:
            progress(f"{network.recipe.name}: tasks")
            scores += score(network)
        # Two models at a time may not fit.
        del network  # before the next one is loaded
    # The user gave no data, so lines about it would say nothing.
    return Evaluation(
        model, data or "", tuple(losses), tuple(scores), tuple(remarks if data else ())
    )


def make_batches(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    model: nn.Module,
    seq_len: int | None = None,
    batch_size: int = 8,
    max_batches: int = 0,
    truncate: str = "drop",
    bad: BadRecords | None = None,
) -> tuple[list[Batch], list[str]]:
    """Return batches in which attention stays inside each document, and lines about records that are left out.

    Conversations are put into the tokenizer's chat template; a tokenizer without one gets the plain one.

    Args:
        seq_len: tokens per sequence; None: SEQ_LEN, or the model's maximum if that is less.
        max_batches: maximum number of batches, spread evenly over the data; 0: all.
        truncate: longer records are left out ("drop") or their prompts cut from the left ("prompt").
        bad: may skip conversations that the chat template refuses, and has skipped other records before.

    Raises:
        UsageError: a size is out of range, or the tokenizer is of another model.
    """
    check_least(1, batch_size=batch_size)
    check_least(0, max_batches=max_batches)
    config = decoder_of(model).config
    limit = config.longest_sequence
    length = min(SEQ_LEN, limit) if seq_len is None else seq_len
    check_fit(tokenizer, config, length, "documents")
    if any(document.conversation is not None for document in documents):
        tokenizer.ensure_chat_template()
    options = dict(
        batch_size=batch_size, seed=0, shuffle=False, packing="documents", truncate=truncate
    )
    bad = bad or BadRecords()
    # As in a run: where there are records, a prompt begins with a bos token.
    whole = any(document.is_record for document in documents)
    encoded = encode_documents(documents, tokenizer, begin_prompts=whole, bad=bad)
    dataset = TokenDataset(encoded, tokenizer, length, limit=limit, **options)
    remarks = [*ignored_lines(documents), *bad.describe(), *dataset.remarks]
    return dataset.eval_batches(max_batches or dataset.num_windows), remarks


def measure_loss(
    model: CausalLM, batches: list[Batch], text_bytes: int, note: str = ""
) -> RecipeLoss:
    """Return the loss of a model on batches under its recipe; `text_bytes` are their `counted_bytes`."""
    tokens = sum(map(count_targets, batches))
    if not tokens:
        raise DataError(
            "the data has no token to count: each record is a prompt without an answer, or a single token"
        )
    start = time.perf_counter()
    loss = evaluate(model, batches)
    return RecipeLoss(
        decoder_of(model).recipe.name,
        loss,
        tokens,
        text_bytes,
        time.perf_counter() - start,
        note,
    )


def needs_scales(model: nn.Module) -> bool:
    """Return whether the recipe of a model finds its scales while it runs, and none are saved."""
    model = decoder_of(model)
    return model.recipe.stateful and not fp8_state(model)


def calibrate(model: nn.Module, batches: Sequence[Batch]) -> str:
    """Find the first scales of a recipe that finds its scales while it runs; return a note about it, or "".

    Delayed scaling without saved scales would run with scales of one. Two training forwards of the first batches find
    them, as training would.
    """
    model = decoder_of(model)
    if not needs_scales(model):
        return ""
    # Scales are updated in training mode alone.
    was_training = model.training
    model.train()
    # Only a pass with gradients counts as training for the autocast's exit.
    with torch.enable_grad():  # as in training: scales are updated
        for number in range(CALIBRATION):
            model(**to_device(batches[number % len(batches)], model.device), return_logits=False)
    model.train(was_training)
    return f"scales from {CALIBRATION} forward passes"


def counted_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Return the bytes of text in the counted tokens of a batch; special tokens have none."""
    counted = batch["labels"] != -100
    counted[:, 0] = False  # nothing predicts it
    total = 0
    for ids, row in zip(batch["input_ids"], counted, strict=True):
        for start, stop in _runs(row):
            # Tokens before it tell the decoder whether its first word begins with a space.
            before = ids[max(0, start - CONTEXT) : start].tolist()
            text = text_after(tokenizer, before, ids[start:stop].tolist())
            total += len(text.encode())
    return total


def _runs(chosen: Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True in a row."""
    edge = torch.zeros(1, dtype=torch.int)
    edges = torch.diff(chosen.int(), prepend=edge, append=edge).nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
