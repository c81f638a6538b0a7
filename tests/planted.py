"""Failures of FP8 training planted in a tiny run, for which the record of the run has to name the tensor and the cause.

Each has the step in which it begins, the tensors that show it, the rule that finds it, and the change that heals it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_runs import tiny_model, tiny_trainer
from torch import Tensor, nn

from te_models import CausalLM, Trainer
from te_models.config.toml import render_toml
from te_models.errors import Diverged

BEGIN = 6  # the step in which a failure begins
STEPS = 14
LINEAR = "layers.1.mlp.down_proj"
EXPERT = 2
NATIVE_RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")
SHAPE: dict[str, Any] = dict(hidden_size=64, intermediate_size=128)


@dataclass(frozen=True)
class Planted:
    """A failure.

    Attributes:
        plant: plants it into a trainer.
        recipes: the recipes under which it shows.
        rule: the key of the rule that finds it.
        tensors: a part of the name of the tensor that is named; "" for the whole run.
        build, train: options of the model under `delayed`, and of the run.
        preset: the shape, made small.
        heal: options of the model, and of the run, with which it does not show.
    """

    plant: Callable[[Trainer], None]
    recipes: tuple[str, ...]
    rule: str
    tensors: str
    build: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    preset: str = "gated-nano"
    heal: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))


def at_each_step(trainer: Trainer, act: Callable[[int], None]) -> None:
    """Call `act` with the number of each step before its forward pass."""
    forward = trainer.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        if trainer.model.training:
            act(trainer.result.step + 1)
        return forward(*args, **kwargs)

    trainer.model.forward = counted  # type: ignore[method-assign]


def linear(model: CausalLM) -> nn.Module:
    """The te.Linear in which failures are planted."""
    return model.get_submodule(LINEAR)


def outlier(trainer: Trainer) -> None:
    """A channel of the inputs grows by a factor of 16 with each step."""
    step = [0]

    def grow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[..., 3] = x[..., 3] * 16.0 ** max(0, min(step[0] - BEGIN + 1, 5))
        return (x, *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    linear(trainer.model).register_forward_pre_hook(grow)


def dead(trainer: Trainer) -> None:
    """The weights of a linear are set to zero in each step, so that no gradient passes it."""

    def kill(step: int) -> None:
        if step >= BEGIN:
            with torch.no_grad():
                linear(trainer.model).weight.zero_()

    at_each_step(trainer, kill)


def overflow(trainer: Trainer) -> None:
    """The output gradients of a linear are 4,096 times as large from one step on, and grow further."""
    step = [0]

    def scaled(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        factor = 16.0 ** max(0, min(step[0] - BEGIN + 1, 6))
        return Grown.apply(out, factor) if module.training else out

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    linear(trainer.model).register_forward_hook(scaled)


class Grown(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def old_peak(trainer: Trainer) -> None:
    """The inputs of a linear are 65,536 times as large in one early step only."""
    step = [0]

    def peak(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * (2.0**16 if step[0] == 2 else 1.0), *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    linear(trainer.model).register_forward_pre_hook(peak)


def wrong_scales(trainer: Trainer) -> None:
    """All scales are 64 times too large from one step on, as after loading the state of another model."""

    def spoil(step: int) -> None:
        if step != BEGIN:
            return
        for module in trainer.model.modules():
            for part in ("scaling_fwd", "scaling_bwd"):
                state = getattr(module, "fp8_meta", {}).get(part)
                if state is not None and hasattr(state, "scale"):
                    state.scale.mul_(2.0**-6)
                    state.amax_history.mul_(2.0**6)

    at_each_step(trainer, spoil)


def nan_weight(trainer: Trainer) -> None:
    """A weight becomes NaN."""

    def spoil(step: int) -> None:
        if step == BEGIN:
            with torch.no_grad():
                linear(trainer.model).weight.view(-1)[7] = float("nan")

    at_each_step(trainer, spoil)


def small_gradients(trainer: Trainer) -> None:
    """The gradients that reach the blocks in FP8 are 2^-16 times as large, as those of a batch of many tokens are."""

    def shrink(module: nn.Module, args: Any, out: Any) -> Any:
        return Grown.apply(out, 2.0**-16) if isinstance(out, Tensor) else out

    trainer.model.layers[-1].register_forward_hook(shrink)


def nan_expert(trainer: Trainer) -> None:
    """A weight of one expert becomes NaN."""

    def spoil(step: int) -> None:
        if step == BEGIN:
            with torch.no_grad():
                linear(trainer.model).get_parameter(f"weight{EXPERT}").view(-1)[7] = float("nan")

    at_each_step(trainer, spoil)


def nothing(trainer: Trainer) -> None:
    """Nothing is planted: the options do it."""


FAILURES: dict[str, Planted] = {
    "outlier channel grows": Planted(
        outlier, ("delayed", "current"), "outlier", f"{LINEAR}.input",
        heal=(dict(recipe="blockwise"), {}),
    ),
    "learning rate too high": Planted(
        nothing, NATIVE_RECIPES, "learning-rate", "", train=dict(learning_rate=1.0, clip_grad_norm=0.0),
        heal=({}, dict(learning_rate=1e-3, clip_grad_norm=1.0)),
    ),
    "dead layer": Planted(dead, NATIVE_RECIPES, "dead", "layers.1.mlp."),
    "wrong scales after a resume": Planted(
        wrong_scales, ("delayed",), "wrong-scale", "", heal=(dict(recipe="current"), {}),
        build=dict(amax_history_len=16, amax_compute_algo="max"),
    ),
    "gradients overflow E5M2": Planted(
        overflow, ("delayed",), "gradient-overflow", f"{LINEAR}.grad_output",
        heal=(dict(recipe="current"), {}),
    ),
    "a long history keeps an old peak": Planted(
        old_peak, ("delayed",), "stale-scale", f"{LINEAR}.input",
        build=dict(amax_history_len=1024, amax_compute_algo="max"),
        heal=(dict(amax_compute_algo="most_recent"), {}),
    ),
    "NaN in one linear": Planted(nan_weight, NATIVE_RECIPES, "nonfinite", f"{LINEAR}.weight"),
    "NaN in one expert": Planted(
        nan_expert, ("delayed", "current", "blockwise"), "nonfinite", f"{LINEAR}.experts.{EXPERT}.weight",
        preset="gated-moe-nano",
    ),
    "delayed without calibration": Planted(
        small_gradients, ("delayed",), "uncalibrated", "grad_output", train=dict(calibrate=False),
        heal=({}, dict(calibrate=True)),
    ),
}  # fmt: skip


def run_planted(
    folder: Path, recipe: str, failure: Planted | None, healed: bool = False, seed: int = 5
) -> Path:
    """Run a tiny model with a failure planted, or with none; return the folder of the run."""
    build = dict(failure.build) if failure is not None and recipe == "delayed" else {}
    train = dict(failure.train) if failure is not None else {}
    if failure is not None and healed:
        build |= failure.heal[0]
        train |= failure.heal[1]
    name = str(build.pop("recipe", recipe))
    if name != recipe:
        build = {}
    preset = "gated-nano" if failure is None else failure.preset
    model = tiny_model(name, preset=preset, **SHAPE, **build)
    options = {**dict(steps=STEPS, batch_size=2, seq_len=64, record=1, eval_every=0), **train}
    trainer = tiny_trainer(model, folder, **options)
    write_recipe(folder, model)
    if failure is not None:
        failure.plant(trainer)
    with contextlib.suppress(Diverged):
        trainer.run()
    return folder


def write_recipe(folder: Path, model: CausalLM) -> None:
    """Write the part of run.toml that rules read."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"recipe": model.recipe.to_dict(), "record": {"engine": model.engine}}
    (folder / "run.toml").write_text(render_toml(document, "A test."))
