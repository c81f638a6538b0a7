"""The advice about a run: healthy runs get none, and each planted failure is named, explained and healed."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fewer import every
from planted import (
    FAILURES,
    NATIVE_RECIPES,
    SHAPE,
    Planted,
    Site,
    at_each_step,
    heals,
    nothing,
    outlier,
    run_planted,
    write_recipe,
)
from tiny_runs import tiny_model, tiny_trainer
from torch import nn

from te_models import Trainer, get_recipe
from te_models.cli import main
from te_models.errors import DataError, Diverged
from te_models.inspect.advice import RULES, Diagnosis, Finding, diagnose
from te_models.inspect.findings import Rule
from te_models.inspect.run_facts import RunFacts, read_facts
from te_models.recorder.layout import INDEX, RECORDED_FIELDS

WITHIN = 5  # steps in which the right tensor is named
# A failure and the recipe under which it is planted; the others of each failure are long tests, as is one that
# another quick test plants.
ELSEWHERE = ("NaN in one batch",)
# Planted in other quick tests, below and in test_recipe_advice.py, or longer than most.
IN_LONG_TESTS = (
    "outlier channel grows",
    "gradients overflow E5M2",
    "wrong scales after a resume",
    "a long history keeps an old peak",
    "outlier in every block",
    "learning rate too high",
    "NaN in FP8 alone",
    "NaN in one linear",
)
PAIRS = [(name, failure.recipes[0]) for name, failure in FAILURES.items() if name not in ELSEWHERE]
OTHERS = [
    (name, recipe)
    for name, failure in FAILURES.items()
    for recipe in failure.recipes
    if (name, recipe) not in PAIRS
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in which nothing was planted; what tests change is what they read of it."""
    return run_planted(tmp_path_factory.mktemp("healthy"), "current", None)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of such a run under `delayed`."""
    return run_planted(tmp_path_factory.mktemp("delayed"), "delayed", None)


@pytest.mark.parametrize("recipe", every(3, NATIVE_RECIPES))
def test_a_healthy_run_gets_no_advice(recipe: str, tmp_path: Path) -> None:
    diagnosis = diagnose(read_facts(run_planted(tmp_path, recipe, None)))
    assert not diagnosis.findings and diagnosis.steps == 14 and diagnosis.tensors == 12
    assert "nothing stands out" in str(diagnosis)


def check_named(name: str, recipe: str, folder: Path) -> None:
    failure = FAILURES[name]
    diagnosis = diagnose(read_facts(run_planted(folder / "ill", recipe, failure)))
    found = {finding.rule: finding for finding in diagnosis.findings}
    assert failure.rule in found, diagnosis
    finding = found[failure.rule]
    assert finding.tensor == failure.tensor() or not failure.operand
    assert failure.begun <= finding.step <= failure.begun + WITHIN
    if any(failure.heal):
        run_planted(folder / "healed", recipe, failure, healed=True)
        assert heals(folder / "healed", failure), diagnose(read_facts(folder / "healed"))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (pair[0] in IN_LONG_TESTS)) for pair in PAIRS],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_planted_failure_is_named_and_the_advice_heals_it(
    name: str, recipe: str, tmp_path: Path
) -> None:
    check_named(name, recipe, tmp_path)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("outlier channel grows", "current"),
        pytest.param("a long history keeps an old peak", "delayed", marks=pytest.mark.slow),
        pytest.param("wrong scales after a resume", "delayed", marks=pytest.mark.slow),
    ],
)
def test_failures_are_named_with_accumulation(name: str, recipe: str, tmp_path: Path) -> None:
    """The scales of several micro-batches add up, and are one scale all the same."""
    failure = FAILURES[name]
    failure = replace(failure, train={**failure.train, "gradient_accumulation": 2})
    facts = read_facts(run_planted(tmp_path, recipe, failure))
    assert facts.one_scale().all()
    found = {finding.rule: finding for finding in diagnose(facts).findings}
    assert failure.rule in found
    assert found[failure.rule].tensor == failure.tensor() or not failure.operand


def test_a_spike_that_the_guard_met_is_named(healthy: Path) -> None:
    """The tensor is only the least exact one: a rule that knows more of it finds it too."""
    facts = read_facts(healthy)
    name = facts.tensors[0].name
    assert diagnose(facts).findings == ()
    spike = {"event": "spike", "tensor": name, "message": "step 9: the loss is above 3: skipped"}
    facts.events = [spike | {"step": 9}, spike | {"step": 11}]
    (found,) = diagnose(facts).findings
    assert (found.rule, found.step, found.tensor) == ("spike", 9, name)
    assert found.message == "step 9: the loss is above 3: skipped (and 1 later spike)"
    assert "--on-nan skip" in found.change


def test_an_outlier_that_outgrows_its_scale_is_named(tmp_path: Path) -> None:
    """It saturates in each step, since the scale is of the step before, and all other values are lost below it."""
    failure = FAILURES["outlier channel grows"]
    fast = replace(failure, plant=partial(outlier, base=256.0, most=9))
    findings = diagnose(read_facts(run_planted(tmp_path, "delayed", fast))).findings
    (found,) = [one for one in findings if one.rule == "outlier"]
    assert found.tensor == failure.tensor()
    assert failure.begun <= found.step <= failure.begun + WITHIN


def test_advice_says_what_the_guard_did(tmp_path: Path) -> None:
    failure = FAILURES["NaN in FP8 alone"]
    (finding,) = diagnose(
        read_facts(run_planted(tmp_path, "current", failure, healed=True))
    ).findings
    assert finding.message.endswith("step 6 is here; layers.1.* runs in BF16 since")


def test_blocks_have_several_scales(tmp_path: Path) -> None:
    facts = read_facts(run_planted(tmp_path, "blockwise", None))
    assert not facts.one_scale().any() and np.isnan(facts.headroom()).all()
    facts.recipe = facts.recipe.replace(precision={"*.down_proj": "current"})
    single = facts.one_scale()[0]
    assert [tensor.linear.endswith("down_proj") for tensor in facts.tensors] == list(single)
    facts.rows[3]["recipe"] = "current"  # of a recipe schedule
    assert facts.one_scale()[3].all() and not facts.one_scale()[4].all()


def test_scales_that_were_never_measured_after_a_change_of_the_recipe(tmp_path: Path) -> None:
    """They changed, but nothing loaded them."""
    model = tiny_model("current", **SHAPE)
    trainer = tiny_trainer(
        model, tmp_path, steps=4, batch_size=2, seq_len=64, record=1, eval_every=0, calibrate=False,
        recipe_schedule="delayed@2",
    )  # fmt: skip
    write_recipe(tmp_path, model)
    trainer.run()
    findings = diagnose(read_facts(tmp_path)).findings
    assert "uncalibrated" in {one.rule for one in findings}
    assert "wrong-scale" not in {one.rule for one in findings}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("delayed without calibration", "uncalibrated"),
        ("a long history keeps an old peak", "stale-scale"),
    ],
)
def test_delayed_scaling_that_is_not_the_first_recipe(name: str, rule: str, tmp_path: Path) -> None:
    """Of a recipe schedule, and of a recipe's table of patterns."""
    facts = read_facts(run_planted(tmp_path, "delayed", FAILURES[name]))
    own = [found for found in diagnose(facts).findings if found.rule == rule]
    assert own
    current = get_recipe("current")
    scheduled = replace(facts, recipe=current, explained=set())
    assert all(row["recipe"] == "delayed" for row in scheduled.rows)
    listed = current.replace(precision={"*": "delayed"})
    rows = [{**row, "recipe": "current"} for row in facts.rows]
    for other in (scheduled, replace(facts, recipe=listed, rows=rows, explained=set())):
        assert [found for found in diagnose(other).findings if found.rule == rule] == own


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), OTHERS, ids=lambda value: str(value).replace(" ", "-"))
def test_so_it_is_under_the_other_recipes(name: str, recipe: str, tmp_path: Path) -> None:
    check_named(name, recipe, tmp_path)


