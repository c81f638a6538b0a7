"""te.Linear's parameters: initialization, state_dict, quantized weights, refused options."""

import copy
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from engine_reference import RECIPES, run
from torch import Tensor, nn

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

BF16 = torch.bfloat16


class TestParameters:
    def test_meta_then_reset(self) -> None:
        m = te.Linear(32, 48, device="meta", params_dtype=BF16)
        assert m.weight.is_meta and m.bias.is_meta
        m.reset_parameters()
        assert (
            m.weight.device.type == "cpu" and 0.02 < m.weight.std() < 0.026 and (m.bias == 0).all()
        )

    def test_reset_makes_new_parameters(self) -> None:
        m = te.Linear(32, 32)
        weight = m.weight
        m.reset_parameters()
        assert m.weight is not weight and m.weight.requires_grad

    def test_init_method_and_order_of_random_numbers(self) -> None:
        torch.manual_seed(3)
        m = te.Linear(32, 16)
        torch.manual_seed(3)
        assert_same_bits("m.weight", m.weight, torch.empty(16, 32).normal_(0, 0.023))
        assert (te.Linear(8, 8, init_method=nn.init.ones_).weight == 1).all()

    def test_the_third_positional_argument_is_not_the_bias(self) -> None:
        assert te.Linear(8, 8, False).use_bias

    def test_options_that_only_concern_speed_are_accepted(self) -> None:
        te.Linear(8, 8, ub_overlap_ag=True, ub_name="qkv", symmetric_ar_type="one_shot", name="qkv")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("fuse_wgrad_accumulation", True),
            ("delay_wgrad_compute", True),
            ("save_original_input", True),
            ("parameters_split", ("q", "k")),
            ("get_rng_state_tracker", int),
        ],
    )
    def test_options_that_are_not_emulated_are_refused(self, option: str, value: Any) -> None:
        with pytest.raises(NotImplementedError, match=f"{option}=.* is not emulated: leave it out"):
            te.Linear(8, 8, **{option: value})

    def test_unknown_parallel_mode(self) -> None:
        with pytest.raises(AssertionError, match="parallel_mode diagonal not supported"):
            te.Linear(8, 8, parallel_mode="diagonal")


class TestStateDict:
    def test_keys(self) -> None:
        state = te.Linear(8, 8).state_dict()
        assert list(state) == ["weight", "bias", "_extra_state"]
        assert state["_extra_state"].dtype == torch.uint8 and state["_extra_state"].numel() == 0

    def test_a_plain_linear_lacks_the_extra_state(self) -> None:
        m, plain = te.Linear(8, 8), nn.Linear(8, 8)
        with pytest.raises(RuntimeError, match="_extra_state"):
            m.load_state_dict(plain.state_dict())
        m.load_state_dict(plain.state_dict(), strict=False)
        assert_same_bits("m.weight", m.weight, plain.weight)

    def test_a_pickled_extra_state_is_refused(self) -> None:
        state = te.Linear(8, 8).state_dict() | {"_extra_state": torch.ones(3, dtype=torch.uint8)}
        with pytest.raises(
            RuntimeError, match="Refusing to load pickled Transformer Engine extra state for Linear"
        ):
            te.Linear(8, 8).load_state_dict(state)

    def test_copies_of_an_unused_layer_work(self) -> None:
        m = copy.deepcopy(te.Linear(32, 32, params_dtype=BF16))
        run(m, R.DelayedScaling(), torch.ones(32, 32, dtype=BF16))


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
        assert isinstance(m.weight, self.CLASSES[name]) and not torch.equal(
            m.weight.dequantize(), before
        )

    @pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
    def test_computes_what_a_weight_quantized_on_the_fly_computes(self, name: str) -> None:
        m = self.make(name, preserve_high_precision_init_val=True)
        other = te.Linear(64, 64, params_dtype=BF16)
        with torch.no_grad():
            other.weight.copy_(m.weight.get_high_precision_init_val())
        x, g = torch.randn(64, 64, dtype=BF16, requires_grad=True), torch.randn(64, 64, dtype=BF16)
        results = []
        for layer in (m, other):
            x.grad = None
            results.append((run(layer, RECIPES[name](), x, g), x.grad, layer.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        m.weight.clear_high_precision_init_val()
        assert m.weight.get_high_precision_init_val() is None

    def test_without_an_autocast_it_dequantizes_and_warns(self) -> None:
        m = self.make("current")
        x = torch.randn(32, 64, dtype=BF16)
        with pytest.warns(UserWarning, match="quantized weights without quantized compute"):
            y = m(x)
        assert_same_bits("y", y, nn.functional.linear(x, m.weight.dequantize(), m.bias))

    def test_another_recipe_is_refused(self) -> None:
        m = self.make("current")
        with pytest.raises(
            RuntimeError, match="Recipe mismatch for 'weight': tensor supports recipe"
        ):
            run(m, R.MXFP8BlockScaling(), torch.ones(32, 64, dtype=BF16))

    def test_state_dict_round_trip(self) -> None:
        a, b = self.make("mxfp8"), self.make("mxfp8")
        b.load_state_dict(a.state_dict())
        assert_same_bits("a.weight.dequantize()", a.weight.dequantize(), b.weight.dequantize())
        assert_same_bits(
            "copy.deepcopy(a).weight.dequantize()",
            copy.deepcopy(a).weight.dequantize(),
            a.weight.dequantize(),
        )

    def test_meta_then_reset(self) -> None:
        with te.quantized_model_init(recipe=R.Float8CurrentScaling()):
            m = te.Linear(64, 64, params_dtype=BF16, device="meta")
        m.reset_parameters()
        assert isinstance(m.weight, te.Float8Tensor) and 0.02 < m.weight.dequantize().std() < 0.026
