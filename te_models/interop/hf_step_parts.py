"""Keys of config.json of Step-3.7, whose first files have a list for each property of the layers. No torch.

Facts: the configuration and modeling files of transformers 5.24.
"""

from collections.abc import Mapping

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, Values
from te_models.interop.hf_window_parts import all_full, rope_by_type


def modern_step(theirs: Values) -> Fields:
    """Return a config.json of Step-3.7 with the keys of transformers in place of the keys of its first files.

    Those have lists with an entry per layer, also for the layers that predict later tokens.
    """
    keys = dict(theirs)
    count = theirs["num_hidden_layers"]
    for key in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        if isinstance(theirs.get(key), list):
            keys[key] = theirs[key][:count]
    types = keys.get("layer_types") or ["full_attention"] * count
    keys["layer_types"] = types
    other = theirs.get("attention_other_setting")
    if isinstance(other, Mapping) and theirs.get("num_sliding_attention_heads") is None:
        keys["num_sliding_attention_heads"] = other.get(
            "num_attention_heads", theirs["num_attention_heads"]
        )
    if keys.get("mlp_layer_types") is None:
        named = theirs.get("moe_layers_enum")
        # The default of the first files' own code.
        numbers = range(3, count)
        if named is not None:
            listed = named.split(",") if isinstance(named, str) else named
            numbers = [int(layer) for layer in listed if str(layer).strip()]
        kinds = []
        for layer in range(count):
            if layer in numbers:
                kinds.append("sparse")
            else:
                kinds.append("dense")
        keys["mlp_layer_types"] = kinds
    rope_parameters = theirs.get("rope_parameters") or {}
    if not all(isinstance(rope_parameters.get(kind), Mapping) for kind in set(types)):
        keys["rope_parameters"] = _step_ropes(theirs, types)
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factors"):
        keys.pop(key, None)
    return keys


def _step_ropes(theirs: Values, types: list[str]) -> Fields:
    """Return the RoPE of each kind of layer, as the first layer of the kind has it."""
    ropes: Fields = {}
    theta = theirs.get("rope_theta", 10000.0)
    shares = theirs.get("partial_rotary_factors")
    for kind in dict.fromkeys(types):
        # Their lists have a value per layer, equal in all layers of a kind.
        first = types.index(kind)
        rope = {"rope_theta": theta[first] if isinstance(theta, list) else theta}
        if shares:
            rope["partial_rotary_factor"] = shares[first]
        if kind == "full_attention":
            rope |= theirs.get("rope_scaling") or {}
        ropes[kind] = rope
    return ropes


_STEP_ROPE = rope_by_type(all_full, partial=True)
_STEP_KEYS = (
    "num_sliding_attention_heads",
    "per_layer_config",
    "attention_other_setting",
    "num_attention_groups",
    "partial_rotary_factors",
)


def _read_step_layers(theirs: Values) -> Fields:
    """Read windows, RoPE and heads by kind of layer, and the bounds of SwiGLU by layer."""
    modern = modern_step(theirs)
    key_value_heads = theirs.get("num_attention_groups", theirs["num_key_value_heads"])
    theirs = {**theirs, "num_key_value_heads": key_value_heads}
    fields = _STEP_ROPE.read({"rope_theta": 10000.0, "rope_local_base_freq": 10000.0, **modern})
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: theirs[name] for name in names}
    heads = modern.get("num_sliding_attention_heads") or sizes["num_attention_heads"]
    for layer, changes in (theirs.get("per_layer_config") or {}).items():
        # transformers writes heads under windows as changes to single layers.
        if modern["layer_types"][int(layer)] != "sliding_attention" or changes != {
            "num_attention_heads": heads
        }:
            raise ConfigError(
                "per_layer_config with other changes than heads under windows is not supported"
            )
    if "sliding_attention" in modern["layer_types"] and heads != sizes["num_attention_heads"]:
        fields["sliding_heads"] = {**sizes, "num_attention_heads": heads}
    fields["num_key_value_heads"] = key_value_heads
    for ours, key in (("expert_limits", "swiglu_limits"), ("mlp_limits", "swiglu_limits_shared")):
        limits = [limit or 0.0 for limit in modern.get(key) or ()]
        if any(limits):
            fields[ours] = limits
    return fields


def _write_step_layers(config: ModelConfig) -> Fields:
    keys = _STEP_ROPE.write(config)
    heads = (config.sliding_heads or config).num_attention_heads
    heads_by_kind = {"num_attention_heads": heads}
    sliding = []
    for layer, kind in enumerate(keys["layer_types"]):
        if kind == "sliding_attention":
            sliding.append(layer)
    return {
        **keys,
        "num_sliding_attention_heads": heads,
        "per_layer_config": {str(layer): heads_by_kind for layer in sliding},
        "swiglu_limits": list(config.expert_limits or ()) or None,
        "swiglu_limits_shared": list(config.mlp_limits or ()) or None,
    }


STEP_LAYERS = ConfigKeys(
    (*_STEP_ROPE.keys, *_STEP_KEYS, "swiglu_limits", "swiglu_limits_shared"),
    _read_step_layers,
    _write_step_layers,
)
