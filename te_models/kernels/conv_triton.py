"""The causal depthwise convolution of a recurrent mixer with its SiLU in Triton, and its backward in one pass.

torch.compile computes the same numbers (te_models.kernels.elementwise.mixed_parts), but its backward stores gradients
of the sums in FP32 and reads them once per tap; here a program computes them again for the few tokens that it needs.

    s_t = bias + sum over a < K of taps[K - 1 - a] x_(t - a),    y_t = silu(s_t)
    dx_t = sum over a of taps[K - 1 - a] ds_(t + a),             dtaps[K - 1 - a] = sum over t of ds_t x_(t - a)

A token sees only tokens of its own row, and its own document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels.fp8_tiles_triton import sigmoid
from te_models.kernels.gradient_room import Slot, empty


class ConvTile(NamedTuple):
    """The part of a convolution that one program computes."""

    rows: int  # tokens at a time
    columns: int  # channels
    steps: int  # tiles of tokens, in the backward pass
    warps: int


# Whether there are documents -> the fastest of seven tiles on an H200. For 12,288 tokens of 8,192 channels forward and
# backward take 0.16 and 0.71 ms without documents, and backward 1.16 with them.
TILES = {False: ConvTile(8, 64, 16, 2), True: ConvTile(16, 128, 8, 4)}
MOST_TAPS = 4


@triton.jit
def _inside(token, seq):
    return (token >= 0) & (token < seq)


@triton.jit
def _seen(documents, token, back: tl.constexpr, seq):
    """Return whether tokens see the one `back` places before, of the same row and document."""
    seen = _inside(token, seq) & _inside(token - back, seq)
    if documents is not None:
        document = tl.load(documents + token, seen, 0)
        seen = seen & (document == tl.load(documents + (token - back), seen, 0))
    return seen


@triton.jit
def _channels(x, stride, token, column, seen, columns):
    """Return x [tokens, channels] in FP32, zero where not `seen`."""
    inside = seen[:, None] & (column < columns)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride + column[None, :], inside, 0.0).to(
        tl.float32
    )


@triton.jit
def _sums(x, stride, taps, bias, documents, token, column, seq, columns, TAPS: tl.constexpr):
    """Return the sums over taps at these tokens, FP32."""
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    for back in tl.static_range(TAPS):
        seen = _seen(documents, token, back, seq)
        tap = tl.load(taps + column * TAPS + (TAPS - 1 - back), column < columns, 0.0)
        earlier = _channels(x, stride, token - back, column, seen, columns)
        total += earlier * tap.to(tl.float32)[None, :]
    return total


@triton.jit
def _place(seq, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's row of the batch, its tile of tokens, and its channels.

    All are numbered in the first dimension of the grid, since the others have 65,535 programs at most.
    """
    blocks = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(seq, ROWS)
    block = tl.program_id(0) % blocks
    number = tl.program_id(0) // blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    return (number // tiles).to(tl.int64), number % tiles, column


