"""Studies of many small runs: each run as the command line trains it, results that are kept, and a time limit."""

import json
import math
import time

import numpy as np
import pytest
import torch

from benchmarks import small_runs
from benchmarks.gated_learning_rates import (
    FURTHER,
    GATES,
    RATES,
    RECIPES,
    look,
    of_kind,
    runs,
    values_by_rate,
)
from benchmarks.optimizer_study import (
    first_runs,
    losses_table,
    mean_curve,
    missing_runs,
    runs_that_follow,
)
from benchmarks.small_runs import TOKENIZER, SmallRun, batch_of, finished, shuffled, train
from benchmarks.tables.optimizer_losses import best_losses
from benchmarks.tables.studies import best_said, interpolated_best, not_trained
from te_models import CausalLM, TrainConfig
from te_models.data.tokenizer import load_tokenizer
from te_models.training.trainer import Trainer

MODEL = dict(
    name="gated-nano", num_hidden_layers=3, hidden_size=32, intermediate_size=64,
    num_attention_heads=2, num_key_value_heads=2, vocab_size=128,
)  # fmt: skip
CONFIG = dict(
    steps=3, batch_size=2, seq_len=32, warmup_steps=1, eval_every=0, eval_batches=2, seed=5
)
FOREVER = float("inf")


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 128, 4000, dtype=np.int32)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_run_is_that_of_a_trainer(tokens, tmp_path, recipe):
    """The losses and the held-out loss are those of Trainer.run on the same batches."""
    run = SmallRun("a", {**MODEL, "recipe": recipe}, CONFIG, look)
    found = train(run, tokens, tokens, tmp_path, FOREVER)
    assert found is not None
    torch.manual_seed(5)
    model = CausalLM.from_preset(**MODEL, recipe=recipe)
    rows = tokens[: 4000 // 32 * 32].reshape(-1, 32)
    losses = []
    trainer = Trainer(
        model=model,
        dataset=shuffled(rows, 2, 5),
        eval_batches=[batch_of(rows[:2]), batch_of(rows[2:4])],
        config=TrainConfig(**CONFIG),
        out=tmp_path / "run",
        on_step=lambda row: losses.append(row["loss"]),
    )
    result = trainer.run()
    assert found["loss"] == round(sum(losses) / 3, 4)
    assert found["held_out"] == round(result.eval_loss, 4)
    assert found["largest_activation"] > 0
    assert 0 < found["first_token"] < 1
    assert set(found["seconds"]) == {"build", "first step", "steps", "look"}


def test_batches_cover_every_row_once_in_an_order_of_the_seed():
    rows = np.arange(12, dtype=np.int32).reshape(6, 2)
    drawn = shuffled(rows, 2, 0)
    epoch = torch.cat([next(drawn)["input_ids"] for _ in range(3)])
    assert sorted(epoch.flatten().tolist()) == list(range(12))
    other = shuffled(rows, 2, 1)
    assert not torch.equal(epoch, torch.cat([next(other)["input_ids"] for _ in range(3)]))


def test_run_ends_at_the_deadline_without_a_result(tokens, tmp_path):
    run = SmallRun("a", {**MODEL, "recipe": "bf16"}, CONFIG)
    assert train(run, tokens, tokens, tmp_path, time.monotonic()) is None
    assert finished([run], tmp_path) == {}


def test_whole_seeds_come_first_and_every_combination_once():
    made = runs("20m", [False], RECIPES, RATES, [0, 1, 2], tiny=False)
    assert len(made) == len({run.name for run in made}) == 3 * 3 * 5 * 3
    assert {run.config["seed"] for run in made[:45]} == {0}


def test_further_runs_are_of_each_kind_once():
    made = []
    for part in FURTHER:
        made += runs(**part, tiny=False)
    names = [run.name for run in made]
    assert len(set(names)) == len(names)
    results = {name: {} for name in names}
    for run in made:
        kind = "124m" if run.model["name"] == "gated-124m" else "qknorm" * run.model["qk_norm"]
        gate, rate, seed = (
            run.model["attention_gate"],
            run.config["learning_rate"],
            run.config["seed"],
        )
        assert f"{gate}-{run.model['recipe']}-{rate:g}-{seed}" in of_kind(results, kind)
    kinds = [of_kind(results, kind) for kind in ("", "qknorm", "124m")]
    assert sum(map(len, kinds)) == len(names)


def test_optimizer_study_tries_every_rate_from_one_seed_first():
    made = first_runs([1e-3, 2e-3], 7, tiny=False)
    assert {run.name for run in made} == {
        f"{name}-{rate}-7" for name in ("muon", "galore", "adamw") for rate in ("0.001", "0.002")
    }
    assert {run.config["learning_rate"] for run in made} == {1e-3, 2e-3}


def followed(losses):
    """Return the names of the runs that follow losses of AdamW by learning rate, from seed 0."""
    results = {}
    for rate, loss in losses.items():
        diverged = None if math.isfinite(loss) else 3
        results[f"adamw-{rate:g}-0"] = {"held_out": loss, "diverged": diverged}
    return [run.name for run in runs_that_follow(results, [5e-4, 1e-3, 2e-3], [0, 1, 2], False)]


def twins(rate):
    return [f"adamw8bit-{rate}-{seed}" for seed in range(3)]


def test_optimizer_study_goes_on_from_the_best_rate():
    inner = {5e-4: 3.0, 1e-3: 2.0, 2e-3: 2.5}
    assert followed(inner) == ["adamw-0.001-1", "adamw-0.001-2", *twins(0.001)]
    assert followed({**inner, 2e-3: 1.0}) == ["adamw-0.004-0"]
    assert followed({**inner, 2e-3: 1.0, 4e-3: math.inf}) == [
        "adamw-0.002-1",
        "adamw-0.002-2",
        *twins(0.002),
    ]
    assert followed({**inner, 5e-4: 1.0}) == ["adamw-0.00025-0"]
    # No rate is tried beyond the limits; a rate that has not run yet is waited for.
    assert followed({**inner, 4e-3: 1.5, 8e-3: 1.0}) == [
        "adamw-0.008-1",
        "adamw-0.008-2",
        *twins(0.008),
    ]
    assert followed({5e-4: 3.0, 1e-3: 2.0}) == []


@pytest.mark.slow
def test_runs_that_results_call_for_are_trained(tmp_path, tokens):
    """A run that `follow` asks for is trained after the others, and a failed one is not waited for."""
    np.save(tmp_path / "train.npy", tokens)
    np.save(tmp_path / "held_out.npy", tokens)
    first = SmallRun("first", {**MODEL, "recipe": "bf16"}, CONFIG)
    second = SmallRun("second", {**MODEL, "recipe": "bf16"}, CONFIG)
    broken = SmallRun("broken", {**MODEL, "recipe": "bf16"}, {**CONFIG, "optimizer": "none"})
    begun = time.monotonic()
    found = small_runs.run_all(
        [first, broken],
        tmp_path,
        prepare=lambda: None,
        per_gpu=1,
        seconds=240,
        changed=lambda results: None,
        follow=lambda results: [second] if "first" in results else [],
    )
    assert found.keys() == {"first", "second"}
    assert (tmp_path / "broken.error").exists()
    assert time.monotonic() - begun < 230


def test_tokens_are_of_the_text_and_one_document_in_a_hundred_is_held_out(tmp_path, monkeypatch):
    texts = [f"number {number}" for number in range(150)]

    def write(file, size):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    monkeypatch.setattr(small_runs, "write_corpus", write)
    small_runs.write_tokens(tmp_path, TOKENIZER, 0)
    tokenizer = load_tokenizer(TOKENIZER)
    expected = {"held_out": [texts[0], texts[100]], "train": texts[1:100] + texts[101:]}
    for name, kept in expected.items():
        ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in kept]
        assert np.load(tmp_path / f"{name}.npy").tolist() == [id for row in ids for id in row]


