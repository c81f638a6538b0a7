"""Keys of config.json about RoPE and windows, for the rows of hf_families. No torch.

Facts: the configuration and modeling files of transformers 5.23.
"""

import copy
from collections.abc import Mapping

from te_models.config.attention import SoftmaxAttentionSpec, window
from te_models.config.model import ModelConfig
from te_models.config.rope import ROPE_SCALINGS, Rope
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, SeesAll, Values, same


def read_rope(theirs: Values) -> Fields:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier versions."""
    values = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("rope_parameters by layer type are not supported for this model type")
    found = {
        key: values.pop(key, theirs.get(key)) for key in ("rope_theta", "partial_rotary_factor")
    }
    found = {key: value for key, value in found.items() if value is not None}
    kinds = [values.pop(key) for key in ("type", "rope_type") if key in values]
    kind = kinds[-1] if kinds else "default"
    if kind == "proportional" and "partial_rotary_factor" in found:  # a part of that scaling
        values["partial_rotary_factor"] = found.pop("partial_rotary_factor")
    fields = scaling_fields(kind)
    original = theirs.get("original_max_position_embeddings")
    if original is not None and kind in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = original  # which has priority in transformers
    if kind != "default" and kind not in ROPE_SCALINGS:
        raise ConfigError(
            f"rope_scaling of type {kind!r} is not supported: choose from {', '.join(ROPE_SCALINGS)}"
        )
    if kind != "default":
        scaling = {name: value for name, value in values.items() if name in fields}
        found["rope_scaling"] = {"rope_type": kind, **scaling}
    elif meant := [name for name in values if name in SCALING_FIELDS]:
        raise ConfigError(
            f"rope_scaling with {', '.join(meant)} needs a rope_type other than default, such as linear"
        )
    return found


SCALING_FIELDS = {
    name
    for fields in ROPE_SCALINGS.values()
    for group in fields
    for name in group
    if name != "partial_rotary_factor"
}
# Beside the fields of a scaling; the last two belong to Ministral 3, and mrope_section to Qwen3.5.
_ROPE_FIELDS = {
    "rope_theta", "partial_rotary_factor", "type", "rope_type", "llama_4_scaling_beta", "max_position_embeddings",
    "alpha",
}  # fmt: skip


def scaling_fields(kind: str) -> set[str]:
    """Return the fields that transformers reads of a scaling of this kind; all for a kind that is not known."""
    if kind not in ROPE_SCALINGS:
        return SCALING_FIELDS
    required, optional = ROPE_SCALINGS[kind]
    return {*required, *optional}


def unread_rope_fields(theirs: Values) -> list[str]:
    """Return the fields of RoPE in a config.json that transformers does not read, such as "rope_scaling.finetuned"."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        given = theirs.get(key)
        if not isinstance(given, Mapping):
            continue
        by_type = {name: one for name, one in given.items() if isinstance(one, Mapping)}
        for name, values in {key: given, **by_type}.items():
            kind = values.get("rope_type", values.get("type", "default"))
            known = _ROPE_FIELDS | scaling_fields(str(kind)) | by_type.keys()
            # The scale of queries relates to it under any RoPE.
            if "llama_4_scaling_beta" in values:
                known |= {"original_max_position_embeddings"}
            place = key if values is given else f"{key}.{name}"
            unread = []
            for own in values:
                if own not in known and not own.startswith("mrope_"):
                    unread.append(own)
            found += [f"{place}.{own}" for own in unread]
    return found


def _read_whole_rope(theirs: Values) -> Fields:
    """Read the RoPE of families in which transformers always rotates whole heads.

    There it ignores `partial_rotary_factor` under the default RoPE, and fails on it under any other.
    """
    found = read_rope(theirs)
    share = found.pop("partial_rotary_factor", 1.0)
    if share != 1.0 and "rope_scaling" in found:
        kind = found["rope_scaling"]["rope_type"]
        raise ConfigError(
            f"partial_rotary_factor={share} with RoPE of type {kind!r} is not supported for this model type"
        )
    return found


