"""Batches that a program makes itself, in a list, DataLoader or generator, as an endless dataset with a position."""

import contextlib
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from te_models.distributed.control import Ranks
from te_models.errors import DataError, UsageError, plural
from te_models.model.targets import IGNORED

REQUIRED = ("input_ids", "labels")
OPTIONAL = ("attention_mask", "document_ids")


class OwnBatches:
    """An endless iterator over batches of the user's own, which start again when they end, with exact resume.

    The position is the number of batches so far in the epoch, and a resumed run draws and drops as many. PyTorch's
    random numbers in the data, such as the order of a shuffling DataLoader, have a state of their own that `seed` and
    the epoch begin. Whether the data gives the batches of the saved run again is checked with the last one. An
    iterator, such as a generator, has one pass and cannot be resumed.

    Args:
        batches: dicts of REQUIRED and perhaps OPTIONAL tensors [B, S], this process's share of each micro-batch.
        seed: of the randomness of PyTorch in the data.
        ranks: the processes of the run, of which the first one's batch is compared.
        said: the batch_size and seq_len that the config asks for; a warning names what the first batch does not have.

    Raises:
        UsageError: `batches` cannot be iterated over.
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Tensor]],
        seed: int,
        ranks: Ranks,
        announced: Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
            advice = (
                "give what open_data returns, or batches in a DataLoader, a list or a generator"
            )
            raise UsageError(f"the dataset is a {type(batches).__name__}: {advice}")
        self.batches = batches
        self.seed = seed
        self.ranks = ranks
        self.said = announced or {}
        self.once = isinstance(batches, Iterator)
        self._epoch = 0
        self._position = 0  # the batches so far of this epoch
        self._digest = 0  # of the last one
        self._random = torch.get_rng_state()
        self._iterator: Iterator[Any] | None = None  # None: paused
        self._begin()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return the next batch.

        Raises:
            DataError: there is none, or it is not a batch.
        """
        if self._iterator is None:
            self._go_on()
        assert self._iterator is not None
        with self._own_random():
            batch_or_none = next(self._iterator, None)
        if batch_or_none is None:
            # A generator cannot begin again, and an iterable that gave nothing would be asked forever.
            if self.once or not self._position:
                ended = f"ended after {plural(self._position, 'batch', 'batches')}: lower steps, or give a list or"
                again = f"{ended} another object that can be iterated over again"
                raise DataError(
                    f"the data {again if self.once else 'has no batch: give at least one'}"
                )
            self._epoch = self._epoch + 1
            self._position = 0
            self._begin()
            return next(self)
        self._position += 1
        batch = checked_batch(batch_or_none, f"batch {self._position}")
        # Labels are shifted inside the model: the first of a row predicts nothing.
        if bool((batch["labels"][:, 1:] == IGNORED).all()):
            warnings.warn(
                f"a batch of your own has no label that counts: all are {IGNORED}", stacklevel=4
            )
        self._digest = _digest(batch)
        self._compare(batch["input_ids"].shape)
        return batch

    def _compare(self, shape: torch.Size) -> None:
        """Warn once of sizes that the config asks for and the batches do not have."""
        sizes = {"batch_size": shape[0], "seq_len": shape[1]}
        other = [f"{name}={size}" for name, size in self.said.items() if size != sizes[name]]
        self.said = {}
        if other:
            message = f"the first batch of your own has {shape[0]} x {shape[1]} tokens, and its size counts"
            warnings.warn(f"{' and '.join(other)} has no effect: {message}", stacklevel=4)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"epoch": self._epoch, "batches": self._position, "last_batch": self._digest}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batch that was the last when `state` was taken.

        Raises:
            UsageError: the data has one pass, or does not give that batch again.
        """
        if self.once:
            raise UsageError(
                f"the data is a {type(self.batches).__name__}, which has one pass, so the run cannot be resumed: give "
                "a list or another object that can be iterated over again"
            )
        self._epoch = state["epoch"]
        self._position = 0
        self._begin()
        # Batches of a user have no index to seek by, so the ones before are drawn again and dropped.
        while self._position < state["batches"] and self._epoch == state["epoch"]:
            next(self)
        same = self._epoch == state["epoch"] and (
            not self._position or self._digest == state["last_batch"]
        )
        # The state has the digest of the first process's batch only; all processes raise together.
        if not all(self.ranks.gather(same or not self.ranks.first)):
            raise UsageError(
                "the data gives other batches than in the saved run: draw its random numbers from PyTorch or from a "
                "seed that is the same for each iteration, or start a new run"
            )

    def pause(self) -> None:
        """End the workers of a DataLoader. The next batch is the one that follows all the same.

        Without it they live until Python collects the loader's iterator. If that is part of a cycle, its queue is
        finalized first, nobody tells the workers to end, and PyTorch waits five seconds before it kills them.
        """
        if not self.once:
            self._iterator = None

    def _go_on(self) -> None:
        """Begin the epoch again, and drop the batches that were drawn before a pause."""
        self._begin()
        with self._own_random():
            for _ in range(self._position):
                next(self._iterator, None)  # type: ignore[arg-type]  # _begin has made it

    def _begin(self) -> None:
        """Begin the epoch."""
        self._random = torch.Generator().manual_seed(self.seed * 2**20 + self._epoch).get_state()
        with self._own_random():
            self._iterator = iter(self.batches)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Exchange PyTorch's random state in the block for the data's own."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(before)


def checked_batch(batch: object, place: str) -> dict[str, Tensor]:
    """Return a batch as a dict; a DataError that names its `place` unless it is one of tensors [B, S]."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"{place} is a {type(batch).__name__}: give a dict of {' and '.join(REQUIRED)}"
        )
    for name in REQUIRED:
        if name not in batch:
            raise DataError(
                f"{place} has no {name!r}: give an int64 tensor [B, S]; labels may be the input_ids"
            )
    ids = batch["input_ids"]
    for name, tensor in batch.items():
        if name not in (*REQUIRED, *OPTIONAL):
            raise DataError(
                f"{place} has {str(name)[:60]!r}: leave it out; known are {', '.join(REQUIRED + OPTIONAL)}"
            )
        alike = isinstance(tensor, Tensor) and isinstance(ids, Tensor) and tensor.shape == ids.shape
        if not alike:
            raise DataError(
                f"{place}: {name} is no tensor of the shape of input_ids: give an int64 tensor [B, S]"
            )
        # After the comparison of shapes, so that this message is about all tensors of the batch.
        if tensor.dim() != 2:
            raise DataError(
                f"{place}: {name} has shape {list(tensor.shape)}: give an int64 tensor [B, S], a row per sequence"
            )
    return dict(batch)


def _digest(batch: Mapping[str, Tensor]) -> int:
    """Return a hash of a batch, below 2^48, which is exact in a JSON double."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(batch):
        digest.update(f"{name} {list(batch[name].shape)}".encode())
        digest.update(batch[name].detach().cpu().contiguous().numpy().data)
    return int.from_bytes(digest.digest(), "big")
