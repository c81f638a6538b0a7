"""The recipe that the record of a short run speaks for, and the precision of single te.Linears in it.

The rules of te_models.inspect.advice say what is wrong with which tensor. Here they become a recipe: where the scales
of `delayed` do not follow the tensors, `current`; where a te.Linear's tensors have values that one scale cannot hold,
BF16 for that te.Linear, or block scaling for the model if there are many. What no rule speaks about stays as it ran.
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_models.config.gpus import Gpu, get_gpu, suited, why_not
from te_models.config.layer import LinearSpec, named_linears
from te_models.config.model import ModelConfig
from te_models.config.precision import HEAD
from te_models.config.recipe import Recipe, get_recipe
from te_models.config.toml import read_toml
from te_models.errors import CheckpointError, ConfigError, DataError, UsageError, plural
from te_models.inspect.advice import Finding, diagnose, outliers
from te_models.inspect.exactness import OFTEN, below_usual, no_single_scale
from te_models.inspect.recipe_report import LinearAdvice, RecipeAdvice, described
from te_models.inspect.replay import try_recipes
from te_models.inspect.replay_report import Variant
from te_models.inspect.run_facts import RunFacts, read_facts
from te_models.model.recipe_fit import check_layers, check_sizes, pays_on
from te_models.recorder.record import Record
from te_models.saving.pretrained import trained_shape
from te_models.training.captures import captured_steps
from te_models.training.run_file import read_provenance
from te_models.training.settings import RUN_FILE

# Rules that say that the scales of `delayed` do not follow the tensors.
LATE_SCALES = (
    "uncalibrated",
    "wrong-scale",
    "stale-scale",
    "late-scale",
    "gradient-overflow",
    "saturation",
)
# Rules about values beyond what a scale represents. A scale that follows would lose the small values of some tensors.
CLIPPED = ("gradient-overflow", "saturation")
# Rules that say that one scale does not hold a tensor's values, or that its format does not.
COARSE = ("outlier", "inexact")
# Rules about what no recipe heals. What a run shows from then on says nothing about its recipe.
OTHER_CAUSES = ("nonfinite", "learning-rate")
# The share of the work of all recorded te.Linears up to which those with such tensors go to BF16. Beyond it, block
# scaling for the whole model costs less: on an H100 a model of Mixtral's width trains 1.24 times as fast as in BF16
# under `blockwise` and about 1.3 times under `current` (docs/results/training_speed.md), a fifth of the gain apart.
MOST_IN_BF16 = 0.25
LAST_STEPS = 3
# dB below the usual figures of all tensors, from which on a single step is worth a word.
ONE_STEP_BELOW = 6.0


def advise_recipe(
    run: str | Path,
    config: ModelConfig | None = None,
    gpu: Gpu | str | None = None,
    *,
    fp8_params: bool = False,
    try_step: bool = False,
) -> RecipeAdvice:
    """Return the recipe that the record of a run speaks for.

    Args:
        run: the folder of a run with a record (`--record`), under a recipe with FP8.
        config: the shape of the model to advise about, with the same te.Linears; None: the run's own.
        gpu: the card to train on, or its name; None: the run's, if it ran on one.
        fp8_params: whether weights are stored in FP8, which saves memory where FP8 saves no time.
        try_step: run the last captured step of the run again under BF16, its own recipe and the advised one, on the
            emulated engine.

    Raises:
        DataError: the run has no record, or recorded no FP8.
        UsageError: the record is of a model with other te.Linears, or no step can be tried.
    """
    facts = read_facts(run)
    if not facts.record.counted.any():
        raise DataError(
            f"the record of {run} has no step in FP8: record a short run under an FP8 recipe, such as --recipe current "
            "--record 1 --steps 20"
        )
    own_config = _own_config(run)
    if config is not None:
        _check_same_linears(facts, own_config, config)
    config = config or own_config
    card = _card(run, gpu)
    diagnosis = diagnose(facts)
    numbers, reasons, linears = _by_numbers(facts, diagnosis.findings, config, card)
    # Last: the numbers may speak for a recipe that saves no time at this size.
    pays, speed = _speed(run, config, card, numbers, fp8_params)
    recipe = numbers if pays is not False else get_recipe("bf16")
    tried: tuple[Variant, ...] = ()
    if try_step:
        tried = _tried(Path(run), facts.recipe, numbers)
    return RecipeAdvice(
        run=str(run),
        recorded=facts.recipe,
        by_numbers=numbers,
        recipe=recipe,
        reasons=reasons,
        linears=linears,
        in_bf16=tuple(_in_bf16(facts)),
        notes=tuple(_notes(diagnosis.findings)),
        pays=pays,
        speed=speed,
        steps=diagnosis.steps,
        tensors=diagnosis.tensors,
        later=facts.later_recipes(),
        tried=tried,
    )


def _own_config(run: str | Path) -> ModelConfig | None:
    """Return the shape of a run's model; None for a run that ended before its first checkpoint."""
    try:
        return trained_shape(run)
    except CheckpointError:
        return None


