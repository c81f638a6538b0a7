"""The hub: what is downloaded, and transformers' keywords in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import CausalLM
from te_models.errors import UsageError
from te_models.interop.hub import local_folder, split_options

hub = pytest.importorskip("huggingface_hub")

REPOSITORY = [
    "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tekken.json", "vocab.txt", "qwen.tiktoken", "spiece.model", "chat_template.jinja",
    "additional_chat_templates/rag.jinja", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
    "original/consolidated.00.pth", "original/params.json", "original/tokenizer.model", "onnx/model.onnx", "README.md",
    "pytorch_model.bin",
]  # fmt: skip
UNWANTED = 8  # the last ones


def test_only_what_a_model_needs_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: asked.update(options) or str(tmp_path))
    wanted: dict[str, Any] = dict(revision="v2", token="secret", cache_dir="here", local_files_only=True)
    assert local_folder("owner/model", **wanted) == tmp_path
    patterns = {name: asked.pop(name) for name in ("allow_patterns", "ignore_patterns")}
    assert asked == wanted
    assert list(hub.utils.filter_repo_objects(REPOSITORY, **patterns)) == REPOSITORY[:-UNWANTED]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (dict(torch_dtype="bfloat16"), dict(dtype=torch.bfloat16)),
        (dict(dtype="torch.float32"), dict(dtype=torch.float32)),
        (dict(dtype=torch.float16), dict(dtype=torch.float16)),
        (dict(dtype="auto"), {}),
        (dict(device_map="cpu"), dict(device=torch.device("cpu"))),
        (dict(device_map={"": "cuda:1"}), dict(device=torch.device("cuda:1"))),
        (dict(device_map={"": 0}), dict(device="cuda:0")),
        (dict(device_map=1), dict(device="cuda:1")),
        (dict(device_map="auto"), dict(device=None)),
        (dict(attn_implementation="sdpa", trust_remote_code=True, low_cpu_mem_usage=True, use_safetensors=True), {}),
        (dict(quantization_config=None, load_in_8bit=False, recipe="current"), dict(recipe="current")),
    ],
)
def test_keywords_of_transformers_are_taken(given: dict, ours: dict) -> None:
    assert split_options(given) == ({}, ours)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(attn_implementation="flash_attention_2"), "scaled_dot_product_attention"),
        (dict(device_map="balanced"), "tp_mesh="),
        (dict(device_map={"a": 0, "b": 1}), "device_map names 2 devices"),
        (dict(device_map="nowhere"), "no device"),
        (dict(device_map="cpu", device="cpu"), "either device= or device_map="),
        (dict(load_in_4bit=True), "recipe='current'"),
        (dict(quantization_config={"load_in_8bit": True}), "own recipes"),
        (dict(torch_dtype="float64"), "dtype='float64' is not supported"),
        (dict(revisoin="main"), "unknown keyword 'revisoin': did you mean 'revision'"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_our_word_for_it(given: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        CausalLM.from_pretrained(tmp_path, **given)
    assert "\n" not in str(caught.value) and "field of recipe" not in str(caught.value)


def test_a_folder_is_loaded_with_keywords_of_transformers(tmp_path: Path) -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu")
    model.save_pretrained(tmp_path / "model", max_shard_size="300KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    options: Any = dict(torch_dtype="float32", device_map="cpu", revision="main", token=None, local_files_only=True)
    again = CausalLM.from_pretrained(tmp_path / "model", **options)
    assert again.dtype == torch.float32 and again.device.type == "cpu"


@pytest.mark.parametrize("size", [0, "5 GX", "GB", 1.5])
def test_a_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        CausalLM.from_preset("gated-nano", device="cpu").save_pretrained(tmp_path / "model", max_shard_size=size)


def test_files_of_the_tokenizer_come_along(tmp_path: Path) -> None:
    """Under any of the names that releases have, from a checkpoint of Hugging Face back to one."""
    CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none").save_pretrained(
        tmp_path / "first", format="hf"
    )
    names = (
        "tekken.json",
        "qwen.tiktoken",
        "spiece.model",
        "chat_template.json",
        "additional_chat_templates/rag.jinja",
    )
    for name in names:
        (tmp_path / "first" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "first" / name).write_bytes(f"content of {name}".encode())
    model = CausalLM.from_pretrained(tmp_path / "first", device="cpu")
    for _ in range(2):  # and over itself
        model.save_pretrained(tmp_path / "second", format="hf")
    for name in names:
        assert (tmp_path / "second" / name).read_text() == f"content of {name}"
