"""The product of a step of decoding (decode.py) in Triton: norm, cast, te.Linear, activation and residual stream.

One or two tokens are multiplied here, without tensor cores, whose tiles of 16 rows would be mostly padding. Every
program norms and casts the whole input, since for two rows that costs less than a kernel of its own. More tokens, and
large weights in FP8, are multiplied in decode_split_triton.py.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), in FP16, since it multiplies BF16 wrongly.
"""

from typing import NamedTuple

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

FEW = 2  # tokens up to which no tensor cores are used
# FP8 weights from which they are used for a single token, too: converting so many takes longer than reading them. At
# the shapes of llama-3.1-8b, whose smallest has as many, a product of one token took 27.1 microseconds without tensor
# cores on average, and one of eight tokens 19.6 with them (H200; one token with them was not timed).
MANY_WEIGHTS = 2**24
CHUNK = 1024  # channels that are read at once for norms and amaxes


class FewTile(NamedTuple):
    """How a product without tensor cores is divided.

    Attributes:
        outputs: rows of the weight, so output channels, per program.
        width: input channels per iteration.
        warps: warps per program.
    """

    outputs: int
    width: int
    warps: int


def _few_tile(gated: bool, normed: bool, fp8: bool) -> FewTile:
    """Return the tile of a product without tensor cores.

    Every program computes the norm of its input again, so a product with a norm has larger tiles and fewer programs.
    """
    # The fastest of 14 for most of eight shapes on an H100 (benchmarks/results/decode_tiles_h100.json).
    if fp8 and normed:
        return FewTile(outputs=8, width=1024, warps=4)
    if fp8:
        return FewTile(outputs=2, width=1024, warps=2)
    if normed and not gated:
        return FewTile(outputs=4, width=1024, warps=4)
    return FewTile(outputs=2, width=2048, warps=4)


def _split_tile(gated: bool, normed: bool, fp8: bool) -> SplitTile:
    """Return the tile of a product with tensor cores."""
    # Within 4 % of the fastest of 17 to 35 for each product of llama-3.1-8b with 4, 8 and 16 tokens, on an H200
    # (benchmarks/results/decode_tiles_h200.json). FP8 tiles of 256 channels are as fast, but move sums to FP32 half as
    # often. BF16 without a norm has tiles of 16 outputs, too small for Hopper's WGMMA: they run as MMA.
    if fp8:
        if gated:
            return SplitTile(outputs=64, width=128, warps=4, stages=4)
        if normed:
            return SplitTile(outputs=64, width=128, warps=4, stages=4, programs=396)
        return SplitTile(outputs=64, width=128, warps=4, stages=6, programs=264)
    if gated:
        return SplitTile(outputs=64, width=128, warps=4, stages=3)
    if normed:
        return SplitTile(outputs=64, width=64, warps=4, stages=4, programs=396)
    return SplitTile(outputs=16, width=256, warps=2, stages=5)


@triton.jit
def _partial_product(weight_rows, j, o, v, width, outputs, FP8: tl.constexpr):
    """Return v [T, WIDTH], channels j of the input, times the weight's rows at `weight_rows` [O, 1]: FP32 [T, O]."""
    mask = (o < outputs)[:, None] & (j < width)[None, :]
    w = tl.load(weight_rows + j[None, :], mask, 0)
    if FP8:
        w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.sum(w.to(tl.float32)[None, :, :] * v[:, None, :], 2)


