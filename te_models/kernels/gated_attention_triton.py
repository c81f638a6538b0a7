"""The elementwise parts of gated_attention.py in Triton: each tensor is read once and written once, in any layout.

A program handles a few heads of one token. Its tiles have `width` channels, the power of two from a head's own on, and
strides are multiplied by 64-bit numbers, since a tensor may have more than 2**31 elements. Tested against the plain
operations through Triton's interpreter on a CPU (TRITON_INTERPRET=1).

RoPE and QK-norm take a head in three tiles: the `first` and `second` channels of the pairs that RoPE turns, and the
`rest`, which it leaves. Without RoPE all channels are pairs that do not turn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.gated_attention import FP8Operations, Norm, Operations, Rotation
from te_models.kernels.handover import Place
from te_models.kernels.handover_triton import (
    BAND,
    FP8Data,
    new_fp8,
    note_inverse,
    raise_amax,
    sigmoid,
    store_fp8,
    tile,
)
from te_models.kernels.span_attention_triton import spans

HEADS = 8  # heads per program
# Tokens per program of those that write FP8, each of one head, with four warps; 64 are as fast, 128 are not.
TOKENS = 32
TURNED = 8  # heads per program of rotate_fp8, which share a token's angles
NORMED = 16  # tokens per program of norm_backward, which sums their gradients of the weight


@triton.jit
def _heads_of_token(seq, heads, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """Return this program's token, row, place, heads [block, 1], channels [1, width], and which of them exist."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, width)[None, :]
    return token, token // seq, token % seq, head, channel, (head < heads) & (channel < dim)


@triton.jit
def _pairs(half: tl.constexpr, width: tl.constexpr, interleaved: tl.constexpr):
    """Return the pairs [width] of a head, and its channels that are their first and second members."""
    pair = tl.arange(0, width)
    if interleaved:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half
    return pair, first, second


@triton.jit
def _factor(weight, offset, channel, exists, zero_centered: tl.constexpr):
    """Load the factors of some channels of a norm in FP32."""
    factor = tl.load(weight + offset + channel, exists, 0.0).to(tl.float32)
    return factor + 1 if zero_centered else factor


