"""Documents: the same files in memory and streamed, errors that name the place, and the split."""

import gzip
import itertools
import os
import re
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import te_models.data.documents as documents_module
import te_models.data.files as files_module
import te_models.data.rows as rows_module
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.corpus_chunks import ChunkReader, find_chunks
from te_models.data.documents import Document, load_documents, split_documents
from te_models.data.files import find_files
from te_models.data.sources import open_sources
from te_models.errors import DataError, UsageError


@given(
    st.sets(st.text("abc"), min_size=2, max_size=40),
    st.floats(0.01, 0.99),
    st.integers(0, 99),
    st.randoms(),
)
def test_split_does_not_depend_on_order(
    texts: set[str], fraction: float, seed: int, random
) -> None:
    documents = [Document(text, name=str(number)) for number, text in enumerate(sorted(texts))]
    training, evaluation = split_documents(documents, fraction, seed)
    assert sorted([*training, *evaluation], key=documents.index) == documents
    assert training == [document for document in documents if document in training]
    assert len(evaluation) == min(max(1, round(fraction * len(documents))), len(documents) - 1)
    random.shuffle(documents)
    assert set(split_documents(documents, fraction, seed)[1]) == set(evaluation)


def test_split_keeps_copies_together_and_follows_the_seed() -> None:
    documents = [Document(str(number % 20), name=str(number)) for number in range(60)]
    sides = {
        frozenset(document.text for document in split_documents(documents, 0.3, seed)[1])
        for seed in range(5)
    }
    assert len(sides) == 5
    training, evaluation = split_documents(documents, 0.3)
    assert (len(training), len(evaluation)) == (42, 18)
    assert not {document.text for document in training} & {document.text for document in evaluation}


def test_split_tells_prompts_apart() -> None:
    documents = [
        Document("b"),
        Document("b", prompt=""),
        Document("b", prompt="a"),
        Document("b", prompt="None"),
    ]
    training, evaluation = split_documents(documents, 0.5)
    assert (len(training), len(evaluation)) == (2, 2)


def test_the_share_of_evaluation_is_the_decimal_number_that_was_written() -> None:
    """57.5 of 100 documents are 58, to even; FP64 has 57.49999999999999. Likewise for lines of one document."""
    for thousandths, count in itertools.product(range(5, 1000, 5), (100, 200)):
        share = Fraction(f"0.{thousandths:03}")
        evaluated = split_documents(
            [Document(str(number)) for number in range(count)], float(share)
        )[1]
        assert len(evaluated) == min(max(1, round(share * count)), count - 1), share
        lines = share * count
        if lines.denominator == 1 and lines < count:
            assert len(split_documents([Document("\n" * count)], float(share))[1][0].text) == lines


def test_split_of_one_document_cuts_it_at_a_line() -> None:
    document = Document("".join(f"line {number}\n" for number in range(100)), name="a", source="b")
    training, evaluation = split_documents([document], 0.1)
    assert [training[0].text + evaluation[0].text] == [document.text]
    assert evaluation[0].text.startswith("line ")
    assert 0.1 <= len(evaluation[0].text) / len(document.text) < 0.12
    assert (evaluation[0].name, evaluation[0].source, len(training), len(evaluation)) == (
        "a",
        "b",
        1,
        1,
    )


@pytest.mark.parametrize(
    ("documents", "fraction", "message"),
    [
        ([Document("no line break")], 0.1, "only document cannot be cut .* give more documents"),
        (
            [Document("a\nb\nc\n", prompt="p")],
            0.1,
            "^1 record cannot be split .* give at least two different ones",
        ),
        ([Document("b", prompt="p")] * 2, 0.1, "^2 equal records cannot be split"),
        ([Document("a"), Document("a", name="b")], 0.1, "2 equal documents cannot be split"),
        ([], 0.1, "0 documents"),
    ],
)
def test_impossible_splits(documents: list[Document], fraction: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_documents(documents, fraction)


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
        Document("a", "q", f"{file}:6", str(file)),
        Document("\U0001f600", "", f"{file}:7", str(file)),
    ]


