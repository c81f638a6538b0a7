"""The public names of te_models, and its answer to a misspelled keyword."""

import ast
import inspect
import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import te_models
from te_models import CausalLM, ModelConfig, TrainConfig, plan
from te_models.config.data import DataConfig
from te_models.generation.options import GenerationOptions, Settings

ROOT = Path(__file__).parent.parent
PROMISED = {"CausalLM", "Trainer", "TrainConfig", "ModelConfig", "load_tokenizer", "add_lora", "get_recipe"}
PROMISED |= {"list_recipes", "list_presets", "get_preset", "plan", "open_data", "stream_text"}
SHAPE = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)


def test_dir_has_the_public_names_only() -> None:
    assert set(te_models.__all__) >= PROMISED
    assert set(dir(te_models)) == {*te_models.__all__, "__version__"}
    tree = ast.parse(Path(te_models.__file__).read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    for name in te_models.__all__:
        assert name in imported, f"type checkers do not see {name}"
        assert getattr(te_models, name).__name__ == name


def test_examples_and_guides_need_no_other_module() -> None:
    programs = {path: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs/guide").glob("*.md")]:
        programs[page] = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    assert sum("from te_models import" in text for text in programs.values()) > 5
    for path, text in programs.items():
        assert not re.search(r"^from te_models\.", text, re.MULTILINE), path


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: TrainConfig(lr=1.0), "did you mean 'learning_rate'"),
        (lambda: TrainConfig(batchsize=1), "did you mean 'batch_size'"),
        (lambda: ModelConfig(**SHAPE, num_layers=3), "did you mean 'num_hidden_layers'"),
        (lambda: CausalLM.from_preset("gated-nano", num_layers=3), "did you mean 'num_hidden_layers'"),
        (lambda: plan("gated-nano", engin="native"), "did you mean 'engine'"),
        (lambda: tiny().generate([1], max_tokens=3), "did you mean 'max_new_tokens'"),
        (lambda: tiny().generate([1], topk=3), "did you mean 'top_k'"),
        (lambda: next(tiny().stream([1], temprature=3)), "did you mean 'temperature'"),
    ],
)
def test_a_misspelled_keyword_names_the_nearest(call: typing.Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_options_are_the_fields_of_settings() -> None:
    own = {field.name: field.type for field in fields(Settings)}
    assert {name: str(kind.__forward_arg__) for name, kind in GenerationOptions.__annotations__.items()} == own


def test_plan_allocates_nothing() -> None:
    found = plan("gated-8b", recipe="delayed", engine="emulated")
    assert (
        found.rows == CausalLM.from_preset("gated-8b", recipe="delayed", engine="emulated", device="meta").plan().rows
    )
    assert plan(ModelConfig(**SHAPE), num_hidden_layers=4, engine="emulated").rows[-2].layer == "3"


def tiny() -> CausalLM:
    return CausalLM(ModelConfig(**SHAPE), device="cpu", engine="emulated")


@pytest.mark.parametrize("settings", [ModelConfig, TrainConfig, DataConfig], ids=lambda c: c.__name__)
def test_help_explains_every_field(settings: type) -> None:
    text = " ".join((inspect.getdoc(settings) or "").split("Attributes:")[1].split())
    for field in fields(settings):
        assert f"{field.name}: {' '.join(field.metadata['help'].split())}" in text
