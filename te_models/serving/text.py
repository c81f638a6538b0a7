"""Text as batches of one sequence, to measure inputs and probabilities on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from te_models.data.dataset import TokenDataset, check_vocabulary
from te_models.data.documents import load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.model.decoder import Decoder


def read_batches(
    model: Decoder, data: str, tokenizer: str | Path | None, count: int, seq_len: int
) -> list[dict[str, Tensor]]:
    """Return up to `count` sequences spread evenly over a text, each a batch {"input_ids", "labels"} int64 [1, S].

    Args:
        model: whose vocabulary and longest sequence bound the tokens.
        data: a file, folder or glob of text, JSONL or Parquet.
        tokenizer: a tokenizer.json, or a folder with one; None: bytes.
        count: the most sequences.
        seq_len: tokens per sequence.

    Raises:
        DataError, UsageError: the data or the tokenizer cannot be read, or do not fit the model.
    """
    words = load_tokenizer(tokenizer)
    check_vocabulary(words, model.config.vocab_size)
    length = min(seq_len, model.config.longest_sequence)
    dataset = TokenDataset(load_documents(data), words, length, batch_size=1, seed=0, shuffle=False)
    return dataset.eval_batches(count)
