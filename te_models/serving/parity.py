"""The difference between a model as it was trained and as a server computes it, on text.

The trained model runs under its own recipe and engine; the served one is emulated (te_models.serving.served). Both give
the probabilities of the next token; the Kullback-Leibler divergence is of the served ones from the trained ones.
"""

import dataclasses
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from te_models.data.dataset import TokenDataset, check_fit
from te_models.data.documents import unused_lines
from te_models.data.python_docstrings import read_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import UsageError, check_least, plural
from te_models.files.formats import Fields
from te_models.interop.hub import local_folder
from te_models.interop.origin import Origin
from te_models.model.decoder import Decoder
from te_models.model.decoder_of import decoder_of
from te_models.model.targets import IGNORED
from te_models.planning.printable import Printable
from te_models.serving.export import export
from te_models.serving.formats import FORMATS
from te_models.serving.input_scales import trained_scales
from te_models.serving.quantized_linears import quantized_modules
from te_models.serving.served import read_served


@dataclass(frozen=True)
class Difference:
    """The difference between the next-token probabilities of a served model and of the trained one.

    Attributes:
        export: the format, or the folder.
        kl: mean Kullback-Leibler divergence, nats per token.
        largest_kl: the largest divergence of one token.
        largest: the largest difference of a log-probability, over all tokens and the whole vocabulary, in nats.
        agreement: share of tokens whose likeliest next token is the same.
        trained_loss: mean cross-entropy of the trained model, nats per token.
        served_loss: the loss of the served model.
        survives: the share of the tuning's change of the weights that is left; None where the base is not known.
        least: the weight of which least is left, and its share.
        reason: why there are no numbers, or "".
    """

    export: str
    kl: float = 0.0
    largest_kl: float = 0.0
    largest: float = 0.0
    agreement: float = 0.0
    trained_loss: float = 0.0
    served_loss: float = 0.0
    survives: float | None = None
    least: tuple[str, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Parity(Printable):
    """The differences of several exports of one model. Print it for a table; `to_dict` returns plain JSON values."""

    width: ClassVar[int] = 120
    title: str
    tokens: int
    rows: tuple[Difference, ...]

    def to_dict(self) -> Fields:
        """Return the result as plain JSON values."""
        return {
            "title": self.title,
            "tokens": self.tokens,
            "exports": [dataclasses.asdict(row) for row in self.rows],
        }

    def __rich__(self) -> Group:
        """Return the title, which is wider than a narrow table, the table, and lines about single exports."""
        table = Table(box=None)
        tuned = any(row.survives is not None for row in self.rows)
        columns = [
            "served as",
            "KL (nats\nper token)",
            "largest\nKL",
            "largest\nlog-prob",
            "same\ntop-1",
        ]
        columns += ["loss", "served"]
        if tuned:
            columns.append("tuning\nleft")
        table.add_column(columns[0], overflow="fold")
        for column in columns[1:]:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            if row.reason:
                continue
            values = [
                f"{row.kl:.2e}",
                f"{row.largest_kl:.2e}",
                f"{row.largest:.3f}",
                f"{100 * row.agreement:.2f} %",
                f"{row.trained_loss:.4f}",
                f"{row.served_loss:.4f}",
            ]
            if tuned:
                values.append("" if row.survives is None else f"{row.survives:.1%}")
            table.add_row(row.export, *values)
        lines = []
        for row in self.rows:
            if row.reason:
                lines.append(f"{row.export}: {row.reason}")
            elif row.least is not None:
                name, share = row.least
                lines.append(f"{row.export}: least of the tuning is left in {name}, {share:.1%}")
        return Group(Text(self.title), table, *map(Text, lines))


def parity(
    model: nn.Module,
    origin: Origin,
    exports: str | Path | Iterable[str | Path],
    batches: list[dict[str, Tensor]],
    rounding: str = "nearest",
    base: nn.Module | None = None,
) -> Parity:
    """Compare `model` with its exports.

    Args:
        model: the trained CausalLM, or a TEModelsForCausalLM; its scales and mode do not change.
        origin: the CausalLM's `origin`, the folder that it was read from.
        exports: one or several names of formats, which are written to a temporary folder with `batches` as calibration
            where the recipe has no scales, and folders of quantized checkpoints. Empty: every format, with the reason
            for those that the model's sizes do not allow.
        batches: {"input_ids", "labels"}, int64 [B, S] each; targets whose label is -100 are not compared. Windows of
            several documents also have "document_ids", int64 [B, S], -1 at padding: attention stays in each document.
        rounding: of the weights, as in CausalLM.export.
        base: the model before it was tuned; rows of formats then say how much of the tuning is left.

    Returns:
        a row per export, in nats and nats per token; print it for a table.

    Raises:
        UsageError: a name that is neither a format nor a folder, a format that the model's sizes do not allow, or a
            folder with another vocabulary.
    """
    model = decoder_of(model)
    folders = [exports] if isinstance(exports, (str, Path)) else exports
    names = [str(name) for name in folders]
    _check_batches(batches)
    rows = [
        _row(model, origin, name, batches, bool(names), rounding, base) for name in names or FORMATS
    ]
    tokens = sum(int(_counted(batch).sum()) for batch in batches)
    title = f"recipe {model.recipe.name}, engine {model.engine}, trained against served, on {plural(tokens, 'token')}"
    return Parity(title, tokens, tuple(rows))


def _check_batches(batches: object) -> None:
    """Raise a UsageError unless `batches` is a list of dicts of token ids and labels."""
    if not isinstance(batches, list | tuple) or not batches:
        raise UsageError(
            "parity compares on a list of batches: give [{'input_ids': ids, 'labels': ids}], int64 tensors [B, S]"
        )
    for number, batch in enumerate(batches, start=1):
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            raise UsageError(
                f"batch {number} is no dict of input_ids and labels, int64 tensors [B, S]"
            )


def _row(
    model: Decoder,
    origin: Origin,
    name: str,
    batches: list[dict[str, Tensor]],
    required: bool,
    rounding: str,
    base: nn.Module | None,
) -> Difference:
    """Return the difference of one export."""
    if name not in FORMATS:
        return dataclasses.replace(
            compare(model, read_served(_folder(name), model.device), batches), export=name
        )
    tokens = read_ids(batches)
    # A format is judged by the folder that a server would read, not by the weights in memory.
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "export"
        modules = quantized_modules(model, origin)
        # Scales from training are what a server would have; the batches stand in where there are none.
        calibration = None if trained_scales(model, modules).keys() == modules.keys() else tokens
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of who can load the folder
                written = export(model, origin, folder, name, calibration, rounding, base)
        except UsageError as error:
            # Who asked for this format has to know; a table of all formats goes on.
            if required:
                raise
            return Difference(name, reason=str(error))
        survival = written.survival
        share = None
        least = None
        if survival is not None and survival.worst is not None:
            share = survival.share
            if survival.worst.share != 1:  # else all of each is left
                least = (survival.worst.name, survival.worst.share)
        difference = compare(model, read_served(folder, model.device), batches)
        return dataclasses.replace(difference, export=name, survives=share, least=least)


def _folder(name: str) -> Path:
    folder = Path(name)
    if "/" in name and not folder.exists():
        folder = local_folder(name)  # the name of a model on the hub
    if not folder.is_dir():
        raise UsageError(f"export {name} is neither a format ({', '.join(FORMATS)}) nor a folder")
    return folder


def _counted(batch: Mapping[str, Tensor]) -> Tensor:
    """Return which positions predict a target that counts, bool [B, S - 1]."""
    return batch["labels"][:, 1:] != IGNORED


@torch.no_grad()
def compare(
    trained: nn.Module, served: nn.Module, batches: Iterable[Mapping[str, Tensor]]
) -> Difference:
    """Compare the next-token probabilities of two models of one vocabulary, in FP32."""
    trained = decoder_of(trained)
    served = decoder_of(served)
    if trained.config.vocab_size != served.config.vocab_size:
        raise UsageError(
            f"the served model has vocab_size={served.config.vocab_size}, the trained one {trained.config.vocab_size}: "
            "they are two models"
        )
    # Over all tokens: divergence, equal choices, loss of the trained model and of the served one.
    sums = torch.zeros(4, dtype=torch.float64)
    count = 0
    # Divergence of a token, difference of a log-probability.
    largest = torch.zeros(2, dtype=torch.float64)
    # In evaluation: a pass in training would move the trained model's scales.
    was_training = trained.training
    trained.eval()
    for batch in batches:
        for row in range(len(batch["input_ids"])):  # the logits of one sequence at a time
            ids = batch["input_ids"][row : row + 1].to(trained.device)
            counted = _counted(batch)[row]
            if not bool(counted.any()):
                continue
            targets = batch["labels"][row, 1:][counted].to(trained.device)
            documents = batch.get("document_ids")
            if documents is not None:
                documents = documents[row : row + 1].to(trained.device)
            log_p = _log_probabilities(trained, ids, documents, counted)  # [n, V]
            log_q = _log_probabilities(served, ids, documents, counted)
            # Of equal probabilities the sum is 0, and rounding may leave it below.
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # [n]
            same = (log_p.argmax(-1) == log_q.argmax(-1)).float()
            trained_losses = -log_p.gather(1, targets[:, None])  # [n, 1]
            served_losses = -log_q.gather(1, targets[:, None])
            totals = [divergence.sum(), same.sum(), trained_losses.sum(), served_losses.sum()]
            sums += torch.stack(totals).double().cpu()
            peaks = [divergence.amax(), (log_p - log_q).abs().amax()]
            largest = torch.maximum(largest, torch.stack(peaks).double().cpu())
            count += len(targets)
    trained.train(was_training)
    if not count:
        raise UsageError("the text has no token to predict: give more data")
    kl, agreement, trained_loss, served_loss = (sums / count).tolist()
    return Difference(
        export="",
        kl=kl,
        largest_kl=largest[0].item(),
        largest=largest[1].item(),
        agreement=agreement,
        trained_loss=trained_loss,
        served_loss=served_loss,
    )


def _log_probabilities(
    model: Decoder, ids: Tensor, documents: Tensor | None, counted: Tensor
) -> Tensor:
    """Return the log-probabilities of the next token at the positions that count, FP32 [n, V].

    `documents` are the document_ids of `ids`, int64 [1, S]; None: one document.
    """
    logits = model(ids, document_ids=documents).logits[0, :-1]
    return logits[counted.to(logits.device)].float().log_softmax(-1)


def read_batches(
    model: nn.Module,
    data: str,
    tokenizer: str | Path | None,
    count: int,
    seq_len: int,
    columns: str = "",
    truncate: str = "drop",
) -> list[dict[str, Tensor]]:
    """Return up to `count` sequences spread evenly over a text, each a batch {"input_ids", "labels"} int64 [1, S].

    Windows of records have "document_ids" beside.

    Args:
        model: a CausalLM or a TEModelsForCausalLM, whose vocabulary and longest sequence limit the tokens.
        data: a file, folder or glob of text or records, or "python-docstrings", of which the modules that training does
            not see; conversations are put into the tokenizer's chat template, or the plain one.
        tokenizer: a tokenizer.json, or a folder with one; None: bytes.
        count: maximum number of sequences.
        seq_len: tokens per sequence.
        columns: your columns of the data, as in DataConfig.
        truncate: of records longer than seq_len, as in DataConfig.

    Raises:
        DataError, UsageError: the data or the tokenizer cannot be read, or do not fit the model.
    """
    check_least(1, batches=count)
    config = decoder_of(model).config
    text_tokenizer = load_tokenizer(tokenizer)
    check_fit(text_tokenizer, config)
    length = min(seq_len, config.longest_sequence)
    remarks: list[str] = []
    documents = read_documents(data, columns, remarks=remarks)
    remarks += unused_lines(documents, truncate, chat_template=None)
    if any(document.conversation is not None for document in documents):
        text_tokenizer.ensure_chat_template()
    # As in a run: a record is whole in its window, and does not see the others there.
    packing = "documents" if any(document.is_record for document in documents) else "stream"
    dataset = TokenDataset(
        documents,
        text_tokenizer,
        length,
        batch_size=1,
        seed=0,
        shuffle=False,
        packing=packing,
        truncate=truncate,
    )
    for line in (*remarks, *dataset.remarks):
        warnings.warn(line, stacklevel=2)
    return dataset.eval_batches(count)


def read_ids(batches: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the token ids of `batches` for calibration, int64 [B, S] each, or [1, length] of each packed document.

    A document by itself, and no padding: the inputs of linears are then what a server has.
    """
    sequences = []
    for batch in batches:
        ids = batch["input_ids"]
        if "document_ids" not in batch:
            sequences.append(ids)
            continue
        for row, documents in zip(ids, batch["document_ids"], strict=True):
            numbers = documents.unique()
            sequences += [row[documents == number][None] for number in numbers[numbers >= 0]]
    return sequences