def test_every_rule_is_planted_or_looked_at_here() -> None:
    planted = {failure.rule for failure in FAILURES.values()}
    looked_at = {"saturation", "late-scale", "inexact", "clipped-between", "spike"}
    assert {rule.key for rule in RULES} - planted == looked_at
    assert len({rule.key for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("rule", "field", "value", "operand"),
    [
        ("saturation", "saturated", 0.05, "input"),
        ("gradient-overflow", "saturated", 0.05, "grad_output"),
        ("inexact", "noise", 0.05, "weight"),
        ("nonfinite", "nonfinite", 0.001, "input"),
    ],
)
def test_a_rule_from_the_numbers_of_a_record(
    rule: str, field: str, value: float, operand: str, healthy: Path
) -> None:
    facts = read_facts(healthy)
    assert not diagnose(facts).findings
    place = next(
        i
        for i, tensor in enumerate(facts.tensors)
        if tensor.operand == operand and facts.record.counted[0, i]
    )
    values = facts.record.values
    base = "signal" if field == "noise" else "elements"
    values[4:, place, INDEX[field]] = value * values[4:, place, INDEX[base]]
    findings = diagnose(facts).findings
    assert [finding.rule for finding in findings] == [rule]
    assert findings[0].tensor == facts.tensors[place].name
    assert findings[0].step == facts.record.steps[4]
    if field == "saturated":
        assert "5.0% saturates" in findings[0].message


@pytest.mark.parametrize("factor", [1.0, 256.0])
def test_a_step_that_was_clipped_between_recorded_ones_is_named(
    factor: float, tmp_path: Path
) -> None:
    """Step 8 alone has large inputs, and each fifth step is recorded: the histories tell."""

    def plant(trainer: Trainer, site: Site) -> None:
        step = [0]

        def enlarge(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0] * (factor if step[0] == 8 else 1.0), *args[1:])

        at_each_step(trainer, lambda number: step.__setitem__(0, number))
        site.module(trainer.model).register_forward_pre_hook(enlarge)

    spike = Planted(
        plant,
        ("delayed",),
        "clipped-between",
        "input",
        build=dict(amax_compute_algo="most_recent", amax_history_len=16),
        train=dict(record=5),
    )
    facts = read_facts(run_planted(tmp_path, "delayed", spike))
    assert facts.record.steps == [5, 10]
    found = [one for one in diagnose(facts).findings if one.rule == "clipped-between"]
    if factor == 1:
        assert not diagnose(facts).findings
        return
    (finding,) = found
    # What follows from the large input, such as its gradient, is named with it.
    assert spike.tensor() in finding.tensors and finding.step == 10
    assert "in step 8, which is not recorded" in finding.message
    assert "the scale of step 5 represents" in finding.message


