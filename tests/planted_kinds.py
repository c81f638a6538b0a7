"""Failures planted in models of other kinds and in several processes, drawn at random by a seed.

A case is a kind of model, a failure of tests/planted.py, a recipe, a place, and how many processes share the run in
which way. `outcome` says whether the record names the right tensor in time, and whether the advised change heals it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kinds import EXPERTS, KINDS, NO_EDGES, SHAPE, SHARED
from planted import FAILURES, NATIVE_RECIPES, STEPS, Planted, Site, heals, nothing, write_recipe
from tiny_runs import TEXT

import te_models.engine.emulated as emulated
from te_models import Recipe, TrainConfig, Trainer, get_recipe, load_tokenizer
from te_models.config.model import ModelConfig
from te_models.config.precision import precisions
from te_models.data.dataset import TokenDataset
from te_models.errors import Diverged
from te_models.inspect.advice import Diagnosis, Finding, diagnose
from te_models.inspect.run_facts import read_facts
from te_models.training.launch import meshes
from te_models.training.parallel import Parallel

WITHIN = 5  # steps in which the right tensor is named
PROCESSES = ("one", "ddp", "fsdp", "fsdp+ep")
# The kind of tests/kinds.py, and fields that two processes need: as many experts for each.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {}),
    "experts": ("experts", dict(moe=EXPERTS | dict(num_experts=4))),
    "shared expert": ("shared expert", dict(moe=EXPERTS | SHARED | dict(num_experts=4))),
    "Gated DeltaNet": ("linear attention", {}),
    "Kimi Delta Attention": ("Kimi Delta Attention", {}),
    "Mamba 2": ("Mamba 2", {}),
    "gated convolution": ("gated convolution", {}),
    "short convolution": ("short convolution", {}),
    "Mamba 2 beside attention": ("Mamba 2 beside attention", {}),
    "Kimi Delta Attention, experts": (
        "Kimi Delta Attention",
        dict(moe=EXPERTS | dict(num_experts=4), mlp_layer_types=("dense", "sparse", "sparse")),
    ),
}
EVERYWHERE = (
    "outlier channel grows",
    "gradients overflow E5M2",
    "NaN in one batch",
)  # or in one process alone
ABOUT_FP8 = {name for name, failure in FAILURES.items() if failure.plant.__name__ != "nan_weight"}


HEALTHY = Planted(nothing, NATIVE_RECIPES, "", "")


@dataclass(frozen=True)
class Case:
    """A planted failure.

    Attributes:
        model, failure: names in MODELS and FAILURES; without a failure nothing is planted.
        recipe: its name.
        processes: one of PROCESSES.
        site: where it is planted.
        recompute: the activation checkpointing.
        micro_batches: of a step.
    """

    model: str
    failure: str
    recipe: str
    processes: str
    site: Site
    recompute: str = "none"
    micro_batches: int = 1

    @property
    def planted(self) -> Planted:
        """The failure; "" in `failure` is none."""
        return FAILURES[self.failure] if self.failure else HEALTHY

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return config_of(self.model)

    def __str__(self) -> str:
        where = ", on the last process" if self.site.last_rank else ""
        how = f"{self.recipe}, {self.processes}, recompute {self.recompute}, {self.micro_batches} micro-batches"
        return f"{self.model}, {self.failure}, {how}: {self.site.name}{where}"


def config_of(model: str) -> ModelConfig:
    """The shape of a model of MODELS, for bytes as tokens."""
    kind, fields = MODELS[model]
    own = dict(vocab_size=288, initializer_range=0.02)
    with KINDS[kind].known():
        return ModelConfig(**{**SHAPE, **KINDS[kind].fields, **own, **fields})


def recipe_of(case: Case, healed: bool = False) -> Recipe:
    """The recipe of a case's run, or of the one with the advised change."""
    failure = case.planted
    name = case.recipe
    fields: dict[str, Any] = dict(NO_EDGES)
    if name == "delayed":
        fields |= {"amax_history_len": 8, **failure.build}
    if healed:
        change = dict(failure.heal[0])
        if failure.rule == "outlier":
            # The inputs of these models are one block wide, so that blocks keep nothing apart.
            change = dict(precision={case.site.linear: "bf16"})
        if "recipe" in change:
            name = str(change.pop("recipe"))
            fields = dict(NO_EDGES)
        fields |= change
    return get_recipe(name, **fields)


def sites_of(model: str, recipe: str, fp8: bool) -> list[Site]:
    """The linears of a model, each expert apart; `fp8`: without those that stay in BF16."""
    config = config_of(model)
    with KINDS[MODELS[model][0]].known():
        table = precisions(get_recipe(recipe, **NO_EDGES), config.layers)
    experts = {}
    for number, layer in enumerate(config.layers):
        if layer.mlp is not None:
            for linear in layer.mlp.linears:
                experts[f"layers.{number}.{layer.mlp.name}.{linear.name}"] = linear.experts
    sites = []
    for name, precision in table.items():
        if not name.startswith("layers.") or (fp8 and precision.recipe is None):
            continue
        count = experts.get(name, 0)
        if count:
            sites += [Site(name, expert) for expert in range(count)]
        else:
            sites.append(Site(name))
    return sites