def test_globs_match_hidden_files_only_by_name(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", "deep/c.txt", "deep/.d.txt", ".e/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern, names in (
        ("**/*.txt", ["a.txt", "deep/c.txt"]),
        (".b*", [".b.txt"]),
        (".e/*", [".e/f.txt"]),
    ):
        assert [document.text for document in load_documents(tmp_path / pattern)] == names, pattern


OUTPUTS = {
    "a run": ["run.toml", "metrics.jsonl", "loss.png"],
    "a run that was killed": ["run.toml", "checkpoints/step-00000001/config.json"],
    "a model": ["config.json", "model.safetensors", "README.md"],
    "a model in shards": ["config.json", "model-00001-of-00002.safetensors"],
    "adapters": ["adapter_config.json", "adapter_model.safetensors"],
}


@pytest.mark.parametrize("files", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_runs_and_models_in_a_project_are_no_data(files: list[str], tmp_path: Path) -> None:
    for name in ["texts/a.txt", "configs/run.toml", *(f"runs/one/{file}" for file in files)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    remarks: list[str] = []
    documents = load_documents(tmp_path, remarks=remarks)
    assert [document.text for document in documents] == [
        "text of configs/run.toml",
        "text of texts/a.txt",
    ]
    assert remarks == [f"{tmp_path}: read without runs/one (runs or models)"]
    (source,) = open_sources([str(tmp_path)], {})
    assert source.left_out == ("runs/one",) and len(source.files) == 2
    assert source.describe().endswith(": text files, without runs/one (runs or models)")
    with pytest.raises(DataError, match="no text in it beside 1 folder of runs or models; give"):
        open_sources([str(tmp_path / "runs")], {})
    # Named itself, it is what the user wants to read.
    assert not find_files(str(tmp_path / "runs/one")).left_out
    load_documents(tmp_path / "texts", remarks=remarks)
    assert len(remarks) == 1, "nothing was left out there"


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
    assert not parts & {
        "site-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "__pycache__",
        "pydoc_data",
    }
    assert sum(len(document.text) for document in documents) > 5e6
    assert documents == load_documents(None)


def test_default_corpus_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "topics", {"b": "2", "a": "1", "c": " "})
    assert [document.name for document in load_documents(None)[:3]] == [
        "topics/a",
        "topics/b",
        "__future__.py",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            None,
            "a.txt: no such file or folder; give a text, JSONL, JSON, CSV or Parquet file",
        ),
        ("a.txt", b"", "a.txt: there is no text in it"),
        ("a.txt", b" \n\t", "a.txt: there is no text in it"),
        ("a.jsonl", b"\n\n", "a.jsonl: there is no text in it"),
    ],
)
def test_no_text(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_documents(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["a"], "n": [1]},
            "a.PARQUET: has 'body', 'n', but needs one of the formats messages",
        ),
        ({"text": ["a", None]}, "a.PARQUET, row group 0, row 2: 'text' is null, not a string"),
    ],
)
def test_bad_parquet_columns(tmp_path: Path, columns: dict[str, list], message: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.PARQUET")
    with pytest.raises(ValueError, match=message):
        load_documents(tmp_path / "a.PARQUET")


def test_a_missing_package_is_named(tmp_path: Path, pretend: Callable) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    pretend("pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow .*: pip install -U 'te-models\[train\]'"):
        load_documents(tmp_path)


@pytest.mark.parametrize("broken", ["link", "folder"])
def test_unreadable_data_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
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


@pytest.mark.parametrize("url", ["data:text/plain,hi", "data:,x", "data:", "https://[::1"])
def test_a_url_that_holds_no_files_is_one_line(url: str) -> None:
    with pytest.raises((DataError, UsageError), match=re.escape(url[:5])) as caught:
        load_documents(url)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of /proc have no size, and some of them, such as /proc/kmsg, answer when something happens."""
    (tmp_path / "a.txt").write_bytes(b"")
    monkeypatch.setattr(
        "te_models.data.rows.open_bytes", lambda path: pytest.fail(f"{path} was opened")
    )
    with pytest.raises(DataError, match="there is no text in it"):
        load_documents(tmp_path)


def streamed(path: Path, chunk_bytes: int = 64) -> list[tuple[str | None, str]]:
    """Read in chunks; only JSONL and small texts give the same documents as in memory."""
    chunks = find_chunks(str(path), chunk_bytes)
    reader = ChunkReader(str(path), ByteTokenizer(), seed=0)
    return [(d.prompt, d.text) for i in range(len(chunks)) for d in reader.documents(chunks[i])]


def in_memory(path: Path) -> list[tuple[str | None, str]]:
    return [(d.prompt, d.text) for d in load_documents(path)]


LINE = b'{"text": "one"}\n'
CORPORA: dict[str, dict[str, bytes]] = {
    "jsonl and its compression": {"a.jsonl": LINE, "b.jsonl.gz": gzip.compress(LINE * 2)},
    "several formats": {
        "a.jsonl": LINE,
        "b.txt": b"text",
        "c.json": LINE,
        "d.ndjson": LINE,
        "e.txt.gz": gzip.compress(b"f"),
    },
    "tables, arrays and what is about them": {
        "a.csv": b'\xef\xbb\xbftext,n\r\n"one",1\r\n\r\n"two\nlines, ""quoted""",2\r\n',
        "b.tsv": b"n\ttext\n1\tone\n",
        "c.json": b'\xef\xbb\xbf [\r\n{"text": "one"},\r\n{"text":\r\n"text"}]\r\n',
        "d.json.gz": gzip.compress(b'[{"text": "one"}]'),
        "README.md": b"about it",
        "LICENSE": b"terms",
        "dataset_info.json": b'{"splits": 1}',
    },
    "JSONL by another name": {"a.txt": LINE * 2, "b": LINE},
    "binary files": {"a.txt": b"text", "b.png": b"\x89PNG\0", "c.bin.gz": gzip.compress(b"\0\1")},
}


