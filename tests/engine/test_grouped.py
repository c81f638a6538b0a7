"""te.GroupedLinear: one te.Linear per expert, and what differs from that."""

import copy
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from engine_reference import RECIPES, wide
from fewer import every
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

BF16 = torch.bfloat16
ROWS = [32, 0, 128, 96, 0]
MAKERS = {
    **RECIPES,
    "nvfp4": lambda: R.NVFP4BlockScaling(
        disable_stochastic_rounding=True
    ),  # which draws in the order of the GEMMs
    "bf16": lambda: None,
    "dequantized": lambda: R.Float8CurrentScaling(backward_override="dequantized"),
    "high_precision": lambda: R.Float8BlockScaling(backward_override="high_precision"),
}


def grouped(
    experts: int = len(ROWS), bias: bool = True, dtype: torch.dtype = BF16
) -> te.GroupedLinear:
    m = te.GroupedLinear(experts, 64, 96, bias=bias, params_dtype=dtype)
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.mul_(1 + int(name[-1])) if p.ndim == 2 else p.normal_()
    return m


def linears(m: te.GroupedLinear) -> list[te.Linear]:
    """A te.Linear per expert with the same parameters."""
    made = []
    for i, weight in enumerate(m.weights):
        lin = te.Linear(m.in_features, m.out_features, bias=m.use_bias, params_dtype=weight.dtype)
        with torch.no_grad():
            lin.weight.copy_(weight)
            if m.use_bias:
                lin.bias.copy_(m.biases[i])
        made.append(lin)
    return made


def step(
    module: Any, recipe: R.Recipe | None, x: Tensor, g: Tensor, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """The output, the input's gradient and those of the parameters."""
    x = x.clone().requires_grad_()
    for p in module.parameters():
        p.grad = None
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *args, **options)
    y.backward(g)
    return y, x.grad, *(p.grad for p in module.parameters())


@pytest.mark.parametrize(("name", "bias"), every(2, MAKERS, [True, False]))
def test_equals_a_linear_per_expert(name: str, bias: bool) -> None:
    """Outputs, gradients, scales and histories of three steps, in every bit."""
    m = grouped(bias=bias)
    alone, recipe = linears(m), MAKERS[name]()
    for t in range(3):
        x, g = wide(sum(ROWS), 64, seed=t) * 2.0**t, wide(sum(ROWS), 96, seed=9 + t) * 1e-3
        y, dx, *grads = step(m, recipe, x, g, ROWS)
        parts = zip(alone, x.split(ROWS), g.split(ROWS), y.split(ROWS), dx.split(ROWS), strict=True)
        for i, (lin, xi, gi, yi, dxi) in enumerate(parts):
            expected = step(lin, recipe, xi, gi)
            found = (yi, dxi, *grads[(1 + bias) * i : (1 + bias) * (i + 1)])
            for what, a, b in zip(("y", "dx", "dw", "db"), found, expected, strict=False):
                assert_same_bits(f"{what} of expert {i} in step {t}", a, b)
            if name == "delayed":
                for key, width in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                    own, other = m.fp8_meta[key], lin.fp8_meta[key]
                    place = slice(width * i, width * (i + 1))
                    assert_same_bits("scale", own.scale[place], other.scale)
                    assert_same_bits("history", own.amax_history[:, place], other.amax_history)


def test_its_backward_updates_the_scales_of_gradients() -> None:
    """With no other module of the pass to do it: E5M2's largest number over the amax of each expert's gradients."""
    te.FP8GlobalStateManager.reset()
    m, recipe = grouped(3), R.DelayedScaling(amax_history_len=2)
    x, g = torch.randn(64, 64).to(BF16), torch.randn(64, 96).to(BF16)
    step(m, recipe, x, g, [32, 0, 32])
    scale, history = m.fp8_meta["scaling_bwd"].scale, m.fp8_meta["scaling_bwd"].amax_history
    for expert, part in enumerate((g[:32], None, g[32:])):
        amax = 0.0 if part is None else part.abs().max().item()
        assert history[-1, 2 * expert] == amax
        wanted = 1.0 if part is None else (torch.tensor(57344.0) / amax).item()
        assert scale[2 * expert].item() == wanted


@pytest.mark.parametrize("name", ["bf16", "current"])
def test_frozen_weights_keep_no_input(name: str) -> None:
    """Their experts need the weights alone, for the gradient of the input, which is the same."""
    x, g = torch.randn(64, 64).to(BF16), torch.randn(64, 96).to(BF16)
    found = []
    for frozen in (False, True):
        torch.manual_seed(0)
        m = grouped(2, bias=False).requires_grad_(not frozen)
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        )
        with hooks:
            _, dx, *grads = step(m, MAKERS[name](), x, g, [32, 32])
        assert all((grad is None) == frozen for grad in grads)
        found.append((dx, sum(t.nbytes for t in saved)))
    assert_same_bits("dx", found[0][0], found[1][0])
    each = 1 if name == "current" else 2
    assert found[0][1] - found[1][1] >= x.numel() * each


