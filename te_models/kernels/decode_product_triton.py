"""The product of a step of decoding (decode.py) in Triton: norm, cast, te.Linear, activation and residual stream.

One or two tokens are multiplied here, without tensor cores: a tile of 16 rows would be mostly padding. Every program
makes the input anew, since the norm, the amax and the cast of two rows cost less than a kernel of their own. More
tokens, and large weights in FP8, are multiplied in decode_split_triton.py.

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
    """The rows of a weight that a program multiplies without tensor cores, the channels of one iteration, and warps."""

    outputs: int
    width: int
    warps: int


def _few_tile(gated: bool, normed: bool, fp8: bool) -> FewTile:
    """Return the tile of a product without tensor cores.

    Every program computes the norm of its input again, so a product with a norm has larger tiles and fewer programs.
    """
    # The fastest of 14 for most of eight shapes on an H100 (benchmarks/results/decode_tiles_h100.json).
    if fp8:
        return FewTile(8, 1024, 4) if normed else FewTile(2, 1024, 2)
    return FewTile(4, 1024, 4) if normed and not gated else FewTile(2, 2048, 4)


def _tile(gated: bool, normed: bool, fp8: bool) -> SplitTile:
    """Return the tile of a product with tensor cores."""
    # Within 4 % of the fastest of 17 to 35 for each product of llama-3.1-8b with 4, 8 and 16 tokens, on an H200
    # (benchmarks/results/decode_tiles_h200.json). FP8 tiles of 256 channels are as fast, but move sums to FP32 half as
    # often. BF16 without a norm has tiles of 16 outputs, too small for Hopper's WGMMA: they run as MMA.
    if fp8:
        if gated:
            return SplitTile(64, 128, 4, 4)
        return SplitTile(64, 128, 4, 4, 396) if normed else SplitTile(64, 128, 4, 6, 264)
    if gated:
        return SplitTile(64, 128, 4, 3)
    return SplitTile(64, 64, 4, 4, 396) if normed else SplitTile(16, 256, 2, 5)


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
    rows, width = x.shape
    gated = activation is not None and activation.gated
    normed = norm is not None
    fp8 = operand.weight_inverse is not None
    outputs = operand.weight.shape[0] // (1 + gated)
    x = x.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if tokens > FEW or (fp8 and operand.weight.numel() >= MANY_WEIGHTS):
        split_product(
            _tile(gated, normed, fp8),
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
