"""AdamW in FP32: PyTorch's, and ways to clip the gradients and to round the masters in the same pass over memory.

On a GPU that is one kernel (adamw_triton.py), on a CPU PyTorch's operations on blocks (adamw_blocks.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.distributed.dtensor import local
from te_models.optim.adamw_blocks import Tensors, update_in_blocks
from te_models.optim.state_tensors import Group, State, like, scalar

LAUNCHES = 16  # whose tables are kept on the device


@dataclass(frozen=True)
class Update:
    """A tensor that AdamW updates in a step.

    Attributes:
        master: a tensor of the optimizer's groups, FP32.
        gradient: of its shape, in BF16 or FP32.
        parameter: BF16 of its shape, gets the new values; None: nothing does.
    """

    master: Tensor
    gradient: Tensor
    parameter: Tensor | None


class AdamW(torch.optim.AdamW):
    """PyTorch's, with the state that it keeps of each tensor, and `update`, its step in one kernel."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launches: dict[object, Any] = {}  # of the kernel, by the tensors that they update

    def expected_state(self, view: Tensor, group: Group) -> State:
        """Return the state of the tensor `view` after a step, as a template for `check_values`."""
        return dict(step=scalar(), exp_avg=like(view), exp_avg_sq=like(view))

    @torch.no_grad()
    def update(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        """Update tensors on a GPU that has a kernel for it, as `step` does, with gradients times `factor`.

        Neither gradients nor their `grad` are read or changed. If `found_inf` is 1, nothing changes.
        """
        kernel = importlib.import_module("te_models.optim.adamw_triton")
        bad: Tensor | None = getattr(self, "found_inf", None)
        for group, in_group, states in self._count_steps(updates, bad):
            steps = [state["step"] for state in states]
            entries = []
            for update, state in zip(in_group, states, strict=True):
                parameter = update.parameter
                entries.append(
                    kernel.Entry(
                        local(update.gradient).contiguous(),
                        local(update.master),
                        local(state["exp_avg"]),
                        local(state["exp_avg_sq"]),
                        None if parameter is None else local(parameter),
                    )
                )
            places: dict[object, list[int]] = {}
            for place, entry in enumerate(entries):
                if entry.master.numel():  # else this process has no row of it
                    places.setdefault(kernel.kind(entry), []).append(place)
            for members in places.values():
                together = [entries[place] for place in members]
                numbers = _numbers(kernel, group, torch.stack([steps[place] for place in members]))
                launch = self._launch(kernel, together)
                launch.run(
                    together,
                    numbers,
                    betas=group["betas"],
                    eps=group["eps"],
                    factor=factor,
                    bad=bad,
                )

    @torch.no_grad()
    def update_on_cpu(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        """Update tensors in CPU memory as `step` does, in every bit, with gradients times `factor`.

        Neither gradients nor their `grad` are read or changed. If `found_inf` is 1, nothing changes.

        Args:
            updates: whose parameters may have any floating dtype.
            factor: FP32 scalar on any device; None: 1.
        """
        bad: Tensor | None = getattr(self, "found_inf", None)
        if factor is not None:
            factor = factor.cpu()
        for group, in_group, states in self._count_steps(updates, bad):
            tensors = []
            for update, state in zip(in_group, states, strict=True):
                parameter = update.parameter
                tensors.append(
                    Tensors(
                        gradient=local(update.gradient).contiguous(),
                        master=local(update.master),
                        first=local(state["exp_avg"]),
                        second=local(state["exp_avg_sq"]),
                        step=state["step"],
                        parameter=None if parameter is None else local(parameter),
                    )
                )
            update_in_blocks(tensors, group, factor, bad)

    def _count_steps(
        self, updates: Sequence[Update], bad: Tensor | None
    ) -> Iterator[tuple[Group, list[Update], list[State]]]:
        """Yield each group that has some of `updates`, with these and their states, whose step counts have grown."""
        of_master = {id(update.master): update for update in updates}
        for group in self.param_groups:
            in_group = [of_master[id(p)] for p in group["params"] if id(p) in of_master]
            if not in_group:
                continue
            states = [self._state_of(update.master) for update in in_group]
            steps = [state["step"] for state in states]
            # A list: for a single tensor PyTorch reads its value on the host, which would wait for the backward pass.
            torch._foreach_add_(steps, 1.0 if bad is None else [1.0 - bad] * len(steps))
            yield group, in_group, states

    def _state_of(self, master: Tensor) -> State:
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

    def _launch(self, kernel: Any, entries: list[Any]) -> Any:
        """Return the kernel.Launch of `entries`, whose tables are made once for tensors of these sizes."""
        key = (kernel.kind(entries[0]), *(entry.master.data_ptr() for entry in entries))
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= LAUNCHES:  # other experts may be used in every step
                self._launches.clear()
            launch = self._launches[key] = kernel.Launch(entries)
        return launch


def _numbers(kernel: Any, group: Group, steps: Tensor) -> Any:
    """Return kernel.Numbers of tensors at these steps, FP32 [n], each rounded once from FP64."""
    first, second = group["betas"]
    steps = steps.double().clamp(min=1)  # 0 in a first step that is bad, and unused
    rate = group["lr"]
    bias = (1 - first**steps).float().double()
    roots = (1 - second**steps).sqrt().float()
    decay = torch.full((), rate * group["weight_decay"], dtype=torch.float64, device=steps.device)
    return kernel.Numbers(decay, (rate / bias).float(), roots)