@triton.jit
def _rotate_kernel(
    x, out, cos, sin, weight,
    x_batch, x_seq, x_head, out_batch, out_seq, out_head, table_batch, table_seq,
    seq, heads, eps, sign,
    dim: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr, together: tl.constexpr,
    zero_centered: tl.constexpr, in_place: tl.constexpr, width: tl.constexpr, rest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write x, normed if there is a weight, with RoPE if there are tables."""
    token, batch, place, head, _, _ = _heads_of_token(seq, heads, half, width, block)
    pair, first, second = _pairs(half, width, interleaved)
    exists = pair < half
    inside = (head < heads) & exists[None, :]
    source = x + batch * x_batch + place * x_seq + head * x_head
    target = out + batch * out_batch + place * out_seq + head * out_head
    a = tl.load(source + first[None, :], inside, 0.0).to(tl.float32)
    b = tl.load(source + second[None, :], inside, 0.0).to(tl.float32)
    other = 2 * half + tl.arange(0, rest)
    beside = (head < heads) & (other < dim)[None, :]
    if 2 * half < dim:
        c = tl.load(source + other[None, :], beside, 0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if 2 * half < dim:
            squares += tl.sum(c * c, 1)
        if together:
            inverse = tl.rsqrt(tl.sum(squares, 0) / (heads * dim) + eps)
        else:
            inverse = tl.rsqrt(squares / dim + eps)[:, None]
        offset = head * dim if together else head * 0
        a *= inverse * _factor(weight, offset, first[None, :], inside, zero_centered)
        b *= inverse * _factor(weight, offset, second[None, :], inside, zero_centered)
        if 2 * half < dim:
            c *= inverse * _factor(weight, offset, other[None, :], beside, zero_centered)
    if cos is not None:
        at = batch * table_batch + place * table_seq + pair
        turn = tl.load(cos + at, exists, 0.0).to(tl.float32)[None, :]
        slant = tl.load(sin + at, exists, 0.0).to(tl.float32)[None, :] * sign
        one = a * turn - b * slant
        b = b * turn + a * slant
        a = one
    tl.store(target + first[None, :], a.to(out.dtype.element_ty), inside)
    tl.store(target + second[None, :], b.to(out.dtype.element_ty), inside)
    if 2 * half < dim and not in_place:
        tl.store(target + other[None, :], c.to(out.dtype.element_ty), beside)


@triton.jit
def _norm_backward_kernel(
    dy, x, dx, dweight, cos, sin, weight,
    dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, dx_batch, dx_seq, dx_head, table_batch, table_seq,
    tokens, seq, heads, eps,
    dim: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr, together: tl.constexpr,
    zero_centered: tl.constexpr, width: tl.constexpr, rest: tl.constexpr, block: tl.constexpr, own: tl.constexpr,
):  # fmt: skip
    """Undo RoPE, then differentiate the norm: dx, and this program's part of the gradient of the weight."""
    head = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)[:, None]
    pair, first, second = _pairs(half, width, interleaved)
    exists = pair < half
    inside = (head < heads) & exists[None, :]
    other = 2 * half + tl.arange(0, rest)
    beside = (head < heads) & (other < dim)[None, :]
    offset = head * dim if together else head * 0
    factor_a = _factor(weight, offset, first[None, :], inside, zero_centered)
    factor_b = _factor(weight, offset, second[None, :], inside, zero_centered)
    sum_a = tl.zeros((block, width), tl.float32)
    sum_b = tl.zeros((block, width), tl.float32)
    if 2 * half < dim:
        factor_c = _factor(weight, offset, other[None, :], beside, zero_centered)
        sum_c = tl.zeros((block, rest), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * own
    for token in range(begin, tl.minimum(begin + own, tokens)):
        batch = token // seq
        place = token % seq
        source = x + batch * x_batch + place * x_seq + head * x_head
        slope = dy + batch * dy_batch + place * dy_seq + head * dy_head
        target = dx + batch * dx_batch + place * dx_seq + head * dx_head
        a = tl.load(source + first[None, :], inside, 0.0).to(tl.float32)
        b = tl.load(source + second[None, :], inside, 0.0).to(tl.float32)
        da = tl.load(slope + first[None, :], inside, 0.0).to(tl.float32)
        db = tl.load(slope + second[None, :], inside, 0.0).to(tl.float32)
        if cos is not None:
            at = batch * table_batch + place * table_seq + pair
            turn = tl.load(cos + at, exists, 0.0).to(tl.float32)[None, :]
            slant = tl.load(sin + at, exists, 0.0).to(tl.float32)[None, :]
            one = da * turn + db * slant
            db = db * turn - da * slant
            da = one
        squares = tl.sum(a * a + b * b, 1)
        products = tl.sum(a * da * factor_a + b * db * factor_b, 1)
        if 2 * half < dim:
            c = tl.load(source + other[None, :], beside, 0.0).to(tl.float32)
            dc = tl.load(slope + other[None, :], beside, 0.0).to(tl.float32)
            squares += tl.sum(c * c, 1)
            products += tl.sum(c * dc * factor_c, 1)
        if together:
            inverse = tl.rsqrt(tl.sum(squares, 0) / (heads * dim) + eps)
            mean = tl.sum(products, 0) / (heads * dim) * inverse * inverse
        else:
            inverse = tl.rsqrt(squares / dim + eps)[:, None]
            mean = products[:, None] / dim * inverse * inverse
        ga = inverse * (da * factor_a - a * mean)
        gb = inverse * (db * factor_b - b * mean)
        tl.store(target + first[None, :], ga.to(dx.dtype.element_ty), inside)
        tl.store(target + second[None, :], gb.to(dx.dtype.element_ty), inside)
        sum_a += da * a * inverse
        sum_b += db * b * inverse
        if 2 * half < dim:
            gc = inverse * (dc * factor_c - c * mean)
            tl.store(target + other[None, :], gc.to(dx.dtype.element_ty), beside)
            sum_c += dc * c * inverse
    if together:
        part = dweight + tl.program_id(0).to(tl.int64) * heads * dim + head * dim
        tl.store(part + first[None, :], sum_a, inside)
        tl.store(part + second[None, :], sum_b, inside)
        if 2 * half < dim:
            tl.store(part + other[None, :], sum_c, beside)
    else:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        part = dweight + program * dim
        tl.store(part + first, tl.sum(sum_a, 0), exists)
        tl.store(part + second, tl.sum(sum_b, 0), exists)
        if 2 * half < dim:
            tl.store(part + other, tl.sum(sum_c, 0), other < dim)


@triton.jit
def _opening(logit, squashed, softplus: tl.constexpr):
    """Return the factor of a gate, of FP32 logits and their sigmoid."""
    factor = squashed
    if softplus:
        factor = tl.maximum(logit, 0.0) + tl.log(1 + tl.exp(-tl.abs(logit)))
    return factor


@triton.jit
def _opening_slope(squashed, softplus: tl.constexpr):
    """Return the derivative of `_opening`, of the sigmoid of the logits."""
    slope = squashed
    if not softplus:
        slope = squashed * (1 - squashed)
    return slope


@triton.jit
def _copy_kernel(
    x, out,
    x_batch, x_seq, x_head, out_batch, out_seq, out_head,
    seq, heads,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, batch, place, head, channel, inside = _heads_of_token(seq, heads, dim, width, block)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside)
    tl.store(out + batch * out_batch + place * out_seq + head * out_head + channel, value, inside)


@triton.jit
def _gate_kernel(
    x, logits, out,
    x_batch, x_seq, x_head, g_batch, g_seq, g_head,
    seq, heads,
    headwise: tl.constexpr, softplus: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, batch, place, head, channel, inside = _heads_of_token(seq, heads, dim, width, block)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside).to(
        tl.float32
    )
    column = head * g_head + (0 if headwise else channel)
    logit = tl.load(logits + batch * g_batch + place * g_seq + column, inside, 0.0).to(tl.float32)
    opening = _opening(logit, tl.sigmoid(logit), softplus)
    tl.store(
        out + (token * heads + head) * dim + channel,
        (value * opening).to(out.dtype.element_ty),
        inside,
    )


@triton.jit
def _gate_backward_kernel(
    dy, x, logits, dlogits, dx,
    dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, dg_batch, dg_seq, dg_head,
    seq, heads,
    headwise: tl.constexpr, softplus: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, batch, place, head, channel, inside = _heads_of_token(seq, heads, dim, width, block)
    slope = tl.load(
        dy + batch * dy_batch + place * dy_seq + head * dy_head + channel, inside, 0.0
    ).to(tl.float32)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside, 0.0).to(
        tl.float32
    )
    column = head * g_head + (0 if headwise else channel)
    logit = tl.load(logits + batch * g_batch + place * g_seq + column, inside, 0.0).to(tl.float32)
    squashed = tl.sigmoid(logit)
    opening = _opening(logit, squashed, softplus)
    tl.store(
        dx + (token * heads + head) * dim + channel,
        (slope * opening).to(dx.dtype.element_ty),
        inside,
    )
    change = slope * value * _opening_slope(squashed, softplus)
    target = dlogits + batch * dg_batch + place * dg_seq + head * dg_head
    if headwise:
        change = tl.sum(change, axis=1)[:, None]
        tl.store(target, change.to(dlogits.dtype.element_ty), head < heads)
    else:
        tl.store(target + channel, change.to(dlogits.dtype.element_ty), inside)


def _width(dim: int) -> int:
    """Return the channels of a tile."""
    return triton.next_power_of_2(dim)


def _tables(
    rotation: Rotation | None,
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int]]:
    """Return cos and sin, or None for both, and the strides of their rows and places."""
    if rotation is None:
        return (None, None), (0, 0)
    cos = rotation.cos.contiguous()
    sin = rotation.sin.contiguous()
    per_row = cos.ndim == 3 and len(cos) > 1
    return (cos, sin), (cos.stride(0) if per_row else 0, cos.stride(-2))


