"""Keys of config.json of Mamba 2 layers and of attention beside them. No torch."""

import math
from collections.abc import Iterable

from te_models.config.mamba2 import Mamba2Config
from te_models.config.model import ModelConfig
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ALIASES, ConfigKeys, Fields, Values
from te_models.interop.hf_rope_parts import PARTIAL_ROPE, read_rope

# Sizes of Mamba 2 -> the keys of families that begin with "mamba_".
_MAMBA = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state_dim": "mamba_d_state",
    "num_groups": "mamba_n_groups",
    "conv_kernel_dim": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
# Kinds of layers in older files -> the same kinds in newer ones.
_LEGACY_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_INFINITE = {"__float__": "Infinity"}  # as transformers writes infinity in JSON


def _time_steps(theirs: Values) -> Fields:
    """Read the bounds of time steps; 0 and infinity mean no bound, which is None here."""
    low, high = theirs.get("time_step_limit") or (0.0, math.inf)
    # JSON has no infinity: each writer found a spelling of its own.
    unbounded = high in (_INFINITE, math.inf, "inf", "Infinity")
    return {"time_step_min": low or None, "time_step_max": None if unbounded else high}


def _mamba_types(theirs: Values) -> list[str]:
    """Return the kinds of layers, by default all Mamba 2, under our names."""
    named_types = theirs.get("layer_types") or theirs.get("layers_block_type")
    types = named_types or ["linear_attention"] * theirs["num_hidden_layers"]
    kinds = [_LEGACY_TYPES.get(kind, kind) for kind in types]
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported: te-models reads linear_attention (Mamba 2) and "
                "full_attention"
            )
    return ["mamba2" if kind == "linear_attention" else kind for kind in kinds]


def read_mamba(theirs: Values, inner: int) -> Fields:
    """Read the sizes of Mamba 2 layers with `inner` channels in all heads."""
    sizes = {ours: theirs[key] for ours, key in _MAMBA.items() if key in theirs}
    # As transformers' config class does on construction.
    if sizes["head_dim"] == "auto":
        sizes["head_dim"] = inner // sizes["num_heads"]
    activation = theirs["hidden_act"]
    return {**sizes, **_time_steps(theirs), "activation": ALIASES.get(activation, activation)}


def write_mamba(sizes: Mamba2Config) -> Fields:
    """Return the keys of those sizes."""
    values = vars(sizes)
    keys = {key: values[ours] for ours, key in _MAMBA.items()}
    if sizes.time_step_min is not None or sizes.time_step_max is not None:
        low = sizes.time_step_min or 0.0
        high = sizes.time_step_max or _INFINITE
        keys["time_step_limit"] = [low, high]
    return keys


def _read_granite_layers(theirs: Values) -> Fields:
    """Read the kinds of layers, the sizes of Mamba 2, and whether attention has RoPE."""
    types = _mamba_types(theirs)
    fields: Fields = {}
    if "mamba2" in types:
        inner = theirs["mamba_expand"] * theirs["hidden_size"]
        fields |= {"layer_types": types, "mamba2": read_mamba(theirs, inner)}
    # Granite 4 has no positions unless the file asks for them, the opposite of all other families.
    if theirs.get("position_embedding_type") != "rope":
        fields["no_rope_layers"] = [0] * len(types)
    return fields


