"""The product of three tokens or more in a step of decoding (decode.py) in Triton, on tensor cores.

A single kernel would norm and cast the input in each of its programs, and convert every weight from E4M3 to FP16. An
FP8 product of so many tokens would then take longer than reading its weights. So there are two kernels. The first norms
and casts the input. The second multiplies the E4M3 operands as they are stored: they go from memory to shared memory,
and from there to Hopper's tensor cores, without an instruction for a single weight. The tensor cores add products of
E4M3 with fewer bits than FP32 has, so the sums over the channels of one tile are added to others in FP32.

Where the outputs alone give too few programs to fill a GPU, the input channels are divided among programs as well
(split-K). The program of an output tile that finishes last adds the partial sums in order, so that results are the same
in every run.

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
COUNTERS_AT_ONCE = 1024  # counters that it sets to zero with one store


class SplitTile(NamedTuple):
    """How a product is divided.

    Attributes:
        outputs: rows of the weight, so output channels, per program.
        width: input channels per iteration, whose FP8 products the tensor cores add with about 14 bits.
        warps: warps per program.
        stages: stages of the software pipeline of loads.
        programs: how many programs to aim for; where the outputs give fewer, input channels are divided (`parts_of`).
    """

    outputs: int
    width: int
    warps: int
    stages: int
    programs: int = 1


def parts_of(tile: SplitTile, width: int, outputs: int) -> int:
    """Return the number of programs that share one tile of outputs, each with a part of the input channels.

    Args:
        tile: how the product is divided.
        width: input channels of the product.
        outputs: output channels of the product.
    """
    tiles = triton.cdiv(outputs, tile.outputs)
    iterations = triton.cdiv(width, tile.width)
    return max(1, min(round(tile.programs / tiles), iterations))


class Prepared(NamedTuple):
    """The output of the first kernel, which the second reads.

    Attributes:
        values: the input after its norm [N, I]: E4M3 as uint8 if `cast`, otherwise in the dtype of the model.
        cast: whether `values` are in E4M3. Under current scaling they are not: the scale follows from the amax of all
            rows, which only the second kernel knows.
        row_amaxes: FP32 [N] under current scaling; None otherwise.
        arrived: int32 [tiles], all 0: the second kernel counts the parts of each tile that are done. None: each tile
            has one part.
    """

    values: Tensor
    cast: bool
    row_amaxes: Tensor | None
    arrived: Tensor | None


@triton.jit
def _prepare_kernel(
    # the input [N, I], the weight of its norm [I], and the scale of its cast, FP32 [1]
    x,
    norm,
    input_scale,
    # outputs, the fields of Prepared; each may be None. `counters` is the length of `arrived`
    values,
    row_amaxes,
    arrived,
    counters,
    tokens,
    width,
    eps,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    CAST: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTERS_AT_ONCE: tl.constexpr,
):
    """Norm and cast one row of x, or write its amax; set a part of the counters to zero."""
    row = tl.program_id(0) + tl.arange(0, 1)
    channel = tl.arange(0, CHUNK)
    if arrived is not None:
        zero = tl.zeros([COUNTERS_AT_ONCE], tl.int32)
        begin = tl.program_id(0) * COUNTERS_AT_ONCE
        step = tl.num_programs(0) * COUNTERS_AT_ONCE
        for start in range(begin, counters, step):
            k = start + tl.arange(0, COUNTERS_AT_ONCE)
            tl.store(arrived + k, zero, k < counters)
    # A cast here has a scale that is known, so that no smallest amax and no rounding of a scale matter.
    inverse_rms, scale = input_scales(
        x,
        norm,
        input_scale,
        row,
        tokens,
        width,
        eps,
        epsilon=0.0,
        NORM=NORM,
        CENTERED=CENTERED,
        FP8=CAST,
        POWER_OF_2=False,
        CHUNK=CHUNK,
    )
    amax = tl.zeros([1], tl.float32)
    for start in range(0, width, CHUNK):
        j = start + channel
        v = input_tile(x, j, row, tokens, width, inverse_rms, norm, NORM, CENTERED)
        offsets = row[:, None] * width + j[None, :]
        mask = (row < tokens)[:, None] & (j < width)[None, :]
        if row_amaxes is not None:
            amax = tl.maximum(amax, tl.max(tl.abs(v.to(tl.float32)), 1))
        if CAST:
            v = v.to(tl.float32) * scale
            if INTERPRETED:
                v = encode_fp8(v, False)
            else:  # one instruction for two values, which saturates too
                v = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        if values is not None:
            tl.store(values + offsets, v, mask)
    if row_amaxes is not None:
        tl.store(row_amaxes + row, amax)


@triton.jit
def _load_operand(row_pointers, j, mask, FP8: tl.constexpr):
    """Return channels j of the rows at `row_pointers` [R, 1], in the dtype in which they are multiplied."""
    if FP8 and not INTERPRETED:
        row_pointers = row_pointers.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    values = tl.load(row_pointers + j[None, :], mask, 0.0)
    if FP8 and INTERPRETED:
        values = decode_fp8(values, False).to(tl.float16)
    return values


@triton.jit(do_not_specialize=["rows", "tokens"])
def _split_kernel(
    # the input (Prepared.values), weight and bias; for FP8 the weight's factor and the scale of the input, FP32 [1], or
    # the amaxes of its rows
    values,
    weight,
    bias,
    weight_inverse,
    input_scale,
    row_amaxes,
    # the residual stream to add [N, O] or None, and the output [N, O]
    residual,
    out,
    # where parts meet if PARTS > 1: FP32 [tiles, PARTS, 2 if GATED else 1, OUTPUTS, ROWS], and int32 [tiles]
    partial_sums,
    arrived,
    # N, the rows that are tokens, I, iterations of WIDTH channels in I, and O
    rows,
    tokens,
    width,
    iterations,
    outputs,
    # the smallest amax of a scale, and the factor before the residual stream is added
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
    """Write a tile of outputs for all rows; of several parts that share a tile, the last one writes it."""
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
            amax = tl.max(tl.load(row_amaxes + i, i < tokens, 0.0), 0)
            scale = current_scale(amax, epsilon, POWER_OF_2)

    weight_rows = weight + o.to(tl.int64)[:, None] * width
    up_rows = weight_rows + outputs.to(tl.int64) * width  # below the gate's rows, if GATED
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    begin = part * iterations // PARTS * WIDTH
    end = (part + 1) * iterations // PARTS * WIDTH
    for start in range(begin, end, WIDTH):
        j = start + channel
        weight_mask = (o < outputs)[:, None] & (j < width)[None, :]
        value_mask = (i < tokens)[:, None] & (j < width)[None, :]
        row_offsets = i[:, None] * width
        if CAST:
            v = _load_operand(values + row_offsets, j, value_mask, True)
        else:
            v = tl.load(values + row_offsets + j[None, :], value_mask, 0.0)
            if FP8:
                v = cast_e4m3(v, scale)
                if not INTERPRETED:
                    v = v.to(tl.float8e4nv)
        v = tl.trans(v)  # [WIDTH, ROWS]
        w = _load_operand(weight_rows, j, weight_mask, FP8)  # [OUTPUTS, WIDTH]
        # The sum is not tl.dot's accumulator: partial sums of E4M3 are added in FP32 here.
        sums += tl.dot(w, v, input_precision="ieee")
        if GATED:
            w = _load_operand(up_rows, j, weight_mask, FP8)
            up_sums += tl.dot(w, v, input_precision="ieee")

    is_last = True
    if PARTS > 1:
        # Every part writes its sums; the one that comes last adds all of them in order.
        size: tl.constexpr = OUTPUTS * ROWS
        element = tl.arange(0, OUTPUTS)[:, None] * ROWS + i[None, :]
        tile_sums = partial_sums + tile * PARTS * (1 + GATED) * size + element
        own_sums = tile_sums + part * (1 + GATED) * size
        tl.store(own_sums, sums)
        if GATED:
            tl.store(own_sums + size, up_sums)
        tl.debug_barrier()  # the writes of all threads come before the count
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
        tl.debug_barrier()
    if is_last:
        if PARTS > 1:
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for k in tl.static_range(PARTS):
                part_sums = tile_sums + k * (1 + GATED) * size
                # ".cg": past the L1 cache, which may be stale.
                sums += tl.load(part_sums, cache_modifier=".cg")
                if GATED:
                    up_sums += tl.load(part_sums + size, cache_modifier=".cg")
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
            i[None, :],
            o[:, None],
            rows,
            tokens,
            outputs,
            factor,
            ACTIVATION=ACTIVATION,
            GATED=GATED,
            SCALED=SCALED,
            dtype=dtype,
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
    """Write the product of a step's input and a te.Linear; see decode_product_triton.product.

    Args:
        tile: how the product is divided.
        x: contiguous [N, I], N at most MOST_ROWS.
        operand: the te.Linear.
        out: [N, O] in the dtype of x, written; with a gated activation O is half the rows of the weight.
        tokens: the first rows of x, which are no padding.
        norm, activation, residual, factor: as in `product`.
    """
    width = x.shape[1]
    outputs = out.shape[1]
    fp8 = operand.weight_inverse is not None
    gated = activation is not None and activation.gated
    tiles = triton.cdiv(outputs, tile.outputs)
    parts = parts_of(tile, width, outputs)
    prepared = _prepare(x, operand, tokens, counters=tiles if parts > 1 else 0, norm=norm)
    partial_sums = None
    if parts > 1:
        shape = (tiles, parts, 1 + gated, tile.outputs, MOST_ROWS)
        partial_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    _split_kernel[(tiles, parts)](
        values=prepared.values,
        weight=operand.weight,
        bias=operand.bias,
        weight_inverse=operand.weight_inverse,
        input_scale=operand.input_scale,
        row_amaxes=prepared.row_amaxes,
        residual=residual,
        out=out,
        partial_sums=partial_sums,
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
    """Norm and cast the input, and make `counters` counters that are 0.

    Without a norm and FP8 there is nothing to compute: the result holds x itself.
    """
    rows, width = x.shape
    device = x.device
    fp8 = operand.weight_inverse is not None
    current = fp8 and operand.input_scale is None
    cast = fp8 and not current
    arrived = None
    if norm is None and not fp8:
        if counters:
            arrived = torch.zeros(counters, dtype=torch.int32, device=device)
        return Prepared(values=x, cast=False, row_amaxes=None, arrived=arrived)
    row_amaxes = torch.empty(rows, dtype=torch.float32, device=device) if current else None
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
        row_amaxes=row_amaxes,
        arrived=arrived,
        counters=counters,
        tokens=tokens,
        width=width,
        eps=0.0 if norm is None else norm.eps,
        NORM=norm is not None,
        CENTERED=norm is not None and norm.zero_centered,
        CAST=cast,
        CHUNK=min(CHUNK, triton.next_power_of_2(width)),
        COUNTERS_AT_ONCE=COUNTERS_AT_ONCE,
        num_warps=8,
    )
    return Prepared(
        values=x if values is None else values,
        cast=cast,
        row_amaxes=row_amaxes,
        arrived=arrived,
    )
