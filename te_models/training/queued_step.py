"""A step of training that the device may still be computing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_models.training.evaluation import Batch
from te_models.training.timing import Timestamp

Row = dict[str, Any]  # of metrics.jsonl: step, loss, grad_norm, learning_rate, tokens_per_second, perhaps eval_loss


@dataclass
class QueuedStep:
    """A step that the device may still be computing.

    `values` are loss, gradient norm, number of processes asked to stop, and RoutingReport.metrics with experts; the
    host may read them once `ready` is reached. `end` follows the optimizer's update; `row` then has the values.
    """

    step: int
    start: Timestamp
    micro_batches: list[Batch]
    values: Tensor
    ready: torch.cuda.Event | None
    end: Timestamp = 0.0
    row: Row = field(default_factory=dict)
