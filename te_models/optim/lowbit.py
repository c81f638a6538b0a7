"""AdamW with moments in 8 bits, from torchao: "adamw8bit" (dynamic 8-bit quantization) and "adamwfp8" (FP8 E4M3).

Both have one scale per block of 256 elements (Dettmers et al. 2021, arXiv 2110.02861), which makes 2.03 bytes of
moments per parameter. On a GPU one kernel updates each tensor (lowbit_triton.py). On a CPU torchao fuses each update
with torch.compile, which takes seconds per shape and a C++ compiler.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torchao.optim import AdamW8bit, AdamWFp8
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from te_models.device.choice import runs_triton
from te_models.distributed.dtensor import local
from te_models.optim.lowbit_state import EIGHT_BIT_CODES, FP8_CODES, lowbit_state
from te_models.optim.state_tensors import Group, Options, State


class EightBit(AdamW8bit):
    """torchao's AdamW with dynamic 8-bit moments."""

    def expected_state(self, view: Tensor, group: Group) -> State:
        """Return the state of the tensor `view` after a step, as a template for `check_values`."""
        return lowbit_state(EIGHT_BIT_CODES, view, self.block_size)


class FP8(AdamWFp8):
    """torchao's AdamW with E4M3 moments."""

    def expected_state(self, view: Tensor, group: Group) -> State:
        """Return the state of the tensor `view` after a step, as a template for `check_values`."""
        return lowbit_state(FP8_CODES, view, self.block_size)


LowBit = EightBit | FP8
CLASSES = {"adamw8bit": EightBit, "adamwfp8": FP8}


def lowbit_adamw(
    name: str, groups: list[Group], lr: float, options: Options
) -> list[torch.optim.Optimizer]:
    """Return torchao's optimizer called `name`.

    With `stochastic_rounding` it updates BF16 parameters directly and rounds each update up or down at random, with
    probabilities that make the expected value exact. That saves the 4 bytes per parameter of FP32 master weights.
    """
    # torch warns of it on a CPU.
    warnings.filterwarnings("ignore", message=r"OptimState\w+ does not implement _stable_hash")
    optimizer = CLASSES[name](
        groups,
        lr=lr,
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        bf16_stochastic_round=options["stochastic_rounding"],
    )
    optimizer.register_step_pre_hook(_update_on_gpu)
    if options["stochastic_rounding"]:
        _round_alike(optimizer)
    return [optimizer]


def _update_on_gpu(optimizer: LowBit, *arguments: object) -> None:
    """Update the parameters on a GPU and drop their gradients, so that torchao's step passes over them."""
    for place, (parameter, group) in enumerate(_parameters(optimizer)):
        if (
            parameter.grad is not None
            and parameter.is_contiguous()
            and runs_triton(parameter.device)
        ):
            _update(optimizer, parameter, group, place)
            parameter.grad = None


def _parameters(optimizer: LowBit) -> Iterator[tuple[Tensor, Group]]:
    """Yield each parameter with its group."""
    for group in optimizer.param_groups:
        yield from ((parameter, group) for parameter in group["params"])


@torch.no_grad()
def _update(optimizer: LowBit, parameter: Tensor, group: Group, place: int) -> None:
    kernel = importlib.import_module("te_models.optim.lowbit_triton")
    state = optimizer.state[parameter]
    if not state:
        first = optimizer._new_buffer(parameter, True)
        second = optimizer._new_buffer(parameter, False)
        state.update(step=torch.tensor(0.0), exp_avg=first, exp_avg_sq=second)
    state["step"] += 1
    number = int(state["step"])
    beta1, beta2 = group["betas"]
    step = kernel.AdamWStep(
        number=number,
        seed=_seed(number, place),
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
    assert parameter.grad is not None
    kernel.update(
        local(parameter),
        local(parameter.grad),
        local(state["exp_avg"]),
        local(state["exp_avg_sq"]),
        step,
        stochastic=optimizer.bf16_stochastic_round,
    )


def _seed(step: int, place: int) -> int:
    """Return the seed of stochastic rounding of parameter number `place`, the same on all processes."""
    return (step * 0x9E3779B1 + place * 0x85EBCA77) % 2**31


def _round_alike(optimizer: LowBit) -> None:
    """Let torchao's step draw the same numbers on all processes, whose replicas would drift apart otherwise.

    The generator is seeded with the number of the step. Further calls of `step` with the same number, for other
    parameters, continue where the last one ended. The caller's state of the generator is restored.
    """
    number = -1
    state = torch.get_rng_state()
    callers: list[Tensor] = []

    def begin(optimizer: LowBit, *arguments: object) -> None:
        nonlocal number, state
        steps = []
        for parameter, _ in _parameters(optimizer):
            if parameter.grad is not None:
                steps.append(optimizer.state[parameter].get("step", 0))
        if not steps:  # all parameters are on a GPU
            return
        callers.append(torch.get_rng_state())
        if (now := int(steps[0])) != number:
            number = now
            state = torch.default_generator.manual_seed(_seed(now, 0)).get_state()
        torch.set_rng_state(state)

    def end(optimizer: LowBit, *arguments: object) -> None:
        nonlocal state
        if callers:
            state = torch.get_rng_state()
            torch.set_rng_state(callers.pop())

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)


def moment(tensors: dict[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    """Return torchao's quantized moment made of these tensors; only the second moment is unsigned."""
    if "qmap" in tensors:
        return OptimState8bit(**tensors, signed=name == "exp_avg", dtype=parameter.dtype)
    return OptimStateFp8(**tensors, dtype=parameter.dtype)