def _write_granite_layers(config: ModelConfig) -> Fields:
    """Return the keys that `_read_granite_layers` reads; a ConfigError if they cannot express the model."""
    types = config.layer_types or ("full_attention",) * config.num_hidden_layers
    theirs = {"mamba2": "linear_attention"}
    keys: Fields = {"layer_types": [theirs.get(kind, kind) for kind in types]}
    keys["position_embedding_type"] = "rope" if config.no_rope_layers is None else None
    sizes = config.mamba2
    if sizes is None:
        # transformers' class checks these sizes even where no layer has Mamba 2, and its defaults fit one width only.
        return {**keys, "mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1}
    expand, rest = divmod(sizes.inner_size, config.hidden_size)
    if rest or sizes.activation != config.hidden_act:
        raise ConfigError("this family has Mamba 2 of a multiple of the width, and one activation")
    return {**keys, **write_mamba(sizes), "mamba_expand": expand}


def _read_bamba_layers(theirs: Values) -> Fields:
    """Read which layers have attention, by their numbers; the others have Mamba 2."""
    attention = theirs.get("attn_layer_indices") or ()
    types = []
    for layer in range(theirs["num_hidden_layers"]):
        types.append("full_attention" if layer in attention else "mamba2")
    # Bamba's code rotates half of each head whatever the file says.
    fields: Fields = {**read_rope({**theirs, "partial_rotary_factor": 0.5})}
    if "mamba2" in types:
        inner = theirs["mamba_expand"] * theirs["hidden_size"]
        fields |= {"layer_types": types, "mamba2": read_mamba(theirs, inner)}
    return fields


def _write_bamba_layers(config: ModelConfig) -> Fields:
    """Return the keys that `_read_bamba_layers` reads; a ConfigError if they cannot express the model."""
    sizes = config.mamba2
    if sizes is None:
        raise ConfigError("a family with Mamba 2 writes no model without it")
    expand, rest = divmod(sizes.inner_size, config.hidden_size)
    if rest or sizes.activation != config.hidden_act:
        raise ConfigError("this family has Mamba 2 of a multiple of the width, and one activation")
    types = config.layer_types or ()
    return {
        **write_mamba(sizes),
        "mamba_expand": expand,
        "attn_layer_indices": [n for n, kind in enumerate(types) if kind == "full_attention"],
        "rope_theta": config.rope_theta,
        "rope_scaling": config.to_dict()["rope_scaling"],
    }


BAMBA_LAYERS = ConfigKeys(
    (
        "attn_layer_indices",
        "mamba_expand",
        "mamba_chunk_size",
        "time_step_limit",
        *PARTIAL_ROPE.keys,
        *_MAMBA.values(),
    ),
    _read_bamba_layers,
    _write_bamba_layers,
)


# The mixers that Falcon-H1 runs in parallel: our kind, and the keys of the factors on its input and output.
_BESIDE = (
    ("full_attention", "attention_in_multiplier", "attention_out_multiplier"),
    ("mamba2", "ssm_in_multiplier", "ssm_out_multiplier"),
)


def _read_falcon_layers(theirs: Values) -> Fields:
    """Read the sizes of Mamba 2, which is beside attention in every layer, and the factors of both and of MLPs."""
    inner = theirs["mamba_d_ssm"]
    if inner is None:
        inner = theirs["mamba_expand"] * theirs["hidden_size"]
    # Their two switches are one setting here.
    norm = "before_gate" if theirs["mamba_norm_before_gate"] else "gated"
    sizes = {
        **read_mamba(theirs, inner),
        "out_bias": theirs["projectors_bias"],
        "norm": norm if theirs["mamba_rms_norm"] else "none",
        "multipliers": _factors(theirs["ssm_multipliers"]),
    }
    beside = {
        "mixers": [kind for kind, _, _ in _BESIDE],
        "input_multipliers": _factors(theirs[key] for _, key, _ in _BESIDE),
        "output_multipliers": _factors(theirs[key] for _, _, key in _BESIDE),
    }
    return {
        "layer_types": ["parallel"] * theirs["num_hidden_layers"],
        "parallel_mixers": beside,
        "mamba2": sizes,
        "mlp_multipliers": _factors(theirs["mlp_multipliers"]),
    }


def _factors(values: Iterable[float]) -> list[float]:
    """Return factors, of which a file may have whole numbers."""
    return [float(value) for value in values]


def _write_falcon_layers(config: ModelConfig) -> Fields:
    """Return the keys that `_read_falcon_layers` reads; a ConfigError if they cannot express the model."""
    sizes = config.mamba2
    beside = config.parallel_mixers
    if sizes is None or beside is None or sizes.activation != config.hidden_act:
        raise ConfigError("this family has Mamba 2 beside attention, and one activation")
    keys = {
        **write_mamba(sizes),
        "mamba_d_ssm": sizes.inner_size,
        "projectors_bias": sizes.has_out_bias,
        "mamba_rms_norm": sizes.norm != "none",
        "mamba_norm_before_gate": sizes.norm != "gated",
        "ssm_multipliers": list(sizes.factors.values()),
        "mlp_multipliers": list(config.mlp_multipliers or (1.0, 1.0)),
    }
    before = beside.input_multipliers or ()
    after = beside.output_multipliers or ()
    for (_, into, out), first, last in zip(_BESIDE, before, after, strict=False):
        keys |= {into: first, out: last}
    return keys


FALCON_LAYERS = ConfigKeys(
    (
        "mamba_d_ssm",
        "mamba_expand",
        "mamba_chunk_size",
        "time_step_limit",
        "projectors_bias",
        "mamba_rms_norm",
        "mamba_norm_before_gate",
        "ssm_multipliers",
        "mlp_multipliers",
        *(key for _, *keys in _BESIDE for key in keys),
        *_MAMBA.values(),
    ),
    _read_falcon_layers,
    _write_falcon_layers,
)


# Kinds of layers of Nemotron-H, in lists and in its older pattern -> our kinds of mixer and MLP.
_NEMOTRON_KINDS = {
    "linear_attention": ("mamba2", "none"),
    "full_attention": ("full_attention", "none"),
    "moe": ("mlp", "sparse"),
    "mlp": ("mlp", "dense"),
}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_NEMOTRON_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]
_NEMOTRON_MAMBA = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_dim": "ssm_state_size",
    "num_groups": "n_groups",
    "conv_kernel_dim": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "time_step_min": "time_step_min",
}