def test_diverged_runs_are_infinite_and_missing_ones_left_out():
    found = {
        "none-bf16-0.001-0": {"held_out": 2.0, "diverged": None},
        "none-bf16-0.001-1": {"held_out": 9.0, "diverged": 100},
        "headwise-bf16-0.001-0": {"held_out": 3.0, "diverged": None},
    }
    assert values_by_rate(found, "none", "bf16", "held_out") == {1e-3: [2.0, math.inf]}


def test_best_rate_is_at_the_bottom_of_a_parabola():
    def loss(rate):
        return 1.0 + (math.log2(rate) - math.log2(2.5e-3)) ** 2

    rates = (1e-3, 2e-3, 4e-3, 8e-3)
    found = interpolated_best({rate: loss(rate) for rate in rates})
    assert found == pytest.approx(2.5e-3)
    assert interpolated_best({1e-3: 1.0, 2e-3: 2.0, 4e-3: 4.0}) == 1e-3


def test_optimizer_table_has_the_means_of_seeds_and_leaves_out_diverged_runs():
    found = {
        "muon-0.001-0": {"held_out": 2.0, "diverged": None, "curve": [4.0, 2.0]},
        "muon-0.001-1": {"held_out": 3.0, "diverged": None, "curve": [5.0, 3.0]},
        "muon-0.0005-0": {"held_out": 2.75, "diverged": None, "curve": [4.0, 2.0]},
        "adamw-0.001-0": {"held_out": 1.0, "diverged": None, "curve": [4.0, 2.0]},
        "adamw-0.001-1": {"held_out": 9.0, "diverged": 2, "curve": [9.0]},
    }
    rows = losses_table(found).splitlines()
    assert rows[0] == "| optimizer | 0.0005 | 0.001 | best rate |"
    assert rows[2:] == [
        "| `muon` | 2.750 | 2.500 ± 0.707 | 0.001 |",
        "| `adamw` |  | 1.000 | 0.001 |",
    ]
    assert mean_curve(found, "muon-0.001-") == [4.5, 2.5]
    assert mean_curve(found, "adamw-0.001-") == [4.0, 2.0]


