"""Exports of a model that Transformer Engine has trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from places import EMULATED, PLACE
from safetensors.torch import load_file

from te_models import CausalLM
from te_models.serving.formats import FORMATS
from te_models.serving.parity import parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*needs its own code in transformers"),
]
SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=256, intermediate_size=384, num_hidden_layers=3
)
SIZES |= dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128
)


@pytest.fixture(scope="module")
def trained() -> CausalLM:
    """A model after two steps of delayed scaling."""
    torch.manual_seed(1)
    model = CausalLM.from_preset("gated-nano", recipe="delayed", **SIZES, **PLACE)
    for row in range(2):
        ids = (torch.arange(4 * 128).reshape(4, 128) * (row + 3) % 89).to(model.device)
        model.train()(ids, labels=ids).loss.backward()  # type: ignore[union-attr]
    return model.eval()


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_is_that_of_the_emulated_engine(
    format: str, trained: CausalLM, tmp_path: Path
) -> None:
    trained.save_pretrained(tmp_path / "model")
    emulated = CausalLM.from_pretrained(tmp_path / "model", device="cpu", engine="emulated")
    found = [
        model.export(tmp_path / name, format=format)
        for model, name in ((trained, "one"), (emulated, "other"))
    ]
    assert found[0].quantized == found[1].quantized and bool(found[0].quantized) == (
        format != "bf16"
    )
    assert_same_tensors(
        *(load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    )
    assert (tmp_path / "one/config.json").read_text() == (
        tmp_path / "other/config.json"
    ).read_text()


def test_parity_on_a_gpu_is_that_of_the_emulated_engine(trained: CausalLM, tmp_path: Path) -> None:
    """Losses and divergences of a native model, within the rounding of BF16 of those of an emulated one."""
    trained.save_pretrained(tmp_path / "model")
    emulated = CausalLM.from_pretrained(tmp_path / "model", **EMULATED)
    ids = (torch.arange(4 * 64).reshape(4, 64) % 89).to(trained.device)
    rows = [
        parity(model, model.origin, [], [dict(input_ids=ids, labels=ids)]).rows
        for model in (trained, emulated)
    ]
    for one, other in zip(*rows, strict=True):
        assert one.export == other.export and not one.reason
        assert one.trained_loss == pytest.approx(other.trained_loss, rel=0.01)
        assert one.served_loss == pytest.approx(other.served_loss, rel=0.01)
        assert one.kl == pytest.approx(other.kl, rel=0.25, abs=1e-4)
