"""Tiles that a kernel casts to FP8: data, transposed copy, amax and inverse scale, and the order of tiles.

A GEMM on Hopper needs FP8 operands with the contracted dimension last, hence the transposed copy. The number of rows is
a multiple of 4: the bytes of four rows are one word of 32 bits, so that words are transposed, not bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.handover import CastScale
from te_models.numerics.fp8_triton import INTERPRETED, encode_four

# Rows and columns of a tile, for four warps, and rows of tiles per band. Programs go down a band before they go right,
# so those that run at about the same time write neighboring memory in both copies. The fastest of thirty choices on
# an H200.
ROWS = 64
COLUMNS = 64
BAND = 8


# The bytes of four words, the lowest of each first, then the second of each, and so on.
_BYTES = tl.constexpr(
    "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $4, $5, 0x7362; prmt.b32 c, $6, $7, 0x5140; "
    "prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; prmt.b32 $2, b, d, 0x5410; "
    "prmt.b32 $3, b, d, 0x7632; }"
)
_SIGMOID = tl.constexpr(
    "{ .reg .f32 e; mul.ftz.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.ftz.f32 e, e, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, e; }"  # 1 / (1 + 2 ** (-x / ln 2))
)


# Two values rounded to BF16, as FP32 again.
_ROUND = tl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xFFFF0000; }"
)


class FP8Data(NamedTuple):
    """data [N, K] or None, transposed [K, N], both uint8; scale_inv FP32 [1], the factor from data to values.

    With neither copy, a kernel raises the amax alone (`unwritten`).
    """

    data: Tensor | None
    transposed: Tensor | None
    scale_inv: Tensor


@triton.jit
def _bytes(word):
    """Return the four bytes of words as four tensors of uint8, the lowest first."""
    if INTERPRETED:
        first = word.to(tl.uint8)
        second = (word >> 8).to(tl.uint8)
        third = (word >> 16).to(tl.uint8)
        fourth = (word >> 24).to(tl.uint8)
    else:
        # The types are written in the call: as a constexpr of their own, Triton 3.9 does not accept them.
        first, second, third, fourth = tl.inline_asm_elementwise(
            _BYTES,
            "=r,=r,=r,=r,r,r,r,r",
            [word],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return first, second, third, fourth


@triton.jit
def sigmoid(x):
    """Return the sigmoid in FP32, to two units in the last place, in few instructions, which limit these kernels."""
    if INTERPRETED:
        y = tl.sigmoid(x)
    else:
        y = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return FP32 values rounded to `dtype`, in FP32 again."""
    # One by one the compiler would convert values, in the unit that computes exponentials too.
    if INTERPRETED or dtype != tl.bfloat16:
        y = x.to(dtype).to(tl.float32)
    else:
        y = tl.inline_asm_elementwise(
            _ROUND, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return y


@triton.jit
def largest_of(values):
    """Return the largest magnitude of each place of four tiles."""
    a, b, c, d = values
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def store_fp8(
    # FP32 tiles [groups, columns]: the first to fourth rows of groups of four
    a,
    b,
    c,
    d,
    scale,
    # the groups and columns of the tile, and how many rows and columns there are
    group,
    j,
    rows,
    columns,
    # uint8, written where not None
    data,
    transposed,
    stride,
    E5M2: tl.constexpr,
    # of the transposed copy: the elements between its rows, and how many columns it gets; None: `rows`
    transposed_stride=None,
    transposed_rows=None,
):
    """Quantize FP32 tiles, the first to fourth rows of groups of four, of columns j, into both copies or only one
    of them. Return the largest magnitude of each group and column, for `raise_amax`.

    `data` is [rows, columns], whose rows are `stride` elements apart; `transposed` is [columns, transposed_rows], whose
    rows are `transposed_stride` apart. Where `transposed_rows` exceeds `rows`, the tile has to hold zeros behind the
    last row, which pad the transposed copy.

    `group` are consecutive numbers: from 4 * group the compiler could not tell that the words are contiguous, and would
    write them one by one.
    """
    group = group.to(tl.int64)
    j = j.to(tl.int64)
    i = 4 * group
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    word = encode_four(a * scale, b * scale, c * scale, d * scale, E5M2)
    if data is not None:
        at = data + i[:, None] * stride + j[None, :]
        first, second, third, fourth = _bytes(word)
        tl.store(at, first, mask=inside)
        tl.store(at + stride, second, mask=inside)
        tl.store(at + 2 * stride, third, mask=inside)
        tl.store(at + 3 * stride, fourth, mask=inside)
    if transposed is not None:
        words = transposed.to(tl.pointer_type(tl.int32), bitcast=True)
        step = rows if transposed_stride is None else transposed_stride
        written = rows if transposed_rows is None else transposed_rows
        place = j[:, None] * (step // 4) + group[None, :]
        tl.store(
            words + place,
            tl.trans(word),
            mask=(j < columns)[:, None] & (group < written // 4)[None, :],
        )
    return tl.where(inside, largest_of((a, b, c, d)), 0.0)


@triton.jit
def raise_amax(amax, largest):
    """Raise `amax` to the largest of a tile of magnitudes. Call it once per program, since its threads synchronize."""
    bits = tl.max(tl.max(largest, 1), 0).to(tl.int32, bitcast=True)  # ordered like magnitudes
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def note_inverse(scale, scale_inv):
    """Write the inverse scale, from one program only."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))


@triton.jit
def tile(high, wide, BAND: tl.constexpr, number=None):
    """Return a tile of `high` x `wide`, from above and from the left, in bands of BAND rows.

    `number` is the tile's; None: this program's.
    """
    if number is None:
        number = tl.program_id(0)
    first = number // (BAND * wide) * BAND
    inside = number - first * wide
    height = tl.minimum(BAND, high - first)
    return first + inside % height, inside // height


def new_fp8(rows: int, columns: int, device: torch.device, rowwise: bool = True) -> FP8Data:
    """Return FP8 data [rows, columns] without values, only the transposed copy if not `rowwise`."""
    data = torch.empty(rows, columns, dtype=torch.uint8, device=device) if rowwise else None
    transposed = torch.empty(columns, rows, dtype=torch.uint8, device=device)
    return FP8Data(data, transposed, torch.empty(1, dtype=torch.float32, device=device))


def unwritten(device: torch.device) -> FP8Data:
    """Return an output for kernels that only raise the amax; the inverse scale that they write is not read."""
    return FP8Data(None, None, torch.empty(1, dtype=torch.float32, device=device))


@triton.jit
def _current_scale_kernel(amax, scale, LARGEST: tl.constexpr):
    measured = tl.load(amax)
    largest = tl.full((), LARGEST, tl.float32)
    counts = (measured > 0) & (measured < float("inf"))
    # 1 for 0, infinity and NaN; the largest float where the quotient overflows.
    quotient = tl.div_rn(largest, tl.where(counts, measured, largest))
    tl.store(scale, tl.minimum(quotient, 3.4028234663852886e38))


def write_current_scale(cast_scale: CastScale) -> None:
    """Write the scale by which the amax becomes the largest number of the format (Float8CurrentScaling)."""
    largest = 57344.0 if cast_scale.e5m2 else 448.0
    with torch.cuda.device_of(cast_scale.amax):
        _current_scale_kernel[(1,)](cast_scale.amax, cast_scale.scale, LARGEST=largest, num_warps=1)
