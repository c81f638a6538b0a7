"""Offload of plain blocks: order of the copies, graphs used twice, changes in place, small tensors."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models.model import offload
from te_models.model.offload import HostMemory, Offload


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are moved too, and lie across pages."""
    monkeypatch.setattr(offload, "SMALL", 0)
    monkeypatch.setattr(offload, "PAGE", 2048)


class Stack(nn.Module):
    """Functions as blocks, offloaded or not."""

    def __init__(self, blocks: list[Callable[[Tensor], Tensor]], offloaded: bool) -> None:
        super().__init__()
        self.blocks, self.offloaded, self.memory = blocks, offloaded, HostMemory()

    def forward(self, x: Tensor) -> Tensor:
        passes = Offload(self.memory, len(self.blocks), x.device)
        for layer, block in enumerate(self.blocks):
            with passes.block(layer, self, ()) if self.offloaded else contextlib.nullcontext():
                x = block(x)
        return x


def test_a_backward_from_the_middle_frees_only_lower_blocks() -> None:
    """A second loss on hidden states in the middle has its backward first."""
    passes = Offload(memory := HostMemory(), 5, torch.device("cpu"))
    x, outputs = torch.ones(8, requires_grad=True), []
    for layer in range(5):
        with passes.block(layer, nn.Identity(), ()):
            outputs.append(torch.sin(outputs[-1] if outputs else x))
    torch.autograd.grad(outputs[1], x, torch.ones(8))
    assert memory.pages == 4 and len(memory.free) == 2


def test_a_graph_may_be_used_twice() -> None:
    found = []
    for offloaded in (False, True):
        x = torch.linspace(-1, 1, 40).view(5, 8).t().requires_grad_()  # strided
        y = Stack([lambda t: torch.sigmoid(t[1:]) * t[1:].t().t()] * 4, offloaded)(x).square().sum()
        y.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found) and found[0].abs().sum() > 0


@pytest.mark.parametrize("layer", [0, 2], ids=["moved", "last"])
def test_a_change_in_place_is_refused_as_by_autograd(layer: int) -> None:
    def spoil(t: Tensor) -> Tensor:
        out = torch.sigmoid(t)
        out.add_(1)
        return out

    blocks: list[Callable[[Tensor], Tensor]] = [torch.sigmoid] * 3
    blocks[layer] = spoil
    for offloaded in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            Stack(blocks, offloaded)(torch.ones(8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("size, moves", [(2**18, False), (2**18 + 1, True)])
def test_small_storages_stay(size: int, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stack = Stack([torch.sin] * 2, True)
    y = stack(torch.ones(size, requires_grad=True))
    assert (stack.memory.pages > 0) == moves
    y.sum().backward()
