"""The gradients of a step as an optimizer finds them, their norm, and clipping.

After one micro-batch they are in `parameter.grad`, in the dtype of the parameter. BF16 cannot sum many micro-batches:
it has 8 significant bits, so a sum stops growing once it is 256 times as large as each addend. `GradientSums`
therefore adds the gradients of each micro-batch to FP32 buffers.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.device.choice import runs_triton
from te_models.device.cuda_capture import without_ownership
from te_models.kernels.dispatch import fused_operations
from te_models.optim.groups import ParameterRows

P = TypeVar("P", bound=Tensor)

BUCKET = 2**23  # elements reduced over the processes at a time

Norm = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]  # of (parameters, their gradients)


class Gradients:
    """The gradients of a step as backward leaves them, in `parameter.grad`."""

    in_fp32 = False

    @property
    def changes_projectors(self) -> bool:
        """True if the next step computes new projectors, and so has to run without its CUDA graph."""
        return False

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's gradient; None if the step did not use the parameter."""
        return parameter.grad

    def hand_over(self, part: ParameterRows, view: Tensor, gradient: Tensor) -> None:
        """Give an optimizer the gradient of `view`: these rows of what `of` returned, converted for the master."""
        view.grad = part.of(gradient)

    def drop(self, parameter: nn.Parameter) -> None:
        """Free the parameter's gradient."""
        parameter.grad = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the gradients of all micro-batches that run inside."""
        yield

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Surround forward and backward of a micro-batch, inside `collecting`.

        All work on the device for it is queued inside, so that the body can be captured in a CUDA graph.

        Args:
            first: whether it is the first of the step.
            last: whether it is the last of the step.
        """
        yield

    def state_loaded(self) -> None:
        """Take note that state was loaded into the optimizer."""

    def last_micro_batch(self) -> None:
        """Announce that the next backward pass is the last of the step."""

    def snapshot(self, parameters: Sequence[nn.Parameter]) -> object:
        """Return which gradients the step has left, for `restore`."""
        return [parameter.grad for parameter in parameters]

    def without_ownership(self, snapshot: Any) -> object:
        """Return what `snapshot` returned for a captured step, without keeping the memory that its graph writes to."""
        return [None if gradient is None else without_ownership(gradient) for gradient in snapshot]

    def restore(self, parameters: Sequence[nn.Parameter], snapshot: Any) -> None:
        """Give `parameters` the gradients that a replayed step has written again where they were."""
        for parameter, gradient in zip(parameters, snapshot, strict=True):
            parameter.grad = gradient