@pytest.mark.parametrize("read", [in_memory, streamed])
@pytest.mark.parametrize("case", CORPORA)
def test_every_file_of_a_corpus_is_read(case: str, read: Callable, tmp_path: Path) -> None:
    for name, content in CORPORA[case].items():
        (tmp_path / name).write_bytes(content)
    expected = {
        "jsonl and its compression": ["one"] * 3,
        "several formats": ["one", "text", "one", "one", "f"],
        "tables, arrays and what is about them": [
            "one",
            'two\nlines, "quoted"',
            "one",
            "one",
            "text",
            "one",
        ],
        "JSONL by another name": ["one"] * 3,
    }
    assert [text for _, text in read(tmp_path)] == expected.get(case, ["text"])


DEEP = b'{"text": "a", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SUFFIXES = ("jsonl", "json", "csv", "tsv", "txt", "md", "parquet")
REFUSED: list[tuple[str, bytes, str]] = [
    (
        "a.txt",
        b"one\ntw\xe9o",
        r"a.txt:2: not UTF-8 text \(byte 0xe9 at offset 6\): convert it to UTF-8",
    ),
    (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xff"}',
        r"a.jsonl:2: not UTF-8 text \(byte 0xff at offset 24\)",
    ),
    (
        "a.jsonl",
        b'{"text": "a"}\n{"text": }',
        r"a.jsonl:2: not JSON \(Expecting value, column 10\)",
    ),
    ("a.jsonl", b'{"text": "a"}\n[1]', "a.jsonl:2: a JSON list, not an object"),
    (
        "a.jsonl",
        b'{"txt": "a", "n": 1}',
        "a.jsonl:1: has 'txt', 'n': rename 'txt' to 'text', in all records with",
    ),
    (
        "a.jsonl",
        b'{"text": "ab\\ud800"}',
        "a.jsonl:1: 'text' holds half of a surrogate pair at character 2",
    ),
    ("a.parquet", b"", "a.parquet: not a readable Parquet file"),
    *((f"a.{suffix}", POINTER, f"a.{suffix}: a pointer of Git LFS") for suffix in SUFFIXES),
    ("a.jsonl", gzip.compress(LINE), "a.jsonl:1: compressed by gzip: decompress it, or"),
    ("a.jsonl", b"<!DOCTYPE html>\n<html>", "a.jsonl:1: a web page: download the file itself"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-32"), "a.jsonl:1: UTF-32 text"),
    ("a.parquet", b"PAR1 and nothing else PAR1", "a.parquet: not a readable Parquet file"),
    ("a.jsonl.gz", gzip.compress(LINE * 9)[:20], "a.jsonl.gz: "),
    ("a.jsonl.gz", LINE, "a.jsonl.gz: "),
    (
        "a.jsonl",
        '{"text": "a"}'.encode("utf-16"),
        r"a.jsonl:1: UTF-16 text \(byte 0xff at offset 0\): convert it to UTF-8",
    ),
    ("a.txt", "text".encode("utf-16"), r"a.txt:1: UTF-16 text"),
    ("a.csv", b"txt\none\n", "a.csv:2: has 'txt': rename 'txt' to 'text'"),
    (
        "a.csv",
        b"text,n\none\n",
        "a.csv:2: 1 cells, but 2 columns: quote cells that hold separators",
    ),
    ("a.csv", b'text\n"one\n', "a.csv:2: not a readable table"),
    ("a.csv", b"text\n\xff\n", "a.csv:2: not UTF-8 text"),
    (
        "a.tsv.gz",
        gzip.compress(b"text,n\none,two\n"),
        "a.tsv.gz:1: the columns are separated by commas: save the table with tabs",
    ),
    (
        "a.json",
        b'{\n  "text": "a"\n}',
        r"a.json:1: not JSON \(.*\): a .json file is an array of objects",
    ),
    ("a.json", b'[{"text": "a"}, 1]', "a.json, record 2: a JSON int, not an object"),
    ("a.json", b'[\n{"text": "a"}\n', "a.json:3: not JSON .*: give an array of objects, or JSONL"),
    ("a.json", b"[" * 100_000, "a.json: JSON that is nested too deeply"),
    (
        "a.json",
        b"[" + b"9" * 5000 + b"]",
        "a.json(: not JSON that can be read|, record 1: a JSON int)",
    ),
    (
        "a.jsonl",
        LINE + b'{"text": ' + b"9" * 5000 + b"}",
        "a.jsonl:2: ('text' is a number|not JSON that can be read)",
    ),
    ("a.json", b'[{"txt": "a"}]', "a.json, record 1: has 'txt': rename 'txt' to 'text'"),
    (
        "a.json",
        b"[" + b" " * 2 * 10**6 + b"]",
        "a.json: a JSON array of more than 0 GiB: write it as JSONL",
    ),
    ("a.txt", b'{"txt": "a"}\n', "a.txt:1: has 'txt': rename 'txt' to 'text'"),
    ("a.jsonl", LINE + DEEP, "a.jsonl:2: JSON that is nested too deeply"),
    (
        "a.jsonl",
        b'{"text": "' + b"a" * 2000 + b'"}\n',
        "a.jsonl:1: a line of more than 0 MiB: break it into shorter ones",
    ),
    (
        "a.jsonl.gz",
        gzip.compress(b'{"text": "' + b"a" * 10**6 + b'"}\n'),
        "a.jsonl.gz:1: a line of more than 0 MiB",
    ),
    (
        "a.json",
        b"[" + b'{"text": "a"},' * 10**5 + b'{"text": "a"}]',
        "a.json: a JSON array of more than 0 GiB: write",
    ),
    (
        "a.txt.gz",
        gzip.compress(b"a\n" * 10**6),
        "a.txt.gz: a text of more than 0 GiB: decompress it or use JSONL",
    ),
]


@pytest.mark.parametrize("read", [in_memory, streamed])
@pytest.mark.parametrize(
    ("name", "content", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
def test_both_ways_of_reading_refuse_the_same(
    name: str,
    content: bytes,
    message: str,
    read: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "more than 0" in message:
        monkeypatch.setattr(files_module, "MAX_LINE_BYTES", 1000)
        monkeypatch.setattr(rows_module, "MAX_EXPANDED_BYTES", 10**6)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).count(name) == 1


@pytest.mark.parametrize("read", [in_memory, streamed])
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device"])
def test_only_regular_files_are_data(kind: str, read: Callable, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    if kind == "pipe":
        os.mkfifo(tmp_path / "data/b.txt")
    else:
        (tmp_path / "data/b.txt").symlink_to("/dev/zero" if kind == "device" else tmp_path / "pipe")
    for path in (tmp_path / "data", tmp_path / "data/b.txt"):
        with pytest.raises(DataError, match="b.txt: not a regular file"):
            read(path)


def test_one_long_line_is_read_once(tmp_path: Path) -> None:
    """A range without the start of a line must not read on to its end:
    32 MiB in 64 KiB ranges took 8 GiB of reading."""
    (tmp_path / "a.txt").write_bytes(b"a" * 2**25)
    start = time.process_time()
    assert [len(text) for _, text in streamed(tmp_path, 2**16)] == [
        2**25
    ] and time.process_time() - start < 3


def test_a_binary_file_is_left_out_in_every_range(tmp_path: Path) -> None:
    """Only the first range has the NUL that tells."""
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "b.bin").write_bytes(b"line\n" * 100 + b"\0" + b"line\n" * 2000)
    assert streamed(tmp_path, 400) == in_memory(tmp_path) == [(None, "text\n")]


@pytest.mark.parametrize("read", [in_memory, streamed])
@pytest.mark.parametrize("place", [5, 20, -6])
def test_a_damaged_archive_is_one_line(place: int, read: Callable, tmp_path: Path) -> None:
    content = bytearray(gzip.compress(LINE * 50))
    content[place] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(content[:-1] if place > 0 else content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