def _check_same_linears(
    facts: RunFacts, own_config: ModelConfig | None, config: ModelConfig
) -> None:
    """Raise a UsageError unless a model has the te.Linears of the run, in the same sizes.

    Args:
        facts: of the run, which name the te.Linears that it recorded.
        own_config: the shape of the run's model; None: it is not saved.
        config: the shape of the model to advise about.
    """
    advice = "record a short run of this model"
    known = dict(named_linears(config.layers))
    for tensor in facts.tensors:
        if tensor.linear != HEAD and tensor.linear not in known:
            raise UsageError(
                f"the record is of another model: it has {tensor.linear}, which this one lacks; {advice}"
            )
    if own_config is None:
        return
    recorded = dict(named_linears(own_config.layers))
    for name, linear in known.items():
        if name not in recorded:
            raise UsageError(f"the record is of another model: it lacks {name}; {advice}")
        then = _size(recorded[name])
        now = _size(linear)
        if then != now:
            raise UsageError(
                f"the record is of another model: {name} is {then} there, and {now} in this one; {advice}"
            )


def _size(linear: LinearSpec) -> str:
    """Return the inputs and outputs of a te.Linear as `te-models plan` prints them, and its experts."""
    size = f"{linear.inputs} -> {linear.outputs}"
    return f"{linear.experts} x {size}" if linear.experts else size


def _card(run: str | Path, gpu: Gpu | str | None) -> Gpu | None:
    """Return the card to advise for: the given one, else the one of the run; None for a CPU or an unknown card."""
    if isinstance(gpu, Gpu):
        return gpu
    if gpu is not None:
        return get_gpu(gpu)
    provenance = read_provenance(Path(run))
    if provenance.get("engine") != "native":
        return None
    try:
        return get_gpu(str(provenance.get("device", "")))
    except UsageError:
        return None


def card_at_hand() -> Gpu | None:
    """Return the GPU of this machine; None without one, or if its name is not known."""
    if not torch.cuda.is_available():
        return None
    try:
        return get_gpu(torch.cuda.get_device_name())
    except UsageError:
        return None


def _by_numbers(
    facts: RunFacts, findings: Sequence[Finding], config: ModelConfig | None, gpu: Gpu | None
) -> tuple[Recipe, tuple[str, ...], tuple[LinearAdvice, ...]]:
    """Return the recipe that the numbers speak for, the reasons, and the te.Linears that it treats apart."""
    recipe = facts.recipe
    reasons: list[str] = []
    # After a NaN or a diverging learning rate any recipe looks bad.
    end = min((one.step for one in findings if one.rule in OTHER_CAUSES), default=None)
    if end is not None:
        facts = before(facts, end)
        findings = [one for one in findings if one.step < end]
        reasons.append(f"what the record has from step {end} on is left out: no recipe heals it")
        if not facts.record.steps:
            reasons.append(f"{described(recipe)}, as recorded: no step is left to judge it by")
            return recipe, tuple(reasons), ()
    late = [one for one in findings if one.rule in LATE_SCALES]
    if late and recipe.scheme == "DelayedScaling":
        recipe = recipe.followed_by("current")
        # Scales from the tensor at hand cannot be late; everything else about the recipe stays.
        reasons += [f"current in place of {facts.recipe.name}: {one.message}" for one in late]
    coarse = _coarse_linears(facts, findings)
    if coarse:
        blocks = _block_recipe(recipe, gpu)
        work = sum(one.work for one in coarse)
        if work <= MOST_IN_BF16 or blocks is None:
            # After the user's own entries: of two patterns that match a name, the last counts.
            table = dict(recipe.precision) | {one.linear: "bf16" for one in coarse}
            recipe = recipe.replace(precision=table)
        else:
            reasons.append(
                f"{blocks.name} in place of {recipe.name}: in {plural(len(coarse), 'linear')} with {work:.0%} of the "
                f"work one scale does not hold all values, as in {coarse[0]}"
            )
            # The same layers in BF16 as before, under the other scheme.
            recipe = recipe.followed_by(blocks.name)
            coarse = []
    if config is not None:
        try:
            check_layers(config, recipe)
            check_sizes(config.layers, config.vocab_size, recipe)
        except ConfigError as error:
            reasons.append(
                f"bf16, since {described(recipe)} leaves nothing in FP8 or does not fit: {error}"
            )
            return get_recipe("bf16"), tuple(reasons), tuple(coarse)
    if recipe.to_dict() == facts.recipe.to_dict():
        reasons.append(f"{described(recipe)}, as recorded: nothing in the record speaks against it")
        reasons.append(_least_exact(facts))
    return recipe, tuple(reasons), tuple(coarse)


