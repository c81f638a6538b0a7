"""Muon with its momentum in INT8: 1.03 bytes per parameter instead of 4 in FP32.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by its nearest
orthogonal matrix, by five Newton-Schulz iterations. The momentum is stored as INT8 with one FP32 scale per block of 128
elements, scale = absmax / 127. An update is computed from the momentum before it is rounded, so rounding reaches the
weights only through later steps.

The arithmetic is torch.optim.Muon's. Matrices of one shape are orthogonalized together in batched GEMMs.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.optim.state_tensors import Group, State, like

BLOCK = 128
# Elements orthogonalized at a time: 128 MiB in BF16, and three times as much inside the iteration.
BATCH = 2**26
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, Jordan et al. 2024
SMALLEST = torch.finfo(torch.float32).tiny


class Muon8bit(torch.optim.Optimizer):
    """Muon with its momentum in INT8; arguments as in torch.optim.Muon.

    Args:
        params: FP32 matrices [A, B], or groups of them.
        adjust_lr_fn: "match_rms_adamw" scales an update to the usual RMS of AdamW, 0.2 sqrt(max(A, B)), so that
            learning rate and decay of AdamW can be reused (Liu et al. 2025, arXiv 2502.16982); "original" is
            sqrt(max(1, A / B)).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every matrix that has a gradient. A closure is not supported."""
        for group in self.param_groups:
            for batch in batches([p for p in group["params"] if p.grad is not None]):
                updates = orthogonalize(
                    torch.stack([self._momentum(p, group) for p in batch]), group["ns_steps"]
                )
                rows, columns = batch[0].shape
                rate = group["lr"] * rate_factor(group["adjust_lr_fn"], rows, columns)
                torch._foreach_mul_(batch, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(batch, list(updates.to(batch[0].dtype)), alpha=-rate)

    def expected_state(self, view: Tensor, group: Group) -> State:
        """Return the state of one matrix after a step, as a template for te_models.optim.state_tensors.check_values."""
        blocks = math.ceil(view.numel() / BLOCK)
        return dict(codes=like(view, blocks, BLOCK, dtype=torch.int8), scales=like(view, blocks, 1))

    def _momentum(self, p: Tensor, group: Group) -> Tensor:
        """Update the momentum of matrix `p` [A, B]; return the direction to orthogonalize, BF16 [A, B]."""
        state = self.state[p]
        if not state:
            state["codes"], state["scales"] = quantize(torch.zeros_like(p))
        assert p.grad is not None
        take = compiled_advance() if p.is_cuda else advance
        return take(state["codes"], state["scales"], p.grad, group["momentum"], group["nesterov"])


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize FP32 x to INT8 [blocks, 128], the last block padded with zeros, and scales FP32 [blocks, 1]."""
    blocks = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / scales.clamp(min=SMALLEST)).round_().to(torch.int8), scales


def dequantize(data: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the FP32 tensor of `shape`: the inverse of `quantize`, up to rounding."""
    return (data.float() * scales).flatten()[: shape.numel()].view(shape)


def advance(
    data: Tensor, scales: Tensor, gradient: Tensor, momentum: float, nesterov: bool
) -> Tensor:
    """Add FP32 `gradient` [A, B] to the quantized momentum in place; return the direction to orthogonalize, BF16."""
    average = dequantize(data, scales, gradient.shape).lerp(gradient, 1 - momentum)
    new_data, new_scales = quantize(average)
    data.copy_(new_data)
    scales.copy_(new_scales)
    return (gradient.lerp(average, momentum) if nesterov else average).bfloat16()


@functools.cache
def compiled_advance() -> Callable[..., Tensor]:
    """Return `advance` compiled, for CUDA devices."""
    return torch.compile(advance, fullgraph=True, dynamic=False)


@functools.cache
def product_dtype(device: str) -> torch.dtype:
    """Return BF16 as in torch.optim.Muon, but FP32 on a CPU without BF16 instructions, which is much faster there."""
    slow = device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if slow else torch.bfloat16


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Approximate the nearest orthogonal matrix of each x [n, A, B]: singular values of 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = x.to(product_dtype(x.device.type))
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    # No singular value may exceed 1, or the iteration diverges.
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if x.shape[-2] > x.shape[-1] else wide


def rate_factor(adjust: str, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix of this shape."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def batches(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of matrices of one shape, of at most BATCH elements."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        shapes.setdefault(matrix.shape, []).append(matrix)
    for shape, same in shapes.items():
        count = max(1, BATCH // shape.numel())
        yield from (same[i : i + count] for i in range(0, len(same), count))
