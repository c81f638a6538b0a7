"""Functions that read the weights of modules which FSDP2 shards, and never call their forward."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from te_models.distributed.sharded_call import call_inside, only_fsdp_hooks


class Experts(nn.Module):
    """Three weights, and a forward of its own that must not run."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        for expert in range(3):
            self.register_parameter(f"weight{expert}", nn.Parameter(torch.randn(outputs, inputs)))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("its own forward ran")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Experts(6, 4)
        self.down = Experts(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            for expert in range(3):
                up, down = (m.get_parameter(f"weight{expert}") for m in (self.up, self.down))
                x = x + (x @ up.t()).relu() @ down.t() / 10
            return x

        return call_inside([self.up, self.down], both, x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def on_each(rank: int, folder: str) -> None:
    """Compare two steps of a sharded model, of which each rank has one row of the batch, with the whole model's."""
    mesh = init_device_mesh("cpu", (2,))
    whole = model()
    sharded = model()
    for block in sharded:
        for module in (block.get_submodule("up"), block.get_submodule("down")):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    assert all(only_fsdp_hooks(module) for module in sharded.modules())
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for each in (whole, sharded):
            each.zero_grad()
        expected = whole(x.flatten(0, 1))
        expected.square().mean().backward()
        actual = sharded(x[rank])
        torch.testing.assert_close(actual, expected.view(2, 5, 4)[rank])
        actual.square().mean().backward()
        pairs = zip(whole.named_parameters(), sharded.parameters(), strict=True)
        for (name, one), other in pairs:
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, msg=name)
    assert not any("forward" in vars(module) for module in sharded.modules())


def test_weights_are_gathered_forward_and_backward(tmp_path: Path) -> None:
    run_ranks(on_each, tmp_path, 2)


def test_modules_that_are_not_sharded_are_not_called() -> None:
    block = Block()
    assert block(torch.randn(2, 4)).shape == (2, 4)


def test_hooks_of_others_are_told_apart() -> None:
    block = Block()
    assert only_fsdp_hooks(block)
    handle = block.register_forward_hook(lambda module, args, output: None)
    assert not only_fsdp_hooks(block)
    handle.remove()
    block.register_forward_pre_hook(lambda module, args: None)
    assert not only_fsdp_hooks(block)


def test_an_error_leaves_no_function_behind() -> None:
    block = Block()
    with pytest.raises(RuntimeError):
        block(torch.randn(2, 5))
    assert "forward" not in vars(block.up)
