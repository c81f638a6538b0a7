"""flash-linear-attention on Hopper: one kernel of backward, and fixed configurations of others.

Triton 3.4.0 to 3.7.0 compile the package's own kernel to wrong code there, warp-group products of transposed tiles
(fla-org/flash-linear-attention, issues 640 and 984), and it refuses to run. This one computes `ROWS` tokens per
program, too few for warp-group instructions. `register` makes it the package's backend, so that every user of the
package in this process trains on such a machine, transformers' hybrids among them. The gated delta rule runs it, and
the state space of Mamba 2, without the part of dv.

A chunk has T tokens, and g [T] is the sum of its gates so far, times log2(e). With the state h [d_k, d_v] before the
chunk, the gradient dh of the one after it, the values v that were written and their gradients dv, and the gradients do
of the outputs:

    P_ij = s exp2(g_i - g_j) (do_i . v_j)  for j <= i
    dq = s exp2(g) (do h^T) + P k          dk = exp2(g_T - g) (v dh^T) + P^T q          dw = -dv h^T
    dg = sum(dq q - dk k),  and at token T also  exp2(g_T) sum(h dh) + sum(exp2(g_T - g) (v dh^T) k)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.autotuner import Autotuner

ROWS = 32  # below 64, from which on Triton takes warp-group instructions
# Channels at most; compiled so, no register is spilled.
BLOCK_K, BLOCK_V, WARPS, STAGES = (128, 64, 8, 2)


@triton.jit
def _tile(base, row, row_stride, column, rows, columns):
    """Load [rows, columns] of a row-major matrix, zero beyond its edges."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(base + row[:, None] * row_stride + column[None, :], inside, 0.0)


@triton.jit
def _store_tile(base, row, row_stride, column, rows, columns, value):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(
        base + row[:, None] * row_stride + column[None, :], value.to(base.dtype.element_ty), inside
    )


