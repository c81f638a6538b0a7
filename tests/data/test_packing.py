"""Windows of whole records: nothing lost, cut or seen by another, little padding, something to predict in each."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_models.data import packing
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.dataset import TokenDataset
from te_models.data.encoding import Fit
from te_models.data.formats import Document
from te_models.data.packing import cut_texts, pack_records, repeats
from te_models.errors import DataError
from te_models.model.targets import IGNORED

END, PAD = ByteTokenizer.eos_token_id, ByteTokenizer.pad_token_id
RECORDS = st.lists(
    st.builds(
        Document, st.text("abc", min_size=1, max_size=6), st.text("xyz", min_size=1, max_size=6)
    ),
    min_size=1,
    max_size=30,
)


def dataset(
    documents: list[Document], seq_len: int = 16, batch_size: int = 1, **options
) -> TokenDataset:
    options = {"packing": "documents", "seed": 0, **options}
    return TokenDataset(documents, ByteTokenizer(), seq_len, batch_size=batch_size, **options)


def records(batches: list[dict]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ids and labels of each document of some batches, without padding."""
    found = []
    for batch in batches:
        rows = [batch[name].tolist() for name in ("input_ids", "labels", "document_ids")]
        for ids, labels, owners in zip(*rows, strict=True):
            for owner in dict.fromkeys(owners):
                at = [i for i, other in enumerate(owners) if other == owner]
                assert at == list(range(at[0], at[-1] + 1)), "a document lies in one piece"
                part = tuple(ids[i] for i in at)
                if set(part) != {PAD}:
                    found.append((part, tuple(labels[i] for i in at)))
    return found


def expected(document: Document) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    prompt, text = (document.prompt or "").encode(), document.text.encode()
    return (*prompt, *text, END), (*[IGNORED] * len(prompt), *text, END)


@given(RECORDS, st.integers(13, 40), st.integers(0, 2))
def test_an_epoch_has_every_record_once_and_whole(
    documents: list[Document], seq_len: int, epoch: int
) -> None:
    alone = dataset(documents, seq_len)
    before = round(alone.windows_in(epoch))
    for _ in range(before):
        next(alone)
    batches = [next(alone) for _ in range(alone.windows_in(epoch + 1) - before)]
    assert Counter(records(batches)) == Counter(map(expected, documents))
    assert all(bool((batch["labels"][:, 1:] != IGNORED).any()) for batch in batches)


