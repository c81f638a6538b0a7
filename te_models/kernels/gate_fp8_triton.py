"""The output gate of attention that writes FP8 for o_proj, and its backward pass for qkvg_proj."""

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
    BAND,
    FP8Data,
    largest_of,
    note_inverse,
    raise_amax,
    sigmoid,
    store_fp8,
)
from te_models.kernels.handover import CastScale
from te_models.kernels.head_groups_triton import (
    TOKENS,
    WARPS,
    first_row,
    one_stride,
    place_of_heads,
    read_head,
    token_rows,
)
from te_models.kernels.head_tiles_triton import (
    gate_factor,
    gate_factor_slope,
    strides_of,
    width_of,
)


@triton.jit
def _gated(heads_at, i, head, seq, channel, inside, softplus: tl.constexpr):
    """Return values of a head at tokens i, FP32 [tokens, channels], gated if there are logits.

    `heads_at`: attention and the logits of its gate, each with its strides (`token_rows`); None for no logits.
    """
    x_at, logits_at = heads_at
    x_rows = token_rows(x_at, i, head, seq)
    if logits_at is None:
        value = read_head(x_rows, channel, inside)
    else:
        logit_rows = token_rows(logits_at, i, head, seq)
        value = read_head(x_rows, channel, inside)
        logit = read_head(logit_rows, channel, inside)
        value *= gate_factor(logit, sigmoid(logit), softplus)
    return value


@triton.jit
def _gate_slopes(heads_at, i, head, seq, channel, inside, softplus: tl.constexpr):
    """Write the gradient of attention for a head at tokens i, and return the gradient of the logits, FP32
    [tokens, channels].

    `heads_at`: the gradient of the gated output, attention, the logits and the gradient to write, with their strides.
    """
    dy_at, x_at, logits_at, dx_at = heads_at
    dy_rows = token_rows(dy_at, i, head, seq)
    x_rows = token_rows(x_at, i, head, seq)
    logit_rows = token_rows(logits_at, i, head, seq)
    dx_rows = token_rows(dx_at, i, head, seq)
    slope = read_head(dy_rows, channel, inside)
    value = read_head(x_rows, channel, inside)
    logit = read_head(logit_rows, channel, inside)
    sigma = sigmoid(logit)
    gate = gate_factor(logit, sigma, softplus)
    dtype = dx_rows.dtype.element_ty
    tl.store(dx_rows + channel[None, :], (slope * gate).to(dtype), mask=inside)
    return slope * value * gate_factor_slope(sigma, softplus)


@triton.jit
def _four_rows(
    VALUES: tl.constexpr, heads_at, i, head, seq, channel, inside, softplus: tl.constexpr
):
    """Return VALUES, `_gated` or `_gate_slopes`, of tokens i, i + 1, i + 2 and i + 3: four tiles [len(i), channels]."""
    a = VALUES(heads_at, i, head, seq, channel, inside, softplus)
    b = VALUES(heads_at, i + 1, head, seq, channel, inside, softplus)
    c = VALUES(heads_at, i + 2, head, seq, channel, inside, softplus)
    d = VALUES(heads_at, i + 3, head, seq, channel, inside, softplus)
    return a, b, c, d


