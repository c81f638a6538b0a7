"""Studies of many small runs: each run as the command line trains it, results that are kept, and a time limit."""

import time

import numpy as np
import pytest
import torch

from benchmarks.gated_learning_rates import RECIPES, look, runs
from benchmarks.optimizer_study import OPTIMIZERS
from benchmarks.optimizer_study import runs as optimizer_runs
from benchmarks.small_runs import SmallRun, batch_of, finished, shuffled, train
from te_models import CausalLM, TrainConfig
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
    made = runs("20m", [False], RECIPES, [0, 1, 2], tiny=False)
    assert len(made) == len({run.name for run in made}) == 3 * 3 * 5 * 3
    assert {run.config["seed"] for run in made[:45]} == {0}


def test_optimizer_study_has_whole_rates_first():
    made = optimizer_runs([1e-3, 2e-3], [0, 1, 2], tiny=False)
    assert len({run.name for run in made}) == 5 * 2 * 3
    assert {run.config["learning_rate"] for run in made[:15]} == {1e-3}
    assert {run.config["optimizer"] for run in made[:5]} == set(OPTIMIZERS)