def best_fit_decreasing(lengths: list[int], size: int) -> int:
    """Return how many windows it takes: the longest record first, each into the fullest window that has room."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = [left for left in free if left >= length]
        if room:
            free.remove(min(room))
        free.append((min(room) if room else size) - length)
    return len(free)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=200))
def test_windows_are_as_full_as_best_fit_makes_them(lengths: list[int]) -> None:
    order, bounds = pack_records(np.array(lengths), 20)
    assert sorted(order) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in order[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert all(0 < total <= 20 for total in sums) and sum(total <= 10 for total in sums) <= 1
    assert len(sums) == best_fit_decreasing(lengths, 20)


def windows_by_best_fit(lengths: list[int], size: int, group: int) -> list[list[int]]:
    """Put each record, the longest first and of equals the earlier, into the fullest window that has room for it."""
    windows: list[list[int]] = []
    for first in range(0, len(lengths), group):
        records = range(first, min(first + group, len(lengths)))
        begun = len(windows)
        for record in sorted(records, key=lambda r: -lengths[r]):
            room = [
                (size - sum(lengths[r] for r in window), number)
                for number, window in enumerate(windows)
                if number >= begun
            ]
            fits = [(free, number) for free, number in room if free >= lengths[record]]
            if fits:
                windows[min(fits)[1]].append(record)
            else:
                windows.append([record])
    return [sorted(window) for window in windows]


@pytest.mark.parametrize("group", [4096, 7])
@pytest.mark.parametrize("seed", range(8))
def test_records_lie_where_best_fit_puts_them(
    seed: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each group by itself; the records of a window are in the order of the epoch."""
    monkeypatch.setattr(packing, "GROUP", group)
    lengths = np.random.default_rng(seed).integers(1, 21, 60)
    order, bounds = pack_records(lengths, 20)
    found = [order[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert found == windows_by_best_fit(lengths.tolist(), 20, group)


def test_the_fullest_window_is_taken_and_not_the_emptiest() -> None:
    order, bounds = pack_records(np.array([7, 6, 4, 3]), 10)
    assert [order[a:b].tolist() for a, b in itertools.pairwise(bounds)] == [[0, 3], [1, 2]]
    order, bounds = pack_records(np.array([8, 6, 2, 4]), 10)
    assert [order[a:b].tolist() for a, b in itertools.pairwise(bounds)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("length", range(2, 14))
def test_pieces_of_a_text_have_two_tokens_or_more(length: int) -> None:
    """One token predicts nothing: a last piece of one is left out, and no other."""
    starts, lengths = cut_texts(np.array([5, 100]), np.array([length, 3]), 4)
    pieces = [list(range(5 + at, min(5 + at + 4, 5 + length))) for at in range(0, length, 4)]
    pieces = [piece for piece in pieces if len(piece) > 1] + [[100, 101, 102]]
    assert [list(range(a, a + n)) for a, n in zip(starts, lengths, strict=True)] == pieces


def test_windows_of_a_stream_that_predict_nothing_are_left_out() -> None:
    """One inside a long prompt, of two tokens too; and what fills the last window counts for nothing."""
    for seq_len in (2, 3, 4):
        data = dataset([Document("ab", "x" * 9)], seq_len, packing="stream", shuffle=False)
        text = [*b"x" * 9, *b"ab", END]
        rows = [text[at : at + seq_len] for at in range(0, len(text), seq_len)]
        counted = [list(range(at, min(at + seq_len, 12))) for at in range(0, 12, seq_len)]
        wanted = [
            row + [PAD] * (seq_len - len(row))
            for row, places in zip(rows, counted, strict=True)
            if any(place >= 9 for place in places[1:])
        ]
        batches = [next(data) for _ in range(data.num_windows)]
        assert [batch["input_ids"][0].tolist() for batch in batches] == wanted


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("seq_len", [2, 3, 4, 7])
def test_windows_of_texts_that_predict_nothing_are_left_out(seq_len: int, packing: str) -> None:
    """A last one of one token, and one of two tokens of which the second begins a document that is told apart."""
    for lengths in ((1, 2, 1), (2, 1, 3), (2, 2, 2), (1,), (1, 1, 4, 2), (2, 1, 1)):
        texts = ["abc"[i % 3] * length for i, length in enumerate(lengths)]
        stream = [place for text in texts for place in enumerate([*text.encode(), END])]
        if len(stream) < seq_len:
            continue
        wanted = []
        for at in range(0, len(stream), seq_len):
            window = stream[at : at + seq_len]
            if any(packing == "stream" or offset > 0 for offset, _ in window[1:]):
                ids = [token for _, token in window]
                wanted.append(ids + [PAD] * (seq_len - len(ids)))
        data = dataset([Document(text) for text in texts], seq_len, packing=packing, shuffle=False)
        assert data.num_windows == len(wanted), lengths
        batches = [next(data) for _ in range(data.num_windows)]
        assert [batch["input_ids"][0].tolist() for batch in batches] == wanted, lengths


@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_neighbors_of_one_weight_are_not_in_phase(weight: float) -> None:
    """Of any few documents in a row about their share is in each epoch, not all of them in one and none in others."""
    for epoch in range(8):
        found = repeats(np.full(64, weight), epoch)
        shares = np.convolve(found, np.ones(16), mode="valid") / 16
        assert (abs(shares - weight) <= 0.13).all()


def test_padding_behind_texts_is_no_document() -> None:
    batch = next(dataset([Document("abc"), Document("de")], 10, shuffle=False))
    assert batch["document_ids"].tolist() == [[1] * 4 + [2] * 3 + [-1] * 3]
    assert batch["labels"].tolist() == [[IGNORED, *b"bc", END, IGNORED, *b"e", END, *[IGNORED] * 3]]


def test_a_window_of_its_own() -> None:
    documents = [Document("ab", "x"), Document("c", "yz"), Document("t" * 20)]
    data = dataset(documents, packing="none", shuffle=False)
    batches = [next(data) for _ in range(4)]
    assert data.num_windows == 4
    assert batches[0]["document_ids"].tolist() == [[1] * 4 + [-1] * 12]
    assert batches[0]["input_ids"].tolist() == [[*b"xab", END, *[PAD] * 12]]
    assert batches[0]["labels"].tolist() == [[IGNORED, *b"ab", END, *[IGNORED] * 12]]
    assert batches[2]["input_ids"].tolist() == [[*b"t" * 16]], "a text is cut"
    assert batches[3]["input_ids"].tolist() == [[*b"t" * 4, END, *[PAD] * 11]]


def test_texts_among_records_are_cut_and_records_are_not() -> None:
    documents = [Document("t" * 40), Document("ab", "x" * 12), Document("cd", "y" * 12)]
    data = dataset(documents)
    found = records([next(data) for _ in range(data.num_windows)])
    texts = [part for part, _ in found if ord("t") in part]
    assert (
        sorted(map(len, texts)) == [9, 16, 16] and sum(part.count(ord("t")) for part in texts) == 40
    )
    assert {part for part, _ in found} >= {expected(document)[0] for document in documents[1:]}


@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0, 0.5, 0.25, 1.75])
def test_weights_are_the_average_number_per_epoch(weight: float) -> None:
    counts = np.array([repeats(np.full(40, weight), epoch) for epoch in range(8)])
    assert set(counts.flatten()) <= {int(weight), -int(-weight // 1)}
    assert (abs(counts.cumsum(0) - weight * np.arange(1, 9)[:, None]) < 1).all(), (
        "no document is far from its share"
    )
    assert (abs(counts.sum(1) - weight * 40) <= 2).all(), "no epoch is far from its size"


def test_a_weight_repeats_documents() -> None:
    documents = [Document("a", "x"), Document("b", "y")]
    data = dataset(documents, seq_len=4, weights=np.array([3.0, 1.0]))
    found = Counter(part for part, _ in records([next(data) for _ in range(data.windows_in(2))]))
    assert found == {(ord("x"), ord("a"), END): 6, (ord("y"), ord("b"), END): 2}
    half = dataset(documents, seq_len=4, weights=np.array([0.5, 0.5]))
    first, second = (records([next(half)])[0][0] for _ in range(2))
    assert first != second and half.windows_in(2) == 2 and half.state_dict()["epoch"] == 2


def test_epochs_in_part() -> None:
    data = dataset([Document("a" * 9, "x") for _ in range(10)], seq_len=12)
    assert [data.windows_in(epochs) for epochs in (1, 2, 0.5, 1.25, 0.01)] == [10, 20, 5, 13, 1]


def test_descriptions_say_what_is_left_out() -> None:
    data = dataset([Document("abc", "x"), Document("a" * 30, "x"), Document("d", "y")])
    assert data.describe() == (
        "2 records, 8 tokens in 1 window with 50.0% padding\n"
        "1 of 3 records is longer than seq_len=16 (the longest has 32 tokens) and is left out: raise --seq-len, or "
        "cut prompts with --truncate prompt"
    )
    cut = dataset([Document("abc", "x" * 30), Document("d", "y")], truncate="prompt")
    assert (
        "1 of 2 prompts is cut from the left to seq_len=16 (the longest has 34 tokens)"
        in cut.describe()
    )
    for limit, truncate, advice in (
        (17, "drop", "raise --seq-len, or cut prompts with --truncate prompt"),
        (17, "prompt", "raise --seq-len"),
        (16, "drop", "cut prompts with --truncate prompt"),
        (16, "prompt", "the model takes no longer ones"),
    ):
        (line,) = Fit(too_long=1, longest=32).describe(3, 16, truncate, limit)
        assert line.endswith(f" left out: {advice}")
    with pytest.raises(
        DataError, match=r"2 of 2 records are longer than seq_len=16 \(the longest has 32 tokens"
    ):
        dataset([Document("a" * 30, "x")] * 2)