@triton.jit
def _cast_heads(
    # the function that computes what is cast, `_gated` or `_gate_slopes`, and its tensors with their strides
    VALUES: tl.constexpr,
    heads_at,
    # the rest: arguments of the kernels below
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    rows,
    seq,
    heads,
    columns,
    first,
    counts,
    codes,
    spread,
    softplus: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    BAND: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Cast the values of all heads to FP8, a tile of `block` tokens of one head at a time.

    A program has one tile. If it counts, it has many: it adds to a recorder's table once, and goes through its tiles
    once more where some values are saturated or not finite (count_four_triton.py).
    """
    if counts is None:
        number = tl.program_id(0)
        group, head, channel, inside = place_of_heads(rows, heads, dim, width, block, BAND, number)
        begin = first + head * dim
        a, b, c, d = _four_rows(VALUES, heads_at, 4 * group, head, seq, channel, inside, softplus)
        s = tl.load(scale)
        j = begin + channel
        largest = store_fp8(
            a, b, c, d, s, group, j, rows, begin + dim, data, transposed, columns, E5M2
        )
        raise_amax(amax, largest)
    else:
        s = tl.load(scale)
        tiles = tl.cdiv(rows, block) * heads
        state = new_state(block // 4, width)
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            group, head, channel, inside = place_of_heads(
                rows, heads, dim, width, block, BAND, number
            )
            values = _four_rows(VALUES, heads_at, 4 * group, head, seq, channel, inside, softplus)
            a, b, c, d = values
            begin = first + head * dim
            j = begin + channel
            store_fp8(a, b, c, d, s, group, j, rows, begin + dim, data, transposed, columns, E5M2)
            top = first_row(rows, heads, block, BAND, number)
            state = count_rows(state, values, s, top, 0, rows, dim, begin, E5M2, ALIGNED)
        raise_amax(amax, amaxes(state))
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        elements = tl.full((), 1.0, tl.float64) * rows * heads * dim
        care_needed = needs_care(state, inverse)
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2, first == 0)
        if care_needed > 0:
            care = new_care()
            largest = tl.zeros((block // 4, width), tl.float32)
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                group, head, channel, inside = place_of_heads(
                    rows, heads, dim, width, block, BAND, number
                )
                values = _four_rows(
                    VALUES, heads_at, 4 * group, head, seq, channel, inside, softplus
                )
                # Above, a NaN hides the values beside it.
                largest = tl.maximum(largest, largest_of(values))
                top = first_row(rows, heads, block, BAND, number)
                care = count_rows_with_care(care, values, s, top, 0, rows, dim, E5M2)
            raise_amax(amax, largest)
            add_care(counts, codes, spread, care)
        elif marked(state) != 0:
            saturated = tl.zeros((), tl.int64)
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                group, head, channel, inside = place_of_heads(
                    rows, heads, dim, width, block, BAND, number
                )
                values = _four_rows(
                    VALUES, heads_at, 4 * group, head, seq, channel, inside, softplus
                )
                saturated += saturated_of(values, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)


@triton.jit
def _gate_fp8_kernel(
    # attention [B, S, heads, H], and the logits of its gate [B, S, heads, H or 1]
    x,
    logits,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # strides in elements
    x_batch,
    x_seq,
    x_head,
    g_batch,
    g_seq,
    g_head,
    # tokens B * S, tokens per row, heads, and columns of the output, of which these begin at `first`
    rows,
    seq,
    heads,
    columns,
    first,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    # whether there is a gate, and which; channels of a head and the power of two above
    gated: tl.constexpr,
    softplus: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    # tokens per program, and how tiles are ordered (fp8_tiles_triton.tile)
    block: tl.constexpr,
    BAND: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,  # of counts: whether heads are whole blocks of the hash
):
    """Write attention times its gate, or attention itself, as FP8; see `_cast_heads`."""
    x_at = (x, x_batch, x_seq, x_head)
    if gated:
        heads_at = (x_at, (logits, g_batch, g_seq, g_head))
    else:
        heads_at = (x_at, None)
    _cast_heads(
        VALUES=_gated,
        heads_at=heads_at,
        data=data,
        transposed=transposed,
        scale=scale,
        amax=amax,
        scale_inv=scale_inv,
        rows=rows,
        seq=seq,
        heads=heads,
        columns=columns,
        first=first,
        counts=counts,
        codes=codes,
        spread=spread,
        softplus=softplus,
        dim=dim,
        width=width,
        block=block,
        BAND=BAND,
        E5M2=E5M2,
        ALIGNED=ALIGNED,
    )


@triton.jit
def _gate_backward_fp8_kernel(
    # gradient of the gated output, attention, logits and the gradient of attention to write, all [B, S, heads, H]
    dy,
    x,
    logits,
    dx,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each; it gets the gradient of the logits
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # strides in elements
    dy_batch,
    dy_seq,
    dy_head,
    x_batch,
    x_seq,
    x_head,
    g_batch,
    g_seq,
    g_head,
    dx_batch,
    dx_seq,
    dx_head,
    # tokens B * S, tokens per row, heads, and columns of the output, of which these begin at `first`
    rows,
    seq,
    heads,
    columns,
    first,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    softplus: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    BAND: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,  # of counts: whether heads are whole blocks of the hash
):
    """Write the gradient of attention, and the gradient of the gate's logits as FP8; see `_cast_heads`."""
    dy_at = (dy, dy_batch, dy_seq, dy_head)
    x_at = (x, x_batch, x_seq, x_head)
    logits_at = (logits, g_batch, g_seq, g_head)
    dx_at = (dx, dx_batch, dx_seq, dx_head)
    heads_at = (dy_at, x_at, logits_at, dx_at)
    _cast_heads(
        VALUES=_gate_slopes,
        heads_at=heads_at,
        data=data,
        transposed=transposed,
        scale=scale,
        amax=amax,
        scale_inv=scale_inv,
        rows=rows,
        seq=seq,
        heads=heads,
        columns=columns,
        first=first,
        counts=counts,
        codes=codes,
        spread=spread,
        softplus=softplus,
        dim=dim,
        width=width,
        block=block,
        BAND=BAND,
        E5M2=E5M2,
        ALIGNED=ALIGNED,
    )


def gate_fp8(
    out: FP8Data,
    cast_scale: CastScale,
    first: int,
    x: Tensor,
    logits: Tensor | None,
    softplus: bool,
    counts: Counts | None = None,
) -> None:
    """Write attention_parts.gate, or x itself where there are no logits, as FP8 into `out`.

    Here and below `counts` are where a recorder counts what the cast does to the values; None: it does not.
    """
    batch, seq, heads, dim = x.shape
    gate = x if logits is None else logits
    _gate_fp8_kernel[(programs_of(triton.cdiv(batch * seq, TOKENS) * heads, counts),)](
        x=x,
        logits=gate,
        data=out.data,
        transposed=out.transposed,
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        scale_inv=out.scale_inv,
        **strides_of(x=x, g=gate),
        rows=batch * seq,
        seq=one_stride(seq, x, gate),
        heads=heads,
        columns=out.transposed.shape[0],
        first=first,
        **table_of(counts),
        gated=logits is not None,
        softplus=softplus,
        dim=dim,
        width=width_of(dim),
        block=TOKENS,
        BAND=BAND,
        E5M2=cast_scale.e5m2,
        ALIGNED=dim % 64 == 0 and first % 64 == 0,
        num_warps=WARPS,
        **small_tiles(width_of(dim), counts),
    )


def gate_backward_fp8(
    out: FP8Data,
    cast_scale: CastScale,
    first: int,
    dy: Tensor,
    x: Tensor,
    logits: Tensor,
    softplus: bool,
    counts: Counts | None = None,
) -> Tensor:
    """Compute attention_parts.gate_backward, with the gradient for the logits as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    _gate_backward_fp8_kernel[(programs_of(triton.cdiv(batch * seq, TOKENS) * heads, counts),)](
        dy=dy,
        x=x,
        logits=logits,
        dx=dx,
        data=out.data,
        transposed=out.transposed,
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        scale_inv=out.scale_inv,
        **strides_of(dy=dy, x=x, g=logits, dx=dx),
        rows=batch * seq,
        seq=one_stride(seq, dy, x, logits, dx),
        heads=heads,
        columns=out.transposed.shape[0],
        first=first,
        **table_of(counts),
        softplus=softplus,
        dim=dim,
        width=width_of(dim),
        block=TOKENS,
        BAND=BAND,
        E5M2=cast_scale.e5m2,
        ALIGNED=dim % 64 == 0 and first % 64 == 0,
        num_warps=WARPS,
        **small_tiles(width_of(dim), counts),
    )
    return dx