# Other names that transformers reads -> the names of its config.
_NEMOTRON_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
    "num_local_experts": "n_routed_experts",
}


def state_nemotron_layers(config: Values) -> Values:
    """Return a config.json with the kinds of layers as a list, and their number, and each key under one name."""
    config = {
        **config,
        **{k: config[name] for name, k in _NEMOTRON_ALIASES.items() if name in config},
    }
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None and config.get("hybrid_override_pattern"):
        types = [_PATTERN.get(letter, letter) for letter in config["hybrid_override_pattern"]]
    types = [_LEGACY_TYPES.get(kind, kind) for kind in types or _NEMOTRON_DEFAULT]
    return {**config, "layers_block_type": types, "num_hidden_layers": len(types)}


def _read_nemotron_layers(theirs: Values) -> Fields:
    """Read the kinds of layers and the sizes of Mamba 2."""
    types = theirs["layers_block_type"]
    for kind in types:
        if kind not in _NEMOTRON_KINDS:
            raise ConfigError(
                f"layers_block_type holds {kind!r}, which is not supported: te-models reads "
                f"{', '.join(_NEMOTRON_KINDS)}"
            )
    # A layer of theirs is one part, a mixer or an MLP; a layer here has a place for each.
    mixers, mlps = zip(*(_NEMOTRON_KINDS[kind] for kind in types), strict=True)
    fields: Fields = {"layer_types": mixers, "mlp_layer_types": mlps}
    if "linear_attention" in types:
        sizes = {ours: theirs[key] for ours, key in _NEMOTRON_MAMBA.items()}
        activation = theirs["mamba_hidden_act"]
        sizes["activation"] = ALIASES.get(activation, activation)
        fields["mamba2"] = {**sizes, "time_step_min": sizes["time_step_min"] or None}
    return {**fields, "no_rope_layers": [0] * len(types)}


def _write_nemotron_layers(config: ModelConfig) -> Fields:
    """Return the keys that `_read_nemotron_layers` reads."""
    count = config.num_hidden_layers
    mixers = config.layer_types or ("full_attention",) * count
    mlps = config.mlp_layer_types or ("dense",) * count
    kinds = {ours: theirs for theirs, ours in _NEMOTRON_KINDS.items()}
    types = [kinds.get(pair, pair[0]) for pair in zip(mixers, mlps, strict=True)]
    sizes = config.mamba2 or Mamba2Config(time_step_min=1e-3)
    values = {key: vars(sizes)[ours] for ours, key in _NEMOTRON_MAMBA.items()}
    low = sizes.time_step_min or 0.0
    keys = {**values, "time_step_min": low, "mamba_hidden_act": sizes.activation}
    return {**keys, "layers_block_type": types}


NEMOTRON_LAYERS = ConfigKeys(
    (
        "layers_block_type",
        "layer_types",
        "hybrid_override_pattern",
        "mamba_hidden_act",
        *_NEMOTRON_ALIASES,
        *_NEMOTRON_MAMBA.values(),
    ),
    _read_nemotron_layers,
    _write_nemotron_layers,
)


GRANITE_LAYERS = ConfigKeys(
    (
        "layer_types",
        "layers_block_type",
        "position_embedding_type",
        "mamba_expand",
        "mamba_chunk_size",
        "time_step_limit",
        *_MAMBA.values(),
    ),
    _read_granite_layers,
    _write_granite_layers,
)
