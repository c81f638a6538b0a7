"""Folders whose tensors have other names than their family's, or a head beside a tied embedding."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import close, document_of, load, make_theirs, read_by_transformers, tensors_of
from safetensors.torch import save_file
from torch import Tensor

from te_models.errors import CheckpointError
from te_models.files.formats import render_json
from te_models.saving.pretrained import read_shape

TIED = ("llama3-tied", "qwen2", "gemma3_text-tied")
IDS = torch.randint(11, 120, (2, 19), generator=torch.Generator().manual_seed(0))


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """Replace the tensors of a folder, and keys of its config.json."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = {**document_of(folder), **changes}
    (folder / "config.json").write_bytes(render_json(document, "config.json"))


@pytest.mark.parametrize("case", [*TIED, "qwen3", "mistral"])
@torch.no_grad()
def test_a_model_saved_without_its_head_is_read(case: str, tmp_path: Path) -> None:
    make_theirs(case, tmp_path / "whole")
    judge = read_by_transformers(tmp_path / "whole")
    judge.model.save_pretrained(tmp_path / "bare")
    tensors = tensors_of(tmp_path / "bare")
    assert not any(name.startswith("model.") for name in tensors)
    if not judge.config.tie_word_embeddings:
        with pytest.raises(CheckpointError, match="is a model without a head"):
            load(tmp_path / "bare")
        write(tmp_path / "bare", tensors | {"lm_head.weight": judge.lm_head.weight})
    model = load(tmp_path / "bare")
    close(model(IDS).logits, judge(IDS).logits)
    model.save_pretrained(tmp_path / "back", format="hf")
    assert torch.equal(read_by_transformers(tmp_path / "back")(IDS).logits, judge(IDS).logits)


@pytest.mark.parametrize("case", TIED)
@torch.no_grad()
def test_a_tied_model_may_be_stored_under_the_name_of_its_head(case: str, tmp_path: Path) -> None:
    make_theirs(case, tmp_path)
    judge = read_by_transformers(tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write(tmp_path, tensors)
    assert torch.equal(read_by_transformers(tmp_path)(IDS).logits, judge(IDS).logits)
    model = load(tmp_path)
    assert model.config.tie_word_embeddings
    close(model(IDS).logits, judge(IDS).logits)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("case", TIED)
@torch.no_grad()
def test_a_head_with_other_values_than_the_embedding_is_kept(
    case: str, same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_theirs(case, tmp_path / "theirs")
    tensors = tensors_of(tmp_path / "theirs")
    head = tensors["model.embed_tokens.weight"].clone()
    if not same:
        head[-1, -1] += 4
    write(tmp_path / "theirs", tensors | {"lm_head.weight": head})
    judge = read_by_transformers(tmp_path / "theirs")
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "theirs")
    assert ("lm_head.weight has other values: it is kept" in caplog.text) is not same
    assert model.config.tie_word_embeddings is same
    assert read_shape(tmp_path / "theirs").config == model.config
    close(model(IDS).logits, judge(IDS).logits)
    model.save_pretrained(tmp_path / "back", format="hf")
    assert document_of(tmp_path / "back")["tie_word_embeddings"] is same
    assert torch.equal(read_by_transformers(tmp_path / "back")(IDS).logits, judge(IDS).logits)
    model.save_pretrained(tmp_path / "own")
    again = load(tmp_path / "own")
    again.save_pretrained(tmp_path / "again", format="hf")
    assert document_of(tmp_path / "again") == document_of(tmp_path / "back")
