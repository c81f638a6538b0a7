"""loss_and_gradient in Triton: each logit is read from memory once, and its gradient written over it.

A program handles one row. It passes over the row twice: for the sum of the exponentials, and for the gradient in
reverse order, while the row is in the cache. Tested against the plain function through Triton's
interpreter on a CPU (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR = tl.constexpr(8)  # BF16 logits that a thread reads at once: 16 bytes
# The lowest finite FP32, from which minus infinity can be subtracted.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _cross_entropy_kernel(
    logits,
    targets,
    count,
    losses,
    vocabulary,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the loss of one token; if GRADIENT also overwrite its logits [vocabulary] by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    target = tl.load(targets + row)
    # A thread's logits are contiguous in one group, so it needs no other thread before the row's end.
    place = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if target == -100:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                zero = tl.zeros((BLOCK // VECTOR, VECTOR), logits.dtype.element_ty)
                tl.store(logits + start + place, zero, mask=start + place < vocabulary)
        return
    exists = (target >= 0) & (target < vocabulary)
    chosen = tl.load(logits + target, exists, float("nan")).to(tl.float32)
    largest = tl.full((BLOCK // VECTOR,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // VECTOR,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + place
        x = tl.load(logits + at, at < vocabulary, float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        larger = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)
        largest = larger
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - top), 0)
    # In this order: large logits cancel before they round.
    tl.store(losses + row, tl.log(total) - (chosen - top))
    if GRADIENT:
        scale = 1 / tl.load(count).to(tl.float32)
        inverse = 1 / total
        steps = tl.cdiv(vocabulary, BLOCK)
        for step in range(steps):
            at = (steps - 1 - step) * BLOCK + place
            x = tl.load(
                logits + at, at < vocabulary, float("-inf"), eviction_policy="evict_first"
            ).to(tl.float32)
            slope = (tl.exp(x - top) * inverse - (at == target).to(tl.float32)) * scale
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < vocabulary)


def _program(vocabulary: int) -> tuple[int, int]:
    """Return the warps of a program, and the logits of a step.

    The more warps a row has, the fewer rows are on a multiprocessor at a time: as many as its cache of 256 KiB holds in
    BF16, up to a vocabulary of 2**16. Beyond that a thread takes more at a time and registers leave room for one row,
    so that all of a GPU's rows stay in the L2 cache; where rows begin anywhere, loads of single logits fill the
    registers anyway. By calculation: no other choice has been timed.
    """
    warps = min(32, max(4, triton.next_power_of_2(vocabulary // 2048)))
    return warps, warps * 32 * (32 if vocabulary > 2**16 and vocabulary % 16 == 0 else 16)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, count: Tensor, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute lm_head.loss_and_gradient of contiguous logits [T, V]; the gradient is the logits' own memory.

    A row whose target is -100 is not read: its loss and gradient are zero whatever its logits. NaN in another row makes
    the loss NaN, and so does a target that is no column.
    """
    assert logits.is_contiguous()
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    warps, block = _program(vocabulary)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(rows,)](
            logits,
            targets.contiguous(),
            count,
            losses,
            vocabulary,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=warps,
        )
    return losses.sum() / count, logits if gradient else None


@triton.jit
def _multiply_kernel(x, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < size, 0.0).to(tl.float32) * by
        tl.store(x + at, value.to(x.dtype.element_ty), mask=at < size)


def multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply contiguous tensors by a scalar on their device, in place without autograd; by 1 at no cost."""
    for tensor in tensors:
        assert tensor.is_contiguous()
        with torch.cuda.device_of(tensor):
            grid = (triton.cdiv(tensor.numel(), 16384),)
            _multiply_kernel[grid](tensor, factor, tensor.numel(), BLOCK=16384, num_warps=16)
