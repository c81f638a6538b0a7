"""Weights that FSDP2 gathers without a buffer, and gradients that it sums without one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from te_models.distributed import direct_gathers
from te_models.distributed.direct_gathers import DirectGather, DirectSum

STEPS = 3


def block() -> nn.Module:
    """Rows that two ranks divide evenly and rows that they do not, a frozen weight and one that is not used."""
    layers = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6), nn.LayerNorm(6))
    layers[0].bias.requires_grad_(False)
    layers.register_parameter("unused", nn.Parameter(torch.ones(4, 3)))
    return layers


def trained(device: torch.device, direct: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return gradients of the first step and the weights after some."""
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), block()).to(device, dtype)
    units: list[Any] = [*model, model]
    for unit in units:
        fully_shard(unit)
        if direct:
            unit.set_custom_all_gather(DirectGather())
            unit.set_custom_reduce_scatter(DirectSum(dist.get_world_size()))
        if device.type == "cpu":
            unit.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 6).to(device, dtype)).square().sum().backward()
        for parameter in model.parameters():
            if step == 0 and parameter.grad is not None:
                found.append(parameter.grad.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return found + [parameter.full_tensor() for parameter in model.parameters()]


def counted(launches: list[str], name: str, run: Callable[..., None], *inputs: Any) -> None:
    """Run one of the functions of collectives, and note it."""
    launches.append(name)
    run(*inputs)


def compare(rank: int, folder: str, device: str = "cpu") -> None:
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    own = trained(place, False, dtype)
    direct_gathers.install()
    # FSDP2's functions are the same for units that ask for nothing.
    for one, other in zip(own, trained(place, False, dtype), strict=True):
        assert torch.equal(one, other)
    launches = []
    for name in ("gather_many", "sum_many"):
        original = getattr(direct_gathers, name)
        patch = partial(counted, launches, name, original)
        setattr(direct_gathers, name, patch)
    direct = trained(place, True, dtype)
    # Three blocks, forward and backward but that of the last one, which stays gathered.
    assert launches.count("sum_many") == 3 * STEPS
    assert launches.count("gather_many") >= 3 * STEPS
    assert len(own) == len(direct) > 0
    for one, other in zip(own, direct, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_and_gradients_are_those_of_buffers(ranks: int, tmp_path: Path) -> None:
    run_ranks(compare, tmp_path, ranks, "gloo")


def compare_on_gpus(rank: int, folder: str) -> None:
    compare(rank, folder, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_and_gradients_on_gpus_are_those_of_buffers(tmp_path: Path) -> None:
    run_ranks(compare_on_gpus, tmp_path, 2, "nccl")
