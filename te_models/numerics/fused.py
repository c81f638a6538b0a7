"""The quantizers' casts as Triton kernels, one launch each, with the same bits as the plain functions.

On a GPU the plain functions spend their time on launches: ten to thirty per cast. Nothing here is needed for
correctness: `fused(False)` turns it off, and tests/numerics/test_casts_on_gpu.py compares the bits.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from te_models.device.host import device_type
from te_models.numerics.formats import INVERSE_MAX, DType
from te_models.numerics.matrices import BlockScaled

_MODULES = ("casts_triton", "nvfp4_triton", "sent_blocks_triton")
# Elements per program of a flat kernel, the most partial maxima, and the sides of a tile: powers of two, since Triton's
# ranges are.
_BLOCK = 4096
_PARTS = 1024
_TILE = 128
_FLAT = {"num_warps": 8}
_TILED = {"num_warps": 16}


DEVICES = ("cuda",)  # device types that the kernels serve
_ON: ContextVar[bool] = ContextVar("fused", default=True)


@contextlib.contextmanager
def fused(on: bool = True) -> Iterator[None]:
    """Cast on a GPU with Triton kernels (True) or the plain functions (False).

    This applies to the thread, and to the backward of the operations inside.
    """
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


@functools.cache
def kernels() -> dict[str, Any]:
    """Return the kernels by name; none without Triton."""
    if importlib.util.find_spec("triton") is None:
        return {}
    kernels_by_name = {}
    for name in _MODULES:
        kernels_by_name |= vars(importlib.import_module(f"te_models.numerics.{name}"))
    return kernels_by_name


def active(tensor: Tensor) -> bool:
    """Return True if kernels serve this tensor."""
    return device_type(tensor) in DEVICES and _ON.get() and tensor.numel() > 0 and bool(kernels())


def run(
    name: str,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    options: dict[str, float],
) -> None:
    """Launch a kernel on the device of its first tensor.

    Its parameters are `tensors`, `numbers` and constants in this order; `options` has the constants by their names, and
    how many warps a program has.
    """
    # -1 on a CPU, where the interpreter runs the kernel.
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(name, grid, tensors, numbers, options)
    # Triton's own search for the variant of a kernel that suits the arguments takes as long as several launches. This
    # key holds everything that a variant depends on: device, types, alignment, numbers, constants.
    types = [t.dtype for t in tensors]
    aligned = [t.data_ptr() % 16 == 0 for t in tensors]
    key = (name, device, *types, *aligned, *numbers, *options.values())
    variant = _VARIANTS.get(key)
    if variant is not None:
        compiled, constants = variant
        # A compiled kernel takes its constants by their places, and a grid of three numbers.
        compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants)
        return None
    kernel = kernels()[name]
    # No fused multiply-adds: they would round once where the plain functions round twice.
    compiled = kernel[grid](*tensors, *numbers, enable_fp_fusion=False, **options)
    if compiled is not None and hasattr(compiled, "packed_metadata"):  # None from the interpreter
        constants = tuple(
            options[parameter] for parameter in kernel.arg_names[len(tensors) + len(numbers) :]
        )
        _VARIANTS[key] = compiled, constants
    return None


_VARIANTS: dict[tuple[object, ...], tuple[Any, tuple[float, ...]]] = {}


def _blocks(n: int) -> int:
    return -(-n // _BLOCK)


def _tiles(x: Tensor) -> tuple[int, int]:
    rows, cols = x.shape
    return -(-rows // _TILE), -(-cols // _TILE)


def _empty_data(x: Tensor, needed: bool = True) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8) if needed else x.new_empty(0, dtype=torch.uint8)


def amax(x: Tensor, y: Tensor | None = None, nan: bool = False) -> Tensor:
    """Return FP32 `[n]` whose largest entry is casts.amax(x), of contiguous x; with y `[2, n]`, of both.

    With `nan` a NaN counts; compare the bits of the entries then.
    """
    # At most _PARTS partial maxima: a program goes through `steps` blocks, so that the second pass stays short.
    blocks = _blocks(x.numel())
    steps = -(-blocks // _PARTS)
    n = -(-blocks // steps)
    parts = x.new_empty(n if y is None else (2, n), dtype=torch.float32)
    both = x, x if y is None else y, parts
    run(
        "amax_kernel",
        (n, 1 if y is None else 2),
        both,
        numbers=(x.numel(), steps),
        options={"NAN": nan, "BLOCK": _BLOCK, **_FLAT},
    )
    return parts


def cast_delayed(x: Tensor, scale: Tensor, amax: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Return FP8 data (uint8, shape of contiguous x) and inverse scale `[1]`; raise `amax` `[1]` to the amax of x."""
    data = _empty_data(x)
    scale_inv = x.new_empty(1, dtype=torch.float32)
    n = x.numel()
    e5m2 = dtype == DType.kFloat8E5M2
    run(
        "delayed_kernel",
        (_blocks(n),),
        (x, data, scale, amax, scale_inv),
        numbers=(n,),
        options={"E5M2": e5m2, "BLOCK": _BLOCK, **_FLAT},
    )
    return data, scale_inv


