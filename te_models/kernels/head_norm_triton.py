"""RMSNorm of each head and the SiLU gate behind it in one pass, which may write FP8 for the next te.Linear.

    y = round(x / rms(x) * weight) * silu(z),   rms over the channels of a head

The norm is rounded to the dtype of x, as te.RMSNorm returns it. Backward reads x and z and computes the rest again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.count_four_triton import (
    add_care,
    add_saturated,
    add_state,
    amaxes,
    count_rows,
    count_rows_with_care,
    marked,
    needs_care,
    new_care,
    new_state,
    programs_of,
    saturated_of,
    small_tiles,
    table_of,
)
from te_models.kernels.fp8_tiles_triton import (
    FP8Data,
    largest_of,
    note_inverse,
    raise_amax,
    sigmoid,
    store_fp8,
)
from te_models.kernels.handover import CastScale

TOKENS = 32  # of a program, for one head
WARPS = 4


@triton.jit
def _load(x, stride, token, channel, rows, dim):
    """Return x [tokens, channels] of one head in FP32, zero outside."""
    inside = (token < rows)[:, None] & (channel < dim)[None, :]
    at = x + token.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(at, inside, 0.0).to(tl.float32)


@triton.jit
def _gated(x, z, weight, stride, z_stride, token, channel, rows, dim, eps):
    """Return the gated norm of one head at these tokens, FP32."""
    value = _load(x, stride, token, channel, rows, dim)
    inverse = 1 / tl.sqrt_rn(tl.sum(value * value, 1) / dim + eps)
    gamma = tl.load(weight + channel, channel < dim, 0.0).to(tl.float32)
    normed = (value * inverse[:, None] * gamma[None, :]).to(x.dtype.element_ty).to(tl.float32)
    gate = _load(z, z_stride, token, channel, rows, dim)
    return normed * (gate * sigmoid(gate))


@triton.jit
def _head_norm_kernel(
    # x [T, heads * dim] and z of that shape, with the strides of their rows; weight [dim]; the output, contiguous
    x,
    z,
    weight,
    y,
    stride,
    z_stride,
    rows,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the gated norm of one head at some tokens."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    first = head * dim
    value = _gated(x + first, z + first, weight, stride, z_stride, token, channel, rows, dim, eps)
    inside = (token < rows)[:, None] & (channel < dim)[None, :]
    place = token.to(tl.int64)[:, None] * (heads * dim) + first + channel[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), inside)


@triton.jit
def _gated_four(
    x,
    z,
    weight,
    stride,
    z_stride,
    number,
    rows,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return `_gated` of the first to fourth rows of groups of four of the tile of this number."""
    begin = number % heads * dim
    i = 4 * (number // heads * (TOKENS // 4) + tl.arange(0, TOKENS // 4))
    channel = tl.arange(0, WIDTH)
    x += begin
    z += begin
    a = _gated(x, z, weight, stride, z_stride, i, channel, rows, dim, eps)
    b = _gated(x, z, weight, stride, z_stride, i + 1, channel, rows, dim, eps)
    c = _gated(x, z, weight, stride, z_stride, i + 2, channel, rows, dim, eps)
    d = _gated(x, z, weight, stride, z_stride, i + 3, channel, rows, dim, eps)
    return a, b, c, d


@triton.jit
def _head_norm_fp8_kernel(
    # as above
    x,
    z,
    weight,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    stride,
    z_stride,
    rows,
    eps,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    heads: tl.constexpr,
    dim: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,  # of counts: whether heads are whole blocks of the hash
):
    """Write the gated norm of one head at some tokens as FP8; with `counts` of more of them, and count the cast."""
    channel = tl.arange(0, WIDTH)
    columns = heads * dim
    if counts is None:
        number = tl.program_id(0)
        a, b, c, d = _gated_four(
            x, z, weight, stride, z_stride, number, rows, eps, heads, dim, WIDTH, TOKENS
        )
        s = tl.load(scale)
        begin = number % heads * dim
        group = number // heads * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
        j = begin + channel
        largest = store_fp8(
            a, b, c, d, s, group, j, rows, begin + dim, data, transposed, columns, E5M2
        )
        raise_amax(amax, largest)
    else:
        s = tl.load(scale)
        tiles = tl.cdiv(rows, TOKENS) * heads
        state = new_state(TOKENS // 4, WIDTH)
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            values = _gated_four(
                x, z, weight, stride, z_stride, number, rows, eps, heads, dim, WIDTH, TOKENS
            )
            a, b, c, d = values
            begin = number % heads * dim
            top = number // heads * TOKENS
            group = top // 4 + tl.arange(0, TOKENS // 4)
            j = begin + channel
            store_fp8(a, b, c, d, s, group, j, rows, begin + dim, data, transposed, columns, E5M2)
            state = count_rows(state, values, s, top, 0, rows, dim, begin, E5M2, ALIGNED)
        raise_amax(amax, amaxes(state))
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        elements = tl.full((), 1.0, tl.float64) * rows * columns
        care_needed = needs_care(state, inverse)
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2)
        if care_needed > 0:
            care = new_care()
            largest = tl.zeros((TOKENS // 4, WIDTH), tl.float32)
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                values = _gated_four(
                    x, z, weight, stride, z_stride, number, rows, eps, heads, dim, WIDTH, TOKENS
                )
                # Above, a NaN hides the values beside it.
                largest = tl.maximum(largest, largest_of(values))
                top = number // heads * TOKENS
                care = count_rows_with_care(care, values, s, top, 0, rows, dim, E5M2)
            raise_amax(amax, largest)
            add_care(counts, codes, spread, care)
        elif marked(state) != 0:
            saturated = tl.zeros((), tl.int64)
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                values = _gated_four(
                    x, z, weight, stride, z_stride, number, rows, eps, heads, dim, WIDTH, TOKENS
                )
                saturated += saturated_of(values, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)


@triton.jit
def _head_norm_backward_kernel(
    # as above, and the gradient of the output
    x,
    z,
    weight,
    dy,
    # to write: the gradients of x, contiguous, and z, and this program's part of the weight's, FP32 [programs, dim]
    dx,
    dz,
    dweight,
    stride,
    z_stride,
    dy_stride,
    dz_stride,
    rows,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the gradients of x and z for one head at some tokens, and a partial sum of the weight's."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    first = head * dim
    value = _load(x + first, stride, token, channel, rows, dim)
    inverse = 1 / tl.sqrt_rn(tl.sum(value * value, 1) / dim + eps)
    unit = value * inverse[:, None]
    gamma = tl.load(weight + channel, channel < dim, 0.0).to(tl.float32)[None, :]
    normed = (unit * gamma).to(x.dtype.element_ty).to(tl.float32)
    gate = _load(z + first, z_stride, token, channel, rows, dim)
    slope = _load(dy + first, dy_stride, token, channel, rows, dim)
    sigma = sigmoid(gate)
    inside = (token < rows)[:, None] & (channel < dim)[None, :]
    at = token.to(tl.int64)[:, None]
    of_gate = slope * normed * (sigma * (1 + gate * (1 - sigma)))
    tl.store(
        dz + at * dz_stride + first + channel[None, :], of_gate.to(dz.dtype.element_ty), inside
    )
    of_norm = slope * (gate * sigma)
    tl.store(
        dweight + tl.program_id(0).to(tl.int64) * dim + channel,
        tl.sum(of_norm * unit, 0),
        channel < dim,
    )
    of_unit = of_norm * gamma
    share = tl.sum(of_unit * unit, 1) / dim
    gradient = inverse[:, None] * (of_unit - unit * share[:, None])
    place = at * (heads * dim) + first + channel[None, :]
    tl.store(dx + place, gradient.to(dx.dtype.element_ty), inside)


def _grid(x: Tensor, dim: int) -> tuple[int]:
    return (triton.cdiv(x.shape[0], TOKENS) * (x.shape[1] // dim),)


def head_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gated norm of x [T, heads * dim], whose gate is z [T, heads * dim], in the dtype of x.

    The last dimension of both is contiguous; weight [dim].
    """
    rows, columns = x.shape
    dim = weight.shape[0]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _head_norm_kernel[_grid(x, dim)](
        x,
        z,
        weight,
        y,
        x.stride(0),
        z.stride(0),
        rows,
        eps,
        heads=columns // dim,
        dim=dim,
        WIDTH=triton.next_power_of_2(dim),
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    return y


def head_norm_fp8(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    out: FP8Data,
    cast_scale: CastScale,
    counts: Counts | None = None,
) -> None:
    """Write the gated norm as FP8 into `out` [T, heads * dim], T a multiple of 4; the rest as in `head_norm`.

    `counts` are where a recorder counts what the cast does to the values; None: it does not.
    """
    rows, columns = x.shape
    dim = weight.shape[0]
    (tiles,) = _grid(x, dim)
    _head_norm_fp8_kernel[(programs_of(tiles, counts),)](
        x,
        z,
        weight,
        out.data,
        out.transposed,
        cast_scale.scale,
        cast_scale.amax,
        out.scale_inv,
        x.stride(0),
        z.stride(0),
        rows,
        eps,
        **table_of(counts),
        heads=columns // dim,
        dim=dim,
        WIDTH=triton.next_power_of_2(dim),
        TOKENS=TOKENS,
        E5M2=cast_scale.e5m2,
        ALIGNED=dim % 64 == 0,
        num_warps=WARPS,
        **small_tiles(triton.next_power_of_2(dim), counts),
    )


def head_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, dz: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of z into dz, and return the gradients of x [T, heads * dim] and of the weight.

    The last dimension of all is contiguous.
    """
    rows, columns = x.shape
    dim = weight.shape[0]
    grid = _grid(x, dim)
    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    # Summed over programs at the end: atomic additions would come in another order each time.
    parts = torch.empty(*grid, dim, dtype=torch.float32, device=x.device)
    _head_norm_backward_kernel[grid](
        x,
        z,
        weight,
        dy,
        dx,
        dz,
        parts,
        x.stride(0),
        z.stride(0),
        dy.stride(0),
        dz.stride(0),
        rows,
        eps,
        heads=columns // dim,
        dim=dim,
        WIDTH=triton.next_power_of_2(dim),
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    return dx, parts.sum(0).to(weight.dtype)
