"""A te.Linear without gradients, by the calls of the library alone, has the bits of the module."""

from typing import Any

import pytest
import torch

from te_models import list_recipes
from te_models.config.recipe import get_recipe
from te_models.engine import get_engine
from te_models.kernels import sdpa

pytestmark = pytest.mark.gpu
# The recipe, and whether the weight is stored in its format; without FP8 there is no such weight.
WEIGHTS = [(name, stored) for name in list_recipes() for stored in (False, True)]
WEIGHTS.remove(("bf16", True))
SHAPES = [(16, 256, 512), (512, 2048, 4096), (32, 6144, 2048)]  # rows, channels in and out


def linear(te: Any, inputs: int, outputs: int, bias: bool) -> Any:
    torch.manual_seed(0)
    return te.Linear(inputs, outputs, bias=bias, params_dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("recipe", "stored"), WEIGHTS)
@torch.no_grad()
def test_the_bits_of_the_module(
    recipe: str, shape: tuple[int, int, int], bias: bool, stored: bool
) -> None:
    te, *_ = get_engine("native")
    from te_models.engine import native_inference  # noqa: PLC0415  it imports Transformer Engine

    te_recipe = get_recipe(recipe).build(te)
    if recipe == "mxfp8" and not te.is_mxfp8_available():
        pytest.skip("this GPU does not run MXFP8")
    if recipe == "nvfp4" and not te.is_nvfp4_available():
        pytest.skip("this GPU does not run NVFP4")
    rows, inputs, outputs = shape
    with te.quantized_model_init(enabled=stored, recipe=te_recipe):
        module = linear(te, inputs, outputs, bias)
        other = linear(te, inputs, outputs, bias)
    other.load_state_dict(module.state_dict())
    if not stored:
        other = te.LinearOfTorch.of(other)  # as models of transformers have it
    by_calls = 0
    for first in (False, None, True, False, True, None):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        with te.autocast(enabled=te_recipe is not None, recipe=te_recipe):
            wanted = module(x, is_first_microbatch=first)
            found = native_inference.linear(other, x, first)
        if found is not None:
            by_calls += 1
            assert torch.equal(found, wanted)
    assert by_calls == (6 if recipe in ("bf16", "delayed", "current") else 0)
    assert module._fp8_workspaces.keys() == other._fp8_workspaces.keys() or not by_calls


@torch.no_grad()
def test_the_bits_of_the_norm() -> None:
    from te_models.engine import native_inference  # noqa: PLC0415

    te, *_ = get_engine("native")
    for centered in (False, True):
        module: Any = te.RMSNorm(
            2048, zero_centered_gamma=centered, dtype=torch.bfloat16, device="cuda"
        )
        torch.nn.init.normal_(module.weight)
        x = torch.randn(77, 2048, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(native_inference.norm(module, x), module(x))


@torch.no_grad()
def test_a_hook_sees_the_call() -> None:
    from te_models.engine import native_inference  # noqa: PLC0415

    te, *_ = get_engine("native")
    module = linear(te, 256, 256, False)
    module.register_forward_hook(lambda *given: None)
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    assert native_inference.linear(module, x, None) is None


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("tokens", [128, 333, 2048])
@torch.no_grad()
def test_attention_of_a_prompt_has_the_bits_of_pytorchs(
    tokens: int, heads: tuple[int, int], dim: int
) -> None:
    """The call of cuDNN alone, on views of a projection as a layer has them."""
    query, key = heads
    qkv = torch.randn(2, tokens, (query + 2 * key) * dim, device="cuda", dtype=torch.bfloat16)
    parts = qkv.split([query * dim, key * dim, key * dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in parts)
    found = sdpa.causal_attention(q, k, v)
    with torch.enable_grad():
        wanted = sdpa.causal_attention(q, k, v)  # nothing here has a gradient, but SDPA chooses
    assert sdpa.suits_cudnn(tokens, dim, torch.bfloat16)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