@triton.jit
def _few_kernel(
    # the input [N, I], and the weight of its norm [I]
    x,
    norm,
    # the fields of StepLinear
    weight,
    bias,
    weight_inverse,
    input_scale,
    # the residual stream to add [N, O] or None, and the output [N, O]
    residual,
    out,
    # N, the rows that are tokens, I and O
    rows,
    tokens,
    width,
    outputs,
    # added to the mean square of the norm, the smallest amax of a scale, and the factor before the residual stream
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
    """Write OUTPUTS channels of the product of a few tokens, without tensor cores: weights go straight to registers."""
    dtype = out.dtype.element_ty
    t = tl.arange(0, TOKENS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inverse_rms, scale = input_scales(
        x,
        norm,
        input_scale,
        t,
        tokens,
        width,
        eps,
        epsilon,
        NORM=NORM,
        CENTERED=CENTERED,
        FP8=FP8,
        POWER_OF_2=POWER_OF_2,
        CHUNK=CHUNK,
    )
    weight_rows = weight + o.to(tl.int64)[:, None] * width
    up_rows = weight_rows + outputs.to(tl.int64) * width  # below the gate's rows, if GATED
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    up_sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, width, WIDTH):
        j = start + tl.arange(0, WIDTH)
        v = input_tile(x, j, t, tokens, width, inverse_rms, norm, NORM, CENTERED)
        if FP8:
            v = cast_e4m3(v, scale)
        v = v.to(tl.float32)
        sums += _partial_product(weight_rows, j, o, v, width, outputs, FP8)
        if GATED:
            up_sums += _partial_product(up_rows, j, o, v, width, outputs, FP8)
    if FP8:
        dequantize = tl.load(weight_inverse) * tl.div_rn(1.0, scale)
        sums *= dequantize
        up_sums *= dequantize
    store_product(
        sums,
        up_sums,
        bias,
        residual,
        out,
        t[:, None],
        o[None, :],
        tokens,
        tokens,
        outputs,
        factor,
        ACTIVATION=ACTIVATION,
        GATED=GATED,
        SCALED=SCALED,
        dtype=dtype,
    )
    # Rows after the tokens are padding: the modules that read the result expect zeros there.
    padding = tokens + tl.arange(0, ROWS)[:, None]
    zeros = tl.zeros([ROWS, OUTPUTS], dtype)
    mask = (padding < rows) & (o < outputs)[None, :]
    tl.store(out + padding * outputs + o[None, :], zeros, mask)


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
    """Return the output of a te.Linear [N, O] in the dtype of x, with the operations around it.

    Args:
        x: [N, I], N at most MOST_ROWS.
        operand: the te.Linear.
        tokens: the first rows of x, which are no padding; the result has zeros in the others.
        norm: applied to x first; None: none.
        activation: applied to the product; a gated one halves the channels: O is half the rows of the weight.
        residual: the residual stream [N, O], added last; None: nothing is added.
        factor: multiplies the product before the residual stream is added.
    """
    rows, width = x.shape
    gated = activation is not None and activation.gated
    normed = norm is not None
    fp8 = operand.weight_inverse is not None
    outputs = operand.weight.shape[0] // (1 + gated)
    x = x.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if tokens > FEW or (fp8 and operand.weight.numel() >= MANY_WEIGHTS):
        split_product(
            _split_tile(gated, normed, fp8),
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
    tile = _few_tile(gated, normed, fp8)
    _few_kernel[(triton.cdiv(outputs, tile.outputs),)](
        x=x,
        norm=None if norm is None else norm.weight,
        weight=operand.weight,
        bias=operand.bias,
        weight_inverse=operand.weight_inverse,
        input_scale=operand.input_scale,
        residual=residual,
        out=out,
        rows=rows,
        tokens=tokens,
        width=width,
        outputs=outputs,
        eps=0.0 if norm is None else norm.eps,
        epsilon=operand.epsilon,
        factor=factor,
        NORM=normed,
        CENTERED=norm is not None and norm.zero_centered,
        FP8=fp8,
        POWER_OF_2=operand.power_of_2,
        ACTIVATION=None if activation is None else activation.name,
        GATED=gated,
        SCALED=factor != 1.0,
        ROWS=MOST_ROWS,
        TOKENS=triton.next_power_of_2(tokens),
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        CHUNK=CHUNK,
        num_warps=tile.warps,
    )
    return out