@triton.jit
def _conv_kernel(
    # x [B, S, columns], whose rows are `stride` and batches `batch_stride` elements apart; taps [columns, TAPS]; bias
    # [columns] or None; documents [B, S] or None; the output, contiguous [B, S, columns]
    x,
    taps,
    bias,
    documents,
    out,
    batch_stride,
    stride,
    seq,
    columns,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the convolution over earlier tokens, and SiLU of it, for a tile of tokens and channels."""
    row, tile, column = _place(seq, columns, ROWS, COLUMNS)
    token = tile * ROWS + tl.arange(0, ROWS)
    if documents is not None:
        documents += row * seq
    x += row * batch_stride
    total = _sums(x, stride, taps, bias, documents, token, column, seq, columns, TAPS)
    value = total * sigmoid(total)
    place = (row * seq + token)[:, None] * columns + column[None, :]
    inside = (token < seq)[:, None] & (column < columns)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), inside)


@triton.jit
def _conv_backward_kernel(
    # as above, and the gradient of the output with its strides
    x,
    taps,
    bias,
    documents,
    dy,
    # to write: the gradient of x with its strides, and this program's parts of the gradients of taps
    # [programs, columns, TAPS] and bias [programs, columns], FP32; the last is None without a bias
    dx,
    dtaps,
    dbias,
    batch_stride,
    stride,
    dy_batch_stride,
    dy_stride,
    dx_batch_stride,
    dx_stride,
    seq,
    columns,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write the gradient of x for some tokens and channels, and partial sums of the gradients of taps and bias."""
    row, tile, column = _place(seq, columns, ROWS * STEPS, COLUMNS)
    if documents is not None:
        documents += row * seq
    x += row * batch_stride
    dy += row * dy_batch_stride
    dx += row * dx_batch_stride
    parts = (row * tl.cdiv(seq, ROWS * STEPS) + tile) * columns
    # Summed over tokens at the end, since such a sum synchronizes the threads. Triton's loops change no list, hence a
    # name for each tap.
    of_first = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_second = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_third = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_fourth = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        token = (tile * STEPS + step) * ROWS + tl.arange(0, ROWS)
        slope = tl.zeros([ROWS, COLUMNS], tl.float32)
        for ahead in tl.static_range(TAPS):
            later = token + ahead
            total = _sums(x, stride, taps, bias, documents, later, column, seq, columns, TAPS)
            sigma = sigmoid(total)
            of_total = _channels(dy, dy_stride, later, column, _inside(later, seq), columns)
            of_total *= sigma * (1 + total * (1 - sigma))
            tap = tl.load(taps + column * TAPS + (TAPS - 1 - ahead), column < columns, 0.0)
            seen = _seen(documents, later, ahead, seq)
            slope += tl.where(seen[:, None], of_total * tap.to(tl.float32)[None, :], 0.0)
            if ahead == 0:
                of_bias += of_total
                for back in tl.static_range(TAPS):
                    seen = _seen(documents, token, back, seq)
                    product = of_total * _channels(x, stride, token - back, column, seen, columns)
                    if back == 0:
                        of_first += product
                    elif back == 1:
                        of_second += product
                    elif back == 2:
                        of_third += product
                    else:
                        of_fourth += product
        inside = (token < seq)[:, None] & (column < columns)[None, :]
        place = token.to(tl.int64)[:, None] * dx_stride + column[None, :]
        tl.store(dx + place, slope.to(dx.dtype.element_ty), inside)
    exists = column < columns
    place = dtaps + (parts + column) * TAPS + TAPS - 1
    tl.store(place, tl.sum(of_first, 0), exists)
    if TAPS > 1:
        tl.store(place - 1, tl.sum(of_second, 0), exists)
    if TAPS > 2:
        tl.store(place - 2, tl.sum(of_third, 0), exists)
    if TAPS > 3:
        tl.store(place - 3, tl.sum(of_fourth, 0), exists)
    if dbias is not None:
        tl.store(dbias + parts + column, tl.sum(of_bias, 0), exists)


def conv(
    x: Tensor, taps: Tensor, bias: Tensor | None, documents: Tensor | None, sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return silu(convolution) of x [B, S, C] in contiguous parts of these many channels, in the dtype of x.

    Args:
        x: its last dimension is contiguous.
        taps: contiguous [C, 1, K], K at most MOST_TAPS.
        bias: [C].
        documents: contiguous, int [B, S].
        sizes: sum to C.
    """
    batch, seq, _ = x.shape
    tile = TILES[documents is not None]
    outputs = []
    first = 0
    for size in sizes:
        out = torch.empty(batch, seq, size, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(size, tile.columns) * triton.cdiv(seq, tile.rows) * batch,)
        _conv_kernel[grid](
            x[..., first:],
            taps[first:],
            None if bias is None else bias[first:],
            documents,
            out,
            x.stride(0),
            x.stride(1),
            seq,
            size,
            TAPS=taps.shape[2],
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
        outputs.append(out)
        first += size
    return tuple(outputs)


def conv_backward(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    slopes: tuple[Tensor, ...],
    dx: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of x [B, S, C] into dx, and return the gradients of taps and bias.

    Args:
        x, taps, bias, documents: as in `conv`.
        slopes: gradients of the outputs.
        dx: any strides, the last dimension contiguous.
    """
    batch, seq, _ = x.shape
    tile = TILES[documents is not None]
    high = triton.cdiv(seq, tile.rows * tile.steps)
    fp32: dict[str, Any] = dict(dtype=torch.float32, device=x.device)
    # Summed over programs at the end: atomic additions would come in another order each time.
    of_taps = []
    of_bias = []
    first = 0
    for dy in slopes:
        size = dy.shape[2]
        if dy.stride(2) != 1:
            dy = dy.contiguous()
        own_taps = torch.empty(batch * high, size, taps.shape[2], **fp32)
        own_bias = None if bias is None else torch.empty(batch * high, size, **fp32)
        _conv_backward_kernel[(triton.cdiv(size, tile.columns) * high * batch,)](
            x[..., first:],
            taps[first:],
            None if bias is None else bias[first:],
            documents,
            dy,
            dx[..., first:],
            own_taps,
            own_bias,
            x.stride(0),
            x.stride(1),
            dy.stride(0),
            dy.stride(1),
            dx.stride(0),
            dx.stride(1),
            seq,
            size,
            TAPS=taps.shape[2],
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            STEPS=tile.steps,
            num_warps=tile.warps,
        )
        of_taps.append(own_taps.sum(0))
        if own_bias is not None:
            of_bias.append(own_bias.sum(0))
        first += size
    dtaps = torch.cat(of_taps)[:, None].to(taps.dtype)
    if bias is None:
        return dtaps, None
    return dtaps, torch.cat(of_bias).to(bias.dtype)


class _MixedParts(torch.autograd.Function):
    """`conv`, which keeps only its inputs."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        taps: Tensor,
        documents: Tensor | None,
        bias: Tensor | None,
        sizes: tuple[int, ...],
        slot: Slot | None,
    ) -> tuple[Tensor, ...]:
        ctx.slot = slot
        ctx.save_for_backward(x, taps, documents, bias)
        with torch.cuda.device_of(x):
            return conv(x, taps, bias, documents, sizes)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, documents, bias = ctx.saved_tensors
        dx = empty(ctx.slot, x)
        with torch.cuda.device_of(x):
            dtaps, dbias = conv_backward(x, taps, bias, documents, grads, dx)
        return dx, dtaps, None, dbias, None, None


def mixed_parts(
    plain: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    documents: Tensor | None,
    bias: Tensor | None = None,
    *,
    sizes: tuple[int, ...],
    activation: str,
    slot: Slot | None = None,
) -> tuple[Tensor, ...]:
    """Return te_models.kernels.elementwise.mixed_parts; `plain` computes what these kernels do not.

    They are for training in 16 bits with SiLU and a few taps. `slot` is where the gradient of x belongs.
    """
    trains = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    suits = x.dtype.itemsize == 2 and activation == "silu" and taps.shape[2] <= MOST_TAPS
    if tail is not None or not (trains and suits):
        return plain(x, tail, taps, documents, bias, sizes=sizes, activation=activation)
    if x.stride(2) != 1:
        x = x.contiguous()
    documents = None if documents is None else documents.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _MixedParts.apply(x, taps.contiguous(), documents, bias, tuple(sizes), slot)
