"""Capture of CUDA graphs in a process where other threads use the GPU too.

A capture in CUDA's "global" mode ends with an error as soon as any thread reserves pinned memory or asks for an event.
Here it is "thread_local", which only a synchronization of the whole device by another thread disturbs, and this
package's own background threads leave CUDA alone while one lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUDA = threading.RLock()  # held while a graph is captured, and by background threads for each use of CUDA


@contextmanager
def outside_captures() -> Iterator[None]:
    """Use CUDA inside, from a background thread: waits until no graph is being captured, and holds up the next one."""
    with _CUDA:
        yield


@contextmanager
def capture(graph: Any, stream: Any, *generators: torch.Generator) -> Iterator[None]:
    """Capture what runs inside into `graph`, a torch.cuda.CUDAGraph, on `stream`.

    `generators`: those registered with the graph, besides the device's own.

    Raises:
        RuntimeError: the capture failed (`failed_capture` recognizes it). Nothing inside has run on the device, stream
            and generators are as before, and another capture may be tried.
    """
    drawn_from = (torch.cuda.default_generators[stream.device.index], *generators)
    with _CUDA:
        copies = [generator.clone_state() for generator in drawn_from]
        before = torch.cuda.stream(torch.cuda.current_stream())
        try:
            with before, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            # PyTorch leaves its stream current, and its generators "capturing", where the end of a capture raises.
            for generator, copy in zip(drawn_from, copies, strict=True):
                generator.graphsafe_set_state(copy)
            raise


def failed_capture(error: BaseException) -> bool:
    """Whether an error says that a capture was disturbed, or that something cannot be captured."""
    return isinstance(error, RuntimeError) and "captur" in str(error)
