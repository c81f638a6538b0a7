"""Ten odd shapes of each family of decoders, as transformers' configs: what the tests of families run over."""

import copy
from typing import Any

SIZES: dict[str, Any] = dict(
    vocab_size=131, hidden_size=48, intermediate_size=72, num_hidden_layers=3
)
SIZES |= dict(num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=40)
SIZES |= dict(rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, pad_token_id=0)

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=10000.0
)
LLAMA3 |= dict(original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=500.0)
DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=1000.0)
YARN = dict(
    rope_type="yarn",
    factor=4.0,
    rope_theta=10000.0,
    original_max_position_embeddings=10,
    beta_fast=8.0,
)
DEFAULT = dict(rope_type="default", rope_theta=10000.0)
LONG = [1.0 + pair / 3 for pair in range(8)]
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, short_factor=LONG[::-1], long_factor=LONG)
HALF = dict(partial_rotary_factor=0.5, rope_theta=10000.0)

# What any family can have: shapes and RoPE.
SHAPES: dict[str, dict[str, Any]] = {
    "odd": dict(
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=10,
        hidden_size=30,
        intermediate_size=17,
    ),
    "one-key": dict(num_key_value_heads=1, head_dim=8),
    "all-keys": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=12),
    "tied": dict(tie_word_embeddings=True, num_hidden_layers=1),
    "untied": dict(tie_word_embeddings=False, rms_norm_eps=1e-6),
    "linear": dict(rope_parameters=LINEAR),
    "llama3": dict(rope_parameters=LLAMA3, num_attention_heads=2, num_key_value_heads=1),
    "yarn": dict(rope_parameters=YARN),
    "dynamic": dict(rope_parameters=DYNAMIC),
    "gelu": dict(hidden_act="gelu", tie_word_embeddings=True),
}
PAIRS = dict(full_attention=LINEAR, sliding_attention=DEFAULT)


def _shapes(*names: str, drop: tuple[str, ...] = (), **common: Any) -> dict[str, dict[str, Any]]:
    """The shapes of these names (all: of none), without the fields that a family does not have."""
    found = {name: SHAPES[name] for name in names or SHAPES}
    return {
        n: {k: v for k, v in {**common, **shape}.items() if k not in drop}
        for n, shape in found.items()
    }


EIGHT = ("odd", "one-key", "all-keys", "tied", "linear", "llama3", "yarn", "gelu")
SIX = ("odd", "one-key", "all-keys", "tied", "untied", "gelu")
GEMMA_SIX = {
    name: {("hidden_activation" if k == "hidden_act" else k): v for k, v in shape.items()}
    for name, shape in _shapes(*SIX).items()
}
BIASED = dict(attention_bias=True, mlp_bias=True)
WINDOWS = {
    "window": dict(sliding_window=5, layer_types=[SLIDING, FULL, SLIDING]),
    "all-slide": dict(sliding_window=4, layer_types=[SLIDING] * 3, num_key_value_heads=6),
}
# DEFAULT with the scale of queries, which Ministral 3 always has.
SCALED = dict(llama_4_scaling_beta=0.3, original_max_position_embeddings=7)
DENSE_AFMOE = dict(
    num_dense_layers=9, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8
)
ROUTED = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20)
DENSE_LAGUNA = dict(mlp_layer_types=["dense"] * 3, num_experts=2, num_experts_per_tok=1)


def _laguna(full: dict[str, Any], sliding: dict[str, Any] = DEFAULT) -> dict[str, Any]:
    return dict(full_attention=full, sliding_attention=sliding)


def _experts(
    common: dict[str, Any], number: str, *names: str, **more: Any
) -> dict[str, dict[str, Any]]:
    """Shapes with experts: numbers that are no powers of two, one expert per token, and all of them."""
    chosen = [(5, 2), (3, 1), (3, 3), (7, 5)]
    counts = [{number: experts, "num_experts_per_tok": k} for experts, k in chosen]
    # transformers' grouped products need rows of 16 bytes.
    odd = dict(
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=12,
        hidden_size=36,
        intermediate_size=28,
    )
    shapes = {**_shapes(*names), "odd": odd}
    found = {
        name: {**common, **counts[place % 4], **shape}
        for place, (name, shape) in enumerate(shapes.items())
    }
    return found | {name: {**common, **counts[0], **case} for name, case in more.items()}


