"""The runs that come with the package: each can be built, and says what its file says."""

import json

import pytest

from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.config.shipped_runs import list_runs, run_file
from te_models.config.toml import read_toml
from te_models.errors import UsageError
from te_models.optim import resolve_options
from te_models.training.run_settings import run_settings

# Tokens per step, optimizer, tied tables, and the checkpoints that stay.
RUNS = {
    "d20-e3-full": (65_536, "muon8bit", False, 3),
    "d20-e3-full-galore": (65_536, "galore", False, 3),
    "gated-896": (131_072, "adamw", True, 2),
    "medium-3b": (131_072, "muon8bit", True, 3),
    "test-8bit": (512, "muon8bit", False, 3),
}


def test_the_table_has_every_run() -> None:
    assert list_runs() == sorted(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_carries_its_training_settings(name: str) -> None:
    settings = run_settings("pretrain", {}, run_file(name))
    train = settings.train
    config = get_preset(str(settings.preset))
    tokens = train.batch_size * train.seq_len * train.gradient_accumulation
    assert (tokens, train.optimizer, config.tie_word_embeddings, train.keep_last) == RUNS[name]
    assert train.seq_len <= config.max_position_embeddings


@pytest.mark.parametrize("name", RUNS)
def test_options_override_a_run_and_nothing_else_changes(name: str) -> None:
    plain = run_settings("pretrain", {}, run_file(name))
    changed = run_settings("pretrain", {"steps": 7, "learning_rate": 0.5}, run_file(name))
    assert (changed.train.steps, changed.train.learning_rate) == (7, 0.5)
    tables = changed.tables()
    tables["training"] |= {
        "steps": plain.train.steps,
        "learning_rate": plain.train.learning_rate,
    }
    assert tables == plain.tables()


def test_a_name_may_have_underscores_and_a_wrong_one_names_the_nearest() -> None:
    assert run_file("medium_3b") == run_file("medium-3b")
    with pytest.raises(UsageError, match="unknown run 'medium-3c': did you mean 'medium-3b'"):
        run_file("medium-3c")


def test_the_command_line_shows_and_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--runs"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RUNS)
    assert main(["list", "--runs", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["runs"]
    assert document["test-8bit"]["training"]["optimizer"] == "muon8bit"
    assert main(["pretrain", "--run", "test-8bit", "--resume"]) == 2
    assert "--run test-8bit, a RUN.TOML or --resume" in capsys.readouterr().err


@pytest.mark.parametrize("name", RUNS)
def test_the_optimizer_of_a_run_takes_its_options(name: str) -> None:
    training = read_toml(run_file(name))["training"]
    options = training.get("optimizer_options", "")
    values = resolve_options(training.get("optimizer", "adamw"), options)
    for option in filter(None, options.split(",")):
        key, value = option.split("=")
        assert str(values[key]) == value or float(values[key]) == float(value)
