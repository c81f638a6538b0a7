"""Hybrids of gated attention and Gated DeltaNet inside transformers, and those in folders with images."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Pair, close, load, randomize, read_by_transformers, same_folder
from judge import transformers
from torch import Tensor

from te_models.errors import UsageError

TOLERANCE = 1e-4  # of FP32 rounding, which a recurrence adds up


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, 131, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("case", ["hybrid-0", "hybrid-7", "hybrid-14"])
def test_transformers_generates_with_our_model(case: str, theirs: Callable[..., Pair]) -> None:
    """With its own cache, whose rows beam search reorders."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    judge, folder = theirs(case)
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(folder)), tokens(3, 21)
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, :8] = mask[2, :18] = 0
    for options in (dict(), dict(num_beams=3), dict(cache_implementation="static")):
        given: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=10, do_sample=False, **options)
        assert torch.equal(wrapped.generate(ids, **given), judge.generate(ids, **given)), options


def test_a_pass_that_fills_a_cache_has_gradients(theirs: Callable[..., Pair]) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(theirs("hybrid-7")[1])), tokens(2, 70)
    found = []
    for past in (None, transformers.DynamicCache(config=wrapped.config)):
        wrapped.zero_grad()
        wrapped(ids, cache=past, use_cache=past is not None).logits.square().mean().backward()
        found.append({name: p.grad.clone() for name, p in wrapped.named_parameters()})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_packed_documents_from_any_position(theirs: Callable[..., Pair]) -> None:
    """As collators without padding give them: positions that do not follow begin a document."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(theirs("hybrid-7")[1])), tokens(1, 90)
    for first in (0, 3):
        positions = torch.cat((torch.arange(first, first + 40), torch.arange(50)))[None]
        both = wrapped(ids, position_ids=positions, use_cache=False).logits
        for part in (slice(0, 40), slice(40, 90)):
            alone = wrapped(ids[:, part], position_ids=positions[:, part], use_cache=False).logits
            close(both[:, part], alone, TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:.*were set but no parameter was matched")
@pytest.mark.filterwarnings("ignore:.*did not match any targeted module")
@pytest.mark.parametrize("case", ["hybrid-0", pytest.param("hybrid-4", marks=pytest.mark.slow), "hybrid-14"])
@torch.no_grad()
def test_adapters_compute_the_same_in_transformers(case: str, theirs: Callable[..., Pair], tmp_path: Path) -> None:
    lora, peft = pytest.importorskip("te_models.training.lora"), pytest.importorskip("peft")
    _, folder = theirs(case)
    adapted = lora.add_lora(load(folder), r=4, lora_alpha=8, target_modules="all-linear")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.05)
    lora.save_lora(adapted, tmp_path)
    judge = peft.PeftModel.from_pretrained(read_by_transformers(folder), tmp_path).eval()
    close(adapted.eval()(tokens(2, 70)).logits, judge(tokens(2, 70)).logits, TOLERANCE)


TEXT: dict[str, Any] = dict(
    vocab_size=131, hidden_size=48, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, max_position_embeddings=64, attn_output_gate=True, mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, mamba_ssm_dtype="float32", mlp_only_layers=[], full_attention_interval=4,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
    ),
)  # fmt: skip
VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=48, patch_size=4)


@pytest.fixture
def multimodal(tmp_path: Path) -> Pair:
    """transformers' multimodal model of the text model TEXT, and the folder it is saved in."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(
        text_config=TEXT, vision_config={**VISION, "num_position_embeddings": 16}, tie_word_embeddings=True,
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path / "multimodal")
    return model, tmp_path / "multimodal"


@torch.no_grad()
def test_the_text_of_a_multimodal_folder_is_read_and_the_rest_written_back(
    multimodal: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge, folder = multimodal
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert "model.visual.*, mtp.*" in caplog.text
    ids = tokens(2, 33).clamp(min=5)
    close(model(ids).logits, judge(ids).logits, TOLERANCE)
    model.save_pretrained(tmp_path / "back", format="hf")
    same_folder(folder, tmp_path / "back")
    model.save_pretrained(folder, format="hf")  # over the tensors that it reads
    same_folder(folder, tmp_path / "back")
    model.save_pretrained(tmp_path / "native")
    native = load(tmp_path / "native")
    native.save_pretrained(tmp_path / "whole", format="hf", beside=folder)
    same_folder(folder, tmp_path / "whole")
    with pytest.raises(UsageError, match="has no tensors that belong beside"):
        native.save_pretrained(tmp_path / "none", format="hf", beside=tmp_path / "native")
    with pytest.warns(UserWarning, match="the text model alone"):
        native.save_pretrained(tmp_path / "text", format="hf")
    close(read_by_transformers(tmp_path / "text")(ids).logits, judge(ids).logits, TOLERANCE)