_ANY = ("one-key", "all-keys", "tied", "untied", "linear", "llama3", "yarn", "gelu")
_QWEN = dict(moe_intermediate_size=20)
_DELTANET = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=16,
)
_HYBRID = dict(
    **_QWEN,
    **_DELTANET,
    shared_expert_intermediate_size=28,
    layer_types=["linear_attention", FULL, FULL],
)
_HYBRID |= dict(rope_parameters=dict(DEFAULT, partial_rotary_factor=0.5))
_ONE_LAYER = dict(layer_types=[FULL], num_hidden_layers=1, tie_word_embeddings=True)
_WHOLE = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16)
# Latent attention: queries with a latent or without, values narrower or wider than keys, and as wide.
LATENT_SIZES: dict[str, Any] = dict(
    num_key_value_heads=6, q_lora_rank=14, kv_lora_rank=18, qk_nope_head_dim=12
)
LATENT_SIZES |= dict(
    qk_rope_head_dim=8, head_dim=8, v_head_dim=10, moe_intermediate_size=20, first_k_dense_replace=1
)
LATENT_SIZES |= dict(
    n_routed_experts=5, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1
)
MIXED = dict(plain=["sparse", "dense", "sparse"], dense=["dense"] * 3)
_LATENT: dict[str, dict[str, Any]] = {
    name: {**LATENT_SIZES, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            hidden_size=36,
            kv_lora_rank=7,
            q_lora_rank=5,
        ),
        direct=dict(q_lora_rank=None, v_head_dim=24),
        width=dict(v_head_dim=20),
        groups=dict(
            n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
        ),
        one=dict(num_experts_per_tok=1, first_k_dense_replace=0, norm_topk_prob=False),
        all=dict(num_experts_per_tok=5, routed_scaling_factor=1.0, first_k_dense_replace=2),
        tied=dict(tie_word_embeddings=True, rope_interleave=False, num_hidden_layers=2),
        biases=dict(attention_bias=True, hidden_act="gelu"),
        yarn=dict(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
        mscale=dict(
            rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, q_lora_rank=None
        ),
        dense=dict(first_k_dense_replace=3, rope_parameters=LINEAR),
    ).items()
}
_NOT_YOUTU = {
    "moe_intermediate_size", "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok", "n_group",
    "topk_group", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor",
}  # fmt: skip
_DENSE_LATENT = {key: value for key, value in LATENT_SIZES.items() if key not in _NOT_YOUTU}
FAMILY_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "biases": BIASED,
        "attention-bias": dict(attention_bias=True, num_key_value_heads=1),
        "mlp-bias": dict(mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
        "relu2": dict(hidden_act="relu2", rope_parameters=DYNAMIC),
    },
    "qwen3": {"biases": dict(attention_bias=True), "gelu": dict(hidden_act="gelu_new")},
    "smollm3": {"biases": dict(**BIASED, no_rope_layers=[1, 0, 1])},
    **dict.fromkeys(("ministral", "cwm"), {**_shapes(*EIGHT, sliding_window=6), **WINDOWS}),
    "ministral3": {
        **{
            name: {**shape, "rope_parameters": {**shape.get("rope_parameters", DEFAULT), **SCALED}}
            for name, shape in SHAPES.items()
        },
        "window": dict(
            sliding_window=5,
            rope_parameters={**YARN, **SCALED, "mscale": 1.0, "mscale_all_dim": 0.0},
        ),
        "no-scale": dict(rope_parameters={**YARN, **SCALED, "llama_4_scaling_beta": 0.0}),
        "mscale": dict(rope_parameters={**YARN, **SCALED, "mscale": 0.7, "mscale_all_dim": 1.2}),
    },
    **dict.fromkeys(("internlm3", "iquestcoder"), {**_shapes(*EIGHT, "dynamic"), "biases": BIASED}),
    "seed_oss": {
        **_shapes(*EIGHT),
        "biases": dict(attention_out_bias=True, mlp_bias=True),
        "no-bias": dict(attention_bias=False, residual_dropout=0.2),
    },
    "phi3": {
        "odd": dict(
            num_attention_heads=3, num_key_value_heads=3, hidden_size=30, intermediate_size=17
        ),
        "one-key": dict(num_key_value_heads=1, rope_parameters=HALF),
        "all-keys": dict(num_attention_heads=4, num_key_value_heads=4),
        "tied": dict(tie_word_embeddings=True, rope_parameters=HALF),
        "window": dict(sliding_window=5),
        "longrope": dict(
            num_attention_heads=3,
            num_key_value_heads=1,
            rope_parameters=LONGROPE,
            original_max_position_embeddings=12,
        ),
        "longrope-half": dict(
            num_attention_heads=3,
            num_key_value_heads=1,
            original_max_position_embeddings=20,
            rope_parameters={
                **LONGROPE,
                "partial_rotary_factor": 0.5,
                "short_factor": LONG[:4],
                "long_factor": LONG[4:],
            },
        ),
        "half-window": dict(rope_parameters=HALF, sliding_window=4),
        "gelu": dict(hidden_act="gelu"),
        "quarter": dict(
            rope_parameters={**HALF, "partial_rotary_factor": 0.25},
            num_attention_heads=3,
            num_key_value_heads=3,
        ),
    },
    "granite": {
        name: {
            **shape,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.1,
        }
        for name, shape in {
            **_shapes(*EIGHT),
            "biases": BIASED,
            "mlp-bias": dict(mlp_bias=True),
        }.items()
    },
    "arcee": {
        **_shapes(*EIGHT),
        "biases": BIASED,
        "mlp-bias": dict(mlp_bias=True, hidden_act="silu"),
    },
    "olmo2": {**_shapes(*EIGHT, "dynamic"), "biases": dict(attention_bias=True)},
    "olmo3": {
        **_shapes(*SIX, sliding_window=6),
        **WINDOWS,
        "yarn": dict(
            sliding_window=5, rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT)
        ),
        "both-scaled": dict(
            attention_bias=True,
            sliding_window=5,
            layer_types=[FULL, SLIDING, FULL],
            rope_parameters=dict(full_attention=LLAMA3, sliding_attention=LINEAR),
        ),
    },
    "exaone4": {
        **_shapes(*EIGHT, sliding_window=None, layer_types=[FULL] * 3),
        "tied": dict(
            tie_word_embeddings=True, num_hidden_layers=1, sliding_window=None, layer_types=[FULL]
        ),
        **WINDOWS,
        "pattern": dict(sliding_window=6, sliding_window_pattern=2),
        "no-rope": dict(sliding_window=6, layer_types=[FULL] * 3),
    },
    **dict.fromkeys(
        ("glm4", "glm"),
        {
            **_shapes(*EIGHT),
            "odd": {**SHAPES["odd"], "head_dim": 12},
            "no-bias": dict(attention_bias=False),
            "whole": dict(rope_parameters=dict(rope_theta=10000.0, partial_rotary_factor=1.0)),
        },
    ),
    "ernie4_5": {**_shapes(), "biases": dict(use_bias=True, tie_word_embeddings=False)},
    "gemma": {
        **_shapes(),
        "no-bias": dict(attention_bias=False),
        "biases": dict(attention_bias=True),
    },
    "gemma2": {
        **{
            name: {"sliding_window": 6, "query_pre_attn_scalar": 11, **shape}
            for name, shape in GEMMA_SIX.items()
        },
        "no-caps": dict(
            attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=7
        ),
        "tight-caps": dict(
            attn_logit_softcapping=1.5, final_logit_softcapping=2.0, attention_bias=True
        ),
        "llama3": dict(rope_parameters=LLAMA3, query_pre_attn_scalar=16),
        **WINDOWS,
    },
    "gemma3_text": {
        **{
            name: {"sliding_window": 6, "query_pre_attn_scalar": 11, **shape}
            for name, shape in GEMMA_SIX.items()
        },
        **WINDOWS,
        "linear": dict(
            rope_parameters=PAIRS, sliding_window=5, layer_types=[SLIDING, FULL, SLIDING]
        ),
        "capped": dict(final_logit_softcapping=2.0, attention_bias=True, layer_types=[FULL] * 3),
        "pattern": dict(sliding_window_pattern=2, sliding_window=5),
        "untruncated": dict(
            sliding_window=5,
            rope_parameters=dict(
                full_attention={**YARN, "truncate": False}, sliding_attention=DEFAULT
            ),
        ),
    },
    "afmoe": {
        **{
            name: {**DENSE_AFMOE, "sliding_window": 6, **shape}
            for name, shape in _shapes(*EIGHT).items()
        },
        "mup": dict(
            **DENSE_AFMOE, mup_enabled=True, global_attn_every_n_layers=2, sliding_window=4
        ),
        "no-rope": dict(**DENSE_AFMOE, layer_types=[FULL] * 3),
        "experts": dict(**ROUTED, num_dense_layers=1, num_shared_experts=2, route_scale=2.5),
        "all-sparse": dict(
            **ROUTED | dict(num_experts_per_tok=5), num_dense_layers=0, num_shared_experts=1
        ),
    },
    "laguna": {
        **{
            name: {**DENSE_LAGUNA, "sliding_window": 6, **shape}
            for name, shape in _shapes("one-key", "all-keys", "untied", "gelu").items()
        },
        "odd": {**DENSE_LAGUNA, **SHAPES["odd"], "head_dim": 12},
        "tied": dict(
            **DENSE_LAGUNA | dict(mlp_layer_types=["dense"]),
            tie_word_embeddings=True,
            num_hidden_layers=1,
        ),
        "elements": dict(**DENSE_LAGUNA, gating="per-element"),
        "experts": dict(
            **ROUTED,
            mlp_layer_types=["sparse", "dense", "sparse"],
            shared_expert_intermediate_size=28,
        ),
        "all-sparse": dict(
            **ROUTED | dict(num_experts_per_tok=1),
            mlp_layer_types=["sparse"] * 3,
            shared_expert_intermediate_size=12,
            moe_routed_scaling_factor=2.5,
        ),
        "window": dict(**DENSE_LAGUNA, gating="per-head", **WINDOWS["window"]),
        "ropes": dict(
            **DENSE_LAGUNA,
            **WINDOWS["window"],
            rope_parameters=_laguna(
                {**YARN, "partial_rotary_factor": 0.5}, {**DEFAULT, "partial_rotary_factor": 1.0}
            ),
        ),
        # The published ones have more heads in layers with a window.
        "heads": dict(
            **ROUTED,
            mlp_layer_types=["dense", "sparse", "sparse"],
            shared_expert_intermediate_size=28,
            gating="per-head",
            sliding_window=5,
            layer_types=[FULL, SLIDING, SLIDING],
            num_attention_heads=4,
            num_attention_heads_per_layer=[4, 6, 6],
            rope_parameters=_laguna({**YARN, "partial_rotary_factor": 0.5}),
        ),
        "heads-elements": dict(
            **DENSE_LAGUNA,
            gating="per-element",
            sliding_window=4,
            layer_types=[SLIDING, FULL, SLIDING],
            num_attention_heads=8,
            num_attention_heads_per_layer=[2, 8, 2],
        ),
        "all-slide": dict(
            **DENSE_LAGUNA,
            **WINDOWS["all-slide"],
            gating="per-element",
            rope_parameters=_laguna(HALF, LLAMA3),
        ),
    },
    "qwen3_moe": _experts(
        _QWEN,
        "num_experts",
        *_ANY,
        normed=dict(norm_topk_prob=True, mlp_only_layers=[0], attention_bias=True),
        steps=dict(decoder_sparse_step=2),
        dense=dict(mlp_only_layers=[0, 1, 2]),
        window=dict(use_sliding_window=True, sliding_window=5),
    ),
    "qwen2_moe": _experts(
        {**_QWEN, **_WHOLE, "shared_expert_intermediate_size": 28},
        "num_experts",
        *_ANY,
        normed=dict(norm_topk_prob=True, qkv_bias=False),
        steps=dict(decoder_sparse_step=2, mlp_only_layers=[0]),
        dense=dict(decoder_sparse_step=4),
        window=dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    ),
    "qwen3_next": _experts(
        _HYBRID,
        "num_experts",
        "one-key",
        "all-keys",
        "untied",
        tied=_ONE_LAYER,
        plain=dict(norm_topk_prob=False),
        mixed=dict(mlp_only_layers=[1]),
        steps=dict(decoder_sparse_step=2),
        all=dict(num_experts_per_tok=5),
        full=dict(layer_types=[FULL] * 3),
        linear=dict(layer_types=["linear_attention", "linear_attention", FULL]),
    ),
    "qwen3_5_moe_text": _experts(
        _HYBRID,
        "num_experts",
        "one-key",
        "all-keys",
        "untied",
        tied=_ONE_LAYER,
        all=dict(num_experts_per_tok=5),
        full=dict(layer_types=[FULL] * 3),
        linear=dict(layer_types=["linear_attention", "linear_attention", FULL]),
        one=dict(num_experts=1, num_experts_per_tok=1),
        narrow=dict(moe_intermediate_size=4),
        wide=dict(shared_expert_intermediate_size=100),
    ),
    "mixtral": _experts({}, "num_local_experts", *_ANY, window=dict(sliding_window=5)),
    "olmoe": _experts(
        _WHOLE,
        "num_experts",
        "all-keys",
        "tied",
        "untied",
        "linear",
        "yarn",
        "gelu",
        "dynamic",
        normed=dict(norm_topk_prob=True, attention_bias=True),
        keys=dict(num_key_value_heads=3),
    ),
    "deepseek_v3": _LATENT,
    "gpt_oss": _experts(
        dict(
            sliding_window=6, swiglu_limit=0.5, rope_parameters=DEFAULT
        ),  # small values reach the limit
        "num_local_experts",
        "one-key",
        "all-keys",
        "tied",
        "untied",
        "linear",
        "llama3",
        untruncated=dict(rope_parameters={**YARN, "truncate": False}),
        window=WINDOWS["window"],
        full=dict(layer_types=[FULL] * 3),
        gentle=dict(swiglu_limit=7.0, swiglu_alpha=1.1),
        plain=dict(attention_bias=False, num_local_experts=1, num_experts_per_tok=1),
    ),
    "glm4_moe": {
        name: {
            **case,
            "rope_parameters": {
                "partial_rotary_factor": 0.5,
                **case.get("rope_parameters", DEFAULT),
            },
        }
        for name, case in _experts(
            {**_QWEN, "head_dim": 16},
            "n_routed_experts",
            "all-keys",
            *_ANY[3:],
            sparse=dict(first_k_dense_replace=0, tie_word_embeddings=True),
            dense=dict(first_k_dense_replace=3),
            groups=dict(
                n_routed_experts=6,
                n_group=3,
                topk_group=2,
                num_experts_per_tok=3,
                n_shared_experts=2,
            ),
            normed=dict(
                use_qk_norm=True,
                norm_topk_prob=False,
                routed_scaling_factor=2.5,
                attention_bias=True,
            ),
        ).items()
    },
}
_GROUPS = dict(
    n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
)
_GRANITE = dict(
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    logits_scaling=3.0,
    attention_multiplier=0.1,
)
# Whole heads, as transformers' configs want them.
_EVEN = dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, head_dim=8)
FAMILY_CASES |= {
    "granite_swa": {
        **{
            name: {**_EVEN, **_GRANITE, "sliding_window": 6, **shape}
            for name, shape in _shapes(*EIGHT, drop=("head_dim",)).items()
        },
        "odd": dict(SHAPES["odd"], sliding_window=4),
        "thetas": dict(
            **_EVEN,
            **_GRANITE,
            sliding_window=5,
            layer_types=[FULL, SLIDING, SLIDING],
            layer_rope_theta=[500.0, 10000.0, 10000.0],
        ),
        "no-rope": dict(
            **_EVEN,
            **BIASED,
            **WINDOWS["window"],
            layer_rope_theta=[10000.0, 0, 10000.0],
            tie_word_embeddings=False,
        ),
        "full": dict(_EVEN, layer_types=[FULL] * 3, layer_rope_theta=[77.0, 0, 77.0]),
    },
    "hyperclovax": {
        name: {**_EVEN, **_GRANITE, "attention_multiplier": None, **shape}
        for name, shape in {
            **_shapes(*EIGHT),
            "biases": dict(BIASED, attention_multiplier=0.3),
            "pre": dict(use_post_norm=False, mlp_bias=True, logits_scaling=0.7),
        }.items()
    },
    "mellum": _experts(
        {**_QWEN, "norm_topk_prob": True, "head_dim": 16},
        "num_experts",
        "one-key",
        "all-keys",
        "untied",
        "gelu",
        tied=dict(tie_word_embeddings=True, num_hidden_layers=1, mlp_layer_types=["sparse"]),
        window=dict(
            WINDOWS["window"], rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT)
        ),
        slide=dict(WINDOWS["all-slide"], attention_bias=True),
        ropes=dict(
            sliding_window=5,
            layer_types=[SLIDING, FULL, SLIDING],
            rope_parameters=dict(full_attention=LLAMA3, sliding_attention=LINEAR),
        ),
        mixed=dict(mlp_layer_types=["sparse", "dense", "sparse"], norm_topk_prob=False),
    ),
    "minimax_m2": _experts(
        {},
        "num_local_experts",
        "one-key",
        "all-keys",
        "tied",
        "untied",
        "gelu",
        half=dict(rope_parameters=dict(DEFAULT, partial_rotary_factor=0.5)),
        legacy=dict(rotary_dim=8, rope_parameters=DEFAULT),
        linear=dict(rope_parameters=LINEAR),
        half_yarn=dict(rope_parameters=dict(YARN, partial_rotary_factor=0.5)),
        all=dict(num_experts_per_tok=5),
    ),
    "flex_olmo": _experts(
        {},
        "num_experts",
        "one-key",
        "all-keys",
        "tied",
        "untied",
        "linear",
        "yarn",
        "gelu",
        "dynamic",
        normed=dict(norm_topk_prob=True, attention_bias=True),
    ),
    "dots1": _experts(
        {**_QWEN, "head_dim": 16, "n_shared_experts": 1},
        "n_routed_experts",
        "one-key",
        "all-keys",
        "tied",
        "untied",
        "llama3",
        "gelu",
        dense=dict(first_k_dense_replace=3),
        groups=dict(_GROUPS, norm_topk_prob=True, routed_scaling_factor=2.5),
        window=dict(WINDOWS["window"], first_k_dense_replace=1, attention_bias=True),
        last=dict(sliding_window=4, max_window_layers=1),
    ),
    "exaone_moe": _experts(
        {**_QWEN, "head_dim": 16, "sliding_window": 6},
        "num_experts",
        "one-key",
        "all-keys",
        "untied",
        "yarn",
        tied=dict(tie_word_embeddings=True, num_hidden_layers=1, first_k_dense_replace=0),
        dense=dict(mlp_layer_types=["dense"] * 3, sliding_window_pattern=2),
        mixed=dict(mlp_layer_types=["sparse", "dense", "sparse"], num_shared_experts=2),
        groups=dict(
            num_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, norm_topk_prob=False
        ),
        window=dict(WINDOWS["window"], routed_scaling_factor=1.0),
        no_rope=dict(layer_types=[FULL] * 3, first_k_dense_replace=2),
    ),
    "solar_open": _experts(
        {**_QWEN, "head_dim": 16},
        "n_routed_experts",
        "one-key",
        "all-keys",
        "tied",
        "untied",
        "linear",
        "yarn",
        "gelu",
        groups=dict(_GROUPS, routed_scaling_factor=2.5, attention_bias=True),
        unnormed=dict(norm_topk_prob=False),
    ),
    "ernie4_5_moe": _experts(
        {"moe_intermediate_size": 20, **_EVEN, "tie_word_embeddings": False},
        "moe_num_experts",
        "one-key",
        "all-keys",
        "tied",
        "linear",
        "llama3",
        "gelu",
        none=dict(moe_num_shared_experts=0, moe_layer_start_index=0),
        interval=dict(moe_layer_interval=2, moe_num_shared_experts=1),
        middle=dict(moe_layer_start_index=1, moe_layer_end_index=1),
        dense=dict(moe_layer_start_index=3),
    ),
    "sarvam_mla": {
        name: {**case, "num_key_value_heads": case.get("num_attention_heads", 6)}
        for name, case in _LATENT.items()
    },
    "mistral4": {
        name: {**case, "rope_parameters": {**YARN, **SCALED, **case.get("rope_parameters", {})}}
        for name, case in _LATENT.items()
        if name != "dense"
    },
    "youtu": {
        name: {key: value for key, value in case.items() if key not in _NOT_YOUTU}
        for name, case in _LATENT.items()
        if name not in ("groups", "one", "all", "dense")
    }
    | {
        "untied": dict(_DENSE_LATENT, tie_word_embeddings=False),
        "linear": dict(_DENSE_LATENT, rope_parameters=LINEAR),
    },
}
for case in FAMILY_CASES["ernie4_5_moe"].values():
    case["moe_k"] = case.pop("num_experts_per_tok")
