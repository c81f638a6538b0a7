"""Keys of config.json that say which layers have a window, which have RoPE, and which of two RoPEs. No torch."""

from collections.abc import Mapping

from te_models.config.attention import SoftmaxAttentionSpec, window
from te_models.config.model import ModelConfig
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, SeesAll, Values, same
from te_models.interop.hf_rope_parts import (
    ROPE_KEYS,
    read_rope,
    read_whole_rope,
    rope_parameters,
    write_rope,
)


def full_every(period: int, first: int = 0) -> SeesAll:
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


def kinds_of_layers(theirs: Values, full: SeesAll) -> list[str]:
    """Return the kinds of layers in `layer_types`, by default as `full` says."""
    every = range(theirs["num_hidden_layers"])
    # layer_types wins over the keys from which older files derive it, as in transformers.
    if types := theirs.get("layer_types"):
        if len(types) != len(every):
            raise ConfigError(f"layer_types has {len(types)} entries for {len(every)} layers")
        if "sliding_attention" in types and theirs.get("sliding_window") is None:
            raise ConfigError("layer_types has sliding_attention, and sliding_window is null")
        return list(types)
    return ["full_attention" if full(theirs, layer) else "sliding_attention" for layer in every]


def _window(types: list[str], window: int | None) -> Fields:
    """Return our fields for these layers, which are None where all layers are the same."""
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer_types holds {kind!r}, which is not supported for this model type"
            )
    # A window that no layer uses would make an otherwise equal config differ, and family_for compares configs.
    if set(types) == {"full_attention"}:
        return {}
    return {
        "sliding_window": window,
        "layer_types": None if set(types) == {"sliding_attention"} else types,
    }


def write_kinds(config: ModelConfig) -> list[str]:
    """Return the kind of each layer for `layer_types`."""
    kinds = []
    for layer in config.layers:
        if window(layer) is not None:
            kinds.append("sliding_attention")
        else:
            kinds.append("full_attention")
    return kinds


def window_by_flag(full: SeesAll) -> ConfigKeys:
    """Return the part of families with `use_sliding_window`, without which all layers see all keys."""

    def read(theirs: Values) -> Fields:
        window = theirs.get("sliding_window") if theirs.get("use_sliding_window") else None
        types = kinds_of_layers(theirs, full if window else all_full)
        # transformers sets the window to None by the flag, and would then mask nothing in those layers: neither reading
        # is sure.
        if window is None and "sliding_attention" in types:
            raise ConfigError("layer_types has sliding_attention, and use_sliding_window is false")
        return _window(types, window)

    def write(config: ModelConfig) -> Fields:
        types = write_kinds(config)
        slides = "sliding_attention" in types
        window = config.sliding_window if slides else None
        return {"use_sliding_window": slides, "sliding_window": window, "layer_types": types}

    return ConfigKeys(
        ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), read, write
    )


def _write_window(config: ModelConfig) -> Fields:
    """Return a window even where no layer has one, since transformers makes its mask anyway."""
    window = config.sliding_window or config.max_position_embeddings
    return {"sliding_window": window, "layer_types": write_kinds(config)}


def window_by_layer(full: SeesAll, *keys: str) -> ConfigKeys:
    """Return the part of families with `layer_types`, which follow from `full` where they are absent from `keys`."""
    return ConfigKeys(
        ("sliding_window", "layer_types", *keys),
        lambda theirs: _window(kinds_of_layers(theirs, full), theirs.get("sliding_window")),
        _write_window,
    )


def window_with_rope(full: SeesAll, *keys: str, unless_none: bool = False) -> ConfigKeys:
    """Return `window_by_layer` for families in which layers without a window have no RoPE.

    With `unless_none`, all layers of a model without any window have it.
    """

    def read(theirs: Values) -> Fields:
        types = kinds_of_layers(theirs, full)
        window = theirs.get("sliding_window")
        if window is None and unless_none:
            return _window(types, window)
        rope = [int(kind == "sliding_attention") for kind in types]
        return {**_window(types, window), **({} if all(rope) else {"no_rope_layers": rope})}

    def write(config: ModelConfig) -> Fields:
        written = _write_window(config)
        # EXAONE 4 tells a model with RoPE everywhere from one without it in some layers by a window of null.
        if unless_none and config.sliding_window is None and config.no_rope_layers is None:
            written |= {"sliding_window": None}
        return {**dict.fromkeys(keys), **written}

    return ConfigKeys(("sliding_window", "layer_types", *keys), read, write)


