"""The emulated engine's Triton kernels against its plain functions, every bit, in Triton's interpreter.

kernels/test_triton_kernels.py runs them.
"""

from typing import Any

import pytest
import torch
from engine_reference import QUANTIZERS, RECIPES
from fewer import every
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated.gemm import gemm
from te_models.numerics import casts, fused, sent_blocks
from te_models.numerics.formats import FP8_MAX, DType
from te_models.numerics.quantizers import Quantizer
from te_models.numerics.scale_rules import delayed_update

# The interpreter computes with NumPy, which warns of the divisions by zero that a GPU does silently.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRODUCTS = (
    (False, False),
    (False, True),
    (True, True),
)  # the columnwise copies in fprop, dgrad and wgrad
FP8 = ("delayed", "current", "current_pow2", "block1", "block2", "block1_fp32", "mxfp8", "mxfp8_2d")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts on a CPU go through the interpreted kernels."""
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))


def values(rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Over many octaves, with zeros, subnormals, ties, infinity and NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * torch.exp2(torch.randn(rows, cols, generator=g) * 12)
    x[torch.rand(rows, cols, generator=g) < 0.1] = 0.0
    x[:, 32:40] = torch.randint(-40, 40, (rows, 8), generator=g) / 16  # ties
    x[1, :16] = torch.tensor(
        [
            0.0,
            -0.0,
            448,
            464,
            465,
            57344,
            61440,
            61441,
            -1e5,
            3e38,
            1e-40,
            -1e-45,
            1e-8,
            2**-9,
            1,
            2,
        ]
    )
    x[2:3] = 0
    x = x.to(dtype)
    if seed % 3 == 1:
        x[3, 5], x[4, 40], x[5, 41] = torch.nan, torch.inf, -torch.inf
    return x


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`, without BF16's subnormal numbers, which Triton's interpreter (3.9) misreads."""
    x = x.float().to(dtype)
    return x.masked_fill(x.abs() < 2.0**-126, 0) if dtype == torch.bfloat16 else x


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in every bit, or both absent."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def check(quantizer: Quantizer, x: Tensor) -> tuple[Any, Any]:
    """Quantize x with plain functions and with the kernels, which agree in every bit."""
    with fused.fused(False):
        plain = quantizer(x)
    made = quantizer(x)
    for key, a, b in zip(
        plain._tensors, plain.get_data_tensors(), made.get_data_tensors(), strict=True
    ):
        assert same(a, b), key
    return plain, made


