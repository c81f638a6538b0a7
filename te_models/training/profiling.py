"""A trace of some steps of a run, with the names of the model's layers, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from te_models.adapters.rows import NamedRows, base_of
from te_models.errors import SaveError, UsageError
from te_models.files.atomic import replacing_file, reraising

FOLDER = "profile"  # in the folder of a run


def profiled_steps(text: str) -> range:
    """Return the steps that --profile names: "10" or "10:12", both ends included; none for "".

    Raises:
        UsageError: it is neither.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise UsageError(
            f"profile={text!r}: give a step, such as 10, or the first and the last, 10:12"
        )
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise UsageError(f"profile={text!r} ends before it begins: give {last}:{first}")
    return range(first, last + 1)


class StepProfiler:
    """Profiles steps of a run.

    Attributes:
        active: whether a step is being profiled. Such a step runs without its CUDA graph, whose replay has no layers.
        out: the run's folder; None on processes that write nothing.
    """

    def __init__(self, model: nn.Module, steps: str, out: Path | None, last: int) -> None:
        """Warn if steps are to be profiled that do not come in a run that ends after step `last`."""
        self.model = model
        self.steps = profiled_steps(steps)
        self.out = out
        self.active = False
        if self.steps and self.steps[-1] > last:
            warnings.warn(
                f"--profile asks for step {self.steps[-1]}, and the run ends after step {last}: of later ones there "
                "is no trace",
                stacklevel=4,  # the caller of Trainer
            )

    @contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Profile what runs inside, if `step` is to be, and write profile/step-<step>.json.gz into the run's folder."""
        if step not in self.steps:
            yield
            return
        if self.out is None:  # another process writes; all of them leave their graph for the step
            self.active = True
            try:
                yield
            finally:
                self.active = False
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.active = True
        # Kineto writes a line to stderr as it begins and ends, unless its own level hides it.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        try:
            with named_layers(self.model), profile(activities=activities) as trace:
                yield
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        finally:
            self.active = False
        path = self.out / FOLDER / f"step-{step:08d}.json.gz"
        with reraising(path, OSError, error=SaveError):
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as fresh:
            trace.export_chrome_trace(str(fresh))


@contextmanager
def named_layers(model: nn.Module) -> Iterator[None]:
    """Give each module's forward its name, such as "layers.3.mlp.down_proj", as a range in traces made inside."""
    handles = []
    # Modules nest, so their ranges end in the opposite order.
    open_ranges: list[Any] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            span = record_function(name)
            span.__enter__()
            open_ranges.append(span)

        return hook

    def leave(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        # Layers on rows of a te.Linear do not run in an unprofiled step, where their updates are one product with its
        # own: a hook would make them run, and with them other roundings and other draws of dropout.
        if name and not isinstance(base_of(module), NamedRows):
            handles.append(module.register_forward_pre_hook(enter(name)))
            # Also where a forward raises: a range left open would contain everything after it.
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
