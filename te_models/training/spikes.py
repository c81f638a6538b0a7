"""Spikes of loss and gradient norm: values far above the median of recent steps, measured in robust deviations."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FEWEST = 20  # steps without which nothing is called a spike
# A standard deviation over the median absolute deviation of a normal distribution.
NORMAL = 1.4826
# A deviation is at least this share of the median, so that a loss that stands still has no spikes of nothing.
LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Bounds:
    """The largest loss and gradient norm that are no spikes; infinite without bounds."""

    loss: float = math.inf
    grad_norm: float = math.inf


class SpikeBounds:
    """Bounds of the next step, from the steps before it that were no spikes themselves.

    Args:
        deviations: above the median at which a value is a spike; 0: never.
        window: steps that count.
    """

    def __init__(self, deviations: float, window: int) -> None:
        self.deviations = deviations
        self.losses: deque[float] = deque(maxlen=window)
        self.norms: deque[float] = deque(maxlen=window)

    def add(self, loss: float, grad_norm: float) -> None:
        """Let a step count."""
        self.losses.append(loss)
        self.norms.append(grad_norm)

    def replace(self, steps: Iterable[Sequence[float]]) -> None:
        """Let these steps count in place of all others: their losses and gradient norms, oldest first."""
        self.losses.clear()
        self.norms.clear()
        for loss, grad_norm in steps:
            self.add(loss, grad_norm)

    def bounds(self) -> Bounds:
        """Return the bounds of the next step."""
        if not self.deviations or len(self.losses) < FEWEST:
            return Bounds()
        return Bounds(
            loss=robust_bound(self.losses, self.deviations),
            grad_norm=robust_bound(self.norms, self.deviations),
        )


def robust_bound(values: Iterable[float], deviations: float) -> float:
    """Return median + deviations * 1.4826 * median absolute deviation, the deviation at least 1 % of the median."""
    values = list(values)
    median = statistics.median(values)
    deviation = NORMAL * statistics.median(abs(value - median) for value in values)
    return median + deviations * max(deviation, LEAST_SHARE * abs(median))