def _shape(dim: int, rotation: Rotation | None) -> dict[str, int | bool]:
    """Return the keywords of a kernel that tell a head's tiles."""
    half = (dim if rotation is None else rotation.cos.shape[-1]) // 2
    return dict(
        dim=dim,
        half=half,
        interleaved=rotation is not None and rotation.interleaved,
        width=_width(half),
        rest=_width(max(1, dim - 2 * half)),
    )


def rotate(x: Tensor, out: Tensor, rotation: Rotation, inverse: bool) -> None:
    """See gated_attention.rotate."""
    batch, seq, heads, dim = x.shape
    tables, table_strides = _tables(rotation)
    _rotate_kernel[(batch * seq, triton.cdiv(heads, HEADS))](
        x, out, *tables, None, *x.stride()[:3], *out.stride()[:3], *table_strides,
        seq, heads, 0.0, -1.0 if inverse else 1.0,
        **_shape(dim, rotation), together=False, zero_centered=False, in_place=out is x, block=HEADS,
    )  # fmt: skip


def norm(x: Tensor, norm: Norm, rotation: Rotation | None) -> Tensor:
    """See gated_attention.norm."""
    batch, seq, heads, dim = x.shape
    out = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    tables, table_strides = _tables(rotation)
    together = len(norm.weight) != dim
    block = triton.next_power_of_2(heads) if together else HEADS
    _rotate_kernel[(batch * seq, triton.cdiv(heads, block))](
        x, out, *tables, norm.weight, *x.stride()[:3], *out.stride()[:3], *table_strides,
        seq, heads, norm.eps, 1.0,
        **_shape(dim, rotation), together=together, zero_centered=norm.zero_centered, in_place=False, block=block,
    )  # fmt: skip
    return out