def rope_by_type(
    full: SeesAll, *keys: str, partial: bool = False, last: bool = False
) -> ConfigKeys:
    """Return the part of families whose layers with a window have their own RoPE.

    `rope_parameters` has one entry for each kind of layer. In older files `rope_theta` and `rope_scaling` belong to
    the layers without a window, and the default `rope_local_base_freq` is the base of the others. YaRN's `truncate` has
    no effect: transformers 5.23 looks for it outside of these entries. With `last` the last layer sees all keys.
    """
    one = read_rope if partial else read_whole_rope

    def read(theirs: Values) -> Fields:
        types = kinds_of_layers(theirs, full)
        parameters = theirs.get("rope_parameters") or {}
        if last:
            # Gemma 4's code forces this too, after it has read layer_types.
            types = [*types[:-1], "full_attention"]
        # Older files scale only the RoPE of layers that see all keys; a window is shorter than any context they were
        # trained on.
        local = {"rope_theta": theirs["rope_local_base_freq"]}
        other = {"rope_theta": theirs["rope_theta"], **(theirs.get("rope_scaling") or {})}
        if any(isinstance(value, Mapping) for value in parameters.values()):
            other |= parameters.get("full_attention") or {}
            local |= parameters.get("sliding_attention") or {}
        else:
            other |= parameters
        for values in (other, local):
            values.pop("truncate", None)
        rope = one({"rope_parameters": other})
        sliding = one({"rope_parameters": local})
        ours = {**_window(types, theirs.get("sliding_window")), **rope}
        if "sliding_attention" in types and sliding != rope:
            scaling = sliding.pop("rope_scaling", {})
            ours["sliding_rope"] = {**sliding, **scaling}
        return ours

    def write(config: ModelConfig) -> Fields:
        both = {"full_attention": config.rope, "sliding_attention": config.window_rope}
        ropes = {kind: rope_parameters(rope, partial) for kind, rope in both.items()}
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
    types = kinds_of_layers(theirs, full_every(4))
    fields = read_whole_rope(theirs)
    base = fields.setdefault("rope_theta", 10000.0)
    thetas = theirs.get("layer_rope_theta") or [base] * len(types)
    if len(thetas) != len(types):
        raise ConfigError(f"layer_rope_theta has {len(thetas)} entries for {len(types)} layers")
    ours = {**_window(types, theirs.get("sliding_window")), **fields}
    if not all(thetas):
        ours["no_rope_layers"] = [int(theta != 0) for theta in thetas]
    theta_by_kind: dict[str, float] = {}
    for kind, theta in zip(types, thetas, strict=True):
        if theta and theta_by_kind.setdefault(kind, theta) != theta:
            raise ConfigError(f"layer_rope_theta with different bases of {kind} is not supported")
    if "full_attention" in theta_by_kind:
        ours["rope_theta"] = theta_by_kind["full_attention"]
    elif "sliding_attention" in theta_by_kind:
        # The base that a layer without a window would have means nothing.
        ours["rope_theta"] = theta_by_kind["sliding_attention"]
    if theta_by_kind.get("sliding_attention", ours["rope_theta"]) != ours["rope_theta"]:
        ours["sliding_rope"] = {
            "rope_theta": theta_by_kind["sliding_attention"],
            **fields.get("rope_scaling", {}),
        }
    return ours


def _write_layer_thetas(config: ModelConfig) -> Fields:
    thetas = []
    for layer in config.layers:
        # Any config is written, to see what the family lacks: a recurrent layer has no RoPE.
        rope = layer.mixer.rope if isinstance(layer.mixer, SoftmaxAttentionSpec) else None
        thetas.append(0 if rope is None else rope.theta)
    return {**write_rope(config), **_write_window(config), "layer_rope_theta": thetas}


def _muse_full(theirs: Values, layer: int) -> bool:
    """Return whether a layer is one of every fourth from the last, by default without window and RoPE."""
    return (theirs["num_hidden_layers"] - 1 - layer) % 4 == 0


def _read_muse_layers(theirs: Values) -> Fields:
    """Read which layers have a window, and which have no RoPE; the base is one for all others."""
    types = kinds_of_layers(theirs, _muse_full)
    thetas = theirs.get("layer_rope_theta")
    if thetas is None:
        rotated = [not _muse_full(theirs, layer) for layer in range(len(types))]
    else:
        rotated = [bool(theta) for theta in thetas]
    fields = {**_window(types, theirs.get("sliding_window")), **read_whole_rope(theirs)}
    return fields if all(rotated) else {**fields, "no_rope_layers": [int(one) for one in rotated]}


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
        # As in Llama 4: layers with RoPE see a chunk, and the others, without positions, see everything.
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
    fields: Fields = {} if all(rope) else {"no_rope_layers": [int(bool(flag)) for flag in rope]}
    if "chunked_attention" in types:
        if chunk is None:
            raise ConfigError("layer_types has chunked_attention, and attention_chunk_size is null")
        fields |= {"layer_types": types, "attention_chunk_size": chunk}
    return fields


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
FIRST_OF_FOUR_IS_FULL = window_by_layer(full_every(4))
SECOND_IS_FULL = window_by_layer(full_every(2, 1))
OLMO3_ROPE = rope_by_type(full_every(4, 3))
GEMMA3_ROPE = rope_by_type(_by_pattern("sliding_window_pattern"), "sliding_window_pattern")
GEMMA4_ROPE = rope_by_type(full_every(6, 5), last=True)
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


NO_ROPE = ConfigKeys(("no_rope_layers", "no_rope_layer_interval"), _read_no_rope, _write_no_rope)
LAYER_THETAS = ConfigKeys(
    (*ROPE_KEYS, "sliding_window", "layer_types", "layer_rope_theta"),
    _read_layer_thetas,
    _write_layer_thetas,
)


MUSE_LAYERS = ConfigKeys(LAYER_THETAS.keys, _read_muse_layers, _write_layer_thetas)
