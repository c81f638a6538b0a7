"""Parameters that train beside frozen weights, some of which Transformer Engine gives no gradient."""

from typing import Any

import pytest
import torch
from fp64_model import logits_of
from kinds import KINDS, Kind, assert_close, build, tokens
from torch import Tensor

from te_models import CausalLM
from te_models.errors import UsageError
from te_models.model.te_modules import with_bias_gradient

FP32: dict[str, Any] = dict(dtype=torch.float32)


def bias_gradients(
    kind: Kind, recipe: str, frozen: bool, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and the gradients of all biases of te.Linears, whose weights may be frozen."""
    model = build(kind, recipe, **options)
    if frozen:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    biases = {}
    for name, module in model.named_modules():
        if isinstance(module, model.te.Linear) and module.use_bias:
            biases[name] = module.get_parameter("bias").requires_grad_()
    ids = tokens(model)
    output = model(ids, labels=ids)
    assert output.loss is not None
    output.loss.backward()
    gradients = {}
    for name, bias in biases.items():
        assert bias.grad is not None, name
        gradients[name] = bias.grad
    return output.logits.detach(), gradients


@pytest.mark.parametrize(
    ("kind", "recipe", "mode"),
    [
        ("biases", "bf16", "none"),
        ("biases", "current", "selective"),  # with a layer in BF16
        ("latent attention", "bf16", "full"),
        ("sinks, biased experts", "delayed", 1),  # routers are in BF16
        ("Mamba 2, biases", "bf16", "selective"),
        ("gated convolution, biases", "blockwise", "full"),
    ],
)
def test_biases_beside_frozen_weights_get_the_gradients_that_they_have_beside_trained_ones(
    kind: str, recipe: str, mode: str | int
) -> None:
    options = FP32 | dict(activation_checkpointing=mode)
    if recipe != "bf16":
        options |= dict(num_layers_at_start_in_bf16=1)
    logits, expected = bias_gradients(KINDS[kind], recipe, False, options)
    same, found = bias_gradients(KINDS[kind], recipe, True, options)
    assert torch.equal(same, logits)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        # A sum of at most 64 rows in FP32, perhaps in another order.
        assert_close(gradient, expected[name], 2.0**-20, name)


def test_biases_beside_frozen_weights_get_the_gradients_of_the_fp64_model() -> None:
    model: CausalLM = build(KINDS["biases"], **FP32)
    weights = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
        weights[name] = parameter.detach().double().requires_grad_("bias" in name)
    ids = tokens(model, rows=1)
    loss = model(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    logits = logits_of(model.config, weights, ids[0])
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        expected = weights[name].grad
        assert expected is not None
        assert_close(parameter.grad, expected, 1e-4, name)


def test_the_output_keeps_its_bits() -> None:
    linear = torch.nn.Linear(2, 3)
    linear.weight.requires_grad_(False)
    y = torch.tensor([[0.0, -0.0, float("inf")]])
    same = with_bias_gradient(y, linear, None)
    assert torch.equal(same.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize(
    ("kind", "recipe", "trained"),
    [
        ("experts", "bf16", "weight1"),
        ("experts", "current", "weight4"),
        ("sinks, biased experts", "bf16", "bias0"),
        ("sinks, biased experts", "current", ""),  # where biases get gradients
        ("sinks, biased experts", "bf16", ""),
    ],
)
def test_experts_that_would_get_no_gradient_are_refused(
    kind: str, recipe: str, trained: str
) -> None:
    model = build(KINDS[kind], recipe, **FP32)
    for name, parameter in model.named_parameters():
        if "mlp.down_proj.weight" in name or (recipe == "bf16" and "bias" in name):
            parameter.requires_grad_(False)
    down = model.get_submodule("layers.1.mlp.down_proj")
    ids = tokens(model)
    if trained:
        down.get_parameter(trained).requires_grad_()
        with pytest.raises(UsageError, match=f"^{trained} of experts would get no gradient"):
            model(ids, labels=ids)
        model.eval()(ids)
        return
    loss = model(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad is not None, name


def test_experts_may_be_frozen_but_the_first() -> None:
    gradients = []
    for frozen in (False, True):
        model = build(KINDS["experts"], **FP32)
        down = model.get_submodule("layers.1.mlp.down_proj")
        for number in range(1, 5):
            down.get_parameter(f"weight{number}").requires_grad_(not frozen)
        ids = tokens(model)
        loss = model(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        gradients.append(down.get_parameter("weight0").grad)
        assert (down.get_parameter("weight1").grad is None) == frozen
    assert torch.equal(*gradients)
