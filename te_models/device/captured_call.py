"""A function that is captured in a CUDA graph when it is called, and replayed from the next call on."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from te_models.device.cuda_capture import capture, failed_capture, first_error

log = logging.getLogger(__name__)


class CapturedCall:
    """The CUDA graph of a function without arguments, which reads and writes the same tensors in each call.

    The function is given with each call and not kept, so that this object holds nothing but the graph. It has to
    launch the same kernels every time. A replay runs no Python: what the function does on the host, the caller does.

    Args:
        name: of what is captured, for the log.
        stream: the torch.cuda.Stream to capture on.
        pool: the memory pool of the graph (torch.cuda.graph_pool_handle), which others may share that leave no result
            in it.
        generator: the generator that the function draws from. Unregistered, it would draw the same in each replay.
    """

    def __init__(self, name: str, stream: Any, pool: Any, generator: torch.Generator) -> None:
        self.name = name
        self.stream = stream
        self.pool = pool
        self.generator = generator
        self.graph: Any = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(generator)
        self.is_captured = False
        self.failed = False

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run the function on the capture's stream: libraries allocate workspaces there and kernels are compiled."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            run()
        # Both streams use the same tensors: each waits for the other.
        current.wait_stream(self.stream)

    def __call__(self, run: Callable[[], None]) -> None:
        """Replay the graph. The first call captures it; if that fails, `run` runs eagerly now and in later calls."""
        if not self.is_captured and not self.failed:
            self._capture(run)
        if self.failed:
            run()
        else:
            self.graph.replay()

    def _capture(self, run: Callable[[], None]) -> None:
        """Capture the function, which runs nothing on the device. Another thread may disturb it, or memory run out."""
        try:
            with capture(self.graph, self.stream, self.generator, pool=self.pool):
                run()
        except RuntimeError as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if not out_of_memory and not failed_capture(error):
                raise
            log.warning(
                "%s goes on without its CUDA graph: %s",
                self.name,
                str(first_error(error)).splitlines()[0],
            )
            self.failed = True
            return
        self.is_captured = True