@pytest.mark.parametrize(
    ("between", "after", "named"),
    [(40, 1, True), pytest.param(8, 1, False, marks=pytest.mark.slow), (40, 8, False)],
)
def test_a_scale_that_follows_growing_values_is_no_finding(
    between: float, after: float, named: bool, tmp_path: Path
) -> None:
    """By the numbers of a record: what the recorded step after has too was growth, and not one step's."""
    facts = read_facts(run_planted(tmp_path, "delayed", None))
    place = next(
        i for i, one in enumerate(facts.tensors) if one.name == "layers.1.mlp.down_proj.input"
    )
    values = facts.record.values
    facts.record.steps[:] = [10 * step for step in facts.record.steps]
    amax = values[4, place, INDEX["amax"]]
    values[4, place, INDEX["scale_min"]] = 448 / amax  # what it represents is just its amax
    values[5, place, INDEX["amax"]] = after * amax
    values[5, place, INDEX["scale_min"]] = 448 / (after * amax)
    values[5, place, INDEX["amax_between"]] = between * amax
    values[5, place, INDEX["amax_between_age"]] = 3
    findings = diagnose(facts).findings
    assert [one.rule for one in findings] == ["clipped-between"] * named
    if named:
        assert (findings[0].tensor, findings[0].step) == (facts.tensors[place].name, 60)
        assert "in step 57, which is not recorded; that is 40 times" in findings[0].message


