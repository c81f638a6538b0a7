"""The places of Hugging Face's tensors in ours, per layer, for the rows of hf_families. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Rows:
    """The place of a tensor of theirs in ours.

    Attributes:
        module: our module, whose weight has the rows of their tensor.
        blocks: the blocks of its rows that their tensor has (the sections of te_models.config); (): all rows.
        per: several blocks alternate in their tensor, once per unit of this count in ModelConfig: for instance, the
            gate of each head after the queries of that head. "row": one row of each block. None: they do not alternate.
        experts: whether `module` is a te.GroupedLinear; {} in the name of their tensor is the number of the expert.
        form: the shape of their tensor, -1 for the rows; (): the shape of ours.
        otherwise: the place in layers that do not have `module`; None: all have it.
    """

    module: str
    blocks: tuple[str, ...] = ()
    per: (
        Literal[
            "num_attention_heads", "num_key_value_heads", "linear_attention.num_key_heads", "row"
        ]
        | None
    ) = None
    experts: bool = False
    form: tuple[int, ...] = ()
    otherwise: Rows | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may hold the tensor."""
        return (self.module,) if self.otherwise is None else (self.module, *self.otherwise.modules)

    def among(self, modules: Collection[str]) -> Rows:
        """Return the place in a layer that has these modules."""
        if self.otherwise is None or self.module in modules:
            return self
        return self.otherwise.among(modules)


def _alike(*names: str) -> dict[str, Rows]:
    """Return the places of tensors that have the names of ours."""
    return {name: Rows(name) for name in names}


