"""Where an optimizer finds the gradients of a step, their norm, and clipping.

After one micro-batch they are in `parameter.grad`, in the dtype of the parameter. BF16 cannot sum many micro-batches:
it has 8 significant bits, so a sum stops growing once it is 256 times as large as each addend. `GradientSums`
therefore adds the gradients of each micro-batch to FP32 buffers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.kernels.dispatch import fused_operations

P = TypeVar("P", bound=Tensor)

BUCKET = 2**23  # elements reduced over the processes at a time

Norm = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]  # of (parameters, their gradients)


class Gradients:
    """The gradients of a step as backward leaves them, in `parameter.grad`."""

    in_fp32 = False

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's gradient; None if the step did not use the parameter."""
        return parameter.grad

    def drop(self, parameter: nn.Parameter) -> None:
        """Free the parameter's gradient."""
        parameter.grad = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the gradients of all micro-batches that run inside."""
        yield

    def last_micro_batch(self) -> None:
        """Announce that the next backward pass is the last of the step."""


class GradientSums(Gradients):
    """FP32 sums of the gradients of all micro-batches of a step, added over the processes of `group`.

    Costs 4 bytes per parameter; BF16 gradients exist for one parameter at a time. With a `group`, sums are reduced in
    buckets during the last backward pass, as in DistributedDataParallel.
    """

    in_fp32 = True

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.parameters = list(parameters)
        self._sums: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._buckets: list[Tensor] = []
        for number, bucket in enumerate(
            chunks(self.parameters[::-1], BUCKET)
        ):  # about the order of the backward pass
            flat = torch.zeros(sum(p.numel() for p in bucket), device=bucket[0].device)
            self._buckets.append(flat)
            for parameter, part in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                self._sums[id(parameter)] = part.view(parameter.shape)
                self._bucket_of[id(parameter)] = number
        self._used: set[int] = set()
        self._waiting: list[int] = []  # per bucket, parameters whose last gradient is still to come
        self._full = 0  # the first bucket that waits
        self._works: list[
            dist.Work
        ] = []  # the reductions under way, of the first len(_works) buckets

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's sum, FP32 of its shape; None if the step did not use the parameter."""
        return (
            self._sums[id(parameter)]
            if self.group is not None or id(parameter) in self._used
            else None
        )

    def drop(self, parameter: nn.Parameter) -> None:
        """Free nothing: the buffers are reused by the next step."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the gradients of all backward passes inside to the sums, which start at zero."""
        torch._foreach_zero_(self._buckets)
        self._used.clear()
        self._waiting = []
        self._works = []
        with ExitStack() as hooks:
            for parameter in self.parameters:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._add))
            yield
        self._reduce(len(self._buckets))
        for work in self._works:
            work.wait()

    def last_micro_batch(self) -> None:
        """Reduce each bucket over the processes as soon as the next backward pass has filled it."""
        self._waiting = [0] * len(self._buckets)
        self._full = 0
        for number in self._bucket_of.values():
            self._waiting[number] += 1

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Move the gradient that backward has just completed into its sum."""
        assert parameter.grad is not None
        self._sums[id(parameter)].add_(parameter.grad)
        parameter.grad = None
        self._used.add(id(parameter))
        if self._waiting:
            self._waiting[self._bucket_of[id(parameter)]] -= 1
            while self._full < len(self._waiting) and not self._waiting[self._full]:
                self._full += 1
            self._reduce(self._full)

    def _reduce(self, stop: int) -> None:
        """Start the reduction of the buckets before `stop`, in the same order on every process."""
        if self.group is not None:
            for flat in self._buckets[len(self._works) : stop]:
                self._works.append(dist.all_reduce(flat, group=self.group, async_op=True))


def chunks(parameters: Iterable[P], most: int) -> Iterator[list[P]]:
    """Yield the parameters in lists of at most `most` elements, or of one parameter."""
    chunk: list[P] = []
    size = 0
    for parameter in parameters:
        count = parameter.numel()
        if chunk and size + count > most:
            yield chunk
            chunk = []
            size = 0
        chunk.append(parameter)
        size += count
    if chunk:
        yield chunk


def gradient_norm(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, an FP32 scalar, summed in FP32 whatever their dtype."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
    )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return the factor, at most 1, that scales gradients of this norm to `max_norm`; None if `max_norm` is 0."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else None


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients on one device by an FP32 scalar, in place, and round each product once.

    torch._foreach_mul_ first rounds the factor to the dtype of the gradients: in BF16 by up to 0.4 %. There it also
    takes four times as long as the memory traffic, and it reads and writes all gradients even where the factor is 1.
    """
    factor = factor.to(gradients[0].device)
    multiply = fused_operations(factor.device).get("multiply")
    if multiply is not None:
        multiply([gradient for gradient in gradients if gradient.is_contiguous()], factor)
    for gradient in gradients:
        if multiply is None or not gradient.is_contiguous():
            torch.mul(gradient, factor.reshape(1), out=gradient)
