"""Models that ship in the package are found by name, without network; a preset without weights says so."""

from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_model

from te_models import CausalLM, load_tokenizer
from te_models.config import shipped
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import UsageError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped models with a small gated-nano."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "pretrained")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained(tmp_path / "pretrained/gated-nano")
    return tmp_path


def test_a_shipped_model_is_found_by_its_name(package: Path) -> None:
    assert shipped.list_shipped() == ["gated-nano"]
    saved = CausalLM.from_pretrained(package / "pretrained/gated-nano", device="cpu")
    model = CausalLM.from_pretrained("gated-nano", device="cpu")
    assert torch.equal(model.embed_tokens.weight, saved.embed_tokens.weight)
    assert isinstance(load_tokenizer("gated-nano"), ByteTokenizer)


def test_a_folder_here_comes_before_a_shipped_model(package: Path) -> None:
    other = CausalLM.from_pretrained("gated-nano", device="cpu")
    with torch.no_grad():
        other.embed_tokens.weight.zero_()
    other.save_pretrained("gated-nano")
    assert not CausalLM.from_pretrained("gated-nano", device="cpu").embed_tokens.weight.any()


def test_a_preset_without_weights_is_refused_with_the_line_that_explains_it(package: Path) -> None:
    with pytest.raises(
        UsageError,
        match="te-models pretrain --preset qwen3-0.6b.*ships with te-models .gated-nano.$",
    ):
        CausalLM.from_pretrained("qwen3-0.6b")
