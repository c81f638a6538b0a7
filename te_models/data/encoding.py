"""Documents to tokens, and which of them the loss counts: of a conversation, what the assistant says in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from te_models.data.bad_records import BadRecords
from te_models.data.chat_template import Rendered
from te_models.data.conversations import render_conversations
from te_models.data.formats import Document
from te_models.data.tokenizer_base import Tokenizer, end_of_text
from te_models.errors import DataError, plural

_BATCH = 32  # conversations encoded at once


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens.

    Attributes:
        tokens: int32 [N], all documents back to back.
        counted: bool [N], the tokens whose prediction the loss counts; None: all.
        starts: int64 [D], where each document begins in `tokens`.
        lengths: int64 [D], its tokens.
        prompts: int64 [D], the tokens of its prompt; 0 for a conversation.
        records: bool [D], documents with an answer, which must not be cut.
        refused: bool [D], conversations that the chat template refuses, which have no tokens; None: none of them.
    """

    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_] | None
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]
    records: NDArray[np.bool_]
    refused: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def select(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Encoded:
        """Return some of the documents; the tokens are shared."""
        return replace(
            self,
            starts=self.starts[index],
            lengths=self.lengths[index],
            prompts=self.prompts[index],
            records=self.records[index],
            refused=None if self.refused is None else self.refused[index],
        )

    def parts(self, values: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Yield the part of each document of `values` [N], which are given for all tokens."""
        if len(values) == self.num_tokens:  # nothing was left out
            yield values
            return
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield values[start : start + length]


class Fit(NamedTuple):
    """The numbers of records that did not fit as they are, and the tokens of the longest."""

    too_long: int = 0
    longest: int = 0
    cut: int = 0
    unanswered: int = 0

    def __add__(self, other: object) -> Fit:
        assert isinstance(other, Fit)
        return Fit(
            self.too_long + other.too_long,
            max(self.longest, other.longest),
            self.cut + other.cut,
            self.unanswered + other.unanswered,
        )

    def describe(
        self, total: int, seq_len: int, truncate: str, limit: int | None = None
    ) -> list[str]:
        """Return a line for each kind of record that did not fit as it is, out of `total` records.

        `limit` is the longest sequence that the model allows, if that is known.
        """
        bound = f"seq_len={seq_len}"
        if limit is not None and seq_len > limit:
            bound = f"the {plural(limit, 'token')} that the model allows"
        longest = f"the longest has {self.longest:,} tokens"
        lines = []
        if self.too_long:
            are = "is" if self.too_long == 1 else "are"
            cutting = (
                "even without what comes before the first answer, " if truncate == "prompt" else ""
            )
            # Advice is given only where it would help: the model may allow no longer windows.
            remedies = ["raise --seq-len"] if limit is None or seq_len < limit else []
            remedies += [] if truncate == "prompt" else ["cut prompts with --truncate prompt"]
            advice = ", or ".join(remedies) or "the model takes no longer ones"
            lines.append(
                f"{self.too_long:,} of {plural(total, 'record')} {are} longer than {bound} "
                f"({cutting}{longest}) and {are} left out: {advice}"
            )
        if self.cut:
            are = "is" if self.cut == 1 else "are"
            lines.append(
                f"{self.cut:,} of {plural(total, 'prompt')} {are} cut from the left to {bound} ({longest})"
            )
        if self.unanswered:
            have = "has" if self.unanswered == 1 else "have"
            are = "is" if self.unanswered == 1 else "are"
            lines.append(
                f"{self.unanswered:,} of {plural(total, 'record')} {have} no answer to learn and {are} left out: "
                "give each an assistant's message, or a completion, with text, and no mark that it is not to be learned"
            )
        return lines

    def refuse(
        self, total: int, seq_len: int, truncate: str, limit: int | None = None, source: str = ""
    ) -> NoReturn:
        """Raise a DataError that says why none of `total` records is left, after the name of their `source`."""
        raise DataError(
            f"{source}no record is left: {'; '.join(self.describe(total, seq_len, truncate, limit))}"
        )


@dataclass(frozen=True)
class Sample:
    """A chunk of a corpus, which stands for all of it before the corpus is read.

    Attributes:
        documents: how many it has.
        fit: which of them do not fit a window.
        padding: the share of padding in its windows, between 0 and 1.
        remarks: lines about ignored fields and skipped records.
    """

    documents: int
    fit: Fit
    padding: float
    remarks: list[str]


def encode_documents(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    begin_prompts: bool = False,
    bad: BadRecords | None = None,
) -> Encoded:
    """Encode documents; texts and completions are followed by the end-of-text token, conversations by nothing.

    A prompt and its completion are encoded as one text. Conversations need a chat template. `begin_prompts` begins
    prompts with the token that the tokenizer begins texts with, if any, as for generation. `bad` may skip conversations
    that the chat template refuses: they have no tokens, and `fit_records` leaves them out.
    """
    bad = bad or BadRecords()
    if not documents:
        raise DataError("there are no documents to make batches of: give at least one")
    end = np.array([end_of_text(tokenizer)])
    begins = begin_prompts and tokenizer.begins_with_bos()
    begin = np.array([tokenizer.bos_token_id] if begins else [], dtype=np.int64)
    chats, pairs, texts = _by_kind(documents)
    # Encoded kind by kind, in batches, and dealt out below in the order of the documents.
    encoded_chats = _encode_conversations(chats, tokenizer, bad) if chats else iter(())
    encoded_pairs = iter(tokenizer.encode_pairs(pairs))
    encoded_texts = iter(tokenizer.encode_batch(texts))
    pieces: list[NDArray[np.integer]] = []
    flags: list[NDArray[np.bool_]] = []
    prompt_lengths = np.zeros(len(documents), dtype=np.int64)
    lengths = np.zeros(len(documents), dtype=np.int64)
    refused = np.zeros(len(documents), dtype=np.bool_)
    for number, document in enumerate(documents):
        if document.conversation is not None:
            ids, counted = next(encoded_chats)
            refused[number] = not len(ids)
            parts = [ids]
        elif document.prompt is not None:
            ids, prompt_length = next(encoded_pairs)
            parts = [begin, ids, end]
            prompt_lengths[number] = len(begin) + prompt_length
            counted = np.zeros(len(begin) + len(ids) + 1, dtype=np.bool_)
            if document.learned and document.text.strip():
                counted[prompt_lengths[number] :] = True
        else:
            ids = next(encoded_texts)
            parts = [ids, end]  # not joined, since the ids of bytes are of uint8
            counted = np.ones(len(ids) + 1, dtype=np.bool_)
        pieces += parts
        flags.append(counted)
        lengths[number] = len(counted)
    records = np.array([document.is_record for document in documents])
    return Encoded(
        tokens=np.concatenate(pieces, dtype=np.int32),
        counted=np.concatenate(flags) if records.any() else None,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        prompts=prompt_lengths,
        records=records,
        refused=refused if refused.any() else None,
    )


def _by_kind(
    documents: Sequence[Document],
) -> tuple[list[Document], list[tuple[str, str]], list[str]]:
    """Return the conversations, the prompts with their completions, and the texts among documents.

    Each kind is encoded as one batch, in a way of its own.
    """
    chats = []
    pairs = []
    texts = []
    for document in documents:
        if document.conversation is not None:
            chats.append(document)
        elif document.prompt is not None:
            pairs.append((document.prompt, document.text))
        else:
            texts.append(document.text)
    return chats, pairs, texts


def counted_line(encoded: Encoded) -> list[str]:
    """Return the line on how many of the tokens the loss counts, where it does not count all."""
    if encoded.counted is None:
        return []
    counted = sum(int(np.count_nonzero(part)) for part in encoded.parts(encoded.counted))
    # Nothing comes before the first token.
    # Each document's first token is counted above and predicted by nothing.
    counted -= int(np.count_nonzero(encoded.counted[encoded.starts]))
    return [
        f"the loss counts {plural(counted, 'token')}, {counted / encoded.num_tokens:.0%} of all"
    ]


def fit_records(
    encoded: Encoded, seq_len: int, truncate: str, bos: int | None
) -> tuple[NDArray[np.int64], Encoded, Fit]:
    """Leave out records that are longer than `seq_len` or have nothing to learn; texts may have any length.

    Args:
        encoded: the documents; with "prompt", a token may be replaced by `bos`.
        seq_len: tokens per window.
        truncate: "drop", or "prompt" to cut what comes before the first answer from the left, if that is enough.
        bos: the token that stays at the beginning of a record that is cut, if it is there.

    Returns:
        the indices of the remaining documents, these documents, and how many were left out or cut.
    """
    if encoded.counted is None:
        return np.arange(len(encoded)), encoded, Fit()
    starts = encoded.starts.copy()
    lengths = encoded.lengths.copy()
    keep = np.ones(len(encoded), dtype=np.bool_)
    too_long = 0
    cut = 0
    unanswered = 0
    longest = 0  # tokens of the longest record that does not fit
    for i in np.flatnonzero(encoded.records).tolist():
        start = int(starts[i])
        length = int(lengths[i])
        # Nothing comes before the first token.
        answers = np.flatnonzero(encoded.counted[start + 1 : start + length])
        over = length - seq_len
        if encoded.refused is not None and encoded.refused[i]:
            keep[i] = False
            continue
        if not len(answers):
            keep[i] = False
            unanswered += 1
            continue
        if over > 0:
            longest = max(longest, length)
        begins = bos is not None and encoded.tokens[start] == bos
        # Only tokens before the first answer are cut, and the token that begins the text stays.
        can_cut = over <= answers[0] - begins and not encoded.counted[start]
        if over > 0 and truncate == "prompt" and can_cut:
            if begins:
                encoded.tokens[start + over] = encoded.tokens[start]
            starts[i] = start + over
            lengths[i] = seq_len
            cut += 1
        elif over > 0:
            keep[i] = False
            too_long += 1
    fitted = replace(encoded, starts=starts, lengths=lengths)
    fitting = np.flatnonzero(keep)
    if cut or not keep.all():
        fitted = fitted.select(fitting)
    return fitting, fitted, Fit(too_long, longest, cut, unanswered)


def keep_fitting(
    encoded: Encoded, tokenizer: Tokenizer, seq_len: int, truncate: str, limit: int | None = None
) -> tuple[NDArray[np.int64], Encoded, list[str]]:
    """Return the indices of the documents that `fit_records` keeps, these documents, and lines about the others.

    `limit` is the longest sequence that the model allows, if that is known; `seq_len` may be longer.

    Raises:
        DataError: none is left.
    """
    longest = seq_len if limit is None else min(seq_len, limit)
    fitting, fitted, fit = fit_records(encoded, longest, truncate, tokenizer.bos_token_id)
    if encoded.refused is not None and encoded.refused.all():
        raise DataError("no record is left: the chat template refuses all of them")
    if not len(fitting):
        fit.refuse(len(encoded), seq_len, truncate, limit)
    return fitting, fitted, fit.describe(int(encoded.records.sum()), seq_len, truncate, limit)


def _encode_conversations(
    documents: Sequence[Document], tokenizer: Tokenizer, bad: BadRecords
) -> Iterator[tuple[NDArray[np.integer], NDArray[np.bool_]]]:
    """Yield the ids of each conversation, and which of them the assistant says; nothing for one that `bad` skips."""
    if not tokenizer.template_sources():
        raise DataError(
            f"{documents[0].name}: a conversation, and the tokenizer has no chat template: give --chat-template FILE, "
            "or begin the data with a conversation to get a plain template"
        )
    conversations = render_conversations(documents, tokenizer)
    while batch := list(itertools.islice(conversations, _BATCH)):
        texts = []
        for rendered in batch:
            if isinstance(rendered, DataError):
                # An empty text keeps the place of the record, so that ids and records stay in step.
                bad.meet(rendered)
                rendered = Rendered("", [])
            texts.append(rendered)
        # Many at once: the tokenizers library encodes a batch on several threads.
        encoded = tokenizer.encode_rendered([rendered.text for rendered in texts])
        for rendered, (ids, places) in zip(texts, encoded, strict=True):
            yield ids, _answer_tokens(rendered, places)


def _answer_tokens(rendered: Rendered, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which tokens hold text of an answer, bool [n], from the places of the tokens, int64 [n, 2]."""
    counted = np.zeros(len(places), dtype=np.bool_)
    for start, stop in rendered.answers:
        inside = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > start))
        if len(inside):
            # Tokens without a place of their own, such as spaces, lie between the others.
            counted[inside[0] : inside[-1] + 1] = True
    return counted
