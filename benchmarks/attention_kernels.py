"""Time the attention kernels of this machine for every head dimension, mask and length, and write which is fastest.

    python -m benchmarks.attention_kernels --out benchmarks/results/attention_kernels_h200.json

Each time is the median of forward and backward of one layer in BF16, replayed as a CUDA graph, for about 12,288 tokens
and 2,560 channels of queries. Beside it stands the relative error of output and gradients from FP64, on fewer tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton.testing
from torch import Tensor

from te_models.inspect.environment import environment, require_gpu
from te_models.kernels.span_attention_triton import spans

DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
TOKENS = 12_288
CHANNELS = 2_560
Grads = tuple[Tensor, Tensor, Tensor, Tensor]  # output, and the gradients of q, k and v


@dataclass(frozen=True)
class Case:
    """One attention: `batch` rows of `seq` tokens, causal, perhaps within documents or a window."""

    dim: int
    heads: int
    shared: int  # heads of keys and values
    batch: int
    seq: int
    documents: bool = False
    window: int | None = None

    @property
    def mask(self) -> str:
        """The kind of mask in a word."""
        if self.documents:
            return "documents"
        return "causal" if self.window is None else "window"


def cases(dims: tuple[int, ...]) -> Iterator[Case]:
    """Every head dimension with its masks and lengths."""
    for dim in dims:
        heads = max(8, CHANNELS // dim // 8 * 8)
        for shared in (heads, heads // 4):
            common = dict(dim=dim, heads=heads, shared=shared)
            yield Case(**common, batch=2, seq=6144)
            if shared == heads:
                yield Case(**common, batch=24, seq=512)
                continue
            yield Case(**common, batch=3, seq=4001)
            yield Case(**common, batch=2, seq=6144, documents=True)
            yield Case(**common, batch=2, seq=6144, window=1024)


def boundaries(case: Case) -> Tensor:
    """Document ids int64 [B, S], of 50 to 1,500 tokens each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(case.batch):
        begins = torch.zeros(case.seq, dtype=torch.long)
        place = 0
        while True:
            place += int(torch.randint(50, 1500, (), generator=generator))
            if place >= case.seq:
                break
            begins[place] = 1
        rows.append(begins.cumsum(0))
    return torch.stack(rows).cuda()


def lengths(case: Case) -> Tensor:
    """Cumulative lengths int32 of the documents of all rows, or of the rows."""
    if not case.documents:
        return torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.seq
    ids = boundaries(case)
    place = torch.arange(case.seq, device="cuda")
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = (place + case.seq * torch.arange(case.batch, device="cuda")[:, None])[first]
    end = torch.tensor([case.batch * case.seq], device="cuda")
    return torch.cat((starts, end)).int()


# Each makes a function of q [B, N, S, H], k, v [B, K, S, H] and dy [B, N, S, H] for a case, or raises.


def pytorch_cudnn(case: Case) -> Callable[..., Grads]:
    """PyTorch's cuDNN attention."""
    if case.mask != "causal":
        raise ValueError("causal only")
    ops = torch.ops.aten

    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Grads:
        out, *kept = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        log_sum, cum_q, cum_k, max_q, max_k, seed, offset, _ = kept
        grads = ops._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, out, log_sum, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        )
        return out, *grads

    return run


