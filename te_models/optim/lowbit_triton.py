"""AdamW with 8-bit moments in Triton: one kernel per tensor reads its moments, updates it, and writes them back.

The result is torchao's but for rounding in FP32, and the state has its format. torchao's compiled update searches the
table of 8-bit values with nine dependent loads per element; here the position of a value follows from its logarithm,
and one load decides between two neighbors. Tensors too small for 8 bits are updated by the same kernel.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torchao.optim.quant_utils import create_dynamic_map
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from te_models.numerics.fp8_triton import decode_fp8, encode_fp8

Moment = Tensor | OptimState8bit | OptimStateFp8
BLOCK = 256  # elements that share a scale, as in torchao
# Blocks that a program updates, and its warps: the fastest of seven choices on an H200.
ROWS = 4
WARPS = 4
E4M3_MAX = tl.constexpr(448.0)
LOG10_2 = tl.constexpr(0.30102999566398120)
LOG2_5 = tl.constexpr(2.3219280948873623)
# log2(1e6 / 0.9): steps of the smallest decade per unit.
LOG2_FIRST = tl.constexpr(20.083571661209888)


@triton.jit
def _nearest(x, middles, SIGNED: tl.constexpr):
    """Return the codes of the values of the dynamic map that are nearest to `x`, whose magnitudes are at most 1.

    The map has seven decades below 1, each with twice the values of the one before, evenly spaced (Dettmers 2015, arXiv
    1511.04561). `level` counts values from zero and is right or, between two decades, one too large. `middles[i]` is
    the middle between the values of codes i - 1 and i.
    """
    size = tl.minimum(tl.maximum(tl.abs(x), 1e-7), 1.0)
    decade = tl.minimum(tl.maximum(tl.floor(tl.log2(size) * LOG10_2) + 7, 0), 6)
    steps = tl.exp2(decade)  # values of the decade, where there are signs
    slope = tl.exp2(decade * -LOG2_5 + LOG2_FIRST)  # the number of them per unit
    if SIGNED:
        level = tl.floor(size * slope + steps * (8 / 9) + 1 / 512)
        # 1 itself is a value beyond the last decade's evenly spaced ones.
        level = tl.where(size > 0.995, 128, level).to(tl.int32)
        up = tl.minimum(127 + level, 255)
        down = tl.maximum(128 - level, 1)
        positive = x >= 0
        edge = tl.load(middles + tl.where(positive, up, down))
        return tl.where(positive, up - (x < edge).to(tl.int32), down - (x < edge).to(tl.int32))
    level = tl.floor(2 * (size * slope + steps * (8 / 9)) + 1 / 512) - 1
    code = tl.minimum(tl.where(size > 0.995, 255, level).to(tl.int32), 255)
    return code - (x < tl.load(middles + code)).to(tl.int32)


@triton.jit
def _load_moment(codes, scales, values, row, exists, at, here, FORMAT: tl.constexpr):
    """Return a moment in FP32 [ROWS, BLOCK], of the elements `at` of the rows `row`.

    `exists` [ROWS] and `here` [ROWS, BLOCK] are True inside the tensor; `values` [256] are the numbers of the codes.
    """
    moment = tl.load(codes + at, here)
    if FORMAT == "plain":
        return moment.to(tl.float32)
    value = (
        tl.load(values + moment.to(tl.int32), here)
        if FORMAT == "dynamic"
        else decode_fp8(moment, False)
    )
    return value * tl.load(scales + row, exists)[:, None]


@triton.jit
def _store_moment(
    moment,
    codes,
    scales,
    middles,
    row,
    exists,
    at,
    here,
    FORMAT: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Quantize a moment, FP32 [ROWS, BLOCK], with one scale per row, and store it; see `_load_moment`."""
    if FORMAT == "plain":
        tl.store(codes + at, moment.to(codes.dtype.element_ty), here)
    else:
        # Not zero for a block of zeros, since the block is divided by it.
        scale = tl.maximum(tl.max(tl.abs(moment), 1), 1e-12)
        if FORMAT == "dynamic":
            code = _nearest(moment * (1 / scale)[:, None], middles, SIGNED).to(tl.uint8)
        else:
            scale = scale / E4M3_MAX
            code = encode_fp8(moment * (1 / scale)[:, None], False)
        tl.store(codes + at, code, here)
        tl.store(scales + row, scale, exists)


