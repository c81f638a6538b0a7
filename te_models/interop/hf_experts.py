"""Experts in config.json: parts of the rows of hf_families that mixtures of experts have. No torch.

Facts: the configuration and modeling files of transformers 5.23.
"""

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError, field_values
from te_models.interop.hf_expert_keys import experts
from te_models.interop.hf_expert_layouts import (
    ALL_SPARSE,
    AXK1_LAYOUT,
    FIRST_DENSE,
    SPARSE_TYPES,
    STEPS,
    TYPES,
    TYPES_OR_FIRST,
    Layout,
    first_dense,
    read_ernie_layout,
    write_ernie_layout,
)
from te_models.interop.hf_parts import ConfigKeys, Fields, Values, renamed
from te_models.interop.hf_step_parts import modern_step


def aliased(part: ConfigKeys, **aliases: str) -> ConfigKeys:
    """Return a part whose keys, alias=key, have other names that transformers reads as the same."""

    def read(theirs: Values) -> Fields:
        renamed = {aliases[name]: theirs[name] for name in aliases if name in theirs}
        return part.read({**theirs, **renamed})

    return ConfigKeys((*part.keys, *aliases), read, part.write)


_CHOSEN = {"num_experts_per_tok": "num_experts_per_tok"}
_LOSS = {"router_aux_loss_coef": "router_aux_loss_coef"}
_NORMED = {"norm_topk_prob": "norm_topk_prob"}
_SIZE = {"moe_intermediate_size": "moe_intermediate_size"}
_SAME_SIZE = {"moe_intermediate_size": "intermediate_size"}  # which dense layers would have
_SHARED = {"shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_QWEN = {**_CHOSEN, **_LOSS, **_NORMED, **_SIZE}
QWEN3_EXPERTS = experts(STEPS, _QWEN, without={})
QWEN3_VL_EXPERTS = experts(STEPS, {**_CHOSEN, **_LOSS, **_SIZE}, without={}, norm_topk_prob=True)
QWEN2_EXPERTS = experts(STEPS, {**_QWEN, **_SHARED}, without={}, shared_expert_gate=True)
MIXTRAL_EXPERTS = experts(
    ALL_SPARSE,
    {**_CHOSEN, **_LOSS, **_SAME_SIZE, "router_jitter_noise": "router_jitter_noise"},
    number="num_local_experts",
)
GPT_OSS_EXPERTS = experts(
    ALL_SPARSE,
    {
        **_CHOSEN,
        **_LOSS,
        **_SAME_SIZE,
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
    },
    number="num_local_experts",
    bias=True,
)


def _read_llama4_layout(theirs: Values) -> list[bool]:
    """Read the layers with experts, or at which distance they have."""
    step = theirs["interleave_moe_layer_step"]
    listed = theirs.get("moe_layers")
    count = theirs["num_hidden_layers"]
    if listed is None:
        listed = range(step - 1, count, step)
    return [layer not in listed for layer in range(count)]


def _write_llama4_layout(dense: list[bool]) -> Fields:
    """Write the layers with experts as a list, which expresses every choice."""
    listed = []
    for layer, is_dense in enumerate(dense):
        if not is_dense:
            listed.append(layer)
    return {"moe_layers": listed}


LLAMA4_EXPERTS = experts(
    Layout(
        ("moe_layers", "interleave_moe_layer_step"),
        _read_llama4_layout,
        _write_llama4_layout,
    ),
    {**_CHOSEN, **_SAME_SIZE, "shared_expert_intermediate_size": "intermediate_size"},
    number="num_local_experts",
    without={},
    router_scores="sigmoid",
    norm_topk_prob=False,
    scale_inputs=True,
    router_aux_loss_coef=0.0,
)
OLMOE_EXPERTS = experts(ALL_SPARSE, {**_CHOSEN, **_LOSS, **_NORMED, **_SAME_SIZE})
MELLUM_EXPERTS = experts(SPARSE_TYPES, _QWEN, without={})
_SIGMOID: Fields = dict(router_scores="sigmoid", expert_bias=True)
_GROUPED = {
    **_CHOSEN,
    **_NORMED,
    **_SIZE,
    **{key: key for key in ("routed_scaling_factor", "n_group", "topk_group")},
}
_DEEPSEEK: Fields = dict(number="n_routed_experts", shared_count="n_shared_experts", **_SIGMOID)
_DEEPSEEK |= dict(router_fp32=True, router_aux_loss_coef=0.0)
DEEPSEEK_EXPERTS = experts(FIRST_DENSE, _GROUPED, without={}, **_DEEPSEEK)
_MISTRAL4: Fields = {
    **_DEEPSEEK,
    "router_scores": "softmax",
    "expert_bias": False,
    "router_fp32": False,
}
MISTRAL4_EXPERTS = experts(FIRST_DENSE, _GROUPED, without={}, **_MISTRAL4)
_V2: Fields = {
    **_DEEPSEEK,
    "router_scores": "softmax",
    "expert_bias": False,
    "norm_topk_prob": False,
}
# V2's files have the key norm_topk_prob, and its code ignores it: the constant in _V2 stands for what it computes.
_UNNORMED = {ours: key for ours, key in _GROUPED.items() if ours != "norm_topk_prob"}
_V2_EXPERTS = experts(FIRST_DENSE, _UNNORMED, without={}, group_scores=1, **_V2)


def _read_v2(theirs: Values) -> Fields:
    """Read the experts of DeepSeek-V2, whose groups mean nothing unless `topk_method` asks for them."""
    # "greedy" files still state n_group, for the code of other methods.
    if theirs["topk_method"] != "group_limited_greedy":
        theirs = {**theirs, "n_group": 1, "topk_group": 1}
    return _V2_EXPERTS.read(theirs)


def _write_v2(config: ModelConfig) -> Fields:
    grouped = config.moe is not None and config.moe.n_group > 1
    return {
        **_V2_EXPERTS.write(config),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


DEEPSEEK_V2_EXPERTS = ConfigKeys((*_V2_EXPERTS.keys, "topk_method"), _read_v2, _write_v2)
SOLAR_EXPERTS = experts(ALL_SPARSE, _GROUPED, **_DEEPSEEK)
_EXAONE: Fields = {**_DEEPSEEK, "number": "num_experts", "shared_count": "num_shared_experts"}
EXAONE_EXPERTS = experts(TYPES_OR_FIRST, _GROUPED, without={}, **_EXAONE)
AXK1_EXPERTS = experts(AXK1_LAYOUT, _GROUPED, without={}, output_norm=True, **_DEEPSEEK)
HY3_EXPERTS = experts(
    TYPES,
    {**_CHOSEN, **_SIZE, "routed_scaling_factor": "router_scaling_factor"},
    shared_count="num_shared_experts",
    without={},
    router_fp32=True,
    router_aux_loss_coef=0.0,
    **_SIGMOID,
)
FLINT_EXPERTS = experts(
    Layout(
        STEPS.keys,
        lambda theirs: STEPS.read({"mlp_only_layers": [0, 1], **theirs}),
        STEPS.write,
    ),
    {**_QWEN, **_SHARED},
    without={},
    router_scores="sigmoid",
    router_fp32=True,
)
SARVAM_EXPERTS = aliased(
    DEEPSEEK_EXPERTS, num_experts="n_routed_experts", num_shared_experts="n_shared_experts"
)
GLM_LITE_EXPERTS = experts(TYPES, _GROUPED, without={}, **_DEEPSEEK)
NEXT_EXPERTS = experts(
    STEPS, {**_QWEN, **_SHARED}, without={"num_experts": 0}, shared_expert_gate=True
)
QWEN3_5_EXPERTS = experts(
    ALL_SPARSE, {**_CHOSEN, **_LOSS, **_SIZE, **_SHARED}, shared_expert_gate=True
)
_GRANITE_HYBRID = experts(
    ALL_SPARSE,
    {
        **_CHOSEN,
        **_LOSS,
        **_SAME_SIZE,
        "shared_expert_intermediate_size": "shared_intermediate_size",
    },
    number="num_local_experts",
    without={"num_local_experts": 0},
)


def _read_granite_hybrid(theirs: Values) -> Fields:
    """Read the experts of Granite 4; without any, the shared expert is the MLP."""
    fields = _GRANITE_HYBRID.read(theirs)
    return fields or {"intermediate_size": theirs["shared_intermediate_size"]}


def _write_granite_hybrid(config: ModelConfig) -> Fields:
    dense_size = {} if config.moe else {"shared_intermediate_size": config.intermediate_size}
    return {**_GRANITE_HYBRID.write(config), **dense_size}


GRANITE_HYBRID_EXPERTS = ConfigKeys(
    _GRANITE_HYBRID.keys, _read_granite_hybrid, _write_granite_hybrid
)
_KIMI = {
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "moe_intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "routed_scaling_factor",
    "n_group": "num_expert_group",
    "topk_group": "topk_group",
}


def _kimi_types(theirs: Values) -> list[bool]:
    """Return which layers are dense, by default the first, or as many as `first_k_dense_replace` says."""
    types = theirs.get("mlp_layer_types")
    if types:
        return [kind == "dense" for kind in types]
    first = theirs.get("first_k_dense_replace", 1)
    return [layer < first for layer in range(theirs["num_hidden_layers"])]


KIMI_EXPERTS = aliased(
    experts(
        Layout(("mlp_layer_types", "first_k_dense_replace"), _kimi_types, TYPES.write),
        _KIMI,
        shared_count="num_shared_experts",
        without={},
        router_fp32=True,
        router_aux_loss_coef=0.0,
        **_SIGMOID,
    ),
    num_experts_per_tok="num_experts_per_token",
    norm_topk_prob="moe_renormalize",
    n_group="num_expert_group",
    n_shared_experts="num_shared_experts",
)
_NEMOTRON = {
    **_GROUPED,
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "latent_size": "moe_latent_size",
}


def _read_nemotron(theirs: Values) -> Fields:
    """Read the experts of Nemotron-H, if a layer has them; which ones is not in keys of experts."""
    if "moe" not in theirs["layers_block_type"]:
        return {}
    moe = {ours: theirs[key] for ours, key in _NEMOTRON.items() if key in theirs}
    constants: Fields = dict(router_fp32=True, router_aux_loss_coef=0.0, **_SIGMOID)
    return {"moe": {**constants, "num_experts": theirs["n_routed_experts"], **moe}}


def _write_nemotron(config: ModelConfig) -> Fields:
    if config.moe is None:
        return {}
    values = field_values(config.moe)
    return {
        "n_routed_experts": config.moe.num_experts,
        **{key: values[ours] for ours, key in _NEMOTRON.items()},
    }


NEMOTRON_EXPERTS = ConfigKeys(
    ("n_routed_experts", "n_shared_experts", *_NEMOTRON.values()), _read_nemotron, _write_nemotron
)
LFM2_EXPERTS = experts(
    first_dense("num_dense_layers"),
    {
        **_CHOSEN,
        **_NORMED,
        **_SIZE,
        "routed_scaling_factor": "routed_scaling_factor",
        "expert_bias": "use_expert_bias",
    },
    without={},
    router_scores="sigmoid",
    norm_topk_eps=1e-6,
    router_aux_loss_coef=0.0,
)
MINIMAX_EXPERTS = experts(
    ALL_SPARSE,
    {**_CHOSEN, **_LOSS, **_SAME_SIZE, "router_jitter_noise": "router_jitter_noise"},
    number="num_local_experts",
    **_SIGMOID,
)
_ERNIE = experts(
    Layout(
        ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        read_ernie_layout,
        write_ernie_layout,
    ),
    {"num_experts_per_tok": "moe_k", **_LOSS, **_SIZE},
    number="moe_num_experts",
    shared_count="moe_num_shared_experts",
    without={},
    router_fp32=True,
    expert_bias=True,
)
_GEMMA4 = experts(
    ALL_SPARSE,
    {"num_experts_per_tok": "top_k_experts", **_SIZE},
    without={"enable_moe_block": False},
    separate_norms=True,
    router_aux_loss_coef=0.0,
)


def _read_gemma4(theirs: Values) -> Fields:
    """Read experts beside an MLP, which is one for all tokens to us."""
    if not theirs.get("enable_moe_block"):
        return {}
    moe = _GEMMA4.read(theirs)["moe"]
    return {"moe": {**moe, "shared_expert_intermediate_size": theirs["intermediate_size"]}}


def _write_gemma4(config: ModelConfig) -> Fields:
    keys = _GEMMA4.write(config)
    if config.moe is None:
        return keys
    width = config.moe.shared_expert_intermediate_size
    return {**keys, "enable_moe_block": True, "intermediate_size": width}


GEMMA4_EXPERTS = ConfigKeys((*_GEMMA4.keys, "enable_moe_block"), _read_gemma4, _write_gemma4)
GRANITE_MOE_EXPERTS = experts(
    ALL_SPARSE, {**_CHOSEN, **_LOSS, **_SAME_SIZE}, number="num_local_experts"
)
GRANITE_SWA_EXPERTS = experts(
    ALL_SPARSE,
    {
        **_CHOSEN,
        **_LOSS,
        **_SAME_SIZE,
        "shared_expert_intermediate_size": "shared_intermediate_size",
    },
    number="num_local_experts",
)
_STEP = experts(
    TYPES,
    {
        **_CHOSEN,
        **_SIZE,
        "routed_scaling_factor": "moe_router_scaling_factor",
        "shared_expert_intermediate_size": "share_expert_dim",
    },
    number="n_routed_experts",
    without={},
    router_aux_loss_coef=0.0,
    **_SIGMOID,
)
STEP_EXPERTS = aliased(
    ConfigKeys(
        (*_STEP.keys, "moe_layers_enum"),
        lambda theirs: _STEP.read(modern_step(theirs)),
        _STEP.write,
    ),
    moe_num_experts="n_routed_experts",
    moe_top_k="num_experts_per_tok",
    share_expert_dims="share_expert_dim",
)
_HUNYUAN = experts(
    ALL_SPARSE,
    {"num_experts_per_tok": "moe_topk", **_SAME_SIZE},
    router_fp32=True,
    router_aux_loss_coef=0.0,
)


def _read_hunyuan(theirs: Values) -> Fields:
    """Read experts beside one for all tokens that is as wide; numbers may be given for each layer."""
    fields = dict(theirs)
    for key in ("num_experts", "moe_topk"):
        number = theirs.get(key, 1)
        numbers = set(number) if isinstance(number, list) else {number}
        if len(numbers) > 1:
            raise ConfigError(f"{key} that differs between layers is not supported")
        fields[key] = numbers.pop()
    moe = _HUNYUAN.read(fields)["moe"]
    moe["shared_expert_intermediate_size"] = moe["moe_intermediate_size"]
    return {"moe": moe}


HUNYUAN_EXPERTS = aliased(
    ConfigKeys(_HUNYUAN.keys, _read_hunyuan, _HUNYUAN.write), num_experts_per_tok="moe_topk"
)
ERNIE_EXPERTS = aliased(_ERNIE, num_experts_per_tok="moe_k")
AFMOE_EXPERTS = experts(
    first_dense("num_dense_layers"),
    {**_CHOSEN, **_SIZE, "routed_scaling_factor": "route_scale"},
    shared_count="num_shared_experts",
    without={},
    router_aux_loss_coef=0.0,
    **_SIGMOID,
)
LAGUNA_EXPERTS = experts(
    TYPES,
    {**_CHOSEN, **_LOSS, **_SIZE, **_SHARED, "routed_scaling_factor": "moe_routed_scaling_factor"},
    without={},
    **_SIGMOID,
)
# A family without dense layers need not give their width, which then means nothing.
NO_WIDTH = ConfigKeys(
    (),
    lambda theirs: {
        "intermediate_size": theirs["intermediate_size"] or theirs["moe_intermediate_size"]
    },
    lambda config: {},
)
QKV_BIAS = renamed(attention_bias="qkv_bias")
QK_NORM = renamed(qk_norm="use_qk_norm")
ALL_SLIDE_BY_FLAG = ConfigKeys(
    ("sliding_window", "use_sliding_window", "max_window_layers"),
    lambda theirs: {
        "sliding_window": theirs.get("sliding_window") if theirs.get("use_sliding_window") else None
    },
    lambda config: {
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    },
)
# Keys of the heads that predict later tokens, which are not read, and of what a forward pass returns.
IGNORED = frozenset(("output_router_logits", "num_nextn_predict_layers", "num_mtp_layers"))
