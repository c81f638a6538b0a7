"""The elementwise parts of gated_attention.py in Triton: each tensor is read once and written once, in any layout.

A program handles a few heads of one token. Its tiles have `width` channels, the power of two from a head's own on, and
strides are multiplied by 64-bit numbers, since a tensor may have more than 2**31 elements. Tested against the plain
operations through Triton's interpreter on a CPU (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.gated_attention import FP8Operations, Operations
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


@triton.jit
def _heads_of_token(seq, heads, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """Return this program's token, row, place, heads [block, 1], channels [1, width], and which of them exist."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, width)[None, :]
    return token, token // seq, token % seq, head, channel, (head < heads) & (channel < dim)


@triton.jit
def _rotate_kernel(
    x, out, cos, sin,
    x_batch, x_seq, x_head, out_batch, out_seq, out_head, table_batch, table_seq,
    seq, heads,
    sign: tl.constexpr, half: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, batch, place, head, channel, inside = _heads_of_token(seq, heads, half, width, block)
    source = x + batch * x_batch + place * x_seq + head * x_head + channel
    target = out + batch * out_batch + place * out_seq + head * out_head + channel
    angle = batch * table_batch + place * table_seq + channel
    first = tl.load(source, inside).to(tl.float32)
    second = tl.load(source + half, inside).to(tl.float32)
    c = tl.load(cos + angle, channel < half).to(tl.float32)
    s = tl.load(sin + angle, channel < half).to(tl.float32) * sign
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), inside)


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
    headwise: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, batch, place, head, channel, inside = _heads_of_token(seq, heads, dim, width, block)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside).to(
        tl.float32
    )
    column = head * g_head + (0 if headwise else channel)
    opening = tl.sigmoid(
        tl.load(logits + batch * g_batch + place * g_seq + column, inside).to(tl.float32)
    )
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
    headwise: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, batch, place, head, channel, inside = _heads_of_token(seq, heads, dim, width, block)
    slope = tl.load(
        dy + batch * dy_batch + place * dy_seq + head * dy_head + channel, inside, 0.0
    ).to(tl.float32)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside, 0.0).to(
        tl.float32
    )
    column = head * g_head + (0 if headwise else channel)
    opening = tl.sigmoid(
        tl.load(logits + batch * g_batch + place * g_seq + column, inside, 0.0).to(tl.float32)
    )
    tl.store(
        dx + (token * heads + head) * dim + channel,
        (slope * opening).to(dx.dtype.element_ty),
        inside,
    )
    change = slope * value * opening * (1 - opening)
    target = dlogits + batch * dg_batch + place * dg_seq + head * dg_head
    if headwise:
        change = tl.sum(change, axis=1)[:, None]
        tl.store(target, change.to(dlogits.dtype.element_ty), head < heads)
    else:
        tl.store(target + channel, change.to(dlogits.dtype.element_ty), inside)


def _width(dim: int) -> int:
    """Return the channels of a tile."""
    return triton.next_power_of_2(dim)


def _tables(cos: Tensor, sin: Tensor, strides: tuple[int, ...]) -> tuple[Tensor | int, ...]:
    """Return the arguments cos, sin, `strides` of other tensors, and the strides of row and place of the tables."""
    cos = cos.contiguous()
    sin = sin.contiguous()
    return (
        cos,
        sin,
        *strides,
        cos.stride(0) if cos.ndim == 3 and len(cos) > 1 else 0,
        cos.stride(-2),
    )


def rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """See gated_attention.rotate."""
    batch, seq, heads, dim = x.shape
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _rotate_kernel[grid](
        x, out, *_tables(cos, sin, x.stride()[:3] + out.stride()[:3]), seq, heads,
        sign=-1.0 if inverse else 1.0, half=dim // 2, width=_width(dim // 2), block=HEADS,
    )  # fmt: skip


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


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """See gated_attention.gate."""
    batch, seq, heads, dim = x.shape
    out = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _gate_kernel[grid](
        x, logits, out, *x.stride()[:3], *logits.stride()[:3], seq, heads,
        headwise=logits.shape[-1] != dim, dim=dim, width=_width(dim), block=HEADS,
    )  # fmt: skip
    return out


