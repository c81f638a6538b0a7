"""The product of three tokens or more in a step of decoding (decode.py) in Triton, on tensor cores.

If every program made the input anew and converted its weights from E4M3 to FP16, an FP8 product of so many tokens would
take longer than reading its weights. So one kernel norms and casts the input, and a second multiplies it as it is
stored: operands in E4M3, which go from memory to shared memory and from there to Hopper's tensor cores, without an
instruction for a single weight. Its sums over one tile's channels are moved to FP32, since the tensor cores add E4M3's
products with fewer bits. The channels are divided among programs where the outputs alone are too few to fill a GPU;
the last program of a tile adds the parts in order, so that results are the same in every run.

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
    current_scale,
    input_scales,
    input_tile,
    store_product,
)
from te_models.numerics.fp8_triton import INTERPRETED, decode_fp8, encode_fp8

CHUNK = 4096  # channels that a program of the first kernel reads at once
LINE = 1024  # counters that it sets to zero at once


class SplitTile(NamedTuple):
    """How a product is divided.

    Attributes:
        outputs: the rows of a weight that a program multiplies.
        width: the channels of one iteration, whose FP8 products the tensor cores add with about 14 bits.
        warps, stages: of the loop over channels.
        programs: how many there should be; where the outputs give fewer, channels are divided too (parts_of).
    """

    outputs: int
    width: int
    warps: int
    stages: int
    programs: int = 1


def parts_of(tile: SplitTile, width: int, outputs: int) -> int:
    """Return how many programs divide the channels of one tile of outputs among themselves."""
    tiles = triton.cdiv(outputs, tile.outputs)
    iterations = triton.cdiv(width, tile.width)
    return max(1, min(round(tile.programs / tiles), iterations))


class Prepared(NamedTuple):
    """The output of the first kernel, which the second reads.

    Attributes:
        values: [N, I], the input after its norm: E4M3 as uint8 if `cast`, otherwise in the dtype of the model.
        cast: whether it is cast; under current scaling it is not, since no scale is known before all rows are.
        largest: FP32 [N], the amax of each row, under current scaling.
        arrived: int32 [tiles], zeros: how many parts of a tile are done; None: there is one.
    """

    values: Tensor
    cast: bool
    largest: Tensor | None
    arrived: Tensor | None


@triton.jit
def _prepare_kernel(
    x,
    norm,
    input_scale,
    values,
    largest,
    arrived,
    counters,
    tokens,
    width,
    eps,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    CAST: tl.constexpr,
    CHUNK: tl.constexpr,
    LINE: tl.constexpr,
):
    """Norm and cast one row of x; set the counters to zero."""
    row = tl.program_id(0) + tl.arange(0, 1)
    channel = tl.arange(0, CHUNK)
    if arrived is not None:
        zero = tl.zeros([LINE], tl.int32)
        for at in range(tl.program_id(0) * LINE, counters, tl.num_programs(0) * LINE):
            k = at + tl.arange(0, LINE)
            tl.store(arrived + k, zero, k < counters)
    inverse, scale = input_scales(
        x,
        norm,
        input_scale,
        row,
        tokens,
        width,
        eps,
        0.0,
        NORM,
        CENTERED,
        CAST,
        False,
        CHUNK,
    )
    top = tl.zeros([1], tl.float32)
    for at in range(0, width, CHUNK):
        j = at + channel
        v = input_tile(x, j, row, tokens, width, inverse, norm, NORM, CENTERED)
        place = row[:, None] * width + j[None, :]
        inside = (row < tokens)[:, None] & (j < width)[None, :]
        if largest is not None:
            top = tl.maximum(top, tl.max(tl.abs(v.to(tl.float32)), 1))
        if CAST:
            v = v.to(tl.float32) * scale
            if INTERPRETED:
                v = encode_fp8(v, False)
            else:  # one instruction for two values, which saturates too
                v = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        if values is not None:
            tl.store(values + place, v, inside)
    if largest is not None:
        tl.store(largest + row, top)


@triton.jit
def _weights(first, j, inside, FP8: tl.constexpr):
    """Return rows of a weight at channels j, in the dtype in which they are multiplied."""
    if FP8 and not INTERPRETED:
        first = first.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    w = tl.load(first + j[None, :], inside, 0.0)
    if FP8 and INTERPRETED:
        w = decode_fp8(w, False).to(tl.float16)
    return w


@triton.jit(do_not_specialize=["rows", "tokens"])
def _split_kernel(
    values,
    weight,
    bias,
    weight_inverse,
    input_scale,
    largest,
    residual,
    out,
    sums_of_parts,
    arrived,
    rows,
    tokens,
    width,
    iterations,
    outputs,
    epsilon,
    factor,
    FP8: tl.constexpr,
    CAST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    dtype = out.dtype.element_ty
    i = tl.arange(0, ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    o = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    channel = tl.arange(0, WIDTH)
    scale = 1.0
    if FP8:
        if input_scale is not None:
            scale = tl.load(input_scale)
        else:
            amax = tl.max(tl.load(largest + i, i < tokens, 0.0), 0)
            scale = current_scale(amax, epsilon, POWER_OF_2)

    first = weight + o.to(tl.int64)[:, None] * width
    second = first + outputs.to(tl.int64) * width  # the rows of `up`, where there is a gate
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    begin = part * iterations // PARTS * WIDTH
    end = (part + 1) * iterations // PARTS * WIDTH
    for at in range(begin, end, WIDTH):
        j = at + channel
        inside = (o < outputs)[:, None] & (j < width)[None, :]
        seen = (i < tokens)[:, None] & (j < width)[None, :]
        place = i[:, None] * width
        if CAST:
            v = _weights(values + place, j, seen, True)
        else:
            v = tl.load(values + place + j[None, :], seen, 0.0)
            if FP8:
                v = cast_e4m3(v, scale)
                if not INTERPRETED:
                    v = v.to(tl.float8e4nv)
        v = tl.trans(v)
        w = _weights(first, j, inside, FP8)
        # Not the product's third argument: E4M3's partial sums are added in FP32.
        sums += tl.dot(w, v, input_precision="ieee")
        if GATED:
            w = _weights(second, j, inside, FP8)
            up += tl.dot(w, v, input_precision="ieee")

    last = True
    if PARTS > 1:
        # Every part writes its sums; the one that comes last adds all of them in order.
        size: tl.constexpr = OUTPUTS * ROWS
        inner = tl.arange(0, OUTPUTS)[:, None] * ROWS + i[None, :]
        shared = sums_of_parts + tile * PARTS * (1 + GATED) * size + inner
        own = shared + part * (1 + GATED) * size
        tl.store(own, sums)
        if GATED:
            tl.store(own + size, up)
        tl.debug_barrier()  # the writes of all threads come before the count
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
        tl.debug_barrier()
    if last:
        if PARTS > 1:
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            up = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for k in tl.static_range(PARTS):
                one = shared + k * (1 + GATED) * size
                sums += tl.load(one, cache_modifier=".cg")  # past the L1 cache, which may be stale
                if GATED:
                    up += tl.load(one + size, cache_modifier=".cg")
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


def split_product(
    tile: SplitTile,
    x: Tensor,
    operand: StepLinear,
    out: Tensor,
    tokens: int,
    *,
    norm: StepNorm | None = None,
    activation: StepActivation | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Write the product of contiguous x [N, I] and `operand` to `out` [N, O]; for arguments see `product`."""
    width = x.shape[1]
    outputs = out.shape[1]
    fp8 = operand.weight_inverse is not None
    gated = activation is not None and activation.gated
    tiles = triton.cdiv(outputs, tile.outputs)
    parts = parts_of(tile, width, outputs)
    prepared = _prepare(x, operand, tokens, tiles if parts > 1 else 0, norm)
    sums_of_parts = None
    if parts > 1:
        shape = (tiles, parts, 1 + gated, tile.outputs, MOST_ROWS)
        sums_of_parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    _split_kernel[(tiles, parts)](
        values=prepared.values,
        weight=operand.weight,
        bias=operand.bias,
        weight_inverse=operand.weight_inverse,
        input_scale=operand.input_scale,
        largest=prepared.largest,
        residual=residual,
        out=out,
        sums_of_parts=sums_of_parts,
        arrived=prepared.arrived,
        rows=x.shape[0],
        tokens=tokens,
        width=width,
        iterations=triton.cdiv(width, tile.width),
        outputs=outputs,
        epsilon=operand.epsilon,
        factor=factor,
        FP8=fp8,
        CAST=prepared.cast,
        POWER_OF_2=operand.power_of_2,
        ACTIVATION=None if activation is None else activation.name,
        GATED=gated,
        SCALED=factor != 1.0,
        ROWS=MOST_ROWS,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        PARTS=parts,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _prepare(
    x: Tensor,
    operand: StepLinear,
    tokens: int,
    counters: int,
    norm: StepNorm | None,
) -> Prepared:
    """Norm and cast the input, and set `counters` counters to zero; without norm and FP8 the input remains as it is."""
    rows, width = x.shape
    device = x.device
    fp8 = operand.weight_inverse is not None
    current = fp8 and operand.input_scale is None
    cast = fp8 and not current
    largest = torch.empty(rows, dtype=torch.float32, device=device) if current else None
    arrived = None
    if norm is None and not fp8:
        if counters:
            arrived = torch.zeros(counters, dtype=torch.int32, device=device)
        return Prepared(x, False, None, arrived)
    if counters:
        arrived = torch.empty(counters, dtype=torch.int32, device=device)
    values = None
    if cast:
        values = torch.empty(rows, width, dtype=torch.uint8, device=device)
    elif norm is not None:
        values = torch.empty_like(x)
    _prepare_kernel[(tokens,)](
        x=x,
        norm=None if norm is None else norm.weight,
        input_scale=operand.input_scale,
        values=values,
        largest=largest,
        arrived=arrived,
        counters=counters,
        tokens=tokens,
        width=width,
        eps=0.0 if norm is None else norm.eps,
        NORM=norm is not None,
        CENTERED=norm is not None and norm.zero_centered,
        CAST=cast,
        CHUNK=min(CHUNK, triton.next_power_of_2(width)),
        LINE=LINE,
        num_warps=8,
    )
    return Prepared(x if values is None else values, cast, largest, arrived)
