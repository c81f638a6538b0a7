"""Streaming: chunks that cover a corpus, lanes that lose and repeat nothing, and resume on any number of ranks."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.corpus_chunks import ChunkReader, find_chunks
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document, load_documents
from te_models.data.rows import read_range
from te_models.data.streaming import StreamingDataset, merge_states
from te_models.data.training_data import open_data
from te_models.distributed.control import Ranks
from te_models.model.targets import IGNORED

END = ByteTokenizer.eos_token_id
TEXTS = [f"{number:03} " + "abc\u00e9" * (number * 7 % 11) for number in range(60)]
ROWS = [
    {"prompt": f"Q{n}", "completion": text} if n % 3 == 0 else {"text": text}
    for n, text in enumerate(TEXTS)
]
Row = tuple[list[int], list[int]]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    lines = "\ufeff" + "".join(
        json.dumps(row, ensure_ascii=False) + ("\r\n" if n % 2 else "\n\n")
        for n, row in enumerate(rows)
    )
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".jsonl":
        path.write_text(lines, encoding="utf-8", newline="")
    else:
        with pyarrow.CompressedOutputStream(
            str(path), {".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}[path.suffix]
        ) as file:
            file.write(lines.encode())


def write_parquet(path: Path, texts: list[str], rows_a_group: int = 7) -> None:
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_a_group)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows in three files of JSONL, one in a subfolder, and what a walk must skip."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("deep", ".hidden", "__pycache__"):
        (folder / name).mkdir()
        write_jsonl(
            folder / name / "b.jsonl",
            ROWS[25:45] if name == "deep" else [{"text": "not to be read"}],
        )
    (folder / ".notes.txt").write_text("not to be read")
    write_jsonl(folder / "a.jsonl", ROWS[:25])
    write_jsonl(folder / "z.jsonl", ROWS[45:])
    return folder


def stream(
    path: Path, batch_size: int = 1, chunk_bytes: int = 100, seq_len: int = 16, **options
) -> StreamingDataset:
    return StreamingDataset(
        str(path),
        ByteTokenizer(),
        seq_len,
        batch_size=batch_size,
        chunk_bytes=chunk_bytes,
        **{"seed": 0, **options},
    )


def rows(batch: dict[str, torch.Tensor]) -> list[Row]:
    return list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))


def contents(documents: list[Document]) -> list[tuple[str | None, str]]:
    return [(document.prompt, document.text) for document in documents]


def split_at_end(ids: list[int]) -> list[bytes]:
    """The whole documents in a run of tokens that begins with one."""
    found: list[bytearray] = [bytearray()]
    for token in ids:
        if token == END:
            found.append(bytearray())
        else:
            found[-1].append(token)
    return [bytes(document) for document in found[:-1]]


def blocks_of(path: Path, chunk_bytes: int) -> list[list[Document]]:
    blocks = find_chunks(str(path), chunk_bytes)
    reader = ChunkReader(str(path), ByteTokenizer(), seed=0)
    return [reader.documents(blocks[i]) for i in range(len(blocks))]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 333, 10**6])
def test_blocks_cover_jsonl_once(corpus: Path, chunk_bytes: int) -> None:
    blocks = blocks_of(corpus, chunk_bytes)
    assert [d for block in blocks for d in contents(block)] == contents(load_documents(corpus))
    assert (len(blocks) == 1) == (chunk_bytes == 10**6)


@given(
    st.lists(st.text("ab\u00e9\u2028 ", max_size=12), min_size=1, max_size=12),
    st.integers(1, 60),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_line_is_in_the_block_in_which_it_begins(
    texts: list[str], chunk_bytes: int, last_break: bool
) -> None:
    lines = (
        "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        + "\n" * last_break
    )
    path = "memory://lines.jsonl"
    with fsspec.open(path, "wb") as file:
        file.write(lines.encode())
    blocks = find_chunks(path, chunk_bytes)
    read = [
        d.text for i in range(len(blocks)) for piece in blocks[i] for d in read_range(piece, path)
    ]
    assert read == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".lz4"])
def test_compressed_jsonl_is_one_block(tmp_path: Path, suffix: str) -> None:
    write_jsonl(tmp_path / f"a.jsonl{suffix}", ROWS)
    write_jsonl(tmp_path / "plain.jsonl", ROWS)
    assert len(blocks_of(tmp_path / f"a.jsonl{suffix}", 64)) == 1
    assert contents(blocks_of(tmp_path / f"a.jsonl{suffix}", 64)[0]) == contents(
        load_documents(tmp_path / "plain.jsonl")
    )


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10**6])
def test_blocks_cover_parquet_once(tmp_path: Path, chunk_bytes: int) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS[:30])
    write_parquet(tmp_path / "b.parquet", ["", *TEXTS[30:], " "], rows_a_group=1000)
    blocks = blocks_of(tmp_path, chunk_bytes)
    assert [d.text for block in blocks for d in block] == TEXTS
    assert len(blocks) > 9 or chunk_bytes == 10**6


def test_text_files_are_documents_and_large_ones_are_cut_at_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffsmall\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("".join(f"line {n}\n" for n in range(100)))
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    documents = [d for block in blocks_of(tmp_path, 256) for d in block]
    assert documents[0].text == "small\n"
    assert "".join(d.text for d in documents[1:]) == (tmp_path / "b.py").read_text()
    assert len(documents) > 3 and all(
        d.text.startswith("line") and d.text.endswith("\n") for d in documents[1:]
    )


def test_small_files_share_a_block(tmp_path: Path) -> None:
    for number in range(50):
        write_jsonl(tmp_path / f"{number:02}.jsonl", [{"text": f"{number}"}])
    assert 2 < len(find_chunks(str(tmp_path), 200)) < 10
    glob = find_chunks(str(tmp_path / "0*.jsonl"))
    assert [Path(file).name for file in glob.files] == [f"0{number}.jsonl" for number in range(10)]


@pytest.mark.parametrize("lanes", [1, None])
def test_each_epoch_has_each_document_once(corpus: Path, lanes: int | None) -> None:
    data, blocks = stream(corpus, num_lanes=lanes), blocks_of(corpus, 100)
    tokens: list[list[int]] = [[] for _ in range(data.num_lanes)]
    for window in range(6 * data.num_lanes * -(-3 * 60 * 30 // (16 * data.num_lanes))):
        tokens[window % data.num_lanes] += next(data)["input_ids"][0].tolist()
    found = [split_at_end(lane) for lane in tokens]
    for epoch in range(3):
        seen: Counter[bytes] = Counter()
        for lane in range(data.num_lanes):
            count = sum(len(blocks[block]) for block in data.order(epoch)[lane :: data.num_lanes])
            assert len(found[lane]) >= count, "the test must run for longer"
            seen.update(found[lane][:count])
            found[lane] = found[lane][count:]
        assert seen == Counter(
            ((d.prompt or "") + d.text).encode() for block in blocks for d in block
        )
        assert len(seen) == len(TEXTS)


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3)),
    min_size=2,
    max_size=5,
)


@given(SEGMENTS, st.sampled_from([1, 4, 5, 8]))
@settings(max_examples=10, deadline=None)
def test_killed_and_resumed_on_any_number_of_ranks(
    corpus: Path, segments: list[tuple[int, int, int, int]], lanes: int
) -> None:
    """Each segment: so many ranks, windows a batch, steps up to the save, and steps after it that the kill loses."""
    state, given = None, []
    for world_size, batch_size, steps, lost in segments:
        shape = dict(batch_size=batch_size, num_lanes=lanes, world_size=world_size)
        ranks = [stream(corpus, rank=rank, **shape) for rank in range(world_size)]
        for rank in ranks if state else []:
            rank.load_state_dict(state)
        for _ in range(steps):
            given += [
                row
                for together in zip(*(rows(next(rank)) for rank in ranks), strict=True)
                for row in together
            ]
        state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
        for rank in ranks:
            after = [rows(next(rank)) for _ in range(lost)]
            again = stream(corpus, rank=rank.rank, **shape)
            again.load_state_dict(state)
            assert [rows(next(again)) for _ in range(lost)] == after
    alone = stream(corpus, num_lanes=lanes)
    assert given == [rows(next(alone))[0] for _ in given]


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("world_size", [2, 4, 6])
def test_a_rank_reads_only_the_lanes_of_its_windows(
    corpus: Path, world_size: int, start: int
) -> None:
    before = stream(corpus, max(1, start), num_lanes=6)
    if start:
        next(before)
    ranks = [
        stream(corpus, 6, num_lanes=6, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.load_state_dict(before.state_dict())
        next(rank), rank.state_dict()
        assert set(rank._lanes) == {(start + rank.rank + i * world_size) % 6 for i in range(6)}


def test_order_follows_seed_and_epoch(corpus: Path) -> None:
    def first(**options) -> list[bytes]:
        data = stream(corpus, num_lanes=1, chunk_bytes=400, **options)
        return split_at_end(
            [token for _ in range(250) for token in next(data)["input_ids"][0].tolist()]
        )[:120]

    one, other, plain = first(), first(seed=1), first(shuffle=False)
    expected = [((d.prompt or "") + d.text).encode() for d in load_documents(corpus)]
    assert plain == expected * 2
    assert one == first() and one != other
    assert one[:60] != one[60:] and Counter(one[:60]) == Counter(one[60:]) == Counter(expected)
    for block in (block for block in blocks_of(corpus, 400) if len(block) > 5):
        inside = {((d.prompt or "") + d.text).encode() for d in block}
        orders = [
            [document for document in epoch if document in inside] for epoch in (one[:60], one[60:])
        ]
        assert orders[0] != orders[1], "a block's documents come in another order in the next epoch"
    places = [expected.index(document) for document in one[:60]]
    assert sum(abs(b - a) == 1 for a, b in zip(places, places[1:], strict=False)) < 30, (
        "blocks are shuffled inside too"
    )


@pytest.mark.parametrize(
    ("packing", "rows"),
    [("stream", "all"), ("documents", "texts"), ("documents", "all"), ("none", "all")],
)
def test_windows_equal_those_in_memory(
    corpus: Path, packing: str, rows: str, tmp_path: Path
) -> None:
    if rows == "texts":
        write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
        corpus = tmp_path
    chunk_bytes = (
        100 if packing == "stream" or rows == "texts" else 10**6
    )  # records are packed chunk by chunk
    streamed = stream(corpus, 3, shuffle=False, packing=packing, chunk_bytes=chunk_bytes)
    held = load_documents(corpus)
    memory = TokenDataset(
        held, ByteTokenizer(), 16, batch_size=3, seed=0, shuffle=False, packing=packing
    )
    for _ in range(memory.num_windows // 3 - 1):
        one, other = next(streamed), next(memory)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one if name != "document_ids")
        if packing == "documents":  # the ids themselves mean nothing, where they change does
            assert torch.equal(one["document_ids"].diff(dim=1), other["document_ids"].diff(dim=1))


def test_packing_by_documents_marks_borders() -> None:
    documents = [Document("abc"), Document("d"), Document("efghij")]
    data = TokenDataset(
        documents, ByteTokenizer(), 8, batch_size=2, seed=0, shuffle=False, packing="documents"
    )
    batch = next(data)
    assert batch["input_ids"].tolist() == [
        [*b"abc", END, *b"d", END, *b"ef"],
        [*b"ghij", END, 258, 258, 258],
    ]
    assert batch["document_ids"].diff(dim=1).tolist() == [
        [0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, -1, 0, 0],
    ]
    i = IGNORED
    assert batch["labels"].tolist() == [
        [i, *b"bc", END, i, END, i, *b"f"],
        [*b"ghij", END, i, i, i],
    ]


def test_workers_change_nothing(corpus: Path) -> None:
    alone = stream(corpus, 2, num_lanes=4)
    batches = [rows(next(alone)) for _ in range(60)]
    data = stream(corpus, 2, num_lanes=4, num_workers=2)
    assert [rows(next(data)) for _ in range(20)] == batches[:20]
    state = data.state_dict()
    assert [rows(next(data)) for _ in range(10)] == batches[20:30]
    data.load_state_dict(state)
    assert [rows(next(data)) for _ in range(20)] == batches[20:40]
    data.close()
    assert [rows(next(data)) for _ in range(20)] == batches[40:]
    assert data._pool is not None
    for process in list(data._pool._processes.values()):
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(OSError, match="a process that reads data died"):
        for _ in range(100):
            next(data)
    data.close()


_RUN = """
import os, signal, sys, time
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import ByteTokenizer
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: print("asked to stop"))
    sizes = dict(batch_size=1, seed=0, chunk_bytes=100, num_lanes=4, num_workers=1)
    data = StreamingDataset(sys.argv[1], ByteTokenizer(), 16, **sizes)
    {begin}
    os.killpg(0, signal.SIGINT)
    for _ in range(99):
        next(data)
    print(*data._pool._processes, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin", ["data.state_dict()", "next(data)"]
)  # workers are starting, and at work
def test_workers_outlive_a_request_to_stop_but_not_their_parent(
    begin: str, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(_RUN.format(begin=begin))
    root = Path(__file__).parents[2]
    command = [sys.executable, str(tmp_path / "run.py"), str(corpus)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "asked to stop\n"
        worker = int(run.stdout.readline())
        os.kill(worker, 0)
        run.kill()
    deadline = time.monotonic() + 60
    while _is_running(worker):
        assert time.monotonic() < deadline, "a worker was left behind"
        time.sleep(0.05)


def test_an_interrupt_waits_until_a_worker_is_known(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, start = stream(corpus, 2, num_lanes=4, num_workers=1), ProcessPoolExecutor._spawn_process

    def spawn(pool: ProcessPoolExecutor) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # another thread takes it, which blocks no signals
        time.sleep(0.05)
        start(pool)

    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", spawn)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(data)
        assert data._pool is not None and data._pool._processes
    finally:
        stop.set()
        other.join()
        data.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_until_the_workers_have_ended(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python 3.11 a thread whose join was interrupted counts as ended: exit then waited for a worker for ever."""
    data, end, ended = stream(corpus, num_workers=1), ProcessPoolExecutor.shutdown, []
    next(data)

    def shutdown(pool: ProcessPoolExecutor, **options: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        end(pool, **options)
        ended.append(pool)

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", shutdown)
    with pytest.raises(KeyboardInterrupt):
        data.close()
    assert ended and data._pool is None


@pytest.mark.slow
def test_a_script_that_its_workers_import_is_told_what_it_lacks(
    corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(
        "import sys\nfrom te_models.data.streaming import StreamingDataset\n"
        "from te_models.data.tokenizer import ByteTokenizer\n"
        "next(StreamingDataset(sys.argv[1], ByteTokenizer(), 16, batch_size=1, seed=0, num_workers=1))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, str(tmp_path / "run.py"), str(corpus)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    last = [
        line
        for line in run.stderr.splitlines()
        if line.startswith("te_models.errors.DataUnavailable")
    ]
    assert (
        run.returncode == 1 and len(last) == 1 and 'needs `if __name__ == "__main__":`' in last[0]
    )


def test_blank_files_have_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="a.jsonl: there is no text in it; give"):
        stream(tmp_path / "a.jsonl", eval_fraction=0.01).held_out(100, at_least_one=True)
    with pytest.raises(ValueError, match="there is no text in it"):
        next(stream(tmp_path / "a.jsonl"))


def _is_running(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def save_state(corpus: str, rank: int, folder: str) -> None:
    ranks = Ranks(dist.group.WORLD)
    data = stream(Path(corpus), 2, num_lanes=4, rank=rank, world_size=2, ranks=ranks)
    for _ in range(7):
        next(data)
    Path(folder, f"{rank}.json").write_text(json.dumps(data.state_dict()))


def test_the_state_is_the_same_on_every_rank(corpus: Path, tmp_path: Path) -> None:
    run_ranks(partial(save_state, str(corpus)), tmp_path, 2)
    states = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(states[0]["lanes"]) == list("0123")
    assert states[0] == states[1]
    data, alone = (stream(corpus, 4, num_lanes=4) for _ in range(2))
    data.load_state_dict(states[0])
    assert rows(next(data)) == [rows(next(alone)) for _ in range(8)][-1]


CHANGES: dict[str, dict] = {
    "seq_len": {"seq_len": 8},
    "packing": {"packing": "documents"},
    "lanes": {"num_lanes": 3},
    "blocks": {"chunk_bytes": 50},
    "seed": {"seed": 1},
    "shuffle": {"shuffle": False},
    "split": {"eval_fraction": 0.1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_resuming_on_other_data_is_an_error(corpus: Path, change: str) -> None:
    state = stream(corpus, num_lanes=4).state_dict()
    stream(corpus, num_lanes=4).load_state_dict(state)
    with pytest.raises(
        ValueError,
        match="position is of other data: resume with the same --data .its files unchanged., ",
    ):
        stream(corpus, **{"num_lanes": 4, **CHANGES[change]}).load_state_dict(state)


def test_resuming_from_one_rank_of_several_is_an_error(corpus: Path) -> None:
    state = stream(corpus, num_lanes=4, world_size=2).state_dict()
    with pytest.raises(
        ValueError, match="has 2 of 4 lanes: it is of one rank only; call state_dict on every rank"
    ):
        stream(corpus, num_lanes=4).load_state_dict(state)


@pytest.mark.parametrize("options", [{"seq_len": 1}, {"packing": "document"}])
def test_bad_arguments(corpus: Path, options: dict) -> None:
    with pytest.raises(
        ValueError, match="seq_len=1 is out of range: give 2 or more|did you mean 'documents'"
    ):
        stream(corpus, **options)


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    texts = [f"text {number % 150}" for number in range(300)]  # every one twice
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = stream(tmp_path, num_lanes=1, eval_fraction=0.2)
    held = [document.text for document in data.held_out(10**6)]
    trained = split_at_end(
        [token for _ in range(400) for token in next(data)["input_ids"][0].tolist()]
    )
    assert not {text.encode() for text in held} & set(trained)
    assert len(trained) > 300 and {*(text.encode() for text in held), *trained} == {
        text.encode() for text in texts
    }
    assert Counter(Counter(held).values()).keys() == {2} and 20 < len(held) < 100
    assert 0 < len(data.held_out(5)) < len(held)
    with pytest.raises(ValueError, match="none of its documents is reserved for evaluation"):
        stream(tmp_path, eval_fraction=1e-9).held_out(5)


@pytest.mark.parametrize("truncate", ["drop", "prompt"])
@pytest.mark.parametrize("seed", range(4))
def test_a_record_that_fits_is_held_out_of_few(seed: int, truncate: str, tmp_path: Path) -> None:
    """The lowest hashes may be those of records that are too long, or that have no answer."""
    rows = [{"prompt": f"{n} ", "completion": "c" * 90} for n in range(12)]
    rows += [{"prompt": f"{n} ", "completion": ""} for n in range(12)]
    fitting = [{"prompt": f"{n} ", "completion": f"fits {n}"} for n in range(2)]
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [*rows[:9], *fitting, *rows[9:]])
    config = TrainConfig(seq_len=32, batch_size=1, seed=seed, eval_batches=4)
    dataset, batches = open_data(
        str(path), ByteTokenizer(), config, streaming=True, num_workers=0, truncate=truncate
    )

    def answers(batches: list[dict[str, torch.Tensor]]) -> set[bytes]:
        found = set()
        for batch in batches:
            for labels in batch["labels"]:
                found.add(bytes(labels[(labels >= 0) & (labels < 256)].tolist()))
        return found

    evaluated = answers(batches)
    trained = answers([next(dataset) for _ in range(4)])
    assert len(evaluated) == len(trained) == 1
    assert evaluated | trained == {b"fits 0", b"fits 1"}


def test_open_data_streams_where_it_must(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [{"text": f"document {n} of many"} for n in range(400)]
    write_jsonl(tmp_path / "a.jsonl", many)
    write_jsonl(tmp_path / "b.jsonl.gz", many)
    config, words = TrainConfig(seq_len=16, batch_size=2, eval_batches=2), ByteTokenizer()

    def opened(path: str | None, **options):
        return open_data(path, words, config, num_workers=0, **options)

    assert type(opened(str(tmp_path / "a.jsonl"))[0]) is TokenDataset
    for path in ("*.jsonl", "b.jsonl.gz"):
        assert type(opened(str(tmp_path / path))[0]) is StreamingDataset
    data, batches = opened(
        str(tmp_path / "a.jsonl"), streaming=True, packing="documents", rank=1, world_size=2
    )
    assert type(data) is StreamingDataset and (data.rank, data.world_size) == (1, 2)
    assert len(batches) == 2 and {*batches[0]} == {*next(data)} == {
        "input_ids",
        "labels",
        "document_ids",
    }
    monkeypatch.setattr("te_models.data.sources.STREAMED_BYTES", 1000)
    assert type(opened(str(tmp_path / "a.jsonl"))[0]) is StreamingDataset
    assert type(opened(str(tmp_path / "a.jsonl"), streaming=False)[0]) is TokenDataset
