"""Every family with heads of its real size, over packed documents and in a window: default operations against plain.

Both are judged by the plain model in FP32. Attention in spans, which default operations use there, must serve heads of
any size; Phi-3 has 96 channels.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import DENSE_AFMOE, DENSE_LAGUNA, FULL, SLIDING
from places import EMULATED, PLACE
from torch import Tensor

from te_models import CausalLM
from te_models.config.model import ModelConfig
from te_models.interop.hf_families import FAMILIES, Family

LAYERS, TOKENS, WINDOW = 4, 160, 48
LENGTHS = ((160,), (1, 79, 80), (33, 33, 94))  # of the documents of each row
HEADS = dict.fromkeys((family.model_type for family in FAMILIES), 128)
HEADS |= dict(
    llama=64, qwen2=64, granite=64, exaone4=64, phi3=96, qwen3_next=256, gemma2=256, gemma3_text=256
)
HEADS |= dict.fromkeys(("gemma4_text", "gemma4_unified_text"), 256)
# Sizes of heads that other models have.
OWN = {
    "stablelm": (80, "none"),
    "kimi": (112, "elementwise"),
    "mla": (192, "elementwise"),
    "head": (96, "headwise"),
}
# Heads of 192 channels with values of 128, and of 256 with as many; dense layers.
RANKS = dict(num_key_value_heads=4, head_dim=64, q_lora_rank=128, kv_lora_rank=128)
LATENT = RANKS | dict(first_k_dense_replace=LAYERS)
# By default Granite multiplies scores by 1, and with that the softmax of a random model is so steep that even gradients
# in BF16 have nothing in common with those in FP32. With the published multipliers, of 1 / 128 and beside embeddings
# times 12, attention is so even and adds so little that a window of half its size would pass.
GRANITE = dict(
    attention_multiplier=0.1,
    embedding_multiplier=4.0,
    residual_multiplier=0.5,
    logits_scaling=2.0,
)
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "kimi_linear": LATENT,
    "bailing_hybrid": LATENT,
    "deepseek_v2": LATENT,
    "sarvam_mla": LATENT,
    "axk1": LATENT,
    "dots1": dict(
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=96
    ),
    "mistral4": LATENT,
    "youtu": RANKS,
    "minicpm3": RANKS | dict(qk_rope_head_dim=64),
    "gemma4_text": dict(
        hidden_size_per_layer_input=0, num_experts=4, top_k_experts=2, moe_intermediate_size=96
    ),
    "glm4_moe_lite": {**RANKS, "q_lora_rank": 96, "mlp_layer_types": ["dense"] * LAYERS},
    "qwen3_next": dict(num_experts=0, layer_types=[FULL] * LAYERS),
    "afmoe": DENSE_AFMOE,
    "granite": GRANITE,
    "granite_swa": GRANITE,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": GRANITE,
    "granitemoeshared": GRANITE,
    "nemotron_h": dict(moe_intermediate_size=96, moe_shared_expert_intermediate_size=96),
    "laguna": {**DENSE_LAGUNA, "mlp_layer_types": ["dense"] * LAYERS, "gating": "per-head"},
}


def read(family: Family) -> ModelConfig:
    """A small model of a family, with heads as published models have."""
    size = HEADS[family.model_type]
    fields: dict[str, Any] = dict(
        model_type=family.model_type, vocab_size=512, hidden_size=4 * size, head_dim=size
    )
    fields |= dict(
        intermediate_size=384,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    fields |= dict(
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    marks = dict(headwise_attn_output_gate=True) if family.marks else {}
    marks |= {key: values[0] for key, values in family.when.items()}
    config = family.read(fields | marks | NEEDED.get(family.model_type, {}))
    if config.moe is None:
        return config
    # All of a few experts, since a rounding may choose others.
    few = replace(config.moe, num_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1)
    return replace(config, moe=few)


def own(size: int, gate: str) -> ModelConfig:
    """A small model of our own, with heads of `size` channels."""
    return ModelConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size, attention_gate=gate, max_position_embeddings=256,
    )  # fmt: skip


CASES = {
    f"{f.model_type}{'-gated' if f.marks else ''}{' '.join(f' {values[0]}' for values in f.when.values())}": f
    for f in FAMILIES
    if not (f.code or f.inner)
}


def config_of(case: str) -> ModelConfig:
    return read(CASES[case]) if case in CASES else own(*OWN[case])


def build(config: ModelConfig, source: CausalLM | None = None, **options: Any) -> CausalLM:
    """A model with the weights of `source`, or random ones."""
    torch.manual_seed(5)
    model = CausalLM(config, **options).train()
    model.te.FP8GlobalStateManager.reset()
    values = {} if source is None else dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if source is not None:
                parameter.copy_(values[name])
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.06)
            elif name.endswith("q_norm.weight") and config.attention_multiplier is not None:
                # Gemma 4 learns the scale of its scores in this norm: with ones they would be of the size of
                # sqrt(dim), and the softmax too steep for a comparison.
                parameter.fill_(parameter.numel() ** -0.5 / config.attention_multiplier)
    return model


def step(model: CausalLM, documents: Tensor | None) -> Tensor:
    """All gradients of the last of three equal passes, which give delayed scaling its scales, in one vector."""
    ids = torch.randint(
        0, 512, (len(LENGTHS), TOKENS), generator=torch.Generator().manual_seed(4)
    ).to(model.device)
    for _ in range(3):
        model.zero_grad()
        model(ids, labels=ids, document_ids=documents, return_logits=False).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def test_every_family_is_a_case() -> None:
    assert len(CASES) == sum(not (family.code or family.inner) for family in FAMILIES) >= 24
    assert {config_of(case).head_dim for case in (*CASES, *OWN)} == {
        64,
        80,
        96,
        112,
        128,
        192,
        256,
        512,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["packed", "windowed"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("case", [*CASES, *OWN])
def test_default_operations_are_as_near_to_fp32_as_plain_ones(
    case: str, recipe: str, where: str
) -> None:
    config, documents = config_of(case), None
    if where == "windowed" and config.latent_attention is not None:
        pytest.skip("latent attention has no window")
    if where == "windowed":
        config = replace(
            config,
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL) * (LAYERS // 2),
            attention_chunk_size=None,
        )
    plain: dict[str, Any] = dict(compile=False, fused=False)
    fused = build(config, recipe=recipe, dtype=torch.bfloat16, **PLACE)
    other = build(config, fused, recipe=recipe, dtype=torch.bfloat16, **PLACE, **plain)
    judge = build(config, fused, recipe="bf16", dtype=torch.float32, **EMULATED, **plain)
    if where == "packed":
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
        documents = torch.stack(rows).to(judge.device)
    truth, ours, usual = (step(model, documents) for model in (judge, fused, other))
    gap, common = ((found - truth).norm() / truth.norm() for found in (ours, usual))
    assert truth.norm() > 0 and common < 0.6, "a comparison that would prove nothing"
    assert gap <= 1.25 * common, f"{gap:.3g} from FP32, and plain operations {common:.3g}"
