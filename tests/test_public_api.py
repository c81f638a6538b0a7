"""The public names of te_models, and its answer to a misspelled keyword."""

import ast
import inspect
import re
import typing
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import te_models
from te_models import CausalLM, ModelConfig, TrainConfig, plan
from te_models.config.data import DataConfig
from te_models.errors import UsageError
from te_models.generation.options import GenerationOptions, GenerationSettings

ROOT = Path(__file__).parent.parent
PROMISED = {
    "CausalLM",
    "Trainer",
    "TrainConfig",
    "ModelConfig",
    "load_tokenizer",
    "add_lora",
    "get_recipe",
}
PROMISED |= {"list_recipes", "list_presets", "get_preset", "plan", "open_data", "stream_text"}
SHAPE = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
)


def test_dir_has_the_public_names_only() -> None:
    assert set(te_models.__all__) >= PROMISED
    assert set(dir(te_models)) == {*te_models.__all__, "__version__"}
    tree = ast.parse(Path(te_models.__file__).read_text())
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    for name in te_models.__all__:
        assert name in imported, f"type checkers do not see {name}"
        assert getattr(te_models, name).__name__ == name


def test_examples_and_guides_need_no_other_module() -> None:
    programs = {path: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs/guide").glob("*.md")]:
        programs[page] = "\n".join(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        )
    assert sum("from te_models import" in text for text in programs.values()) > 5
    for path, text in programs.items():
        assert not re.search(r"^from te_models\.", text, re.MULTILINE), path


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ModelConfig(**SHAPE, num_layers=3), "did you mean 'num_hidden_layers'"),
        (
            lambda: CausalLM.from_preset("gated-nano", num_layers=3),  # type: ignore[unexpected-keyword]
            "did you mean 'num_hidden_layers'",
        ),
        (lambda: plan("gated-nano", engin="native"), "did you mean 'engine'"),  # type: ignore[unexpected-keyword]
        (lambda: tiny().generate([1], max_tokens=3), "did you mean 'max_new_tokens'"),  # type: ignore[unexpected-keyword]
        (lambda: tiny().generate([1], topk=3), "did you mean 'top_k'"),  # type: ignore[unexpected-keyword]
        (lambda: next(tiny().stream([1], temprature=3)), "did you mean 'temperature'"),  # type: ignore[unexpected-keyword]
    ],
)
def test_a_misspelled_keyword_names_the_nearest(
    call: typing.Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


TOKENS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tiny().generate("a text"), "encode_prompt"),
        (lambda: tiny().generate(["a text"]), "encode_prompt"),
        (lambda: tiny().generate(None), "encode_prompt"),
        (lambda: tiny().generate([1], temperature=0.7), "do_sample=True"),
        (lambda: tiny().generate([1], top_k=5), "do_sample=True"),
        (lambda: tiny().generate([1], temperature="0.7", do_sample=True), "give a number"),
        (lambda: tiny().generate([1], top_k=2.5, do_sample=True), "give a whole number"),
        (
            lambda: TrainConfig(learning_rate="1e-3"),
            "learning_rate='1e-3' is of a wrong type: give a number",
        ),
        (lambda: TrainConfig(cuda_graph="yes"), "give true or false"),
        (lambda: DataConfig(eval_split="0.1"), "give a number"),
        (lambda: DataConfig(num_workers=1.5), "give a whole number"),
        (lambda: tiny()(TOKENS, document_ids=torch.ones(1, 3)), "document_ids is of torch.float32"),
    ],
)
def test_a_value_of_a_wrong_type_gets_one_line(
    call: typing.Callable[[], object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_an_unknown_option_of_generation_lists_each_known_one_once() -> None:
    with pytest.raises(UsageError, match="choose one of") as raised:
        tiny().generate([1], qqqq=3)  # type: ignore[unexpected-keyword]
    names = str(raised.value).partition("choose one of ")[2].split(", ")
    assert len(names) == len(set(names))


def test_prompts_may_be_of_any_whole_numbers() -> None:
    model = tiny()
    wanted = model.generate([[1, 2, 3]], max_new_tokens=2)
    for prompts in ([1, 2, 3], [np.array([1, 2, 3])], [TOKENS[0]], TOKENS, ((1, 2, 3),)):
        assert torch.equal(model.generate(prompts, max_new_tokens=2), wanted)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=2, temperature=1.0, top_p=1), wanted)


def test_a_layer_that_only_transformer_engine_has_is_refused_in_a_line() -> None:
    with pytest.raises(
        AttributeError, match=r"no te\.LayerNormMLP: both engines have .* and te\.RMSNorm"
    ):
        tiny().te.LayerNormMLP  # noqa: B018


def test_options_are_the_fields_of_settings() -> None:
    own = {field.name: field.type for field in fields(GenerationSettings)}
    assert {
        name: str(kind.__forward_arg__) for name, kind in GenerationOptions.__annotations__.items()
    } == own


def test_plan_allocates_nothing() -> None:
    found = plan("gated-8b", recipe="delayed", engine="emulated")
    assert (
        found.rows
        == CausalLM.from_preset("gated-8b", recipe="delayed", engine="emulated", device="meta")
        .plan()
        .rows
    )
    assert plan(ModelConfig(**SHAPE), num_hidden_layers=4, engine="emulated").rows[-2].layer == "3"


def tiny() -> CausalLM:
    return CausalLM(ModelConfig(**SHAPE), device="cpu", engine="emulated")


@pytest.mark.parametrize(
    "settings", [ModelConfig, TrainConfig, DataConfig], ids=lambda c: c.__name__
)
def test_help_explains_every_field(settings: type) -> None:
    text = " ".join((inspect.getdoc(settings) or "").split("Attributes:")[1].split())
    for field in fields(settings):
        assert f"{field.name}: {' '.join(field.metadata['help'].split())}" in text
