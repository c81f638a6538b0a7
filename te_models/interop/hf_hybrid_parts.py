"""Keys of config.json of models whose layers differ in kind, for the rows of hf_families. No torch.

Facts: the configuration and modeling files of transformers 5.23.
"""

import dataclasses

from te_models.config.deltanet import DeltaNetConfig
from te_models.config.latent import LatentConfig
from te_models.config.model import ModelConfig
from te_models.config.rope import ROPE_SCALINGS
from te_models.errors import ConfigError
from te_models.interop.hf_parts import ConfigKeys, Fields, Values
from te_models.interop.hf_rope_parts import PARTIAL_ROPE, ROPE, read_rope, rope_parameters

DELTANET_SIZES = tuple(field.name for field in dataclasses.fields(DeltaNetConfig))
# All but norm_eps, which is the same in all models.
LATENT_SIZES = tuple(
    field.name for field in dataclasses.fields(LatentConfig) if field.name != "norm_eps"
)


_LINEAR = "linear_"  # the prefix of the sizes of Gated DeltaNet


def _read_hybrid(theirs: Values) -> Fields:
    """Read the kinds of layers, by default one of full_attention after three of linear_attention, and their sizes."""
    interval = theirs.get("full_attention_interval", 4)
    types = theirs.get("layer_types")
    if not types:
        layers = range(1, theirs["num_hidden_layers"] + 1)
        types = [
            "full_attention" if layer % interval == 0 else "linear_attention" for layer in layers
        ]
    for layer, kind in enumerate(types):
        if kind not in ("linear_attention", "full_attention"):
            raise ConfigError(
                f"layer_types: layer {layer} is {kind!r}, which is not supported: te-models reads linear_attention and "
                "full_attention"
            )
    # Without such layers their sizes mean nothing, and the config should equal a plain model's.
    if "linear_attention" not in types:
        return {}
    sizes = {name: theirs[_LINEAR + name] for name in DELTANET_SIZES if _LINEAR + name in theirs}
    return {"layer_types": types, "linear_attention": sizes}


def _write_hybrid(config: ModelConfig) -> Fields:
    """Write the kinds of layers, and the sizes of Gated DeltaNet if there are any."""
    sizes = {} if config.linear_attention is None else vars(config.linear_attention)
    types = list(config.layer_types or ["full_attention"] * config.num_hidden_layers)
    return {"layer_types": types, **{_LINEAR + name: size for name, size in sizes.items()}}


def _without_mrope(theirs: Values) -> Values:
    """Return a config.json without the division of RoPE's channels among three positions, one number for text."""
    keys = dict(theirs)
    for key in ("rope_scaling", "rope_parameters"):
        values = theirs.get(key) or {}
        # Text alone counts the same in all three positions, so the division among them changes nothing.
        plain = {}
        for name, value in values.items():
            if name.startswith("mrope_"):
                continue
            plain[name] = "default" if value == "mrope" else value
        keys[key] = plain
    return keys


def _read_whole_mrope(theirs: Values) -> Fields:
    """Read RoPE of all channels of a head; of text its three positions are one."""
    return ROPE.read(_without_mrope(theirs))


HYBRID = ConfigKeys(
    ("layer_types", "full_attention_interval", *(_LINEAR + name for name in DELTANET_SIZES)),
    _read_hybrid,
    _write_hybrid,
)
MROPE = ConfigKeys(
    PARTIAL_ROPE.keys,
    lambda theirs: read_rope(_without_mrope(theirs)),
    lambda config: {"rope_parameters": rope_parameters(config.rope, partial=True)},
)
WHOLE_MROPE = ConfigKeys(
    ROPE.keys,
    _read_whole_mrope,
    lambda config: {"rope_parameters": rope_parameters(config.rope)},
)


def _read_latent(theirs: Values) -> Fields:
    """Read the sizes of latent attention, and whether RoPE turns pairs of neighboring channels.

    Raises:
        ConfigError: the file has a factor of the logits that te-models computes under YaRN alone.
    """
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    # Their latent attention takes it from any scaling. One without a type is refused with the other fields of RoPE.
    if rope.get("mscale_all_dim") and kind in ROPE_SCALINGS and kind != "yarn":
        raise ConfigError(
            f"rope_scaling of type {kind!r} with mscale_all_dim={rope['mscale_all_dim']} is not supported for this "
            "model type: te-models reads it with type 'yarn'"
        )
    sizes = {name: theirs[name] for name in LATENT_SIZES}
    return {"latent_attention": sizes, "rope_interleaved": theirs["rope_interleave"]}


def _write_latent(config: ModelConfig) -> Fields:
    """Write what `_read_latent` reads."""
    return {**_write_latent_sizes(config), "rope_interleave": config.rope_interleaved}


def _write_latent_sizes(config: ModelConfig) -> Fields:
    """Write the sizes of latent attention, for a family without the key `rope_interleave`."""
    sizes = {} if config.latent_attention is None else vars(config.latent_attention)
    return {name: size for name, size in sizes.items() if name in LATENT_SIZES}


LATENT = ConfigKeys((*LATENT_SIZES, "rope_interleave"), _read_latent, _write_latent)


def _read_latent_halves(theirs: Values) -> Fields:
    """Read latent attention whose RoPE turns halves; values are by default as wide as heads that fill the width."""
    filled = theirs["hidden_size"] // theirs["num_attention_heads"]
    return _read_latent({"v_head_dim": filled, **theirs, "rope_interleave": False})


# For a family whose RoPE always turns pairs of channels.
LATENT_PAIRS = ConfigKeys(
    LATENT_SIZES,
    lambda theirs: _read_latent({**theirs, "rope_interleave": True}),
    _write_latent_sizes,
)
# For a family without the key `rope_interleave`, and with no other width of heads.
LATENT_HALVES = ConfigKeys(
    (*LATENT_SIZES, "head_dim"),
    lambda theirs: {**_read_latent_halves(theirs), "head_dim": theirs["qk_rope_head_dim"]},
    _write_latent_sizes,
)
# Files that state the width of a head otherwise, or not: our field counts its rotated channels.
ROTATED_HEAD_DIM = ConfigKeys(
    ("head_dim",),
    lambda theirs: {"head_dim": theirs["qk_rope_head_dim"]},
    lambda config: {"head_dim": config.head_dim},
)
WHOLE_HEAD_DIM = ConfigKeys(
    ROTATED_HEAD_DIM.keys,
    ROTATED_HEAD_DIM.read,
    lambda config: {"head_dim": config.latent_attention and config.latent_attention.qk_head_dim},
)
