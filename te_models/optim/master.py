"""FP32 master weights: updates that BF16 cannot hold are not lost.

A BF16 parameter has eight significant bits, so a step smaller than 1/256 of it rounds away; the optimizer therefore
works on FP32 copies, which are rounded into the parameters after each step (Micikevicius et al. 2018, arXiv 1710.03740).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_models.sharded import local


class MasterWeights:
    """A torch optimizer over FP32 copies of the parameters; FP32 parameters are their own masters.

    Memory beyond the optimizer's own state: 4 bytes a parameter that is not FP32.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]):
        self.parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        masters = dict(zip(map(id, self.parameters), self.masters, strict=True))
        self.inner = build([{**group, "params": [masters[id(p)] for p in group["params"]]} for group in groups])
        # te_models.distributed puts another one here where gradients lie in pieces on several ranks.
        self.gradient_norm: Callable[[list[Tensor]], Tensor] = gradient_norm

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, for learning-rate schedules."""
        return self.inner.param_groups

    @torch.no_grad()
    def take_gradients(self, max_norm: float) -> Tensor:
        """Give the parameters' gradients to the masters in FP32, scaled down to `max_norm` (0: not clipped).

        Returns their norm before clipping, FP32 scalar. In BF16 the norm itself would be off by up to 1/256.
        """
        norm = self.gradient_norm(self.parameters)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        if max_norm:
            gradients = [local(master.grad) for master in self.masters if master.grad is not None]
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients taken; parameters without one stay."""
        self.inner.step()
        copies = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        if copies:
            torch._foreach_copy_([local(p) for p, _ in copies], [local(m) for _, m in copies])
        for master in self.masters:
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the masters, in the order of the parameters."""
        return {"inner": self.inner.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; a ValueError if it is of other parameters."""
        shapes = [tuple(master.shape) for master in self.masters]
        if [tuple(master.shape) for master in state["masters"]] != shapes:
            raise ValueError("the optimizer's state is of another model")
        self.inner.load_state_dict(state["inner"])
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """The norm of all gradients together, FP32 scalar, summed in FP32 whatever their dtype."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