def test_a_page_names_the_runs_that_a_study_lacks():
    missing = [f"{gate}-bf16-{rate}-1-qknorm" for rate in ("0.002", "0.004") for gate in GATES]
    missing += ["headwise-bf16-0.0014-0", "none-delayed-0.008-0-124m"]
    text = not_trained({"missing": missing})
    assert "20M with `qk_norm`, `bf16`, seed 1: 0.002 and 0.004" in text
    assert "20M without `qk_norm`, `bf16`, headwise, seed 0: 0.0014" in text
    assert "`gated-124m`, `delayed`, none, seed 0: 0.008" in text
    assert not_trained({"missing": []}) == ""


def test_a_study_of_optimizers_lacks_what_its_results_call_for():
    runs = {}
    for rate, loss in {"0.0005": 3.0, "0.001": 2.0, "0.002": 2.5}.items():
        runs[f"adamw-{rate}-0"] = {"held_out": loss, "diverged": None}
    runs["muon-0.001-0"] = {"held_out": 1.0, "diverged": None}
    document = {
        "runs": runs, "missing": ["muon-0.002-0"], "rates": [5e-4, 1e-3, 2e-3], "seeds": [0, 1, 2],
    }  # fmt: skip
    assert missing_runs(document) == [
        "muon-0.002-0", "adamw-0.001-1", "adamw-0.001-2", *twins(0.001),
    ]  # fmt: skip
    # One that has not run at all rates has no best one yet.
    assert best_losses(document) == {"adamw": [2.0]}


def test_the_best_rate_at_an_end_of_those_that_were_tried_is_called_so():
    def runs_of(losses):
        found = {}
        for rate, loss in losses.items():
            found[f"none-bf16-{rate:g}-0"] = {"held_out": loss, "diverged": None}
        return found

    assert best_said(runs_of({1e-3: 1.0, 2e-3: 2.0}), "none", "bf16") == "0.001 (the lowest tried)"
    assert best_said(runs_of({1e-3: 2.0, 2e-3: 1.0}), "none", "bf16") == "0.002 (the highest tried)"
    inner = runs_of({1e-3: 2.0, 2e-3: 1.0, 4e-3: 2.0})
    assert best_said(inner, "none", "bf16") == "2.00e-3"
