"""YAML files of settings are read as TOML files with the same content are."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from te_models.config.toml import read_toml, render_toml
from te_models.config.yaml_file import read_yaml
from te_models.errors import ConfigError, MissingPackage, UsageError
from te_models.training.run_settings import read_run_file, run_settings

yaml = pytest.importorskip("yaml")

TABLES: dict[str, dict[str, Any]] = {
    "run": {"command": "finetune", "model": "gated-nano", "sample_tokens": 0},
    "data": {"data": ["a.jsonl:3", "b/"], "eval_split": 0.1, "columns": "prompt=q,completion=a"},
    "training": {"steps": 7, "learning_rate": 2e-5, "seed": 3, "clip_grad_norm": 1.0},
    "lora": {"lora": 8, "lora_alpha": 16.0, "merge": True},
    "recipe": {"name": "current", "precision": {"*.down_proj": "bf16"}},
}


def test_a_run_file_in_yaml_is_one_in_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(render_toml(TABLES, "a run"))
    for name in ("run.yaml", "run.YML"):
        (tmp_path / name).write_text(yaml.safe_dump(TABLES))
        assert read_yaml(tmp_path / name) == read_toml(tmp_path / "run.toml") == TABLES
        found = run_settings("finetune", {"steps": 9}, tmp_path / name)
        expected = run_settings("finetune", {"steps": 9}, tmp_path / "run.toml")
        assert found.train == expected.train and found.train.learning_rate == 2e-5
        assert (found.data, found.lora, found.recipe) == (
            expected.data,
            expected.lora,
            expected.recipe,
        )


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("2e-5", 2e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("3", 3),
        ("-3", -3),
        ("007", 7),
        ("0x1f", 31),
        (".inf", math.inf),
        ("true", True),
        ("no", "no"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2026-11-26", "2026-11-26"),
        ("1_000", "1_000"),
        ("1e", "1e"),
        ('"3"', "3"),
        ("~", None),
        ("", None),
        ("[1, 2e-5, a]", [1, 2e-5, "a"]),
    ],
)
def test_words_are_those_of_yaml_1_2(word: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"training:\n  x: {word}\n")
    found = read_yaml(tmp_path / "a.yaml")["training"]["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: [", "is not YAML"),
        ("- 1", "holds no tables of settings: write `run:`"),
        ("training: &a {steps: 1}\ndata: *a", "an alias in line 2: write the value out"),
        ("training:\n  steps: 1\n  steps: 2", "'steps' is there twice, the second time in line 3"),
        ("training:\n  1: 2", "the name 1 in line 2 is no text"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("training:\n  steps: !!bool x", "a tag in line 2: write the plain value"),
        ("training: {steps: 99999999999999999999}", "has an integer of more than 64 bits"),
        ("training: 3", "training is a table: write training: and its settings below"),
        ("training:\n  stepz: 3", r"unknown setting .stepz. of \[training\] in .*a.yaml: did you mean 'steps'"),
        ("training:\n  steps: yes", "steps='yes' is of a wrong type"),
        ("trainin:\n  steps: 3", "unknown table 'trainin' of .*a.yaml"),
        ("[" * 5000, "is not YAML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises((ConfigError, UsageError), match=message) as caught:
        read_run_file(tmp_path / "a.yaml")
    assert "\n" not in str(caught.value) and "a.yaml" in str(caught.value)


def test_names_without_a_value_have_their_default(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\ntraining:\n  steps:\n  seed: 3\n")
    assert read_run_file(tmp_path / "a.yaml") == {"seed": 3}
    (tmp_path / "empty.yaml").write_text("")
    assert read_run_file(tmp_path / "empty.yaml") == {}


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("training:\n  steps: 3\n")
    with pytest.raises(
        MissingPackage, match=r"a.yaml: YAML needs pyyaml: pip install 'te-models\[train\]'"
    ):
        read_yaml(tmp_path / "a.yaml")
