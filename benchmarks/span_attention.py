"""Time attention over documents and windows: the Triton kernel with several block sizes, and PyTorch's under a mask.

    python benchmarks/span_attention.py --out benchmarks/results/span_attention_h200.json

Every time is the median of forward, or forward and backward, of one layer of Llama-3.1-8B's heads in BF16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch
import triton.testing
from torch import Tensor

from te_models.inspect.environment import environment, require_gpu
from te_models.kernels import span_attention_triton
from te_models.kernels.sdpa import attention_mask, causal_attention
from te_models.kernels.span_attention_triton import spans

SHAPES = {
    64: (4, 16, 16, 2048),
    128: (2, 32, 8, 4096),
    256: (2, 8, 4, 4096),
}  # channels -> batch, heads, shared, tokens
MASKS = {"one document": (None, False), "documents": (None, True), "window of 1,024": (1024, False)}
BLOCKS = {
    "FORWARD": [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3),
                (128, 32, 4, 4), (64, 128, 4, 2)],
    "GRAD_QUERY": [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (128, 64, 4, 2), (64, 32, 4, 3), (128, 128, 8, 1)],
    "GRAD_KEY": [(64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (32, 128, 4, 2), (64, 128, 8, 1), (32, 64, 4, 3)],
}  # fmt: skip


def documents(batch: int, seq: int) -> Tensor:
    """int64 [B, S] of documents of 50 to 1,500 tokens."""
    torch.manual_seed(0)
    rows = []
    for _ in range(batch):
        ends, place = torch.zeros(seq, dtype=torch.long), 0
        while (place := place + int(torch.randint(50, 1500, ()))) < seq:
            ends[place] = 1
        rows.append(ends.cumsum(0))
    return torch.stack(rows).cuda()


def milliseconds(attention: Any, inputs: list[Tensor]) -> dict[str, float]:
    """Forward alone, and both."""
    dy = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(attention(*inputs), inputs, dy)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    bench = (
        triton.testing.do_bench_cudagraph
    )  # otherwise the host's launches take longer than short kernels
    return dict(
        forward=bench(forward, return_mode="median"), both=bench(both, return_mode="median")
    )


def tune(dim: int, attention: Any, inputs: list[Tensor]) -> dict[str, Any]:
    """The time of each block size, and the fastest of each kernel, which stays set."""
    found: dict[str, Any] = {}
    for kernel, blocks in BLOCKS.items():
        kept = getattr(span_attention_triton, kernel)
        times = {}
        for block in blocks:
            setattr(span_attention_triton, kernel, {dim: block})
            try:
                times[str(block)] = milliseconds(attention, inputs)[
                    "forward" if kernel == "FORWARD" else "both"
                ]
            except Exception as error:  # a block that needs more shared memory than there is
                times[str(block)] = type(error).__name__
        best = min((v, k) for k, v in times.items() if isinstance(v, float))[1]
        block = next(b for b in blocks if str(b) == best)
        setattr(span_attention_triton, kernel, kept | {dim: block})
        found[kernel] = dict(times=times, best=best)
        print(dim, kernel, times, flush=True)
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--tune", "tuning", is_flag=True, help="Try other block sizes first.")
def main(out: Path, tuning: bool) -> None:
    """Measure, print and write."""
    require_gpu()
    document: dict[str, Any] = dict(environment=environment(), shapes={}, rows=[])
    for dim, (batch, heads, shared, seq) in SHAPES.items():
        q = torch.randn(batch, seq, heads + 2 * shared, dim, dtype=torch.bfloat16, device="cuda")
        inputs = [
            t.transpose(1, 2).detach().requires_grad_() for t in q.split([heads, shared, shared], 2)
        ]
        inputs[0] = inputs[0].contiguous().detach().requires_grad_()
        document["shapes"][dim] = dict(batch=batch, heads=heads, shared=shared, seq=seq)
        if tuning:
            ids = documents(batch, seq)
            document["shapes"][dim]["blocks"] = tune(dim, spans(seq, None, ids, q.device), inputs)
        for name, (window, many) in MASKS.items():
            ids = documents(batch, seq) if many else None
            mask = attention_mask(seq, window, None, ids, q.device)
            row = dict(channels=dim, mask=name)
            row["spans"] = milliseconds(spans(seq, window, ids, q.device), inputs)
            row["masked"] = milliseconds(
                lambda q, k, v, m=mask: causal_attention(q, k, v, m), inputs
            )
            document["rows"].append(row)
            print(row, flush=True)
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