@triton.jit
def _gradients_kernel(
    # see above; all [B, S, heads, d], g FP32 [B, S, heads]
    q,
    k,
    v,
    g,
    h,
    do,
    dh,
    dv,
    # to write
    dq,
    dk,
    dw,
    dg,
    ends,
    # on queries
    scale,
    # sizes: S, chunks, B, heads of keys and of values
    seq,
    chunks,
    batch,
    key_heads,
    heads,
    # channels; tokens per chunk and per program; channels read at a time
    d_k: tl.constexpr,
    d_v: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    # whether there are dv and dw
    corrects: tl.constexpr,
):
    """Compute the gradients of `rows` tokens of a chunk of one key head, for `block_k` channels of queries and keys."""
    blocks: tl.constexpr = (d_k + block_k - 1) // block_k
    parts: tl.constexpr = size // rows
    piece = tl.program_id(0) % (blocks * parts)
    block = piece % blocks
    part = piece // blocks
    chunk = (tl.program_id(0) // (blocks * parts)).to(tl.int64)
    row = (tl.program_id(1) // key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % key_heads).to(tl.int64)
    first = row * seq + chunk * size
    count = tl.minimum(size, seq - chunk * size).to(tl.int32)
    of_keys = (first * key_heads + key_head) * d_k
    q += of_keys
    k += of_keys
    dq += of_keys
    dk += of_keys

    token = tl.arange(0, size)
    # Rows of the gradients that this program writes; it reads all tokens of the chunk.
    own_row = part * rows + tl.arange(0, rows)
    channel = block * block_k + tl.arange(0, block_k)
    # Summed over the value heads that share these keys.
    of_queries = tl.zeros([rows, block_k], tl.float32)
    of_own_keys = tl.zeros([rows, block_k], tl.float32)
    for head in range(key_head * (heads // key_heads), (key_head + 1) * (heads // key_heads)):
        of_values = first * heads + head
        of_state = (row * chunks + chunk) * heads + head
        scores = tl.zeros([rows, size], tl.float32)  # of own outputs and all values
        transposed = tl.zeros([rows, size], tl.float32)  # of own values and all outputs
        from_state = tl.zeros([rows, block_k], tl.float32)
        to_state = tl.zeros([rows, block_k], tl.float32)
        written = tl.zeros([rows, block_k], tl.float32)
        at_end = 0.0
        for start in range(0, d_v, block_v):
            value = start + tl.arange(0, block_v)
            at_v = v + of_values * d_v
            at_do = do + of_values * d_v
            own_v = _tile(at_v, own_row, heads * d_v, value, count, d_v)
            own_do = _tile(at_do, own_row, heads * d_v, value, count, d_v)
            scores += tl.dot(own_do, tl.trans(_tile(at_v, token, heads * d_v, value, count, d_v)))
            transposed += tl.dot(
                own_v, tl.trans(_tile(at_do, token, heads * d_v, value, count, d_v))
            )
            state = _tile(h + of_state * d_k * d_v, channel, d_v, value, d_k, d_v)
            slope = _tile(dh + of_state * d_k * d_v, channel, d_v, value, d_k, d_v)
            from_state += tl.dot(own_do, tl.trans(state.to(own_do.dtype)))
            to_state += tl.dot(own_v, tl.trans(slope.to(own_v.dtype)))
            if corrects:
                own_dv = _tile(dv + of_values * d_v, own_row, heads * d_v, value, count, d_v)
                written += tl.dot(own_dv, tl.trans(state.to(own_dv.dtype)))
            # Once per chunk: the sum over state and gradient is the same for every part.
            if part == 0:
                at_end += tl.sum(state.to(tl.float32) * slope.to(tl.float32))
        if corrects:
            _store_tile(dw + of_values * d_k, own_row, heads * d_k, channel, count, d_k, -written)

        gate = tl.load(g + of_values + token * heads, token < count, 0.0)
        own_gate = tl.load(g + of_values + own_row * heads, own_row < count, 0.0)
        last = tl.load(g + of_values + (count - 1) * heads)
        # Only differences of tokens that see each other: others may be beyond FP32's exponents, and infinity * 0 is
        # NaN.
        inside = (token < count)[None, :] & (own_row < count)[:, None]
        between = own_gate[:, None] - gate[None, :]
        seen = inside & (token[None, :] <= own_row[:, None])
        scores *= tl.exp2(tl.where(seen, between, float("-inf"))) * scale
        seen = inside & (token[None, :] >= own_row[:, None])
        transposed *= tl.exp2(tl.where(seen, -between, float("-inf"))) * scale

        keys = _tile(k, token, key_heads * d_k, channel, count, d_k)
        gradient = from_state * (tl.exp2(own_gate) * scale)[:, None]
        gradient += tl.dot(scores.to(keys.dtype), keys)
        of_queries += gradient
        of_gate = tl.sum(gradient * _tile(q, own_row, key_heads * d_k, channel, count, d_k), 1)

        own_keys = _tile(k, own_row, key_heads * d_k, channel, count, d_k)
        queries = _tile(q, token, key_heads * d_k, channel, count, d_k)
        to_state *= tl.where(own_row < count, tl.exp2(last - own_gate), 0.0)[:, None]
        gradient = to_state + tl.dot(transposed.to(queries.dtype), queries)
        of_own_keys += gradient
        of_gate -= tl.sum(gradient * own_keys, 1)
        tl.store(
            dg + block * batch * seq * heads + of_values + own_row * heads, of_gate, own_row < count
        )
        at_end = at_end * tl.exp2(last) + tl.sum(to_state * own_keys)
        tl.store(ends + piece * batch * chunks * heads + of_state, at_end)
    _store_tile(dq, own_row, key_heads * d_k, channel, count, d_k, of_queries)
    _store_tile(dk, own_row, key_heads * d_k, channel, count, d_k, of_own_keys)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    g: Tensor,
    scale: float,
    w: Tensor | None = None,
    dv: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return dq, dk [B, S, key heads, d_k], dw [B, S, heads, d_k] and dg FP32 [B, S, heads] of every chunk.

    Attention that decays without correcting what it has written, such as Mamba 2's, has neither w nor dv, nor dw.

    Args:
        q, k: normed, [B, S, key heads, d_k].
        v, do: [B, S, heads, d_v]: the values as written, and the gradients of outputs.
        h, dh: [B, chunks, heads, d_k, d_v], the state before each chunk, and the gradient of the one after it.
        g: FP32 [B, S, heads], summed within each chunk, times log2(e).
        scale: of the scores.
        w: [B, S, heads, d_k], which gives dw its dtype.
        dv: [B, S, heads, d_v], the gradient of written values.
        chunk_size: tokens per chunk, a power of two.
    """
    batch, seq, key_heads, d_k = k.shape
    heads, d_v = v.shape[2:]
    # States in FP32, as attention without corrections has them, fill shared memory twice as fast.
    most = ((d_k, BLOCK_K), (d_v, BLOCK_V * 2 // h.element_size()))
    block_k, block_v = (max(16, min(block, triton.next_power_of_2(width))) for width, block in most)
    rows = min(ROWS, chunk_size)
    chunks = triton.cdiv(seq, chunk_size)
    blocks = triton.cdiv(d_k, block_k)
    parts = chunk_size // rows
    dq, dk = (x.new_empty(batch, seq, key_heads, d_k) for x in (q, k))
    dw = None if w is None else torch.empty_like(w)
    # Programs of several blocks of channels contribute to a gate: each writes its own part, which are summed below.
    dg = g.new_empty(blocks, *g.shape)
    # The further gradient of the gates of a chunk's last token.
    ends = g.new_empty(blocks * parts, batch, chunks, heads)
    _gradients_kernel[(chunks * blocks * parts, batch * key_heads)](
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=g.contiguous(),
        h=h.contiguous(),
        do=do.contiguous(),
        dh=dh.contiguous(),
        dv=do if dv is None else dv.contiguous(),
        dq=dq,
        dk=dk,
        dw=dq if dw is None else dw,
        dg=dg,
        ends=ends,
        scale=scale,
        seq=seq,
        chunks=chunks,
        batch=batch,
        key_heads=key_heads,
        heads=heads,
        d_k=d_k,
        d_v=d_v,
        size=chunk_size,
        rows=rows,
        block_k=block_k,
        block_v=block_v,
        corrects=w is not None,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    last = torch.arange(1, chunks + 1, device=g.device).mul_(chunk_size).clamp_(max=seq) - 1
    return dq, dk, dw, dg.sum(0).index_add_(1, last, ends.sum(0))


def register() -> None:
    """Have flash-linear-attention use `gradients` where its own kernel refuses to run."""
    from fla.backends import BaseBackend  # noqa: PLC0415  an optional package
    from fla.backends import register as register_backend  # noqa: PLC0415
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1  # noqa: PLC0415

    class Backend(BaseBackend):
        """The package asks each backend for a function by its name, and a verifier whether it takes the arguments."""

        backend_type = "te_models"

        @classmethod
        def is_available(cls) -> bool:
            return IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1

        def chunk_bwd_dqkwg_verifier(self, **arguments: Any) -> tuple[bool, str | None]:
            needed = all(arguments.get(name) is not None for name in ("g", "scale"))
            corrects = [arguments.get(name) is not None for name in ("w", "dv")]
            other = any(arguments.get(name) is not None for name in ("g_gamma", "cu_seqlens"))
            taken = needed and corrects[0] == corrects[1] and not other
            return (
                taken and not arguments.get("state_v_first"),
                "it computes gates per head, of rows of one length",
            )

        def chunk_bwd_dqkwg(
            self,
            g_gamma: None = None,
            cu_seqlens: None = None,
            chunk_indices: None = None,
            state_v_first: bool = False,
            **arguments: Any,
        ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
            return gradients(**arguments)

    register_backend("common")(Backend)
    if IS_NVIDIA_HOPPER:
        fix_configurations()


# The package compiles and times some eighty configurations for every number of heads, two hundred of Kimi Delta
# Attention, which takes minutes of a first step. These were the fastest for heads of 128 channels: 16 and 32 of them on
# an H100 (benchmarks/delta_rule_tuning.py); of Kimi Delta Attention 32 on an H200 (benchmarks/kinds_speed.py --mixers).
FASTEST = {
    "modules.norm.l2norm.l2norm_fwd_kernel": triton.Config({"BT": 16}, num_warps=4),
    "modules.norm.l2norm.l2norm_bwd_kernel": triton.Config({"BT": 16}, num_warps=8),
    "ops.utils.cumsum.chunk_local_cumsum_scalar_kernel": triton.Config({}, num_warps=1),
    "ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel": triton.Config(
        {"BK": 64}, num_warps=1
    ),
    "ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64": triton.Config(
        {"BV": 64}, num_warps=4, num_stages=3
    ),
    "ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": triton.Config(
        {"BV": 32}, num_warps=4, num_stages=2
    ),
    "ops.common.chunk_o.chunk_fwd_kernel_o": triton.Config(
        {"BK": 64, "BV": 64}, num_warps=4, num_stages=3
    ),
    "ops.common.chunk_o.chunk_bwd_kernel_dv_local": triton.Config({}, num_warps=2, num_stages=3),
    "ops.gated_delta_rule.wy_fast.recompute_w_u_fwd_kernel": triton.Config(
        {}, num_warps=4, num_stages=3
    ),
    "ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd_kernel": triton.Config(
        {}, num_warps=4, num_stages=3
    ),
    "ops.utils.cumsum.chunk_local_cumsum_vector_kernel": triton.Config({"BS": 32}, num_warps=2),
    "ops.gla.chunk.chunk_gla_fwd_kernel_o": triton.Config(
        {"BK": 64, "BV": 128}, num_warps=4, num_stages=3
    ),
    "ops.kda.chunk_intra_token_parallel.chunk_kda_fwd_kernel_intra_token_parallel": triton.Config(
        {"BH": 2}, num_warps=1
    ),
    "ops.kda.chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused": triton.Config(
        {"BK": 32}, num_warps=1
    ),
    "ops.kda.chunk_intra.chunk_kda_bwd_kernel_intra": triton.Config({}, num_warps=2, num_stages=2),
    "ops.kda.wy_fast.recompute_w_u_fwd_kda_kernel": triton.Config({}, num_warps=4, num_stages=3),
    "ops.kda.chunk_bwd.chunk_kda_bwd_kernel_dAv": triton.Config({}, num_warps=4, num_stages=4),
    "ops.kda.chunk_bwd.chunk_kda_bwd_kernel_wy_dqkg_fused": triton.Config(
        {"BK": 64, "BV": 64}, num_warps=4, num_stages=2
    ),
}
WIDEST = 128  # channels per head that FASTEST is for: wider ones may not fit into shared memory


def autotuned() -> Iterator[tuple[str, Autotuner]]:
    """Yield the autotuned kernels of flash-linear-attention that have been imported, under their names inside it."""
    for name in [name for name in sys.modules if name.startswith("fla.")]:
        for kernel in vars(sys.modules[name]).values():
            while hasattr(kernel, "fn") and not isinstance(kernel, Autotuner):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner) and kernel.base_fn.__module__ == name:
                yield f"{name.removeprefix('fla.')}.{kernel.base_fn.__name__}", kernel


def fix_configurations() -> None:
    """Have the kernels of the package that are imported run as FASTEST says, without timing other configurations."""
    for name, kernel in autotuned():
        if name in FASTEST:
            kernel.early_config_prune = functools.partial(_fixed, FASTEST[name])


def _fixed(
    fastest: triton.Config, configs: list[triton.Config], named: dict[str, Any], **arguments: Any
) -> list[Any]:
    """Return the configurations to time for a call with these arguments.

    Where the package does not offer the fastest one, on a GPU with less shared memory, or for wide heads, it chooses.
    """
    widths = [size for name, size in (named | arguments).items() if name in ("D", "K", "V")]
    offered = str(fastest) in map(str, configs)
    return [fastest] if offered and max(widths, default=0) <= WIDEST else configs
