"""The fixture `small`: a small model under any recipe, on the emulated engine and through Transformer Engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from te_models import CausalLM, list_recipes
from te_models.engine import get_engine
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels import sdpa

RECIPES = [name for name in list_recipes() if name != "nvfp4"]
FP8 = [name for name in RECIPES if name != "bf16"]
SHAPE = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64)
ENGINES = ["emulated", pytest.param("native", marks=pytest.mark.gpu)]
Build = Callable[..., CausalLM]


@pytest.fixture(params=ENGINES)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A function that builds the small model under a recipe, on the CPU or for real; skips what the GPU cannot run."""
    native = request.param == "native"
    monkeypatch.setattr(
        sdpa, "CUDA_ORDER", [SDPBackend.MATH]
    )  # the fast kernels' gradients vary from run to run

    def make(recipe: str = "delayed", **options: Any) -> CausalLM:
        torch.manual_seed(1)
        if recipe == "delayed":
            options.setdefault("amax_history_len", 8)
        if native:
            skip_unsupported(recipe)
        place = dict(device="cuda" if native else "cpu", engine=request.param, compile=False)
        return CausalLM.from_preset("gated-nano", **{**SHAPE, **place, "recipe": recipe, **options})

    return make


def tokens(batch: int = 2, seq: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, SHAPE["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(seed)
    )


def skip_unsupported(recipe: str) -> None:
    """Skip a test of the native engine that needs MXFP8 on a GPU without."""
    if recipe == "mxfp8" and not get_engine("native")[0].is_mxfp8_available():
        pytest.skip("this GPU does not run MXFP8")


def registry(model: CausalLM) -> Any:
    return model.te.FP8GlobalStateManager


def loss_of(
    model: CausalLM, seed: int = 0, batch: int = 2, seq: int = 16, **options: Any
) -> torch.Tensor:
    ids = tokens(batch, seq, seed).to(model.device)
    loss = model(ids, labels=ids, **options).loss
    assert loss is not None
    return loss


def step(model: CausalLM, ids: torch.Tensor) -> float:
    ids = ids.to(model.device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item()


def snapshot(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in fp8_state(model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
