"""transformers' own models, small and random, and their folders: what tests of Hugging Face's format compare with."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from families import make_config
from hybrids import HYBRIDS, hybrid_config
from judge import AutoModelForCausalLM, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from te_models import CausalLM

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32, rope_theta=10000.0)
SIZES: dict[str, Any] = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=4
)
SIZES |= dict(
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5
)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
# One row per case: the family, and what differs from SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama3-tied": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32)),
    "llama-linear": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=500.0)),
    ),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "qwen3-window": (
        "qwen3",
        dict(head_dim=32, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "mistral": ("mistral", dict(sliding_window=6)),
    "mistral-full": ("mistral", dict(sliding_window=None, head_dim=32)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0, 1, 0])),
    "smollm3-interval": ("smollm3", dict(no_rope_layer_interval=3, tie_word_embeddings=False)),
    "smollm3-window": (
        "smollm3",
        dict(no_rope_layers=[1, 1, 0, 1], use_sliding_window=True, sliding_window=5),
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(head_dim=32, layer_types=["full_attention"] * 4, mlp_only_layers=[0, 1, 2, 3]),
    ),
    "qwen3_next-no-experts": (
        "qwen3_next",
        dict(head_dim=16, layer_types=["full_attention"] * 4, num_experts=0),
    ),
}
# transformers ignores partial_rotary_factor where these models have the default RoPE.
HALF = dict(
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
)
CASES |= {
    f"{kind}-half": (kind, HALF) for kind in ("llama", "qwen2", "qwen3", "mistral", "smollm3")
}
# Qwen's gated-attention release: Qwen3 with a wider q_proj.
GATED_CASES = {
    "headwise": dict(headwise_attn_output_gate=True),
    "elementwise": dict(elementwise_attn_output_gate=True),
}
GATED_CASES |= {"ungated": {}}
CASES |= {name: ("gated", dict(head_dim=16, num_attention_heads=6)) for name in GATED_CASES}
Pair = tuple[Any, Path]


def config_of(case: str) -> Any:
    """Return the transformers config of a case of CASES, of families.py or of hybrids.py."""
    if case in HYBRIDS:
        return hybrid_config(HYBRIDS[case])
    if case not in CASES:
        return make_config(case)
    kind, changes = CASES[case]
    return transformers.AutoConfig.for_model(
        "qwen3" if kind == "gated" else kind, **{**SIZES, **changes}
    )


def class_of(kind: str) -> Any:
    """Return transformers' class of decoders of a model_type: the automatic one, or where that has none its own."""
    return transformers.Mistral4ForCausalLM if kind == "mistral4" else AutoModelForCausalLM


def of_config(config: Any) -> Any:
    """Return transformers' decoder of a config, with its initial values."""
    kind = class_of(config.model_type)
    make = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
    return make(config, attn_implementation="eager").eval()


def make_theirs(case: str, folder: Path, **changes: Any) -> Any:
    """Return transformers' model of a case with every parameter random, saved in `folder`."""
    torch.manual_seed(HYBRIDS.get(case, len(case)))
    config = config_of(case)
    for name, value in changes.items():
        setattr(config, name, value)
    model = of_config(config)
    if case in GATED_CASES:
        save_gated(model, folder, **GATED_CASES[case])
    else:
        randomize(model)
        model.save_pretrained(folder)
    return model


