"""The rowwise copy of a quantized tensor as a `Cast`, whichever engine made it: both use the same attribute names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.matrices import as_matrix, rows_first
from te_models.numerics.nvfp4 import TOP
from te_models.numerics.tensors import BLOCK, MX_BLOCK
from te_models.recorder.statistics import E2M1, Cast

FP4_BLOCK = 16


def is_quantized(value: object) -> bool:
    """Return whether this is a quantized tensor or storage of either engine."""
    return hasattr(value, "_quantizer")


def cast_of(storage: Any, scale: Tensor | None = None) -> Cast | None:
    """Return the rowwise copy of a quantized tensor [..., K] as a matrix.

    Args:
        storage: the tensor or storage of either engine.
        scale: the scale that it was cast with, FP32 [1], where that was known before the values (delayed scaling).

    Returns:
        None if it has no rowwise copy, or a format that is not known here.
    """
    # By name, since classes of Transformer Engine cannot be imported where it is not installed.
    name = type(storage).__name__
    if name.startswith("Float8Blockwise"):
        return _of_blocks(storage)
    if name.startswith("Float8Tensor"):
        return _of_tensor(storage, scale)
    if name.startswith("MXFP8Tensor"):
        return _of_mx_blocks(storage)
    if name.startswith("NVFP4Tensor"):
        return _of_fp4_blocks(storage)
    return None


def _of_tensor(storage: Any, scale: Tensor | None) -> Cast | None:
    """Return FP8 with one scale per tensor."""
    if storage._data is not None:
        codes = as_matrix(storage._data)
    elif storage._transpose is not None:
        # A tensor for one GEMM alone may have the transposed copy [K, M] only.
        codes = rows_first(storage._transpose)
    else:
        return None
    inverse = storage._scale_inv.reshape(1, 1)
    return _fp8(codes, storage._fp8_dtype, inverse, tuple(codes.shape), scale)


def _of_blocks(storage: Any) -> Cast | None:
    """Return FP8 with one scale per 128 columns of a row, or per 128 x 128 values."""
    if storage._rowwise_data is None:
        return None
    codes = as_matrix(storage._rowwise_data)
    rows, columns = codes.shape
    inverse = storage._rowwise_scale_inv
    if storage._is_2D_scaled:
        # GEMMs read padded scales: cut them to the blocks that there are, [ceil(M / 128), ceil(K / 128)].
        inverse = inverse[: -(-rows // BLOCK), : -(-columns // BLOCK)]
        return _fp8(codes, storage._fp8_dtype, inverse, (BLOCK, BLOCK))
    # Stored as [blocks of columns, padded rows]: return [M, ceil(K / 128)].
    inverse = inverse[: -(-columns // BLOCK), :rows].t()
    return _fp8(codes, storage._fp8_dtype, inverse, (1, BLOCK))


def _of_mx_blocks(storage: Any) -> Cast | None:
    """Return MXFP8: one power of two per 32 columns of a row."""
    if storage._rowwise_data is None:
        return None
    codes = as_matrix(storage._rowwise_data)
    rows, columns = codes.shape
    # E8M0 [M, ceil(K / 32)] without the padding that GEMMs read.
    exponents = _scales_by_rows(storage)[:rows, : -(-columns // MX_BLOCK)]
    inverse = e8m0_to_float(exponents)
    return _fp8(codes, storage._fp8_dtype, inverse, (1, MX_BLOCK))


def _of_fp4_blocks(storage: Any) -> Cast | None:
    """Return NVFP4: one scale per 16 columns of a row, and one of the tensor."""
    if storage._rowwise_data is None:
        return None
    packed = as_matrix(storage._rowwise_data)
    # Two codes per byte, the first of them in the low bits.
    low = packed & 15
    codes = torch.stack((low, packed >> 4), -1).reshape(len(packed), -1)
    rows, columns = codes.shape
    block_scales = _scales_by_rows(storage)[:rows, : columns // FP4_BLOCK]
    # NVFP4 has two scales: one of the tensor, from its amax, and E4M3 per block, [M, K / 16]. The divisor is a tensor,
    # since on a GPU PyTorch multiplies by the reciprocal of a Python number, which may round otherwise.
    tensor_scale = storage._amax_rowwise / torch.full_like(storage._amax_rowwise, TOP)
    inverse = block_scales.view(torch.float8_e4m3fn).float() * tensor_scale
    return Cast(codes, inverse, (1, FP4_BLOCK), E2M1)


def _scales_by_rows(storage: Any) -> Tensor:
    """Return the scales of the blocks of a tensor's rows, uint8 [rows, blocks], with the padding that GEMMs read.

    On Blackwell a cast may write them in the order in which a GEMM's tiles read them: by tiles of 128 rows x 4 blocks,
    in a tile by row modulo 32, then row // 32, then block.
    """
    scales = storage._rowwise_scale_inv
    if not getattr(storage, "_with_gemm_swizzled_scales", False):
        return scales
    rows, blocks = scales.shape
    tiles = scales.contiguous().view(torch.uint8).reshape(rows // 128, blocks // 4, 32, 4, 4)
    # [tile of rows, tile of blocks, row % 32, row // 32, block] to [tile of rows, row // 32, row % 32, ...].
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, blocks)


def _fp8(
    codes: Tensor,
    dtype: int,
    inverse: Tensor,
    block: tuple[int, ...],
    scale: Tensor | None = None,
) -> Cast:
    """Return a cast to FP8, from codes of any type of one byte [M, K]."""
    return Cast(
        codes=codes.view(torch.uint8),
        inverse=inverse,
        block=(block[0], block[1]),
        format=int(dtype),
        scale=scale,
    )