_GEMMA4 = dict(
    hidden_size_per_layer_input=0,
    head_dim=8,
    global_head_dim=16,
    sliding_window=6,
    num_hidden_layers=3,
)
_GEMMA4 |= dict(layer_types=[SLIDING, SLIDING, FULL])
FAMILY_CASES["gemma4_text"] = {
    name: {**_GEMMA4, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=10,
            global_head_dim=6,
            hidden_size=30,
        ),
        one=dict(attention_k_eq_v=True, num_global_key_value_heads=1, tie_word_embeddings=False),
        shared=dict(attention_k_eq_v=True, attention_bias=True),
        unused=dict(num_global_key_value_heads=1),
        untied=dict(tie_word_embeddings=False, final_logit_softcapping=2.0),
        wide=dict(
            head_dim=16,
            global_head_dim=512,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        ),
        same=dict(global_head_dim=8, layer_types=[FULL, SLIDING, SLIDING]),
        full=dict(layer_types=[FULL] * 3, attention_k_eq_v=True),
        single=dict(num_hidden_layers=1, layer_types=[FULL]),
        ropes=dict(rope_parameters=dict(full_attention=LINEAR, sliding_attention=LLAMA3)),
        share=dict(
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="proportional",
                    partial_rotary_factor=0.6,
                    rope_theta=500.0,
                    factor=2.0,
                ),
                sliding_attention=DEFAULT,
            ),
            hidden_activation="silu",
        ),
    ).items()
}
GEMMA4_DENSE = dict(FAMILY_CASES["gemma4_text"])
FAMILY_CASES["gemma4_text"] |= {
    f"experts-{name}": {
        **GEMMA4_DENSE[name],
        **dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=20),
        **case,
    }
    for name, case in dict(
        plain=dict(intermediate_size=28),
        one=dict(top_k_experts=1),
        shared=dict(top_k_experts=5),
        untied=dict(num_experts=7, top_k_experts=5),
        single={},
        ropes=dict(num_experts=3),
        share=dict(num_experts=1, top_k_experts=1),
        wide=dict(num_attention_heads=6, num_key_value_heads=2),
        full=dict(moe_intermediate_size=4),
        same={},
    ).items()
}
FAMILY_CASES["gemma4_unified_text"] = {
    name: {key: value for key, value in case.items() if key != "hidden_size_per_layer_input"}
    for name, case in GEMMA4_DENSE.items()
}
# Gemma 4 E2B and E4B: inputs per layer, and last layers with the keys of earlier ones.
_SMALL_GEMMA4: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    global_head_dim=12,
    sliding_window=5,
    num_hidden_layers=5,
    layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
    hidden_size_per_layer_input=12,
    vocab_size_per_layer_input=131,
)
FAMILY_CASES["gemma4_text"] |= {
    f"small-{name}": {**_SMALL_GEMMA4, **case}
    for name, case in dict(
        plain=dict(num_kv_shared_layers=3),
        wide=dict(num_kv_shared_layers=3, use_double_wide_mlp=True),
        inputs=dict(num_kv_shared_layers=0, vocab_size_per_layer_input=150),
        shared=dict(hidden_size_per_layer_input=5, num_kv_shared_layers=2, attention_bias=True),
        values=dict(num_kv_shared_layers=3, attention_k_eq_v=True, num_global_key_value_heads=1),
        untied=dict(num_kv_shared_layers=1, tie_word_embeddings=False, hidden_activation="silu"),
        full=dict(layer_types=[FULL] * 5, num_kv_shared_layers=4),
        odd=dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=10,
            global_head_dim=6,
            hidden_size=30,
            hidden_size_per_layer_input=7,
            num_kv_shared_layers=3,
        ),
        ropes=dict(
            num_kv_shared_layers=3,
            rope_parameters=dict(full_attention=LINEAR, sliding_attention=LLAMA3),
        ),
        window=dict(sliding_window=3, num_kv_shared_layers=3, final_logit_softcapping=30.0),
    ).items()
}
FAMILY_CASES["hunyuan_v1_dense"] = {
    **_shapes(*EIGHT),
    "biases": dict(attention_bias=True, head_dim=16),
    "alpha": dict(
        rope_parameters=dict(rope_type="dynamic", factor=1.0, alpha=50.0, rope_theta=1000.0)
    ),
}
FAMILY_CASES["granitemoe_swa"] = _experts(
    {**_EVEN, **_GRANITE, "sliding_window": 6},
    "num_local_experts",
    "one-key",
    "all-keys",
    "untied",
    "llama3",
    "gelu",
    tied=dict(tie_word_embeddings=True, shared_intermediate_size=20),
    shared=dict(shared_intermediate_size=28, attention_bias=True),
    thetas=dict(layer_types=[FULL, SLIDING, SLIDING], layer_rope_theta=[500.0, 10000.0, 10000.0]),
    no_rope=dict(
        **WINDOWS["window"], layer_rope_theta=[10000.0, 0, 10000.0], residual_multiplier=1.0
    ),
    full=dict(layer_types=[FULL] * 3),
)
FAMILY_CASES["hunyuan_v1_moe"] = {
    name: {key: value for key, value in case.items() if key != "num_experts_per_tok"}
    | {"moe_topk": case["num_experts_per_tok"]}
    for name, case in _experts(
        dict(head_dim=16),
        "num_experts",
        "one-key",
        "all-keys",
        "tied",
        "untied",
        "linear",
        "yarn",
        "gelu",
        biases=dict(attention_bias=True),
        alpha=FAMILY_CASES["hunyuan_v1_dense"]["alpha"],
    ).items()
}
FAMILY_CASES["hunyuan_v1_moe"]["list"] = dict(num_experts=4, moe_topk=[2, 2, 2], head_dim=16)
FAMILY_CASES["glm4_moe_lite"] = {
    name: {key: value for key, value in case.items() if key != "first_k_dense_replace"} | more
    for name, case in _LATENT.items()
    for more in [dict(mlp_layer_types=MIXED[name]) if name in MIXED else {}]
}
FAMILY_CASES["axk1"] = {
    name: {**case, **dict(q_lora_rank=case["q_lora_rank"] or 9)}
    for name, case in FAMILY_CASES["glm4_moe_lite"].items()
}
# transformers rotates complex numbers there, which are views of an even stride only.
V2 = dict(groups=dict(topk_method="group_limited_greedy"), odd=dict(kv_lora_rank=6))
V2 |= dict(tied=dict(n_group=5, topk_group=1))  # which its method ignores
FAMILY_CASES["deepseek_v2"] = {
    name: {
        key: value
        for key, value in case.items()
        if key not in ("norm_topk_prob", "rope_interleave")
    }
    | more
    for name, case in _LATENT.items()
    for more in [V2.get(name, {})]
}
FULL_LAST = ["conv", "conv", FULL]
_LFM2 = dict(layer_types=["conv", FULL, "conv"], block_auto_adjust_ff_dim=False)
_LFM2_SHAPES = _shapes(
    "odd", "one-key", "all-keys", "linear", "llama3", "yarn", "dynamic", drop=("hidden_act",)
)
FAMILY_CASES["lfm2"] = {
    **{name: {**_LFM2, **shape} for name, shape in _LFM2_SHAPES.items()},
    "tied": dict(num_hidden_layers=2, layer_types=["conv", FULL], block_auto_adjust_ff_dim=False),
    "untied": dict(**_LFM2, tie_word_embeddings=False, norm_eps=1e-6, conv_L_cache=5),
    "biases": dict(**_LFM2, conv_bias=True, conv_L_cache=2),
    "adjusted": dict(full_attn_idxs=[1], block_multiple_of=7, block_ffn_dim_multiplier=1.3),
    "unadjusted": dict(layer_types=FULL_LAST, block_multiple_of=5, conv_L_cache=4),
    "attention": dict(block_multiple_of=8),
}
FAMILY_CASES["lfm2_moe"] = {
    **_experts(
        dict(layer_types=["conv", FULL, "conv"], moe_intermediate_size=20, num_dense_layers=1),
        "num_experts",
        "one-key",
        "all-keys",
        "linear",
        "yarn",
        tied=dict(num_hidden_layers=2, layer_types=["conv", FULL], num_dense_layers=0),
        untied=dict(tie_word_embeddings=False, norm_eps=1e-6, conv_L_cache=5),
        biases=dict(conv_bias=True, conv_L_cache=2),
        unbiased=dict(use_expert_bias=False, routed_scaling_factor=2.5),
        unnormed=dict(norm_topk_prob=False, layer_types=FULL_LAST, num_dense_layers=0),
        dense=dict(num_dense_layers=3),
        attention=dict(layer_types=[FULL] * 3),
    ),
}
LINEAR_LAYER = "linear_attention"
_MAMBA: dict[str, Any] = dict(
    mamba_n_heads=4,
    mamba_d_head=24,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_expand=2,
    layer_types=[LINEAR_LAYER, FULL, LINEAR_LAYER],
)
_GRANITE4: dict[str, Any] = dict(
    **_MAMBA,
    shared_intermediate_size=28,
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    logits_scaling=3.0,
    attention_multiplier=0.1,
)
FAMILY_CASES["granitemoehybrid"] = {
    **_experts(
        _GRANITE4,
        "num_local_experts",
        "one-key",
        "untied",
        odd=dict(
            hidden_size=36,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=12,
            intermediate_size=28,
            mamba_n_heads=6,
            mamba_d_head="auto",
            mamba_n_groups=3,
            mamba_d_conv=3,
        ),
        rope=dict(position_embedding_type="rope", rope_parameters=LLAMA3),
        biases=dict(mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True),
        gelu=dict(hidden_act="gelu", tie_word_embeddings=True),
        limits=dict(time_step_limit=(0.01, 0.3), mamba_n_groups=1),
        attention=dict(layer_types=[FULL] * 3, position_embedding_type="rope"),
        dense=dict(num_local_experts=0),
        dense_attention=dict(num_local_experts=0, layer_types=[FULL] * 3),
    ),
}
_KIMI = {key: value for key, value in LATENT_SIZES.items() if key != "first_k_dense_replace"}
_KIMI |= dict(
    linear_num_heads=3,
    linear_head_dim=10,
    layer_types=[LINEAR_LAYER, FULL, LINEAR_LAYER],
    mlp_layer_types=["dense", "sparse", "sparse"],
    q_lora_rank=None,
)
_KIMI["num_experts"] = _KIMI.pop("n_routed_experts")
FAMILY_CASES["kimi_linear"] = {
    name: {**_KIMI, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            hidden_size=36,
            kv_lora_rank=7,
            linear_num_heads=5,
        ),
        latent=dict(q_lora_rank=5, attention_bias=True, v_head_dim=24),
        groups=dict(
            num_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
        ),
        one=dict(num_experts_per_tok=1, norm_topk_prob=False, linear_conv_kernel_dim=2),
        all=dict(num_experts_per_tok=5, routed_scaling_factor=1.0, mlp_layer_types=["sparse"] * 3),
        two=dict(
            num_hidden_layers=2,
            layer_types=[LINEAR_LAYER, FULL],
            mlp_layer_types=["dense", "sparse"],
        ),
        gelu=dict(hidden_act="gelu"),
        attention=dict(layer_types=[FULL] * 3),
        numbered=dict(layer_types=None, num_hidden_layers=6, mlp_layer_types=None, v_head_dim=20),
        dense=dict(mlp_layer_types=["dense"] * 3, layer_types=[LINEAR_LAYER, LINEAR_LAYER, FULL]),
    ).items()
}
_LING = {
    key: value
    for key, value in LATENT_SIZES.items()
    if key not in ("first_k_dense_replace", "n_routed_experts")
}
_LING |= dict(
    num_experts=5,
    q_lora_rank=None,
    head_dim=10,
    layer_types=[LINEAR_LAYER, FULL, LINEAR_LAYER],
    mlp_layer_types=["dense", "sparse", "sparse"],
)
FAMILY_CASES["bailing_hybrid"] = {
    name: {**_LING, **case}
    for name, case in dict(
        plain={},
        odd=dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=36, kv_lora_rank=7),
        latent=dict(q_lora_rank=5, v_head_dim=24),
        groups=dict(
            num_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
        ),
        one=dict(num_experts_per_tok=1, norm_topk_prob=False, short_conv_kernel_size=2),
        all=dict(num_experts_per_tok=5, routed_scaling_factor=1.0, mlp_layer_types=["sparse"] * 3),
        unsafe=dict(kda_safe_gate=False, head_dim=16),
        bound=dict(kda_lower_bound=-2.5, v_head_dim=20),
        gelu=dict(hidden_act="gelu", rope_theta=500.0),
        attention=dict(layer_types=[FULL] * 3),
        yarn=dict(rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}),
        groups_of_layers=dict(layer_types=None, layer_group_size=2, num_hidden_layers=4)
        | dict(mlp_layer_types=None, first_k_dense_replace=1),
    ).items()
}
_NEMOTRON = dict(
    layers_block_type=[LINEAR_LAYER, "moe", FULL, "mlp"],
    ssm_state_size=10,
    mamba_num_heads=4,
    mamba_head_dim=12,
    n_groups=2,
    n_routed_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    moe_shared_expert_intermediate_size=28,
    time_step_min=1e-6,
)
FAMILY_CASES["nemotron_h"] = {
    name: {**_NEMOTRON, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            hidden_size=36,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=12,
            mamba_num_heads=6,
            mamba_head_dim=10,
            n_groups=3,
            conv_kernel=3,
        ),
        latent=dict(moe_latent_size=24),
        groups=dict(
            n_routed_experts=6,
            n_group=3,
            topk_group=2,
            num_experts_per_tok=3,
            routed_scaling_factor=2.5,
        ),
        one=dict(
            num_experts_per_tok=1, norm_topk_prob=False, num_key_value_heads=1, moe_latent_size=16
        ),
        all=dict(num_experts_per_tok=5, layers_block_type=["moe", LINEAR_LAYER, "moe", FULL]),
        dense=dict(layers_block_type=[LINEAR_LAYER, "mlp", FULL, "mlp"], mlp_bias=True),
        biases=dict(
            use_bias=True, use_conv_bias=False, layers_block_type=[LINEAR_LAYER, "mlp", FULL]
        ),
        silu=dict(mlp_hidden_act="silu", mamba_hidden_act="gelu", n_groups=1),
        mamba=dict(layers_block_type=[LINEAR_LAYER, "mlp", LINEAR_LAYER, FULL, LINEAR_LAYER]),
        steps=dict(time_step_min=0.01),
    ).items()
}
_LFM3_ROPES = dict(
    full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.5),
    sliding_attention=DEFAULT,
)
_LFM3 = dict(layer_types=["conv", FULL, SLIDING], sliding_window=5, rope_parameters=_LFM3_ROPES)
FAMILY_CASES["lfm3"] = {
    name: {**_LFM3, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=12,
            hidden_size=30,
            intermediate_size=17,
        ),
        one_key=dict(num_key_value_heads=1, head_dim=8),
        ungated=dict(use_attention_gate=False, conv_L_cache=3),
        pre=dict(use_sandwich_norm=False, layer_types=[SLIDING, "conv", FULL]),
        biases=dict(conv_bias=True, conv_L_cache=2),
        untied=dict(tie_word_embeddings=False, norm_eps=1e-6, sliding_window=3),
        ropes=dict(rope_parameters=dict(full_attention=LLAMA3, sliding_attention=LINEAR)),
        whole=dict(rope_parameters=dict(full_attention=DEFAULT, sliding_attention=DEFAULT)),
        attention=dict(layer_types=[FULL, FULL, SLIDING]),
        turns=dict(layer_types=None, num_hidden_layers=6),
    ).items()
}
# Heads that fill the width.
_FILLED = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16)
_FILLED_SHAPES = {
    name: {**_FILLED, **shape, "head_dim": 16}
    for name, shape in _shapes(
        "tied", "untied", "linear", "yarn", "dynamic", "gelu", drop=("head_dim",)
    ).items()
}
FAMILY_CASES["helium"] = {
    **_FILLED_SHAPES,
    "odd": SHAPES["odd"],
    "one-key": dict(head_dim=8, num_key_value_heads=1),
    "all-keys": SHAPES["all-keys"],
    "biases": dict(_FILLED, **BIASED),
}
FAMILY_CASES["exaone"] = {
    **{
        name: {**_EVEN, **shape}
        for name, shape in _shapes(*EIGHT, "dynamic", drop=("head_dim",)).items()
    },
    "odd": SHAPES["odd"],
    "biases": dict(_EVEN, **BIASED),
    "relu2": dict(_EVEN, hidden_act="relu2", rope_parameters=LLAMA3),
}
FAMILY_CASES["minicpm3"] = {
    name: {**_DENSE_LATENT, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            hidden_size=36,
            kv_lora_rank=7,
            q_lora_rank=5,
        ),
        direct=dict(q_lora_rank=None, v_head_dim=24),
        filled=dict(v_head_dim=None, dim_model_base=32),
        scales=dict(scale_emb=2.5, scale_depth=0.7, dim_model_base=11),
        unscaled=dict(scale_emb=1, scale_depth=None, dim_model_base=None),
        untied=dict(tie_word_embeddings=False, num_hidden_layers=2),
        biases=dict(attention_bias=True, hidden_act="gelu"),
        yarn=dict(rope_parameters=YARN),
        linear=dict(rope_parameters=LINEAR, num_hidden_layers=5),
    ).items()
}
FAMILY_CASES["vaultgemma"] = FAMILY_CASES["gemma2"]
FAMILY_CASES["sarvam_moe"] = _experts(
    dict(moe_intermediate_size=20, **_EVEN),
    "n_routed_experts",
    *_ANY,
    groups=_GROUPS,
    biases=dict(attention_bias=True, use_qk_norm=False, first_k_dense_replace=0),
    half=dict(partial_rotary_factor=0.5, norm_topk_prob=False),
    dense=dict(first_k_dense_replace=3),
)
FAMILY_CASES["granitemoe"] = _experts(
    {**_EVEN, **_GRANITE},
    "num_local_experts",
    *_ANY,
    biases=dict(attention_bias=True, residual_multiplier=1.0),
)
FAMILY_CASES["granitemoeshared"] = _experts(
    {**_EVEN, **_GRANITE, "shared_intermediate_size": 28},
    "num_local_experts",
    *_ANY,
    biases=dict(attention_bias=True, shared_intermediate_size=0),
)
FAMILY_CASES["hy_v3"] = _experts(
    dict(moe_intermediate_size=20),
    "num_experts",
    *_ANY,
    mixed=dict(mlp_layer_types=MIXED["plain"], num_shared_experts=2),
    scaled=dict(router_scaling_factor=1.0, enable_moe_fp32_combine=False, attention_bias=True),
    dense=dict(mlp_layer_types=MIXED["dense"]),
)
FAMILY_CASES["flint"] = _experts(
    dict(moe_intermediate_size=20, shared_expert_intermediate_size=28, sliding_window=6)
    | dict(layer_types=[FULL, SLIDING, SLIDING], mlp_only_layers=[0]),
    "num_experts",
    "one-key",
    "all-keys",
    "untied",
    "linear",
    "llama3",
    "gelu",
    tied=dict(tie_word_embeddings=True, layer_types=[SLIDING] * 3),
    full=dict(layer_types=[FULL] * 3, attention_bias=True),
    normed=dict(norm_topk_prob=False, mlp_only_layers=[]),
    default=dict(layer_types=None, mlp_only_layers=None, num_hidden_layers=4),
)
FAMILY_CASES["bamba"] = {
    name: {**_MAMBA, "attn_layer_indices": [1], **case}
    for name, case in dict(
        plain={},
        odd=dict(
            hidden_size=36,
            num_attention_heads=3,
            num_key_value_heads=3,
            mamba_n_heads=6,
            mamba_d_head="auto",
            mamba_n_groups=3,
            mamba_d_conv=3,
        ),
        one_key=dict(num_key_value_heads=1),
        biases=dict(mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True),
        mlp_bias=dict(mlp_bias=True, tie_word_embeddings=True),
        gelu=dict(hidden_act="gelu", rms_norm_eps=1e-6),
        limits=dict(time_step_limit=(0.01, 0.3), mamba_n_groups=1),
        linear=dict(rope_parameters=LINEAR),
        theta=dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        ends=dict(attn_layer_indices=[0, 2]),
        two=dict(num_hidden_layers=2, tie_word_embeddings=True),
    ).items()
}
for _case in FAMILY_CASES["bamba"].values():
    _case.pop("layer_types")
