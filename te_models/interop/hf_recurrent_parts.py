"""Keys of config.json of convolutions and state spaces, for the rows of hf_recurrent_families. No torch.

Facts: the configuration and modeling files of transformers 5.24.
"""

from te_models.config.kda import KDAConfig
from te_models.config.model import ModelConfig
from te_models.config.short_conv import ShortConvConfig
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, Values
from te_models.interop.hf_window_parts import MELLUM_ROPE


def _read_convolutions(theirs: Values) -> Fields:
    """Read the kinds of layers, by default attention in `full_attn_idxs`, and the size of convolutions."""
    every = range(theirs["num_hidden_layers"])
    attention = theirs.get("full_attn_idxs")
    types = theirs.get("layer_types") or [
        "full_attention" if attention is None or layer in attention else "conv" for layer in every
    ]
    for kind in types:
        if kind not in ("conv", "full_attention"):
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported: te-models reads conv and full_attention"
            )
    # Sizes of convolutions that no layer has would make a config that differs from a plain model's.
    if "conv" not in types:
        return {}
    sizes = {"kernel_dim": theirs["conv_L_cache"], "bias": theirs["conv_bias"]}
    return {"layer_types": types, "short_conv": sizes}


def _write_convolutions(config: ModelConfig) -> Fields:
    sizes = config.short_conv or ShortConvConfig()
    types = list(config.layer_types or ["full_attention"] * config.num_hidden_layers)
    return {"layer_types": types, "conv_L_cache": sizes.kernel_dim, "conv_bias": sizes.bias}


