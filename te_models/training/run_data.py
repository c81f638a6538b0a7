"""The data of a run, with its tokenizer."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path

from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import load_tokenizer
from te_models.data.tokenizer_base import Tokenizer
from te_models.data.training_data import open_data
from te_models.training.evaluation import Batch
from te_models.training.parallel import Parallel
from te_models.training.settings import RunSettings


@dataclass(frozen=True)
class RunData:
    """The data that a run reads.

    Attributes:
        tokenizer: with the chat template and the special tokens of the run.
        dataset: this process's share of the training data.
        eval_batches: this process's batches to evaluate on; empty: no evaluation.
        new_tokens: how many ids the special tokens of the run have added to the tokenizer.
    """

    tokenizer: Tokenizer
    dataset: TokenDataset | StreamingDataset
    eval_batches: list[Batch]
    new_tokens: int = 0

    def close(self) -> None:
        """End the processes that read streamed data."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.close()


def open_run_data(
    settings: RunSettings,
    config: TrainConfig,
    processes: Parallel,
    checkpoint: Path | None,
    limit: int,
) -> RunData:
    """Open the data of a run, for a model that allows sequences of `limit` tokens.

    A run that continues from a `checkpoint` has its tokenizer and chat template, unless the user gave others.
    """
    source = settings.tokenizer or settings.model
    if checkpoint is not None and "tokenizer" not in settings.set_by_user:
        source = checkpoint
    tokenizer = load_tokenizer(source)
    known_ids = tokenizer.vocab_size
    data = settings.data
    if checkpoint is not None and "chat_template" not in settings.set_by_user:
        data = dataclasses.replace(data, chat_template=None)  # the checkpoint's tokenizer has it
    dataset, eval_batches = open_data(
        data,
        tokenizer,
        dataclasses.replace(config, batch_size=processes.rows(config.batch_size)),
        limit=limit,
        rank=processes.data_rank,
        world_size=processes.data_world,
        ranks=processes.ranks,
    )
    if "data_workers" in settings.set_by_user and not isinstance(dataset, StreamingDataset):
        warnings.warn(
            "--data-workers has no effect: the data was read into memory, and --streaming reads it during training",
            stacklevel=2,
        )
    return RunData(tokenizer, dataset, eval_batches, tokenizer.vocab_size - known_ids)