def norm_backward(
    dy: Tensor, x: Tensor, norm: Norm, rotation: Rotation | None, dx: Tensor
) -> Tensor:
    """See gated_attention.norm_backward."""
    batch, seq, heads, dim = x.shape
    tables, table_strides = _tables(rotation)
    together = len(norm.weight) != dim
    block = triton.next_power_of_2(heads) if together else HEADS
    grid = (triton.cdiv(batch * seq, NORMED), triton.cdiv(heads, block))
    size = heads * dim if together else dim
    parts = torch.empty(grid[0] * grid[1], size, dtype=torch.float32, device=x.device)
    strides = [stride for tensor in (dy, x, dx) for stride in tensor.stride()[:3]]
    _norm_backward_kernel[grid](
        dy, x, dx, parts, *tables, norm.weight, *strides, *table_strides, batch * seq, seq, heads, norm.eps,
        **_shape(dim, rotation), together=together, zero_centered=norm.zero_centered, block=block, own=NORMED,
    )  # fmt: skip
    return parts.sum(0)


def copy(x: Tensor, out: Tensor) -> None:
    """See gated_attention.copy."""
    batch, seq, heads, dim = x.shape
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _copy_kernel[grid](
        x,
        out,
        *x.stride()[:3],
        *out.stride()[:3],
        seq,
        heads,
        dim=dim,
        width=_width(dim),
        block=HEADS,
    )


def gate(x: Tensor, logits: Tensor, softplus: bool) -> Tensor:
    """See gated_attention.gate."""
    batch, seq, heads, dim = x.shape
    out = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _gate_kernel[grid](
        x, logits, out, *x.stride()[:3], *logits.stride()[:3], seq, heads,
        headwise=logits.shape[-1] != dim, softplus=softplus, dim=dim, width=_width(dim), block=HEADS,
    )  # fmt: skip
    return out


