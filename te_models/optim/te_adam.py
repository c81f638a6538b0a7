"""Transformer Engine's FusedAdam: one multi-tensor kernel over BF16 parameters with exact FP32 masters.

A BF16 parameter is the upper half of its FP32 master, so the optimizer stores only the missing 16 bits
(`store_param_remainders`): exact masters for 2 bytes per parameter. Both moments are BF16 (4 bytes per parameter), or
the first is FP8 and the second BF16 (3 bytes): FP8 with one scale per tensor has too little range for squared
gradients.

State is saved as it is in memory. FusedAdam's own state_dict converts it to FP32 and rounds it again on loading.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from te_models.errors import UsageError
from te_models.fp8.primary_weights import is_quantized
from te_models.optim.gradients import Gradients, chunks, clip_factor, gradient_norm, scale
from te_models.optim.master import check_kind, set_group_rate
from te_models.optim.state_tensors import Group, Options, State, bytes_in, check_values, like

MOMENTS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.uint8, torch.bfloat16),  # uint8 is FusedAdam's name for FP8
    "fp32": (torch.float32, torch.float32),
}
FP8 = torch.float8_e4m3fn  # the format of FP8 moments
CHUNK = (
    2**28
)  # parameters per group: FusedAdam converts the FP8 moments of a whole group to FP32 for its step


class TEAdam:
    """FusedAdam with the interface of te_models.optim.master.MasterWeights, on the native engine's parameters."""

    can_skip = False

    def __init__(
        self,
        te: ModuleType,
        kind: Options,
        groups: list[Group],
        lr: float,
        options: Options,
        gradients: Gradients | None = None,
    ) -> None:
        self.kind, self.gradients = kind, gradients or Gradients()
        self.parameters = [parameter for group in groups for parameter in _parameters(group)]
        if any(map(is_quantized, self.parameters)):
            raise UsageError(
                "te-adam stores the lower halves of BF16 weights: with fp8_params choose adamw or muon"
            )
        first, second = MOMENTS[options["moments"]]
        self.inner = te.FusedAdam(
            [
                {**group, "params": chunk}
                for group in groups
                for chunk in chunks(_parameters(group), CHUNK)
            ],
            lr=lr,
            betas=(options["beta1"], options["beta2"]),
            eps=options["eps"],
            master_weights=True,
            store_param_remainders=True,
            exp_avg_dtype=first,
            exp_avg_sq_dtype=second,
            use_decoupled_grad=self.gradients.in_fp32,
        )
        for parameter in self.parameters:
            self.inner.initialize_state(parameter, parameter.dtype == torch.bfloat16)
            if (
                first == torch.uint8
            ):  # free the transposed copy for GEMMs on Hopper, which never use a moment
                moment = self.inner.state[parameter]["exp_avg"]
                moment._quantizer.set_usage(rowwise=True, columnwise=False)
                moment._transpose = None

    @property
    def param_groups(self) -> list[Group]:
        """FusedAdam's groups."""
        return self.inner.param_groups

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.inner.param_groups:
            set_group_rate(group, rate)

    @torch.no_grad()
    def take_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to the norm `max_norm` (0: do not clip); return their norm before, an FP32 scalar."""
        gradients = [g for p in self.parameters if (g := self.gradients.of(p)) is not None]
        norm = gradient_norm(self.parameters, gradients)
        factor = clip_factor(norm, max_norm)
        if factor is not None and gradients:
            scale(gradients, factor)
        return norm

    def step(self) -> None:
        """Update the parameters that have a gradient, and drop the gradients."""
        if self.gradients.in_fp32:
            for parameter in (
                self.parameters
            ):  # FusedAdam reads FP32 gradients of BF16 parameters under this name
                parameter.decoupled_grad = self.gradients.of(parameter)  # type: ignore[attr-defined]  # FusedAdam's
        else:
            for parameter in self.parameters:
                parameter.grad = self.gradients.of(parameter)
        self.inner.step()
        for parameter in self.parameters:
            parameter.grad = None
            self.gradients.drop(parameter)

    def masters_by_id(self) -> dict[int, Tensor]:
        """Return nothing: there are no FP32 masters, since the parameters are their upper halves."""
        return {}

    def state_bytes(self) -> int:
        """Return the size of the tensors of `state_dict`."""
        return sum(bytes_in(state) for state in self.state_dict()["state"])

    def fetch(self, kind: str, index: int, tensor: Tensor) -> Tensor:
        """Return the tensor: every rank has all of the state."""
        return tensor

    def state_dict(self) -> State:
        """Return moments, the masters' lower halves and the step counts, as they are in memory."""
        state = [
            {name: _bits(value) for name, value in self.inner.state[p].items()}
            for p in self.parameters
        ]
        return {
            "kind": self.kind,
            "state": state,
            "steps": [group.get("step", 0) for group in self.param_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: it is of another optimizer or of other parameters.
        """
        self.check_state_dict(state)
        for parameter, saved in zip(self.parameters, state["state"], strict=True):
            for name, tensors in saved.items():
                for key, tensor in _bits(self.inner.state[parameter][name]).items():
                    tensor.copy_(tensors[key])
        for group, step in zip(self.param_groups, state["steps"], strict=True):
            group["step"] = step

    def check_state_dict(self, state: State) -> None:
        """Raise ValueError unless `load_state_dict` can load `state`; nothing is written."""
        check_kind(self.kind, state, state=len(self.parameters), steps=len(self.param_groups))
        for number, (parameter, saved) in enumerate(
            zip(self.parameters, state["state"], strict=True)
        ):
            live = {name: _bits(value) for name, value in self.inner.state[parameter].items()}
            check_values(saved, live, f"state.{number}")
            for name in (name for name, parts in live.items() if "scale_inv" in parts):
                data = saved[name]["data"]
                check_values(data.view(FP8), like(data, dtype=FP8), f"state.{number}.{name}")
        for number, step in enumerate(state["steps"]):
            check_values(step, int, f"steps.{number}")


def _bits(value: Any) -> dict[str, Tensor]:
    """Return the tensors that make up a state; an FP8 moment has FP8 data and the reciprocal of its scale."""
    return (
        {"data": value}
        if type(value) is Tensor
        else {"data": value._data, "scale_inv": value._scale_inv}
    )


def _parameters(group: Group) -> list[nn.Parameter]:
    return [part.parameter for part in group["params"]]
