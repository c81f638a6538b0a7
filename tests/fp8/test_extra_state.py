"""The `_extra_state` of a state_dict, number by number: scales in row 0, the history below, forward then backward."""

import pytest
import torch

from te_models import CausalLM
from te_models.errors import CheckpointError
from te_models.fp8.extra_state import extra_states, read_extra_tensor
from te_models.fp8.scaling_state import fp8_state


@pytest.mark.parametrize("gemms", [1, 3])
def test_every_number_has_its_place(gemms: int) -> None:
    """3 columns of each expert for the forward pass, then 2 of each for the backward pass."""
    rows = [[100.0 * row + column for column in range(5 * gemms)] for row in range(4)]
    value = torch.tensor(rows)
    found = read_extra_tensor("a.b", value, gemms)
    forward, backward = slice(0, 3 * gemms), slice(3 * gemms, 5 * gemms)
    expected = {
        "a.b.scaling_fwd.scale": rows[0][forward],
        "a.b.scaling_fwd.amax_history": [row[forward] for row in rows[1:]],
        "a.b.scaling_bwd.scale": rows[0][backward],
        "a.b.scaling_bwd.amax_history": [row[backward] for row in rows[1:]],
    }
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    assert torch.equal(extra_states(found)["a.b._extra_state"], value)
    before_backward = read_extra_tensor("a.b", value[:, forward], gemms)
    assert list(before_backward) == list(expected)[:2]


def test_what_is_no_scale_with_its_history_is_refused() -> None:
    for shape in ((4,), (1, 5), (4, 4), (4, 2), (4, 15)):
        with pytest.raises(CheckpointError, match="the _extra_state of a.b holds no scales"):
            read_extra_tensor("a.b", torch.ones(shape), 1)


@pytest.mark.parametrize("preset", ["gated-nano", "gated-moe-nano"])
def test_a_state_dict_brings_every_scale_and_history(preset: str) -> None:
    """Histories are as long as the recipe's, and each number is another, so that none can be taken for another."""
    one, other = (
        CausalLM.from_preset(
            preset, recipe="delayed", device="cpu", num_hidden_layers=3, amax_history_len=3
        )
        for _ in range(2)
    )
    ids = torch.arange(32).reshape(2, 16)
    one(ids, labels=ids).loss.backward()
    for place, tensor in enumerate(fp8_state(one).values()):
        values = torch.arange(1.0, 1 + tensor.numel()).reshape(tensor.shape)
        tensor.copy_(1000.0 * (place + 1) + values)
    other.load_state_dict(one.state_dict())
    found = fp8_state(other)
    assert found.keys() == fp8_state(one).keys()
    for name, tensor in fp8_state(one).items():
        assert torch.equal(found[name], tensor), name
