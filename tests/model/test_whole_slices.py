"""No layer slices all rows of a tensor: to autograd that is an operation, whose backward fills and copies a tensor."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kinds import KINDS

from te_models import CausalLM
from te_models.model.te_modules import first_rows


def nodes(last: Any) -> Iterator[Any]:
    """Yield the operations of a graph."""
    seen = set()
    left = [last]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [previous for previous, _ in node.next_functions]


def test_first_rows() -> None:
    x = torch.arange(12.0).view(4, 3)
    assert first_rows(x, 4) is x
    assert torch.equal(first_rows(x, 3), x[:3])


# Kinds of this package: others are registered by the tests of extensions.
OWN = [name for name, kind in KINDS.items() if kind.known is contextlib.nullcontext]


@pytest.mark.parametrize("name", OWN)
def test_no_slice_of_all_rows(name: str) -> None:
    kind = KINDS[name]
    model = CausalLM(kind.config, recipe="bf16", device="cpu", dtype=torch.float32)
    ids = torch.arange(32).view(2, 16) % 96
    # The logits are asked for, since they are sliced too.
    loss = model(ids, labels=ids, return_logits=True).loss
    whole = []
    for node in nodes(loss.grad_fn):
        if type(node).__name__ != "SliceBackward0":
            continue
        shape = tuple(node._saved_self_sym_sizes)
        # One number per row, such as the factors of experts, costs nothing.
        if len(shape) > 1 and node._saved_dim == 0 and node._saved_start == 0:
            whole += [shape] if node._saved_end >= shape[0] else []
    assert whole == []