def test_a_loss_that_leaps_and_comes_back_speaks_for_the_learning_rate(healthy: Path) -> None:
    """If the weights grew with it; a spike without that has another cause."""
    facts = read_facts(healthy)
    for place in (4, 5):
        facts.rows[place]["loss"] *= 3
    assert not diagnose(facts).findings
    facts.record.values[4:, facts.operand("weight"), INDEX["signal"]] *= 4
    (finding,) = diagnose(facts).findings
    assert (finding.rule, finding.step) == ("learning-rate", 4)


def test_a_learning_rate_too_high_from_the_first_step_on_is_named(healthy: Path) -> None:
    """The loss is low in step 1 alone; the weights grew before the first record, and weight decay shrinks them."""
    facts = read_facts(healthy)
    facts.rows = [
        {"step": step, "loss": 5.0 if step == 1 else 400 + 10 * step, "learning_rate": 3.0}
        for step in range(1, 41)
    ]
    weights = facts.operand("weight")
    signal = facts.record.values[:, weights, INDEX["signal"]].copy()
    facts.record.values[:, weights, INDEX["signal"]] = signal[:1]
    assert not diagnose(facts).findings, "frozen weights, as below adapters"
    shrinking = 1e3 * 0.8 ** np.arange(len(signal))[:, None]
    facts.record.values[:, weights, INDEX["signal"]] = shrinking * signal[:1]
    (finding,) = diagnose(facts).findings
    assert (finding.rule, finding.step) == ("learning-rate", 1)
    assert "rose from 5 after step 1" in finding.message
    assert "the learning rate, 3, was" in finding.message
    leaping = [row | {"loss": 4.0} if row["step"] > 4 else row for row in facts.rows]
    record = replace(facts.record, steps=[10 * step for step in facts.record.steps])
    (finding,) = diagnose(replace(facts, rows=leaping, record=record)).findings
    assert (finding.rule, finding.step) == ("learning-rate", 1), "between two records"
    for row in facts.rows:
        row["learning_rate"] = 1e-3  # small for these weights: something else is the cause
    assert not diagnose(facts).findings


def test_weights_that_grow_and_shrink_again_grew(healthy: Path) -> None:
    facts = read_facts(healthy)
    for row in facts.rows[1:]:
        row["loss"] *= 20
    facts.record.values[1:6, facts.operand("weight"), INDEX["signal"]] *= 9
    (finding,) = diagnose(facts).findings
    assert (finding.rule, finding.step) == ("learning-rate", 1)
    assert "grew by a factor of 3." in finding.message


def test_values_are_lost_among_those_that_are_not_zero(healthy: Path) -> None:
    """An expert's rows are padded with zeros, of which none is lost."""
    facts = read_facts(healthy)
    values = facts.record.values
    place = next(
        i for i, one in enumerate(facts.tensors) if one.name == "layers.1.mlp.down_proj.input"
    )
    elements = values[:, place, INDEX["elements"]]
    values[8:, place, INDEX["flushed"]] = 0.1 * elements[8:]
    assert not diagnose(facts).findings
    values[8:, place, INDEX["zeros"]] = 0.88 * elements[8:]
    (finding,) = diagnose(facts).findings
    assert (finding.rule, finding.step) == ("outlier", 9)
    assert 0.8 < facts.lost()[8, place] < 0.95


def test_gradients_overflow_first_where_the_overflow_goes_on(healthy: Path) -> None:
    """A gradient that saturates in one step alone began nothing; the end of a run may cut it off."""
    run = read_facts(healthy)
    names = [tensor.name for tensor in run.tensors]
    # Of the two, backward computes the gradient of down_proj first.
    first = names.index("layers.1.mlp.down_proj.grad_output")
    then = names.index("layers.1.mlp.gate_up_proj.grad_output")
    # How many steps are recorded, from which one on `first` saturates, and in how many.
    cases = [(14, 3, 1), (14, 5, 1), (14, 5, 2), (14, 5, 3), (7, 5, 2)]
    for share, (recorded, begin, steps) in itertools.product([0.006, 0.04], cases):
        values = run.record.values[:recorded].copy()
        values[5:, then, INDEX["saturated"]] = 0.06 * values[5:, then, INDEX["elements"]]
        values[7:10:2, then] = 0  # as of an expert without tokens
        beyond = values[begin : begin + steps, first]  # a view
        beyond[:, INDEX["saturated"]] = share * beyond[:, INDEX["elements"]]
        beyond[:, INDEX["noise"]] = 0.2 * beyond[:, INDEX["signal"]]
        record = replace(run.record, steps=run.record.steps[:recorded], values=values)
        facts = replace(run, record=record, explained=set())
        found = [one for one in diagnose(facts).findings if one.rule == "gradient-overflow"]
        goes_on = begin + steps == recorded or steps >= 3
        named = [(one.tensor, one.step) for one in found]
        assert named == [(names[first if goes_on else then], 6)], (share, recorded, begin, steps)


