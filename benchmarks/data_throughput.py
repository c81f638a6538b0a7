"""Tokens that streaming delivers per second of CPU time, by format and tokenizer, and the cost of packing a batch.

    python benchmarks/data_throughput.py [--mib 8]

The text is the running Python's documentation and standard library, repeated up to the requested size; the BPE
tokenizer of 32,000 ids is trained on it by the `tokenizers` library.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")


def write_corpus(folder: Path, mib: int) -> list[Path]:
    """The same documents as JSONL, gzip of it, and Parquet."""
    import pyarrow
    import pyarrow.parquet

    from te_models.data.documents import load_documents

    texts, size = [], 0
    while size < mib * 2**20:
        for document in load_documents(None):
            texts.append(f"{len(texts)} {document.text}")
            size += len(texts[-1])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 6))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), folder / "corpus.parquet", row_group_size=1000
    )
    return [folder / f"corpus{suffix}" for suffix in (".jsonl", ".jsonl.gz", ".parquet")]


def train_bpe(folder: Path, corpus: Path) -> Path:
    """A byte-level BPE of 32,000 ids."""
    from tokenizers import ByteLevelBPETokenizer

    with corpus.open() as file:
        texts = [json.loads(line)["text"] for _, line in zip(range(400), file, strict=False)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=32_000, special_tokens=["<eos>"], show_progress=False)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder / "tokenizer.json"


def measure(path: Path, words: object, packing: str) -> tuple[float, float]:
    """Return tokens read and encoded per second of CPU time, and seconds to pack a batch of 8 x 2,048."""
    from te_models.data.streaming import StreamingDataset

    data = StreamingDataset(str(path), words, 2048, batch_size=8, seed=0, packing=packing)
    encode, encoding = data.reader.encode, 0.0

    def timed(*block: object) -> object:
        nonlocal encoding
        start = time.process_time()
        encoded = encode(*block)
        encoding += time.process_time() - start
        given.append(encoded.shape[1])
        return encoded

    given: list[int] = []
    data.reader.encode = timed
    start, batches = time.process_time(), 0
    while data._lane(0).epoch == 0:
        next(data)
        batches += 1
    spent = time.process_time() - start
    packing_time = (spent - encoding) / batches
    return sum(given) / encoding, packing_time


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=8)
    arguments = parser.parse_args()
    from te_models.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        files = write_corpus(Path(name), arguments.mib)
        bpe = load_tokenizer(train_bpe(Path(name), files[0]))
        for file in files:
            for label, words in (("bytes", load_tokenizer()), ("BPE 32k", bpe)):
                speed, packing = measure(file, words, "documents")
                print(
                    f"{file.name:16} {file.stat().st_size / 2**20:6.1f} MiB  {label:8} {speed:12,.0f} tokens/s read "
                    f"and encoded  {packing * 1e3:6.2f} ms per batch of 8 x 2,048 to pack"
                )


if __name__ == "__main__":
    main()