def before(facts: RunFacts, step: int) -> RunFacts:
    """Return the facts of a run without its record from a step on."""
    record = facts.record
    # Steps ascend.
    count = sum(one < step for one in record.steps)
    earlier = Record(
        tensors=record.tensors,
        steps=record.steps[:count],
        values=record.values[:count],
        codes=record.codes[:count],
    )
    return replace(facts, record=earlier)


def _coarse_linears(facts: RunFacts, findings: Sequence[Finding]) -> list[LinearAdvice]:
    """Return the te.Linears with tensors that one scale, or their format, does not hold, the worst first."""
    named: set[str] = set()
    clipped: set[str] = set()
    for finding in findings:
        if finding.rule in COARSE:
            named.update(finding.tensors)
        if finding.rule in CLIPPED:
            clipped.update(finding.tensors)
    lost = facts.lost()
    sqnr = facts.record.sqnr()
    # [steps, tensors]: either of the signs by which the rules of COARSE fire.
    shows = outliers(facts) | (below_usual(facts) > 0)
    wide = no_single_scale(facts)
    work = _work(facts)
    coarse: dict[str, LinearAdvice] = {}
    for place, tensor in enumerate(facts.tensors):
        if tensor.name not in named | clipped:
            continue
        signs = np.zeros(len(facts.steps), bool)
        if tensor.name in named:
            signs |= shows[:, place]
        if tensor.name in clipped:
            signs |= wide[:, place]
        if not _persists(signs, facts.record.counted[:, place]):
            continue
        steps = np.flatnonzero(signs)
        worst = int(steps[np.argmax(np.nan_to_num(lost[steps, place], nan=-1.0))])
        advice = LinearAdvice(
            linear=tensor.linear,
            precision="bf16",
            tensor=tensor.name,
            lost=float(lost[worst, place]),
            peak=float(facts.peak()[worst, place]),
            sqnr=float(np.nanmin(sqnr[steps, place], initial=np.inf)),
            steps=len(steps),
            work=work[tensor.linear],
        )
        before = coarse.get(tensor.linear)
        # Of the three tensors of a te.Linear, report the worst.
        if before is None or np.nan_to_num(before.lost) < np.nan_to_num(advice.lost):
            coarse[tensor.linear] = advice
    return sorted(coarse.values(), key=lambda one: -np.nan_to_num(one.lost))


def _persists(shows: np.ndarray[Any, Any], counted: np.ndarray[Any, Any]) -> bool:
    """Return whether a tensor shows something often, or at the end: both bool [steps]."""
    seen = np.flatnonzero(counted)
    often = shows.sum() >= max(2.0, OFTEN * len(seen))
    return bool(often or shows[seen[-LAST_STEPS:]].all())


def _work(facts: RunFacts) -> Mapping[str, float]:
    """Return each te.Linear's share of the operations of all recorded ones.

    An input [N, I], a weight [O, I] and an output gradient [N, O] have elements whose product is (N I O)².
    """
    elements = np.nan_to_num(facts.record.field("elements")).max(0)
    products: dict[tuple[str, int | None], float] = {}
    for tensor, count in zip(facts.tensors, elements, strict=True):
        key = (tensor.linear, tensor.expert)
        products[key] = products.get(key, 1.0) * float(count)
    work: dict[str, float] = {}
    for (linear, _), product in products.items():
        # sqrt((N I)(O I)(N O)) is N I O, half of the operations of each of the three GEMMs.
        work[linear] = work.get(linear, 0.0) + math.sqrt(product)
    total = sum(work.values()) or 1.0
    return {linear: operations / total for linear, operations in work.items()}


