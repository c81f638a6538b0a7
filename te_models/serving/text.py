"""Text as batches of one sequence, to measure inputs and probabilities on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from te_models.config.data import parse_columns
from te_models.data.dataset import TokenDataset, check_vocabulary
from te_models.data.documents import load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.model.decoder import Decoder


def read_batches(
    model: Decoder, data: str, tokenizer: str | Path | None, count: int, seq_len: int, columns: str = ""
) -> list[dict[str, Tensor]]:
    """Return up to `count` sequences spread evenly over a text, each a batch {"input_ids", "labels"} int64 [1, S].

    Args:
        model: the model, whose vocabulary and longest sequence limit the tokens.
        data: a file, folder or glob of text or records; conversations are put into the tokenizer's chat template, or
            the plain one.
        tokenizer: a tokenizer.json, or a folder with one; None: bytes.
        count: maximum number of sequences.
        seq_len: tokens per sequence.
        columns: your columns of the data, as in DataConfig.

    Raises:
        DataError, UsageError: the data or the tokenizer cannot be read, or do not fit the model.
    """
    words = load_tokenizer(tokenizer)
    check_vocabulary(words, model.config.vocab_size)
    length = min(seq_len, model.config.longest_sequence)
    documents = load_documents(data, parse_columns(columns))
    if any(document.conversation is not None for document in documents):
        words.ensure_chat_template()
    dataset = TokenDataset(documents, words, length, batch_size=1, seed=0, shuffle=False)
    return dataset.eval_batches(count)
