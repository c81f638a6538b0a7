"""Keys of config.json that need more than copying: parts that the rows of hf_families are made of.

Keys of RoPE are in hf_rope_parts, of windows in hf_window_parts. No torch. Facts: the configuration and modeling files
of transformers 5.23.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config.attention import AttentionSpec
from te_models.config.model import ModelConfig
from te_models.errors import ConfigError, check_known

Values = Mapping[str, Any]  # an object in a config.json, or fields of ModelConfig
Fields = dict[str, Any]  # the same, to be changed
# (config.json, number of a layer) -> whether the layer sees all keys.
SeesAll = Callable[[Values, int], bool]


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json that belong together, with a function to read them and one to write them."""

    keys: tuple[str, ...]
    read: Callable[[Values], Fields]
    write: Callable[[ModelConfig], Fields]


GATE_FLAGS = {
    "headwise": "headwise_attn_output_gate",
    "elementwise": "elementwise_attn_output_gate",
}


def _read_gate(theirs: Values) -> Fields:
    gates = [gate for gate, flag in GATE_FLAGS.items() if theirs.get(flag)]
    if len(gates) > 1:
        raise ConfigError(
            f"{' and '.join(GATE_FLAGS.values())} together are not supported: set one of them to false"
        )
    return {"attention_gate": gates[0] if gates else "none", "qk_norm": bool(theirs["use_qk_norm"])}


def _write_gate(config: ModelConfig) -> Fields:
    flags = {flag: config.attention_gate == gate for gate, flag in GATE_FLAGS.items()}
    return {**flags, "use_qk_norm": config.qk_norm}


def renamed(**keys: str) -> ConfigKeys:
    """Return the part of keys that say what our fields say, field -> key."""

    def write(config: ModelConfig) -> Fields:
        ours = config.to_dict()
        return {key: ours[name] for name, key in keys.items()}

    return ConfigKeys(
        tuple(dict.fromkeys(keys.values())),
        lambda theirs: {name: theirs[key] for name, key in keys.items() if key in theirs},
        write,
    )


def same(*names: str) -> ConfigKeys:
    """Return the part of keys that have the names of our fields."""
    return renamed(**dict(zip(names, names, strict=True)))


def biases(
    out: str | None = "attention_bias", mlp: str | None = None, qkv: str = "attention_bias"
) -> ConfigKeys:
    """Return the part of the keys that say which projections have a bias; None: there is none on those."""
    fields = {"attention_bias": qkv, "attention_output_bias": out, "mlp_bias": mlp}
    return renamed(**{ours: key for ours, key in fields.items() if key is not None})


def _read_sarvam_bias(theirs: Values) -> Fields:
    """Read the key of transformers, or of the release."""
    return {"attention_bias": theirs.get("attention_bias", theirs.get("use_qkv_bias", False))}


SARVAM_BIAS = ConfigKeys(
    ("attention_bias", "use_qkv_bias"),
    _read_sarvam_bias,
    lambda config: {"attention_bias": config.attention_bias},
)


def _read_internlm_biases(theirs: Values) -> Fields:
    """Read the keys of transformers, or `qkv_bias` and `bias` of the files that came with the model."""
    qkv = theirs.get("attention_bias", theirs.get("qkv_bias", False))
    rest = theirs.get("mlp_bias", theirs.get("bias", False))
    return {"attention_bias": qkv, "attention_output_bias": rest, "mlp_bias": rest}


# Other names of transformers for the same function.
ALIASES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}


def activation(key: str = "hidden_act", aliases: Mapping[str, str] = ALIASES) -> ConfigKeys:
    """Return the part of the key that names the MLP's activation."""

    def read(theirs: Values) -> Fields:
        name = theirs.get(key, "silu")
        return {"hidden_act": aliases.get(name, name)}

    return ConfigKeys((key,), read, lambda config: {key: config.hidden_act})


def _multiplier(theirs: Values, value: float) -> Fields:
    size = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    return {} if value == size**-0.5 else {"attention_multiplier": value}


def _write_multiplier(config: ModelConfig) -> float:
    if config.attention_multiplier is None:
        return config.head_dim**-0.5
    return config.attention_multiplier


