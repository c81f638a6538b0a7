"""Control messages between the processes of a job: JSON values, decisions of rank 0, results of a collective vote.

They travel over a separate gloo group on the CPU with a long timeout: waiting for a checkpoint to reach a slow disk
must not look like the death of a peer, which the group that reduces gradients reports within a minute. Values are JSON
in tensors of bytes, because the object collectives of torch send pickles.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Json = TypeVar("Json")  # a value that JSON has; tuples arrive as lists

# The collectives of the last exchange. A gloo thread drops its references to their tensors some time after the caller
# has the result, and needs the GIL if it holds the last one: if the interpreter ends meanwhile, the process aborts
# ("terminate called without an active exception"). Kept here, the tensors are freed by the main thread.
_last_collectives: list[dist.Work] = []


class Ranks:
    """Rank `rank` of `world` processes. Without a group there is one process, and nothing is ever sent.

    `first` is True on the process that logs, prints and publishes checkpoints.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.first = self.rank == 0

    def gather(self, value: Json) -> list[Json]:
        """Return the JSON values of all ranks in rank order, on every rank."""
        if self.world == 1:
            return [value]
        message = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._all_gather(sizes, torch.tensor([len(message)]))
        # all_gather takes tensors of one size, so lengths travel first and messages are padded.
        longest = max(int(size) for size in sizes)
        messages = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(message)] = message
        self._all_gather(messages, padded)
        return [_decode(padded[: int(size)]) for padded, size in zip(messages, sizes, strict=True)]

    def _all_gather(self, parts: list[Tensor], own: Tensor) -> None:
        """Fill `parts` with the tensors `own` of all ranks."""
        work = dist.all_gather(parts, own, group=self.group, async_op=True)
        assert work is not None  # it would be None on a process outside the group
        work.wait()
        # Two collectives are one exchange: the lengths, then the messages.
        _last_collectives[:] = [*_last_collectives[-1:], work]

    def from_first(self, action: Callable[[], Json], error: type[Exception] = RuntimeError) -> Json:
        """Run `action` on rank 0 and return its result, a JSON value, on every rank.

        Raises:
            error: the action failed. Rank 0 raises the original exception, the others `error` with its message.
        """
        if self.world == 1:
            return action()
        answer: list[Any] = [None, None]  # the result, and the message of a failure
        cause = None
        if self.first:
            try:
                answer[0] = action()
            # Kept until after the gather: the other ranks wait in it, whatever happened here.
            except Exception as problem:
                answer[1] = str(problem) or type(problem).__name__
                cause = problem
        value, failure = self.gather(answer)[0]
        if cause is not None:
            raise cause
        if failure is not None:
            raise error(f"rank 0: {failure}")
        return value


def _encode(value: object) -> Tensor:
    """Return a JSON value as bytes, uint8 [length]."""
    # A bytearray: frombuffer shares its memory, and warns of memory that is read-only.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(message: Tensor) -> Any:
    """Return the JSON value in bytes, uint8 [length]."""
    return json.loads(message.numpy().tobytes())
