"""Tiny models of transformers with random weights, the judges of TEModelsForCausalLM."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import transformers

from te_models import CausalLM, TEModelsForCausalLM

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GATED: dict[str, Any] = {**SIZES, "head_dim": 16, "num_experts": 0, "mlp_only_layers": [0, 1, 2]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "mistral-window": ("mistral", {**SIZES, "sliding_window": 6}),
    "qwen2-mixed-window": (
        "qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3-tied": ("qwen3", {**SIZES, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {**SIZES, "no_rope_layers": [1, 0, 1]}),
    "qwen3-next": ("qwen3_next", {**GATED, "layer_types": ["full_attention"] * 3}),
    "gemma2": (
        "gemma2",
        {**SIZES, "sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    ),
    "phi3-longrope": (
        "phi3",
        {
            **{name: value for name, value in SIZES.items() if name != "head_dim"},
            "original_max_position_embeddings": 15,
            "rope_parameters": dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0] * 8,
                long_factor=[1.0 + pair for pair in range(8)],
            ),
        },
    ),
}
ATTENTION = {"gemma2": "eager"}  # transformers' other ways cap no logits


@dataclass(frozen=True)
class Pair:
    """The same weights in a model of transformers and in ours, FP32 on the CPU."""

    theirs: Any
    ours: TEModelsForCausalLM
    folder: Path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function that gives the pair of a case, made once."""
    made: dict[str, Pair] = {}

    def get(case: str) -> Pair:
        if case not in made:
            kind, values = CASES[case]
            torch.manual_seed(3)
            theirs = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(kind, **values),
                attn_implementation=ATTENTION.get(kind, "sdpa"),
            )
            theirs = theirs.float().eval().requires_grad_(False)
            for name, parameter in theirs.named_parameters():
                parameter.normal_(1.0 if "norm" in name and kind != "qwen3_next" else 0.0, 0.25)
            folder = tmp_path_factory.mktemp(case)
            theirs.save_pretrained(folder)
            made[case] = Pair(
                theirs, TEModelsForCausalLM.from_pretrained(folder, device="cpu"), folder
            )
        return made[case]

    return get


SHAPE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, attention_gate="headwise",
)  # fmt: skip


@pytest.fixture
def build() -> Callable[..., CausalLM]:
    """A function that makes a small gated CausalLM on the CPU."""

    def make(recipe: str = "bf16", seed: int = 0, **options: Any) -> CausalLM:
        torch.manual_seed(seed)
        place: dict[str, Any] = dict(device="cpu", engine="emulated")
        return CausalLM.from_preset("gated-nano", recipe=recipe, **{**SHAPE, **place, **options})

    return make
