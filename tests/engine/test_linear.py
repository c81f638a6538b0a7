"""te.Linear: dtypes, shapes, what is saved, caching, options, errors."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from engine_reference import RECIPES, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

BF16, FP32 = torch.bfloat16, torch.float32
STATELESS = {name: make for name, make in RECIPES.items() if name != "delayed"}


@pytest.mark.parametrize("name", RECIPES)
def test_gemm_is_the_product_of_the_dequantized_operands(name: str) -> None:
    """y, dx and dw against FP64 products of what the module's own quantizers make of the operands."""
    if name == "nvfp4":
        recipe: R.Recipe = R.NVFP4BlockScaling(disable_stochastic_rounding=True)
    else:
        recipe = RECIPES[name]()
    m = te.Linear(256, 384, bias=False, params_dtype=BF16)
    x = (torch.randn(128, 256) * torch.logspace(-3, 3, 128)[:, None]).to(BF16).requires_grad_()
    g = (torch.randn(128, 384) * 1e-3).to(BF16)
    y = run(m, recipe, x, g)
    forward, backward = m.quantizers["scaling_fwd"], m.quantizers["scaling_bwd"]
    for quantizer in (*forward, *backward):
        quantizer.set_usage(rowwise=True, columnwise=True)
        if name == "delayed":
            quantizer.scale.fill_(1.0)
    xq, wq, gq = forward[0](x.detach()), forward[1](m.weight.detach()), backward[0](g)

    def value(storage: Any, columnwise: bool) -> Tensor:
        operand = storage.operand(columnwise)
        return operand.values.double() * (1 if operand.scale is None else operand.scale.double())

    half_step = 2.0**-8  # relative to a number with 8 significant bits
    for got, expected in (
        (y, value(xq, False) @ value(wq, False).t()),
        (x.grad, value(gq, False) @ value(wq, True)),
        (m.weight.grad, value(gq, True).t() @ value(xq, True)),
    ):
        # One rounding to BF16 is all that may differ, in each element, beside FP32 accumulation.
        bound = expected.abs() * half_step * 1.001 + expected.abs().amax() * 1e-6
        assert ((got.double() - expected).abs() <= bound).all()


