"""Keys of config.json about RoPE and its scalings, for the rows of hf_families. No torch.

Facts: the configuration and modeling files of transformers 5.23.
"""

import copy
from collections.abc import Mapping

from te_models.config.model import ModelConfig
from te_models.config.rope import ROPE_SCALINGS, Rope
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, Values


def read_rope(theirs: Values) -> Fields:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier versions."""
    values = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("rope_parameters by layer type are not supported for this model type")
    rope: Fields = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        value = values.pop(key, theirs.get(key))
        # null in a file means what an absent key means, so that the family's default applies to both.
        if value is not None:
            rope[key] = value
    # Where both names are there, transformers goes by the newer one.
    kinds = [values.pop(key) for key in ("type", "rope_type") if key in values]
    kind = kinds[-1] if kinds else "default"
    if kind == "proportional" and "partial_rotary_factor" in rope:  # a part of that scaling
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
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
        rope["rope_scaling"] = {"rope_type": kind, **scaling}
    elif meant := [name for name in values if name in SCALING_FIELDS]:
        raise ConfigError(
            f"rope_scaling with {', '.join(meant)} needs a rope_type other than default, such as linear"
        )
    return rope


# partial_rotary_factor is left out: it is a field of one scaling ("proportional"), and of RoPE without any in most
# files.
SCALING_FIELDS = {
    name
    for fields in ROPE_SCALINGS.values()
    for group in fields
    for name in group
    if name != "partial_rotary_factor"
}
# Beside the fields of a scaling; the last two belong to Ministral 3, and mrope_section to Qwen3.5.
_ROPE_FIELDS = {
    "rope_theta",
    "partial_rotary_factor",
    "type",
    "rope_type",
    "llama_4_scaling_beta",
    "max_position_embeddings",
    "alpha",
}


def scaling_fields(kind: str) -> set[str]:
    """Return the fields that transformers reads of a scaling of this kind; all for a kind that is not known."""
    if kind not in ROPE_SCALINGS:
        return SCALING_FIELDS
    required, optional = ROPE_SCALINGS[kind]
    return {*required, *optional}


def unread_rope_fields(theirs: Values) -> list[str]:
    """Return the fields of RoPE in a config.json that transformers does not read, such as "rope_scaling.finetuned"."""
    unread_fields = []
    for key in ("rope_scaling", "rope_parameters"):
        parameters = theirs.get(key)
        if not isinstance(parameters, Mapping):
            continue
        by_type = {name: one for name, one in parameters.items() if isinstance(one, Mapping)}
        for name, values in {key: parameters, **by_type}.items():
            kind = values.get("rope_type", values.get("type", "default"))
            known = _ROPE_FIELDS | scaling_fields(str(kind)) | by_type.keys()
            # The scale of queries relates to it under any RoPE.
            if "llama_4_scaling_beta" in values:
                known |= {"original_max_position_embeddings"}
            place = key if values is parameters else f"{key}.{name}"
            unread = []
            for field in values:
                if field not in known and not field.startswith("mrope_"):
                    unread.append(field)
            unread_fields += [f"{place}.{field}" for field in unread]
    return unread_fields


def read_whole_rope(theirs: Values) -> Fields:
    """Read the RoPE of families in which transformers always rotates whole heads.

    There it ignores `partial_rotary_factor` under the default RoPE, and fails on it under any other.
    """
    fields = read_rope(theirs)
    share = fields.pop("partial_rotary_factor", 1.0)
    if share != 1.0 and "rope_scaling" in fields:
        kind = fields["rope_scaling"]["rope_type"]
        raise ConfigError(
            f"partial_rotary_factor={share} with RoPE of type {kind!r} is not supported for this model type"
        )
    return fields


def _read_rope_of_whole_heads(theirs: Values) -> Fields:
    """Read the RoPE of families in which transformers rotates a share of each head, and te-models whole ones."""
    fields = read_rope(theirs)
    share = fields.pop("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ConfigError(f"partial_rotary_factor={share} is not supported for this model type")
    return fields


def write_rope(config: ModelConfig) -> Fields:
    """Return the older form, which every version of transformers reads."""
    # to_dict copies the scaling: the caller edits its document, and the config is frozen.
    return {"rope_theta": config.rope_theta, "rope_scaling": config.to_dict()["rope_scaling"]}


def _write_partial_rope(config: ModelConfig) -> Fields:
    return {**write_rope(config), "partial_rotary_factor": config.partial_rotary_factor}


def rope_parameters(rope: Rope, partial: bool = False) -> Fields:
    """Return RoPE in the form of transformers 5."""
    share = {"partial_rotary_factor": rope.share} if partial else {}
    # LongRoPE's scaling holds lists, which a shallow copy would share with the config.
    scaling = copy.deepcopy(rope.scaling) or {"rope_type": "default"}
    return {"rope_theta": rope.theta, **share, **scaling}


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
    rope_type="yarn",
    rope_theta=1000000.0,
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale_all_dim=1.0,
    mscale=1.0,
    llama_4_scaling_beta=0.1,
)
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
    # These scalings do not know the field, and read_rope refuses what a scaling does not know; here it belongs to the
    # scale of queries.
    if values.get("rope_type", values.get("type")) in ("default", "linear", "dynamic"):
        values.pop("original_max_position_embeddings", None)
    fields = read_whole_rope({**theirs, "rope_scaling": None, "rope_parameters": values})
    return {**fields, "query_scale_beta": beta, "query_scale_length": length} if beta else fields


def _write_query_scale(config: ModelConfig) -> Fields:
    scaling = rope_parameters(config.rope)
    # transformers reads this field even where the scale is off (beta 0), so some length has to be written.
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
    keys = _write_query_scale(config)
    sizes = config.latent_attention
    if sizes is None:
        raise ConfigError("a family with latent attention writes no model without it")
    share = sizes.qk_rope_head_dim / sizes.qk_head_dim
    return {"rope_parameters": {**keys["rope_parameters"], "partial_rotary_factor": share}}


def _read_hunyuan_rope(theirs: Values) -> Fields:
    """Read a RoPE whose base a fixed `alpha` stretches, under the name of a scaling that depends on the length."""
    values = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or {})
    alpha = values.pop("alpha", None)
    if not alpha or values.get("rope_type", values.get("type")) != "dynamic":
        return read_whole_rope({**theirs, "rope_scaling": None, "rope_parameters": values})
    # NTK-aware scaling with a constant factor: transformers computes the same base once and then ignores the length, so
    # a plain RoPE with that base is the same model.
    size = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    theta = values.get("rope_theta", theirs.get("rope_theta", 10000.0))
    return {"rope_theta": theta * alpha ** (size / (size - 2))}


def _read_deepseek_yarn(theirs: Values) -> Fields:
    """Read a RoPE whose YaRN has another name."""
    scaling = theirs.get("rope_scaling") or {}
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        scaling = {**scaling, "rope_type": "yarn"}
        # Else the older name, which still says "deepseek_yarn", would be read beside the new one.
        scaling.pop("type", None)
        theirs = {**theirs, "rope_scaling": scaling}
    return read_whole_rope(theirs)


def _read_su_rope(theirs: Values) -> Fields:
    """Read the RoPE of Phi-3, whose LongRoPE has had two other names and its original context in a key of its own."""
    values = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    kind = values.pop("type", "default")
    values.setdefault("rope_type", kind)
    # The releases call it "su" or, wrongly, "yarn": the factors in the file are LongRoPE's in all three.
    if values["rope_type"] in ("su", "yarn", "longrope"):
        values |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": theirs["original_max_position_embeddings"],
        }
    else:
        values.pop("original_max_position_embeddings", None)
    return read_rope({**theirs, "rope_scaling": None, "rope_parameters": values})


def _write_su_rope(config: ModelConfig) -> Fields:
    keys = _write_partial_rope(config)
    original = (config.rope_scaling or {}).get(
        "original_max_position_embeddings", config.max_position_embeddings
    )
    return {**keys, "original_max_position_embeddings": original}


# The default of transformers where a config.json has no RoPE.
_GPT_OSS = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


def _read_gpt_oss_rope(theirs: Values) -> Fields:
    parameters = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    return read_whole_rope(theirs if parameters else {**theirs, "rope_parameters": _GPT_OSS})


ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
ROPE = ConfigKeys(ROPE_KEYS, read_whole_rope, write_rope)
PARTIAL_ROPE = ConfigKeys(ROPE_KEYS, read_rope, _write_partial_rope)
WHOLE_HEADS_ROPE = ConfigKeys(ROPE_KEYS, _read_rope_of_whole_heads, write_rope)
SU_ROPE = ConfigKeys(ROPE_KEYS, _read_su_rope, _write_su_rope)
GPT_OSS_ROPE = ConfigKeys(
    ROPE.keys, _read_gpt_oss_rope, lambda config: {"rope_parameters": rope_parameters(config.rope)}
)
QUERY_SCALE_ROPE = ConfigKeys(ROPE.keys, _read_query_scale, _write_query_scale)
HUNYUAN_ROPE = ConfigKeys(ROPE.keys, _read_hunyuan_rope, write_rope)
MISTRAL4_ROPE = ConfigKeys(ROPE.keys, _read_mistral4_rope, _write_mistral4_rope)
DEEPSEEK_YARN_ROPE = ConfigKeys(ROPE.keys, _read_deepseek_yarn, write_rope)
LLAMA4_TEMPERATURE = ConfigKeys(
    ("attn_temperature_tuning", "attn_scale", "floor_scale"), _read_temperature, _write_temperature
)


def rotary_channels(theirs: Values) -> Values:
    """Return a config.json in which `rotary_dim`, the rotated channels of a head, became a share of them."""
    size = theirs.get("rotary_dim")
    if size is None or "partial_rotary_factor" in theirs:
        return theirs
    return {**theirs, "partial_rotary_factor": size / theirs["head_dim"]}


MINIMAX_ROPE = ConfigKeys(
    (*ROPE_KEYS, "rotary_dim"),
    lambda theirs: read_rope(rotary_channels(theirs)),
    _write_partial_rope,
)
