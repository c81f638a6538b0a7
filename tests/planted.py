"""Failures of FP8 training planted in a tiny run, for which the record of the run has to name the tensor and the cause.

Each has the step in which it begins, the tensors that show it, the rule that finds it, and the change that heals it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_runs import tiny_model, tiny_trainer
from torch import Tensor, nn

from te_models import CausalLM, Trainer
from te_models.config.toml import render_toml
from te_models.distributed.dtensor import local
from te_models.errors import Diverged
from te_models.inspect.advice import diagnose
from te_models.inspect.run_facts import read_facts
from te_models.training.bad_tensor import rows_of
from te_models.training.metrics import read_metrics
from te_models.training.recording import experts_of

BEGIN = 6  # the step in which a failure begins
STEPS = 14
LINEAR = "layers.1.mlp.down_proj"
EXPERT = 2
NATIVE_RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")
SHAPE: dict[str, Any] = dict(hidden_size=64, intermediate_size=128)


@dataclass(frozen=True)
class Site:
    """The place of a failure.

    Attributes:
        linear: the name of a te.Linear, or of a te.GroupedLinear.
        expert: the number of the expert in the whole model; None for a te.Linear.
        last_rank: whether the activations of the last process alone have it; weights are spoiled wherever they are.
    """

    linear: str = LINEAR
    expert: int | None = None
    last_rank: bool = False

    @property
    def name(self) -> str:
        """The name of the linear in a record."""
        return self.linear if self.expert is None else f"{self.linear}.experts.{self.expert}"

    def module(self, model: CausalLM) -> nn.Module:
        """The module in which failures are planted."""
        return model.get_submodule(self.linear)

    def gemm(self, model: CausalLM) -> int | None:
        """The number of the expert among those of this process, 0 for a te.Linear; None if another process has it."""
        held = experts_of(model, self.linear, self.module(model))
        return held.index(self.expert) if self.expert in held else None

    def weight(self, model: CausalLM) -> Tensor | None:
        """This process's part of the weight; None if it has none."""
        gemm = self.gemm(model)
        if gemm is None:
            return None
        name = "weight" if self.expert is None else f"weight{gemm}"
        return local(self.module(model).get_parameter(name))

    def rows(self, trainer: Trainer, args: tuple[Any, ...]) -> slice | None:
        """The rows of the linear's input in which the failure is; None for none."""
        ranks = trainer.parallel.ranks
        if self.last_rank and ranks.rank != ranks.world - 1:
            return None
        gemm = self.gemm(trainer.model)
        if gemm is None:
            return None
        rows = rows_of(args)
        if rows is None:
            return slice(None)
        return slice(sum(rows[:gemm]), sum(rows[: gemm + 1]))


@dataclass(frozen=True)
class Planted:
    """A failure.

    Attributes:
        plant: plants it into a trainer at a place.
        recipes: the recipes under which it shows.
        rule: the key of the rule that finds it.
        operand: the tensor of the linear that is named; "" for the whole run, or any tensor.
        build, train: options of the model under `delayed`, and of the run.
        preset, shape: the model, made small, and what of it is as it has to be.
        site: the place in this model.
        heal: options of the model, and of the run, with which it does not show.
        begun: the step in which it begins.
    """

    plant: Callable[[Trainer, Site], None]
    recipes: tuple[str, ...]
    rule: str
    operand: str
    build: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    preset: str = "gated-nano"
    shape: dict[str, Any] = field(default_factory=dict)
    site: Site = Site()
    heal: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    begun: int = BEGIN

    def tensor(self, site: Site | None = None) -> str:
        """The name of the tensor that is to be named; "" for any."""
        place = site or self.site
        return f"{place.name}.{self.operand}" if self.operand else ""


def at_each_step(trainer: Trainer, act: Callable[[int], None]) -> None:
    """Call `act` with the number of each step before its forward pass."""
    forward = trainer.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        if trainer.model.training:
            act(trainer.result.step + 1)
        return forward(*args, **kwargs)

    trainer.model.forward = counted  # type: ignore[method-assign]