def flash_2(case: Case) -> Callable[..., Grads]:
    """FlashAttention-2 as PyTorch ships it, which reads cumulative lengths and windows too."""
    ops = torch.ops.aten
    bounds = lengths(case)
    left = None if case.window is None else case.window - 1
    right = None if left is None else 0

    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Grads:
        q, k, v, dy = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v, dy))
        out, log_sum, seed, offset, _ = ops._flash_attention_forward(
            q, k, v, bounds, bounds, case.seq, case.seq, 0.0, True, False,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        grads = ops._flash_attention_backward(
            dy, q, k, v, out, log_sum, bounds, bounds, case.seq, case.seq, 0.0, True, seed, offset,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        found = [t.view(case.batch, case.seq, *t.shape[-2:]).transpose(1, 2) for t in (out, *grads)]
        return found[0], found[1], found[2], found[3]

    return run


def te_cudnn(case: Case) -> Callable[..., Grads]:
    """Transformer Engine's attention, cuDNN's kernels with documents and windows."""
    from transformer_engine.pytorch.cpp_extensions import fused_attn as te

    bounds = lengths(case)
    if case.documents:
        layout, form, mask = "thd_thd_thd", "thd", "padding_causal"
    else:
        layout, form, mask = "bshd_bshd_bshd", "bshd", "causal"
    window = (-1, 0) if case.window is None else (case.window - 1, 0)
    backend = te.FusedAttnBackend.F16_arbitrary_seqlen
    common: dict[str, Any] = dict(
        attn_scale=case.dim**-0.5,
        qkv_layout=layout,
        o_format=form,
        attn_mask_type=mask,
        window_size=window,
    )
    if case.documents:
        common |= dict(cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds)

    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Grads:
        # This layout of Transformer Engine is one of contiguous tensors: copies are a part of its time.
        q, k, v, dy = (t.transpose(1, 2).contiguous() for t in (q, k, v, dy))
        if case.documents:
            q, k, v, dy = (t.flatten(0, 1) for t in (q, k, v, dy))
        sizes = (case.seq, case.seq, bounds, bounds)
        out, aux = te.fused_attn_fwd(
            True, *sizes, q, k, v, q.dtype, backend, cuda_graph=True, **common
        )
        dq, dk, dv, *_ = te.fused_attn_bwd(
            *sizes, q, k, v, out, dy, q.dtype, aux, backend,
            do_format=form, dqkv_layout=layout, cuda_graph=True, **common,
        )  # fmt: skip
        found = [
            t.reshape(case.batch, case.seq, *t.shape[-2:]).transpose(1, 2)
            for t in (out, dq, dk, dv)
        ]
        return found[0], found[1], found[2], found[3]

    return run


def te_models_spans(case: Case) -> Callable[..., Grads]:
    """te_models.kernels.span_attention_triton."""
    visible = spans(
        case.seq, case.window, boundaries(case) if case.documents else None, torch.device("cuda")
    )

    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Grads:
        out, log_sum = visible.forward(q, k, v)
        dq, dk, dv, _ = visible.backward(dy, q, k, v, out, log_sum)
        return out, dq, dk, dv

    return run


def flash_4(case: Case) -> Callable[..., Grads]:
    """FlashAttention-4 (package flash-attn-4), in CuTe."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    bounds = lengths(case) if case.documents else None
    left = None if case.window is None else case.window - 1
    right = None if left is None else 0
    extent = {} if bounds is None else dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Grads:
        q, k, v, dy = (t.transpose(1, 2) for t in (q, k, v, dy))
        if bounds is not None:
            q, k, v, dy = (t.flatten(0, 1) for t in (q, k, v, dy))
        common = dict(
            softmax_scale=case.dim**-0.5, causal=left is None,
            window_size_left=left, window_size_right=right, **extent,
        )  # fmt: skip
        most = {} if bounds is None else dict(max_seqlen_q=case.seq, max_seqlen_k=case.seq)
        out, log_sum, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **common, **most)
        grads = _flash_attn_bwd(q, k, v, out, dy, log_sum, **common, **most)[:3]
        found = [t.view(case.batch, case.seq, *t.shape[-2:]).transpose(1, 2) for t in (out, *grads)]
        return found[0], found[1], found[2], found[3]

    return run


CANDIDATES = {
    "cudnn": pytorch_cudnn,
    "te": te_cudnn,
    "flash2": flash_2,
    "flash4": flash_4,
    "spans": te_models_spans,
}


def inputs(case: Case) -> list[Tensor]:
    """q, k, v as views of one projection, as in the model, and a gradient."""
    generator = torch.Generator("cuda").manual_seed(1)
    options = dict(dtype=torch.bfloat16, device="cuda", generator=generator)
    heads = case.heads + 2 * case.shared
    qkv = torch.randn(case.batch, case.seq, heads, case.dim, **options)
    q, k, v = qkv.transpose(1, 2).split([case.heads, case.shared, case.shared], dim=1)
    dy = torch.randn(case.batch, case.seq, case.heads, case.dim, **options).transpose(1, 2)
    return [q, k, v, dy]


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Grads:
    """The same in FP64."""
    place = torch.arange(case.seq, device="cuda")
    distance = place[:, None] - place
    seen = distance >= 0
    if case.window is not None:
        seen = seen & (distance < case.window)
    seen = seen[None, None]
    if case.documents:
        ids = boundaries(case)
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    group = case.heads // case.shared
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(case.dim)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = weights @ v.repeat_interleave(group, 1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dy.double())


def short(case: Case) -> Case:
    """A case small enough for FP64, with a length as odd as that of `case`."""
    heads = case.heads // case.shared * 2
    seq = 2048 - 95 if case.seq % 64 else 2048
    return Case(case.dim, heads, 2, 2, min(seq, case.seq), case.documents, case.window and 300)


def error(name: str, case: Case) -> float:
    """The largest relative error of the output and the three gradients."""
    case = short(case)
    tensors = inputs(case)
    got = CANDIDATES[name](case)(*tensors)
    right = reference(case, *tensors)
    pairs = zip(got, right, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def milliseconds(name: str, case: Case) -> float:
    """The median time of forward and backward."""
    run = CANDIDATES[name](case)
    tensors = inputs(case)
    run(*tensors)
    return triton.testing.do_bench_cudagraph(lambda: run(*tensors), rep=15, return_mode="median")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--dims", default=",".join(map(str, DIMS)), help="Head dimensions.")
@click.option("--only", default=",".join(CANDIDATES), help="Kernels to time.")
def main(out: Path, dims: str, only: str) -> None:
    """Measure, print and write."""
    require_gpu()
    document: dict[str, Any] = dict(environment=environment(), rows=[])
    for case in cases(tuple(map(int, dims.split(",")))):
        row = dict(asdict(case), mask=case.mask, ms={}, error={}, failed={})
        for name in only.split(","):
            try:
                row["error"][name] = round(error(name, case), 6)
                row["ms"][name] = round(milliseconds(name, case), 4)
            except Exception as problem:  # a kernel that does not support this case
                row["failed"][name] = f"{type(problem).__name__}: {problem}"[:160]
        document["rows"].append(row)
        out.write_text(json.dumps(document, indent=1) + "\n")
        shape = f"{case.dim:4} {case.mask:9} {case.batch} x {case.seq:5} {case.heads}/{case.shared}"
        cells = [f"{n} {t:.3f} ({row['error'][n]:.4f})" for n, t in row["ms"].items()]
        print(shape, *cells, *(f"{n}: {p[:60]}" for n, p in row["failed"].items()), sep=" | ")


if __name__ == "__main__":
    main()
