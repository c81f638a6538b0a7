"""NVFP4 against loops over blocks: scales, FP4 values, Hadamard transform, stochastic rounding."""

import pytest
import torch
from bits import assert_same_bits

import te_models.engine.emulated as te
from te_models.numerics import nvfp4
from te_models.numerics.nvfp4 import encode_e2m1, hadamard

BF16, FP32 = torch.bfloat16, torch.float32
FLT_MAX = torch.finfo(FP32).max


class TestNVFP4:
    GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def test_hadamard_is_orthogonal_and_only_columnwise(self) -> None:
        x = torch.randn(64, 48).to(BF16)
        plain, turned = (
            te.NVFP4Quantizer()(x),
            te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(x),
        )
        assert_same_bits("plain._rowwise_data", plain._rowwise_data, turned._rowwise_data)
        assert not torch.equal(plain._columnwise_data, turned._columnwise_data)
        h = hadamard(True, torch.device("cpu"), FP32)
        assert_same_bits("h @ h.t()", h @ h.t(), torch.eye(16))
        assert_same_bits(
            "h[:, 0] * 4",
            h[:, 0] * 4,
            torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0]),
        )

    def test_stochastic_rounding_is_unbiased_and_seeded(self) -> None:
        x = torch.full((256, 256), 0.3)
        x[0, 0] = 6.0
        generator = torch.Generator().manual_seed(5)
        q = te.NVFP4Quantizer(stochastic_rounding=True, generator=generator)
        first = q(x).dequantize()
        generator.manual_seed(5)
        assert_same_bits("q(x).dequantize()", q(x).dequantize(), first)
        assert not torch.equal(q(x).dequantize(), first)
        rest = first[16:]
        assert rest.unique().numel() <= 2
        # Blocks of 0.3 have scale 0.3 / 6: they are representable up to E4M3's rounding of the scale.
        assert abs(rest.mean().item() - 0.3) < 0.01

    def test_stochastic_rounding_has_the_probability_of_the_distance(self) -> None:
        g = torch.Generator().manual_seed(0)
        for value, low, share in ((2.25, 4, 0.25), (4.5, 6, 0.25), (0.4, 0, 0.8), (5.0, 6, 0.5)):
            codes = encode_e2m1(torch.full((100_000,), value), True, g)
            assert set(codes.unique().tolist()) == {low, low + 1}
            assert abs((codes > low).float().mean().item() - share) < 0.01
            assert (encode_e2m1(torch.full((9,), -3.0), True, g) == 13).all()

    @pytest.mark.parametrize("value", [0.5, 1.5, 3.0, 6.0])
    def test_stochastic_rounding_keeps_representable_values(self, value: float) -> None:
        codes = encode_e2m1(torch.full((1 << 20,), value), True, torch.Generator().manual_seed(1))
        assert (codes == codes[0]).all() and self.GRID[codes[0].int()] == value

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_hadamard_transforms_columns(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            nvfp4, "device_type", lambda x: device
        )  # a GPU multiplies in the dtype of x
        x = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
        h = hadamard(True, torch.device("cpu"), FP32)
        expected = (x.float().t().reshape(-1, 16) @ h).view(32, 48).t()
        got = te.NVFP4Quantizer(with_rht=True)._transformed(x)
        assert_same_bits("got", got, expected.to(BF16))

    @pytest.mark.parametrize("option", ["row_scaled_nvfp4", "nvfp4_use_4over6"])
    def test_options_that_are_not_emulated(self, option: str) -> None:
        with pytest.raises(NotImplementedError, match="are not emulated"):
            te.NVFP4Quantizer(**{option: True})

    def test_shape(self) -> None:
        with pytest.raises(
            RuntimeError, match="NVFP4 requires tensor dims that are divisible by 16"
        ):
            te.NVFP4Quantizer()(torch.ones(8, 16))