class GradientSums(Gradients):
    """Sums of the gradients of all micro-batches of a step, added over the processes of `group`.

    Gradients exist for one parameter at a time beside the sums. With a `group`, sums are reduced in buckets during the
    last backward pass, as in PyTorch's DistributedDataParallel, whose reductions no CUDA graph can contain.

    Args:
        parameters: those with gradients.
        group: the processes; None: one.
        in_fp32: whether sums are FP32, for 4 bytes per parameter; else they have the dtypes of the parameters, for
            steps of one micro-batch.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        in_fp32: bool = True,
    ) -> None:
        self.group = group
        self.in_fp32 = in_fp32
        self.parameters = list(parameters)
        self._sums: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._buckets: list[Tensor] = []
        for number, bucket in enumerate(self._divided()):
            # One buffer per bucket, of which the sums are views: one reduction sends all of them.
            flat = torch.zeros(
                sum(p.numel() for p in bucket),
                device=bucket[0].device,
                dtype=torch.float32 if in_fp32 else bucket[0].dtype,
            )
            self._buckets.append(flat)
            for parameter, part in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                self._sums[id(parameter)] = part.view(parameter.shape)
                self._bucket_of[id(parameter)] = number
        self._used: set[int] = set()  # the parameters with a gradient in this step
        # Parameters whose sums belong to this step: the sums of others are to be replaced.
        self._begun: set[int] = set()
        self._waiting: list[int] = []  # per bucket, parameters whose last gradient is still to come
        self._full = 0  # the first bucket that waits
        # The reductions under way, of the first len(_works) buckets.
        self._works: list[dist.Work] = []
        self._complete = False  # whether the sums are over all micro-batches and processes

    def _divided(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of each bucket, about in the order of the backward pass."""
        # Backward reaches the last parameters first, so the first buckets fill first.
        for bucket in chunks(self.parameters[::-1], BUCKET):
            if self.in_fp32:
                yield bucket
            else:
                for dtype in dict.fromkeys(p.dtype for p in bucket):
                    yield [p for p in bucket if p.dtype == dtype]

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's sum, of its shape; None if the step did not use the parameter."""
        if self.group is not None or id(parameter) in self._used:
            return self._sums[id(parameter)]
        return None

    def drop(self, parameter: nn.Parameter) -> None:
        """Free nothing: the buffers are reused by the next step."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the gradients of all backward passes inside; the first of a parameter replaces its last sum."""
        self._begin()
        with ExitStack() as hooks:
            for parameter in self.parameters:
                # A hook per parameter, so that a gradient in the parameter's dtype lives only until it is added.
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._add))
            yield
        self._end()

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Surround forward and backward of a micro-batch; see `Gradients.micro_batch`.

        The first leaves no sum of the step before, so that the further ones add to all of them, whichever parameters
        they use. The last waits for the reductions.
        """
        if first:
            self._begin()
        if last:
            self.last_micro_batch()
        yield
        if first:
            self._clear_unused()
        if last:
            self._end()

    def last_micro_batch(self) -> None:
        """Reduce each bucket over the processes as soon as the next backward pass has filled it."""
        self._waiting = [0] * len(self._buckets)
        self._full = 0
        self._works = []
        self._complete = False
        for number in self._bucket_of.values():
            self._waiting[number] += 1

    def snapshot(self, parameters: Sequence[nn.Parameter]) -> object:
        """Return which parameters the step used, for `restore`."""
        return frozenset(self._used)

    def without_ownership(self, snapshot: Any) -> object:
        """Return `snapshot`, since no graph makes the sums."""
        return snapshot

    def restore(self, parameters: Sequence[nn.Parameter], snapshot: Any) -> None:
        """Note that a replayed step has written the sums of these parameters."""
        self._used = set(snapshot)

    def _begin(self) -> None:
        self._used.clear()
        self._begun.clear()
        self._waiting = []
        self._works = []
        self._complete = False

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Move the gradient that backward has just completed into its sum."""
        assert parameter.grad is not None
        key = id(parameter)
        if key in self._begun:
            self._sums[key].add_(parameter.grad)
        else:
            # The first gradient of a step overwrites: zeroing all sums beforehand would write them once more.
            self._sums[key].copy_(parameter.grad)
        parameter.grad = None
        self._used.add(key)
        self._begun.add(key)
        if self._waiting:
            self._waiting[self._bucket_of[key]] -= 1
            # In order: processes may fill buckets in different orders, but must reduce them in the same one.
            while self._full < len(self._waiting) and not self._waiting[self._full]:
                self._full += 1
            self._reduce(self._full)

    def _clear_unused(self) -> None:
        """Set the sums that have got no gradient so far to zero."""
        unused = [total for key, total in self._sums.items() if key not in self._begun]
        if unused:
            # They still hold what the step before left, which the reduction of their buckets would add.
            torch._foreach_zero_(unused)
        self._begun.update(self._sums)

    def _end(self) -> None:
        """Sum over all processes, if that has not been done yet."""
        if self.group is None or self._complete:
            return
        self._clear_unused()
        self._reduce(len(self._buckets))
        for work in self._works:
            work.wait()
        self._complete = True

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
        # A parameter larger than `most` is a chunk by itself.
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
    return torch.linalg.vector_norm(tensor_norms(gradients))


def tensor_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each of at least one gradient, FP32 [gradients], summed in FP32 whatever their dtype.

    Sums have another order in the kernels of a GPU than in PyTorch, so norms may differ in their last bits.
    """
    if runs_triton(gradients[0].device):
        return importlib.import_module("te_models.optim.norms_triton").tensor_norms(gradients)
    # PyTorch's reads BF16 at 1.95 TB/s on an H200, where a copy reaches 4.1.
    return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return the factor, at most 1, that scales gradients of this norm to `max_norm`; None if `max_norm` is 0."""
    # As torch.nn.utils.clip_grad_norm_; on the device, so that the host need not wait for the norm.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else None


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients on one device by an FP32 scalar, in place, and round each product once.

    torch._foreach_mul_ first rounds the factor to the dtype of the gradients: in BF16 by up to 0.4 %. There it also
    takes four times as long as the memory traffic, and it reads and writes all gradients even where the factor is 1.
    """
    factor = factor.to(gradients[0].device)
    multiply = fused_operations(factor.device).get("multiply")
    if multiply is not None:
        # One kernel for many tensors; those with gaps are multiplied one by one below.
        multiply([gradient for gradient in gradients if gradient.is_contiguous()], factor)
    for gradient in gradients:
        if multiply is None or not gradient.is_contiguous():
            torch.mul(gradient, factor.reshape(1), out=gradient)
