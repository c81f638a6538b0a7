"""Muse-like decoders: a separate projection for an elementwise gate, windows three to one, no RoPE where there is none.

transformers has the text model of Muse-Glimmer, without a head for text alone. It norms embeddings, queries and keys
without weights, which ours does not: a table normed beforehand and norms with weights of one are the same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import AutoModelForCausalLM, transformers
from safetensors.torch import save_file
from torch import Tensor

from te_models import CausalLM, ModelConfig, get_preset
from te_models.interop.hf_families import FAMILIES

SIZES: dict[str, Any] = dict(
    vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=40, rms_norm_eps=1e-6, sliding_window=6,
    final_logit_softcapping=2.0, qk_scale_factor=1.7, output_multiplier=0.6, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
CASES: dict[str, dict[str, Any]] = {
    "one key": dict(num_key_value_heads=1),
    "all keys": dict(num_key_value_heads=4),
    "wide heads": dict(num_attention_heads=2, head_dim=20),
    "odd sizes": dict(hidden_size=30, num_attention_heads=3, num_key_value_heads=3, head_dim=6, intermediate_size=17),
    "four layers": dict(num_hidden_layers=4),
    "one layer": dict(num_hidden_layers=1),
    "short window": dict(sliding_window=1),
    "full first": dict(layer_types=[FULL, SLIDING, SLIDING, SLIDING, FULL], layer_rope_theta=[0, 9.0, 9.0, 9.0, 0]),
    "rope on full": dict(layer_types=[FULL, SLIDING, FULL, SLIDING, FULL], layer_rope_theta=[9.0, 0, 9.0, 0, 9.0]),
    "tight cap": dict(final_logit_softcapping=0.3, qk_scale_factor=0.5),
    "coarse eps": dict(rms_norm_eps=1e-2, hidden_activation="gelu_pytorch_tanh"),
}
NAMES = {
    "self_attn.gate_proj": "self_attn.g_proj",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def ours_of(config: Any) -> ModelConfig:
    """The shape of a Muse in our fields."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window",
            "final_logit_softcapping", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    return ModelConfig(
        **{name: getattr(config, name) for name in same},
        layer_types=tuple(config.layer_types),
        no_rope_layers=tuple(int(bool(theta)) for theta in config.layer_rope_theta),
        rope_theta=config.rope_parameters["rope_theta"],
        hidden_act=config.hidden_activation,
        attention_gate="elementwise",
        attention_multiplier=config.qk_scale_factor * config.head_dim**-0.5,
        qk_norm=True,
        norm_position="both",
        zero_centered_norm=True,
        logits_scaling=1 / config.output_multiplier,
    )


class Judge:
    """transformers' text model with Muse's head."""

    def __init__(self, changes: dict[str, Any]) -> None:
        fields = {**SIZES, **changes, "post_norm_eps": {**SIZES, **changes}["rms_norm_eps"]}
        fields["rope_parameters"] = dict(rope_type="default", rope_theta=9.0)
        self.config = transformers.AutoConfig.for_model("muse_glimmer_text", **fields)
        self.body = transformers.AutoModel.from_config(self.config, attn_implementation="eager").eval()
        for parameter in self.body.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + float(parameter.ndim == 1 and parameter.mean() == 1))
        self.head = torch.randn(self.config.vocab_size, self.config.hidden_size) * 0.3

    def __call__(self, ids: Tensor) -> Tensor:
        logits = self.body(ids).last_hidden_state @ self.head.T * self.config.output_multiplier
        return torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping

    def save(self, folder: Path) -> None:
        """Write it as ours: tensors renamed, the table normed, and gamma - 1 for the gamma of the last norm."""
        folder.mkdir()
        tensors = {"lm_head.weight": self.head}
        for name, tensor in self.body.state_dict().items():
            for theirs, own in NAMES.items():
                if f".{theirs}." in name:
                    name = name.replace(theirs, own)
                    break
            tensors[f"model.{name}"] = tensor.clone() - int(name == "norm.weight")
        tensors["model.embed_tokens.weight"] = self.body.embed_tokens(torch.arange(self.config.vocab_size))
        for layer in range(self.config.num_hidden_layers):
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.zeros(self.config.head_dim)
        save_file(tensors, folder / "model.safetensors")
        (family,) = (family for family in FAMILIES if family.code)
        (folder / "config.json").write_text(json.dumps(family.write(ours_of(self.config)) | {"dtype": "float32"}))


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Judge, CausalLM]]:
    """A Muse with random weights, and ours."""
    with torch.no_grad():
        torch.manual_seed(len(request.param))
        judge = Judge(CASES[request.param])
        judge.save(tmp_path / "model")
        yield judge, CausalLM.from_pretrained(tmp_path / "model", device="cpu", engine="emulated").eval()


def close(ours: Tensor, reference: Tensor) -> None:
    """Differences are of the order of the largest number, however the sums of all layers before it are ordered."""
    assert reference.std() > 0.02, "a comparison of equal numbers would prove nothing"
    torch.testing.assert_close(ours, reference, atol=1e-4 * reference.abs().max().item(), rtol=0)


@pytest.mark.filterwarnings("ignore:.*needs its own code in transformers")
def test_logits_are_those_of_muse(pair: tuple[Judge, CausalLM], tmp_path: Path) -> None:
    judge, model = pair
    ids = torch.randint(1, SIZES["vocab_size"], (2, 23))
    wanted = judge(ids)
    close(model(ids).logits, wanted)
    cache = model.new_cache(2, 23)
    parts = [model(part, cache=cache).logits for part in (ids[:, :9], *ids[:, 9:].split(1, dim=1))]
    close(torch.cat(parts, 1), wanted)
    model.save_pretrained(tmp_path / "back", format="hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", trust_remote_code=True).eval()
    close(theirs(ids).logits, wanted)


def test_the_preset_has_the_published_sizes() -> None:
    published = transformers.AutoConfig.for_model("muse_glimmer_text", rope_parameters=dict(rope_theta=500000.0))
    preset = get_preset("muse-like-30b")
    assert preset == ours_of(published)
    with torch.device("meta"):
        body = transformers.AutoModel.from_config(published)
    theirs = sum(p.numel() for p in body.parameters()) + published.vocab_size * published.hidden_size
    assert preset.num_parameters == theirs + 2 * published.head_dim * published.num_hidden_layers  # norms of q and k
