"""Quantizers and quantized tensors: formulas against independent references, layouts, edge values, tensor behavior."""

import copy
import io
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from engine_reference import QUANTIZERS, nearest, wide
from torch import Tensor

import te_models.engine.emulated as te
from te_models.numerics import casts
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import DType
from te_models.numerics.scale_rules import scale_from_amax

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
MAX = {E4M3: 448.0, E5M2: 57344.0}
FLT_MAX = torch.finfo(FP32).max

NAMES = ("delayed", "current", "block1", "block2", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_2d")
MAKE = {name: QUANTIZERS[name] for name in NAMES}


def reference_codes(x: Tensor, dtype: DType) -> Tensor:
    """FP8 codes of FP32 values, by search among all finite values: rounding to nearest even, saturating."""
    positive = (
        torch.arange(127 if dtype == E4M3 else 124, dtype=torch.uint8).view(FP8[dtype]).float()
    )
    codes = nearest(x.abs().clamp(max=MAX[dtype]), positive).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 7)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
class TestCast:
    def test_rounds_to_nearest_even_and_saturates(self, dtype: DType) -> None:
        values = (
            torch.arange(127 if dtype == E4M3 else 124, dtype=torch.uint8).view(FP8[dtype]).float()
        )
        middle = (values[1:] + values[:-1]) / 2
        edges = torch.cat(
            [values, middle, middle.nextafter(middle * 2), middle.nextafter(middle * 0)]
        )
        special = torch.tensor(
            [MAX[dtype] * 1.01, MAX[dtype] * 1e6, torch.inf, FLT_MAX, 1e-45, 1e-30]
        )
        x = torch.cat([edges, special, torch.randn(100_000) * 10, torch.randn(100_000) * 1e-3])
        x = torch.cat([x, -x])
        assert_same_bits(
            "result", casts.cast_fp8(x, torch.ones(1), dtype), reference_codes(x, dtype)
        )

    def test_keeps_nan(self, dtype: DType) -> None:
        codes = casts.cast_fp8(torch.tensor([torch.nan, -torch.nan]), torch.ones(1), dtype)
        assert codes.view(FP8[dtype]).float().isnan().all()

    def test_decodes_every_code(self, dtype: DType) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        expected = codes.view(FP8[dtype]).float()
        assert_same_bits(
            "result", casts.decode_fp8(codes, dtype).nan_to_num(-1.5), expected.nan_to_num(-1.5)
        )
        finite = codes[expected.isfinite()]
        decoded = casts.decode_fp8(finite, dtype)
        assert_same_bits(
            "decoded.view(torch.int32)",
            decoded.view(torch.int32),
            expected[expected.isfinite()].view(torch.int32),
        )


def test_a_lower_bound_of_the_amax() -> None:
    found = scale_from_amax(torch.tensor([0.0, 4.0, 7.0]), 448.0, epsilon=4.48)
    torch.testing.assert_close(found, torch.tensor([100.0, 100.0, 64.0]), rtol=2.0**-23, atol=0)


def test_e8m0_values() -> None:
    e = torch.arange(256, dtype=torch.uint8)
    value, inverse = e8m0_to_float(e), e8m0_to_float(e, inverse=True)
    assert value[255].isnan() and inverse[255].isnan()
    assert value[:255].tolist() == [2.0 ** (i - 127) for i in range(255)]
    assert inverse[:255].tolist() == [2.0 ** (127 - i) for i in range(255)]