def _block_recipe(recipe: Recipe, gpu: Gpu | None) -> Recipe | None:
    """Return the 8-bit recipe with block scaling for a card; None if `recipe` has it, or none runs there."""
    if recipe.scheme in ("Float8BlockScaling", "MXFP8BlockScaling"):
        return None
    names = (
        ("mxfp8", "blockwise") if gpu is not None and gpu.capability >= (10, 0) else ("blockwise",)
    )
    # The first that the card has: MXFP8 where its tensor cores take it, else blocks of 128.
    for name in names:
        block_recipe = get_recipe(name)
        if gpu is None or not why_not(block_recipe, gpu.capability):
            return block_recipe
    return None


def _least_exact(facts: RunFacts) -> str:
    """Return the figures of the least exact tensor, and of the one that loses most, each in its usual step.

    A single step that was far less exact is named too.
    """
    by_step = facts.record.sqnr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of tensors that were never counted
        sqnr = np.nanmedian(by_step, axis=0)  # infinite for a cast that is usually exact
        lost = np.nanmedian(facts.lost(), axis=0)
    parts = []
    if np.isfinite(sqnr).any():
        place = int(np.nanargmin(np.where(np.isfinite(sqnr), sqnr, np.nan)))
        parts.append(
            f"the least exact cast is usually {facts.tensors[place].name} with {sqnr[place]:.1f} dB"
        )
        step, worst = np.unravel_index(int(np.nanargmin(by_step)), by_step.shape)
        if by_step[step, worst] < sqnr[place] - ONE_STEP_BELOW:
            name = facts.tensors[int(worst)].name
            parts.append(
                f"once {name} had {by_step[step, worst]:.1f} dB, in step {facts.steps[step]}"
            )
    if np.isfinite(lost).any():
        place = int(np.nanargmax(lost))
        name = facts.tensors[place].name
        parts.append(f"at most {lost[place]:.1%} of a tensor is flushed or subnormal, of {name}")
    return "; ".join(parts) or "no value before a cast was in memory to compare with"


def _in_bf16(facts: RunFacts) -> list[str]:
    """Return the te.Linears of which no step recorded anything."""
    counted = np.atleast_1d(facts.record.counted.any(0))
    ran: dict[str, bool] = {}
    for tensor, one in zip(facts.tensors, counted, strict=True):
        ran[tensor.linear] = ran.get(tensor.linear, False) or bool(one)
    return [name for name, quantized in ran.items() if not quantized]


def _notes(findings: Sequence[Finding]) -> list[str]:
    return [one.message for one in findings if one.rule in ("nonfinite", "dead", "learning-rate")]


def _speed(
    run: str | Path, config: ModelConfig | None, gpu: Gpu | None, recipe: Recipe, fp8_params: bool
) -> tuple[bool | None, str]:
    """Return whether a recipe saves time on a card at the size of a run, and the figures; (None, "") for no card."""
    if gpu is None or config is None or not recipe.quantized:
        return None, ""
    reason = why_not(suited(recipe, gpu), gpu.capability)
    if reason:
        return None, f"{recipe.name} does not run on {gpu.name}: {reason}"
    file = Path(run) / RUN_FILE
    document: Any = read_toml(file) if file.is_file() else {}
    # A run that was started from Python has no such file.
    size = [document.get("training", {}).get(name) for name in ("batch_size", "seq_len")]
    tokens = math.prod(size) if all(isinstance(one, int) for one in size) else None
    # Frozen weights have no gradients, so FP8 has less of a step to speed up.
    lora = bool(document.get("lora", {}).get("lora"))
    pays, why = pays_on(gpu.name, config, recipe.name, tokens, lora)
    if pays:
        return True, f"FP8 pays on {gpu.name}: {why}"
    if fp8_params:
        return None, f"FP8 saves memory and no time on {gpu.name}: {why}"
    return False, f"FP8 does not pay on {gpu.name}: {why}"


def _tried(run: Path, recorded: Recipe, advised: Recipe) -> tuple[Variant, ...]:
    """Run the last captured step again under BF16, the recorded recipe and the advised one."""
    steps = captured_steps(run)
    if not steps:
        mark = f"te-models capture {shlex.quote(str(run))} --step N"
        raise UsageError(
            f"{run} has no captured step to try: mark one with `{mark}`, and run or --resume it"
        )
    recipes = {"bf16": get_recipe("bf16"), f"{described(recorded)}, as recorded": recorded}
    if advised.to_dict() != recorded.to_dict():
        recipes[f"{described(advised)}, as advised"] = advised
    return tuple(try_recipes(run, steps[-1], recipes))
