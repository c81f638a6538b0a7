"""The recipe that a record speaks for: right on planted runs, by a judge that trains under it."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fewer import some
from planted import (
    FAILURES,
    LINEAR,
    SHAPE,
    STEPS,
    Planted,
    Site,
    at_each_step,
    run_planted,
    write_recipe,
)
from tiny_runs import losses, tiny_model, tiny_trainer
from torch import nn

from te_models import Recipe, Trainer, advise_recipe, get_recipe
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.config.toml import read_toml
from te_models.errors import DataError, UsageError
from te_models.inspect import recipe_advice
from te_models.inspect.advice import diagnose
from te_models.inspect.run_facts import RunFacts, read_facts
from te_models.recorder.layout import INDEX
from te_models.saving.pretrained import trained_shape

BF16 = {LINEAR: "bf16"}
# Failure, recipe of the run -> the recipe by its numbers, and its table of precisions.
ADVISED: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("outlier channel grows", "current"): ("current", BF16),
    ("learning rate too high", "current"): ("current", {}),
}
ADVISED_TOO: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("a long history keeps an old peak", "delayed"): ("current", {}),
    ("outlier channel grows", "delayed"): ("current", BF16),
    ("gradients overflow E5M2", "delayed"): ("current", {}),
    ("wrong scales after a resume", "delayed"): ("current", {}),
    ("delayed without calibration", "delayed"): ("current", {}),
    ("learning rate too high", "delayed"): ("delayed", {}),
    ("dead layer", "delayed"): ("delayed", {}),
    ("NaN in one linear", "current"): ("current", {}),
    ("NaN in one expert", "blockwise"): ("blockwise", {}),
}


def trained(folder: Path, failure: Planted, recipe: Recipe) -> list[float]:
    """The losses of a run with a failure planted, under a recipe."""
    model = tiny_model(recipe, preset=failure.preset, **SHAPE)  # type: ignore[arg-type]
    options: dict[str, Any] = dict(steps=STEPS, batch_size=2, seq_len=64, record=1, eval_every=0)
    trainer = tiny_trainer(model, folder, **{**options, **failure.train})
    write_recipe(folder, model)
    failure.plant(trainer, failure.site)
    trainer.run()
    return losses(folder)


def doubled(trainer: Trainer, site: Site) -> None:
    """The inputs of a linear are twice as large with each step, so that the scale of the step before clips them."""
    step = [0]

    def grow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * 2.0 ** step[0], *args[1:])

    at_each_step(trainer, lambda number: step.__setitem__(0, number))
    site.module(trainer.model).register_forward_pre_hook(grow)


def check_advice(
    planted: Planted, recipe: str, expected: tuple[str, dict[str, str]], out: Path
) -> None:
    """See the advice, and that training under it loses no more to BF16 than training without it."""
    failure = replace(planted, shape={})  # in `trained` as well
    run_planted(out / "ill", recipe, failure)
    advice = advise_recipe(out / "ill")
    assert (advice.recipe.name, dict(advice.recipe.precision)) == expected, advice
    assert advice.recipe == advice.by_numbers and advice.pays is None
    if expected == (recipe, {}):
        assert any("nothing in the record speaks against it" in one for one in advice.reasons) or (
            any("no step is left to judge it by" in one for one in advice.reasons)
        )
        return
    reference = trained(out / "bf16", failure, get_recipe("bf16"))
    advised = trained(out / "advised", failure, advice.recipe)
    unadvised = losses(out / "ill")
    without = np.abs(np.subtract(unadvised, reference[: len(unadvised)]))[6:].mean()
    # A hundredth of the loss's own change over the run is within the noise of such a run. Last bits grow in it, and
    # differ from one CPU to another: by the end its loss may be lower than BF16's by more than that.
    assert np.subtract(advised, reference)[6:].mean() <= max(1.02 * without, 0.005), advice
    again = advise_recipe(out / "advised")
    assert again.recipe == again.by_numbers == advice.recipe, again
    table = read_facts(out / "advised").record
    exact = table.sqnr()[6:, table.counted.any(0)]
    assert np.nanmedian(exact) > 25


@pytest.mark.parametrize(("name", "recipe"), some(2, reversed(ADVISED)))
def test_advice_on_a_planted_run(name: str, recipe: str, tmp_path: Path) -> None:
    check_advice(FAILURES[name], recipe, ADVISED[name, recipe], tmp_path)


def test_a_scale_that_its_tensor_outgrows_asks_for_current_and_not_for_blocks(
    tmp_path: Path,
) -> None:
    history = dict(amax_history_len=1, amax_compute_algo="most_recent")
    failure = Planted(doubled, ("delayed",), "late-scale", "input", build=history)
    check_advice(failure, "delayed", ("current", {}), tmp_path)
    (finding,) = diagnose(read_facts(tmp_path / "ill")).findings
    assert (finding.rule, finding.tensor) == (failure.rule, failure.tensor())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), ADVISED_TOO)
def test_advice_on_other_planted_runs(name: str, recipe: str, tmp_path: Path) -> None:
    check_advice(FAILURES[name], recipe, ADVISED_TOO[name, recipe], tmp_path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run under `current`."""
    return run_planted(tmp_path_factory.mktemp("runs") / "healthy", "current", None)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run under `delayed`."""
    return run_planted(tmp_path_factory.mktemp("runs") / "delayed", "delayed", None)


def test_a_healthy_run_keeps_its_recipe_and_gets_no_bf16_layer(healthy: Path) -> None:
    advice = advise_recipe(healthy)
    assert advice.recipe == get_recipe("current") and not advice.linears and not advice.notes
    assert "the least exact cast is usually" in str(advice) and "layer 0 (qkvg_proj, o_proj" in str(
        advice
    )
    assert set(advice.in_bf16) == {"lm_head"} | {
        f"layers.{depth}.{name}"
        for depth in (0, 2)
        for name in ("self_attn.qkvg_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_what_saturates_gets_a_newer_scale_or_where_none_holds_it_a_finer_one(
    operand: str, wide: bool, delayed: Path
) -> None:
    """A tenth of a tensor saturates; the largest value of a wide one is far above the root mean square."""
    facts = read_facts(delayed)
    linear = "layers.1.mlp.down_proj"
    place = next(i for i, one in enumerate(facts.tensors) if one.name == f"{linear}.{operand}")
    values = facts.record.values[2:, place]
    values[:, INDEX["saturated"]] = 0.1 * values[:, INDEX["elements"]]
    values[:, INDEX["noise"]] = 0.5 * values[:, INDEX["signal"]]
    if wide:
        # What the smallest normal number of each format cannot follow.
        peak = 1e5 if operand == "input" else 1e9
        mean_square = (values[:, INDEX["amax"]] / peak) ** 2
        values[:, INDEX["signal"]] = mean_square * values[:, INDEX["elements"]]
        values[:, INDEX["noise"]] = 0.5 * values[:, INDEX["signal"]]
    findings = diagnose(facts).findings
    assert [one.rule for one in findings] == [
        "saturation" if operand == "input" else "gradient-overflow"
    ]
    recipe, _, linears = recipe_advice._by_numbers(facts, findings, None, None)
    assert recipe.name == "current"
    assert dict(recipe.precision) == ({linear: "bf16"} if wide else {})
    assert [one.linear for one in linears] == [linear] * wide


def lose(facts: RunFacts, linears: set[str], steps: slice) -> None:
    """Write into a record that most values of the inputs of some te.Linears are flushed."""
    values = facts.record.values
    for place, tensor in enumerate(facts.tensors):
        if tensor.linear in linears and tensor.operand == "input":
            values[steps, place, INDEX["flushed"]] = 0.8 * values[steps, place, INDEX["elements"]]


@pytest.mark.parametrize(
    ("gpu", "name"), [(None, "blockwise"), ("H100", "blockwise"), ("B200", "mxfp8")]
)
def test_many_such_linears_ask_for_blocks(
    gpu: str | None, name: str, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(healthy)
    lose(facts, {f"layers.1.mlp.{name}_proj" for name in ("gate_up", "down")}, slice(2, None))
    monkeypatch.setattr(recipe_advice, "read_facts", lambda run: facts)
    advice = advise_recipe(healthy, gpu=gpu)
    assert advice.by_numbers.name == name and not advice.by_numbers.precision
    assert "2 linears" in str(advice) and "80%" in str(advice)
    # On a card that has no blocks of 8 bits, BF16 for these.
    advice = advise_recipe(healthy, gpu="RTX 4090")
    assert advice.by_numbers.name == "current" and len(advice.by_numbers.precision) == 2
    assert "no block" not in str(advice)


def test_what_shows_in_one_early_step_alone_says_nothing(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(healthy)
    lose(facts, {LINEAR}, slice(3, 4))
    monkeypatch.setattr(recipe_advice, "read_facts", lambda run: facts)
    assert not advise_recipe(healthy).recipe.precision
    lose(facts, {LINEAR}, slice(-3, None))
    assert dict(advise_recipe(healthy).recipe.precision) == BF16


def test_one_step_that_was_far_less_exact_is_named(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(healthy)
    assert "once " not in str(advise_recipe(healthy))
    place = [tensor.name for tensor in facts.tensors].index(f"{LINEAR}.grad_output")
    signal = facts.record.values[3, place, INDEX["signal"]]
    facts.record.values[3, place, INDEX["noise"]] = 0.1 * signal
    monkeypatch.setattr(recipe_advice, "read_facts", lambda run: facts)
    advice = advise_recipe(healthy)
    assert advice.recipe == get_recipe("current")
    reasons = " ".join(advice.reasons)
    assert f"once {LINEAR}.grad_output had 10.0 dB, in step {facts.steps[3]};" in reasons


def test_fp8_that_does_not_pay_on_a_card(healthy: Path) -> None:
    advice = advise_recipe(healthy, gpu="H100")
    assert advice.pays is False and advice.recipe.name == "bf16"
    assert advice.by_numbers.name == "current" and "FP8 does not pay on H100" in str(advice)
    assert advise_recipe(healthy, gpu="H100", fp8_params=True).recipe.name == "current"


def test_records_that_say_nothing(healthy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the record is of another model: it has layers.2"):
        advise_recipe(healthy, get_preset("gated-nano", num_hidden_layers=2))
    own = trained_shape(healthy)
    for fields, message in (
        ({"num_hidden_layers": own.num_hidden_layers + 1}, "it lacks layers.3.self_attn.qkvg_proj"),
        ({"intermediate_size": 2 * own.intermediate_size}, "layers.0.mlp.gate_up_proj is "),
    ):
        with pytest.raises(UsageError, match=f"the record is of another model: {message}"):
            advise_recipe(healthy, replace(own, **fields))
    # Rows for more tokens are no other te.Linears.
    advise_recipe(healthy, replace(own, vocab_size=own.vocab_size + 64))
    with pytest.raises(DataError, match="no such folder; give the folder of a run"):
        advise_recipe(tmp_path / "misspelled")
    with pytest.raises(
        DataError, match="has no record: give the folder of a run that has --record"
    ):
        advise_recipe(tmp_path)
    run_planted(tmp_path / "bf16", "bf16", None)
    with pytest.raises(DataError, match="no step in FP8: record a short run"):
        advise_recipe(tmp_path / "bf16")
    with pytest.raises(UsageError, match="has no captured step to try: mark one"):
        advise_recipe(healthy, try_step=True)


def test_commands_take_the_recipe_of_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_runs import PRETRAIN  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    short = [*PRETRAIN, "--steps", "4"]
    marks = ["capture", "seen", "--step", "3"]
    assert main(marks) == 0
    assert main([*short, "--recipe", "delayed", "--record", "1", "--out", "seen"]) == 0
    capsys.readouterr()
    assert main(["plan", "--from-record", "seen", "--try-step", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    advised = document["advice"]["recipe"]["name"]
    assert advised in ("delayed", "current") and document["plan"][0]["module"]
    tried = document["advice"]["tried"]
    assert [one["name"].split()[0] for one in tried][:2] == ["bf16", "delayed,"]
    assert all(one["finite"] for one in tried)
    assert main(["verify", "--from-record", "seen", "--seq-len", "16"]) == 0
    shown = capsys.readouterr().out
    assert f"recipe auto: {advised}" in shown and f"recipe {advised}, engine emulated" in shown
    assert main([*short, "--from-record", "seen", "--out", "advised"]) == 0
    assert f"recipe auto: {advised}" in capsys.readouterr().out
    assert read_toml(Path("advised/run.toml"))["recipe"]["name"] == advised
    for command in (["plan"], ["verify"], [*short, "--out", "other"]):
        assert main([*command, "--from-record", "seen", "--recipe", "current"]) == 2
        assert "chooses the recipe: leave out --recipe current" in capsys.readouterr().err
    # A file of settings may name another model than that of the record.
    Path("wide.toml").write_text(
        '[run]\npreset = "gated-nano"\n[shape]\nintermediate_size = 1024\n[training]\nsteps = 1\n'
    )
    assert main(["pretrain", "wide.toml", "--from-record", "seen", "--out", "wide"]) == 2
    assert "the record is of another model: " in capsys.readouterr().err
    assert main(["pretrain", "--resume", "advised", "--from-record", "seen"]) == 2
    assert "leave it out of --resume" in capsys.readouterr().err
    assert main(["plan", "--preset", "gated-nano", "--try-step"]) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["plan", "--from-record", "seen", "--gpu", "H100"]) == 0
    assert "FP8 does not pay on H100" in capsys.readouterr().out


def test_a_run_of_adapters_has_the_shape_of_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("base")
    tiny_model(intermediate_size=128).save_pretrained("other")
    Path("a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    tune = ["finetune", "--model", "base", "--data", "a.txt", "--lora", "2", "--steps", "2"]
    tune += ["--seq-len", "16", "--batch-size", "2", "--sample-tokens", "0"]
    assert main([*tune, "--recipe", "current", "--record", "1", "--out", "adapted"]) == 0
    for model in ("base", "adapted"):
        assert main(["plan", "--from-record", "adapted", "--model", model]) == 0, model
    capsys.readouterr()
    assert main(["plan", "--from-record", "adapted", "--model", "other"]) == 2
    assert "the record is of another model: layers.0.mlp" in capsys.readouterr().err


def test_an_outlier_of_a_wide_linear_asks_for_blocks(tmp_path: Path) -> None:
    """It has most of the model's operations, and eight blocks in a row, of which one has the outlier."""
    run_planted(tmp_path, "current", FAILURES["outlier channel grows"])
    assert advise_recipe(tmp_path).recipe.name == "blockwise"


def test_all_recipes_of_a_schedule_are_named(tmp_path: Path) -> None:
    model = tiny_model("current", **SHAPE)
    trainer = tiny_trainer(
        model, tmp_path, steps=4, batch_size=1, seq_len=16, record=1, eval_every=0,
        recipe_schedule="bf16@1,delayed@2",
    )  # fmt: skip
    write_recipe(tmp_path, model)
    trainer.run()
    advice = advise_recipe(tmp_path)
    assert "tensors under current, then bf16, then delayed" in " ".join(str(advice).split())
    assert advice.to_dict()["later"] == ["bf16", "delayed"]
