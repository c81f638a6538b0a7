"""The product of a step of decoding (decode.py) in Triton: norm, cast, te.Linear, activation and residual stream.

A product reads each weight once, with all rows of the step in one tile, and makes its input anew in every program: the
norm, the amax and the cast of a few rows cost less than a kernel of their own. FP8 values are multiplied as FP16, which
represents E4M3 exactly, and summed in FP32.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), in FP16, since it multiplies BF16 wrongly.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.decode import MOST_ROWS, StepActivation, StepLinear, StepNorm
from te_models.kernels.decode_parts_triton import (
    cast_e4m3,
    input_scales,
    input_tile,
    store_product,
)
from te_models.kernels.decode_split_triton import SplitTile, split_product

ROWS = MOST_ROWS
FEW = 2  # tokens up to which no tensor cores are used
CHUNK = 1024  # channels that are read at once for norms and amaxes


class Tile(NamedTuple):
    """The rows of a weight that a program multiplies, the channels of one iteration, warps and stages of its loop."""

    outputs: int
    width: int
    warps: int
    stages: int


def _few_tile(gated: bool, normed: bool, fp8: bool) -> Tile:
    """Return the tile of a product without tensor cores.

    Every program computes the norm of its input again, so a product with a norm has larger tiles and fewer programs.
    """
    # The fastest of 14 for most of eight shapes on an H100 (benchmarks/results/decode_tiles_h100.json).
    if fp8:
        return Tile(8, 1024, 4, 1) if normed else Tile(2, 1024, 2, 1)
    return Tile(4, 1024, 4, 1) if normed and not gated else Tile(2, 2048, 4, 1)


# Tiles of a product with tensor cores. The fastest of 11, measured with the tiles above; a SplitTile in place of a Tile
# lets decode_split_triton.py compute it.
BF16_TILES: dict[str, Tile | SplitTile] = {
    "gated": Tile(64, 128, 8, 3),
    "normed": Tile(32, 256, 4, 3),
    "plain": Tile(16, 256, 2, 5),
}
FP8_TILES: dict[str, Tile | SplitTile] = {
    "gated": Tile(64, 128, 8, 3),
    "normed": Tile(32, 256, 4, 3),
    "plain": Tile(32, 256, 4, 3),
}


def _tile(gated: bool, normed: bool, fp8: bool) -> Tile | SplitTile:
    """Return the tile of a product with tensor cores."""
    tiles = FP8_TILES if fp8 else BF16_TILES
    if gated:
        return tiles["gated"]
    return tiles["normed"] if normed else tiles["plain"]


@triton.jit
def _sums(first, j, o, v, width, outputs, FP8: tl.constexpr):
    """Return the sums over channels j of v [T, WIDTH] times these rows of a weight: [T, O]."""
    inside = (o < outputs)[:, None] & (j < width)[None, :]
    w = tl.load(first + j[None, :], inside, 0)
    if FP8:
        w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.sum(w.to(tl.float32)[None, :, :] * v[:, None, :], 2)


@triton.jit
def _few_kernel(
    x,
    norm,
    weight,
    bias,
    weight_inverse,
    input_scale,
    residual,
    out,
    rows,
    tokens,
    width,
    outputs,
    eps,
    epsilon,
    factor,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The product of a few tokens, without tensor cores: weights go from memory to registers."""
    dtype = out.dtype.element_ty
    t = tl.arange(0, TOKENS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inverse, scale = input_scales(
        x, norm, input_scale, t, tokens, width, eps, epsilon, NORM, CENTERED, FP8, POWER_OF_2, CHUNK
    )
    first = weight + o.to(tl.int64)[:, None] * width
    second = first + outputs.to(tl.int64) * width  # the rows of `up`, where there is a gate
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    up = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for at in range(0, width, WIDTH):
        j = at + tl.arange(0, WIDTH)
        v = input_tile(x, j, t, tokens, width, inverse, norm, NORM, CENTERED)
        if FP8:
            v = cast_e4m3(v, scale)
        v = v.to(tl.float32)
        sums += _sums(first, j, o, v, width, outputs, FP8)
        if GATED:
            up += _sums(second, j, o, v, width, outputs, FP8)
    if FP8:
        back = tl.load(weight_inverse) * tl.div_rn(1.0, scale)
        sums *= back
        up *= back
    store_product(
        sums,
        up,
        bias,
        residual,
        out,
        t[:, None],
        o[None, :],
        tokens,
        tokens,
        outputs,
        factor,
        ACTIVATION,
        GATED,
        SCALED,
        dtype,
    )
    # Rows after the tokens: the modules that read the result take zeros there.
    padding = tokens + tl.arange(0, ROWS)[:, None]
    blank = tl.zeros([ROWS, OUTPUTS], dtype)
    inside = (padding < rows) & (o < outputs)[None, :]
    tl.store(out + padding * outputs + o[None, :], blank, inside)


@triton.jit
def _product_kernel(
    x,
    norm,
    weight,
    bias,
    weight_inverse,
    input_scale,
    residual,
    out,
    rows,
    tokens,
    width,
    outputs,
    eps,
    epsilon,
    factor,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    dtype = out.dtype.element_ty
    i = tl.arange(0, ROWS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    channel = tl.arange(0, WIDTH)

    inverse, scale = input_scales(
        x,
        norm,
        input_scale,
        i,
        tokens,
        width,
        eps,
        epsilon,
        NORM,
        CENTERED,
        FP8,
        POWER_OF_2,
        WIDTH,
    )
    first = weight + o.to(tl.int64)[:, None] * width
    second = first + outputs.to(tl.int64) * width  # the rows of `up`, where there is a gate
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in range(0, width, WIDTH):
        j = at + channel
        inside = (o < outputs)[:, None] & (j < width)[None, :]
        v = input_tile(x, j, i, tokens, width, inverse, norm, NORM, CENTERED)
        w = tl.load(first + j[None, :], inside, 0)
        if FP8:
            v = cast_e4m3(v, scale)
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        v = tl.trans(v)
        sums += tl.dot(w, v, input_precision="ieee")
        if GATED:
            w = tl.load(second + j[None, :], inside, 0)
            if FP8:
                w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            up += tl.dot(w, v, input_precision="ieee")

    if FP8:
        back = tl.load(weight_inverse) * tl.div_rn(1.0, scale)
        sums *= back
        up *= back
    store_product(
        sums,
        up,
        bias,
        residual,
        out,
        i[None, :],
        o[:, None],
        rows,
        tokens,
        outputs,
        factor,
        ACTIVATION,
        GATED,
        SCALED,
        dtype,
    )


def product(
    x: Tensor,
    operand: StepLinear,
    tokens: int,
    *,
    norm: StepNorm | None = None,
    activation: StepActivation | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return the te.Linear `operand` of x [N, I], whose first `tokens` rows are not padding: [N, O].

    Args:
        x: at most MOST_ROWS rows.
        norm: runs on x before.
        activation: runs on the product; with a gate the result has half the channels.
        residual: [N, O], added last.
        factor: what the product is multiplied by before the residual stream is added.
    """
    rows = x.shape[0]
    gated = activation is not None and activation.gated
    normed = norm is not None
    fp8 = operand.weight_inverse is not None
    outputs = operand.weight.shape[0] // (1 + gated)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    arguments = _common_arguments(x, operand, out, tokens, norm, activation, residual, factor)
    if tokens <= FEW:
        few = _few_tile(gated, normed, fp8)
        _few_kernel[(triton.cdiv(outputs, few.outputs),)](
            **arguments,
            TOKENS=triton.next_power_of_2(tokens),
            OUTPUTS=few.outputs,
            WIDTH=few.width,
            CHUNK=CHUNK,
            num_warps=few.warps,
        )
        return out
    tile = _tile(gated, normed, fp8)
    if isinstance(tile, SplitTile):
        split_product(
            tile,
            x,
            operand,
            out,
            tokens,
            norm=norm,
            activation=activation,
            residual=residual,
            factor=factor,
        )
        return out
    _product_kernel[(triton.cdiv(outputs, tile.outputs),)](
        **arguments,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _common_arguments(
    x: Tensor,
    operand: StepLinear,
    out: Tensor,
    tokens: int,
    norm: StepNorm | None,
    activation: StepActivation | None,
    residual: Tensor | None,
    factor: float,
) -> dict[str, Any]:
    """Return the arguments, by name, that the kernels with and without tensor cores have in common."""
    return dict(
        x=x.contiguous(),
        norm=None if norm is None else norm.weight,
        weight=operand.weight,
        bias=operand.bias,
        weight_inverse=operand.weight_inverse,
        input_scale=operand.input_scale,
        residual=residual,
        out=out,
        rows=x.shape[0],
        tokens=tokens,
        width=x.shape[1],
        outputs=out.shape[1],
        eps=0.0 if norm is None else norm.eps,
        epsilon=operand.epsilon,
        factor=factor,
        NORM=norm is not None,
        CENTERED=norm is not None and norm.zero_centered,
        FP8=operand.weight_inverse is not None,
        POWER_OF_2=operand.power_of_2,
        ACTIVATION=None if activation is None else activation.name,
        GATED=activation is not None and activation.gated,
        SCALED=factor != 1.0,
        ROWS=ROWS,
    )
