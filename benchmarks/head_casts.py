"""Time the kernels around attention that write FP8, with several tiles each, beside a copy of the bytes that they move.

    python -m benchmarks.head_casts --out benchmarks/results/head_casts_h200.json      # about 2 minutes

Shapes are of gated-1b and of the attention of Qwen3.5 and Gemma 3. Each time is the median of calls in a CUDA
graph, each of them on other tensors than the call before, so that nothing lies in the cache.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton.testing
from torch import Tensor

from te_models.config.attention import Heads
from te_models.inspect.environment import environment, require_gpu
from te_models.kernels import gate_fp8_triton, head_norm_backward_fp8_triton, rotate_fp8_triton
from te_models.kernels.attention_parts import Norm, Rotation, split_heads
from te_models.kernels.gated_attention_fp8_triton import FP8
from te_models.kernels.handover import CastScale

MODULES = (rotate_fp8_triton, gate_fp8_triton, head_norm_backward_fp8_triton)
TOKENS = (32, 64)
WARPS = (2, 4, 8)
COPIES = 4  # sets of tensors, of which each call takes the next


@dataclass(frozen=True)
class Shape:
    """`batch` rows of `seq` tokens, `heads` queries of `dim` channels of which the first `turned` turn."""

    name: str
    batch: int
    seq: int
    heads: int
    shared: int
    dim: int
    turned: int


SHAPES = (
    Shape("gated-1b", batch=8, seq=2048, heads=16, shared=4, dim=128, turned=128),
    Shape("Qwen3.5's attention", batch=2, seq=6144, heads=16, shared=4, dim=256, turned=64),
    Shape("Gemma 3's attention", batch=2, seq=6144, heads=8, shared=4, dim=256, turned=256),
)


class Tensors:
    """One set of tensors: queries and gate in a projection, attention and its gradient, and the FP8 output."""

    def __init__(self, shape: Shape) -> None:
        heads = Heads(shape.heads, shape.shared, shape.dim, "elementwise")
        rows = shape.batch * shape.seq
        width = sum(section.stored for section in heads.sections)
        factory: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
        projection = torch.randn(rows, width, **factory)
        self.q, _, _, self.logits = split_heads(heads, projection, shape.batch)
        # As cuDNN lays out attention, [B, S, heads, H].
        self.mixed = torch.randn(shape.batch, shape.seq, shape.heads, shape.dim, **factory)
        self.slope = torch.randn_like(self.mixed)
        angles = torch.rand(shape.seq, shape.turned, **factory)
        self.rotation = Rotation(angles.cos(), angles.sin())
        self.norm = Norm(torch.zeros(shape.dim, **factory), 1e-6, True)
        self.fp8 = FP8.new(rows, width, torch.device("cuda"))
        self.half = FP8.new(rows, heads.q_size, torch.device("cuda"))
        one = torch.ones(1, device="cuda")
        self.scale = CastScale(scale=one, amax=torch.zeros_like(one), e5m2=True)

    def rotate(self) -> None:
        """Undo RoPE."""
        FP8.rotate(self.fp8, self.scale, 0, self.slope, self.rotation, True)

    def norm_backward(self) -> None:
        """Differentiate QK-norm, and undo RoPE."""
        FP8.norm_backward(self.fp8, self.scale, 0, self.slope, self.q, self.norm, self.rotation)

    def gate(self) -> None:
        """Multiply attention by its gate."""
        FP8.gate(self.half, self.scale, 0, self.mixed, self.logits, False)

    def gate_backward(self) -> None:
        """Differentiate the gate."""
        FP8.gate_backward(self.fp8, self.scale, 0, self.slope, self.mixed, self.logits, False)


# Kernel -> bytes per element that it reads and writes.
BYTES = dict(rotate=2 + 2, norm_backward=4 + 2, gate=4 + 2, gate_backward=6 + 2 + 2)


def milliseconds(calls: list[Callable[[], object]]) -> float:
    """The median time of one of the calls."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return triton.testing.do_bench_cudagraph(all_of_them, return_mode="median") / len(calls)


def copy_speed(size: int) -> float:
    """The bytes per second that a copy reads and writes."""
    pairs = [torch.empty(2, size // 2, dtype=torch.uint8, device="cuda") for _ in range(COPIES)]
    calls: list[Callable[[], object]] = [lambda p=pair: p[0].copy_(p[1]) for pair in pairs]
    return size / milliseconds(calls) * 1e3


def written(tensors: Tensors, kernel: str) -> Tensor:
    """The bytes that a kernel writes."""
    out = tensors.half if kernel == "gate" else tensors.fp8
    assert out.data is not None
    out.data.zero_()
    out.transposed.zero_()
    getattr(tensors, kernel)()
    assert torch.equal(out.data.t(), out.transposed)
    return out.data.clone()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(out: Path) -> None:
    """Measure, print and write."""
    require_gpu()
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        sets = [Tensors(shape) for _ in range(COPIES)]
        elements = shape.batch * shape.seq * shape.heads * shape.dim
        for kernel, size in BYTES.items():
            own = {(module.TOKENS, module.WARPS) for module in MODULES}
            assert len(own) == 1
            reference = written(sets[0], kernel)
            limit = elements * size / copy_speed(elements * size)
            for tokens, warps in itertools.product(TOKENS, WARPS):
                for module in MODULES:
                    module.TOKENS = tokens
                    module.WARPS = warps
                equal = float((written(sets[0], kernel) == reference).float().mean())
                time = milliseconds([getattr(tensors, kernel) for tensors in sets])
                row = dict(
                    shape=asdict(shape), kernel=kernel, tokens=tokens, warps=warps, ms=time,
                    copy_ms=1e3 * limit, default=(tokens, warps) in own, equal=equal,
                )  # fmt: skip
                rows.append(row)
                told = f"{1e3 * time:7.1f} us, copy {1e6 * limit:7.1f}"
                print(
                    f"{shape.name:20} {kernel:14} {tokens:3} {warps} {told}, {equal:.6f}",
                    flush=True,
                )
            for module in MODULES:
                module.TOKENS, module.WARPS = next(iter(own))
        del sets
        torch.cuda.empty_cache()
    document = dict(environment=environment(), rows=rows)
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
