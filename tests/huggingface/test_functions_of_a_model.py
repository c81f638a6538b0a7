"""Functions of te-models that take a model, given a TEModelsForCausalLM: they do what they do with its CausalLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from torch import Tensor, nn

from te_models import (
    CausalLM,
    GraphedStep,
    ModelConfig,
    TEModelsForCausalLM,
    add_lora,
    load_te_checkpoint,
    load_tokenizer,
    parity,
    stream_text,
)
from te_models.data.documents import Document
from te_models.errors import UsageError
from te_models.files.tensors import read_safetensors
from te_models.generation.completions import Completions
from te_models.generation.generate import generate, stream
from te_models.inspect.evaluate import calibrate, make_batches, measure_loss, needs_scales
from te_models.inspect.verify import verify
from te_models.interop.origin import Origin
from te_models.interop.te_checkpoint import TECheckpoint
from te_models.model.decoder_of import decoder_of
from te_models.saving.pretrained import write_pretrained
from te_models.serving.export import default_format, export
from te_models.serving.parity import compare, read_batches
from te_models.training.evaluation import evaluate

IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(5))
BATCHES = [{"input_ids": IDS, "labels": IDS}]
WORDS = load_tokenizer(None)
DOCUMENTS = [Document("a few words " * 20)]


def build(seed: int = 0) -> CausalLM:
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return CausalLM(config, recipe="current", device="cpu").eval()


def exported(model: nn.Module, folder: Path, base: nn.Module | None = None) -> dict[str, Tensor]:
    export(model, Origin(), folder / "export", "fp8-block", base=base)
    return read_safetensors(folder / "export" / "model.safetensors")


def loaded(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    weights = {name: parameter.detach() for name, parameter in build(seed=1).named_parameters()}
    load_te_checkpoint(model, TECheckpoint(weights=weights, fp8_state={}))
    return {"logits": generate(model, IDS, 4, do_sample=False)}


def calibrated(model: nn.Module, folder: Path) -> str:
    decoder_of(model).set_recipe("delayed")
    assert needs_scales(model)
    note = calibrate(model, BATCHES)
    assert not needs_scales(model)
    return note


def written(model: Any, folder: Path) -> dict[str, Tensor]:
    write_pretrained(model, Origin(), folder / "written")
    return read_safetensors(folder / "written" / "model.safetensors")


def measured(model: Any, folder: Path) -> float:
    return measure_loss(model, BATCHES, text_bytes=64).loss


def evaluated(model: Any, folder: Path) -> float:
    return evaluate(model, BATCHES)


def verified(model: nn.Module, folder: Path) -> str:
    return str(verify(model, 1, 32))


def read(model: nn.Module, folder: Path) -> list[Any]:
    folder.mkdir()
    (folder / "text.txt").write_text("a few words " * 20)
    batches = read_batches(model, str(folder / "text.txt"), tokenizer=None, count=2, seq_len=32)
    return [batch["input_ids"].tolist() for batch in batches]


def refused(model: nn.Module, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        GraphedStep(model)
    return str(caught.value)


# What each makes of a model, and of a folder to write into.
FUNCTIONS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "stream_text": lambda model, folder: list(stream_text(model, WORDS, "ab", 6, do_sample=False)),
    "generate": lambda model, folder: generate(model, IDS, 4, do_sample=False).tolist(),
    "stream": lambda model, folder: [
        new.tolist() for new in stream(model, IDS, 4, do_sample=False)
    ],
    "Completions": lambda model, folder: Completions(model, WORDS, "mine").about()["max_model_len"],
    "parity": lambda model, folder: parity(model, Origin(), ["fp8-block"], BATCHES).to_dict(),
    "parity with a base": lambda model, folder: parity(
        build(seed=1), Origin(), ["fp8-block"], BATCHES, base=model
    ).to_dict(),
    "compare": lambda model, folder: compare(model, build(seed=1), BATCHES),
    "compare the other": lambda model, folder: compare(build(seed=1), model, BATCHES),
    "read_batches": read,
    "default_format": lambda model, folder: default_format(model, Origin()),
    "export": exported,
    "load_te_checkpoint": loaded,
    "write_pretrained": written,
    "make_batches": lambda model, folder: [
        batch["input_ids"].tolist() for batch in make_batches(DOCUMENTS, WORDS, model)[0]
    ],
    "calibrate": calibrated,
    "evaluate": evaluated,
    "measure_loss": measured,
    "verify": verified,
    # There is no GPU: of either the line is about the device.
    "GraphedStep": refused,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_wrapped_model_gives_the_result_of_its_causal_lm(function: str, tmp_path: Path) -> None:
    run = FUNCTIONS[function]
    expected = run(build(), tmp_path / "expected")
    result = run(TEModelsForCausalLM.wrap(build()).eval(), tmp_path / "result")
    if isinstance(expected, dict) and isinstance(next(iter(expected.values())), Tensor):
        assert_same_tensors(result, expected)
    else:
        assert result == expected


@pytest.mark.parametrize("function", ["export", "write_pretrained", "load_te_checkpoint", "parity"])
def test_a_model_compiled_as_a_whole_is_refused_where_weights_have_names(
    function: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="compiled by torch.compile: give the model itself"):
        FUNCTIONS[function](torch.compile(build()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_not_loaded_into_a_model_with_adapters(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model has LoRA adapters.*before add_lora"):
        loaded(add_lora(build(), r=2), tmp_path)


def test_a_model_with_adapters_is_taken_and_another_is_refused_in_one_line() -> None:
    expected = list(stream_text(build(), WORDS, "ab", 6, do_sample=False))
    assert list(stream_text(add_lora(build(), r=2), WORDS, "ab", 6, do_sample=False)) == expected
    wrapped = add_lora(TEModelsForCausalLM.wrap(build()), r=2)
    message = "is a {}: give a CausalLM, or a TEModelsForCausalLM"
    with pytest.raises(UsageError, match=message.format("PeftModelForCausalLM")):
        list(stream_text(wrapped, WORDS, "ab", 6))
    other = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=message.format("Linear")):
        parity(other, Origin(), [], BATCHES)
    with pytest.raises(UsageError, match=message.format("Linear")):
        read_batches(other, "text.txt", tokenizer=None, count=1, seq_len=32)
    with pytest.raises(UsageError, match=message.format("Linear")):
        default_format(other, Origin())
    anything: Any = other
    with pytest.raises(UsageError, match="not a ModelConfig: give a CausalLM"):
        TEModelsForCausalLM.wrap(anything)
