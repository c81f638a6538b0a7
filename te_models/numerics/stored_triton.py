"""The values of stored.StoredRows in one launch on a GPU, with the bits of stored.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.numerics.fp8_triton import decode_fp8

# Rows and columns of a tile.
ROWS = 32
COLUMNS = 256
# The formats of scales, as the kernel's argument KIND.
FLOAT = 0
E4M3 = 1
E8M0 = 2


@triton.jit
def _e8m0(byte):
    """Return e8m0.e8m0_to_float of bytes."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent > 0, exponent << 23, 0x400000)
    return tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _dequantize_kernel(
    # packed FP4 [rows, columns / 2] or FP8 [rows, columns], scales [?, groups], and the row of scales of each row
    data,
    scales,
    scale_rows,
    # FP32 [rows], which multiply or divide the scales, or None
    factors,
    out,
    rows,
    columns,
    groups,
    width,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    DIVIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a tile of values [rows, columns]; a row of scales has `groups`, each for `width` columns."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    if PACKED:
        at = i[:, None] * (columns // 2) + (j // 2)[None, :]
        bits = tl.load(data + at, inside, 0).to(tl.int32) >> ((j % 2) * 4)[None, :]
        # As nvfp4._decode: the bits where FP32 has its exponent's end and its mantissa's start, times 2^126.
        value = ((bits & 7) << 22) | ((bits & 8) << 28)
        value = value.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        byte = tl.load(data + i[:, None] * columns + j[None, :], inside, 0)
        value = decode_fp8(byte, False)
    row = i
    if scale_rows is not None:
        row = tl.load(scale_rows + i, i < rows, 0).to(tl.int64)
    scale = tl.load(scales + row[:, None] * groups + (j // width)[None, :], inside, 0)
    if KIND == 1:  # E4M3
        scale = decode_fp8(scale, False)
    elif KIND == 2:  # E8M0
        scale = _e8m0(scale)
    else:
        scale = scale.to(tl.float32)
    if factors is not None:
        factor = tl.load(factors + i, i < rows, 1.0)[:, None]
        if DIVIDE:
            scale = tl.div_rn(scale, tl.broadcast_to(factor, (ROWS, COLUMNS)))
        else:
            scale = scale * factor
    value = (value * scale).to(out.dtype.element_ty)
    tl.store(out + i[:, None] * columns + j[None, :], value, inside)


def dequantize(
    out: Tensor,
    *,
    data: Tensor,
    scales: Tensor,
    width: int,
    packed: bool,
    scale_rows: Tensor | None,
    factors: Tensor | None,
    divide: bool,
) -> None:
    """Write the values of quantized rows into `out`; see stored.StoredRows.

    Args:
        out: contiguous [rows, columns], of any float dtype.
        data: FP4 [rows, columns / 2] if `packed`, else E4M3 [rows, columns], as uint8.
        scales: FP32, BF16, E4M3 or E8M0 (uint8) [scale rows, groups].
        width: columns that share a scale.
        packed: whether a byte holds two values of FP4.
        scale_rows: the row of `scales` of each row, int [rows]; None: its own.
        factors: FP32 [rows], a second scale of each row; None: there is none.
        divide: whether `factors` divide the scales, and do not multiply them.
    """
    rows, columns = out.shape
    kind = FLOAT
    if scales.dtype == torch.float8_e4m3fn:
        kind = E4M3
        scales = scales.view(torch.uint8)
    elif scales.dtype == torch.uint8:
        kind = E8M0
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    with torch.cuda.device_of(out):
        _dequantize_kernel[grid](
            data=data,
            scales=scales,
            scale_rows=scale_rows,
            factors=factors,
            out=out,
            rows=rows,
            columns=columns,
            groups=scales.shape[1],
            width=width,
            PACKED=packed,
            KIND=kind,
            DIVIDE=divide,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