def _read_laguna(theirs: Values) -> Fields:
    """Read the gate, and the heads of each kind of layer; refuse layers of one kind with different heads."""
    gates = {True: "headwise", "per-head": "headwise", "per-element": "elementwise"}
    if theirs["gating"] not in gates:
        raise ConfigError(
            f"gating={theirs['gating']!r} is not supported: te-models reads 'per-head' or 'per-element'"
        )
    fields: Fields = {"attention_gate": gates[theirs["gating"]]}
    count = theirs["num_hidden_layers"]
    kinds = theirs.get("layer_types") or ["full_attention"] * count
    numbers = theirs.get("num_attention_heads_per_layer") or [theirs["num_attention_heads"]] * count
    if len(numbers) != count:
        raise ConfigError(
            f"num_attention_heads_per_layer has {len(numbers)} entries for {count} layers"
        )
    heads_by_kind: dict[str, int] = {}
    for kind, heads in zip(kinds, numbers, strict=False):
        if heads_by_kind.setdefault(kind, heads) != heads:
            raise ConfigError(
                f"num_attention_heads_per_layer with different numbers in layers of {kind} is not supported"
            )
    sliding = heads_by_kind.get("sliding_attention")
    # Without layers that see all keys, the others' heads are the model's.
    fields["num_attention_heads"] = heads_by_kind.get("full_attention", sliding)
    if sliding is not None and sliding != fields["num_attention_heads"]:
        fields["sliding_heads"] = {
            "num_attention_heads": sliding,
            "num_key_value_heads": theirs["num_key_value_heads"],
            "head_dim": theirs["head_dim"],
        }
    return fields


def _write_laguna(config: ModelConfig) -> Fields:
    gates = {"headwise": "per-head", "elementwise": "per-element"}
    numbers = []
    for layer in config.layers:
        if isinstance(layer.mixer, AttentionSpec):
            numbers.append(layer.mixer.heads.query)
        else:
            # Any config is written, to see what the family lacks.
            numbers.append(config.num_attention_heads)
    return {
        "gating": gates.get(config.attention_gate, False),
        "num_attention_heads_per_layer": numbers,
    }


_UNIT_NORM = {
    "qk_norm": True,
    "qk_norm_weights": False,
    "qk_norm_after_rope": True,
    "qk_norm_layers": "rope",
}
# Norms of q and k without weights, after RoPE and where there is one.
UNIT_NORM = ConfigKeys(
    ("use_qk_norm",),
    lambda theirs: dict(_UNIT_NORM) if theirs["use_qk_norm"] else {},
    lambda config: {"use_qk_norm": config.qk_norm},
)
# Gemma 1 calls gelu_pytorch_tanh "gelu".
GEMMA_ACT = activation(aliases={**ALIASES, "gelu": "gelu_pytorch_tanh"})
GATE = ConfigKeys((*GATE_FLAGS.values(), "use_qk_norm"), _read_gate, _write_gate)
MUP = ConfigKeys(
    ("mup_enabled",),
    lambda theirs: {
        "embedding_multiplier": theirs["hidden_size"] ** 0.5 if theirs["mup_enabled"] else 1.0
    },
    lambda config: {"mup_enabled": config.embedding_multiplier != 1},
)
INTERNLM_BIASES = ConfigKeys(
    ("attention_bias", "mlp_bias", "qkv_bias", "bias"),
    _read_internlm_biases,
    lambda config: {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias},
)
LAGUNA = ConfigKeys(("gating", "num_attention_heads_per_layer"), _read_laguna, _write_laguna)
# Where a file has none, transformers makes it of the width.
INITIAL_RANGE = ConfigKeys(
    (),
    lambda theirs: {
        "initializer_range": theirs.get("initializer_range")
        or 2.0 / (5.0 * theirs["hidden_size"]) ** 0.5
    },
    lambda config: {},
)


def _read_minicpm3(theirs: Values) -> Fields:
    """Read three scales, of which None is none."""
    root = math.sqrt(theirs["num_hidden_layers"])
    depth = theirs.get("scale_depth", 1.4)
    base = theirs.get("dim_model_base", 256)
    return {
        "embedding_multiplier": theirs.get("scale_emb", 12),
        "residual_multiplier": 1.0 if depth is None else depth / root,
        "logits_scaling": 1.0 if base is None else theirs["hidden_size"] / base,
    }


def _write_minicpm3(config: ModelConfig) -> Fields:
    root = math.sqrt(config.num_hidden_layers)
    residual = config.residual_multiplier
    base = round(config.hidden_size / config.logits_scaling)
    return {
        "scale_emb": config.embedding_multiplier,
        "scale_depth": inverted(residual, lambda depth: depth / root, residual * root),
        "dim_model_base": base,
    }


MINICPM3_SCALES = ConfigKeys(
    ("scale_emb", "scale_depth", "dim_model_base"), _read_minicpm3, _write_minicpm3
)
MULTIPLIERS = same("embedding_multiplier", "residual_multiplier", "logits_scaling")