def gate_backward(dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor, softplus: bool) -> Tensor:
    """See gated_attention.gate_backward."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    strides = [stride for tensor in (dy, x, logits, dlogits) for stride in tensor.stride()[:3]]
    _gate_backward_kernel[grid](
        dy, x, logits, dlogits, dx, *strides, seq, heads,
        headwise=logits.shape[-1] != dim, softplus=softplus, dim=dim, width=_width(dim), block=HEADS,
    )  # fmt: skip
    return dx


@triton.jit
def _rows(x, i, head, batch_stride, seq_stride, head_stride, seq):
    """Return pointers [rows, 1] to a head at tokens i of x [B, S, heads, H]; S None: all rows have one stride."""
    x += head.to(tl.int64) * head_stride
    at = (
        x + i * seq_stride
        if seq is None
        else x + (i // seq) * batch_stride + (i % seq) * seq_stride
    )
    return at[:, None]


@triton.jit
def _place(
    rows, heads, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, BAND: tl.constexpr
):
    """Return this program's groups of four rows, head, channels, and which of rows and channels exist."""
    row, head = tile(tl.cdiv(rows, block), heads, BAND)
    group = row.to(tl.int64) * (block // 4) + tl.arange(0, block // 4)
    channel = tl.arange(0, width)
    return group, head, channel, (4 * group < rows)[:, None] & (channel < dim)[None, :]


@triton.jit
def _read(pointers, channel, inside):
    return tl.load(pointers + channel[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _gated(
    x, logits, i, head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, seq, channel, inside,
    gated: tl.constexpr, softplus: tl.constexpr,
):  # fmt: skip
    value = _read(_rows(x, i, head, x_batch, x_seq, x_head, seq), channel, inside)
    if gated:
        logit = _read(_rows(logits, i, head, g_batch, g_seq, g_head, seq), channel, inside)
        value *= _opening(logit, sigmoid(logit), softplus)
    return value


@triton.jit
def _gate_fp8_kernel(
    x, logits, data, transposed, scale, amax, scale_inv,
    x_batch, x_seq, x_head, g_batch, g_seq, g_head,
    rows, seq, heads, columns, first,
    gated: tl.constexpr, softplus: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    BAND: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    group, head, channel, inside = _place(rows, heads, dim, width, block, BAND)
    i = 4 * group
    own = first + head * dim
    a = _gated(x, logits, i, head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, seq, channel, inside,
               gated, softplus)  # fmt: skip
    b = _gated(x, logits, i + 1, head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, seq, channel, inside,
               gated, softplus)  # fmt: skip
    c = _gated(x, logits, i + 2, head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, seq, channel, inside,
               gated, softplus)  # fmt: skip
    d = _gated(x, logits, i + 3, head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, seq, channel, inside,
               gated, softplus)  # fmt: skip
    s = tl.load(scale)
    j = own + channel
    raise_amax(
        amax, store_fp8(a, b, c, d, s, group, j, rows, own + dim, data, transposed, columns, E5M2)
    )
    note_inverse(s, scale_inv)


@triton.jit
def _angles(cos, sin, i, table_batch, table_seq, seq, sign, pair, inside):
    """Return cos and sin of the pairs at tokens i; 1 and 0 where there are no tables."""
    if cos is not None:
        at = ((i // seq) * table_batch + (i % seq) * table_seq)[:, None]
        turn = _read(cos + at, pair, inside)
        slant = _read(sin + at, pair, inside) * sign
    else:
        turn = inside.to(tl.float32)
        slant = turn * 0
    return turn, slant


@triton.jit
def _rotated(x, i, head, x_batch, x_seq, x_head, seq, c, s, first, second, inside):
    """Return both members of the turned pairs of a head at tokens i."""
    at = _rows(x, i, head, x_batch, x_seq, x_head, seq)
    one = _read(at, first, inside)
    two = _read(at, second, inside)
    return one * c - two * s, two * c + one * s


@triton.jit
def _rotate_fp8_kernel(
    x, cos, sin, data, transposed, scale, amax, scale_inv,
    x_batch, x_seq, x_head, table_batch, table_seq,
    rows, seq, heads, columns, start, sign,
    dim: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr, width: tl.constexpr, rest: tl.constexpr,
    block: tl.constexpr, turned: tl.constexpr, BAND: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    group, part, pair, inside = _place(rows, tl.cdiv(heads, turned), half, width, block, BAND)
    _, first, second = _pairs(half, width, interleaved)
    other = 2 * half + tl.arange(0, rest)
    beside = (4 * group < rows)[:, None] & (other < dim)[None, :]
    i = 4 * group
    s = tl.load(scale)
    ca, sa = _angles(cos, sin, i, table_batch, table_seq, seq, sign, pair, inside)
    cb, sb = _angles(cos, sin, i + 1, table_batch, table_seq, seq, sign, pair, inside)
    cc, sc = _angles(cos, sin, i + 2, table_batch, table_seq, seq, sign, pair, inside)
    cd, sd = _angles(cos, sin, i + 3, table_batch, table_seq, seq, sign, pair, inside)
    largest = tl.zeros((block // 4, width), tl.float32)
    for step in range(tl.minimum(turned, heads - part * turned)):
        head = part * turned + step
        a, e = _rotated(x, i, head, x_batch, x_seq, x_head, seq, ca, sa, first, second, inside)
        b, f = _rotated(x, i + 1, head, x_batch, x_seq, x_head, seq, cb, sb, first, second, inside)
        c, g = _rotated(x, i + 2, head, x_batch, x_seq, x_head, seq, cc, sc, first, second, inside)
        d, h = _rotated(x, i + 3, head, x_batch, x_seq, x_head, seq, cd, sd, first, second, inside)
        own = start + head * dim
        # Beyond the last pair there are no columns: the bound of a half is where the other begins.
        end = own + 2 * half if interleaved else own + half
        one = store_fp8(
            a, b, c, d, s, group, own + first, rows, end, data, transposed, columns, E5M2
        )
        two = store_fp8(
            e,
            f,
            g,
            h,
            s,
            group,
            own + second,
            rows,
            own + 2 * half,
            data,
            transposed,
            columns,
            E5M2,
        )
        largest = tl.maximum(largest, tl.maximum(one, two))
        if 2 * half < dim:
            a = _read(_rows(x, i, head, x_batch, x_seq, x_head, seq), other, beside)
            b = _read(_rows(x, i + 1, head, x_batch, x_seq, x_head, seq), other, beside)
            c = _read(_rows(x, i + 2, head, x_batch, x_seq, x_head, seq), other, beside)
            d = _read(_rows(x, i + 3, head, x_batch, x_seq, x_head, seq), other, beside)
            three = store_fp8(
                a, b, c, d, s, group, own + other, rows, own + dim, data, transposed, columns, E5M2
            )
            raise_amax(amax, three)
    raise_amax(amax, largest)
    note_inverse(s, scale_inv)


@triton.jit
def _norm_slopes(
    dy, x, i, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, seq, turn, slant, first, second, other,
    inside, beside, factor_a, factor_b, factor_c, eps, dim: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Return the gradients of one head's norm at tokens i in three tiles, and their sums for the weight [width]."""
    slope = _rows(dy, i, head, dy_batch, dy_seq, dy_head, seq)
    source = _rows(x, i, head, x_batch, x_seq, x_head, seq)
    one = _read(slope, first, inside)
    two = _read(slope, second, inside)
    da = one * turn + two * slant
    db = two * turn - one * slant
    a = _read(source, first, inside)
    b = _read(source, second, inside)
    dc = _read(slope, other, beside)  # beside is empty where RoPE turns all channels
    c = _read(source, other, beside)
    squares = tl.sum(a * a + b * b, 1) + tl.sum(c * c, 1)
    products = tl.sum(a * da * factor_a + b * db * factor_b, 1) + tl.sum(c * dc * factor_c, 1)
    inverse = tl.rsqrt(squares / dim + eps)[:, None]
    mean = products[:, None] / dim * inverse * inverse
    a *= inverse
    b *= inverse
    c *= inverse
    mean /= inverse
    return (
        inverse * da * factor_a - inverse * a * mean,
        inverse * db * factor_b - inverse * b * mean,
        inverse * dc * factor_c - inverse * c * mean,
        tl.sum(da * a, 0),
        tl.sum(db * b, 0),
        tl.sum(dc * c, 0),
    )


@triton.jit
def _norm_backward_fp8_kernel(
    dy, x, dweight, cos, sin, weight, data, transposed, scale, amax, scale_inv,
    dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, table_batch, table_seq,
    rows, seq, heads, columns, start, eps,
    dim: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr, zero_centered: tl.constexpr,
    width: tl.constexpr, rest: tl.constexpr, block: tl.constexpr, turned: tl.constexpr, BAND: tl.constexpr,
    E5M2: tl.constexpr,
):  # fmt: skip
    group, part, pair, inside = _place(rows, tl.cdiv(heads, turned), half, width, block, BAND)
    _, first, second = _pairs(half, width, interleaved)
    other = 2 * half + tl.arange(0, rest)
    beside = (4 * group < rows)[:, None] & (other < dim)[None, :]
    i = 4 * group
    s = tl.load(scale)
    fa = _factor(weight, 0, first, pair < half, zero_centered)[None, :]
    fb = _factor(weight, 0, second, pair < half, zero_centered)[None, :]
    fc = _factor(weight, 0, other, other < dim, zero_centered)[None, :]
    ca, sa = _angles(cos, sin, i, table_batch, table_seq, seq, 1.0, pair, inside)
    cb, sb = _angles(cos, sin, i + 1, table_batch, table_seq, seq, 1.0, pair, inside)
    cc, sc = _angles(cos, sin, i + 2, table_batch, table_seq, seq, 1.0, pair, inside)
    cd, sd = _angles(cos, sin, i + 3, table_batch, table_seq, seq, 1.0, pair, inside)
    largest = tl.zeros((block // 4, width), tl.float32)
    sum_a = tl.zeros((width,), tl.float32)
    sum_b = tl.zeros((width,), tl.float32)
    sum_c = tl.zeros((rest,), tl.float32)
    for step in range(tl.minimum(turned, heads - part * turned)):
        head = part * turned + step
        own = start + head * dim
        end = own + 2 * half if interleaved else own + half
        a, e, k, wa, wb, wc = _norm_slopes(
            dy, x, i, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, seq, ca, sa, first, second, other,
            inside, beside, fa, fb, fc, eps, dim, half,
        )  # fmt: skip
        sum_a += wa
        sum_b += wb
        sum_c += wc
        b, f, m, wa, wb, wc = _norm_slopes(
            dy, x, i + 1, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, seq, cb, sb, first, second, other,
            inside, beside, fa, fb, fc, eps, dim, half,
        )  # fmt: skip
        sum_a += wa
        sum_b += wb
        sum_c += wc
        c, g, n, wa, wb, wc = _norm_slopes(
            dy, x, i + 2, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, seq, cc, sc, first, second, other,
            inside, beside, fa, fb, fc, eps, dim, half,
        )  # fmt: skip
        sum_a += wa
        sum_b += wb
        sum_c += wc
        d, h, o, wa, wb, wc = _norm_slopes(
            dy, x, i + 3, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, seq, cd, sd, first, second, other,
            inside, beside, fa, fb, fc, eps, dim, half,
        )  # fmt: skip
        sum_a += wa
        sum_b += wb
        sum_c += wc
        one = store_fp8(
            a, b, c, d, s, group, own + first, rows, end, data, transposed, columns, E5M2
        )
        two = store_fp8(
            e,
            f,
            g,
            h,
            s,
            group,
            own + second,
            rows,
            own + 2 * half,
            data,
            transposed,
            columns,
            E5M2,
        )
        largest = tl.maximum(largest, tl.maximum(one, two))
        if 2 * half < dim:
            three = store_fp8(
                k, m, n, o, s, group, own + other, rows, own + dim, data, transposed, columns, E5M2
            )
            raise_amax(amax, three)
    raise_amax(amax, largest)
    note_inverse(s, scale_inv)
    into = dweight + tl.program_id(0).to(tl.int64) * dim
    tl.store(into + first, sum_a, pair < half)
    tl.store(into + second, sum_b, pair < half)
    if 2 * half < dim:
        tl.store(into + other, sum_c, other < dim)


@triton.jit
def _gate_slopes(
    dy, x, logits, dx, i, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, dx_batch,
    dx_seq, dx_head, seq, channel, inside, softplus: tl.constexpr,
):  # fmt: skip
    slope = _read(_rows(dy, i, head, dy_batch, dy_seq, dy_head, seq), channel, inside)
    value = _read(_rows(x, i, head, x_batch, x_seq, x_head, seq), channel, inside)
    logit = _read(_rows(logits, i, head, g_batch, g_seq, g_head, seq), channel, inside)
    squashed = sigmoid(logit)
    opening = _opening(logit, squashed, softplus)
    at = _rows(dx, i, head, dx_batch, dx_seq, dx_head, seq) + channel[None, :]
    tl.store(at, (slope * opening).to(dx.dtype.element_ty), mask=inside)
    return slope * value * _opening_slope(squashed, softplus)


@triton.jit
def _gate_backward_fp8_kernel(
    dy, x, logits, dx, data, transposed, scale, amax, scale_inv,
    dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, dx_batch, dx_seq, dx_head,
    rows, seq, heads, columns, first,
    softplus: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, BAND: tl.constexpr,
    E5M2: tl.constexpr,
):  # fmt: skip
    group, head, channel, inside = _place(rows, heads, dim, width, block, BAND)
    i = 4 * group
    own = first + head * dim
    a = _gate_slopes(dy, x, logits, dx, i, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside, softplus)  # fmt: skip
    b = _gate_slopes(dy, x, logits, dx, i + 1, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside, softplus)  # fmt: skip
    c = _gate_slopes(dy, x, logits, dx, i + 2, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside, softplus)  # fmt: skip
    d = _gate_slopes(dy, x, logits, dx, i + 3, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside, softplus)  # fmt: skip
    s = tl.load(scale)
    j = own + channel
    raise_amax(
        amax, store_fp8(a, b, c, d, s, group, j, rows, own + dim, data, transposed, columns, E5M2)
    )
    note_inverse(s, scale_inv)


def _of(out: FP8Data, place: Place) -> tuple[Tensor, ...]:
    """Return a kernel's arguments for its output."""
    return out.data, out.transposed, *place[:2], out.scale_inv


def _even(seq: int, *tensors: Tensor) -> int | None:
    """Return S; None if one stride serves all tokens of tensors [B, S, heads, H], which saves divisions."""
    return None if all(tensor.stride(0) == seq * tensor.stride(1) for tensor in tensors) else seq


def gate_fp8(
    out: FP8Data, place: Place, first: int, x: Tensor, logits: Tensor | None, softplus: bool
) -> None:
    """Write gated_attention.gate, or x itself where there are no logits, as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    gate = x if logits is None else logits
    _gate_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * heads,)](
        x, gate, *_of(out, place), *x.stride()[:3], *gate.stride()[:3],
        batch * seq, _even(seq, x, gate), heads, out.transposed.shape[0], first,
        gated=logits is not None, softplus=softplus, dim=dim, width=_width(dim), block=TOKENS, BAND=BAND,
        E5M2=place[2], num_warps=4,
    )  # fmt: skip


def rotate_fp8(
    out: FP8Data, place: Place, first: int, x: Tensor, rotation: Rotation, inverse: bool
) -> None:
    """Write gated_attention.rotate as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    tables, table_strides = _tables(rotation)
    _rotate_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * triton.cdiv(heads, TURNED),)](
        x, *tables, *_of(out, place), *x.stride()[:3], *table_strides,
        batch * seq, seq, heads, out.transposed.shape[0], first, -1.0 if inverse else 1.0,
        **_shape(dim, rotation), block=TOKENS, turned=TURNED, BAND=BAND, E5M2=place[2], num_warps=4,
    )  # fmt: skip


def norm_backward_fp8(
    out: FP8Data,
    place: Place,
    first: int,
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    rotation: Rotation | None,
) -> Tensor:
    """Write the gradient for x of gated_attention.norm_backward as FP8 into `out`; return the gradient of the weight.

    Only for the norm of each head by itself.
    """
    batch, seq, heads, dim = x.shape
    tables, table_strides = _tables(rotation)
    programs = triton.cdiv(batch * seq, TOKENS) * triton.cdiv(heads, TURNED)
    parts = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
    _norm_backward_fp8_kernel[(programs,)](
        dy, x, parts, *tables, norm.weight, *_of(out, place), *dy.stride()[:3], *x.stride()[:3], *table_strides,
        batch * seq, seq, heads, out.transposed.shape[0], first, norm.eps,
        **_shape(dim, rotation), zero_centered=norm.zero_centered, block=TOKENS, turned=TURNED, BAND=BAND,
        E5M2=place[2], num_warps=4,
    )  # fmt: skip
    return parts.sum(0)


def gate_backward_fp8(
    out: FP8Data,
    place: Place,
    first: int,
    dy: Tensor,
    x: Tensor,
    logits: Tensor,
    softplus: bool,
) -> Tensor:
    """Compute gated_attention.gate_backward, with the gradient for the logits as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    strides = [stride for tensor in (dy, x, logits, dx) for stride in tensor.stride()[:3]]
    _gate_backward_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * heads,)](
        dy, x, logits, dx, *_of(out, place), *strides, batch * seq, _even(seq, dy, x, logits, dx), heads,
        out.transposed.shape[0], first,
        softplus=softplus, dim=dim, width=_width(dim), block=TOKENS, BAND=BAND, E5M2=place[2], num_warps=4,
    )  # fmt: skip
    return dx


TRITON = Operations(
    rotate,
    norm,
    norm_backward,
    copy,
    gate,
    gate_backward,
    FP8Operations(new_fp8, gate_fp8, rotate_fp8, norm_backward_fp8, gate_backward_fp8),
    spans,
)