_COHERE_SHAPES = {
    name: {**shape, "logit_scale": 0.3}
    for name, shape in _shapes(
        "odd", "all-keys", "tied", "linear", "llama3", "yarn", "dynamic", "gelu", drop=("head_dim",)
    ).items()
}
FAMILY_CASES["cohere"] = {
    **_COHERE_SHAPES,
    "one-key": dict(num_key_value_heads=1),
    "untied": dict(tie_word_embeddings=False, layer_norm_eps=1e-3, logit_scale=0.0625),
    "biases": dict(attention_bias=True, logit_scale=1.7),
    "wide": dict(head_dim=14, num_attention_heads=5, num_key_value_heads=1),
}
FAMILY_CASES["cohere2"] = {
    **{
        name: {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING], **shape}
        for name, shape in _COHERE_SHAPES.items()
        if name != "tied"
    },
    "tied": dict(num_hidden_layers=1, layer_types=[SLIDING], sliding_window=3),
    "one-key": dict(num_key_value_heads=1, num_hidden_layers=5, sliding_window=5),
    "untied": dict(tie_word_embeddings=False, layer_norm_eps=1e-3, sliding_window=6),
    "biases": dict(attention_bias=True, layer_types=[FULL, SLIDING, SLIDING], sliding_window=4),
    "full": dict(layer_types=[FULL] * 3),
    "slide": dict(layer_types=[SLIDING] * 3, sliding_window=4),
    "wide": dict(head_dim=14, num_attention_heads=5, num_key_value_heads=1),
}
_FALCON = {
    key: value for key, value in _MAMBA.items() if key not in ("layer_types", "mamba_expand")
}
_FALCON |= dict(
    mamba_d_ssm=96,
    key_multiplier=0.7,
    embedding_multiplier=3.3,
    lm_head_multiplier=0.3,
    mlp_multipliers=[0.8, 1.7],
    attention_in_multiplier=0.9,
    attention_out_multiplier=1.3,
    ssm_in_multiplier=1.2,
    ssm_out_multiplier=0.6,
    ssm_multipliers=[0.7, 0.9, 0.4, 1.3, 1.1],
)
FAMILY_CASES["falcon_h1"] = {
    name: {**_FALCON, **case}
    for name, case in dict(
        plain={},
        odd=dict(
            hidden_size=30,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=10,
            intermediate_size=17,
            mamba_d_ssm=42,
            mamba_n_heads=6,
            mamba_d_head="auto",
            mamba_n_groups=3,
            mamba_d_conv=3,
        ),
        one_key=dict(num_key_value_heads=1, mamba_rms_norm=True, mamba_norm_before_gate=False),
        normed=dict(mamba_rms_norm=True, tie_word_embeddings=True, num_hidden_layers=1),
        biases=dict(
            mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True, mlp_bias=True
        ),
        out_bias=dict(projectors_bias=True, hidden_act="gelu", rms_norm_eps=1e-6),
        limits=dict(time_step_limit=(0.01, 0.3), mamba_n_groups=1, mamba_rms_norm=True),
        expanded=dict(mamba_d_ssm=None, mamba_expand=2, rope_parameters=LINEAR),
        theta=dict(
            rope_parameters=dict(rope_type="default", rope_theta=500.0), num_hidden_layers=2
        ),
        unscaled=dict(
            key_multiplier=1.0,
            embedding_multiplier=1.0,
            lm_head_multiplier=1.0,
            mlp_multipliers=None,
            attention_in_multiplier=1.0,
            attention_out_multiplier=1.0,
            ssm_in_multiplier=1.0,
            ssm_out_multiplier=1.0,
            ssm_multipliers=None,
        ),
    ).items()
}
CHUNKED = "chunked_attention"
_LLAMA4: dict[str, Any] = dict(
    intermediate_size=20,
    intermediate_size_mlp=28,
    attention_chunk_size=5,
    no_rope_layers=[1, 0, 1],
    floor_scale=4,
    attn_scale=0.3,
    moe_layers=[1, 2],
)
FAMILY_CASES["llama4_text"] = {
    name: {"head_dim": 16, **case}
    for name, case in _experts(
        _LLAMA4,
        "num_local_experts",
        "one-key",
        "all-keys",
        "tied",
        "linear",
        "llama3",
        "yarn",
        "gelu",
        interleaved=dict(moe_layers=None, interleave_moe_layer_step=2, num_hidden_layers=5)
        | dict(no_rope_layers=None, no_rope_layer_interval=3),
        dense=dict(moe_layers=[], num_local_experts=2, num_experts_per_tok=1),
        sparse=dict(moe_layers=None, attn_temperature_tuning=False, use_qk_norm=False),
        whole=dict(attention_chunk_size=None, attention_bias=True, floor_scale=3),
        types=dict(layer_types=[FULL, CHUNKED, CHUNKED], attention_chunk_size=4),
        no_rope=dict(no_rope_layers=[0, 0, 0], layer_types=[CHUNKED, FULL, FULL], floor_scale=7),
    ).items()
}
FAMILY_CASES["llama4_text"]["odd"] |= dict(intermediate_size=12, intermediate_size_mlp=20)
FAMILY_CASES["llama4_text"]["tied"] |= dict(no_rope_layers=[1], moe_layers=[0])
CASES = {
    f"{family}-{name}": (family, case)
    for family, cases in FAMILY_CASES.items()
    for name, case in cases.items()
}


def make_config(case: str) -> Any:
    """The transformers config of a case."""
    import transformers  # noqa: PLC0415  takes seconds, and only some tests need it

    family, changes = CASES[case]
    fields = copy.deepcopy({**SIZES, **changes})  # transformers changes what it is given
    if family == "nemotron_h":
        del fields["num_hidden_layers"]
        fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    if family in ("lfm2", "lfm2_moe", "lfm3"):
        fields.setdefault("norm_eps", fields.pop("rms_norm_eps"))
    if family in ("cohere", "cohere2"):
        fields.setdefault("layer_norm_eps", fields.pop("rms_norm_eps"))
        if "head_dim" not in changes:  # then heads fill the width
            del fields["head_dim"]
    if family in ("phi3", "mistral4"):  # take no other head_dim
        del fields["head_dim"]
    if family == "cwm":
        fields["bos_token_id"] = 1
    if family == "laguna":
        fields.setdefault("rope_parameters", _laguna({**HALF, "rope_type": "default"}))
        fields["mlp_layer_types"] = fields["mlp_layer_types"][: fields["num_hidden_layers"]]
    return transformers.AutoConfig.for_model(family, **fields)
