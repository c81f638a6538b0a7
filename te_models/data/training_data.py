"""The data of a run: a dataset to train on, in memory or streamed, and batches to evaluate on."""

from __future__ import annotations

import os

from torch import Tensor

from te_models.config.training import TrainConfig
from te_models.data.corpus_chunks import corpus_size
from te_models.data.dataset import TokenDataset
from te_models.data.documents import COMPRESSIONS, load_documents, split_documents
from te_models.data.python_docstrings import PYTHON_DOCSTRINGS, python_docstrings
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import Tokenizer
from te_models.distributed.control import Ranks
from te_models.errors import UsageError

STREAMED_BYTES = 2**30  # larger corpora are streamed by default
EVAL_FRACTION = 0.01  # of a streamed corpus; in memory, the default of split_documents


def open_data(
    path: str | None,
    tokenizer: Tokenizer,
    config: TrainConfig,
    *,
    streaming: bool | None = None,
    packing: str = "stream",
    num_workers: int = 2,
    rank: int = 0,
    world_size: int = 1,
    ranks: Ranks | None = None,
) -> tuple[TokenDataset | StreamingDataset, list[dict[str, Tensor]]]:
    """Open a corpus for training.

    Args:
        path: a file, folder, glob or URL of text, JSONL or Parquet; "python-docstrings": functions and docstrings of
            Python's standard library; None: Python's own documentation and sources.
        tokenizer: encodes the text.
        config: seq_len, batch_size, seed and eval_batches.
        streaming: read the corpus while training; None: if it exceeds 1 GiB, is compressed, or is a glob or URL.
        packing: "stream", or "documents" to keep attention inside each document.
        num_workers: processes that encode a streamed corpus ahead.
        rank: number of this process among those that share the data; the processes of one replica have the same.
        world_size: number of ranks that share the data.
        ranks: the processes that exchange positions of a streamed corpus when a checkpoint is saved.

    Returns:
        this rank's dataset of training batches, and its evaluation batches.

    Raises:
        UsageError: an argument is out of range.
        DataError: the data cannot be read or is too short.
    """
    share = dict(batch_size=config.batch_size, seed=config.seed, packing=packing, rank=rank, world_size=world_size)
    built_in = path in (None, PYTHON_DOCSTRINGS)
    if streaming is None:
        streaming = path is not None and not built_in and _must_stream(path)
    if not streaming:
        pairs = path == PYTHON_DOCSTRINGS
        training, evaluation = python_docstrings() if pairs else split_documents(load_documents(path), seed=config.seed)
        dataset = TokenDataset(training, tokenizer, config.seq_len, **share)
    elif path is None or built_in:
        raise UsageError("--streaming needs --data PATH: Python's own documentation and sources are read into memory")
    else:
        dataset = StreamingDataset(
            path,
            tokenizer,
            config.seq_len,
            **share,
            eval_fraction=EVAL_FRACTION,
            num_workers=num_workers,
            ranks=ranks,
        )
        evaluation = dataset.held_out(config.eval_batches * config.batch_size * config.seq_len * world_size)
    evaluated = TokenDataset(evaluation, tokenizer, config.seq_len, **share, shuffle=False)
    return dataset, evaluated.eval_batches(config.eval_batches)


def _must_stream(path: str) -> bool:
    """Return whether to stream by default: compressed files, globs, URLs and corpora that may not fit in memory."""
    glob = not os.path.lexists(path) and any(c in path for c in "*?[")
    return glob or "://" in path or path.endswith(tuple(COMPRESSIONS)) or corpus_size(path) > STREAMED_BYTES