def _read_rope_of_whole_heads(theirs: Values) -> Fields:
    """Read the RoPE of families in which transformers rotates a share of each head, and te-models whole ones."""
    found = read_rope(theirs)
    share = found.pop("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ConfigError(f"partial_rotary_factor={share} is not supported for this model type")
    return found


def _write_rope(config: ModelConfig) -> Fields:
    """Return the older form, which every version of transformers reads."""
    return {"rope_theta": config.rope_theta, "rope_scaling": config.to_dict()["rope_scaling"]}


def _write_partial_rope(config: ModelConfig) -> Fields:
    return {**_write_rope(config), "partial_rotary_factor": config.partial_rotary_factor}


def _read_gemma4_heads(theirs: Values) -> Fields:
    """Read the heads of layers that see all keys, in `per_layer_config` or keys of their own, and of the others."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    window = {name: theirs[name] for name in names}
    full = {**window, "head_dim": theirs["global_head_dim"]}
    shared = theirs.get("num_global_key_value_heads")
    if shared is not None and theirs["attention_k_eq_v"]:
        full["num_key_value_heads"] = shared
    given = theirs.get("per_layer_config")
    types = _gemma4_types(theirs)
    if given is not None:
        own = {int(layer): dict(changes) for layer, changes in given.items()}
        places = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
        different = [own.get(layer, {}) for layer in places]
        if any(changes != different[0] for changes in different) or own.keys() - set(places):
            raise ConfigError(
                "per_layer_config with other changes than one for all layers of full_attention is not supported"
            )
        if unknown := different[0].keys() - set(names):
            raise ConfigError(f"per_layer_config with {min(unknown)} is not supported")
        full = {**window, **different[0]}
    slides = "sliding_attention" in types and full != window
    return {
        **full,
        "sliding_heads": window if slides else None,
        "keys_as_values": bool(theirs["attention_k_eq_v"]),
    }


def _gemma4_types(theirs: Values) -> list[str]:
    """Return the kinds of layers, of which the last sees all keys whatever the file says."""
    return [*_types(theirs, _every(6, 5))[:-1], "full_attention"]


def _write_gemma4_heads(config: ModelConfig) -> Fields:
    window = config.sliding_heads or config
    changes = {
        name: getattr(config, name)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        if getattr(config, name) != getattr(window, name)
    }
    layers = {}
    for depth, kind in enumerate(_write_types(config)):
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
    shared = theirs.get("num_kv_shared_layers") or 0
    found: Fields = {}
    if shared:
        found["shared_key_layers"] = [int(layer >= count - shared) for layer in range(count)]
    if shared and theirs.get("use_double_wide_mlp"):
        width = theirs["intermediate_size"]
        found["intermediate_sizes"] = [width * (1 + flag) for flag in found["shared_key_layers"]]
    if width := theirs.get("hidden_size_per_layer_input"):
        rows = theirs["vocab_size_per_layer_input"]
        found["layer_inputs"] = {"width": width, "vocab_size": rows}
    return found


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
    shared = theirs.get("num_kv_shared_layers") or 0
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    layers = range(count - shared, count)
    return tuple(f"layers.{layer}.self_attn.{name}." for layer in layers for name in names)


def _every(period: int, first: int = 0) -> SeesAll:
    """Return the default of families in which one layer of `period` sees all keys, starting with number `first`."""
    return lambda theirs, layer: layer % period == first


def _by_pattern(key: str) -> SeesAll:
    """Return the default of families whose key says after how many layers one sees all keys (or "LLLG")."""

    def full(theirs: Values, layer: int) -> bool:
        period = len(theirs[key]) if isinstance(theirs[key], str) else theirs[key]
        return not period or theirs.get("sliding_window") is None or (layer + 1) % period == 0

    return full


def all_full(theirs: Values, layer: int) -> bool:
    """Return True: by default all layers see all keys."""
    return True


def _types(theirs: Values, full: SeesAll) -> list[str]:
    """Return the kinds of layers in `layer_types`, by default as `full` says."""
    every = range(theirs["num_hidden_layers"])
    if given := theirs.get("layer_types"):
        if len(given) != len(every):
            raise ConfigError(f"layer_types has {len(given)} entries for {len(every)} layers")
        if "sliding_attention" in given and theirs.get("sliding_window") is None:
            raise ConfigError("layer_types has sliding_attention, and sliding_window is null")
        return list(given)
    return ["full_attention" if full(theirs, layer) else "sliding_attention" for layer in every]


def _window(types: list[str], window: int | None) -> Fields:
    """Return our fields for these layers, which are None where all layers are the same."""
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported for this model type"
            )
    if set(types) == {"full_attention"}:
        return {}
    return {
        "sliding_window": window,
        "layer_types": None if set(types) == {"sliding_attention"} else types,
    }


def _write_types(config: ModelConfig) -> list[str]:
    return [
        "sliding_attention" if window(layer) is not None else "full_attention"
        for layer in config.layers
    ]


def window_by_flag(full: SeesAll) -> ConfigKeys:
    """Return the part of families with `use_sliding_window`, without which all layers see all keys."""

    def read(theirs: Values) -> Fields:
        window = theirs.get("sliding_window") if theirs.get("use_sliding_window") else None
        types = _types(theirs, full if window else all_full)
        if window is None and "sliding_attention" in types:
            raise ConfigError("layer_types has sliding_attention, and use_sliding_window is false")
        return _window(types, window)

    def write(config: ModelConfig) -> Fields:
        types = _write_types(config)
        slides = "sliding_attention" in types
        window = config.sliding_window if slides else None
        return {"use_sliding_window": slides, "sliding_window": window, "layer_types": types}

    return ConfigKeys(
        ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), read, write
    )


def _write_window(config: ModelConfig) -> Fields:
    """Return a window even where no layer has one, since transformers makes its mask anyway."""
    window = config.sliding_window or config.max_position_embeddings
    return {"sliding_window": window, "layer_types": _write_types(config)}


def window_by_layer(full: SeesAll, *keys: str) -> ConfigKeys:
    """Return the part of families with `layer_types`, which follow from `full` where they are absent from `keys`."""
    return ConfigKeys(
        ("sliding_window", "layer_types", *keys),
        lambda theirs: _window(_types(theirs, full), theirs.get("sliding_window")),
        _write_window,
    )


def window_with_rope(full: SeesAll, *keys: str, unless_none: bool = False) -> ConfigKeys:
    """Return `window_by_layer` for families in which layers without a window have no RoPE.

    With `unless_none`, all layers of a model without any window have it.
    """

    def read(theirs: Values) -> Fields:
        types = _types(theirs, full)
        window = theirs.get("sliding_window")
        if window is None and unless_none:
            return _window(types, window)
        rope = [int(kind == "sliding_attention") for kind in types]
        return {**_window(types, window), **({} if all(rope) else {"no_rope_layers": rope})}

    def write(config: ModelConfig) -> Fields:
        found = _write_window(config)
        if unless_none and config.sliding_window is None and config.no_rope_layers is None:
            found |= {"sliding_window": None}
        return {**dict.fromkeys(keys), **found}

    return ConfigKeys(("sliding_window", "layer_types", *keys), read, write)


def rope_by_type(
    full: SeesAll, *keys: str, partial: bool = False, last: bool = False
) -> ConfigKeys:
    """Return the part of families whose layers with a window have their own RoPE.

    `rope_parameters` has one entry for each kind of layer. In older files `rope_theta` and `rope_scaling` belong to
    the layers without a window, and the default `rope_local_base_freq` is the base of the others. YaRN's `truncate` has
    no effect: transformers 5.23 looks for it outside of these entries. With `last` the last layer sees all keys.
    """
    one = read_rope if partial else _read_whole_rope

    def read(theirs: Values) -> Fields:
        types = _types(theirs, full)
        given = theirs.get("rope_parameters") or {}
        if last:
            types = [*types[:-1], "full_attention"]
        local = {"rope_theta": theirs["rope_local_base_freq"]}
        other = {"rope_theta": theirs["rope_theta"], **(theirs.get("rope_scaling") or {})}
        if any(isinstance(value, Mapping) for value in given.values()):
            other |= given.get("full_attention") or {}
            local |= given.get("sliding_attention") or {}
        else:
            other |= given
        for values in (other, local):
            values.pop("truncate", None)
        found, sliding = (one({"rope_parameters": values}) for values in (other, local))
        ours = {**_window(types, theirs.get("sliding_window")), **found}
        if "sliding_attention" in types and sliding != found:
            scaling = sliding.pop("rope_scaling", {})
            ours["sliding_rope"] = {**sliding, **scaling}
        return ours

    def write(config: ModelConfig) -> Fields:
        both = {"full_attention": config.rope, "sliding_attention": config.window_rope}
        ropes = {kind: rope_parameters(own, partial) for kind, own in both.items()}
        return {**_write_window(config), "rope_parameters": ropes}

    known = (
        "sliding_window",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
    )
    return ConfigKeys((*known, *keys), read, write)


def _read_layer_thetas(theirs: Values) -> Fields:
    """Read `layer_rope_theta`, the base of each layer, 0 without RoPE; layers of one kind must share theirs."""
    types = _types(theirs, _every(4))
    found = _read_whole_rope(theirs)
    base = found.setdefault("rope_theta", 10000.0)
    thetas = theirs.get("layer_rope_theta") or [base] * len(types)
    if len(thetas) != len(types):
        raise ConfigError(f"layer_rope_theta has {len(thetas)} entries for {len(types)} layers")
    ours = {**_window(types, theirs.get("sliding_window")), **found}
    if not all(thetas):
        ours["no_rope_layers"] = [int(theta != 0) for theta in thetas]
    own: dict[str, float] = {}
    for kind, theta in zip(types, thetas, strict=True):
        if theta and own.setdefault(kind, theta) != theta:
            raise ConfigError(f"layer_rope_theta with different bases of {kind} is not supported")
    if "full_attention" in own:
        ours["rope_theta"] = own["full_attention"]
    elif "sliding_attention" in own:
        # The base that a layer without a window would have means nothing.
        ours["rope_theta"] = own["sliding_attention"]
    if own.get("sliding_attention", ours["rope_theta"]) != ours["rope_theta"]:
        ours["sliding_rope"] = {
            "rope_theta": own["sliding_attention"],
            **found.get("rope_scaling", {}),
        }
    return ours


def _write_layer_thetas(config: ModelConfig) -> Fields:
    thetas = []
    for layer in config.layers:
        # Any config is written, to see what the family lacks: a recurrent layer has no RoPE.
        rope = layer.mixer.rope if isinstance(layer.mixer, SoftmaxAttentionSpec) else None
        thetas.append(0 if rope is None else rope.theta)
    return {**_write_rope(config), **_write_window(config), "layer_rope_theta": thetas}


def _muse_full(theirs: Values, layer: int) -> bool:
    """Return whether a layer is one of every fourth from the last, by default without window and RoPE."""
    return (theirs["num_hidden_layers"] - 1 - layer) % 4 == 0


def _read_muse_layers(theirs: Values) -> Fields:
    """Read which layers have a window, and which have no RoPE; the base is one for all others."""
    types = _types(theirs, _muse_full)
    thetas = theirs.get("layer_rope_theta")
    if thetas is None:
        rotated = [not _muse_full(theirs, layer) for layer in range(len(types))]
    else:
        rotated = [bool(theta) for theta in thetas]
    found = {**_window(types, theirs.get("sliding_window")), **_read_whole_rope(theirs)}
    return found if all(rotated) else {**found, "no_rope_layers": [int(one) for one in rotated]}


def rope_parameters(rope: Rope, partial: bool = False) -> Fields:
    """Return RoPE in the form of transformers 5."""
    share = {"partial_rotary_factor": rope.share} if partial else {}
    scaling = copy.deepcopy(rope.scaling) or {"rope_type": "default"}
    return {"rope_theta": rope.theta, **share, **scaling}


def _rope_layers(theirs: Values) -> list[int]:
    count = theirs["num_hidden_layers"]
    interval = theirs["no_rope_layer_interval"]
    return theirs.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(count)
    ]


def _read_no_rope(theirs: Values) -> Fields:
    count = theirs["num_hidden_layers"]
    layers = _rope_layers(theirs)[:count]
    return {} if layers == [1] * count else {"no_rope_layers": layers}


def _write_no_rope(config: ModelConfig) -> Fields:
    return {"no_rope_layers": list(config.no_rope_layers or [1] * config.num_hidden_layers)}


def _read_llama4_layers(theirs: Values) -> Fields:
    """Read which layers have RoPE, and in which attention stays in chunks: by default the same."""
    rope = _rope_layers(theirs)[: theirs["num_hidden_layers"]]
    chunk = theirs.get("attention_chunk_size")
    types = theirs.get("layer_types")
    if not types:
        types = [
            "chunked_attention" if flag and chunk is not None else "full_attention" for flag in rope
        ]
    if len(types) != len(rope):
        raise ConfigError(f"layer_types has {len(types)} entries for {len(rope)} layers")
    for kind in types:
        if kind not in ("full_attention", "chunked_attention"):
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported for this model type"
            )
    found: Fields = {} if all(rope) else {"no_rope_layers": [int(bool(flag)) for flag in rope]}
    if "chunked_attention" in types:
        if chunk is None:
            raise ConfigError("layer_types has chunked_attention, and attention_chunk_size is null")
        found |= {"layer_types": types, "attention_chunk_size": chunk}
    return found


def _write_llama4_layers(config: ModelConfig) -> Fields:
    types = []
    for layer in config.layers:
        # Any config is written, to see what the family lacks.
        chunked = isinstance(layer.mixer, SoftmaxAttentionSpec) and layer.mixer.chunk is not None
        types.append("chunked_attention" if chunked else "full_attention")
    return {
        **_write_no_rope(config),
        "layer_types": types,
        "attention_chunk_size": config.attention_chunk_size,
    }


def _read_temperature(theirs: Values) -> Fields:
    """Read the scale of queries in layers without RoPE."""
    if not theirs["attn_temperature_tuning"] or not theirs["attn_scale"]:
        return {}
    return {
        "query_scale_beta": theirs["attn_scale"],
        "query_scale_length": theirs["floor_scale"],
        "query_scale_rule": "slot",
    }


def _write_temperature(config: ModelConfig) -> Fields:
    if config.query_scale_beta is None:
        return {"attn_temperature_tuning": False}
    return {
        "attn_temperature_tuning": True,
        "attn_scale": config.query_scale_beta,
        "floor_scale": config.query_scale_length,
    }


# The defaults of transformers where a config.json has no RoPE.
_MINISTRAL3 = dict(
    rope_type="yarn", rope_theta=1000000.0, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
    beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
_MISTRAL4 = {
    **_MINISTRAL3,
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def _read_query_scale(theirs: Values) -> Fields:
    """Read the RoPE of Ministral 3, whose parameters include the scale of queries."""
    values = {**(theirs.get("rope_scaling") or theirs.get("rope_parameters") or _MINISTRAL3)}
    beta = values.pop("llama_4_scaling_beta", None)
    length = values.get("original_max_position_embeddings")
    values.pop("max_position_embeddings", None)
    if values.get("rope_type", values.get("type")) in ("default", "linear", "dynamic"):
        values.pop("original_max_position_embeddings", None)
    found = _read_whole_rope({**theirs, "rope_scaling": None, "rope_parameters": values})
    return {**found, "query_scale_beta": beta, "query_scale_length": length} if beta else found


def _write_query_scale(config: ModelConfig) -> Fields:
    scaling = rope_parameters(config.rope)
    length = config.query_scale_length or scaling.get(
        "original_max_position_embeddings", config.max_position_embeddings
    )
    scaling |= {
        "llama_4_scaling_beta": config.query_scale_beta or 0.0,
        "original_max_position_embeddings": length,
    }
    return {"rope_parameters": scaling}


def _read_mistral4_rope(theirs: Values) -> Fields:
    """Read the RoPE of Mistral 4, whose share of rotated channels follows from the sizes of its heads."""
    values = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or _MISTRAL4)
    rotated = theirs["qk_rope_head_dim"]
    whole = theirs["qk_nope_head_dim"] + rotated
    share = values.pop("partial_rotary_factor", rotated / whole)
    if int(whole * share) != rotated:
        raise ConfigError(
            f"partial_rotary_factor={share} rotates other channels than qk_rope_head_dim"
        )
    return _read_query_scale({**theirs, "rope_scaling": None, "rope_parameters": values})


def _write_mistral4_rope(config: ModelConfig) -> Fields:
    """Return the RoPE with the share of each head that is rotated, of which transformers takes the frequencies."""
    found = _write_query_scale(config)
    sizes = config.latent_attention
    if sizes is None:
        raise ConfigError("a family with latent attention writes no model without it")
    share = sizes.qk_rope_head_dim / sizes.qk_head_dim
    return {"rope_parameters": {**found["rope_parameters"], "partial_rotary_factor": share}}


def _read_hunyuan_rope(theirs: Values) -> Fields:
    """Read a RoPE whose base a fixed `alpha` stretches, under the name of a scaling that depends on the length."""
    values = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or {})
    alpha = values.pop("alpha", None)
    if not alpha or values.get("rope_type", values.get("type")) != "dynamic":
        return _read_whole_rope({**theirs, "rope_scaling": None, "rope_parameters": values})
    size = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    theta = values.get("rope_theta", theirs.get("rope_theta", 10000.0))
    return {"rope_theta": theta * alpha ** (size / (size - 2))}


def _read_deepseek_yarn(theirs: Values) -> Fields:
    """Read a RoPE whose YaRN has another name."""
    scaling = theirs.get("rope_scaling") or {}
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        scaling = {**scaling, "rope_type": "yarn"}
        scaling.pop("type", None)
        theirs = {**theirs, "rope_scaling": scaling}
    return _read_whole_rope(theirs)


def _read_su_rope(theirs: Values) -> Fields:
    """Read the RoPE of Phi-3, whose LongRoPE has had two other names and its original context in a key of its own."""
    values = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    kind = values.pop("type", "default")
    values.setdefault("rope_type", kind)
    if values["rope_type"] in ("su", "yarn", "longrope"):
        values |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": theirs["original_max_position_embeddings"],
        }
    else:
        values.pop("original_max_position_embeddings", None)
    return read_rope({**theirs, "rope_scaling": None, "rope_parameters": values})


def _write_su_rope(config: ModelConfig) -> Fields:
    found = _write_partial_rope(config)
    original = (config.rope_scaling or {}).get(
        "original_max_position_embeddings", config.max_position_embeddings
    )
    return {**found, "original_max_position_embeddings": original}


# The default of transformers where a config.json has no RoPE.
_GPT_OSS = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096,
)  # fmt: skip


def _read_gpt_oss_rope(theirs: Values) -> Fields:
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    return _read_whole_rope(theirs if given else {**theirs, "rope_parameters": _GPT_OSS})


_ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
)  # fmt: skip
ROPE = ConfigKeys(_ROPE_KEYS, _read_whole_rope, _write_rope)
PARTIAL_ROPE = ConfigKeys(_ROPE_KEYS, read_rope, _write_partial_rope)
WHOLE_HEADS_ROPE = ConfigKeys(_ROPE_KEYS, _read_rope_of_whole_heads, _write_rope)
SU_ROPE = ConfigKeys(_ROPE_KEYS, _read_su_rope, _write_su_rope)
GPT_OSS_ROPE = ConfigKeys(
    ROPE.keys, _read_gpt_oss_rope, lambda config: {"rope_parameters": rope_parameters(config.rope)}
)
QUERY_SCALE_ROPE = ConfigKeys(ROPE.keys, _read_query_scale, _write_query_scale)
HUNYUAN_ROPE = ConfigKeys(ROPE.keys, _read_hunyuan_rope, _write_rope)
MISTRAL4_ROPE = ConfigKeys(ROPE.keys, _read_mistral4_rope, _write_mistral4_rope)
DEEPSEEK_YARN_ROPE = ConfigKeys(ROPE.keys, _read_deepseek_yarn, _write_rope)
WINDOW = same("sliding_window")
WINDOW_BY_FLAG = window_by_flag(lambda theirs, layer: layer < theirs["max_window_layers"])
EVEN_SLIDE_BY_FLAG = window_by_flag(
    lambda theirs, layer: layer % 2 == 1 or layer >= theirs["max_window_layers"]
)
WINDOW_WITHOUT_ROPE = window_by_flag(lambda theirs, layer: bool(_rope_layers(theirs)[layer]))
ALL_SLIDE = window_by_layer(lambda theirs, layer: theirs.get("sliding_window") is None)
DOTS_WINDOW = window_by_layer(
    lambda theirs, layer: (
        theirs.get("sliding_window") is None or layer < theirs["max_window_layers"]
    ),
    "max_window_layers",
)
FIRST_OF_FOUR_IS_FULL = window_by_layer(_every(4))
SECOND_IS_FULL = window_by_layer(_every(2, 1))
OLMO3_ROPE = rope_by_type(_every(4, 3))
GEMMA3_ROPE = rope_by_type(_by_pattern("sliding_window_pattern"), "sliding_window_pattern")
GEMMA4_ROPE = rope_by_type(_every(6, 5), last=True)
GEMMA4_HEADS = ConfigKeys(
    ("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads",
     "attention_k_eq_v", "per_layer_config"),
    _read_gemma4_heads,
    _write_gemma4_heads,
)  # fmt: skip
GEMMA4_SMALL = ConfigKeys(
    ("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    _read_gemma4_small,
    _write_gemma4_small,
)  # fmt: skip
MELLUM_ROPE = rope_by_type(all_full)
LAGUNA_ROPE = rope_by_type(all_full, partial=True)
EXAONE_WINDOW = window_with_rope(
    _by_pattern("sliding_window_pattern"), "sliding_window_pattern", unless_none=True
)
COHERE2_WINDOW = window_with_rope(_by_pattern("sliding_window_pattern"), "sliding_window_pattern")
FLINT_WINDOW = window_with_rope(
    lambda theirs, layer: layer < 2 or layer % 4 == 1 or layer == theirs["num_hidden_layers"] - 1
)
AFMOE_WINDOW = window_with_rope(
    _by_pattern("global_attn_every_n_layers"), "global_attn_every_n_layers"
)
LLAMA4_LAYERS = ConfigKeys(
    ("no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size"),
    _read_llama4_layers,
    _write_llama4_layers,
)
LLAMA4_TEMPERATURE = ConfigKeys(
    ("attn_temperature_tuning", "attn_scale", "floor_scale"), _read_temperature, _write_temperature
)
NO_ROPE = ConfigKeys(("no_rope_layers", "no_rope_layer_interval"), _read_no_rope, _write_no_rope)
LAYER_THETAS = ConfigKeys(
    (*_ROPE_KEYS, "sliding_window", "layer_types", "layer_rope_theta"),
    _read_layer_thetas,
    _write_layer_thetas,
)


def rotary_channels(theirs: Values) -> Values:
    """Return a config.json in which `rotary_dim`, the rotated channels of a head, became a share of them."""
    size = theirs.get("rotary_dim")
    if size is None or "partial_rotary_factor" in theirs:
        return theirs
    return {**theirs, "partial_rotary_factor": size / theirs["head_dim"]}


MUSE_LAYERS = ConfigKeys(LAYER_THETAS.keys, _read_muse_layers, _write_layer_thetas)
MINIMAX_ROPE = ConfigKeys(
    (*_ROPE_KEYS, "rotary_dim"),
    lambda theirs: read_rope(rotary_channels(theirs)),
    _write_partial_rope,
)
