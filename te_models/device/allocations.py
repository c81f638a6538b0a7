"""The memory of a computation that runs without data, on the meta device, where tensors have sizes and no values.

Inside an `Allocations`, real modules run as they are: what autograd saves, and when Python and autograd free it, is
counted. A meta tensor stands for one on the device of the plan (`on_gpu`). Code whose kernels allocate
less than its PyTorch version, or know what PyTorch cannot, says so where it is: `results_of` and `counted_as`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Bytes = tuple[int, ...]  # of each part, in the order of Allocations.parts
T = TypeVar("T")


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages on meta that are alive, each once.

    Args:
        parts: names of parts of the memory, of which the first is counted unless `counted_as` names another.
        gpu: whether a meta tensor stands for one on a GPU, or on a CPU.
    """

    def __init__(self, parts: Sequence[str], gpu: bool = True) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.gpu = gpu
        self.part: int | None = 0  # that is counted now; None: nothing is
        self.live = [0] * len(self.parts)
        self.events: list[Bytes] = []  # `live` after each allocation
        self._storages: dict[int, tuple[int, int]] = {}  # address -> bytes, part

    def __enter__(self) -> Allocations:
        assert active() is None, "one at a time"
        _THREAD.active = self
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _THREAD.active = None
        super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # A subclass, such as a quantized tensor, holds plain tensors, which come through here by themselves.
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if type(tensor) is Tensor and tensor.is_meta:
                self._count(tensor, self.part)
        return out

    def _count(self, tensor: Tensor, part: int | None) -> None:
        """Count a tensor if its storage is new; with `part` None, remember that it is not counted."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        # A view, or the result of an operation in place.
        if address in self._storages:
            return
        size = 0 if part is None else storage.nbytes()
        # Any part will do for a storage of no bytes.
        part = part or 0
        self._storages[address] = (size, part)
        # Autograd and Python free it when they would free its memory on the device.
        weakref.finalize(storage, self._free, address)
        if size:
            self.live[part] += size
            self.events.append(tuple(self.live))

    def _free(self, address: int) -> None:
        size, part = self._storages.pop(address)
        self.live[part] -= size

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count nothing for tensors that were there before, such as parameters."""
        for tensor in tensors:
            self._count(tensor, None)

    def move(self, tensor: Tensor, part: str) -> None:
        """Count a tensor that is alive as another part from now on."""
        address = tensor.untyped_storage()._cdata
        size, before = self._storages[address]
        column = self.parts.index(part)
        self._storages[address] = (size, column)
        self.live[before] -= size
        self.live[column] += size


_THREAD = threading.local()


def active() -> Allocations | None:
    """Return the count that runs in this thread."""
    return getattr(_THREAD, "active", None)


@contextlib.contextmanager
def counted_as(part: str | None) -> Iterator[None]:
    """Count the memory that is allocated inside under the name `part`; None: do not count it."""
    allocations = active()
    if allocations is None:
        yield
        return
    before = allocations.part
    # Within a block that is not counted, no inner block counts either.
    if before is not None:
        allocations.part = None if part is None else allocations.parts.index(part)
    try:
        yield
    finally:
        allocations.part = before


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or on meta and stands for one that is."""
    if not tensor.is_meta:
        return tensor.is_cuda
    allocations = active()
    return allocations is not None and allocations.gpu


def fresh(value: T) -> T:
    """Return the tensors of a result with memory of their own, and everything else in it as it is."""
    leaves, form = tree_flatten(value)
    new_tensors = []
    for leaf in leaves:
        new_tensors.append(_own(leaf) if isinstance(leaf, Tensor) else leaf)
    return tree_unflatten(new_tensors, form)


def _own(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def results_of(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function as one kernel computes it without data: it allocates its results and nothing else."""

    def call(*args: Any, **kwargs: Any) -> T:
        with counted_as(None), torch.no_grad():
            results = function(*args, **kwargs)
        return fresh(results)

    return call
