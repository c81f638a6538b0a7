"""Packing that loses no token, repeats none and resumes exactly."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from te_models.config.data import PACKINGS, DataConfig
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.dataset import TokenDataset, check_fit
from te_models.data.documents import Document, load_documents
from te_models.data.encoding import encode_documents
from te_models.data.training_data import open_data
from te_models.errors import UsageError
from te_models.model.targets import IGNORED, PAD_DOCUMENT
from te_models.planning.memory_plan import plan_memory

END, PADDING = ByteTokenizer.eos_token_id, ByteTokenizer.pad_token_id
Batch = dict[str, Tensor]


def dataset(
    documents: list[Document], seq_len: int = 4, batch_size: int = 1, seed: int = 0, **options
) -> TokenDataset:
    return TokenDataset(
        documents, ByteTokenizer(), seq_len, batch_size=batch_size, seed=seed, **options
    )


def take(data: TokenDataset, count: int) -> list[Batch]:
    return [next(data) for _ in range(count)]


def windows(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
    """Every window of the batches: its input ids and labels."""
    return [
        row
        for batch in batches
        for row in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    ]


def expected(document: Document) -> tuple[tuple[Any, Any], ...]:
    prompt, text = (document.prompt or "").encode(), document.text.encode()
    learned = document.prompt is None or document.text  # an empty completion is no answer
    return tuple(
        [(byte, IGNORED) for byte in prompt]
        + [(byte, byte if learned else IGNORED) for byte in (*text, END)]
    )


DOCUMENTS = st.lists(
    st.builds(Document, st.text("abc\u00e9", max_size=9), st.none() | st.text("xyz", max_size=5)),
    min_size=1,
    max_size=8,
)


def long_enough(documents: list[Document], seq_len: int) -> list[Document]:
    return [*documents, Document("-" * seq_len)]


def cut(documents: list[Document], seq_len: int) -> list[tuple[list[Any], list[Any]]]:
    """The documents back to back in windows, the last one padded."""
    pairs = [pair for document in documents for pair in expected(document)]
    pairs += [(PADDING, IGNORED)] * (-len(pairs) % seq_len)
    rows = [pairs[at : at + seq_len] for at in range(0, len(pairs), seq_len)]
    return [([token for token, _ in row], [label for _, label in row]) for row in rows]


def counts(window: tuple[list[int], list[int]]) -> bool:
    return any(label != IGNORED for label in window[1][1:])


@given(DOCUMENTS, st.integers(2, 9), st.integers(0, 3), st.booleans())
def test_an_epoch_has_every_window_with_something_to_predict_once(
    documents: list[Document], seq_len: int, epoch: int, shuffle: bool
) -> None:
    documents = long_enough(documents, seq_len)
    data = dataset(documents, seq_len, shuffle=shuffle)
    while data.state_dict()["epoch"] < epoch:
        next(data)
    laid = data._shuffled(epoch)
    given = dict(zip(laid.windows.tolist(), windows(take(data, laid.num_windows)), strict=True))
    assert data.state_dict()["epoch"] > epoch
    assert sorted(laid.order) == list(range(len(documents)))
    assert shuffle or laid.order.tolist() == list(range(len(documents)))
    whole = cut([documents[i] for i in laid.order], seq_len)
    assert given == {place: window for place, window in enumerate(whole) if counts(window)}
    assert data.num_tokens == sum(len(expected(document)) for document in documents)


@given(
    DOCUMENTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.booleans(),
    st.sampled_from(PACKINGS), st.sampled_from([None, 0.5, 2.5]),
)  # fmt: skip
def test_resuming_anywhere_equals_going_on(
    documents: list[Document], seq_len: int, batch_size: int, world_size: int, done: int, shuffle: bool, packing: str,
    weight: float | None,
) -> None:  # fmt: skip
    documents = long_enough(documents, seq_len)
    weights = None if weight is None else np.full(len(documents), weight)
    shape = {
        "seq_len": seq_len,
        "shuffle": shuffle,
        "rank": world_size - 1,
        "world_size": world_size,
    }
    shape |= {"packing": packing, "weights": weights}
    first = dataset(documents, batch_size=batch_size, **shape)
    take(first, done)
    state = json.loads(json.dumps(first.state_dict()))
    again = dataset(documents, batch_size=batch_size, **shape, seed=7)
    take(again, 3)
    again.load_state_dict(state)
    assert again.state_dict() == state
    for one, other in zip(take(first, 6), take(again, 6), strict=True):
        assert all(one[name].equal(other[name]) for name in one)


@given(
    DOCUMENTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 4), st.sampled_from(PACKINGS)
)
def test_ranks_partition_the_windows(
    documents: list[Document], seq_len: int, batch_size: int, world_size: int, packing: str
) -> None:
    documents, how = long_enough(documents, seq_len), dict(packing=packing, world_size=world_size)
    ranks = [
        dataset(documents, seq_len, batch_size, rank=rank, **how) for rank in range(world_size)
    ]
    alone = dataset(documents, seq_len, batch_size * world_size, packing=packing)
    for _ in range(5):
        assert windows([next(rank) for rank in ranks]) == windows([next(alone)])
    assert {json.dumps(data.state_dict()) for data in [*ranks, alone]} == {
        json.dumps(alone.state_dict())
    }


@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 4))
def test_evaluation_has_every_document_once_in_order(
    documents: list[Document], seq_len: int, batch_size: int, world_size: int
) -> None:
    documents = long_enough(documents, seq_len)
    ranks = [
        dataset(documents, seq_len, batch_size, shuffle=False, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    parts = [rank.eval_batches(1000) for rank in ranks]
    assert {len(part) for part in parts} == {-(-ranks[0].num_windows // (batch_size * world_size))}
    batches = [batch for together in zip(*parts, strict=True) for batch in together]
    assert {batch["input_ids"].shape for batch in batches} == {(batch_size, seq_len)}
    found = windows(batches)
    filled = [window for window in cut(documents, seq_len) if counts(window)]
    assert found[: len(filled)] == filled
    assert all(
        window == ([PADDING] * seq_len, [IGNORED] * seq_len) for window in found[len(filled) :]
    )


def test_evaluation_is_fixed_and_apart_from_training() -> None:
    documents = [Document(f"text {number}") for number in range(30)]
    data, other, plain = (
        dataset(documents, 8, 2),
        dataset(documents, 8, 2),
        dataset(documents, 8, 2, shuffle=False),
    )
    take(data, 5)
    first = data.eval_batches(3)
    assert len(first) == 3
    assert windows(first) == windows(data.eval_batches(3)) == windows(other.eval_batches(3))
    everything = windows(take(plain, plain.num_windows // 2))
    places = [everything.index(window) for window in windows(first)]
    assert places == [int(i * plain.num_windows / 6) for i in range(6)], (
        "spread evenly over the documents"
    )
    assert windows([next(data)]) == windows(take(other, 6)[5:])


def test_each_epoch_and_seed_has_its_own_order() -> None:
    documents = [Document(f"{number:03}") for number in range(50)]
    data = dataset(documents, 4)
    first, second = windows(take(data, 50)), windows(take(data, 50))
    assert (
        sorted(first)
        == sorted(second)
        == sorted(windows(take(dataset(documents, 4, shuffle=False), 50)))
    )
    assert first != second
    assert first == windows(take(dataset(documents, 4), 50))
    assert first != windows(take(dataset(documents, 4, seed=1), 50))
    places = dataset(documents, 4)._shuffled(0).windows
    assert sorted(places) == list(range(50)) and abs(places[1:] - places[:-1]).mean() > 5, (
        "neighbors are torn apart"
    )


def test_resuming_with_other_batch_and_world_sizes_goes_on_at_the_same_window() -> None:
    documents = [Document(f"text {number}") for number in range(30)]
    whole = windows(take(dataset(documents, 8, 1), 100))
    first = dataset(documents, 8, 3, world_size=2)
    take(first, 4)
    again = dataset(documents, 8, 5)
    again.load_state_dict(first.state_dict())
    assert windows(take(again, 3)) == whole[24 : 24 + 15]


def test_padding_without_a_pad_token_is_the_end_token() -> None:
    class NoPad(ByteTokenizer):
        pad_token_id = None

    data = TokenDataset([Document("abc")], NoPad(), 6, batch_size=1, seed=0, shuffle=False)
    assert windows([next(data)]) == [([*b"abc", END, END, END], [*b"abc", END, IGNORED, IGNORED])]


RECORDS = [Document("a", "xy")] * 3
OTHER_DATA: dict[str, tuple[list[Document], dict[str, Any]]] = {
    "text": ([Document("abc"), Document("de")], dict(documents=[Document("abc"), Document("df")])),
    "order": ([Document("abc"), Document("de")], dict(documents=[Document("de"), Document("abc")])),
    "prompt of a text": ([Document("abc")] * 3, dict(documents=[Document("bc", prompt="a")] * 3)),
    "shuffle": ([Document("abc")] * 3, dict(shuffle=False)),
    "answer": (RECORDS, dict(documents=[Document("b", "xy")] * 3)),
    "border of the prompt": (RECORDS, dict(documents=[Document("ya", "x")] * 3)),
    "weights": (RECORDS, dict(weights=np.full(3, 2.0))),
    "packing": (RECORDS, dict(packing="none")),
    "seq_len": (RECORDS, dict(seq_len=5)),
}


@pytest.mark.parametrize("change", OTHER_DATA)
def test_resuming_on_other_data_is_an_error(change: str) -> None:
    documents, other = OTHER_DATA[change]
    same = dict(documents=documents, packing="documents" if documents is RECORDS else "stream")
    state = dataset(**same).state_dict()
    dataset(**same).load_state_dict(state)
    with pytest.raises(ValueError, match="position is of other data: resume with the same --data"):
        dataset(**{**same, **other}).load_state_dict(state)


def test_state_is_plain_integers_that_json_keeps() -> None:
    data = dataset([Document("some text")], 4, 2)
    take(data, 4)
    state = data.state_dict()
    assert set(state) == {"epoch", "position", "seed", "fingerprint"}
    assert (state["epoch"], state["position"]) == (2, 2)  # 8 windows of which an epoch has 3
    assert all(type(value) is int and abs(value) < 2**53 for value in state.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"seq_len": 100},
            "the data has 5 tokens, less than one window of seq_len=100: lower --seq-len or give more data",
        ),
        ({"seq_len": 1}, "seq_len=1 is out of range: give 2 or more"),
        ({"batch_size": 0}, "batch_size=0 is out of range: give 1 or more"),
        ({"documents": []}, "there are no documents to make batches of"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(**{"documents": [Document("text")], **arguments})


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
def test_a_position_in_data_with_other_answers_is_refused(packing: str) -> None:
    """Equal tokens, prompts and lengths, but one token more that counts: of what the user said between two answers."""
    documents = [Document("yes, because" * (1 + n), prompt="why? ") for n in range(3)]
    encoded = encode_documents(documents, ByteTokenizer())
    assert encoded.counted is not None
    counted = encoded.counted.copy()
    counted[len("why? yes")] ^= True
    sizes = dict(seq_len=64, batch_size=1, seed=0, packing=packing)
    saved = TokenDataset(encoded, ByteTokenizer(), **sizes)
    other = TokenDataset(dataclasses.replace(encoded, counted=counted), ByteTokenizer(), **sizes)
    state = saved.state_dict()
    TokenDataset(encoded, ByteTokenizer(), **sizes).load_state_dict(state)
    with pytest.raises(ValueError, match="position is of other data"):
        other.load_state_dict(state)


def test_a_tokenizer_without_end_of_text_is_an_error() -> None:
    class NoEnd(ByteTokenizer):
        eos_token_id = None

    with pytest.raises(
        ValueError, match="no end-of-text token to put between documents: name one as eos_token"
    ):
        TokenDataset([Document("text")], NoEnd(), 4, batch_size=1, seed=0)


def test_tokenizer_and_length_fit_the_model() -> None:
    config = dataclasses.replace(
        get_preset("gated-nano"), vocab_size=259, max_position_embeddings=64
    )
    check_fit(ByteTokenizer(), config, 64)
    with pytest.raises(
        ValueError,
        match="has 259 ids but the model's vocab_size is 258: use --vocab-size 259 or more",
    ):
        check_fit(ByteTokenizer(), dataclasses.replace(config, vocab_size=258))
    with pytest.raises(
        ValueError,
        match="--seq-len 65 is longer than the model allows .max_position_embeddings=64.: lower",
    ):
        check_fit(ByteTokenizer(), config, 65)
    stretched = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    long = dataclasses.replace(config, rope_scaling=stretched)
    check_fit(ByteTokenizer(), long, 128)
    check_fit(ByteTokenizer(), long, 500, "documents")
    plan_memory(long, get_recipe("bf16"), batch_size=1, seq_len=128)
    with pytest.raises(
        ValueError,
        match="--seq-len 129 is longer than the model allows .the stretched limit of RoPE=128",
    ):
        check_fit(ByteTokenizer(), long, 129)


def test_description(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1999)
    (tmp_path / "b.txt").write_text("b" * 100)
    described = dataset(load_documents(tmp_path), 100).describe()
    assert described == f"2 documents, 2,101 tokens in 21 windows, from {tmp_path}", (
        "a last window of one token has nothing to predict"
    )
    one = dataset([Document("text")])
    assert one.describe() == "1 document, 5 tokens in 1 window"
    assert repr(one).startswith("TokenDataset(1 document, 5 tokens in 1 window, in batches of ")


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "streamed"])
@pytest.mark.parametrize("kind", ["texts", "records", "both"])
def test_windows_longer_than_the_model_allows_hold_documents_that_are_not(
    kind: str, streaming: bool, tmp_path: Path
) -> None:
    limit = 20
    texts = [chr(97 + i) * (3 + 7 * i) for i in range(8)]  # 3 to 52 letters
    paths = []
    if kind != "records":
        paths.append(tmp_path / "texts.jsonl")
        paths[-1].write_text("\n".join(json.dumps({"text": text}) for text in texts))
    if kind != "texts":
        paths.append(tmp_path / "records.jsonl")
        records = [{"prompt": text.upper()[:-2], "completion": text[-2:]} for text in texts]
        paths[-1].write_text("\n".join(map(json.dumps, records)))
    files = [str(path) for path in paths]
    config = TrainConfig(seq_len=64, batch_size=2, eval_batches=2)
    settings = DataConfig(data=files, eval_data=files, packing="documents", streaming=streaming)
    dataset, held_out = open_data(settings, ByteTokenizer(), config, limit=limit)
    lengths: list[int] = []
    seen = set()
    for batch in [*held_out, *(next(dataset) for _ in range(12))]:
        assert batch["input_ids"].shape == (2, 64)
        for ids, documents in zip(
            batch["input_ids"].tolist(), batch["document_ids"].tolist(), strict=True
        ):
            for document in set(documents) - {PAD_DOCUMENT}:
                piece = [i for i, number in zip(ids, documents, strict=True) if number == document]
                lengths.append(len(piece))
                seen.update(bytes(i for i in piece if i < 256).decode())
    assert max(lengths) <= limit
    learned = {text[0] for text in texts}
    if kind == "records":
        # Records are left out where texts are cut; the token that ends a record counts too.
        learned = {text[0] for text in texts if len(text) < limit}
        expected = "5 of 8 records are longer than the 20 tokens that the model allows"
        assert expected in dataset.describe()
    assert {letter for letter in seen if letter.islower()} == learned
    # A position counts windows, which another limit cuts elsewhere.
    shorter, _ = open_data(settings, ByteTokenizer(), config, limit=limit - 1)
    with pytest.raises(UsageError, match="the saved data position is of other data"):
        shorter.load_state_dict(dataset.state_dict())
