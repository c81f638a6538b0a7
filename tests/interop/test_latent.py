"""Latent attention in folders of Hugging Face: published configs, the layers after the last, and what is refused."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from families import LATENT_SIZES
from hf_models import close, document_of, load, make_theirs, save_hf, tensors_of
from safetensors.torch import save_file
from torch import Tensor

from te_models import CausalLM, ModelConfig
from te_models.errors import ConfigError
from te_models.interop.hf_families import FAMILIES, family_of
from te_models.planning.flops import forward_flops

# config.json of DeepSeek-V3 as published.
DEEPSEEK: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, bos_token_id=0, eos_token_id=1, ep_size=1,
    first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, initializer_range=0.02, intermediate_size=18432,
    kv_lora_rank=512, max_position_embeddings=163840, model_type="deepseek_v3", moe_intermediate_size=2048,
    moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
    num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, type="yarn",
                      original_max_position_embeddings=4096),
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
    topk_method="noaux_tc", torch_dtype="bfloat16", transformers_version="4.33.1", use_cache=True, v_head_dim=128,
    vocab_size=129280,
)  # fmt: skip


def test_the_published_config_is_the_published_model() -> None:
    config = family_of(DEEPSEEK).read(DEEPSEEK)
    assert (
        round(config.num_parameters / 1e9) == 671
        and round(config.num_active_parameters / 1e9, 1) == 37.6
    )
    assert family_of(DEEPSEEK).read(family_of(DEEPSEEK).write(config)) == config
    kimi = {
        **DEEPSEEK,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
    }
    kimi |= dict(
        n_routed_experts=384, n_group=1, topk_group=1, first_k_dense_replace=1, vocab_size=163840
    )
    assert round(family_of(kimi).read(kimi).num_parameters / 1e12, 2) == 1.03
    assert "kimi_k2" in {family.model_type for family in FAMILIES if not family.written}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(scoring_func="softmax"), "scoring_func='softmax' is not supported"),
        (dict(topk_method="greedy"), "topk_method='greedy' is not supported"),
        (dict(num_key_value_heads=64), "give num_key_value_heads=128"),
        (dict(q_lora_rank=None, attention_bias=True), "without q_lora_rank has no attention_bias"),
        (dict(kv_lora_rank=0), "latent_attention.kv_lora_rank=0 is out of range"),
        # transformers sharpens attention by it under any scaling.
        (
            dict(rope_scaling=dict(rope_type="dynamic", factor=2.0, mscale_all_dim=1.0)),
            "type 'dynamic' with mscale_all_dim=1.0 is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        family_of(DEEPSEEK).read({**DEEPSEEK, **changes})


@pytest.mark.parametrize(
    "name, value", [("attention_gate", "elementwise"), ("qk_norm", True), ("sliding_window", 4)]
)
def test_fields_of_other_attention_are_refused(name: str, value: object) -> None:
    shape: dict[str, Any] = dict(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1
    )
    shape |= dict(num_attention_heads=1, attention_gate="none", latent_attention={})
    assert ModelConfig(**shape).head_dim == 64
    with pytest.raises(ConfigError, match=f"latent_attention computes no {name}={value!r}"):
        ModelConfig(**{**shape, name: value})


def folder_with_later_layer(case: str, folder: Path, fp8: bool) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model, and its folder with a layer after the last; its tensors, in BF16 in place of FP8."""
    judge = make_theirs(case, folder)
    tensors = tensors_of(folder)
    later = {
        name.replace("layers.2.", "layers.3."): t + 1
        for name, t in tensors.items()
        if "layers.2." in name
    }
    later["model.layers.3.eh_proj.weight"] = torch.randn(48, 96)
    stored, config = dict(later), document_of(folder)
    config["num_nextn_predict_layers"] = 1
    if fp8:
        name = "model.layers.3.eh_proj.weight"
        config["quantization_config"] = dict(
            quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]
        )
        stored[name] = (torch.randn(48, 96) * 8).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.tensor([[0.25]])
        later[name] = (stored[name].float() / 4).bfloat16()
    save_file(tensors | stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return judge, tensors | later


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("case", ["deepseek_v3-groups", "glm4_moe-groups"])
@torch.no_grad()
def test_layers_that_predict_later_tokens_are_written_back(
    case: str, fp8: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge, expected = folder_with_later_layer(case, tmp_path / "theirs", fp8)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "theirs")
    assert "tensors of other parts (model.layers.3.*) are not" in caplog.text
    ids = torch.randint(1, 131, (2, 17))
    close(model(ids).logits, judge(ids).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "back", format="hf")
    found = tensors_of(tmp_path / "back")
    assert_same_tensors(found, expected)
    assert load(tmp_path / "back").config == model.config
    model.save_pretrained(tmp_path / "own")
    own = load(tmp_path / "own")
    with pytest.warns(UserWarning, match=r"the text model alone, without the model.layers.3.\* "):
        own.save_pretrained(tmp_path / "alone", format="hf")
    assert not any(".layers.3." in name for name in tensors_of(tmp_path / "alone"))
    assert load(tmp_path / "alone").config == model.config
    own.save_pretrained(tmp_path / "whole", format="hf", beside=tmp_path / "theirs")
    assert tensors_of(tmp_path / "whole").keys() == expected.keys()


def test_a_layer_too_many_is_still_refused(tmp_path: Path) -> None:
    folder_with_later_layer("deepseek_v3-plain", tmp_path, fp8=False)
    config = document_of(tmp_path) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unexpected: model.layers.3"):
        load(tmp_path)


def test_rows_of_the_first_projection_suit_every_recipe() -> None:
    """32 + 32 + 16 are no multiple of the 32 that MXFP8 needs."""
    latent = dict(
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32
    )
    shape = dict(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    config = ModelConfig(**shape, attention_gate="none", latent_attention=latent)
    assert config.num_padding_parameters == 3 * 16 * 64
    model, ids = CausalLM(config, recipe="mxfp8", device="cpu"), torch.arange(32)[None]
    model(ids, labels=ids).loss.backward()
    gradient = model.get_parameter("layers.1.self_attn.qkv_a_proj.weight").grad
    assert gradient is not None and gradient[:80].any() and not gradient[80:].any()


def test_the_cache_keeps_the_latent() -> None:
    sizes = dict(
        vocab_size=16,
        hidden_size=48,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=6,
    )
    latent = {name: LATENT_SIZES[name] for name in ("kv_lora_rank", "qk_rope_head_dim")}
    config = ModelConfig(**sizes, attention_gate="none", latent_attention=latent)
    model = CausalLM(config, device="cpu", engine="emulated", dtype=torch.float32)
    assert model.new_cache(2, 16).nbytes == 3 * 2 * 16 * (18 + 8) * 4
    (note,) = model.plan().notes
    assert (
        "keeps 26 numbers per token" in note
        and "heads of 136 channels (keys have 136, values 128)" in note
    )
    # A product of a query and a key, and of a weight and a value, for each of the keys of which it sees half.
    linears = sum(part.linear_flops(10) for part in config.layers[0].parts)
    assert forward_flops(config, 10).layers[0] - linears == 2 * 10 * 10 / 2 * 6 * (136 + 128)


@torch.no_grad()
def test_a_release_without_biases_of_the_choice_is_read(tmp_path: Path) -> None:
    """As A.X K1's, which has the norm after experts in dense layers too, where transformers does not read it."""
    judge = make_theirs("axk1-plain", tmp_path / "base")
    tensors = tensors_of(tmp_path / "base")
    kept = {name: t for name, t in tensors.items() if not name.endswith("correction_bias")}
    assert len(kept) < len(tensors)
    sparse = next(name for name in kept if name.endswith(".0.post_mlp_layernorm.weight"))
    unread = sparse.replace(".0.", ".1.")
    kept[unread] = torch.full_like(kept[sparse], 3.0)
    save_file(kept, tmp_path / "base/model.safetensors", {"format": "pt"})
    for name, buffer in judge.named_buffers():
        if name.endswith("correction_bias"):
            buffer.zero_()
    model = load(tmp_path / "base")
    ids = torch.randint(1, 131, (2, 17))
    close(model(ids).logits, judge(ids).logits)
    save_hf(model, tmp_path / "back")
    assert torch.equal(tensors_of(tmp_path / "back")[unread], kept[unread])


@torch.no_grad()
def test_keys_that_no_layer_reads_are_written_back(tmp_path: Path) -> None:
    """As Gemma 4 E2B's release has them, in layers with the keys of others."""
    judge = make_theirs("gemma4_text-small-wide", tmp_path / "base")
    tensors = tensors_of(tmp_path / "base")
    own = next(name for name in tensors if name.endswith(".0.self_attn.k_proj.weight"))
    unread = own.replace(".0.", ".3.")
    assert unread not in tensors
    tensors[unread] = torch.full_like(tensors[own], 2.0)
    save_file(tensors, tmp_path / "base/model.safetensors", {"format": "pt"})
    model = load(tmp_path / "base")
    ids = torch.randint(1, 131, (2, 17))
    close(model(ids).logits, judge(ids).logits)
    save_hf(model, tmp_path / "back")
    assert torch.equal(tensors_of(tmp_path / "back")[unread], tensors[unread])
