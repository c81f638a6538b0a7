"""The language-model head and its loss as one operation that never stores all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from te_models.config.chunk_sizes import head_rows
from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.device.cpu_matmul import add_product, matmul
from te_models.kernels.elementwise import scaled_logits

# loss_and_gradient's signature. It may write the gradient over the logits and return their memory.
LossKernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
Multiply = Callable[[list[Tensor], Tensor], None]  # tensors by a scalar on their device, in place


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute gradients in the forward, while a chunk's logits are in memory; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        kernel: LossKernel,
        multiply: Multiply | None,
    ) -> Tensor:
        """See linear_cross_entropy."""
        ctx.multiply = multiply
        wants = ctx.needs_input_grad[:2]
        # The gradient for a loss of 1; backward multiplies it by the gradient of the loss.
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wants[0] else None
        dw = None
        # Several chunks are summed in FP32; a single one is a plain product in the dtype of the weight.
        if wants[1] and chunk < len(x):
            dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        # On the device: reading the count would make the host wait.
        count = (targets != -100).sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in _starts(x, chunk):
            part = slice(start, start + chunk)
            # [chunk, V], the largest tensor here: it lives for one turn of the loop.
            logits = matmul(x[part], weight.t())
            loss, dlogits = kernel(logits, targets[part], count, any(wants))
            total += loss
            if dx is not None and dlogits is not None:
                matmul(dlogits, weight, out=dx[part])
            if dw is not None and dlogits is not None:
                add_product(dw, dlogits.t(), x[part])
            elif wants[1] and dlogits is not None:
                dw = matmul(dlogits.t(), x)
            del logits, dlogits  # before the next chunk's are made
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply both gradients by the loss's gradient, an FP32 scalar: the weight of the micro-batch in the step."""
        (grad,) = grads
        saved = ctx.saved_tensors
        slopes = [slope for slope in saved if slope is not None]
        # With retain_graph, another backward reads them again.
        if ctx.multiply is None or torch._C._autograd._get_current_graph_task_keep_graph():
            # A factor of one dimension takes part in type promotion: the product is FP32, rounded once. As a scalar it
            # would first be rounded to the dtype of the slopes (1/3 to 0.334 in BF16).
            factor = grad.float().reshape(1)
            slopes = [torch.mul(slope, factor, out=torch.empty_like(slope)) for slope in slopes]
        else:
            ctx.multiply(slopes, grad)
        scaled = iter(slopes)
        gradients = []
        for slope in saved:
            gradients.append(None if slope is None else next(scaled))
        return *gradients, None, None, None, None


def _starts(x: Tensor, chunk: int) -> Iterable[int]:
    """Return the first row of each chunk of x [T, D]."""
    starts = range(0, len(x), chunk)
    if not x.is_meta:
        return starts
    # A plan runs without data, and needs no more than the chunks that differ in memory: the first, a second one beside
    # its results, and the last, which may be shorter.
    return (*starts[:2], *starts[2:][-1:])


def loss_and_gradient(
    logits: Tensor, targets: Tensor, count: Tensor, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of the targets other than -100, over `count`, and its gradient for the logits.

    logits [T, V] in any dtype, targets int64 [T]; the loss is an FP32 scalar, the gradient [T, V] in the dtype of the
    logits.
    """
    counted = targets != -100
    logs = torch.log_softmax(logits.float(), dim=-1)  # [T, V]
    index = targets.clamp(min=0)[:, None]  # [T, 1]
    loss = -(logs.gather(1, index)[:, 0] * counted).sum() / count
    if not gradient:
        return loss, None
    # A comparison fuses, a scatter does not.
    hit = torch.arange(logits.shape[1], device=logits.device) == index
    return loss, ((logs.exp() - hit.float()) * (counted / count)[:, None]).to(logits.dtype)


def with_scaled_logits(kernel: LossKernel, divisor: float, cap: float | None) -> LossKernel:
    """Return `kernel` on scaled_logits(logits, divisor, cap), with the gradient for the logits themselves."""
    if divisor == 1 and cap is None:
        return kernel

    def scaled(
        logits: Tensor, targets: Tensor, count: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        final = scaled_logits(logits, divisor, cap)
        # Before the kernel, which may write its gradient over the logits.
        slope = None if cap is None or not gradient else 1 - (final.float() / cap).square_()
        loss, dlogits = kernel(final, targets, count, gradient)
        if dlogits is None:
            return loss, None
        change = dlogits.float() if slope is None else slope.mul_(dlogits)
        return loss, change.div_(divisor).to(logits.dtype)

    return scaled


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    kernel: LossKernel = loss_and_gradient,
    multiply: Multiply | None = None,
) -> Tensor:
    """Return the mean cross-entropy of the logits `x @ weight.T`, which exist for `chunk` rows at a time.

    x [T, D], weight [V, D], targets int64 [T], of which -100 does not count; an FP32 scalar, zero when no target
    counts. The logits are rounded to the dtype of x as a BF16 head rounds them, so the loss is cross_entropy's; the
    gradient of the weight is summed over the chunks in FP32. `chunk` None means te_models.config.chunk_sizes.head_rows;
    `kernel` is loss_and_gradient, its compiled twin, or the one of lm_head_triton.py, which needs no second buffer for
    the gradient; `multiply`, of that file, saves copies of both gradients in backward. (The idea of making the
    gradient chunk by chunk in the forward: Hsu et al. 2024, Liger Kernel, arXiv 2410.10989.)
    """
    trained = weight.requires_grad
    if not torch.is_grad_enabled():
        x = x.detach()  # else needs_input_grad is True even here: two products in vain
        weight = weight.detach()
    rows = chunk or head_rows(len(x), weight.shape[0], weight.shape[1], on_gpu(x), trained)
    return _LinearCrossEntropy.apply(x, weight, targets, rows, kernel, multiply)
