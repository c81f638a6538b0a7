"""Full-size cases of hostile data: a single line of 256 MiB, and one of 1 GiB in a .gz of 1 MB, in memory and streamed.

Each case is read in a separate process; time, peak memory beyond the imports, and the message are recorded.

    python -m benchmarks.long_lines --out benchmarks/results/long_lines_cpu.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz import resident
from te_models.data.corpus_chunks import ChunkReader, find_chunks
from te_models.data.documents import load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import TeModelsError

MIB = 2**20
SECONDS, MEMORY_MIB = 60.0, 1024  # a case that needs more is a failure


def blocks(size: int) -> Iterator[bytes]:
    """A JSON line of `size` bytes, a MiB at a time."""
    yield b'{"text": "'
    for _ in range(size // MIB):
        yield b"a" * MIB
    yield b'"}\n'


def write(path: Path, size: int) -> None:
    """Write one line into a file, compressed if its suffix says so."""
    with gzip.open(path, "wb") if path.suffix == ".gz" else open(path, "wb") as file:
        for block in blocks(size):
            file.write(block)


def in_memory(path: Path) -> int:
    """The characters of text in a corpus."""
    return sum(len(document.text) for document in load_documents(path))


def streamed(path: Path) -> int:
    """The same, read chunk by chunk as a training run does."""
    chunks = find_chunks(str(path))
    reader = ChunkReader(chunks.source, load_tokenizer(None), 0)
    order = reversed(
        range(len(chunks))
    )  # those inside the line first, as a shuffled run may read them
    return sum(len(d.text) for number in order for d in reader.documents(chunks[number]))


def measure(read: Callable[[Path], int], path: Path, results: Any) -> None:
    """Send seconds, MiB of memory and the reader's message."""
    before, start = resident(), time.perf_counter()
    try:
        said = f"{read(path)} characters"
    except TeModelsError as error:
        said = str(error).replace(str(path.parent), "data")
    except BaseException as error:  # what this looks for
        said = f"failure: {type(error).__name__}: {error}"
    results.put((round(time.perf_counter() - start, 2), round((resident() - before) / MIB), said))


def main() -> int:
    """Run all cases and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows, context = [], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lines") as folder:
        for name, size in (
            ("line.txt", 256),
            ("line.jsonl", 256),
            ("line.jsonl.gz", 1024),
            ("line.txt.gz", 1024),
        ):
            path = Path(folder) / name
            write(path, size * MIB)
            for read in (in_memory, streamed):
                results: Any = context.SimpleQueue()
                process = context.Process(target=measure, args=(read, path, results))
                process.start()
                process.join(SECONDS)
                seconds, memory, said = (
                    (SECONDS, 0, "failure: it hangs or died") if results.empty() else results.get()
                )
                if process.is_alive():
                    process.kill()
                bad = said.startswith("failure") or seconds > SECONDS or memory > MEMORY_MIB
                file_mib = round(path.stat().st_size / MIB, 1)
                rows.append(
                    dict(file=name, line_mib=size, file_mib=file_mib, read=read.__name__, seconds=seconds,
                    memory_mib=memory,
                         said=said, ok=not bad)
                )  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
            path.unlink()
    found = {"python": sys.version.split()[0], "machine": platform.machine(), "rows": rows}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