def test_cached_weights_serve_later_microbatches() -> None:
    m, recipe = grouped(3), R.Float8CurrentScaling()
    x, g = torch.randn(64, 64).to(BF16), torch.randn(64, 96).to(BF16)
    first = step(m, recipe, x, g, [32, 0, 32], is_first_microbatch=True)[0]
    with torch.no_grad():
        for weight in m.weights:
            weight.zero_()
    later = step(m, recipe, x, g, [32, 0, 32], is_first_microbatch=False)[0]
    assert_same_bits("y with the weights of the first", later, first)
    assert step(m, recipe, x, g, [0, 64, 0], is_first_microbatch=False)[
        0
    ].any()  # idle ones are cached too
    te.drop_cached_weights(m)
    assert not m._fp8_workspaces


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_weights_in_fp8(name: str) -> None:
    """As te.Linear with a weight in FP8, and the same state after."""
    recipe = RECIPES[name]()
    with te.quantized_model_init(enabled=True, recipe=recipe):
        torch.manual_seed(1)
        m = te.GroupedLinear(2, 64, 96, bias=False, params_dtype=BF16)
        torch.manual_seed(1)
        alone = [te.Linear(64, 96, bias=False, params_dtype=BF16) for _ in range(2)]
    x, g = torch.randn(96, 64).to(BF16), torch.randn(96, 96).to(BF16)
    y, dx, *grads = step(m, recipe, x, g, [32, 64])
    for i, (lin, xi, gi) in enumerate(
        zip(alone, x.split([32, 64]), g.split([32, 64]), strict=True)
    ):
        assert isinstance(m.weights[i], te.QuantizedTensor)
        expected = step(lin, recipe, xi, gi)
        for a, b in zip(
            (y.split([32, 64])[i], dx.split([32, 64])[i], grads[i]), expected, strict=True
        ):
            assert_same_bits(f"expert {i}", a, b)


def test_parameters_are_interleaved_and_drawn_as_linears_are() -> None:
    torch.manual_seed(2)
    m = te.GroupedLinear(2, 32, 48)
    torch.manual_seed(2)
    for i in range(2):
        assert_same_bits("weight", m.weights[i], te.Linear(32, 48).weight)
    assert list(m.state_dict()) == ["weight0", "bias0", "weight1", "bias1", "_extra_state"]
    assert not m.state_dict()["_extra_state"].numel()


def test_a_copy_has_scales_of_its_own() -> None:
    m, recipe = grouped(2), R.DelayedScaling(amax_history_len=2)
    x, g = torch.randn(64, 64).to(BF16), torch.randn(64, 96).to(BF16)
    step(m, recipe, x, g, [32, 32])
    twin = copy.deepcopy(m)
    before = m.fp8_meta["scaling_fwd"].scale.clone()
    step(twin, recipe, x * 64, g, [32, 32])
    assert_same_bits("scale", m.fp8_meta["scaling_fwd"].scale, before)
    assert (twin.fp8_meta["scaling_fwd"].scale[[0, 3]] < before[[0, 3]]).all()


def test_splits_may_be_a_tensor_and_the_input_may_have_more_dimensions() -> None:
    m = grouped(2, dtype=torch.float32)
    x = torch.randn(8, 6, 64)
    expected = m(x.reshape(48, 64), [16, 32])
    for splits in (torch.tensor([16, 32]), torch.tensor([16, 32], dtype=torch.int32), (16, 32)):
        assert_same_bits("y", m(x, splits), expected.view(8, 6, 96))
    out, biases = te.GroupedLinear(2, 64, 96, return_bias=True)(x, [16, 32])
    assert out.shape == (8, 6, 96) and [b.shape for b in biases] == [(96,)] * 2


def test_errors() -> None:
    m, x = grouped(2), torch.randn(32, 64).to(BF16)
    with pytest.raises(ValueError, match="does not match number of GEMMs"):
        m(x, [16, 8, 8])
    with pytest.raises(RuntimeError, match="split_sizes"):
        m(x, [16, 8])
    with pytest.raises(ValueError, match="not compatible with weight"):
        m(x[:, :48], [16, 16])
    with te.autocast(recipe=R.Float8CurrentScaling()):
        with pytest.raises(ValueError, match="expert 1 has 24 rows; pad"):
            m(torch.randn(40, 64, dtype=BF16), [16, 24])
        with torch.no_grad():
            assert m(torch.randn(21, 64, dtype=BF16), [16, 5]).shape == (21, 96)
        with pytest.raises(TypeError, match="in FP8"):
            m(te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x), [16, 16])
    with (
        te.autocast(recipe=R.Float8BlockScaling()),
        torch.no_grad(),
        pytest.raises(ValueError, match="in 8s"),
    ):
        grouped(2)(torch.randn(21, 64, dtype=BF16), [16, 5])
    with pytest.raises(ValueError, match="TP > 1"):
        te.GroupedLinear(2, 64, 96, tp_size=2)
    with pytest.raises(NotImplementedError, match="single_grouped_weight"):
        te.GroupedLinear(2, 64, 96, single_grouped_weight=True)
    y = m(x.requires_grad_(), [16, 16])
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        y.sum().backward()
