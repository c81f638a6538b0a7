"""te-adam's saved state, checked on a CPU with a stand-in for Transformer Engine's FusedAdam that has its state's
layout."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_models.errors import CheckpointError, UsageError
from te_models.files.formats import flatten_state
from te_models.optim import resolve_options
from te_models.optim.groups import Part
from te_models.optim.te_adam import MOMENTS, TEAdam


class Moment(SimpleNamespace):
    """The parts of a Float8Tensor that te-adam saves: E4M3 in uint8, and the reciprocal of its scale."""


class FusedAdam:
    """State as FusedAdam.initialize_state makes it (section 12 of Transformer Engine's behavior); it never steps."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        **options: Any,
    ):
        self.options = options
        self.param_groups, self.state = groups, {}
        self.dtypes = exp_avg_dtype, exp_avg_sq_dtype

    def initialize_state(self, parameter: nn.Parameter, remainders: bool) -> None:
        first, second = (torch.ones(parameter.shape).to(dtype) for dtype in self.dtypes)
        fp8 = Moment(
            _data=first,
            _scale_inv=torch.ones(1),
            _quantizer=SimpleNamespace(set_usage=lambda **_: None),
        )
        master = torch.ones(parameter.shape).to(torch.int16 if remainders else torch.float32)
        self.state[parameter] = dict(
            exp_avg=fp8 if first.dtype == torch.uint8 else first,
            exp_avg_sq=second,
            master_param=master,
        )


def build(moments: str, **given: float) -> TEAdam:
    parameters = [nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))]
    group = dict(params=[Part(p, "hidden") for p in parameters], weight_decay=0.1)
    options = resolve_options("te-adam", dict(moments=moments, **given))
    engine: Any = SimpleNamespace(FusedAdam=FusedAdam)
    return TEAdam(engine, {"optimizer": "te-adam", **options}, [group], 1e-3, options)


def saved(optimizer: TEAdam) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def replace(
    name: str, part: str, function: Callable[[Tensor], Any]
) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"][0][name][part] = function(state["state"][0][name][part])

    return change


def fill(name: str, part: str, value: float) -> Callable[[dict[str, Any]], None]:
    return replace(name, part, lambda t: t.fill_(value))


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "negative squares": fill("exp_avg_sq", "data", -1),
    "squares are nan": fill("exp_avg_sq", "data", torch.nan),
    "wrong shape": replace("exp_avg", "data", lambda t: t[:-1]),
    "wrong dtype": replace("exp_avg", "data", lambda t: t.to(torch.int32)),
    "a scalar": replace("exp_avg_sq", "data", lambda t: t.sum()),
    "text": replace("exp_avg", "data", lambda t: "1"),
    "remainder of another dtype": replace("master_param", "data", lambda t: t.float()),
    "a moment less": lambda state: state["state"][0].pop("exp_avg"),
    "a parameter less": lambda state: state["state"].pop(),
    "steps are text": lambda state: state.update(steps=["1"]),
    "steps are negative": lambda state: state.update(steps=[-1]),
    "another kind": lambda state: state.update(kind={**state["kind"], "moments": "other"}),
}
ONLY_FP8: dict[str, Callable[[dict[str, Any]], Any]] = {
    "FP8 nan": fill("exp_avg", "data", 0x7F),
    "negative FP8 nan": fill("exp_avg", "data", 0xFF),
    "negative scale": fill("exp_avg", "scale_inv", -1),
    "infinite scale": fill("exp_avg", "scale_inv", torch.inf),
    "no scale": lambda state: state["state"][0]["exp_avg"].pop("scale_inv"),
}


@pytest.mark.parametrize(
    ("moments", "damage"),
    [(m, d) for m in MOMENTS for d in (DAMAGE | ONLY_FP8 if m == "fp8" else DAMAGE)],
)
def test_crafted_state_is_refused_before_anything_is_written(moments: str, damage: str) -> None:
    optimizer = build(moments)
    state = saved(optimizer)
    state["state"][1]["exp_avg_sq"]["data"].fill_(
        2
    )  # a live tensor that a careless load would overwrite
    (DAMAGE | ONLY_FP8)[damage](state)
    before = flatten_state(saved(optimizer))
    error = UsageError if damage == "another kind" else CheckpointError
    with pytest.raises(error, match="optimizer's state") as caught:
        optimizer.load_state_dict(state)
    assert "\n" not in str(caught.value)
    tensors, document = flatten_state(saved(optimizer))
    assert document == before[1] and all(
        torch.equal(before[0][name], t) for name, t in tensors.items()
    )


def test_options_reach_fused_adam() -> None:
    options = build("bf16", beta1=0.5, beta2=0.7, eps=0.1).inner.options
    assert options["betas"] == (0.5, 0.7) and options["eps"] == 0.1


@pytest.mark.parametrize("moments", MOMENTS)
def test_saved_moments_are_loaded(moments: str) -> None:
    optimizer, other = build(moments), build(moments)
    for parts in other.state_dict()["state"]:
        for tensors in parts.values():
            for tensor in tensors.values():
                tensor.fill_(3)
    optimizer.load_state_dict(saved(other))
    one, two = flatten_state(saved(optimizer))[0], flatten_state(saved(other))[0]
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())