def inverted(value: float, function: Callable[[float], float], near: float) -> float:
    """Return the number at `near` of which `function` is `value` in every bit, so that it is read as it was."""
    for candidate in (near, math.nextafter(near, math.inf), math.nextafter(near, 0.0)):
        if function(candidate) == value:
            return candidate
    return near


def logit_factor(key: str) -> ConfigKeys:
    """Return the part of the key of a factor on the logits, by which ours divides."""
    return ConfigKeys(
        (key,),
        lambda theirs: {"logits_scaling": 1 / theirs.get(key, 1.0)},
        lambda config: {
            key: inverted(
                config.logits_scaling, lambda factor: 1 / factor, 1 / config.logits_scaling
            )
        },
    )


def query_factor(key: str) -> ConfigKeys:
    """Return the part of the key of a factor on queries or keys, on top of the root of the width of heads."""

    def read(theirs: Values) -> Fields:
        size = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
        return _multiplier(theirs, theirs[key] * size**-0.5)

    def write(config: ModelConfig) -> Fields:
        root = config.head_dim**-0.5
        multiplier = _write_multiplier(config)
        return {key: inverted(multiplier, lambda factor: factor * root, multiplier / root)}

    return ConfigKeys((key,), read, write)


LOGIT_FACTOR = logit_factor("logits_scaling")
LOGIT_SCALE = logit_factor("logit_scale")
POST_NORMS_BY_FLAG = ConfigKeys(
    ("use_post_norm",),
    lambda theirs: {"norm_position": "both" if theirs["use_post_norm"] else "pre"},
    lambda config: {"use_post_norm": config.norm_position == "both"},
)
ATTENTION_MULTIPLIER = ConfigKeys(
    ("attention_multiplier",),
    lambda theirs: (
        _multiplier(theirs, theirs["attention_multiplier"])
        if "attention_multiplier" in theirs
        else {}
    ),
    lambda config: {"attention_multiplier": _write_multiplier(config)},
)
QUERY_SCALAR = ConfigKeys(
    ("query_pre_attn_scalar",),
    lambda theirs: (
        _multiplier(theirs, theirs["query_pre_attn_scalar"] ** -0.5)
        if "query_pre_attn_scalar" in theirs
        else {}
    ),
    lambda config: {"query_pre_attn_scalar": round(_write_multiplier(config) ** -2)},
)
# Gemma scales embeddings by the root of their width, and has no key for it.
EMBEDDING_ROOT = ConfigKeys(
    (), lambda theirs: {"embedding_multiplier": theirs["hidden_size"] ** 0.5}, lambda config: {}
)
# The options of remote_code/configuration_te_models.py; all other fields are keys of config.json.
OWN_OPTIONS = (
    "rope_theta",
    "rope_scaling",
    "sliding_rope",
    "rope_interleaved",
    "partial_rotary_factor",
    "no_rope_layers",
    "sliding_window",
    "layer_types",
    "attention_gate",
    "attention_gate_activation",
    "attention_bias",
    "attention_output_bias",
    "attention_multiplier",
    "attn_logit_softcapping",
    "attention_sinks",
    "query_scale_beta",
    "query_scale_length",
    "qk_norm",
    "qk_norm_scope",
    "qk_norm_weights",
    "qk_norm_after_rope",
    "value_norm",
    "norm_type",
    "parallel_residual",
    "attention_chunk_size",
    "query_scale_rule",
    "qk_norm_layers",
    "norm_position",
    "zero_centered_norm",
    "hidden_act",
    "mlp_gate",
    "mlp_bias",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "final_logit_softcapping",
    "embedding_norm",
    "post_norm_eps",
    "plain_final_norm",
)
_AUTO_MAP = {
    "AutoConfig": "configuration_te_models.TEModelsDecoderConfig",
    "AutoModel": "modeling_te_models.TEModelsDecoderModel",
    "AutoModelForCausalLM": "modeling_te_models.TEModelsDecoderForCausalLM",
}


def _read_own(theirs: Values) -> Fields:
    options = theirs.get("decoder_options") or {}
    for name in options:
        check_known("field of decoder_options", name, OWN_OPTIONS)
    return dict(options)


def _write_own(config: ModelConfig) -> Fields:
    options = {name: value for name, value in config.to_dict().items() if name in OWN_OPTIONS}
    return {"auto_map": _AUTO_MAP, "decoder_options": options}


OWN = ConfigKeys(("decoder_options", "auto_map"), _read_own, _write_own)