def test_counts_that_nobody_could_make_say_nothing(tmp_path: Path) -> None:
    facts = read_facts(run_planted(tmp_path, "delayed", None))
    for name in ("zeros", "signal", "noise", "flushed", "subnormal"):
        facts.record.values[:, :, INDEX[name]] = -1
    assert not diagnose(facts).findings
    facts.record.values[:, :, INDEX["elements"]] = 0
    del facts.record.__dict__["counted"]  # which was cached
    assert not diagnose(facts).findings
    assert len(RECORDED_FIELDS) == facts.record.values.shape[2] and np.isnan(facts.headroom()).all()


def test_the_command_prints_the_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_planted(tmp_path / "run", "current", FAILURES["NaN in one linear"])
    assert main(["doctor", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step 6, nonfinite" in shown and "layers.1.mlp.down_proj.weight" in shown
    assert main(["doctor", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"][0]["rule"] == "nonfinite"
    with pytest.raises(
        DataError, match="has no record: give the folder of a run that has --record"
    ):
        read_facts(tmp_path)


def test_advice_is_indented_in_each_line_of_a_paragraph() -> None:
    finding = Finding("dead", "x", 3, "seen " * 40, "change " * 40, ("x",))
    first, *rest = str(Diagnosis(steps=4, tensors=1, findings=(finding,))).splitlines()
    assert first == "step 3, dead" and len(rest) > 4
    assert all(line.startswith("  ") for line in rest)


@pytest.mark.parametrize("after", [0, 1])
def test_what_begins_after_a_rate_that_is_too_high_may_follow_from_it(
    after: int, healthy: Path
) -> None:
    facts = read_facts(healthy)
    for place in (4, 5):
        facts.rows[place]["loss"] *= 3
    facts.record.values[4:, facts.operand("weight"), INDEX["signal"]] *= 4

    def saturates(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
        yield Finding(rule.key, "a", 4 + after, "a saturates", "shrink it")

    later = Rule("saturation", "", "", "saturated", saturates)
    findings = {found.rule: found for found in diagnose(facts, [*RULES, later]).findings}
    assert findings["learning-rate"].step == 4
    assert findings["learning-rate"].change.startswith("lower --learning-rate")
    follows = findings["saturation"].change.startswith("first mend the learning-rate of step 4")
    assert follows == bool(after) and findings["saturation"].change.endswith("shrink it")


@pytest.mark.parametrize(
    ("recipe", "record", "rate"),
    [("delayed", 1, 1e4), ("current", 4, 1e8), ("blockwise", 50, 1e4), ("bf16", 1, 1e8)],
)
def test_a_learning_rate_that_ends_a_run_before_the_loss_can_rise_comes_first(
    recipe: str, record: int, rate: float, tmp_path: Path
) -> None:
    """The NaN of step 3 or 6 follows from it, also where no step was recorded before."""
    model = tiny_model(recipe, **SHAPE)
    run = tiny_trainer(
        model, tmp_path, batch_size=2, seq_len=64, record=record, eval_every=0, learning_rate=rate,
        clip_grad_norm=0.0,
    )  # fmt: skip
    write_recipe(tmp_path, model)
    with pytest.raises(Diverged):
        run.run()
    first, *others = diagnose(read_facts(tmp_path)).findings
    assert (first.rule, first.step) == ("learning-rate", 1)
    assert first.change.startswith("lower --learning-rate")
    (named,) = [one for one in others if one.rule == "nonfinite"]
    assert named.tensor and named.change.startswith("first mend the learning-rate of step 1")


def test_a_bad_batch_of_a_run_that_learns_is_not_blamed_on_the_learning_rate(
    tmp_path: Path,
) -> None:
    """Nor before its loss has fallen, if the weights stay."""
    facts = read_facts(run_planted(tmp_path, "current", FAILURES["NaN in one batch"]))
    assert {one.rule for one in diagnose(facts).findings} == {"nonfinite"}
    assert facts.events[0]["weight_growth"] == pytest.approx(1.0, abs=0.2)
    for row in facts.rows:
        row["loss"] = facts.rows[0]["loss"]
    assert {one.rule for one in diagnose(facts).findings} == {"nonfinite"}


def test_a_bad_step_without_a_bad_tensor_is_still_a_finding(healthy: Path) -> None:
    facts = read_facts(healthy)
    message = "step 5: the loss is nan: the run ends"
    facts.events.append({"step": 5, "event": "nonfinite", "tensor": None, "message": message})
    (finding,) = diagnose(facts).findings
    assert (finding.rule, finding.tensor, finding.step) == ("nonfinite", "", 5)
    assert finding.message.startswith(message)


def test_an_outlier_in_every_block_asks_for_bf16(tmp_path: Path) -> None:
    """A linear with 128 inputs has one block in a row, which the outlier spoils; blocks of 32 keep it apart."""
    failure = FAILURES["outlier in every block"]
    (finding,) = diagnose(read_facts(run_planted(tmp_path / "128", "blockwise", failure))).findings
    assert (finding.rule, finding.tensor) == ("outlier", failure.tensor())
    assert "in BF16" in finding.change and "blockwise" not in finding.change
    found = diagnose(read_facts(run_planted(tmp_path / "32", "mxfp8", failure))).findings
    assert "outlier" not in {one.rule for one in found}


@pytest.mark.parametrize(
    "recipe",
    ["current", *(pytest.param(one, marks=pytest.mark.slow) for one in ("delayed", "blockwise"))],
)
def test_closed_gates_are_no_outliers(recipe: str, tmp_path: Path) -> None:
    """They flush a third of the values, and no row and no column of the input is less exact for it."""

    def close(trainer: Trainer, site: Site) -> None:
        config = trainer.model.config
        gate = config.num_attention_heads * config.head_dim
        with torch.no_grad():
            # The last rows are those of the gate: logits of some 50.
            trainer.model.layers[1].self_attn.qkvg_proj.weight[-gate:].mul_(300)

    gates = Planted(close, ("current",), "", "")
    facts = read_facts(run_planted(tmp_path, recipe, gates))
    (place,) = [
        i for i, one in enumerate(facts.tensors) if one.name == "layers.1.self_attn.o_proj.input"
    ]
    assert facts.lost()[:, place].max() > 0.3 and facts.record.sqnr()[:, place].min() > 25
    assert not diagnose(facts).findings


@pytest.mark.parametrize(("margin", "named"), [(11, True), (2, False)])
def test_a_margin_that_leaves_small_values_no_room_is_named(
    margin: int, named: bool, tmp_path: Path
) -> None:
    """Its scales are old, and neither this nor an outlier is the cause. The signal hardly shows it."""
    build = dict(margin=margin, amax_history_len=8, amax_compute_algo="max")
    facts = read_facts(
        run_planted(tmp_path, "delayed", Planted(nothing, ("delayed",), "", "", build=build))
    )
    assert (facts.margin() == margin).all()
    findings = diagnose(facts).findings
    assert len(findings) == named
    for finding in findings:
        assert (finding.rule, finding.tensor) == ("late-scale", "layers.1.mlp.down_proj.input")
        assert "zero or subnormal, and the tensor's own scale" in finding.message
        assert f"powers of two unused, for a margin of {margin}" in finding.message
        assert finding.change.startswith("lower --margin")
        place = [one.name for one in facts.tensors].index(finding.tensor)
        assert np.nanmedian(facts.record.sqnr()[:, place]) > 22
    facts.rows[3]["recipe"] = "current"  # of a recipe schedule
    assert (facts.margin()[3] == 0).all()


@pytest.mark.parametrize(("steps", "named"), [((4,), False), ((4, 9), True)])
def test_two_steps_that_are_far_from_exact_are_named(
    steps: tuple[int, ...], named: bool, healthy: Path
) -> None:
    facts = read_facts(healthy)
    place = [one.name for one in facts.tensors].index("layers.1.mlp.down_proj.grad_output")
    for step in steps:
        # A signal of 7 dB over its noise.
        facts.record.values[step, place, INDEX["noise"]] = (
            0.2 * facts.record.values[step, place, INDEX["signal"]]
        )
    found = [(one.rule, one.tensor, one.step) for one in diagnose(facts).findings]
    assert found == [("inexact", facts.tensors[place].name, facts.steps[4])] * named


@pytest.mark.parametrize(("factor", "named"), [(1.0, False), (64.0, True)])
def test_an_outlier_of_one_process_of_two_is_named(
    factor: float, named: bool, healthy: Path
) -> None:
    """Its own scale loses nearly all of its values, half of all; closed gates lose as many under alike scales."""
    facts = read_facts(healthy)
    place = [one.name for one in facts.tensors].index("layers.1.mlp.down_proj.input")
    values = facts.record.values[4:, place]
    values[:, INDEX["blocks"]] = 2
    values[:, INDEX["scale_max"]] = factor * values[:, INDEX["scale_min"]]
    values[:, INDEX["subnormal"]] = 0
    values[:, INDEX["flushed"]] = 0.48 * values[:, INDEX["elements"]]
    found = [(one.rule, one.tensor, one.step) for one in diagnose(facts).findings]
    assert found == [("outlier", facts.tensors[place].name, facts.steps[4])] * named


@pytest.mark.parametrize("as_a_whole", [False, True])
def test_an_outlier_began_where_a_largest_value_grew_alone(as_a_whole: bool, healthy: Path) -> None:
    facts = read_facts(healthy)
    names = [tensor.name for tensor in facts.tensors]
    grown = names.index("layers.1.self_attn.o_proj.input")
    shown = names.index("layers.1.mlp.down_proj.input")
    values = facts.record.values
    values[4:, shown, INDEX["flushed"]] = 0.9 * values[4:, shown, INDEX["elements"]]
    values[4:, grown, INDEX["amax"]] *= 64
    values[4:, grown, INDEX["scale_min"]] /= 64
    if as_a_whole:
        values[4:, grown, INDEX["signal"]] *= 64**2
        values[4:, grown, INDEX["noise"]] *= 64**2
    (finding,) = diagnose(facts).findings
    assert finding.rule == "outlier"
    assert finding.tensor == names[shown if as_a_whole else grown]


def cast_counts(x: torch.Tensor, scale: float, kind: torch.dtype) -> dict[str, float]:
    """Return the fields of a record of a cast of x, counted here."""
    info = torch.finfo(kind)
    scaled = (x * scale).clamp(-info.max, info.max)
    y = scaled.to(torch.float32).to(kind).double()
    small = (y != 0) & (y.abs() < info.smallest_normal)
    return dict(
        amax=x.abs().max().item(),
        scale_min=scale,
        scale_max=scale,
        elements=x.numel(),
        zeros=0,
        saturated=int(((x * scale).abs() > info.max * (1 + info.eps / 4)).sum()),
        flushed=int((y == 0).sum()),
        subnormal=int(small.sum()),
        signal=(x**2).sum().item(),
        noise=((y / scale - x) ** 2).sum().item(),
    )


def spread(shape: str, kind: torch.dtype) -> torch.Tensor:
    """Return 20,000 numbers whose range one scale of a format holds, or does not; float64."""
    x = torch.randn(20_000, dtype=torch.float64)
    info = torch.finfo(kind)
    normal_range = info.max / info.smallest_normal
    if shape == "heavy tails":
        quantiles = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
        return -quantiles.log()  # magnitudes of a Laplace distribution
    if shape == "an outlier within the format's range":
        x[0] = 0.07 * normal_range
    if (
        shape == "an outlier at its end"
    ):  # half of the others are subnormal, and keep most of their bits
        x[0] = 0.67 * normal_range
    if shape == "an outlier beyond it":  # nearly all others are subnormal, and have too few bits
        x[0] = 3.0 * normal_range
    if shape == "closed gates":  # half of them, so far that most of these values are flushed
        x *= torch.sigmoid(80 * torch.randn(20_000, dtype=torch.float64) - 15)
    if shape == "most values far below the others":
        x[4_000:] /= 2 * normal_range
    return x


# Of E4M3 and E5M2: what a tensor is, by what factor it changes in each step, and the rule that finds it, if any.
MOVING = [
    ("one size", (1.0, 1.0), ""),
    ("heavy tails", (2.2, 2.95), "late-scale"),
    ("one size", (2.0**-14, 2.0**-29.3), "late-scale"),
    ("an outlier within the format's range", (1.0, 1.0), ""),
    ("an outlier within the format's range", (4.0, 4.0), "late-scale"),
    ("an outlier at its end", (1.0, 1.0), ""),
    ("closed gates", (1.0, 1.0), ""),
    ("an outlier beyond it", (4.0, 4.0), "inexact"),
    ("an outlier beyond it", (1.0, 1.0), "outlier"),
    ("most values far below the others", (1.0, 1.0), "outlier"),
    ("one size", (8.0, 8.0), "saturation"),
    ("most values far below the others", (8.0, 8.0), "saturation"),
]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("shape", "factors", "rule"), MOVING)
def test_blocks_are_advised_only_where_no_single_scale_holds_a_tensor(
    shape: str, factors: tuple[float, float], rule: str, kind: torch.dtype, delayed: Path
) -> None:
    """Each step casts by the amax of the one before. The judge casts each tensor by its own.

    An input in either format, since of gradients other rules speak first.
    """
    facts = read_facts(delayed)
    e4m3 = kind == torch.float8_e4m3fn
    name = "layers.1.mlp.down_proj.input"
    place = next(i for i, one in enumerate(facts.tensors) if one.name == name)
    values = facts.record.values[:, place]
    torch.manual_seed(0)
    largest = torch.finfo(kind).max
    factor = factors[0] if e4m3 else factors[1]
    amax = spread(shape, kind).abs().max().item() / factor
    holds = []
    for step in range(len(values)):
        x = spread(shape, kind) * factor**step
        own_amax = x.abs().max().item()
        own = cast_counts(x, largest / own_amax, kind)
        # The largest values are most of the signal. The smaller three quarters have to be exact by themselves.
        smaller = x[x.abs().argsort()[: x.numel() * 3 // 4]]
        others = cast_counts(smaller, largest / own_amax, kind)
        bound = 10 ** -(2.2 if e4m3 else 1.6)
        holds.append(all(one["noise"] <= one["signal"] * bound for one in (own, others)))
        counts = cast_counts(x, largest / amax, kind)
        for field, value in counts.items():
            values[step, INDEX[field]] = value
        values[step, INDEX["scale_age"]] = 1
        values[step, INDEX["format"]] = 7 if e4m3 else 8
        amax = own_amax
    findings = diagnose(facts).findings
    assert [finding.rule for finding in findings] == [rule] * bool(rule), findings
    assert all(holds) or not any(holds)
    if rule != "saturation":
        assert all(holds) == (rule in ("", "late-scale"))
    for finding in findings:
        assert ("no single scale" in finding.message) != all(holds) or rule == "outlier"
        assert finding.tensor == name
        assert ("current" in finding.change) == all(holds)
        assert ("scales per block" in finding.change or "finer" in finding.change) != all(holds)


def test_a_scale_of_the_tensor_itself_is_not_late(healthy: Path) -> None:
    """So a poor cast under `current` speaks for finer scales, whatever its range."""
    facts = read_facts(healthy)
    values = facts.record.values[:, next(np.flatnonzero(facts.record.counted[0]).__iter__())]
    values[:, INDEX["noise"]] = 0.05 * values[:, INDEX["signal"]]
    (finding,) = diagnose(facts).findings
    assert finding.rule == "inexact"
    values[:, INDEX["scale_age"]] = 1
    (finding,) = diagnose(facts).findings
    assert (
        finding.rule == "late-scale"
        and "would leave at least 24; this one is 1 step old" in finding.message
    )