def test_a_block_of_rows_has_the_largest_scale_of_its_rows() -> None:
    """Blocks of two dimensions, against those of one row, which test_range.py and test_torchao.py judge."""
    x = torch.randn(256, 160) * torch.logspace(-9, 9, 256, base=2)[:, None]
    for name, size in (("block1", 128), ("mxfp8", 32), ("nvfp4", 16)):
        rows, blocks = (
            MAKE[name](E4M3)(x),
            MAKE[f"{name.removesuffix('1')}{'2' if size == 128 else '_2d'}"](E4M3)(x),
        )
        few = rows._rowwise_scale_inv.t() if size == 128 else rows._rowwise_scale_inv
        found, count = blocks._rowwise_scale_inv, 256 // size if size == 128 else 256
        expected = few[:256, : -(-160 // size)].unflatten(0, (-1, size)).amax(1)
        expected = expected if size == 128 else expected.repeat_interleave(size, 0)
        assert_same_bits(name, found[:count, : expected.shape[1]], expected)
        left, right = (blocks.operand(columnwise).values for columnwise in (False, True))
        assert_same_bits(name, left, right if right.shape == left.shape else right.t())


@pytest.mark.parametrize("name", ["block1", "block2"])
@pytest.mark.parametrize("shape", [(130, 100), (1, 16)])
def test_half_a_block_is_a_block_with_zeros(name: str, shape: tuple[int, int]) -> None:
    x, (m, k) = wide(*shape, FP16), shape
    part, whole = (
        MAKE[name](E5M2)(t) for t in (x, torch.nn.functional.pad(x, (0, -k % 128, 0, -m % 128)))
    )
    assert_same_bits("rows", part._rowwise_data, whole._rowwise_data[:m, :k])
    assert_same_bits("columns", part._columnwise_data, whole._columnwise_data[:k, :m])
    for scales in ("_rowwise_scale_inv", "_columnwise_scale_inv"):
        few, all_of_them = getattr(part, scales), getattr(whole, scales)
        rows, columns = (-(-n // 128) if name == "block2" else n for n in (m, k))
        used = (
            (rows if scales == "_rowwise_scale_inv" else columns)
            if name == "block1"
            else few.shape[1]
        )
        used = min(used, few.shape[1], all_of_them.shape[1])
        assert_same_bits(scales, few[:, :used], all_of_them[: len(few), :used])


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_an_empty_tensor(name: str) -> None:
    q = MAKE[name](E4M3)
    t = q(torch.empty(0, 16, dtype=BF16))
    assert (
        t._data.shape == (0, 16)
        and t._transpose.shape == (16, 0)
        and t.dequantize().shape == (0, 16)
    )
    if name == "delayed":
        assert q.amax == 0


@pytest.mark.parametrize("name", MAKE)
class TestTensor:
    def make(self, name: str, shape: tuple[int, ...] = (64, 64)) -> tuple[Any, Any, Tensor]:
        torch.manual_seed(0)
        q, x = MAKE[name](E4M3), torch.randn(shape).to(BF16)
        return q, q(x), x

    def test_an_empty_one_is_not_counted(self, name: str) -> None:
        q, _, x = self.make(name)
        counted: list[Tensor] = []
        q.observer = lambda values, quantized, scale: counted.append(values)
        q.make_empty(x.shape, dtype=BF16)
        assert counted == []
        q(x)
        assert len(counted) == 1 and counted[0] is x

    def test_is_a_tensor_of_the_nominal_dtype(self, name: str) -> None:
        _, t, x = self.make(name)
        assert (
            isinstance(t, Tensor)
            and t.shape == x.shape
            and t.dtype == BF16
            and t.device == x.device
        )
        assert type(t._quantizer) is type(MAKE[name](E4M3))
        assert (t.dequantize().float() - x.float()).norm() / x.float().norm() < 0.12
        quantized: Any = t
        assert quantized.dequantize(dtype=FP32).dtype == FP32

    def test_internal_gives_the_plain_storage(self, name: str) -> None:
        q, t, x = self.make(name)
        q.internal = True
        storage = q(x)
        assert not isinstance(storage, Tensor) and torch.equal(storage.dequantize(), t.dequantize())

    def test_three_dimensions(self, name: str) -> None:
        q, t, x = self.make(name, (2, 32, 64))
        flat = q(x.view(64, 64))
        assert_same_bits(
            "t.dequantize().view(64, 64)", t.dequantize().view(64, 64), flat.dequantize()
        )
        if hasattr(t, "_data"):
            assert t._transpose.shape == (64, 2, 32)
        elif "mxfp8" in name:
            assert t._columnwise_data.shape == (2, 32, 64)
        else:
            assert t._columnwise_data.shape[:2] == (64, 2)

    def test_autograd_sees_the_identity(self, name: str) -> None:
        q, _, x = self.make(name)
        x = x.clone().requires_grad_()
        (q(x).dequantize() * 3).sum().backward()
        assert (x.grad == 3).all()

    def test_operations_use_the_values(self, name: str) -> None:
        _, t, _ = self.make(name)
        assert type(t + 1) is Tensor and torch.equal(t + 1, t.dequantize() + 1)
        assert_same_bits("t.float()", t.float(), t.dequantize().float())

    def test_in_place_operations_quantize_again(self, name: str) -> None:
        q, t, _ = self.make(name)
        expected = q(t.dequantize() * 2).dequantize()
        data = t.mul_(2)
        assert data is t and torch.equal(t.dequantize(), expected)
        t.copy_(torch.zeros(64, 64))
        assert (t.dequantize() == 0).all()
        t.data = torch.ones(64, 64)
        assert (t.dequantize() > 0.9).all()

    def test_copies_are_independent(self, name: str) -> None:
        _, t, _ = self.make(name)
        before = t.dequantize()
        for other in (t.clone(), copy.deepcopy(t)):
            assert type(other) is type(t) and torch.equal(other.dequantize(), before)
            other.zero_()
            assert_same_bits("t.dequantize()", t.dequantize(), before)
        assert type(t.detach()) is type(t)

    def test_pickles(self, name: str) -> None:
        _, t, _ = self.make(name)
        buffer = io.BytesIO()
        torch.save(t, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert type(loaded) is type(t) and torch.equal(loaded.dequantize(), t.dequantize())

    def test_usages(self, name: str) -> None:
        q, t, x = self.make(name)
        values = t.dequantize()
        t.update_usage(columnwise_usage=False)
        assert t.get_usages() == {"rowwise": True, "columnwise": False}
        assert_same_bits("t.dequantize()", t.dequantize(), values)
        if name in ("delayed", "current", "block2"):
            full = q(x)
            t.update_usage(columnwise_usage=True)
            for attribute in ("_transpose", "_columnwise_data", "_columnwise_scale_inv"):
                if hasattr(full, attribute):
                    assert_same_bits(
                        "getattr(t, attribute)", getattr(t, attribute), getattr(full, attribute)
                    )
            t.update_usage(rowwise_usage=False)
            assert_same_bits("t.dequantize()", t.dequantize(), values)
            t.update_usage(rowwise_usage=True)
            assert_same_bits("t.dequantize()", t.dequantize(), values)
        else:
            with pytest.raises(RuntimeError, match="quantize again with"):
                t.update_usage(columnwise_usage=True)

    def test_quantizer_usages(self, name: str) -> None:
        q, _, x = self.make(name)
        q.set_usage(rowwise=True, columnwise=False)
        assert q(x).get_usages() == {"rowwise": True, "columnwise": False}
        q.set_usage(rowwise=False, columnwise=True)
        if name in ("delayed", "current"):
            with pytest.raises(NotImplementedError, match="columnwise-only"):
                q(x)
        else:
            assert q(x).get_usages() == {"rowwise": False, "columnwise": True}

    def test_quantize_into(self, name: str) -> None:
        q, t, x = self.make(name)
        other = q.make_empty((64, 64), dtype=BF16)
        assert type(other) is type(t) and (other.dequantize() == 0).all()
        q.quantize(x, out=other)
        assert_same_bits("other.dequantize()", other.dequantize(), t.dequantize())
        with pytest.raises(ValueError, match="cannot quantize shape"):
            q.quantize(x[:32], out=other)


def test_row_and_column_copies_of_a_transpose_agree() -> None:
    x = torch.randn(64, 96).to(BF16)
    for make in (MAKE["block1"], MAKE["mxfp8"], MAKE["nvfp4"]):
        a, b = make(E4M3)(x), make(E4M3)(x.t().contiguous())
        left, right = a.operand(True), b.operand(False)
        assert_same_bits("left.values", left.values, right.values.t())


def test_current_scaling_warns_about_ignored_arguments() -> None:
    with pytest.warns(DeprecationWarning, match="ignores"):
        te.Float8CurrentScalingQuantizer(E4M3, "cpu", use_existing_amax=True)


def test_dtype_numbers() -> None:
    assert {d.name: int(d) for d in DType} == {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
        "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
    }  # fmt: skip
    assert te.DType.cast(7) is te.DType.kFloat8E4M3


@pytest.mark.parametrize("name", MAKE)
def test_tiles_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = wide(384, 288, BF16)
    whole = MAKE[name](DType.kFloat8E4M3)(x)
    monkeypatch.setattr(casts, "_TILE", 5000)
    tiled = MAKE[name](DType.kFloat8E4M3)(x)
    for a, b in zip(whole.get_data_tensors(), tiled.get_data_tensors(), strict=True):
        assert a is b is None or torch.equal(a, b)