def _read_adjusted_width(theirs: Values) -> Fields:
    """Read the width of LFM2's MLPs: two thirds of the width in the file, times a factor, rounded up to a multiple."""
    size = theirs.get("block_ff_dim", theirs["intermediate_size"])
    factor = theirs.get("block_ffn_dim_multiplier")
    multiple = theirs["block_multiple_of"]
    if theirs["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        # Only where the factor is there does their code round up; this order of truncations is theirs, and one more or
        # less changes the width.
        if factor is not None:
            size = multiple * -(-int(factor * size) // multiple)
    return {"intermediate_size": size}


LFM2_LAYERS = ConfigKeys(
    ("layer_types", "full_attn_idxs", "conv_L_cache", "conv_bias"),
    _read_convolutions,
    _write_convolutions,
)
LFM2_WIDTH = ConfigKeys(
    (
        "block_auto_adjust_ff_dim",
        "block_multiple_of",
        "block_ffn_dim_multiplier",
        "block_ff_dim",
    ),
    _read_adjusted_width,
    lambda config: {"block_auto_adjust_ff_dim": False},
)
# An older key, which has priority in transformers.
LFM2_TIED = ConfigKeys(
    ("tie_embedding",),
    lambda theirs: (
        {"tie_word_embeddings": theirs["tie_embedding"]} if "tie_embedding" in theirs else {}
    ),
    lambda config: {},
)


# Sizes of Kimi Delta Attention -> the keys of transformers, and those in `linear_attn_config` of the release.
_KDA = {
    "num_heads": ("linear_num_heads", "num_heads"),
    "head_dim": ("linear_head_dim", "head_dim"),
    "conv_kernel_dim": ("linear_conv_kernel_dim", "short_conv_kernel_size"),
}


def _read_kimi_layers(theirs: Values) -> Fields:
    """Read which layers have Kimi Delta Attention, and its sizes; the others have latent attention without RoPE."""
    count = theirs["num_hidden_layers"]
    stated = theirs.get("linear_attn_config") or {}
    sizes = {ours: stated.get(short, theirs[key]) for ours, (key, short) in _KDA.items()}
    types = theirs.get("layer_types")
    if types is None and "full_attn_layers" in stated:
        full = [layer - 1 for layer in stated["full_attn_layers"]]  # which are counted from 1
        types = ["full_attention" if n in full else "linear_attention" for n in range(count)]
    if types is None:
        types = []
        for n in range(count):
            types.append("full_attention" if n and n % 4 == 0 else "linear_attention")
    ours = {"full_attention": "latent_attention", "linear_attention": "kda"}
    for kind in types:
        if kind not in ours:
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported: te-models reads linear_attention (Kimi Delta "
                "Attention) and full_attention"
            )
    fields: Fields = {"layer_types": [ours[kind] for kind in types], "no_rope_layers": [0] * count}
    if "linear_attention" in types:
        fields["kda"] = {**sizes, "gate_rank": sizes["head_dim"]}
    else:
        fields["layer_types"] = None
    return fields


def _write_kimi_layers(config: ModelConfig) -> Fields:
    sizes = config.kda or KDAConfig(gate_rank=KDAConfig.head_dim)
    types = config.layer_types or ("latent_attention",) * config.num_hidden_layers
    theirs = {"kda": "linear_attention", "latent_attention": "full_attention"}
    return {
        **{key: vars(sizes)[ours] for ours, (key, _) in _KDA.items()},
        "layer_types": [theirs.get(kind, kind) for kind in types],
    }


KIMI_LAYERS = ConfigKeys(
    ("layer_types", "linear_attn_config", *(key for key, _ in _KDA.values())),
    _read_kimi_layers,
    _write_kimi_layers,
)


def _read_ling_layers(theirs: Values) -> Fields:
    """Read which layers have Kimi Delta Attention, by default all but the last of each group, and its sizes."""
    count = theirs["num_hidden_layers"]
    period = theirs["layer_group_size"]
    default = []
    for layer in range(count):
        if (layer + 1) % period:
            default.append("linear_attention")
        else:
            default.append("full_attention")
    ours = {"full_attention": "latent_attention", "linear_attention": "kda"}
    types = theirs.get("layer_types") or default
    for kind in types:
        if kind not in ours:
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported: te-models reads linear_attention (Kimi Delta "
                "Attention) and full_attention"
            )
    # Our head_dim counts the channels that RoPE turns, theirs the channels of Kimi Delta Attention's heads.
    fields: Fields = {"head_dim": theirs["qk_rope_head_dim"]}
    if "linear_attention" in types:
        fields["layer_types"] = [ours[kind] for kind in types]
        taps = theirs.get("linear_conv_kernel_dim", theirs["short_conv_kernel_size"])
        fields["kda"] = {
            "num_heads": theirs.get("linear_num_heads", theirs["num_attention_heads"]),
            "head_dim": theirs.get("linear_head_dim", theirs["head_dim"]),
            "conv_kernel_dim": taps,
            "decay_bound": -theirs["kda_lower_bound"] if theirs["kda_safe_gate"] else None,
        }
    return fields


def _write_ling_layers(config: ModelConfig) -> Fields:
    sizes = config.kda or KDAConfig(num_heads=config.num_attention_heads)
    types = config.layer_types or ("latent_attention",) * config.num_hidden_layers
    theirs = {"kda": "linear_attention", "latent_attention": "full_attention"}
    bound = sizes.decay_bound
    return {
        "layer_types": [theirs.get(kind, kind) for kind in types],
        "head_dim": sizes.head_dim,
        "linear_head_dim": sizes.head_dim,
        "linear_num_heads": sizes.num_heads,
        "short_conv_kernel_size": sizes.conv_kernel_dim,
        "linear_conv_kernel_dim": sizes.conv_kernel_dim,
        "kda_safe_gate": bound is not None,
        # Their default, which counts only with the gate.
        "kda_lower_bound": -5.0 if bound is None else -bound,
    }


LING_LAYERS = ConfigKeys(
    (
        "layer_types",
        "layer_group_size",
        "head_dim",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
        "short_conv_kernel_size",
        "kda_safe_gate",
        "kda_lower_bound",
    ),
    _read_ling_layers,
    _write_ling_layers,
)


def _lfm3_types(theirs: Values) -> list[str]:
    """Return the kinds of layers of LFM3, by default convolutions and two kinds of attention by turns."""
    kinds = {0: "sliding_attention", 2: "full_attention"}
    every = range(theirs["num_hidden_layers"])
    default = [kinds.get(layer % 4, "conv") if layer else "conv" for layer in every]
    return list(theirs.get("layer_types") or default)


def _read_lfm3_layers(theirs: Values) -> Fields:
    types = _lfm3_types(theirs)
    attention = ["full_attention" if kind == "conv" else kind for kind in types]
    # That part knows attention alone: a convolution counts as a layer that sees all keys, and gets its own kind back
    # below.
    fields = MELLUM_ROPE.read({**theirs, "layer_types": attention})
    if "conv" in types:
        sizes = {"kernel_dim": theirs["conv_L_cache"], "bias": theirs["conv_bias"]}
        fields |= {"layer_types": types, "short_conv": sizes}
    return fields


def _write_lfm3_layers(config: ModelConfig) -> Fields:
    keys = MELLUM_ROPE.write(config)
    sizes = config.short_conv or ShortConvConfig()
    layer_types = config.layer_types or keys["layer_types"]
    types = []
    for kind, attention in zip(layer_types, keys["layer_types"], strict=True):
        if kind == "conv":
            types.append("conv")
        else:
            types.append(attention)
    return {
        **keys,
        "layer_types": types,
        "conv_L_cache": sizes.kernel_dim,
        "conv_bias": sizes.bias,
    }


LFM3_LAYERS = ConfigKeys(
    (*MELLUM_ROPE.keys, "conv_L_cache", "conv_bias"), _read_lfm3_layers, _write_lfm3_layers
)
# Another name that transformers reads as `norm_eps`.
LFM3_EPSILON = ConfigKeys(
    ("rms_norm_eps",),
    lambda theirs: {"rms_norm_eps": theirs.get("rms_norm_eps", theirs["norm_eps"])},
    lambda config: {},
)
LFM3_OPTIONS = ConfigKeys(
    ("use_sandwich_norm", "use_attention_gate"),
    lambda theirs: {
        "norm_position": "both" if theirs["use_sandwich_norm"] else "pre",
        "attention_gate": "headwise" if theirs["use_attention_gate"] else "none",
    },
    lambda config: {
        "use_sandwich_norm": config.norm_position == "both",
        "use_attention_gate": config.attention_gate == "headwise",
    },
)
# Another name that transformers reads as `model_max_length`.
KIMI_LENGTH = ConfigKeys(
    ("max_position_embeddings",),
    lambda theirs: {
        "max_position_embeddings": theirs.get("max_position_embeddings", theirs["model_max_length"])
    },
    lambda config: {},
)