def gate_backward(dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor) -> Tensor:
    """See gated_attention.gate_backward."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    strides = [stride for tensor in (dy, x, logits, dlogits) for stride in tensor.stride()[:3]]
    _gate_backward_kernel[grid](
        dy, x, logits, dlogits, dx, *strides, seq, heads,
        headwise=logits.shape[-1] != dim, dim=dim, width=_width(dim), block=HEADS,
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
    x,
    logits,
    i,
    head,
    x_batch,
    x_seq,
    x_head,
    g_batch,
    g_seq,
    g_head,
    seq,
    channel,
    inside,
    gated: tl.constexpr,
):
    value = _read(_rows(x, i, head, x_batch, x_seq, x_head, seq), channel, inside)
    if gated:
        value *= sigmoid(
            _read(_rows(logits, i, head, g_batch, g_seq, g_head, seq), channel, inside)
        )
    return value


@triton.jit
def _gate_fp8_kernel(
    x, logits, data, transposed, scale, amax, scale_inv,
    x_batch, x_seq, x_head, g_batch, g_seq, g_head,
    rows, seq, heads, columns, first,
    gated: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, BAND: tl.constexpr,
    E5M2: tl.constexpr,
):  # fmt: skip
    group, head, channel, inside = _place(rows, heads, dim, width, block, BAND)
    i = 4 * group
    own = first + head * dim
    a = _gated(
        x,
        logits,
        i,
        head,
        x_batch,
        x_seq,
        x_head,
        g_batch,
        g_seq,
        g_head,
        seq,
        channel,
        inside,
        gated,
    )
    b = _gated(
        x,
        logits,
        i + 1,
        head,
        x_batch,
        x_seq,
        x_head,
        g_batch,
        g_seq,
        g_head,
        seq,
        channel,
        inside,
        gated,
    )
    c = _gated(
        x,
        logits,
        i + 2,
        head,
        x_batch,
        x_seq,
        x_head,
        g_batch,
        g_seq,
        g_head,
        seq,
        channel,
        inside,
        gated,
    )
    d = _gated(
        x,
        logits,
        i + 3,
        head,
        x_batch,
        x_seq,
        x_head,
        g_batch,
        g_seq,
        g_head,
        seq,
        channel,
        inside,
        gated,
    )
    s = tl.load(scale)
    j = own + channel
    raise_amax(
        amax, store_fp8(a, b, c, d, s, group, j, rows, own + dim, data, transposed, columns, E5M2)
    )
    note_inverse(s, scale_inv)


@triton.jit
def _angles(cos, sin, i, table_batch, table_seq, seq, sign, channel, inside):
    at = ((i // seq) * table_batch + (i % seq) * table_seq)[:, None]
    return _read(cos + at, channel, inside), _read(sin + at, channel, inside) * sign


@triton.jit
def _rotated(x, i, head, x_batch, x_seq, x_head, seq, c, s, channel, inside, half: tl.constexpr):
    at = _rows(x, i, head, x_batch, x_seq, x_head, seq)
    one = _read(at, channel, inside)
    two = _read(at + half, channel, inside)
    return one * c - two * s, two * c + one * s


@triton.jit
def _rotate_fp8_kernel(
    x, cos, sin, data, transposed, scale, amax, scale_inv,
    x_batch, x_seq, x_head, table_batch, table_seq,
    rows, seq, heads, columns, first, sign,
    half: tl.constexpr, width: tl.constexpr, block: tl.constexpr, turned: tl.constexpr, BAND: tl.constexpr,
    E5M2: tl.constexpr,
):  # fmt: skip
    group, part, channel, inside = _place(rows, tl.cdiv(heads, turned), half, width, block, BAND)
    i = 4 * group
    s = tl.load(scale)
    ca, sa = _angles(cos, sin, i, table_batch, table_seq, seq, sign, channel, inside)
    cb, sb = _angles(cos, sin, i + 1, table_batch, table_seq, seq, sign, channel, inside)
    cc, sc = _angles(cos, sin, i + 2, table_batch, table_seq, seq, sign, channel, inside)
    cd, sd = _angles(cos, sin, i + 3, table_batch, table_seq, seq, sign, channel, inside)
    largest = tl.zeros((block // 4, width), tl.float32)
    for step in range(tl.minimum(turned, heads - part * turned)):
        head = part * turned + step
        a, e = _rotated(x, i, head, x_batch, x_seq, x_head, seq, ca, sa, channel, inside, half)
        b, f = _rotated(x, i + 1, head, x_batch, x_seq, x_head, seq, cb, sb, channel, inside, half)
        c, g = _rotated(x, i + 2, head, x_batch, x_seq, x_head, seq, cc, sc, channel, inside, half)
        d, h = _rotated(x, i + 3, head, x_batch, x_seq, x_head, seq, cd, sd, channel, inside, half)
        second = first + head * 2 * half + half
        j = second - half + channel
        one = store_fp8(a, b, c, d, s, group, j, rows, second, data, transposed, columns, E5M2)
        two = store_fp8(
            e, f, g, h, s, group, j + half, rows, second + half, data, transposed, columns, E5M2
        )
        largest = tl.maximum(largest, tl.maximum(one, two))
    raise_amax(amax, largest)
    note_inverse(s, scale_inv)


@triton.jit
def _gate_slopes(
    dy, x, logits, dx, i, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, dx_batch,
    dx_seq, dx_head, seq, channel, inside,
):  # fmt: skip
    slope = _read(_rows(dy, i, head, dy_batch, dy_seq, dy_head, seq), channel, inside)
    value = _read(_rows(x, i, head, x_batch, x_seq, x_head, seq), channel, inside)
    opening = sigmoid(_read(_rows(logits, i, head, g_batch, g_seq, g_head, seq), channel, inside))
    at = _rows(dx, i, head, dx_batch, dx_seq, dx_head, seq) + channel[None, :]
    tl.store(at, (slope * opening).to(dx.dtype.element_ty), mask=inside)
    return slope * value * opening * (1 - opening)


@triton.jit
def _gate_backward_fp8_kernel(
    dy, x, logits, dx, data, transposed, scale, amax, scale_inv,
    dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, dx_batch, dx_seq, dx_head,
    rows, seq, heads, columns, first,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, BAND: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    group, head, channel, inside = _place(rows, heads, dim, width, block, BAND)
    i = 4 * group
    own = first + head * dim
    a = _gate_slopes(dy, x, logits, dx, i, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside)  # fmt: skip
    b = _gate_slopes(dy, x, logits, dx, i + 1, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside)  # fmt: skip
    c = _gate_slopes(dy, x, logits, dx, i + 2, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside)  # fmt: skip
    d = _gate_slopes(dy, x, logits, dx, i + 3, head, dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq,
                     g_head, dx_batch, dx_seq, dx_head, seq, channel, inside)  # fmt: skip
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


def gate_fp8(out: FP8Data, place: Place, first: int, x: Tensor, logits: Tensor | None) -> None:
    """Write gated_attention.gate, or x itself where there are no logits, as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    gate = x if logits is None else logits
    _gate_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * heads,)](
        x, gate, *_of(out, place), *x.stride()[:3], *gate.stride()[:3],
        batch * seq, _even(seq, x, gate), heads, out.transposed.shape[0], first,
        gated=logits is not None, dim=dim, width=_width(dim), block=TOKENS, BAND=BAND, E5M2=place[2], num_warps=4,
    )  # fmt: skip