@triton.jit
def _stochastic_bf16(x, at, seed):
    """Round up or down to BF16 at random, with probabilities that make the expected value x."""
    bits = at.to(tl.uint32) ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D  # a hash of 32 bits with little bias (Wellons 2018)
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0xFFFF
    rounded = ((x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # the sum would overflow for some NaNs


@triton.jit(do_not_specialize=["seed"])
def _update_kernel(
    # parameter and gradient [size]
    p,
    grad,
    # moments: codes [size], and scales FP32 [size / BLOCK]
    first,
    first_scale,
    second,
    second_scale,
    # values and middles of the dynamic maps (`_tables`)
    signed,
    signed_middles,
    unsigned,
    unsigned_middles,
    # of stochastic rounding
    seed,
    size,
    # lr * weight decay; lr / bias correction of the first moment; 1 / root of the second's
    decay,
    rate,
    beta1,
    beta2,
    root2,
    eps,
    # "plain", "dynamic" or "fp8"
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update ROWS blocks of a parameter and of its moments."""
    # [ROWS, BLOCK]: a row is a block of elements with one scale.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = row * BLOCK < size
    here = at < size
    g = tl.load(grad + at, here, 0.0).to(tl.float32)
    x = tl.load(p + at, here, 0.0).to(tl.float32)
    m = _load_moment(first, first_scale, signed, row, exists, at, here, FORMAT)
    v = _load_moment(second, second_scale, unsigned, row, exists, at, here, FORMAT)
    # FP32 in registers; memory has the 8-bit codes only, before and after.
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    _store_moment(m, first, first_scale, signed_middles, row, exists, at, here, FORMAT, True)
    _store_moment(v, second, second_scale, unsigned_middles, row, exists, at, here, FORMAT, False)
    # Decoupled from the gradient's step, as AdamW has it; `rate` contains the bias correction of m, `root2` of v.
    x -= decay * x
    x -= rate * m / (tl.sqrt(v) * root2 + eps)
    if STOCHASTIC:
        x = _stochastic_bf16(x, at, seed)
    tl.store(p + at, x.to(p.dtype.element_ty), here)


@functools.cache
def _tables(device: torch.device) -> list[Tensor]:
    """Return values and middles of the signed map, then of the unsigned one, FP32 [256]; middles[0] is unused."""
    tables = []
    for signed in (True, False):
        # torchao's own map, so that its checkpoints load here and ours there.
        values = torch.tensor(create_dynamic_map(signed))
        # A value is nearest to the code whose middles enclose it.
        middles = torch.cat([values[:1], (values[1:] + values[:-1]) / 2])
        tables += [values.to(device), middles.to(device)]
    return tables


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of one step of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on one tensor."""

    number: int  # from 1
    seed: int  # of stochastic rounding, from 0 to 2**31 - 1
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def update(
    parameter: Tensor,
    gradient: Tensor,
    first: Moment,
    second: Moment,
    step: AdamWStep,
    stochastic: bool,
) -> None:
    """Update a contiguous parameter and its moments in place, from a gradient of the same shape.

    Args:
        first: first moment: a tensor like the parameter, or torchao's OptimState8bit or OptimStateFp8.
        second: second moment, of the same kind.
        stochastic: round a BF16 parameter stochastically.
    """
    if not parameter.numel():
        return
    if hasattr(first, "qmap"):
        kind = "dynamic"
    elif hasattr(first, "codes"):
        kind = "fp8"
    else:
        kind = "plain"
    stochastic = stochastic and parameter.dtype == torch.bfloat16
    device = parameter.device
    first_codes, first_scale = _stored(first, parameter)
    second_codes, second_scale = _stored(second, parameter)
    signed, signed_middles, unsigned, unsigned_middles = _tables(device)
    # On the host, since they are the same for all elements.
    bias1 = 1 - step.beta1**step.number
    bias2 = 1 - step.beta2**step.number
    with torch.cuda.device_of(parameter):
        _update_kernel[(triton.cdiv(parameter.numel(), ROWS * BLOCK),)](
            p=parameter,
            grad=gradient.contiguous(),
            first=first_codes,
            first_scale=first_scale,
            second=second_codes,
            second_scale=second_scale,
            signed=signed,
            signed_middles=signed_middles,
            unsigned=unsigned,
            unsigned_middles=unsigned_middles,
            seed=step.seed,
            size=parameter.numel(),
            decay=step.lr * step.weight_decay,
            rate=step.lr / bias1,
            beta1=step.beta1,
            beta2=step.beta2,
            root2=bias2**-0.5,
            eps=step.eps,
            FORMAT=kind,
            STOCHASTIC=stochastic,
            ROWS=ROWS,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _stored(moment: Any, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a moment as bytes, and its scales; of a moment in FP32 its values, and any tensor."""
    if hasattr(moment, "codes"):
        return moment.codes.view(torch.uint8), moment.scale
    # The kernel needs a pointer for the scales, but does not read it.
    return moment, parameter
