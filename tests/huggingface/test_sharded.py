"""TEModelsForCausalLM under torch.distributed.fsdp.fully_shard: loss and gradients are those without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from hf_models import make_theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from te_models import CausalLM, TEModelsForCausalLM
from te_models.kernels.elementwise import ScaledEmbedding

IDS = torch.randint(11, 120, (2, 16), generator=torch.Generator().manual_seed(5))
# Rows of fused linears, with experts as parameters, and with an embedding that scales.
CASES = ("llama-linear", "mixtral-odd", "gemma2-odd")


def build(folder: Path) -> CausalLM:
    return CausalLM.from_pretrained(folder, recipe="bf16", dtype="float32", device="cpu")


def shard(model: nn.Module, causal_lm: CausalLM, mesh: DeviceMesh) -> None:
    for block in causal_lm.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def wrapped_then_sharded(folder: Path, mesh: DeviceMesh) -> TEModelsForCausalLM:
    model = TEModelsForCausalLM.wrap(build(folder))
    shard(model, model.model, mesh)
    return model


def sharded_then_wrapped(folder: Path, mesh: DeviceMesh) -> TEModelsForCausalLM:
    causal_lm = build(folder)
    shard(causal_lm, causal_lm, mesh)
    return TEModelsForCausalLM.wrap(causal_lm)


def step(model: TEModelsForCausalLM) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a training step."""
    loss = model(IDS, labels=IDS).loss
    assert loss is not None
    loss.backward()
    gradients = {}
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None, name
        gradient: Any = parameter.grad
        gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return loss.detach(), gradients


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("make", [wrapped_then_sharded, sharded_then_wrapped])
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_model_trains_as_a_whole_one(
    case: str,
    make: Callable[[Path, DeviceMesh], TEModelsForCausalLM],
    lone_rank: DeviceMesh,
    tmp_path: Path,
) -> None:
    make_theirs(case, tmp_path)
    whole = TEModelsForCausalLM.wrap(build(tmp_path))
    scales = isinstance(whole.model.embed_tokens, ScaledEmbedding)
    assert scales == (case == "gemma2-odd")
    loss, gradients = step(whole)
    result, sharded_gradients = step(make(tmp_path, lone_rank))
    assert_same_bits("loss", result, loss)
    assert_same_tensors(sharded_gradients, gradients)
