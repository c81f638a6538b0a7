"""Gradients of parts that operations write into the gradient of the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels.gradient_room import GradientRoom, Slot, empty, split

SIZES = (6, 4, 2)


class Doubled(torch.autograd.Function):
    """2 x, whose gradient goes into a slot, as those of the kernels do."""

    made: list[Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Slot | None) -> Tensor:
        ctx.slot = slot
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        dx = empty(ctx.slot, x).copy_(2 * dy)
        Doubled.made.append(dx)
        return dx, None


def graph(x: Tensor, in_place: tuple[bool, ...], rows: int = 8) -> tuple[Tensor, GradientRoom]:
    """A sum over three parts of x [N, 12], of which those that are `in_place` write into its gradient."""
    room = GradientRoom(SIZES)
    total = torch.zeros((), device=x.device)
    for number, (part, inside) in enumerate(zip(split(x, room), in_place, strict=True)):
        # As mixers see it: tokens of two rows, and perhaps fewer than there are.
        part = part[:rows].unflatten(0, (2, -1)) if rows < 8 else part.unflatten(0, (2, -1))
        y = Doubled.apply(part, Slot(room, number) if inside else None)
        total = total + (number + 1) * y.sum()
    return total, room


@pytest.mark.parametrize("rows", [8, 6])
@pytest.mark.parametrize(
    "in_place", [(True, True, True), (True, False, False), (False, True, True), (False,) * 3]
)
def test_gradients(in_place: tuple[bool, ...], rows: int) -> None:
    x = torch.randn(8, 12, requires_grad=True)
    total, room = graph(x, in_place, rows)
    Doubled.made.clear()
    # Twice: what the first pass returned must stay as it is.
    (first,) = torch.autograd.grad(total, x, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(total, x)
    wanted = torch.tensor([2.0] * 6 + [4.0] * 4 + [6.0] * 2).expand(8, 12).clone()
    wanted[rows:] = 0
    for found in (kept, first, second):
        assert torch.equal(found, wanted)
    assert room.whole is None
    # Where a part is in its place, its memory is that of the whole.
    shares = {made.untyped_storage().data_ptr() for made in Doubled.made[:3]}
    assert (first.untyped_storage().data_ptr() in shares) == (any(in_place) and rows == 8)


def test_without_data() -> None:
    x = torch.empty(8, 12, device="meta", requires_grad=True)
    total, _ = graph(x, (True, True, True))
    Doubled.made.clear()
    (found,) = torch.autograd.grad(total, x)
    assert all(made._base is found for made in Doubled.made)


def test_a_tensor_of_another_width_gets_memory_of_its_own() -> None:
    room = GradientRoom(SIZES)
    made = empty(Slot(room, 0), torch.empty(2, 4, 3))
    assert made.shape == (2, 4, 3)
    assert room.whole is None