DRAWN = [
    name for name in FAILURES if name != "NaN in one expert"
]  # which is drawn as a linear among others


def draw(rng: random.Random, processes: str, failure: str = "", model: str = "") -> Case:
    """Return a case for one process or two, perhaps of a given failure in a given model.

    `fsdp+ep` has a model with experts, and often plants in one of them.
    """
    models = [name for name in MODELS if processes != "fsdp+ep" or config_of(name).moe is not None]
    model = model or rng.choice(models)
    failure = failure or rng.choice(DRAWN)
    recipe = rng.choice(FAILURES[failure].recipes)
    sites = sites_of(model, recipe, failure in ABOUT_FP8)
    experts = [site for site in sites if site.expert is not None]
    site = rng.choice(experts if experts and rng.random() < 0.5 else sites)
    # A process that has no part in an expert cannot have the failure in it.
    divided = processes == "fsdp+ep" and site.expert is not None
    last = processes != "one" and not divided and failure in EVERYWHERE and rng.random() < 0.5
    return Case(
        model,
        failure,
        recipe,
        processes,
        replace(site, last_rank=last),
        recompute=rng.choice(("none", "selective", "full")),
        micro_batches=rng.choice((1, 1, 2)),
    )


@contextlib.contextmanager
def trainer_of(
    case: Case, shared: Parallel, out: Path, healed: bool, **place: Any
) -> Iterator[Trainer]:
    """The run of a case in this process's share of it, with the failure planted; `place` has options of the model."""
    failure = case.planted
    emulated.FP8GlobalStateManager.reset()
    torch.manual_seed(5)
    fields: dict[str, Any] = dict(
        steps=STEPS, batch_size=4, seq_len=64, record=1, eval_every=0, warmup_steps=1, learning_rate=1e-3, save_every=0,
        gradient_accumulation=case.micro_batches, cuda_graph=False,  # which would call no hook
        parallel="none" if case.processes == "one" else case.processes,
    )  # fmt: skip
    fields |= failure.train
    fields |= failure.heal[1] if healed else {}
    config = TrainConfig(**fields)
    config_of_model = case.config
    if case.processes != "one":
        shared = replace(
            shared, kind=config.parallel, config=config, **{"dp": None, **meshes(config, torch.device("cpu"))}
        )  # fmt: skip
    with KINDS[MODELS[case.model][0]].known():
        model = shared.build(
            config_of_model,
            recipe=recipe_of(case, healed),
            activation_checkpointing=case.recompute,
            **{"device": "cpu", **place},
        )
        data = TokenDataset(
            TEXT[:30],
            load_tokenizer(None),
            config.seq_len,
            batch_size=shared.rows(config.batch_size),
            seed=0,
            rank=shared.data_rank,
            world_size=shared.data_world,
        )
        run = Trainer(model, data, [], config, out, parallel=shared)
        run.save = lambda blocking=True, interrupted=False: None  # type: ignore[method-assign]
        if shared.ranks.first:
            write_recipe(out, model)
        failure.plant(run, case.site)
        yield run


def run_case(shared: Parallel, out: Path, case: Case, **place: Any) -> None:
    """Run a case into `out/ill`, and with the advised change into `out/healed`; all processes call this together."""
    with (
        trainer_of(case, shared, out / "ill", False, **place) as run,
        contextlib.suppress(Diverged),
    ):
        run.run()
    if any(case.planted.heal):
        changed = trainer_of(case, shared, out / "healed", True, **place)
        with changed as run, contextlib.suppress(Diverged):
            run.run()


def found_in(run: Path, rule: str) -> tuple[Finding | None, Diagnosis]:
    """Return what the rule found in a run, None if nothing, and the whole diagnosis."""
    diagnosis = diagnose(read_facts(run))
    for finding in diagnosis.findings:
        if finding.rule == rule:
            return finding, diagnosis
    return None, diagnosis


def fault_of(case: Case, out: Path) -> str:
    """Return what is wrong with the record, the advice or the advised change of a case; "" for nothing."""
    failure = case.planted
    finding, diagnosis = found_in(out / "ill", failure.rule)
    if finding is None:
        return f"{failure.rule} not found:\n{diagnosis}"
    expected = failure.tensor(case.site)
    if expected and finding.tensor != expected:
        return f"{finding.tensor} is named for {expected}:\n{diagnosis}"
    if not failure.begun <= finding.step <= failure.begun + WITHIN:
        return f"named in step {finding.step}, begun in {failure.begun}:\n{diagnosis}"
    if any(failure.heal) and not heals(out / "healed", failure, case.site):
        _, diagnosis = found_in(out / "healed", failure.rule)
        return f"not healed:\n{diagnosis}"
    return ""
