"""Keys of config.json that Gemma 4 alone has: wide heads without a window, keys shared by layers. No torch."""

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, Values
from te_models.interop.hf_window_parts import full_every, kinds_of_layers, write_kinds


def _read_gemma4_heads(theirs: Values) -> Fields:
    """Read the heads of layers that see all keys, in `per_layer_config` or keys of their own, and of the others."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    window = {name: theirs[name] for name in names}
    full = {**window, "head_dim": theirs["global_head_dim"]}
    global_heads = theirs.get("num_global_key_value_heads")
    if global_heads is not None and theirs["attention_k_eq_v"]:
        full["num_key_value_heads"] = global_heads
    # The newer form lists only the layers that differ, by number as a string; the older has one key for all of them.
    per_layer = theirs.get("per_layer_config")
    types = _gemma4_types(theirs)
    if per_layer is not None:
        changes_by_layer = {int(layer): dict(changes) for layer, changes in per_layer.items()}
        places = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
        different = [changes_by_layer.get(layer, {}) for layer in places]
        if any(changes != different[0] for changes in different) or changes_by_layer.keys() - set(
            places
        ):
            raise ConfigError(
                "per_layer_config with other changes than one for all layers of full_attention is not supported"
            )
        if unknown := different[0].keys() - set(names):
            raise ConfigError(f"per_layer_config with {min(unknown)} is not supported")
        full = {**window, **different[0]}
    # Where both kinds of layers have the same heads there is one set of sizes, or the config would not equal one
    # without.
    slides = "sliding_attention" in types and full != window
    return {
        **full,
        "sliding_heads": window if slides else None,
        "keys_as_values": bool(theirs["attention_k_eq_v"]),
    }


def _gemma4_types(theirs: Values) -> list[str]:
    """Return the kinds of layers, of which the last sees all keys whatever the file says."""
    return [*kinds_of_layers(theirs, full_every(6, 5))[:-1], "full_attention"]


def _write_gemma4_heads(config: ModelConfig) -> Fields:
    window = config.sliding_heads or config
    changes = {}
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if getattr(config, name) != getattr(window, name):
            changes[name] = getattr(config, name)
    # Only full attention differs: the fields beside describe the layers with a window.
    layers = {}
    for depth, kind in enumerate(write_kinds(config)):
        if kind == "full_attention" and changes:
            layers[str(depth)] = changes
    return {
        "num_attention_heads": window.num_attention_heads,
        "num_key_value_heads": window.num_key_value_heads,
        "head_dim": window.head_dim,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.keys_as_values,
        "per_layer_config": layers,
    }


def _read_gemma4_small(theirs: Values) -> Fields:
    """Read inputs per layer, the last layers without keys of their own, and the width of their MLPs."""
    count = theirs["num_hidden_layers"]
    reusing_layers = theirs.get("num_kv_shared_layers") or 0
    fields: Fields = {}
    if reusing_layers:
        fields["shared_key_layers"] = [
            int(layer >= count - reusing_layers) for layer in range(count)
        ]
    if reusing_layers and theirs.get("use_double_wide_mlp"):
        width = theirs["intermediate_size"]
        fields["intermediate_sizes"] = [width * (1 + flag) for flag in fields["shared_key_layers"]]
    # Only E2B and E4B have a second embedding.
    if width := theirs.get("hidden_size_per_layer_input"):
        rows = theirs["vocab_size_per_layer_input"]
        fields["layer_inputs"] = {"width": width, "vocab_size": rows}
    return fields


def _write_gemma4_small(config: ModelConfig) -> Fields:
    inputs = config.layer_inputs
    return {
        "num_kv_shared_layers": sum(config.shared_key_layers or ()),
        "use_double_wide_mlp": config.intermediate_sizes is not None,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.width,
        "vocab_size_per_layer_input": config.vocab_size if inputs is None else inputs.vocab_size,
    }


def gemma4_unused(theirs: Values) -> tuple[str, ...]:
    """Return the prefixes of keys and values in a folder that nothing reads: their layers use another layer's."""
    count = theirs["num_hidden_layers"]
    reusing_layers = theirs.get("num_kv_shared_layers") or 0
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    layers = range(count - reusing_layers, count)
    return tuple(f"layers.{layer}.self_attn.{name}." for layer in layers for name in names)


GEMMA4_HEADS = ConfigKeys(
    (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "per_layer_config",
    ),
    _read_gemma4_heads,
    _write_gemma4_heads,
)
GEMMA4_SMALL = ConfigKeys(
    (
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
    ),
    _read_gemma4_small,
    _write_gemma4_small,
)