@pytest.mark.usefixtures("on_cpu")
class TestQuantizers:
    @pytest.mark.parametrize(("name", "dtype", "seed"), every(3, FP8, [E4M3, E5M2], range(3)))
    def test_every_bit(self, name: str, dtype: DType, seed: int) -> None:
        rows, cols = ((160, 96), (64, 288), (128, 128))[seed]
        if not name.startswith("mx"):
            rows, cols = rows + 3 * seed, cols - 5 * seed
        x = values(rows, cols, DTYPES[seed], seed)
        plain, made = check(QUANTIZERS[name](dtype), x)
        if made.blocks(False) is None:
            return
        copies = PRODUCTS[seed]
        *decoded, factor = fused.decode(*(made.blocks(columnwise) for columnwise in copies))
        assert factor is None
        for values_, columnwise in zip(decoded, copies, strict=True):
            # The bits of a NaN are the processor's.
            expected = plain.operand(columnwise).values.bfloat16()
            assert torch.equal(values_.isnan(), expected.isnan())
            assert same(
                values_.nan_to_num(0.0, torch.inf, -torch.inf),
                expected.nan_to_num(0.0, torch.inf, -torch.inf),
            )

    @pytest.mark.parametrize("name", ["block1", "block2", "mxfp8", "mxfp8_2d"])
    @pytest.mark.parametrize("usage", [(True, False), (False, True)])
    def test_only_one_copy(self, name: str, usage: tuple[bool, bool]) -> None:
        quantizer = QUANTIZERS[name](E4M3)
        quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
        plain, made = check(quantizer, values(96, 160, torch.bfloat16, 1).view(3, 32, 160))
        assert (
            plain.get_usages() == made.get_usages() == {"rowwise": usage[0], "columnwise": usage[1]}
        )

    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_every_code_and_its_neighbors(self, dtype: DType) -> None:
        exact = casts.decode_fp8(torch.arange(256, dtype=torch.uint8), dtype)
        exact = exact[exact.isfinite()].sort().values
        middles = (exact[1:] + exact[:-1]) / 2
        x = torch.cat(
            [exact, middles, middles.nextafter(exact[1:]), middles.nextafter(exact[:-1])]
        )[None]
        check(te.Float8Quantizer(torch.ones(1), torch.zeros(1), dtype), x)

    @pytest.mark.parametrize("name", ["block1", "block1_fp32", "mxfp8"])
    @pytest.mark.parametrize("source", DTYPES)
    def test_blocks_of_every_magnitude(self, name: str, source: torch.dtype) -> None:
        """Rows with maxima from FP32's smallest subnormal to its largest number."""
        shape = torch.linspace(-1, 1, 128)
        x = cast(torch.exp2(torch.linspace(-149, 127.99, 256).double())[:, None] * shape, source)
        check(QUANTIZERS[name](E4M3), x)

    @pytest.mark.parametrize("name", ["current", "current_pow2", "block2"])
    @pytest.mark.parametrize(
        "amax", [2.0**-149, 1e-40, 2.0**-126, 1.3e-36, 1.32e-36, 6e-8, 1e-3, 3.4e38]
    )
    def test_tensors_of_every_magnitude(self, name: str, amax: float) -> None:
        for source in DTYPES:
            x = cast(amax * torch.linspace(-1, 1, 256).double().view(16, 16), source)
            check(QUANTIZERS[name](E4M3), x)

    @pytest.mark.parametrize("name", ["delayed", "current", "block2", "mxfp8"])
    def test_a_transposed_input(self, name: str) -> None:
        check(QUANTIZERS[name](E4M3), values(64, 96, torch.bfloat16, 0).t())

    def test_operands_of_two_formats(self) -> None:
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
        pair = te.NVFP4Quantizer()(x), te.MXFP8Quantizer(E4M3)(x)
        with te.exact_gemm(0):
            products = [gemm(*pair, (False, False), None, torch.float32, True)]
            with fused.fused(False):
                products.append(gemm(*pair, (False, False), None, torch.float32, True))
        assert same(*products)

    def test_more_elements_than_programs_for_the_amax(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fused, "_PARTS", 3)
        x = torch.randn(5 * fused._BLOCK + 7)
        for at in (0, 3 * fused._BLOCK, 5 * fused._BLOCK + 6):
            x[at] = -100.0 - at
            assert fused.amax(x).max() == 100 + at

    def test_the_amax_accumulates(self) -> None:
        quantizer = te.Float8Quantizer(torch.ones(1), torch.full((1,), 5.0), E4M3)
        quantizer(torch.tensor([[3.0, -torch.nan]]))
        assert quantizer.amax == 5
        quantizer(torch.tensor([[3.0, -7.5]]))
        assert quantizer.amax == 7.5


NVFP4 = {
    "1d": {},
    "2d": {"with_2d_quantization": True},
    "rht": {"with_rht": True},
    "stochastic": {"stochastic_rounding": True},
    "stochastic_2d": {"stochastic_rounding": True, "with_2d_quantization": True},
    "gradient": {"with_rht": True, "stochastic_rounding": True},
}


