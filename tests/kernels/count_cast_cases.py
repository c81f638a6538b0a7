"""Counts of a cast by Triton kernels, against those in PyTorch.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import math
from typing import Any

import pytest
import torch
from expert_counts import assert_counts
from fewer import every
from torch import Tensor

from te_models.kernels import (
    count_blocks_triton,
    count_cast_triton,
    count_words_triton,
    fp8_tiles_triton,
    handover_triton,
)
from te_models.kernels.count_blocks_triton import count_blocks
from te_models.kernels.count_cast_triton import Counts, count_cast
from te_models.kernels.count_words_triton import are_words, count_words
from te_models.numerics.formats import DType
from te_models.numerics.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)
from te_models.recorder.layout import FIELDS, INDEX
from te_models.recorder.quantized import cast_of
from te_models.recorder.statistics import count_cast as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def values(rows: int, columns: int) -> Tensor:
    """Values of many sizes, zeros, rows of zeros, and some that are not finite."""
    g = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=g) * torch.logspace(-6, 1, columns)
    x[1::7] = 0
    x[:, 3] = 0
    x[0, 0], x[2, 1], x[3, 2], x[4, 5] = math.nan, math.inf, -math.inf, 3000.0
    return x.bfloat16().to(DEVICE)


def quantizer(kind: str) -> Any:
    if kind.startswith("delayed"):
        scale, amax = torch.full((1,), 5.0, device=DEVICE), torch.zeros(1, device=DEVICE)
        return Float8Quantizer(scale, amax, E5M2 if kind.endswith("5") else E4M3)
    if kind.startswith("current"):
        return Float8CurrentScalingQuantizer(E5M2 if kind.endswith("5") else E4M3)
    if kind == "mx":
        return MXFP8Quantizer(E4M3)
    size = 2 if kind == "square" else 1
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=size)


def table(spread: int) -> Counts:
    fields = torch.zeros(spread, len(FIELDS), dtype=torch.float64, device=DEVICE)
    fields[:, INDEX["scale_min"]] = math.inf
    codes = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return Counts(fields, codes)


def summed(counts: Counts) -> dict[str, float]:
    fields = counts.fields.cpu()
    found = dict(zip(FIELDS, fields.sum(0).tolist(), strict=True))
    for name in ("amax", "scale_max", "format"):
        found[name] = fields[:, INDEX[name]].amax().item()
    found["scale_min"] = fields[:, INDEX["scale_min"]].amin().item()
    del found["scale_age"]
    return found


def test_the_kernels_know_the_order_of_the_fields() -> None:
    for place, name in enumerate(FIELDS):
        assert getattr(count_cast_triton, f"_{name.upper()}") == place
    assert len(FIELDS) == count_cast_triton._WIDTH


KINDS = ["delayed-4", "delayed-5", "current-4", "current-5", "row", "square", "mx"]


@pytest.mark.parametrize(("kind", "source"), every(2, KINDS, [True, False]))
def test_the_counts_are_those_of_pytorch(kind: str, source: bool) -> None:
    shape = (64, 288) if kind != "square" else (160, 288)
    x = values(*shape)
    made = quantizer(kind)
    x = torch.where(x.isfinite(), x, 0) if kind != "delayed-4" else x
    result = made(x)
    cast = cast_of(result, made.known_scale)
    assert cast is not None
    counts = table(3)
    own = x if source else None
    block = None if cast.inverse.numel() == 1 else cast.block
    e5m2 = cast.format == 8
    count_cast(own, cast.codes, cast.inverse, block, cast.scale, e5m2, counts)
    expected, codes = reference(own, cast)
    wanted = dict(zip(FIELDS, expected.tolist(), strict=True))
    del wanted["scale_age"]
    assert_counts(summed(counts), wanted)
    assert counts.codes.item() == codes.item()


def test_transposed_data_has_the_same_counts() -> None:
    x = values(48, 160).nan_to_num(0, 1, 1)
    cast = cast_of(quantizer("current-4")(x))
    assert cast is not None
    one, other = table(1), table(1)
    count_cast(x, cast.codes, cast.inverse, None, None, False, one)
    count_cast(x, cast.codes.t().contiguous().t(), cast.inverse, None, None, False, other)
    assert summed(one) == pytest.approx(summed(other)) and torch.equal(one.codes, other.codes)


# Parts of tiles, and rows that are no multiple of 128.
MATRICES = [(64, 288, torch.bfloat16), (37, 132, torch.float32), (16, 640, torch.float16)]
# Values as they are, zeros, a few large ones, and sizes whose squares FP32 does not hold.
SIZES = {"mixed": 1.0, "finite": 1.0, "zeros": 0.0, "tiny": 1e-25, "huge": 1e25}


# Squares that overflow are left out later.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(
    ("kind", "source", "size", "matrix"),
    every(
        11,
        ["delayed-4", "delayed-5", "current-4", "current-5"],
        [True, False],
        SIZES,
        MATRICES,
        rest=3,
    ),
)
def test_words_have_the_counts_of_pytorch(
    kind: str,
    source: bool,
    size: str,
    matrix: tuple[int, int, torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(count_words_triton, "PROGRAMS", 2)  # each goes through several tiles
    rows, columns, dtype = matrix
    x = values(rows, columns).float() * SIZES[size]
    x = x.to(dtype)
    if size != "mixed" or kind.startswith("current"):
        x = torch.where(x.isfinite(), x, 0)
    made = quantizer(kind)
    cast = cast_of(made(x), made.known_scale)
    assert cast is not None
    counts = table(3)
    own = x if source else None
    assert are_words(own, cast.codes)
    count_words(own, cast.codes, cast.inverse, cast.scale, cast.format == 8, counts)
    expected, codes = reference(own, cast)
    wanted = dict(zip(FIELDS, expected.tolist(), strict=True))
    del wanted["scale_age"]
    assert_counts(summed(counts), wanted)
    assert counts.codes.item() == codes.item()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity less infinity
@pytest.mark.parametrize(
    ("kind", "size", "matrix"),
    every(11, ["row", "square", "mx"], SIZES, [*MATRICES, (300, 520, torch.bfloat16)], rest=3),
)
def test_blocks_have_the_counts_of_pytorch(
    kind: str, size: str, matrix: tuple[int, int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_blocks_triton, "PROGRAMS", 2)  # each goes through several units
    rows, columns, dtype = matrix
    if kind == "mx":
        # It has whole blocks alone.
        rows = 32 * math.ceil(rows / 32)
        columns = 32 * math.ceil(columns / 32)
    x = (values(rows, columns).float() * SIZES[size]).to(dtype)
    if size != "mixed":
        x = torch.where(x.isfinite(), x, 0)
    cast = cast_of(quantizer(kind)(x))
    assert cast is not None and are_words(x, cast.codes)
    counts = table(3)
    count_blocks(x, cast.codes, cast.inverse, cast.block, cast.format == 8, counts)
    expected, codes = reference(x, cast)
    wanted = dict(zip(FIELDS, expected.tolist(), strict=True))
    del wanted["scale_age"]
    assert_counts(summed(counts), wanted)
    assert counts.codes.item() == codes.item()


@pytest.mark.parametrize("rows", [1, 128])
def test_saturated_values_of_blocks(rows: int) -> None:
    """Under scales that are too large for some blocks, as no cast of ours has them."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    inverse = torch.ones(256 // rows, 2, device=DEVICE)
    inverse[1::2, 1] = 2.0**-9
    each = inverse.repeat_interleave(rows, 0).repeat_interleave(128, 1)
    codes = (x / each).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    counts = table(3)
    count_blocks(x, codes, inverse, (rows, 128), False, counts)
    found = summed(counts)
    assert found["saturated"] == int((x.abs() > 464 * each).sum()) > 1000
    assert found["nonfinite"] == 0 and found["scale_max"] == 512 and found["scale_min"] == 1