class WideQuery(nn.Module):
    """A q_proj whose rows hold, for each group of heads that share a key, their queries and then their gates."""

    def __init__(self, hidden: int, heads: int, groups: int, head_dim: int, gates: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads * (head_dim + gates), hidden))
        self.groups, self.sizes = groups, [heads // groups * head_dim, heads // groups * gates]
        self.gate = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        q, g = (
            nn.functional.linear(x, self.weight)
            .unflatten(-1, (self.groups, -1))
            .split(self.sizes, dim=-1)
        )
        self.gate = g.flatten(-2)
        return q.flatten(-2)


class GatedOutput(nn.Module):
    """An o_proj whose input is multiplied by the sigmoid of the gates that the q_proj beside it has just made."""

    def __init__(self, inner: nn.Linear, query: WideQuery) -> None:
        super().__init__()
        self.weight, self.query = inner.weight, [query]

    def forward(self, x: Tensor) -> Tensor:
        gate = self.query[0].gate
        heads = x.shape[-1] // max(1, gate.shape[-1])
        gate = gate.repeat_interleave(heads, dim=-1) if gate.shape[-1] else torch.full_like(x, 50)
        return nn.functional.linear(x * gate.sigmoid(), self.weight)


def save_gated(model: Any, folder: Path, **flags: bool) -> None:
    """Turn transformers' Qwen3 into the gated release's and save it as that is published."""
    config = model.config
    gates = {"headwise_attn_output_gate": 1, "elementwise_attn_output_gate": config.head_dim}
    width = sum(gates[flag] for flag in flags)
    for layer in model.model.layers:
        shape = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            width,
        )
        layer.self_attn.q_proj = WideQuery(*shape)
        layer.self_attn.o_proj = GatedOutput(layer.self_attn.o_proj, layer.self_attn.q_proj)
    randomize(model)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    theirs = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("layer_types", "rope_parameters")
    }
    theirs |= {
        "model_type": "qwen2",
        "use_qk_norm": True,
        "qkv_bias": False,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }
    theirs |= {
        "auto_map": {"AutoConfig": "configuration_qwen3.Qwen3Config"},
        "architectures": ["Qwen3ForCausalLM"],
    }
    (folder / "config.json").write_text(
        json.dumps({**theirs, **dict.fromkeys(gates, False), **flags})
    )


def save_hf(model: CausalLM, folder: Path, gated: bool = False) -> None:
    """Save a model; transformers has no code for a `gated` one, which one line says."""
    message = "needs .* to load in transformers|needs its own code"
    with pytest.warns(UserWarning, match=message) if gated else nullcontext():
        model.save_pretrained(folder, format="hf")


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Values of a trained model's size, norms and biases included."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith("A_log"):
            parameter.copy_(
                noise
            )  # half of the heads forget within a few tokens, half within hundreds
        elif name.endswith("dt_bias"):
            parameter.copy_(noise * 2 - 3)
        else:
            centre = (
                0.0 if parameter.ndim > 1 or "bias" in name or parameter.abs().max() == 0 else 1.0
            )
            parameter.copy_(centre + noise * (0.3 if parameter.ndim == 1 else 0.15))
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer.normal_(0, 0.3)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.3, 1.3)


def load(folder: Path, **options: Any) -> CausalLM:
    return CausalLM.from_pretrained(
        folder, **{"device": "cpu", "engine": "emulated", **options}
    ).eval()


def prompts() -> tuple[Tensor, Tensor]:
    """ids and mask of a batch of unequal prompts, padded on the left."""
    lengths, ids = (13, 5, 9), torch.randint(1, SIZES["vocab_size"], (3, 13))
    mask = torch.stack([torch.arange(13) >= 13 - length for length in lengths]).long()
    return ids * mask, mask


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def document_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_folder(one: Path, other: Path) -> None:
    """Check that two folders have the same tensors and config.json."""
    assert_same_tensors(tensors_of(one), tensors_of(other))
    assert document_of(one) == document_of(other)


def read_by_transformers(folder: Path, **options: Any) -> Any:
    """transformers' model of a folder, in which it misses no tensor and finds none too many."""
    kind = class_of(document_of(folder)["model_type"])
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval()


def close(ours: Tensor, reference: Tensor, tolerance: float = 2e-5) -> None:
    """Compare logits within a share of the largest one, or of 1."""
    size = reference.abs().max().item()
    assert size > 0.05, "a comparison of zeros would prove nothing"
    torch.testing.assert_close(ours, reference, atol=tolerance * max(size, 1.0), rtol=0)