def growth(step: int, base: float, most: int) -> float:
    """The factor of a failure that grows with each step from BEGIN on."""
    return base ** max(0, min(step - BEGIN + 1, most))


def outlier(trainer: Trainer, site: Site, base: float = 16.0, most: int = 5) -> None:
    """A channel of the inputs grows by a factor with each step, 5 times by 16."""
    step = [0]

    def grow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = site.rows(trainer, args)
        if rows is None:
            return args
        x = args[0].clone()
        x[rows, ..., 3] = x[rows, ..., 3] * growth(step[0], base, most)
        return (x, *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    site.module(trainer.model).register_forward_pre_hook(grow)


def dead(trainer: Trainer, site: Site) -> None:
    """The weights of a linear are set to zero in each step, so that no gradient passes it."""

    def kill(step: int) -> None:
        weight = site.weight(trainer.model)
        if step >= BEGIN and weight is not None:
            with torch.no_grad():
                weight.zero_()

    at_each_step(trainer, kill)


def overflow(trainer: Trainer, site: Site) -> None:
    """The output gradients of a linear are 16 times as large with each step."""
    step = [0]

    def scaled(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        rows = site.rows(trainer, args)
        if rows is None or not module.training:
            return out
        y = out[0] if isinstance(out, tuple) else out
        factor = torch.ones(y.shape[:1] + (1,) * (y.dim() - 1), device=y.device)
        factor[rows] = growth(step[0], 16.0, 6)
        y = Grown.apply(y, factor)
        return (y, *out[1:]) if isinstance(out, tuple) else y

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    site.module(trainer.model).register_forward_hook(scaled)


class Grown(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor | float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return (grad * ctx.factor).to(grad.dtype), None


def old_peak(trainer: Trainer, site: Site) -> None:
    """The inputs of a linear are 65,536 times as large in one early step only."""
    step = [0]

    def peak(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = site.rows(trainer, args)
        if rows is None or step[0] != 2:
            return args
        x = args[0].clone()
        x[rows] = x[rows] * 2.0**16
        return (x, *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    site.module(trainer.model).register_forward_pre_hook(peak)


def wrong_scales(trainer: Trainer, site: Site) -> None:
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


def nan_weight(trainer: Trainer, site: Site) -> None:
    """A weight becomes NaN, of an expert if the place is one."""

    def spoil(step: int) -> None:
        weight = site.weight(trainer.model)
        if step == BEGIN and weight is not None:
            with torch.no_grad():
                weight.view(-1)[7] = float("nan")

    at_each_step(trainer, spoil)


def nan_once(trainer: Trainer, site: Site) -> None:
    """An input becomes NaN in one step, as in a batch that a model cannot take."""
    step = [0]

    def spoil(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = site.rows(trainer, args)
        if rows is None or step[0] != BEGIN:
            return args
        x = args[0].clone()
        x[rows] = float("nan")
        return (x, *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    site.module(trainer.model).register_forward_pre_hook(spoil)


def nan_in_fp8(trainer: Trainer, site: Site) -> None:
    """An input becomes NaN in every step in which the linear runs in FP8."""
    step = [0]

    def spoil(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = site.rows(trainer, args)
        quantized = trainer.model.precision.recipe_of(site.linear) is not None
        if rows is None or step[0] < BEGIN or not quantized:
            return args
        x = args[0].clone()
        x[rows] = float("nan")
        return (x, *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    site.module(trainer.model).register_forward_pre_hook(spoil)


def small_gradients(trainer: Trainer, site: Site) -> None:
    """The gradients that reach the blocks in FP8 are 2^-16 times as large, as those of a batch of many tokens are."""

    def shrink(module: nn.Module, args: Any, out: Any) -> Any:
        return Grown.apply(out, 2.0**-16) if isinstance(out, Tensor) else out

    trainer.model.layers[-1].register_forward_hook(shrink)


def nothing(trainer: Trainer, site: Site) -> None:
    """Nothing is planted: the options do it."""


FAILURES: dict[str, Planted] = {
    "outlier channel grows": Planted(
        outlier, ("delayed", "current"), "outlier", "input",
        heal=(dict(recipe="blockwise"), {}), shape=dict(intermediate_size=1024),  # the outlier is in one of 8 blocks
    ),
    "outlier in every block": Planted(
        outlier, ("blockwise",), "outlier", "input", heal=(dict(precision={LINEAR: "bf16"}), {}),
    ),
    "learning rate too high": Planted(
        nothing, NATIVE_RECIPES, "learning-rate", "", begun=1, train=dict(learning_rate=1.0, clip_grad_norm=0.0),
        heal=({}, dict(learning_rate=1e-3, clip_grad_norm=1.0)),
    ),
    "dead layer": Planted(dead, NATIVE_RECIPES, "dead", "weight"),
    "wrong scales after a resume": Planted(
        wrong_scales, ("delayed",), "wrong-scale", "", heal=(dict(recipe="current"), {}),
        build=dict(amax_history_len=16, amax_compute_algo="max"),
    ),
    "gradients overflow E5M2": Planted(
        overflow, ("delayed",), "gradient-overflow", "grad_output",
        heal=(dict(recipe="current"), {}),
    ),
    "a long history keeps an old peak": Planted(
        old_peak, ("delayed",), "stale-scale", "input", begun=2,
        build=dict(amax_history_len=1024, amax_compute_algo="max"),
        heal=(dict(amax_compute_algo="most_recent"), {}),
    ),
    "NaN in one linear": Planted(nan_weight, NATIVE_RECIPES, "nonfinite", "weight"),
    "NaN in one expert": Planted(
        nan_weight, NATIVE_RECIPES, "nonfinite", "weight",
        preset="gated-moe-nano", site=Site(expert=EXPERT),
    ),
    "NaN in one batch": Planted(
        nan_once, NATIVE_RECIPES, "nonfinite", "input", heal=({}, dict(on_nan="skip")),
    ),
    "NaN in FP8 alone": Planted(
        nan_in_fp8, NATIVE_RECIPES, "nonfinite", "input", heal=({}, dict(on_nan="demote")),
        shape=dict(num_hidden_layers=4),
    ),
    "delayed without calibration": Planted(
        small_gradients, ("delayed",), "uncalibrated", "", train=dict(calibrate=False), begun=1,
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
    shape = SHAPE if failure is None else SHAPE | failure.shape
    model = tiny_model(name, preset=preset, **shape, **build)
    options = {**dict(steps=STEPS, batch_size=2, seq_len=64, record=1, eval_every=0), **train}
    trainer = tiny_trainer(model, folder, **options)
    write_recipe(folder, model)
    if failure is not None:
        failure.plant(trainer, failure.site)
    with contextlib.suppress(Diverged):
        trainer.run()
    return folder


def heals(run: Path, failure: Planted, site: Site | None = None) -> bool:
    """Return whether a run with the advised change is without the failure; after a NaN it goes on to its end.

    An outlier of one linear makes others in gradients before it, which have advice of their own.
    """
    if failure.rule != "nonfinite":
        left = [one for one in diagnose(read_facts(run)).findings if one.rule == failure.rule]
        if failure.rule == "outlier":
            left = [one for one in left if failure.tensor(site) in one.tensors]
        return not left
    rows = read_metrics(run / "metrics.jsonl")
    return rows[-1]["step"] == STEPS and all(math.isfinite(row["loss"]) for row in rows)


def write_recipe(folder: Path, model: CausalLM) -> None:
    """Write the part of run.toml that rules read."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"recipe": model.recipe.to_dict(), "record": {"engine": model.engine}}
    (folder / "run.toml").write_text(render_toml(document, "A test."))