@pytest.mark.usefixtures("on_cpu")
class TestNVFP4:
    @pytest.mark.parametrize(("name", "case"), every(3, NVFP4, range(3)))
    def test_every_bit(self, name: str, case: int) -> None:
        shape, dtype = ((16, 144), (160, 48), (128, 128))[case], DTYPES[case]
        g = torch.Generator().manual_seed(7)
        x = torch.randn(shape, generator=g) * torch.exp2(torch.randn(shape, generator=g) * 3)
        x[3], x[5, :4], x[6, :2] = 0.0, -0.0, torch.tensor([1e-30, -1e-42])
        x = (x / x.abs().amax() * 2688).to(dtype).view(*((2, -1) if case == 1 else (-1,)), shape[1])
        self.check(name, x, ((True, True), (True, False), (False, True))[: 3 if case == 1 else 1])

    @pytest.mark.parametrize("name", ["1d", "2d", "gradient"])
    @pytest.mark.parametrize("odd", [0.0, torch.inf, torch.nan])
    def test_odd_tensors(self, name: str, odd: float) -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * (odd != 0)
        x[7, 9] = odd
        self.check(name, x, ((True, True),))

    def test_ties(self) -> None:
        steps = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])
        x = torch.cat(
            [steps, -steps, steps.nextafter(torch.tensor(9.0)), -steps.nextafter(torch.tensor(0.0))]
        )
        self.check("1d", x.view(4, 16).repeat(4, 1) * 448, ((True, True),))

    def check(self, name: str, x: Tensor, usages: tuple[tuple[bool, bool], ...]) -> None:
        for rowwise, columnwise in usages:
            quantizer = te.NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise, **NVFP4[name])
            made = []
            for kernels in (False, True):
                quantizer.generator = torch.Generator().manual_seed(0)
                with fused.fused(kernels):
                    made.append(quantizer(x))
            plain, fast = made
            # The sign of what was NaN and became a zero is the processor's.
            mask = 0x77 if x.isnan().any() else 0xFF
            for key, a, b in zip(
                plain._tensors, plain.get_data_tensors(), fast.get_data_tensors(), strict=True
            ):
                if a is not None and key.endswith("_data"):
                    assert a.stride() == b.stride()
                    a, b = a & mask, b & mask
                assert a is b is None or torch.equal(a.isnan(), b.isnan()), key
                assert a is b is None or same(a.nan_to_num(7.0), b.nan_to_num(7.0)), key
            self.check_decoded(plain, fast, not rowwise, columnwise)

    def check_decoded(self, plain: Any, fast: Any, *copies: bool) -> None:
        *decoded, factor = fused.decode(*(fast.blocks(columnwise) for columnwise in copies))
        expected = [plain.operand(columnwise) for columnwise in copies]
        for made, operand in zip(decoded, expected, strict=True):
            assert torch.equal(made.nan_to_num(9.0), operand.values.bfloat16().nan_to_num(9.0))
        product = expected[0].scale.view(1) * expected[1].scale.view(1)
        assert torch.equal(factor.nan_to_num(9.0), product.nan_to_num(9.0))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("reduced", [False, True])
def test_update_of_delayed_scaling(length: int, algo: str, reduced: bool) -> None:
    g = torch.Generator().manual_seed(length)
    states = [
        (torch.randn(rows, n, generator=g).abs(), torch.rand(n, generator=g))
        for rows, n in ((length, 5), (3, 2))
    ]
    history = states[0][0]
    history[0, 1], history[-1, 2], history[0, 3] = 0.0, torch.inf, 1e-42
    amaxes = torch.cat([history[0] for history, _ in states])
    if reduced:
        amaxes[4:6] = torch.tensor([0.0, 7.0])
    expected = [
        delayed_update(*state, amax, algorithm=algo, margin=1, fp8_max=FP8_MAX[E4M3])
        for state, amax in zip(states, amaxes.split([5, 2]), strict=True)
    ]
    fused.update(states, amaxes if reduced else None, algo == "most_recent", 1, FP8_MAX[E4M3])
    assert all(
        same(a, b)
        for pairs in zip(expected, states, strict=True)
        for a, b in zip(*pairs, strict=True)
    )


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer(name: str) -> None:
    """Three steps of te.Linear: outputs, gradients, scales."""
    recipe = RECIPES[name]()

    def steps() -> list[Tensor]:
        torch.manual_seed(0)
        layer, found = te.Linear(64, 32, params_dtype=torch.bfloat16), []
        for step in range(3):
            x = (torch.randn(32, 64) * 2**step).bfloat16().requires_grad_()
            with te.autocast(recipe=recipe):
                y = layer(x)
            y.backward(torch.randn(32, 32).bfloat16())
            found += [y, x.grad, layer.weight.grad]
        return found + [state.scale for state in layer.fp8_meta.values() if hasattr(state, "scale")]

    with fused.fused(False):
        plain = steps()
    assert all(same(a.detach(), b.detach()) for a, b in zip(plain, steps(), strict=True))


@pytest.mark.parametrize("n", [1, 70, 2048, 4999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_messages_and_their_sums(n: int, dtype: torch.dtype, on_cpu: None) -> None:
    x = values(8, max(n, 64), torch.float32, seed=n)[:, :n].to(dtype)
    with fused.fused(False):
        expected = sent_blocks.pack(x)
    found = sent_blocks.pack(x)
    lost = expected[:, sent_blocks.padded(n) :] == 255
    assert torch.equal(found[:, sent_blocks.padded(n) :], expected[:, sent_blocks.padded(n) :])
    codes = [
        message[:, : sent_blocks.padded(n)].view(8, -1, 128)[~lost] for message in (found, expected)
    ]
    assert torch.equal(*codes)
    sums = torch.empty(2, n)
    sent_blocks.sum_into(sums[0], expected)
    with fused.fused(False):
        sent_blocks.sum_into(sums[1], expected)
    assert torch.equal(sums[0].nan_to_num(nan=7.0), sums[1].nan_to_num(nan=7.0))
    assert torch.equal(sums[0].isnan(), sums[1].isnan())
