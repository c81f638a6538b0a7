"""A new layer of linear attention: its decays have the ranges of the paper's, its norm is a plain one."""

import math

import pytest
import torch
import torch.nn.functional as F

from te_models import CausalLM, ModelConfig
from te_models.model.deltanet import GatedDeltaNet


def layer(zero_centered: bool = False) -> GatedDeltaNet:
    """A layer with 512 heads, so that what was drawn shows its distribution."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, zero_centered_norm=zero_centered,
        layer_types=("linear_attention", "full_attention"),
        linear_attention=dict(num_key_heads=2, num_value_heads=512, key_head_dim=16, value_head_dim=16),
    )  # fmt: skip
    model = CausalLM(config, recipe="bf16", engine="emulated", device="cpu", dtype=torch.float32)
    (found,) = (module for module in model.modules() if isinstance(module, GatedDeltaNet))
    return found


def assert_uniform(found: torch.Tensor, low: float, high: float) -> None:
    """Each tenth of the range has about a tenth of the numbers, and none lies outside."""
    assert low - 1e-4 <= found.min() and found.max() <= high + 1e-4
    shares = torch.histc(found, 10, low, high) / found.numel()
    assert ((shares - 0.1).abs() < 0.06).all(), shares


def test_new_decays_are_those_of_the_paper() -> None:
    """exp(A_log) is uniform in 1 to 16; softplus(dt_bias) in 0.001 to 0.1, its logarithm uniform (arXiv 2312.00752)."""
    new = layer()
    assert_uniform(new.get_parameter("A_log").detach().exp(), 1.0, 16.0)
    rates = F.softplus(new.get_parameter("dt_bias").detach().double())
    assert_uniform(rates.log().float(), math.log(0.001), math.log(0.1))
    assert_uniform(new.get_parameter("conv1d.weight").detach(), -0.5, 0.5)  # 4 taps


@pytest.mark.parametrize("zero_centered", [False, True])
@torch.no_grad()
def test_its_norm_has_a_plain_factor_also_where_the_models_have_one_more(
    zero_centered: bool,
) -> None:
    norm = layer(zero_centered).get_submodule("norm")
    weight = norm.get_parameter("weight")
    assert (weight == 1).all()
    weight.copy_(torch.linspace(0.5, 2, 16))
    x = torch.randn(24, 16)
    wide = x.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-5, rtol=1e-4)
