"""A step that must not count: its loss or gradient is not finite, or far above those before it."""

from __future__ import annotations

import math

from te_models.errors import Diverged, plural
from te_models.training.timing import QueuedStep

NONFINITE = "nonfinite"
SPIKE = "spike"


class BadStep(Diverged):
    """Raised within the loop for a step that must not count; the guard decides what follows.

    Args:
        queued: the step.
        event: NONFINITE or SPIKE.
        loss: its loss, nats per token.
        grad_norm: its gradient norm before clipping.
        bad_values: how many values of its FP8 tensors were not finite; 0 where the step was not recorded.
    """

    def __init__(
        self, queued: QueuedStep, event: str, loss: float, grad_norm: float, bad_values: float = 0
    ) -> None:
        super().__init__(f"step {queued.step}: the loss is {loss}, the gradient norm {grad_norm}")
        # The mean over processes that have copies of one tensor may be less than one.
        self.bad_values = math.ceil(bad_values)
        self.queued = queued
        self.event = event
        self.loss = loss
        self.grad_norm = grad_norm

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.queued.step

    @property
    def reason(self) -> str:
        """The reason why the step is bad, in words: its loss, its gradient norm, or values of its FP8 tensors."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not math.isfinite(self.grad_norm):
            return f"the gradient norm is {self.grad_norm}"
        # Such as infinities, of which a cast made the format's largest number.
        are = "is" if self.bad_values == 1 else "are"
        return f"{plural(self.bad_values, 'value')} of FP8 tensors {are} not finite, which the loss does not show"

    @property
    def bound(self) -> float | None:
        """The bound that a spike exceeded."""
        if self.event != SPIKE:
            return None
        bounds = self.queued.bounds
        return bounds.loss if self.loss > bounds.loss else bounds.grad_norm
