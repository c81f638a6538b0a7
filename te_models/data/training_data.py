"""The data of a run from what its user names: a dataset to train on, in memory or streamed, and batches to evaluate on."""

from __future__ import annotations

from torch import Tensor

from te_models.config.training import TrainConfig
from te_models.data.corpus_chunks import COMPRESSIONS, corpus_size
from te_models.data.dataset import TokenDataset, load_documents, split_documents
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import Tokenizer
from te_models.distributed.control import Ranks

STREAMED_BYTES = 2**30  # a corpus of more than this is streamed unless the user says otherwise
EVAL_FRACTION = 0.01  # of a streamed corpus; in memory it is what split_documents takes


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
    """This rank's dataset of training batches, and its batches to evaluate on.

    Args:
        path: text, JSONL or Parquet files (see docs/guide/data.md); None: Python's own documentation and sources.
        tokenizer: what encodes it.
        config: seq_len, batch_size, seed and eval_batches.
        streaming: read the corpus as it goes; None: if it is larger than a GiB, compressed, a glob or a URL.
        packing: "stream", or "documents" to keep attention inside each document.
        num_workers: processes that encode a streamed corpus ahead.
        rank: which of the processes that share the data this is; those that hold parts of one replica have the same.
        world_size: how many share it.
        ranks: all processes of the run, which exchange the positions of a streamed corpus; None: there is one.

    Raises:
        ValueError: a mistake in what was asked for, or unreadable data.
    """
    share = dict(batch_size=config.batch_size, seed=config.seed, packing=packing, rank=rank, world_size=world_size)
    if streaming is None:
        streaming = path is not None and _must_stream(path)
    if not streaming:
        training, evaluation = split_documents(load_documents(path), seed=config.seed)
        dataset = TokenDataset(training, tokenizer, config.seq_len, **share)
    elif path is None:
        raise ValueError("--streaming needs --data: Python's own documentation and sources are read into memory")
    else:
        dataset = StreamingDataset(
            path, tokenizer, config.seq_len, **share, eval_fraction=EVAL_FRACTION, num_workers=num_workers, ranks=ranks
        )
        evaluation = dataset.held_out(config.eval_batches * config.batch_size * config.seq_len * world_size)
    held_out = TokenDataset(evaluation, tokenizer, config.seq_len, **share, shuffle=False)
    return dataset, held_out.eval_batches(config.eval_batches)


def _must_stream(path: str) -> bool:
    """Whether only streaming can read it, or memory may not hold it."""
    return (
        any(c in path for c in "*?[")
        or "://" in path
        or path.endswith(tuple(COMPRESSIONS))
        or (corpus_size(path) > STREAMED_BYTES)
    )
