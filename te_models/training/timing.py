"""Steps in the queue of a device: their times, and copies of their values to the host, without waiting for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.planning.flops import utilization
from te_models.training.evaluation import Batch
from te_models.training.spikes import Bounds
from te_models.training.step_start import StepStart

if TYPE_CHECKING:
    from te_models.training.recording import RecordedStep

# A line of metrics.jsonl: step, loss, grad_norm, learning_rate, tokens_per_second, data_wait, and perhaps peak_memory,
# mfu and eval_loss.
Row = dict[str, Any]
Timestamp = torch.cuda.Event | float  # on a CUDA device an event in its queue, elsewhere seconds


def timestamp(device: torch.device) -> Timestamp:
    """Record the time at which `device` finishes all work queued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed(start: Timestamp, end: Timestamp) -> float:
    """Return the seconds between two timestamps of one device; wait for the second."""
    if isinstance(start, float):
        return cast(float, end) - start
    event = cast(torch.cuda.Event, end)
    event.synchronize()
    return start.elapsed_time(event) / 1e3


def device_metrics(
    device: torch.device, config: ModelConfig, length: int, tokens_per_second: float
) -> Row:
    """Return the metrics of a GPU in a step: peak memory in bytes, and the share of its peak (MFU) where that is known.

    `tokens_per_second` are of one GPU, `length` the tokens of a sequence. A CPU has none.
    """
    if device.type != "cuda":
        return {}
    row: Row = {"peak_memory": torch.cuda.max_memory_allocated(device)}
    share = utilization(config, length, tokens_per_second, torch.cuda.get_device_name(device))
    return row if share is None else {**row, "mfu": share}


def copy_to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; return it and the event that completes it, None if it is complete."""
    if not values.is_cuda:
        return values, None
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    ready = torch.cuda.Event()
    host.copy_(values, non_blocking=True)
    ready.record()
    return host, ready


@dataclass
class QueuedStep:
    """A step that the device may still be computing.

    `values` are loss, gradient norm, how many values of a recorded step's FP8 tensors are not finite, the numbers of
    processes that were asked to stop and that want a checkpoint, and RoutingReport.metrics with experts; the host may
    read them once `ready` is reached. `begun` is the state before the step, `bounds` the largest loss and gradient norm
    that are no spikes, `recorded` the entry of a recorded step, and `data_wait` the seconds that the host waited for
    its data. `end` follows the optimizer's update; `row` then has the metrics, by name.
    """

    step: int
    start: Timestamp
    micro_batches: list[Batch]
    values: Tensor
    ready: torch.cuda.Event | None
    begun: StepStart
    learning_rate: float
    end: Timestamp = 0.0
    row: Row = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)
    recorded: RecordedStep | None = None
    data_wait: float = 0.0