LAYER = {
    "input_layernorm": Rows("input_layernorm"),
    "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q",)),
    "self_attn.k_proj": Rows("self_attn.qkvg_proj", ("k",)),
    "self_attn.v_proj": Rows("self_attn.qkvg_proj", ("v",)),
    "self_attn.o_proj": Rows("self_attn.o_proj"),
    "post_attention_layernorm": Rows("post_attention_layernorm"),
    "mlp.gate_proj": Rows("mlp.gate_up_proj", ("gate",)),
    "mlp.up_proj": Rows("mlp.gate_up_proj", ("up",)),
    "mlp.down_proj": Rows("mlp.down_proj"),
}
# Attention and MLP read one norm.
PARALLEL_LAYER = {name: rows for name, rows in LAYER.items() if name != "post_attention_layernorm"}
# EXAONE 3: the names in its files -> Llama's, which it has in a model of transformers.
EXAONE3_LAYER = {
    "ln_1": Rows("input_layernorm"),
    "attn.attention.q_proj": Rows("self_attn.qkvg_proj", ("q",)),
    "attn.attention.k_proj": Rows("self_attn.qkvg_proj", ("k",)),
    "attn.attention.v_proj": Rows("self_attn.qkvg_proj", ("v",)),
    "attn.attention.out_proj": Rows("self_attn.o_proj"),
    "ln_2": Rows("post_attention_layernorm"),
    "mlp.c_fc_0": Rows("mlp.gate_up_proj", ("gate",)),
    "mlp.c_fc_1": Rows("mlp.gate_up_proj", ("up",)),
    "mlp.c_proj": Rows("mlp.down_proj"),
}
VAULT_GEMMA_LAYER = {
    ("pre_feedforward_layernorm" if name == "post_attention_layernorm" else name): rows
    for name, rows in LAYER.items()
}
NORMED_LAYER = LAYER | _alike("self_attn.q_norm", "self_attn.k_norm")
HUNYUAN_LAYER = {
    **LAYER,
    "self_attn.query_layernorm": Rows("self_attn.q_norm"),
    "self_attn.key_layernorm": Rows("self_attn.k_norm"),
}
_NORM_AND_MLP = {name: rows for name, rows in LAYER.items() if not name.startswith("self_attn.")}
LATENT_LAYER = {
    **_NORM_AND_MLP,
    "self_attn.q_proj": Rows("self_attn.qkv_a_proj", ("q",)),
    "self_attn.q_a_proj": Rows("self_attn.qkv_a_proj", ("q_a",)),
    **_alike("self_attn.q_a_layernorm", "self_attn.q_b_proj"),
    "self_attn.kv_a_proj_with_mqa": Rows("self_attn.qkv_a_proj", ("kv_a", "k_rope")),
    **_alike("self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj"),
}
POST_NORMED_LAYER = {
    **{name: rows for name, rows in NORMED_LAYER.items() if "layernorm" not in name},
    "post_attention_layernorm": Rows("attention_output_norm"),
    "post_feedforward_layernorm": Rows("mlp_output_norm"),
}
# Norms before and after attention and MLP, whose names differ: (after attention, before the MLP, after it).
GEMMA_NORMS = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
AFMOE_NORMS = ("post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
GLM_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def both_normed(layer: Mapping[str, Rows], names: tuple[str, str, str]) -> dict[str, Rows]:
    """Return the places of a layer with four norms."""
    ours = ("attention_output_norm", "post_attention_layernorm", "mlp_output_norm")
    norms = {theirs: Rows(name) for theirs, name in zip(names, ours, strict=True)}
    return {
        **{name: rows for name, rows in layer.items() if name != "post_attention_layernorm"},
        **norms,
    }


MUSE_LAYER = {
    **both_normed(LAYER, GEMMA_NORMS),
    "self_attn.gate_proj": Rows("self_attn.qkvg_proj", ("g",)),
}
GEMMA4_LAYER = both_normed(NORMED_LAYER, GEMMA_NORMS) | {
    **_alike("layer_scalar"),
    "per_layer_input_gate": Rows("layer_input.input_gate_proj"),
    "per_layer_projection": Rows("layer_input.input_out_proj"),
    "post_per_layer_input_norm": Rows("layer_input.norm"),
}


def _fused_layer(*fused: str) -> dict[str, Rows]:
    """Return the places of a layer in which q, k and v, or gate and up, are one tensor."""
    rows = {
        "self_attn.qkv_proj": (("q", "k", "v"), Rows("self_attn.qkvg_proj", ("q", "k", "v"))),
        "mlp.gate_up_proj": (("gate", "up"), Rows("mlp.gate_up_proj", ("gate", "up"))),
    }
    inside = {block for name in fused for block in rows[name][0]}
    return {name: place for name, place in LAYER.items() if not inside & set(place.blocks)} | {
        name: rows[name][1] for name in fused
    }


PHI_LAYER = _fused_layer("self_attn.qkv_proj", "mlp.gate_up_proj")
FUSED_MLP_LAYER = _fused_layer("mlp.gate_up_proj")
GLM_LAYER = both_normed(FUSED_MLP_LAYER, GLM_NORMS)
CLOVA_LAYER = both_normed(LAYER, ("post_norm1", "post_attention_layernorm", "post_norm2"))
# A gate from a projection of its own.
AFMOE_LAYER = {
    **both_normed(NORMED_LAYER, AFMOE_NORMS),
    "self_attn.gate_proj": Rows("self_attn.qkvg_proj", ("g",)),
}
LAGUNA_LAYER = {**NORMED_LAYER, "self_attn.g_proj": Rows("self_attn.qkvg_proj", ("g",))}
# The layer of remote_code/modeling_te_models.py: rows that a model has not are left out.
OWN_LAYER = LAGUNA_LAYER | _alike("self_attn.sinks", "attention_output_norm", "mlp_output_norm")


def _experts(
    names: tuple[str, str, str, str], router: str = "mlp.gate", shared_expert: str = ""
) -> dict[str, Rows]:
    """Return the places of experts: the names of one of them, of its projections gate, up and down, and of the rest."""
    expert, gate, up, down = names
    places = {
        router: Rows("mlp.router"),
        f"{expert}.{gate}": Rows("mlp.gate_up_proj", ("gate",), experts=True),
        f"{expert}.{up}": Rows("mlp.gate_up_proj", ("up",), experts=True),
        f"{expert}.{down}": Rows("mlp.down_proj", experts=True),
    }
    if shared_expert:
        places |= {
            f"{shared_expert}.gate_proj": Rows("mlp.shared_gate_up_proj", ("gate",)),
            f"{shared_expert}.up_proj": Rows("mlp.shared_gate_up_proj", ("up",)),
            f"{shared_expert}.down_proj": Rows("mlp.shared_down_proj"),
        }
    return places


_ONE_EXPERT = ("mlp.experts.{}", "gate_proj", "up_proj", "down_proj")
EXPERTS = _experts(_ONE_EXPERT)
QWEN2_EXPERTS = {
    **_experts(_ONE_EXPERT, shared_expert="mlp.shared_expert"),
    "mlp.shared_expert_gate": Rows("mlp.shared_gate"),
}
DEEPSEEK_V2_EXPERTS = _experts(_ONE_EXPERT, shared_expert="mlp.shared_experts")
GLM_EXPERTS = {
    **DEEPSEEK_V2_EXPERTS,
    "mlp.gate.e_score_correction_bias": Rows("mlp.expert_bias"),
}
AXK1_EXPERTS = {**GLM_EXPERTS, "post_mlp_layernorm": Rows("mlp.output_norm")}
_FUSED_EXPERTS = {  # in one tensor per projection for all experts
    "mlp.experts.{}.gate_up_proj": Rows("mlp.gate_up_proj", ("gate", "up"), experts=True),
    "mlp.experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
}
MISTRAL4_EXPERTS = {
    **{name: rows for name, rows in DEEPSEEK_V2_EXPERTS.items() if not rows.experts},
    **_FUSED_EXPERTS,
}
STACKED_EXPERTS = {"mlp.gate": Rows("mlp.router"), **_FUSED_EXPERTS}
# Beside the MLP, which is the shared expert to us.
GEMMA4_EXPERTS = {
    "router.proj": Rows("mlp.router"),
    "router.scale": Rows("mlp.router_scale"),
    "router.per_expert_scale": Rows("mlp.expert_scale"),
    "experts.{}.gate_up_proj": Rows("mlp.gate_up_proj", ("gate", "up"), experts=True),
    "experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
    "mlp.gate_proj": Rows("mlp.shared_gate_up_proj", ("gate",)),
    "mlp.up_proj": Rows("mlp.shared_gate_up_proj", ("up",)),
    "mlp.down_proj": Rows("mlp.shared_down_proj"),
    "pre_feedforward_layernorm_2": Rows("mlp.expert_input_norm"),
    "post_feedforward_layernorm_1": Rows("mlp.shared_output_norm"),
    "post_feedforward_layernorm_2": Rows("mlp.expert_output_norm"),
}
GRANITE_SWA_MOE = {
    "block_sparse_moe.router": Rows("mlp.router"),
    "block_sparse_moe.experts.{}.gate_up_proj": Rows(
        "mlp.gate_up_proj", ("gate", "up"), experts=True
    ),
    "block_sparse_moe.experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
    "shared_mlp.input_linear": Rows("mlp.shared_gate_up_proj", ("gate", "up")),
    "shared_mlp.output_linear": Rows("mlp.shared_down_proj"),
}
STEP_LAYER = {
    **NORMED_LAYER,
    "self_attn.g_proj": Rows("self_attn.qkvg_proj", ("g",)),
    **_experts(
        ("moe.experts.{}", "gate_proj", "up_proj", "down_proj"),
        "moe.gate",
        shared_expert="share_expert",
    ),
    "moe.router_bias": Rows("mlp.expert_bias"),
}
HUNYUAN_EXPERTS = _experts(_ONE_EXPERT, "mlp.gate.wg", shared_expert="mlp.shared_mlp")
ERNIE_EXPERTS = {
    **DEEPSEEK_V2_EXPERTS,
    "mlp.moe_statics.e_score_correction_bias": Rows("mlp.expert_bias", form=(1, -1)),
}
EXAONE_EXPERTS = {**DEEPSEEK_V2_EXPERTS, "mlp.e_score_correction_bias": Rows("mlp.expert_bias")}
AFMOE_EXPERTS = {
    **_experts(_ONE_EXPERT, "mlp.router.gate", shared_expert="mlp.shared_experts"),
    "mlp.expert_bias": Rows("mlp.expert_bias"),
}
LAGUNA_EXPERTS = {
    **_experts(_ONE_EXPERT, shared_expert="mlp.shared_expert"),
    "mlp.experts.e_score_correction_bias": Rows("mlp.expert_bias"),
}
MIXTRAL_EXPERTS = _experts(
    ("block_sparse_moe.experts.{}", "w1", "w3", "w2"), "block_sparse_moe.gate"
)
MINIMAX_EXPERTS = {
    **MIXTRAL_EXPERTS,
    "block_sparse_moe.e_score_correction_bias": Rows("mlp.expert_bias"),
}
GPT_OSS_LAYER = {
    **{name: rows for name, rows in LAYER.items() if "mlp" not in name},
    **_alike("self_attn.sinks", "mlp.router"),
    "mlp.experts.{}.gate_up_proj": Rows("mlp.gate_up_proj", ("gate", "up"), "row", experts=True),
    "mlp.experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
}
LLAMA4_LAYER = {
    **{name.replace("mlp.", "feed_forward."): rows for name, rows in LAYER.items()},
    "feed_forward.router": Rows("mlp.router"),
    "feed_forward.experts.{}.gate_up_proj": Rows("mlp.gate_up_proj", ("gate", "up"), experts=True),
    "feed_forward.experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
    "feed_forward.shared_expert.gate_proj": Rows("mlp.shared_gate_up_proj", ("gate",)),
    "feed_forward.shared_expert.up_proj": Rows("mlp.shared_gate_up_proj", ("up",)),
    "feed_forward.shared_expert.down_proj": Rows("mlp.shared_down_proj"),
}
SARVAM_LAYER = {
    **{name: rows for name, rows in LAYER.items() if "self_attn" not in name},
    **DEEPSEEK_V2_EXPERTS,
    "mlp.gate.expert_bias": Rows("mlp.expert_bias"),
    "attention.query_key_value": Rows("self_attn.qkvg_proj", ("q", "k", "v")),
    "attention.dense": Rows("self_attn.o_proj"),
    "attention.query_layernorm": Rows("self_attn.q_norm"),
    "attention.key_layernorm": Rows("self_attn.k_norm"),
}
HY3_EXPERTS = {
    **_experts(_ONE_EXPERT, "mlp.router.gate", shared_expert="mlp.shared_mlp"),
    "mlp.expert_bias": Rows("mlp.expert_bias"),
}
FLINT_LAYER = {
    **NORMED_LAYER,
    **_experts(_ONE_EXPERT, shared_expert="mlp.shared_expert"),
    "self_attn.softmax_offset": Rows("self_attn.sinks"),
}
SINKS_LAYER = LAYER | _alike("self_attn.sinks")
UNGATED_MLP_LAYER = {name: rows for name, rows in LAYER.items() if name != "mlp.gate_proj"}
# The gate comes out of q_proj: after the queries of each group of heads that share a key, or of each head.
GATED_BY_GROUP = {
    **NORMED_LAYER,
    "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q", "g"), "num_key_value_heads"),
}
GATED_BY_HEAD = {
    **NORMED_LAYER,
    "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q", "g"), "num_attention_heads"),
}
_DELTANET = _alike(
    *(f"linear_attn.{name}" for name in ("conv1d", "A_log", "dt_bias", "norm", "out_proj"))
)
# Gated DeltaNet in some layers, with a projection for each part, or with one for the parts of each key head.
QWEN3_5_LAYER = {
    **GATED_BY_HEAD,
    **_DELTANET,
    "linear_attn.in_proj_qkv": Rows("linear_attn.qkvz_proj", ("q", "k", "v")),
    "linear_attn.in_proj_z": Rows("linear_attn.qkvz_proj", ("z",)),
    "linear_attn.in_proj_b": Rows("linear_attn.ba_proj", ("b",)),
    "linear_attn.in_proj_a": Rows("linear_attn.ba_proj", ("a",)),
}
QWEN3_NEXT_LAYER = {
    **GATED_BY_HEAD,
    **_DELTANET,
    "linear_attn.in_proj_qkvz": Rows(
        "linear_attn.qkvz_proj", ("q", "k", "v", "z"), "linear_attention.num_key_heads"
    ),
    "linear_attn.in_proj_ba": Rows(
        "linear_attn.ba_proj", ("b", "a"), "linear_attention.num_key_heads"
    ),
}
# Gated short convolutions in some layers.
_LFM2_ATTENTION = {
    "operator_norm": Rows("input_layernorm"),
    "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q",)),
    "self_attn.k_proj": Rows("self_attn.qkvg_proj", ("k",)),
    "self_attn.v_proj": Rows("self_attn.qkvg_proj", ("v",)),
    "self_attn.out_proj": Rows("self_attn.o_proj"),
    "self_attn.q_layernorm": Rows("self_attn.q_norm"),
    "self_attn.k_layernorm": Rows("self_attn.k_norm"),
    **_alike("conv.in_proj", "conv.conv", "conv.out_proj"),
    "ffn_norm": Rows("post_attention_layernorm"),
}
LFM2_LAYER = {
    **_LFM2_ATTENTION,
    "feed_forward.w1": Rows("mlp.gate_up_proj", ("gate",)),
    "feed_forward.w3": Rows("mlp.gate_up_proj", ("up",)),
    "feed_forward.w2": Rows("mlp.down_proj"),
}
LFM2_EXPERTS = {
    **_experts(("feed_forward.experts.{}", "w1", "w3", "w2"), "feed_forward.gate"),
    "feed_forward.expert_bias": Rows("mlp.expert_bias"),
}
LFM3_LAYER = {
    **{name: rows for name, rows in NORMED_LAYER.items() if "self_attn" in name},
    "operator_norm": Rows("input_layernorm"),
    "post_operator_norm": Rows("attention_output_norm"),
    "ffn_norm": Rows("post_attention_layernorm"),
    "post_ffn_norm": Rows("mlp_output_norm"),
    "self_attn.g_proj": Rows("self_attn.qkvg_proj", ("g",)),
    **{name: rows for name, rows in LFM2_LAYER.items() if name.startswith(("conv.", "feed_"))},
}
# State spaces in some layers.
MAMBA = {
    "mamba.in_proj": Rows("mamba.zxbcdt_proj", ("z", "x", "b", "c", "dt")),
    **_alike(
        *(f"mamba.{name}" for name in ("conv1d", "A_log", "dt_bias", "D", "norm", "out_proj"))
    ),
}
# The shared expert is the MLP of a model without experts.
GRANITE_HYBRID_LAYER = {
    **{name: rows for name, rows in LAYER.items() if "mlp" not in name},
    **MAMBA,
    "block_sparse_moe.router.layer": Rows("mlp.router"),
    "block_sparse_moe.experts.{}.gate_up_proj": Rows(
        "mlp.gate_up_proj", ("gate", "up"), experts=True
    ),
    "block_sparse_moe.experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
    "shared_mlp.input_linear": Rows(
        "mlp.shared_gate_up_proj",
        ("gate", "up"),
        otherwise=Rows("mlp.gate_up_proj", ("gate", "up")),
    ),
    "shared_mlp.output_linear": Rows("mlp.shared_down_proj", otherwise=Rows("mlp.down_proj")),
}
# Granite's experts without state spaces, and with or without one for all tokens.
GRANITE_MOE_LAYER = {
    name: rows for name, rows in GRANITE_HYBRID_LAYER.items() if not name.startswith("mamba.")
}
BAMBA_LAYER = {
    **{name: rows for name, rows in LAYER.items() if "self_attn" in name},
    **MAMBA,
    "input_layernorm": Rows("input_layernorm"),
    "pre_ff_layernorm": Rows("post_attention_layernorm"),
    "feed_forward.gate_proj": Rows("mlp.gate_up_proj", ("gate",)),
    "feed_forward.up_proj": Rows("mlp.gate_up_proj", ("up",)),
    "feed_forward.down_proj": Rows("mlp.down_proj"),
}
# Mamba 2 beside attention in every layer.
FALCON_LAYER = dict(BAMBA_LAYER)
for _name, _rows in BAMBA_LAYER.items():
    if _name.startswith(("self_attn.", "mamba.")):
        FALCON_LAYER[_name] = replace(_rows, module=f"parallel.{_rows.module}")