def cast_current(
    x: Tensor, parts: Tensor, dtype: DType, power_of_2: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return FP8 data and inverse scale, from the largest of `parts`, as `amax` returns them."""
    data = _empty_data(x)
    scale_inv = x.new_empty(1, dtype=torch.float32)
    numbers = x.numel(), parts.numel(), float(epsilon)
    options = dict(
        POWER_OF_2=power_of_2,
        E5M2=dtype == DType.kFloat8E5M2,
        BLOCK=_BLOCK,
        PARTS=_power_of_2(parts.numel()),
    )
    run(
        "current_kernel",
        (_blocks(x.numel()),),
        (x, data, parts, scale_inv),
        numbers,
        {**options, **_FLAT},
    )
    return data, scale_inv


def cast_blocks(
    x: Tensor,
    dtype: DType,
    two_d: bool,
    rowwise: bool,
    columnwise: bool,
    power_of_2: bool,
    epsilon: float,
) -> tuple[Tensor, ...]:
    """Return rowwise data and inverse scales, columnwise data and inverse scales of x `[M, K]`, for a storage.

    Data are `[M, K]`; a copy that was not asked for is empty. With `two_d` both copies share their data.
    """
    m, k = x.shape
    p, q = _tiles(x)
    # Scales lie as Transformer Engine's GEMMs read them: of 1 x 128 blocks with the blocks of a row one line apart.
    (row_lines, row_stride), (col_lines, col_stride) = (
        ((p, q), (q, p)) if two_d else ((q, m), (p, k))
    )
    # Transformer Engine pads the last dimension of scales to 16 bytes.
    row_stride = row_stride + -row_stride % 4
    col_stride = col_stride + -col_stride % 4
    row_scale = x.new_empty(row_lines if rowwise else 0, row_stride, dtype=torch.float32)
    col_scale = x.new_empty(col_lines if columnwise else 0, col_stride, dtype=torch.float32)
    row_data = _empty_data(x, rowwise or two_d)
    results = row_data, row_scale, row_data if two_d else _empty_data(x, columnwise), col_scale
    numbers = m, k, row_stride, col_stride, float(epsilon), torch.finfo(x.dtype).max
    options = dict(
        ROW=rowwise,
        COL=columnwise,
        TWO_D=two_d,
        POWER_OF_2=power_of_2,
        E5M2=dtype == DType.kFloat8E5M2,
    )
    run("block_kernel", (p, q), (x, *results), numbers, {**options, **_TILED})
    return results


def cast_mx(
    x: Tensor, dtype: DType, two_d: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, ...]:
    """Return what `cast_blocks` returns, with an E8M0 scale byte per 32 elements, padded."""
    p, q = _tiles(x)
    groups = _TILE // 32
    # Padded to whole tiles of 128 x 4 scales, which cuBLAS swizzles.
    row_scale = x.new_empty(p * _TILE if rowwise else 0, q * groups, dtype=torch.uint8)
    col_scale = x.new_empty(p * groups if columnwise else 0, q * _TILE, dtype=torch.uint8)
    results = _empty_data(x, rowwise), row_scale, _empty_data(x, columnwise), col_scale
    numbers = *x.shape, q * groups, q * _TILE, INVERSE_MAX[dtype]
    options = dict(ROW=rowwise, COL=columnwise, TWO_D=two_d, E5M2=dtype == DType.kFloat8E5M2)
    run("mx_kernel", (p, q), (x, *results), numbers, {**options, **_TILED})
    return results


def cast_nvfp4(
    x: Tensor,
    t: Tensor,
    parts: Tensor,
    noise: Tensor | None,
    two_d: bool,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Tensor, ...]:
    """Return data `[M, K/2]`, padded scale bytes and amax `[1]` of x `[M, K]`, and columnwise of t, data `[M/2, K]`.

    t is x or x transformed. `parts` is `amax(nan=True)` of x, and of t if it differs (of t only if only t is cast).
    `noise` int16 holds random numbers for the elements of x, then of t (None: no stochastic rounding).
    """
    m, k = x.shape
    p, q = _tiles(x)
    u8 = torch.uint8
    fp32 = torch.float32
    row_stride, col_stride = (-(-size // 64) * 4 for size in (k, m))
    row_data = x.new_empty(m if rowwise else 0, k // 2, dtype=u8)
    row_scale = x.new_empty(p * _TILE if rowwise else 0, row_stride, dtype=u8)
    col_data = x.new_empty(m // 2 if columnwise else 0, k, dtype=u8)
    col_scale = x.new_empty(q * _TILE if columnwise else 0, col_stride, dtype=u8)
    row_amax = x.new_empty(1, dtype=fp32)
    col_amax = x.new_empty(1, dtype=fp32)
    results = row_data, row_scale, row_amax, col_data, col_scale, col_amax
    # A kernel has no optional pointers: x stands in where there is no noise, and is not read.
    tensors = (x, t, x if noise is None else noise, *results, parts)
    n_parts = parts.shape[-1]
    numbers = n_parts, m, k, row_stride, col_stride, m * k if rowwise else 0
    options: dict[str, float] = dict(
        ROW=rowwise,
        COL=columnwise,
        TWO_D=two_d,
        TRANSFORMED=t is not x,
        STOCHASTIC=noise is not None,
    )
    options["PARTS"] = _power_of_2(n_parts)
    run("nvfp4_kernel", (p, q), tensors, numbers, {**options, **_TILED})
    return results


def decodes(a: BlockScaled, b: BlockScaled) -> bool:
    """Return True if `decode` serves these two."""
    return (a.amax is None) == (b.amax is None) and active(a.data)


def decode(a: BlockScaled, b: BlockScaled) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the BF16 values `[M, K]` of both matrices of a product, and a factor `[1]` of the product (None: 1).

    The formats are both FP8 with scales that are powers of two, or both FP4.
    """
    return _decode_fp8(a, b) if a.amax is None else _decode_fp4(a, b)


def _decode_fp4(a: BlockScaled, b: BlockScaled) -> tuple[Tensor, Tensor, Tensor]:
    tensors: list[Tensor] = []
    numbers: list[float] = []
    for data, scale, block, _, amax, top in (a, b):
        assert amax is not None
        # A columnwise copy is a transposed view, and the kernel reads along rows.
        if not data.is_contiguous():
            data = data.contiguous()
        rows, cols = data.shape
        m, k = (rows * 2, cols) if block[0] > 1 else (rows, cols * 2)
        tensors += [data, scale, data.new_empty(m, k, dtype=torch.bfloat16), amax]
        numbers += [m, k, scale.stride(0), top]
    left = tensors[2]
    right = tensors[6]
    alpha = tensors[0].new_empty(1, dtype=torch.float32)
    columnwise = {"A_COL": a.block[0] > 1, "B_COL": b.block[0] > 1}
    grid = (math.prod(_tiles(left)) + math.prod(_tiles(right)),)
    run("nvfp4_decode_kernel", grid, (*tensors, alpha), tuple(numbers), {**columnwise, **_TILED})
    return left, right, alpha


def _decode_fp8(a: BlockScaled, b: BlockScaled) -> tuple[Tensor, Tensor, None]:
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for data, scale, *_ in (a, b):
        if not data.is_contiguous():
            data = data.contiguous()
        tensors += [data, scale, torch.empty_like(data, dtype=torch.bfloat16)]
        numbers += [*data.shape, *scale.stride()]
    a_down, a_along = a.block
    b_down, b_along = b.block
    e5m2 = DType.kFloat8E5M2
    options = dict(
        A_DOWN=a_down,
        A_ALONG=a_along,
        A_E5M2=a.dtype == e5m2,
        B_DOWN=b_down,
        B_ALONG=b_along,
        B_E5M2=b.dtype == e5m2,
    )
    grid = (math.prod(_tiles(a.data)) + math.prod(_tiles(b.data)),)
    run("decode_kernel", grid, tuple(tensors), tuple(numbers), {**options, **_TILED})
    return tensors[2], tensors[5], None


def update(
    states: list[tuple[Tensor, Tensor]],
    amaxes: Tensor | None,
    most_recent: bool,
    margin: int,
    fp8_max: float,
) -> None:
    """Update states of delayed scaling in place: (history `[length, n]`, scale `[n]`) of each, on one device.

    `amaxes` are the reduced ones of all states, concatenated; None uses each state's own, row 0 of its history.
    """
    rows = []
    start = 0
    longest = 1
    widest = 1
    for history, scale in states:
        length, n = history.shape
        rows.append((history.data_ptr(), scale.data_ptr(), length, n, start))
        start = start + n
        longest = max(longest, length)
        widest = max(widest, n)
    scale = states[0][1]
    tensors = _table(tuple(rows), scale.device), scale if amaxes is None else amaxes
    # One launch updates all modules: each program reads the addresses of its own history and scale from a table.
    sizes = dict(LENGTH=_power_of_2(longest), N=_power_of_2(widest))
    options: dict[str, float] = {
        "REDUCED": amaxes is not None,
        "MOST_RECENT": most_recent,
        **sizes,
        **_FLAT,
    }
    run("update_kernel", (len(rows),), tensors, (fp8_max * 2.0**-margin,), options)


@functools.cache  # never freed: a CUDA graph reads its table at every replay
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
