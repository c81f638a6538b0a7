"""Data: loading, the split, and the packing that loses no token, repeats none and resumes exactly."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import te_models.data.dataset as data_module
from te_models.data.dataset import IGNORED, Document, TokenDataset, check_vocabulary, load_documents, split_documents
from te_models.data.tokenizer import ByteTokenizer

END, PADDING = ByteTokenizer.eos_token_id, ByteTokenizer.pad_token_id
Batch = dict[str, Tensor]


def dataset(documents: list[Document], seq_len: int = 4, batch_size: int = 1, seed: int = 0, **options) -> TokenDataset:
    return TokenDataset(documents, ByteTokenizer(), seq_len, batch_size=batch_size, seed=seed, **options)


def take(data: TokenDataset, count: int) -> list[Batch]:
    return [next(data) for _ in range(count)]


def windows(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
    """Every window of the batches: its input ids and labels."""
    return [row for batch in batches for row in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)]


def pieces(rows: list[tuple[list[int], list[int]]]) -> list[tuple[tuple[int, int], ...]]:
    """The documents in some windows, as (id, label) pairs up to and with their end-of-text token; the rest is last."""
    found: list[list[tuple[int, int]]] = [[]]
    for ids, labels in rows:
        for pair in zip(ids, labels, strict=True):
            found[-1].append(pair)
            if pair[0] == END:
                found.append([])
    return [tuple(piece) for piece in found]


def expected(document: Document) -> tuple[tuple[int, int], ...]:
    prompt, text = (document.prompt or "").encode(), document.text.encode()
    return tuple([(byte, IGNORED) for byte in prompt] + [(byte, byte) for byte in (*text, END)])


DOCUMENTS = st.lists(
    st.builds(Document, st.text("abc\u00e9", max_size=9), st.none() | st.text("xyz", max_size=5)),
    min_size=1,
    max_size=8,
)


def long_enough(documents: list[Document], seq_len: int) -> list[Document]:
    return [*documents, Document("-" * seq_len)]


@given(DOCUMENTS, st.integers(2, 9), st.integers(0, 3), st.booleans())
def test_an_epoch_has_every_token_of_every_document_once(
    documents: list[Document], seq_len: int, epoch: int, shuffle: bool
) -> None:
    documents = long_enough(documents, seq_len)
    data = dataset(documents, seq_len, shuffle=shuffle)
    take(data, epoch * data.num_windows)
    given_in = data._shuffled(epoch).windows
    given = dict(zip(given_in.tolist(), windows(take(data, data.num_windows)), strict=True))
    *found, rest = pieces([given[place] for place in range(data.num_windows)])
    assert sorted(found) == sorted(map(expected, documents))
    assert shuffle or found == [expected(document) for document in documents]
    assert set(rest) <= {(PADDING, IGNORED)}
    assert len(rest) < seq_len
    assert data.num_tokens == sum(map(len, found)) == data.num_windows * seq_len - len(rest)


@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.booleans())
def test_resuming_anywhere_equals_going_on(
    documents: list[Document], seq_len: int, batch_size: int, world_size: int, done: int, shuffle: bool
) -> None:
    documents = long_enough(documents, seq_len)
    shape = {"seq_len": seq_len, "shuffle": shuffle, "rank": world_size - 1, "world_size": world_size}
    first = dataset(documents, batch_size=batch_size, **shape)
    take(first, done)
    state = json.loads(json.dumps(first.state_dict()))
    again = dataset(documents, batch_size=batch_size, **shape, seed=7)
    take(again, 3)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert windows(take(again, 6)) == windows(take(first, 6))


@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 4))
def test_ranks_partition_the_windows(documents: list[Document], seq_len: int, batch_size: int, world_size: int) -> None:
    documents = long_enough(documents, seq_len)
    ranks = [dataset(documents, seq_len, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    alone = dataset(documents, seq_len, batch_size * world_size)
    for _ in range(5):
        assert windows([next(rank) for rank in ranks]) == windows([next(alone)])
    assert {json.dumps(data.state_dict()) for data in [*ranks, alone]} == {json.dumps(alone.state_dict())}


@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 4))
def test_evaluation_has_every_document_once_in_order(
    documents: list[Document], seq_len: int, batch_size: int, world_size: int
) -> None:
    ranks = [
        dataset(documents, seq_len, batch_size, shuffle=False, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    parts = [rank.eval_batches(1000) for rank in ranks]
    assert {len(part) for part in parts} == {-(-ranks[0].num_windows // (batch_size * world_size))}
    batches = [batch for together in zip(*parts, strict=True) for batch in together]
    assert {batch["input_ids"].shape for batch in batches} == {(batch_size, seq_len)}
    *found, rest = pieces(windows(batches))
    assert found == [expected(document) for document in documents]
    assert set(rest) <= {(PADDING, IGNORED)}


def test_evaluation_is_fixed_and_apart_from_training() -> None:
    documents = [Document(f"text {number}") for number in range(30)]
    data, other, plain = dataset(documents, 8, 2), dataset(documents, 8, 2), dataset(documents, 8, 2, shuffle=False)
    take(data, 5)
    first = data.eval_batches(3)
    assert len(first) == 3
    assert windows(first) == windows(data.eval_batches(3)) == windows(other.eval_batches(3))
    everything = windows(take(plain, plain.num_windows // 2))
    places = [everything.index(window) for window in windows(first)]
    assert places == [int(i * plain.num_windows / 6) for i in range(6)], "spread evenly over the documents"
    assert windows([next(data)]) == windows(take(other, 6)[5:])


def test_batches_are_int64_windows() -> None:
    batch = next(dataset([Document("some text to learn")], 8, 2))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == {
        "input_ids": ((2, 8), torch.int64),
        "labels": ((2, 8), torch.int64),
    }


def test_only_completions_are_learnt() -> None:
    documents = [Document("bc", prompt="a\u00e9"), Document("d", prompt=""), Document("", prompt="z"), Document("e")]
    ids, labels = windows(take(dataset(documents, 14, shuffle=False), 1))[0]
    a, e_acute, z = ord("a"), [*"\u00e9".encode()], ord("z")
    assert ids == [a, *e_acute, *b"bc", END, *b"d", END, z, END, *b"e", END, PADDING, PADDING]
    assert labels == [-100, -100, -100, *b"bc", END, *b"d", END, -100, END, *b"e", END, -100, -100]


def test_each_epoch_and_seed_has_its_own_order() -> None:
    documents = [Document(f"{number:03}") for number in range(50)]
    data = dataset(documents, 4)
    first, second = windows(take(data, 50)), windows(take(data, 50))
    assert sorted(first) == sorted(second) == sorted(windows(take(dataset(documents, 4, shuffle=False), 50)))
    assert first != second
    assert first == windows(take(dataset(documents, 4), 50))
    assert first != windows(take(dataset(documents, 4, seed=1), 50))
    places = dataset(documents, 4)._shuffled(0).windows
    assert sorted(places) == list(range(50)) and abs(places[1:] - places[:-1]).mean() > 5, "neighbours are torn apart"


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


OTHER_DATA: dict[str, Callable[[list[Document]], TokenDataset]] = {
    "text": lambda documents: dataset([Document("other"), *documents[1:]]),
    "order": lambda documents: dataset(documents[::-1]),
    "prompt": lambda documents: dataset([Document("xt 0", prompt="te"), *documents[1:]]),
    "seq_len": lambda documents: dataset(documents, 5),
    "shuffle": lambda documents: dataset(documents, shuffle=False),
}


@pytest.mark.parametrize("change", OTHER_DATA)
def test_resuming_on_other_data_is_an_error(change: str) -> None:
    documents = [Document(f"text {number}") for number in range(9)]
    state = dataset(documents).state_dict()
    dataset(list(documents)).load_state_dict(state)
    with pytest.raises(ValueError, match="position is of other data: resume with the same --data"):
        OTHER_DATA[change](documents).load_state_dict(state)


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
        ({"seq_len": 1}, "seq_len=1 and batch_size=1 are out of range"),
        ({"batch_size": 0}, "seq_len=4 and batch_size=0 are out of range"),
        ({"documents": []}, "there are no documents to make batches of"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(**{"documents": [Document("text")], **arguments})


def test_a_tokenizer_without_end_of_text_is_an_error() -> None:
    class NoEnd(ByteTokenizer):
        eos_token_id = None

    with pytest.raises(ValueError, match="no end-of-text token to put between documents: name one as eos_token"):
        TokenDataset([Document("text")], NoEnd(), 4, batch_size=1, seed=0)


def test_vocabulary_check() -> None:
    check_vocabulary(ByteTokenizer(), 259)
    with pytest.raises(ValueError, match="has 259 ids but the model's vocab_size is 258: use --vocab-size 259 or more"):
        check_vocabulary(ByteTokenizer(), 258)


def test_description(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1999)
    (tmp_path / "b.txt").write_text("b" * 100)
    described = dataset(load_documents(tmp_path), 100).describe()
    assert described == f"2 documents, 2,101 tokens in 22 windows, from {tmp_path}"
    assert dataset([Document("text")]).describe() == "1 documents, 5 tokens in 2 windows"


@given(st.sets(st.text("abc"), min_size=2, max_size=40), st.floats(0.01, 0.99), st.integers(0, 99), st.randoms())
def test_split_does_not_depend_on_order(texts: set[str], fraction: float, seed: int, random) -> None:
    documents = [Document(text, name=str(number)) for number, text in enumerate(sorted(texts))]
    training, evaluation = split_documents(documents, fraction, seed)
    assert sorted([*training, *evaluation], key=documents.index) == documents
    assert training == [document for document in documents if document in training]
    assert len(evaluation) == min(max(1, round(fraction * len(documents))), len(documents) - 1)
    random.shuffle(documents)
    assert set(split_documents(documents, fraction, seed)[1]) == set(evaluation)


def test_split_keeps_copies_together_and_follows_the_seed() -> None:
    documents = [Document(str(number % 20), name=str(number)) for number in range(60)]
    sides = {frozenset(document.text for document in split_documents(documents, 0.3, seed)[1]) for seed in range(5)}
    assert len(sides) == 5
    training, evaluation = split_documents(documents, 0.3)
    assert (len(training), len(evaluation)) == (42, 18)
    assert not {document.text for document in training} & {document.text for document in evaluation}


def test_split_tells_prompts_apart() -> None:
    documents = [Document("b"), Document("b", prompt=""), Document("b", prompt="a"), Document("b", prompt="None")]
    training, evaluation = split_documents(documents, 0.5)
    assert (len(training), len(evaluation)) == (2, 2)


def test_split_of_one_document_cuts_it_at_a_line() -> None:
    document = Document("".join(f"line {number}\n" for number in range(100)), name="a", source="b")
    training, evaluation = split_documents([document], 0.1)
    assert [training[0].text + evaluation[0].text] == [document.text]
    assert evaluation[0].text.startswith("line ")
    assert 0.1 <= len(evaluation[0].text) / len(document.text) < 0.12
    assert (evaluation[0].name, evaluation[0].source, len(training), len(evaluation)) == ("a", "b", 1, 1)


@pytest.mark.parametrize(
    ("documents", "fraction", "message"),
    [
        ([Document("no line break")], 0.1, "only document cannot be cut .* give more documents"),
        ([Document("a\nb\nc\n", prompt="p")], 0.1, "only document cannot be cut .* give more documents"),
        ([Document("a"), Document("a", name="b")], 0.1, "2 documents, all with the same content, cannot be split"),
        ([], 0.1, "0 documents"),
        ([Document("a"), Document("b")], 0.0, "eval_fraction=0.0 is out of range"),
        ([Document("a"), Document("b")], 1.0, "eval_fraction=1.0 is out of range"),
    ],
)
def test_impossible_splits(documents: list[Document], fraction: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_documents(documents, fraction)


def test_text_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf h\xc3\xa9\r\n")
    assert load_documents(file) == [Document(" h\u00e9\r\n", None, str(file), str(file))]


def test_jsonl_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.JSONL"
    rows = [
        '{"text": "one\u2028line", "other": 1}',
        "",
        '{"prompt": "q", "completion": "a"}\r',
        '{"text": " \\n"}',
        '{"prompt": "q", "completion": ""}',
        '{"text": "t", "prompt": "q", "completion": "a"}',
        '{"prompt": "", "completion": "\\ud83d\\ude00"}',
    ]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert load_documents(str(file)) == [
        Document("one\u2028line", None, f"{file}:1", str(file)),
        Document("a", "q", f"{file}:3", str(file)),
        Document("", "q", f"{file}:5", str(file)),
        Document("t", None, f"{file}:6", str(file)),
        Document("\U0001f600", "", f"{file}:7", str(file)),
    ]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": ["a", "", "b"], "n": [1, 2, 3]}, [("a", None, 1), ("b", None, 3)]),
        ({"completion": ["a", "b"], "prompt": ["x", "y"]}, [("a", "x", 1), ("b", "y", 2)]),
    ],
)
def test_parquet_rows(tmp_path: Path, columns: dict[str, list], expected: list[tuple[str, str | None, int]]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), file, row_group_size=1)
    assert load_documents(file) == [
        Document(text, prompt, f"{file}, row {row}", str(file)) for text, prompt, row in expected
    ]


def test_folder_is_read_sorted_without_hidden_and_binary_files(tmp_path: Path) -> None:
    files = {
        "b.txt": b"2",
        "a/z.md": b"1",
        "a.txt": b"0",
        "c.jsonl": b'{"text": "3"}\n{"text": "4"}',
        "d/e/f.py": b"5",
        "empty.txt": b" ",
        "image.png": b"\x89PNG\0",
        ".hidden": b"no",
        ".git/config": b"no",
        "d/__pycache__/f.txt": b"no",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    documents = load_documents(tmp_path)
    assert [document.text for document in documents] == ["0", "1", "2", "3", "4", "5"]
    assert {document.source for document in documents} == {str(tmp_path)}
    assert documents[1].name == str(tmp_path / "a/z.md")


def test_default_corpus_is_python_itself() -> None:
    documents = load_documents(None)
    names = [document.name for document in documents]
    topics = [name for name in names if name.startswith("topics/")]
    assert len(topics) > 50
    assert names == sorted(topics) + sorted(set(names) - set(topics))
    assert {"topics/assert", "ast.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}
    assert sum(len(document.text) for document in documents) > 5e6
    assert documents == load_documents(None)


def test_default_corpus_is_sorted_whatever_the_order_of_the_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "topics", {"b": "2", "a": "1", "c": " "})
    assert [document.name for document in load_documents(None)[:3]] == ["topics/a", "topics/b", "__future__.py"]


def test_parquet_in_a_folder_is_not_taken_for_binary(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.PARQUET")
    assert [document.text for document in load_documents(tmp_path)] == ["a"]


BAD_FILES: list[tuple[str, bytes | None, str]] = [
    ("a.txt", None, "a.txt: no such file or folder; give a text, JSONL or Parquet file"),
    ("a.txt", b"", "a.txt: there is no text in it"),
    ("a.txt", b" \n\t", "a.txt: there is no text in it"),
    ("a.jsonl", b"\n\n", "a.jsonl: there is no text in it"),
    ("a.txt", b"one\ntw\xe9o", r"a.txt:2: not UTF-8 text \(byte 0xe9 at offset 6\): convert it to UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a.jsonl:2: not UTF-8 text \(byte 0xff at offset 24\)"),
    ("a.jsonl", b'{"text": "a"}\n{"text": }', r"a.jsonl:2: not JSON \(Expecting value, column 10\)"),
    ("a.jsonl", b'{"text": "a"}\n[1]', "a.jsonl:2: a JSON list, not an object"),
    ("a.jsonl", b'{"txt": "a", "n": 1}', "a.jsonl:1: has 'txt', 'n', but needs 'text', or 'prompt' and 'completion'"),
    ("a.jsonl", b'{"prompt": "a"}', "a.jsonl:1: has 'prompt', but needs"),
    ("a.jsonl", b"{}", "a.jsonl:1: has no fields, but needs"),
    ("a.jsonl", b'{"text": 1}', "a.jsonl:1: 'text' is int, not a string"),
    ("a.jsonl", b'{"prompt": null, "completion": "a"}', "a.jsonl:1: 'prompt' is NoneType, not a string"),
    ("a.jsonl", b'{"text": "ab\\ud800"}', "a.jsonl:1: 'text' holds half of a surrogate pair at character 2"),
    ("a.parquet", b"", "a.parquet: not a readable Parquet file"),
    ("a.parquet", b"PAR1 and nothing else PAR1", "a.parquet: not a readable Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_documents(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no text in it"),
        ({"a.txt": b"", "b.png": b"\0"}, "there is no text in it"),
        ({"a.txt": b"text", "b.txt": b"\xff"}, "b.txt:1: not UTF-8 text"),
        ({"a.txt": b"text", "b.jsonl": b"{}"}, "b.jsonl:1: has no fields"),
    ],
)
def test_bad_folders(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_documents(tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "n": [1]}, "a.parquet: has 'body', 'n', but needs 'text', or 'prompt' and 'completion'"),
        ({"text": ["a", None]}, "a.parquet, row 2: 'text' is NoneType, not a string"),
        ({"text": [1, 2]}, "a.parquet, row 1: 'text' is int, not a string"),
    ],
)
def test_bad_parquet_columns(tmp_path: Path, columns: dict[str, list], message: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message):
        load_documents(tmp_path / "a.parquet")


def test_a_missing_package_is_named(tmp_path: Path, pretend: Callable) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    pretend("pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow .*: pip install -U 'te-models\[train\]'"):
        load_documents(tmp_path)


@pytest.mark.parametrize("broken", ["link", "folder"])
def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    if broken == "link":
        (tmp_path / "b").symlink_to(tmp_path / "absent")
    else:
        scan = os.scandir
        (tmp_path / "b").mkdir()

        def refuse(path: str) -> object:
            if str(path).endswith("b"):
                raise PermissionError(13, "Permission denied", path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"b: cannot be read \(.*\): check it and its permissions"):
        load_documents(tmp_path)