# Kimi Delta Attention in some layers, latent attention in the others.
_KDA = "kda.qkvg_proj"
KIMI_LAYER = {
    **LATENT_LAYER,
    "self_attn.q_proj": Rows("self_attn.qkv_a_proj", ("q",), otherwise=Rows(_KDA, ("q",))),
    "self_attn.k_proj": Rows(_KDA, ("k",)),
    "self_attn.v_proj": Rows(_KDA, ("v",)),
    **{f"self_attn.{name}_conv1d": Rows("kda.conv1d", (name,)) for name in ("q", "k", "v")},
    "self_attn.f_a_proj": Rows("kda.fb_proj", ("f",)),
    "self_attn.f_b_proj": Rows("kda.f_up_proj"),
    "self_attn.A_log": Rows("kda.A_log", form=(1, 1, -1, 1)),
    "self_attn.dt_bias": Rows("kda.dt_bias"),
    "self_attn.b_proj": Rows("kda.fb_proj", ("b",)),
    "self_attn.g_a_proj": Rows(_KDA, ("g",)),
    "self_attn.g_b_proj": Rows("kda.g_up_proj"),
    "self_attn.o_norm": Rows("kda.o_norm"),
    "self_attn.o_proj": Rows("self_attn.o_proj", otherwise=Rows("kda.o_proj")),
}
# Kimi Delta Attention without low ranks, and latent attention with a gate per head (Ling 3).
_LING = {
    "q_proj": Rows("self_attn.qkv_a_proj", ("q",), otherwise=Rows(_KDA, ("q",))),
    "q_a_proj": Rows("self_attn.qkv_a_proj", ("q_a",)),
    "q_a_layernorm": Rows("self_attn.q_a_layernorm"),
    "q_b_proj": Rows("self_attn.q_b_proj"),
    "kv_a_proj_with_mqa": Rows("self_attn.qkv_a_proj", ("kv_a", "k_rope")),
    "kv_a_layernorm": Rows("self_attn.kv_a_layernorm"),
    "kv_b_proj": Rows("self_attn.kv_b_proj"),
    "g_proj": Rows("self_attn.qkv_a_proj", ("g",), otherwise=Rows(_KDA, ("g",))),
    "k_proj": Rows(_KDA, ("k",)),
    "v_proj": Rows(_KDA, ("v",)),
    "b_proj": Rows("kda.fb_proj", ("b",)),
    "o_norm": Rows("kda.o_norm"),
}
_LING_OUT = Rows("self_attn.o_proj", otherwise=Rows("kda.o_proj"))
LING_LAYER = {  # in a folder
    **_NORM_AND_MLP,
    **{f"attention.{name}": rows for name, rows in _LING.items()},
    "attention.dense": _LING_OUT,
    **{f"attention.{name}_conv1d": Rows("kda.conv1d", (name,)) for name in ("q", "k", "v")},
    "attention.f_proj": Rows("kda.fb_proj", ("f",)),
    "attention.A_log": Rows("kda.A_log"),
    "attention.dt_bias": Rows("kda.dt_bias"),
    **DEEPSEEK_V2_EXPERTS,
    "mlp.gate.expert_bias": Rows("mlp.expert_bias"),
}
LING_MODULES = {  # in a model of transformers
    **_NORM_AND_MLP,
    **{f"self_attn.{name}": rows for name, rows in _LING.items()},
    "self_attn.o_proj": _LING_OUT,
    "self_attn.forget_gate.f_proj": Rows("kda.fb_proj", ("f",)),
    **GLM_EXPERTS,
}
KIMI_EXPERTS = {
    **_experts(
        ("block_sparse_moe.experts.{}", "w1", "w3", "w2"),
        "block_sparse_moe.gate",
        shared_expert="block_sparse_moe.shared_experts",
    ),
    "block_sparse_moe.gate.e_score_correction_bias": Rows("mlp.expert_bias"),
}
# Layers of one part: Mamba 2, attention, an MLP or experts.
NEMOTRON_LAYER = {
    "norm": Rows("input_layernorm", otherwise=Rows("post_attention_layernorm")),
    **{
        name.replace("mamba", "mixer"): rows for name, rows in MAMBA.items() if name != "mamba.norm"
    },
    "mixer.norm": Rows("mamba.norm"),
    "mixer.q_proj": Rows("self_attn.qkvg_proj", ("q",)),
    "mixer.k_proj": Rows("self_attn.qkvg_proj", ("k",)),
    "mixer.v_proj": Rows("self_attn.qkvg_proj", ("v",)),
    "mixer.o_proj": Rows("self_attn.o_proj"),
    "mixer.up_proj": Rows("mlp.gate_up_proj", ("up",)),
    "mixer.down_proj": Rows("mlp.down_proj"),
    "mixer.gate": Rows("mlp.router"),
    "mixer.gate.e_score_correction_bias": Rows("mlp.expert_bias"),
    "mixer.experts.{}.up_proj": Rows("mlp.gate_up_proj", ("up",), experts=True),
    "mixer.experts.{}.down_proj": Rows("mlp.down_proj", experts=True),
    "mixer.shared_experts.up_proj": Rows("mlp.shared_gate_up_proj", ("up",)),
    "mixer.shared_experts.down_proj": Rows("mlp.shared_down_proj"),
    "mixer.fc1_latent_proj": Rows("mlp.latent_in_proj"),
    "mixer.fc2_latent_proj": Rows("mlp.latent_out_proj"),
}
# Outside the layers: their name -> ours, below the prefix of a family where it begins with "model.".
TOP = {
    "model.embed_tokens": "embed_tokens",
    "model.embed_tokens_per_layer": "layer_inputs.table",
    "model.per_layer_model_projection": "layer_inputs.context_proj",
    "model.per_layer_projection_norm": "layer_inputs.norm",
    "model.norm": "norm",
    "lm_head": "lm_head",
}