def test_an_inverse_scale_of_zero_flushes_its_block() -> None:
    """The inverse of a very large scale is 0 in FP32: the block's codes are not, but what they stand for."""
    x = torch.ones(64, 256, device=DEVICE)
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
    inverse = torch.ones(64, 2, device=DEVICE)
    inverse[5, 1] = 0
    counts = table(3)
    count_blocks(x, codes, inverse, (1, 128), False, counts)
    found = summed(counts)
    assert found["flushed"] == 128 == found["noise"] and found["blocks"] == 127
    assert found["scale_max"] == found["scale_min"] == 1


# Of 35 tiles: the first and the last one, two that share a mark (1 and 33), and one with many.
SATURATED_IN = {0: 1, 1: 2, 20: 900, 33: 3, 34: 1}


@pytest.mark.parametrize(
    "where",
    ["memory", *(pytest.param(one, marks=pytest.mark.slow) for one in ("kernel", "halves"))],
)
def test_saturated_values_of_some_tiles_of_a_program(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those tiles are gone through again; a saturated value spoils no other count."""
    for module, name in (
        (count_words_triton, "PROGRAMS"),
        (handover_triton, "PROGRAMS"),
        (handover_triton, "PROGRAMS_OF_HALVES"),
    ):
        monkeypatch.setattr(module, name, 1)
    high = count_words_triton.ROWS if where == "memory" else fp8_tiles_triton.ROWS
    wide = 4 * count_words_triton.WORDS if where == "memory" else fp8_tiles_triton.COLUMNS
    x = torch.randn(35 * high, wide, generator=torch.Generator().manual_seed(3))
    for tile, count in SATURATED_IN.items():
        x[tile * high : (tile + 1) * high].view(-1)[7 : 7 + count] = 470.0
    total = sum(SATURATED_IN.values())
    x = x.to(DEVICE)
    counts = table(3)
    one = torch.ones(1, device=DEVICE)
    amax = torch.zeros(1, device=DEVICE)
    if where == "memory":
        codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        count_words(x, codes, one, one, False, counts)
    elif where == "kernel":
        handover_triton.cast(x, one, amax, False, counts=counts)
    else:
        # The gradients of gate and up: relu2 of a gate of 1 has the slope 2 and the value 1.
        gate_up = torch.ones(len(x), 2 * wide, device=DEVICE)
        handover_triton.activate_backward(x, gate_up, one, amax, False, "relu2", counts=counts)
        total += int((x.abs() * 2 > 464).sum())
        x = torch.cat([2 * x, x], 1)
    found = summed(counts)
    assert found["saturated"] == total == int((x.abs() > 464).sum())
    assert found["nonfinite"] == 0 and found["amax"] == x.abs().max().item()
    after = x.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert found["signal"] == pytest.approx(x.double().square().sum().item(), rel=1e-5)
    assert found["noise"] == pytest.approx((x - after).square().sum().item(), rel=1e-5)
    assert found["zeros"] == 0 and found["flushed"] == ((x != 0) & (after == 0)).sum().item()


@pytest.mark.parametrize(("kind", "known"), every(2, KINDS, [True, False]))
def test_memory_around_a_tensor_is_not_counted(kind: str, known: bool) -> None:
    """It may hold NaN, before a cast as well as after it: counted, it would stop a run that is healthy."""
    rows, columns = 64, 160
    memory = torch.full((rows + 40, columns + 64), math.nan, dtype=torch.bfloat16, device=DEVICE)
    memory[:rows, :columns] = values(rows, columns).nan_to_num(0, 1, 1)
    source = memory[:rows, :columns]
    cast = cast_of(quantizer(kind)(source.contiguous()))
    assert cast is not None
    around = torch.full((rows + 40, columns + 64), 0x7F, dtype=torch.uint8, device=DEVICE)
    around[:rows, :columns] = cast.codes
    data = around[:rows, :columns]
    own = source if known else None
    e5m2 = cast.format == 8
    one_scale = cast.inverse.numel() == 1
    counts = table(3)
    count_cast(own, data, cast.inverse, None if one_scale else cast.block, None, e5m2, counts)
    found = [summed(counts)]
    if one_scale:
        counts = table(3)
        assert are_words(own, data)
        count_words(own, data, cast.inverse, None, e5m2, counts)
        found.append(summed(counts))
    elif known:
        counts = table(3)
        count_blocks(source, data, cast.inverse, cast.block, e5m2, counts)
        found.append(summed(counts))
    for fields in found:
        assert fields["nonfinite"] == 0 and fields["elements"] == rows * columns


def test_what_are_words() -> None:
    codes = torch.zeros(8, 64, dtype=torch.uint8)
    x = torch.zeros(8, 64)
    assert are_words(x, codes) and are_words(None, codes[:, :32])
    assert not are_words(x, codes[:, :30])
    assert not are_words(x.t().contiguous().t(), codes)
    assert not are_words(None, codes.view(-1)[1:129].view(4, 32))