def saved_bytes(function: Callable[[], Any]) -> dict[str, int]:
    """Bytes that autograd saves in `function`, by dtype; parameters do not count."""
    found: dict[str, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            key = str(t.dtype).removeprefix("torch.")
            found[key] = found.get(key, 0) + t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return found


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_saves_codes_and_no_high_precision(name: str) -> None:
    tokens, size = 256, 512
    m = te.Linear(size, size, params_dtype=BF16)
    x = torch.randn(tokens, size, dtype=BF16, requires_grad=True)
    found = saved_bytes(lambda: run(m, RECIPES[name](), x))
    assert found.keys() <= {"uint8", "float32"}
    codes = tokens * size + 2 * size * size
    scales = {"delayed": 2, "current": 2, "block": 2 * size + 2 * 16, "mxfp8": 0}[name] * 4
    e8m0 = (tokens // 32 * size + 2 * size * size // 32) if name == "mxfp8" else 0
    assert found["uint8"] == codes + e8m0
    assert found.get("float32", 0) == scales


def test_bf16_saves_an_alias_of_the_input() -> None:
    m = te.Linear(64, 64, params_dtype=BF16)
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    assert saved_bytes(lambda: run(m, None, x)) == {"bfloat16": 32 * 64 * 2}


class TestDtypes:
    def test_mismatch(self) -> None:
        with pytest.raises(
            TypeError, match="Data types for parameters must match .* torch.bfloat16 and 'weight'"
        ):
            te.Linear(16, 16)(torch.ones(16, 16, dtype=BF16))

    @pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_output_dtype_is_the_input_dtype(self, dtype: torch.dtype, fp8: bool) -> None:
        m = te.Linear(32, 32, params_dtype=dtype)
        x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
        y = run(m, R.Float8CurrentScaling() if fp8 else None, x, torch.ones(32, 32, dtype=dtype))
        assert y.dtype == x.grad.dtype == m.weight.grad.dtype == m.bias.grad.dtype == dtype

    def test_default_params_dtype(self) -> None:
        assert te.Linear(16, 16).weight.dtype == torch.get_default_dtype()

    def test_torch_autocast_quantizes_from_fp32(self) -> None:
        m = te.Linear(32, 32, bias=False)
        # The amax has more bits than BF16: rounding first would give another scale.
        x = torch.full((32, 32), 1.0 + 2.0**-20, requires_grad=True)
        with torch.autocast("cpu", BF16):
            y = run(m, R.Float8CurrentScaling(), x)
        assert y.dtype == BF16
        q = m.quantizers["scaling_fwd"][0]
        assert q(x)._scale_inv.item() == pytest.approx((1.0 + 2.0**-20) / 448, rel=1e-7)
        y.sum().backward()
        assert m.weight.grad.dtype == FP32
        assert_same_bits("m.weight.grad", m.weight.grad, m.weight.grad.to(BF16).float())

    def test_torch_autocast_does_not_narrow_the_gemm(self) -> None:
        m = te.Linear(64, 32, bias=False, params_dtype=BF16)
        x = torch.randn(32, 64).to(BF16)
        plain = run(m, R.Float8CurrentScaling(), x)
        with torch.autocast("cpu", BF16):
            assert_same_bits(
                "run(m, R.Float8CurrentScaling(), x)", run(m, R.Float8CurrentScaling(), x), plain
            )

    def test_torch_autocast_without_fp8(self) -> None:
        m = te.Linear(32, 32)
        x = torch.randn(32, 32)
        with torch.autocast("cpu", BF16):
            y = m(x)
        assert_same_bits(
            "y", y, nn.functional.linear(x.to(BF16), m.weight.to(BF16), m.bias.to(BF16))
        )

    def test_the_bias_of_an_fp32_layer_is_rounded_to_bf16_in_fp8(self) -> None:
        m = te.Linear(32, 32)
        nn.init.constant_(m.bias, 1 + 2.0**-12)
        assert (run(m, R.Float8CurrentScaling(), torch.zeros(32, 32)) == 1).all()


class TestShapes:
    def test_1d_input_gains_a_dimension(self) -> None:
        assert te.Linear(16, 32)(torch.ones(16)).shape == (1, 32)

    def test_non_contiguous_input(self) -> None:
        m = te.Linear(32, 32, params_dtype=BF16)
        x = torch.randn(32, 64, dtype=BF16)[:, ::2]
        assert_same_bits(
            "run(m, R.Float8CurrentScaling(), x)",
            run(m, R.Float8CurrentScaling(), x),
            run(m, R.Float8CurrentScaling(), x.contiguous()),
        )

    def test_wrong_size(self) -> None:
        with pytest.raises(AssertionError, match="GEMM not possible"):
            te.Linear(16, 16)(torch.ones(16, 32))

    @pytest.mark.parametrize(
        ("tokens", "inputs", "outputs", "grad", "fails"),
        [
            (16, 32, 32, True, False),
            (24, 32, 32, True, True),
            (24, 32, 32, False, False),
            (20, 32, 32, False, True),
            (7, 32, 32, False, True),
            (16, 24, 32, False, True),
            (16, 32, 24, True, True),
            (16, 32, 24, False, False),
            (16, 32, 20, False, True),
        ],
    )
    def test_alignment(
        self, tokens: int, inputs: int, outputs: int, grad: bool, fails: bool
    ) -> None:
        m = te.Linear(inputs, outputs, params_dtype=BF16)
        x = torch.randn(tokens, inputs, dtype=BF16)
        with torch.set_grad_enabled(grad):
            if not fails:
                run(m, R.Float8CurrentScaling(), x)
                return
            message = "FP8 execution requires the product of all dimensions except the last to be divisible by"
            with pytest.raises(ValueError, match=message):
                run(m, R.Float8CurrentScaling(), x)

    @pytest.mark.parametrize(
        ("tokens", "inputs", "outputs"), [(16, 64, 64), (32, 48, 64), (32, 64, 48)]
    )
    def test_mxfp8_alignment(self, tokens: int, inputs: int, outputs: int) -> None:
        m = te.Linear(inputs, outputs, params_dtype=BF16)
        with pytest.raises(
            RuntimeError, match=r"MXFP8 requires tensor dims that are divisible by 32 \(got shape="
        ):
            run(m, R.MXFP8BlockScaling(), torch.randn(tokens, inputs, dtype=BF16))

    def test_no_alignment_without_fp8(self) -> None:
        m = te.Linear(7, 5)
        m(torch.randn(3, 7)).sum().backward()


class TestBias:
    def test_without_bias_the_attribute_is_empty(self) -> None:
        m = te.Linear(16, 16, bias=False, return_bias=True)
        assert m.bias.numel() == 0 and "bias" not in dict(m.named_parameters())
        assert m(torch.ones(16, 16))[1] is None

    @pytest.mark.parametrize("name", [None, *RECIPES])
    def test_return_bias(self, name: str | None) -> None:
        m = te.Linear(32, 32, return_bias=True, params_dtype=BF16)
        nn.init.ones_(m.bias)
        x = torch.zeros(32, 32, dtype=BF16)
        y, bias = run(m, RECIPES[name]() if name else None, x)
        assert (y == 0).all() and (bias == 1).all()
        (y + bias).sum().backward()
        assert (m.bias.grad == 32).all()


class TestWeightCache:
    @pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
    def test_false_reuses_and_true_requantizes(self, name: str) -> None:
        m = te.Linear(64, 64, bias=False, params_dtype=BF16)
        x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
        first = run(m, RECIPES[name](), x, is_first_microbatch=True)
        with torch.no_grad():
            m.weight.mul_(2)
        assert_same_bits("result", run(m, RECIPES[name](), x, is_first_microbatch=False), first)
        assert_same_bits("result", run(m, RECIPES[name](), x, is_first_microbatch=True), first * 2)
        assert_same_bits("run(m, RECIPES[name](), x)", run(m, RECIPES[name](), x), first * 2)
        assert m._fp8_workspaces.keys() == {"weight"}

    @pytest.mark.parametrize(("first", "cached"), [(None, False), (False, True), (True, True)])
    def test_a_flag_caches_until_a_reset(self, first: bool | None, cached: bool) -> None:
        m = te.Linear(32, 32, params_dtype=BF16)
        run(m, R.Float8CurrentScaling(), torch.ones(32, 32, dtype=BF16), is_first_microbatch=first)
        assert bool(m._fp8_workspaces) == cached
        te.reset_fp8_state(m)
        assert not m._fp8_workspaces

    def test_under_fsdp2_nothing_is_cached(self) -> None:
        """The gathered weight is freed after each pass (section 7.7)."""
        m = te.Linear(32, 32, bias=False, params_dtype=BF16)
        m._is_fsdp2 = True
        x = torch.ones(32, 32, dtype=BF16)
        first = run(m, R.Float8CurrentScaling(), x, is_first_microbatch=True)
        with torch.no_grad():
            m.weight.mul_(2)
        assert_same_bits(
            "result", run(m, R.Float8CurrentScaling(), x, is_first_microbatch=False), first * 2
        )
        assert not m._fp8_workspaces

    def test_a_reused_weight_leaves_its_amax_silent(self) -> None:
        m, recipe = te.Linear(32, 32, params_dtype=BF16), R.DelayedScaling(amax_history_len=4)
        x = torch.ones(32, 32, dtype=BF16)
        run(m, recipe, x, is_first_microbatch=True)
        before = m.fp8_meta["scaling_fwd"].amax_history[:, 1].clone()
        run(m, recipe, x, is_first_microbatch=False)
        assert_same_bits("result", m.fp8_meta["scaling_fwd"].amax_history[:, 1], before)

    def test_an_inference_cache_is_rebuilt_for_training(self) -> None:
        m = te.Linear(32, 32, params_dtype=BF16)
        x = torch.ones(32, 32, dtype=BF16)
        with torch.no_grad():
            run(m, R.MXFP8BlockScaling(), x, is_first_microbatch=True)
        x.requires_grad_()
        run(m, R.MXFP8BlockScaling(), x, torch.ones(32, 32, dtype=BF16), is_first_microbatch=False)
        assert x.grad is not None

    def test_requantizing_the_cache_keeps_saved_fp8_values(self) -> None:
        m = te.Linear(32, 32, bias=False, params_dtype=BF16)
        x = torch.randn(32, 32, dtype=BF16, requires_grad=True)
        y = run(m, R.Float8CurrentScaling(), x, is_first_microbatch=True)
        expected = torch.autograd.grad(run(m, R.Float8CurrentScaling(), x).sum(), x)[0]
        with torch.no_grad():
            m.weight.zero_()
        run(m, R.Float8CurrentScaling(), x, is_first_microbatch=True)
        assert_same_bits(
            "torch.autograd.grad(y.sum(), x)[0]", torch.autograd.grad(y.sum(), x)[0], expected
        )


@pytest.mark.parametrize(
    "make", [R.Float8CurrentScaling, R.Float8BlockScaling, R.MXFP8BlockScaling]
)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(make: Callable[..., R.Recipe], override: str) -> None:
    m = te.Linear(64, 64, bias=False, params_dtype=BF16)
    x, g = torch.randn(64, 64, dtype=BF16, requires_grad=True), torch.randn(64, 64, dtype=BF16)
    y = run(m, make(backward_override=override), x, g)
    assert_same_bits("y", y, run(m, make(), x))
    w, v = m.weight.detach(), x.detach()
    if override == "dequantized":
        quantizers = [q.copy() for q in m.quantizers["scaling_fwd"]]
        for q in quantizers:
            q.internal = False
        v, w = quantizers[0](v).dequantize(), quantizers[1](w).dequantize()
    assert_product(x.grad, g, w)
    assert_product(m.weight.grad, g.t(), v)


def assert_product(found: Tensor, a: Tensor, b: Tensor) -> None:
    """`found` is a @ b, summed in FP32 in any order and rounded to BF16."""
    exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    bound = exact.abs() * 2.0**-8 + terms * a.shape[1] * 2.0**-24
    assert ((found.double() - exact).abs() <= bound).all()


class TestQuantizedInputsAndOutputs:
    @pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
    def test_a_quantized_input_is_used_as_it_is(self, name: str) -> None:
        a, b = (te.Linear(64, 64, bias=False, params_dtype=BF16) for _ in range(2))
        b.load_state_dict(a.state_dict())
        x, g = torch.randn(64, 64, dtype=BF16), torch.randn(64, 64, dtype=BF16)
        expected = run(a, RECIPES[name](), x, g)
        quantizer = a.quantizers["scaling_fwd"][0].copy()
        quantizer.internal = False
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantized = quantizer(x)
        assert_same_bits(
            "run(b, RECIPES[name](), quantized, g)", run(b, RECIPES[name](), quantized, g), expected
        )
        assert_same_bits("a.weight.grad", a.weight.grad, b.weight.grad)
        assert quantized.get_usages() == {"rowwise": True, "columnwise": True}

    @pytest.mark.parametrize("name", ["delayed", "current"])
    def test_fp8_output_feeds_the_next_layer(self, name: str) -> None:
        a, b = (te.Linear(32, 32, params_dtype=BF16) for _ in range(2))
        x = torch.randn(2, 16, 32, dtype=BF16, requires_grad=True)
        with te.autocast(recipe=RECIPES[name]()):
            h = a(x, fp8_output=True)
            y = b(h, fp8_grad=True)
        assert isinstance(h, te.Float8Tensor) and h.shape == (2, 16, 32) and h.dtype == BF16
        y.sum().backward()
        assert x.grad is not None and a.weight.grad is not None
        if name == "delayed":
            assert (a.fp8_meta["scaling_fwd"].amax_history[-1] > 0).all()
            assert (b.fp8_meta["scaling_bwd"].amax_history[-1] > 0).all()


def test_the_backward_frees_the_codes() -> None:
    saved: list[weakref.ref[Tensor]] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(weakref.ref(t))
        return t

    m = te.Linear(32, 32, bias=False, params_dtype=BF16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(m, R.MXFP8BlockScaling(), torch.randn(32, 32, dtype=BF16, requires_grad=True))
    y.backward(torch.ones_like(y))
    assert len(saved) >= 6 and not any(reference() is not None for reference in saved)


def test_one_backward_only() -> None:
    m = te.Linear(32, 32, params_dtype=BF16)
    y = run(m, R.Float8CurrentScaling(), torch.randn(32, 32, dtype=BF16, requires_grad=True))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        y.sum().backward()


@pytest.mark.parametrize("name", STATELESS)
def test_a_changed_recipe_of_the_same_class_takes_effect(name: str) -> None:
    m = te.Linear(64, 64, params_dtype=BF16)
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    run(m, RECIPES[name](), x)
    if name == "nvfp4":
        run(m, R.NVFP4BlockScaling(disable_rht=True), x)
        assert not m.quantizers["scaling_fwd"][0].with_rht
    else:
        fp8_format = R.Format.E4M3 if name == "current" else R.Format.HYBRID
        run(m, type(RECIPES[name]())(fp8_format=fp8_format), x)
        assert m.quantizers["scaling_bwd"][0].dtype == (7 if name == "current" else 8)


@pytest.mark.parametrize("name, dtype", [("delayed", BF16), ("block", FP32), ("nvfp4", BF16)])
def test_a_product_leaves_those_of_other_threads_alone(name: str, dtype: torch.dtype) -> None:
    """PyTorch's switches of how FP32 is multiplied belong to the process."""
    before, seen = torch.backends.mkldnn.matmul.fp32_precision, set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(
                (torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision())
            )
            return func(*args, **(kwargs or {}))

    m = te.Linear(64, 64, params_dtype=dtype)
    x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
    with te.exact_gemm(0), Watch():
        run(m, RECIPES[name](), x, torch.randn(32, 64, dtype=dtype))
    assert seen == {(before, torch.get_float32_matmul_precision())}


@pytest.mark.parametrize(
    ("device", "linear", "experts"),
    [("cpu", "cpu", "cpu"), ("meta", "meta", "meta"), (torch.device("meta"), "cpu", "meta")],
    ids=str,
)
def test_only_the_text_meta_leaves_a_linear_without_memory(
    device: torch.device | str, linear: str, experts: str
) -> None:
    """Transformer Engine 2.20 compares a te.Linear's device with that text, and the type of a te.GroupedLinear's."""
    assert te.Linear(16, 32, device=device).get_parameter("weight").device.type == linear
    grouped = te.GroupedLinear(2, 16, 32, device=device)
    assert grouped.get_parameter("weight0").device.type == experts
