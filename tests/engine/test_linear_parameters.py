"""te.Linear's parameters: splits, initialisation, state_dict, main_grad, delayed gradients, quantized weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_reference import RECIPES, relative, run
from torch import Tensor, nn

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

BF16 = torch.bfloat16


class TestParameters:
    @pytest.mark.parametrize("split", [("query_", "key", "value_"), {"query": 16, "key": 16, "value_": 16}])
    def test_split(self, split: Any) -> None:
        m = te.Linear(32, 48, parameters_split=split, params_dtype=BF16)
        assert list(dict(m.named_parameters())) == [
            "query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias",
        ]  # fmt: skip
        whole = te.Linear(32, 48, params_dtype=BF16)
        with torch.no_grad():
            whole.weight.copy_(torch.cat([m.query_weight, m.key_weight, m.value_weight]))
        x, g = torch.randn(32, 32, dtype=BF16), torch.randn(32, 48, dtype=BF16)
        for name in (None, "current"):
            recipe = RECIPES[name]() if name else None
            assert torch.equal(run(m, recipe, x, g), run(whole, recipe, x, g))
        parts = [m.query_weight.grad, m.key_weight.grad, m.value_weight.grad]
        assert torch.equal(torch.cat(parts), whole.weight.grad)
        assert torch.equal(m.key_bias.grad, whole.bias.grad[16:32])

    @pytest.mark.parametrize(
        ("split", "error", "message"),
        [
            ((), ValueError, "Cannot split weight buffer into 0 parameters"),
            ({"a": 16, "b": 16}, ValueError, "Trying to split weight buffer"),
            ((1, 2), TypeError, "Invalid configuration for parameters split"),
        ],
    )
    def test_bad_split(self, split: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            te.Linear(32, 48, parameters_split=split)

    def test_split_on_meta(self) -> None:
        with pytest.raises(AssertionError, match="Cannot split module parameters on 'meta' device"):
            te.Linear(32, 48, parameters_split=("a", "b"), device="meta")

    def test_meta_then_reset(self) -> None:
        m = te.Linear(32, 48, device="meta", params_dtype=BF16)
        assert m.weight.is_meta and m.bias.is_meta
        m.reset_parameters()
        assert m.weight.device.type == "cpu" and 0.02 < m.weight.std() < 0.026 and (m.bias == 0).all()

    def test_reset_makes_new_parameters(self) -> None:
        m = te.Linear(32, 32)
        weight = m.weight
        m.reset_parameters()
        assert m.weight is not weight and m.weight.requires_grad

    def test_init_method_and_order_of_random_numbers(self) -> None:
        torch.manual_seed(3)
        m = te.Linear(32, 16)
        torch.manual_seed(3)
        assert torch.equal(m.weight, torch.empty(16, 32).normal_(0, 0.023))
        assert (te.Linear(8, 8, init_method=nn.init.ones_).weight == 1).all()

    def test_attributes(self) -> None:
        weight: Any = te.Linear(8, 8).weight
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 1)

    def test_the_third_positional_argument_is_not_the_bias(self) -> None:
        assert te.Linear(8, 8, False).use_bias

    def test_options_that_only_concern_speed_are_accepted(self) -> None:
        te.Linear(8, 8, ub_overlap_ag=True, ub_name="qkv", symmetric_ar_type="one_shot", name="qkv")

    def test_unknown_parallel_mode(self) -> None:
        with pytest.raises(AssertionError, match="parallel_mode diagonal not supported"):
            te.Linear(8, 8, parallel_mode="diagonal")


class TestStateDict:
    def test_keys(self) -> None:
        state = te.Linear(8, 8).state_dict()
        assert list(state) == ["weight", "bias", "_extra_state"]
        assert state["_extra_state"].dtype == torch.uint8 and state["_extra_state"].numel() == 0

    def test_extra_state_stays_empty_under_delayed_scaling(self) -> None:
        m = te.Linear(32, 32, params_dtype=BF16)
        run(m, R.DelayedScaling(), torch.ones(32, 32, dtype=BF16))
        assert m.state_dict()["_extra_state"].numel() == 0

    def test_a_plain_linear_lacks_the_extra_state(self) -> None:
        m, plain = te.Linear(8, 8), nn.Linear(8, 8)
        with pytest.raises(RuntimeError, match="_extra_state"):
            m.load_state_dict(plain.state_dict())
        m.load_state_dict(plain.state_dict(), strict=False)
        assert torch.equal(m.weight, plain.weight)

    def test_a_pickled_extra_state_is_refused(self) -> None:
        state = te.Linear(8, 8).state_dict() | {"_extra_state": torch.ones(3, dtype=torch.uint8)}
        with pytest.raises(RuntimeError, match="Refusing to load pickled Transformer Engine extra state for Linear"):
            te.Linear(8, 8).load_state_dict(state)

    def test_copies_of_an_unused_layer_work(self) -> None:
        m = copy.deepcopy(te.Linear(32, 32, params_dtype=BF16))
        run(m, R.DelayedScaling(), torch.ones(32, 32, dtype=BF16))


class TestMainGrad:
    def make(self) -> tuple[te.Linear, Tensor, Tensor]:
        m = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, params_dtype=BF16)
        m.weight.main_grad = torch.ones(32, 32)  # type: ignore[attr-defined]
        return m, torch.randn(32, 32, dtype=BF16, requires_grad=True), torch.randn(32, 32, dtype=BF16)

    @pytest.mark.parametrize("name", [None, "current"])
    @pytest.mark.parametrize(("first", "kept"), [(None, 1.0), (False, 1.0), (True, 0.0)])
    def test_accumulates_in_fp32(self, name: str | None, first: bool | None, kept: float) -> None:
        m, x, g = self.make()
        other = te.Linear(32, 32, bias=False, params_dtype=BF16)
        other.load_state_dict(m.state_dict())
        recipe = RECIPES[name]() if name else None
        run(m, recipe, x, g, is_first_microbatch=first)
        run(other, recipe, x, g)
        assert m.weight.grad is None
        main_grad: Any = m.weight.main_grad  # type: ignore[attr-defined]
        assert relative(main_grad - kept, other.weight.grad) < 3e-3

    def test_overwrite_and_flag(self) -> None:
        m, x, g = self.make()
        weight: Any = m.weight
        weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
        run(m, None, x, g)
        assert weight.grad_added_to_main_grad and weight.grad is not None
        assert relative(weight.main_grad, g.double().t() @ x.detach().double()) < 3e-3


class TestDelayedWgrad:
    @pytest.mark.parametrize("name", [None, "current"])
    def test_backward_dw_assigns(self, name: str | None) -> None:
        m = te.Linear(32, 32, delay_wgrad_compute=True, params_dtype=BF16)
        other = te.Linear(32, 32, params_dtype=BF16)
        other.load_state_dict(m.state_dict())
        x, g = torch.randn(32, 32, dtype=BF16, requires_grad=True), torch.randn(32, 32, dtype=BF16)
        hooks: list[int] = []
        m.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
        for layer in (m, other):
            run(layer, RECIPES[name]() if name else None, x, g)
        assert m.weight.grad is None and m.need_backward_dw()
        m.backward_dw()
        assert torch.equal(m.weight.grad, other.weight.grad) and torch.equal(m.bias.grad, other.bias.grad)
        assert hooks == [1]
        with pytest.raises(RuntimeError, match="Pop empty queue"):
            m.backward_dw()
        assert not other.need_backward_dw()


class TestPrimaryWeights:
    CLASSES = {
        "delayed": te.Float8Tensor,
        "current": te.Float8Tensor,
        "block": te.Float8BlockwiseQTensor,
        "mxfp8": te.MXFP8Tensor,
        "nvfp4": te.NVFP4Tensor,
    }

    def make(self, name: str, **options: Any) -> te.Linear:
        with te.quantized_model_init(recipe=RECIPES[name](), **options):
            return te.Linear(64, 64, params_dtype=BF16)

    @pytest.mark.parametrize("name", RECIPES)
    def test_trains(self, name: str) -> None:
        m = self.make(name)
        assert isinstance(m.weight, self.CLASSES[name]) and isinstance(m.weight, nn.Parameter)
        assert type(m.bias) is nn.Parameter and m.weight.dtype == BF16
        x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
        before = m.weight.dequantize().clone()
        run(m, RECIPES[name](), x, torch.ones(64, 64, dtype=BF16))
        assert type(m.weight.grad) is Tensor and x.grad is not None
        torch.optim.SGD(m.parameters(), lr=1.0).step()
        assert isinstance(m.weight, self.CLASSES[name]) and not torch.equal(m.weight.dequantize(), before)

    @pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
    def test_computes_what_a_weight_quantized_on_the_fly_computes(self, name: str) -> None:
        m = self.make(name, preserve_high_precision_init_val=True)
        other = te.Linear(64, 64, params_dtype=BF16)
        with torch.no_grad():
            other.weight.copy_(m.weight.get_high_precision_init_val())  # type: ignore[operator]
        x, g = torch.randn(64, 64, dtype=BF16, requires_grad=True), torch.randn(64, 64, dtype=BF16)
        results = []
        for layer in (m, other):
            x.grad = None
            results.append((run(layer, RECIPES[name](), x, g), x.grad, layer.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        m.weight.clear_high_precision_init_val()  # type: ignore[operator]
        assert m.weight.get_high_precision_init_val() is None  # type: ignore[operator]

    def test_without_an_autocast_it_dequantizes_and_warns(self) -> None:
        m = self.make("current")
        x = torch.randn(32, 64, dtype=BF16)
        with pytest.warns(UserWarning, match="quantized weights without quantized compute"):
            y = m(x)
        assert torch.equal(y, nn.functional.linear(x, m.weight.dequantize(), m.bias))

    def test_another_recipe_is_refused(self) -> None:
        m = self.make("current")
        with pytest.raises(RuntimeError, match="Recipe mismatch for 'weight': tensor supports recipe"):
            run(m, R.MXFP8BlockScaling(), torch.ones(32, 64, dtype=BF16))

    def test_state_dict_round_trip(self) -> None:
        a, b = self.make("mxfp8"), self.make("mxfp8")
        b.load_state_dict(a.state_dict())
        assert torch.equal(a.weight.dequantize(), b.weight.dequantize())
        assert torch.equal(copy.deepcopy(a).weight.dequantize(), a.weight.dequantize())

    def test_split_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="Splitting QuantizedTensor"), te.quantized_model_init():
            te.Linear(64, 64, parameters_split=("a", "b"))

    def test_meta_then_reset(self) -> None:
        with te.quantized_model_init(recipe=R.Float8CurrentScaling()):
            m = te.Linear(64, 64, params_dtype=BF16, device="meta")
        m.reset_parameters()
        assert isinstance(m.weight, te.Float8Tensor) and 0.02 < m.weight.dequantize().std() < 0.026
