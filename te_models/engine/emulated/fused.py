"""The quantizers' casts in one launch each, where Triton runs: on a GPU; every bit equals the plain functions'.

On a GPU the plain functions spend their time on launches: ten to thirty for a cast. Nothing here is needed for
correctness: `with fused(False):` goes without, and tests/engine/test_cuda.py compares the bits of both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_models.engine.emulated.numerics import FLT_MAX, FP8_MAX, INVERSE_MAX, DType

_BLOCK = 4096
_TILE = 128
_FLAT = {"num_warps": 8}
_TILED = {"num_warps": 16}


class _Switch:
    on: bool = True
    devices: tuple[str, ...] = ("cuda",)


@contextlib.contextmanager
def fused(on: bool = True) -> Iterator[None]:
    """Inside, casts on a GPU are Triton kernels (True), or the plain functions (False)."""
    before, _Switch.on = _Switch.on, on
    try:
        yield
    finally:
        _Switch.on = before


@functools.cache
def kernels() -> Any:
    """The module of kernels, or None without Triton."""
    found = importlib.util.find_spec("triton")
    return importlib.import_module("te_models.engine.emulated.triton_kernels") if found else None


def active(tensor: Tensor) -> bool:
    """Whether kernels serve this tensor."""
    return _Switch.on and tensor.device.type in _Switch.devices and tensor.numel() > 0 and kernels() is not None


def _run(kernel: str, grid: tuple[int, ...], first: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument."""
    # No fused multiply-adds: they would round once where the plain functions round twice.
    with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
        getattr(kernels(), kernel)[grid](first, *arguments, enable_fp_fusion=False, **options)


def _blocks(n: int) -> tuple[int]:
    return (-(-n // _BLOCK),)


def _tiles(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] // _TILE), -(-x.shape[1] // _TILE)


def amax(x: Tensor) -> Tensor:
    """numerics.amax as `[1]`, of contiguous x."""
    found = torch.zeros(1, dtype=torch.float32, device=x.device)
    _run("amax_kernel", _blocks(x.numel()), x, found.view(torch.int32), x.numel(), BLOCK=_BLOCK, **_FLAT)
    return found


def cast_delayed(x: Tensor, scale: Tensor, amax: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shape of contiguous x) and inverse scale `[1]`; `amax` `[1]` is raised to that of x."""
    return _cast_tensor(x, scale, amax, dtype, False, False, 0.0)


def cast_current(x: Tensor, amax: Tensor, dtype: DType, power_of_2: bool, epsilon: float) -> tuple[Tensor, Tensor]:
    """Codes and inverse scale, the scale being that of `amax` `[1]`."""
    return _cast_tensor(x, amax, amax, dtype, True, power_of_2, epsilon)


def _cast_tensor(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: DType, current: bool, power_of_2: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    _run(
        "tensor_kernel",
        _blocks(x.numel()),
        x,
        codes,
        scale,
        amax.view(torch.int32),
        scale_inv,
        x.numel(),
        FP8_MAX[dtype],
        epsilon,
        FLT_MAX,
        CURRENT=current,
        POWER_OF_2=power_of_2,
        E5M2=dtype == DType.kFloat8E5M2,
        BLOCK=_BLOCK,
        **_FLAT,
    )
    return codes, scale_inv


def cast_blocks(
    x: Tensor, dtype: DType, two_d: bool, rowwise: bool, columnwise: bool, power_of_2: bool, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rowwise codes and inverse scales, columnwise codes and inverse scales of x `[M, K]`, as the storage has them.

    All codes are `[M, K]`; a copy that was not asked for is empty. With `two_d` both have one set of codes.
    """
    (m, k), (p, q) = x.shape, _tiles(x)
    shapes = ((p, q), (q, p)) if two_d else ((q, m), (p, k))
    make = torch.zeros if two_d else torch.empty
    sizes = [
        (a, b + -b % 4) if wanted else (0, 4) for (a, b), wanted in zip(shapes, (rowwise, columnwise), strict=True)
    ]
    row_scale, col_scale = (make(size, dtype=torch.float32, device=x.device) for size in sizes)
    row_codes = torch.empty(x.shape if rowwise or two_d else 0, dtype=torch.uint8, device=x.device)
    col_codes = row_codes if two_d else torch.empty(x.shape if columnwise else 0, dtype=torch.uint8, device=x.device)
    _run(
        "block_kernel",
        (p, q),
        x,
        row_codes,
        row_scale,
        col_codes,
        col_scale,
        m,
        k,
        row_scale.shape[1],
        col_scale.shape[1],
        FP8_MAX[dtype],
        epsilon,
        torch.finfo(x.dtype).max,
        ROW=rowwise,
        COL=columnwise,
        TWO_D=two_d,
        POWER_OF_2=power_of_2,
        E5M2=dtype == DType.kFloat8E5M2,
        **_TILED,
    )
    return row_codes, row_scale, col_codes, col_scale


def cast_mx(
    x: Tensor, dtype: DType, two_d: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `cast_blocks`, with padded scale bytes of 32 elements."""
    (m, k), (p, q) = x.shape, _tiles(x)
    groups = _TILE // 32
    sizes = (p * _TILE, q * groups) if rowwise else (0, 0), (p * groups, q * _TILE) if columnwise else (0, 0)
    row_scale, col_scale = (torch.empty(size, dtype=torch.uint8, device=x.device) for size in sizes)
    row_codes, col_codes = (
        torch.empty(x.shape if wanted else 0, dtype=torch.uint8, device=x.device) for wanted in (rowwise, columnwise)
    )
    _run(
        "mx_kernel",
        (p, q),
        x,
        row_codes,
        row_scale,
        col_codes,
        col_scale,
        m,
        k,
        row_scale.stride(0),
        col_scale.stride(0),
        INVERSE_MAX[dtype],
        ROW=rowwise,
        COL=columnwise,
        TWO_D=two_d,
        E5M2=dtype == DType.kFloat8E5M2,
        **_TILED,
    )
    return row_codes, row_scale, col_codes, col_scale


def operand(storage: Any, columnwise: bool) -> Tensor | None:
    """BF16 values `[M, K]` of a block-scaled copy whose values are BF16 numbers; None for others or where off."""
    blocks = storage.blocks(columnwise)
    if blocks is None or not active(blocks.codes):
        return None
    codes, e5m2 = blocks.codes.contiguous(), storage._fp8_dtype == DType.kFloat8E5M2
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    _run(
        "decode_kernel",
        _tiles(codes),
        codes,
        blocks.scale,
        out,
        *codes.shape,
        *blocks.scale.stride(),
        DOWN=blocks.block[0],
        ALONG=blocks.block[1],
        E8M0=blocks.scale.dtype == torch.uint8,
        E5M2=e5m2,
        **_TILED,
    )
    return out


def update(history: Tensor, scale: Tensor, amax: Tensor, most_recent: bool, margin: int, fp8_max: float) -> None:
    """Delayed scaling's update of one state, in place: history `[length, n]`, scale `[n]`, given the amaxes `[n]`."""
    length, n = history.shape
    _run(
        "update_kernel",
        (1,),
        history,
        scale,
        amax,
        length,
        n,
        fp8_max * 2.0**-margin,
        MOST_RECENT=most_recent,
        LENGTH=_power_of_2(length),
        N=_power_of_2(n),
        **_FLAT,
    )


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
