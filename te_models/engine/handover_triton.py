"""What comes before a te.Linear, written as the FP8 that it multiplies: codes, their transpose and the amax in one pass.

On Hopper a GEMM wants the contraction last in both operands, so forward reads the codes as they are and the weight's
gradient reads them transposed. Casting afterwards costs a BF16 round trip, and a transpose of its own costs another pass.
Each function takes a delayed scale (FP32 [1]) and raises `amax` (FP32 [1]) to that of its FP32 result; codes are uint8.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.engine.emulated.triton_kernels import _encode

ROWS, COLUMNS = 128, 64  # of a tile; the transposed store then writes 128 bytes in a row
NORM_ROWS, NORM_COLUMNS = 32, 256  # of which a program goes through all columns
# The interpreter's own conversion to FP8 loses the carry from the mantissa into the exponent.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Codes(NamedTuple):
    """codes [N, K], transposed [K, N], both uint8; scale_inv FP32 [1], what a code is worth."""

    codes: Tensor
    transposed: Tensor
    scale_inv: Tensor


@triton.jit
def store_codes(value, scale, i, j, rows, columns, codes, transposed, stride, amax, E5M2: tl.constexpr):
    """Quantize a tile of FP32 values at rows i and columns j of [rows, columns] into both copies."""
    j = j.to(tl.int64)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    value = tl.where(inside, value, 0.0)
    largest: tl.constexpr = 57344.0 if E5M2 else 448.0
    tl.atomic_max(amax, tl.max(tl.max(tl.abs(value), 1), 0))
    if INTERPRETED:
        code = _encode(value * scale, E5M2)
    else:
        scaled = tl.clamp(value * scale, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        code = (scaled.to(tl.float8e5) if E5M2 else scaled.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)
    tl.store(codes + i[:, None] * stride + j[None, :], code, mask=inside)
    tl.store(
        transposed + j[:, None] * rows + i[None, :], tl.trans(code), mask=(j < columns)[:, None] & (i < rows)[None, :]
    )


@triton.jit
def _place(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column numbers of this program's tile."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return i, j


@triton.jit
def note_inverse(scale, scale_inv):
    """Write what a code is worth, once."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))


@triton.jit
def _swiglu_kernel(
    gate_up, codes, transposed, scale, amax, scale_inv, rows, columns,
    E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i, j = _place(ROWS, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = gate_up + i[:, None] * (2 * columns) + j[None, :]
    gate, up = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + columns, inside, 0.0).to(tl.float32)
    s = tl.load(scale)
    store_codes(gate * tl.sigmoid(gate) * up, s, i, j, rows, columns, codes, transposed, columns, amax, E5M2)
    note_inverse(s, scale_inv)


@triton.jit
def _dswiglu_kernel(
    dy, gate_up, codes, transposed, scale, amax, scale_inv, rows, columns,
    E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i, j = _place(ROWS, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = gate_up + i[:, None] * (2 * columns) + j[None, :]
    gate, up = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + columns, inside, 0.0).to(tl.float32)
    slope = tl.load(dy + i[:, None] * columns + j[None, :], inside, 0.0).to(tl.float32)
    s, opening = tl.load(scale), tl.sigmoid(gate)
    dgate = slope * up * opening * (1 + gate * (1 - opening))
    store_codes(dgate, s, i, j, rows, columns, codes, transposed, 2 * columns, amax, E5M2)
    half = transposed + rows.to(tl.int64) * columns
    store_codes(slope * gate * opening, s, i, j, rows, columns, codes + columns, half, 2 * columns, amax, E5M2)
    note_inverse(s, scale_inv)


@triton.jit
def _norm_kernel(
    x, delta, total, weight, rstd, codes, transposed, scale, amax, scale_inv, rows, columns, eps,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        at = i[:, None] * columns + j[None, :]
        value = tl.load(x + at, inside, 0.0)
        if ADD:
            value = (value.to(tl.float32) + tl.load(delta + at, inside, 0.0).to(tl.float32)).to(x.dtype.element_ty)
            tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
        squares += tl.sum(value * value, 1)
    inverse = 1 / tl.sqrt_rn(squares / columns + eps)
    tl.store(rstd + i, inverse, mask=i < rows)
    s = tl.load(scale)
    tl.debug_barrier()  # what is read back below was written above
    for start in range(0, columns, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        at = i[:, None] * columns + j[None, :]
        value = tl.load((total if ADD else x) + at, inside, 0.0).to(tl.float32)
        gamma = tl.load(weight + j, j < columns, 0.0).to(tl.float32)
        gamma = 1 + gamma if ZERO_CENTERED else gamma
        y = value * inverse[:, None] * gamma[None, :]
        store_codes(y, s, i, j, rows, columns, codes, transposed, columns, amax, E5M2)
    note_inverse(s, scale_inv)


def new_codes(rows: int, columns: int, device: torch.device) -> Codes:
    """Codes [rows, columns] to be written to."""
    codes, transposed = (
        torch.empty(shape, dtype=torch.uint8, device=device) for shape in ((rows, columns), (columns, rows))
    )
    return Codes(codes, transposed, torch.empty(1, dtype=torch.float32, device=device))


def swiglu(gate_up: Tensor, scale: Tensor, amax: Tensor, e5m2: bool) -> Codes:
    """silu(gate) * up of contiguous gate_up [N, 2F]: codes [N, F]."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    out = new_codes(rows, columns, gate_up.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _swiglu_kernel[grid](
        gate_up, out.codes, out.transposed, scale, amax, out.scale_inv, rows, columns,
        E5M2=e5m2, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip
    return out


def dswiglu(dy: Tensor, gate_up: Tensor, scale: Tensor, amax: Tensor, e5m2: bool) -> Codes:
    """The gradient of contiguous gate_up [N, 2F] for dy [N, F] of `swiglu`'s output: codes [N, 2F]."""
    rows, columns = dy.shape
    out = new_codes(rows, 2 * columns, dy.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _dswiglu_kernel[grid](
        dy, gate_up, out.codes, out.transposed, scale, amax, out.scale_inv, rows, columns,
        E5M2=e5m2, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip
    return out


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, scale: Tensor, amax: Tensor,
    e5m2: bool,
) -> tuple[Codes, Tensor, Tensor]:  # fmt: skip
    """RMSNorm of x + delta (None: of x), contiguous [N, D]: codes [N, D], x + delta, and 1 / RMS, FP32 [N]."""
    rows, columns = x.shape
    out = new_codes(rows, columns, x.device)
    total = x if delta is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_kernel[(triton.cdiv(rows, NORM_ROWS), 1)](
        x, x if delta is None else delta, total, weight, rstd, out.codes, out.transposed, scale, amax, out.scale_inv,
        rows, columns, eps,
        ADD=delta is not None, ZERO_CENTERED=zero_centered, E5M2=e5m2, ROWS=NORM_ROWS, COLUMNS=NORM_COLUMNS, num_warps=8,
    )  # fmt: skip
    return out, total, rstd