def rotate_fp8(
    out: FP8Data, place: Place, first: int, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> None:
    """Write gated_attention.rotate as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    cos, sin, *strides = _tables(cos, sin, x.stride()[:3])
    _rotate_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * triton.cdiv(heads, TURNED),)](
        x, cos, sin, *_of(out, place), *strides,
        batch * seq, seq, heads, out.transposed.shape[0], first, -1.0 if inverse else 1.0,
        half=dim // 2, width=_width(dim // 2), block=TOKENS, turned=TURNED, BAND=BAND, E5M2=place[2], num_warps=4,
    )  # fmt: skip


def gate_backward_fp8(
    out: FP8Data, place: Place, first: int, dy: Tensor, x: Tensor, logits: Tensor
) -> Tensor:
    """Compute gated_attention.gate_backward, with the gradient for the logits as FP8 into `out`."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    strides = [stride for tensor in (dy, x, logits, dx) for stride in tensor.stride()[:3]]
    _gate_backward_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * heads,)](
        dy, x, logits, dx, *_of(out, place), *strides, batch * seq, _even(seq, dy, x, logits, dx), heads,
        out.transposed.shape[0], first,
        dim=dim, width=_width(dim), block=TOKENS, BAND=BAND, E5M2=place[2], num_warps=4,
    )  # fmt: skip
    return dx


TRITON = Operations(
    rotate,
    copy,
    gate,
    gate_backward,
    FP8Operations(new_fp8, gate_fp8, rotate_fp8, gate_backward_fp8),
    spans,
)
