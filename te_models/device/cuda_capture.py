"""Capture CUDA graphs in a process whose other threads also use the GPU.

In CUDA's "global" mode a capture fails as soon as any thread allocates pinned memory or queries an event. In the
"thread_local" mode used here only a device-wide synchronization by another thread makes it fail, and this package's own
background threads do not use CUDA during a capture.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Held during a capture, and by background threads whenever they use CUDA.
_CUDA = threading.RLock()


@contextmanager
def outside_captures() -> Iterator[None]:
    """Use CUDA from a background thread: wait for the current capture to end, and delay the next one."""
    with _CUDA:
        yield


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    *generators: torch.Generator,
    pool: Any = None,
) -> Iterator[None]:
    """Capture the body of the `with` statement into a CUDA graph.

    No garbage is collected meanwhile, since it may hold the graphs of an earlier run.

    Args:
        graph: a torch.cuda.CUDAGraph.
        stream: the torch.cuda.Stream to capture on.
        generators: random generators registered with the graph, beside the device's own.
        pool: `pool()` of another graph, to share its memory: only tensors that are still alive survive a replay.

    Raises:
        RuntimeError: if the capture failed (see `failed_capture`). Nothing in the body has run on the device, stream
            and generators are restored, and the capture may be tried once more.
    """
    drawn_from = (torch.cuda.default_generators[stream.device.index], *generators)
    with _CUDA:
        copies = [generator.clone_state() for generator in drawn_from]
        # Sets the stream back also where the end of the capture raises.
        before = torch.cuda.stream(torch.cuda.current_stream())
        collects = gc.isenabled()
        gc.disable()
        try:
            with (
                before,
                torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                yield
        except BaseException:
            # If the end of a capture raises, PyTorch leaves the generators in their capturing state.
            for generator, copy in zip(drawn_from, copies, strict=True):
                generator.graphsafe_set_state(copy)
            raise
        finally:
            # Not for a caller that had switched it off.
            if collects:
                gc.enable()
        # PyTorch zeroes the graph's random offset on the capture's stream, and each replay sets it on its own stream:
        # unordered, the zero may come last, and the first replay draws other numbers.
        torch.cuda.current_stream(stream.device).wait_stream(stream)


class _Address:
    """An address on the device, from which torch.as_tensor makes a tensor (the protocol __cuda_array_interface__)."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[size],  # it knows no BF16
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
        }


def without_ownership(tensor: Tensor) -> Tensor:
    """Return a tensor at the same address, which does not keep its memory.

    The result of a captured graph is written there in each replay. A tensor that owned the memory would keep a second
    graph of the same pool from using it.
    """
    if type(tensor) is not Tensor or not tensor.is_cuda or not tensor.numel():
        return tensor
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)


def failed_capture(error: BaseException) -> bool:
    """Return whether an error means that a capture was disturbed or that an operation cannot be captured."""
    return isinstance(error, RuntimeError) and "captur" in str(error)


def first_error(error: BaseException) -> BaseException:
    """Return the error that ended a capture; torch raises another one at the end of the capture."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error
