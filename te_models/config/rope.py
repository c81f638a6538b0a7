"""Rotary embeddings (RoPE) as data: which channels rotate, how fast, and the scaling to longer contexts. No torch.

RoPE is from arXiv 2104.09864, YaRN from 2309.00071 and LongRoPE from 2402.13753; the fields and their names are
the ones of transformers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config.settings import Setting
from te_models.errors import ConfigError, refuse

Scaling = Mapping[str, Any]  # fields of `rope_scaling` or `sliding_rope`
Items = tuple[tuple[str, Any], ...]

# Kind of RoPE scaling -> (required, optional) fields beside `rope_type`; te_models.model.rope computes them.
ROPE_SCALINGS = {
    "linear": (("factor",), ()),
    # partial_rotary_factor is part of the scaling here: pairs lie half a head apart as without it, and those beyond the
    # share have angle zero.
    "proportional": ((), ("partial_rotary_factor", "factor")),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("original_max_position_embeddings", "factor", "attention_factor"),
    ),
}


def _field(name: str, *kinds: type, group: str = "rope_scaling", **about: Any) -> Setting:
    """Return a field of `rope_scaling` or `sliding_rope`; numbers are above 0."""
    return Setting(
        name=f"{group}.{name}", help="", kinds=kinds or (float,), members=float, above=True, **about
    )


PER_PAIR = ("short_factor", "long_factor")  # have one number for each pair of rotated channels


def _scaling_fields() -> dict[str, Setting]:
    """Return the check of each field that a kind of scaling may have."""
    fields = {}
    for required, optional in ROPE_SCALINGS.values():
        for name in required + optional:
            fields[name] = _field(name, tuple) if name in PER_PAIR else _field(name)
    fields["truncate"] = _field("truncate", bool)
    return fields


_FIELDS = _scaling_fields()
_SLIDING = {
    name: _field(name, group="sliding_rope") for name in ("rope_theta", "partial_rotary_factor")
}


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one kind of attention layer.

    Attributes:
        theta: the base of the frequencies.
        head_dim: channels of a head.
        share: the fraction of the head's channels that is rotated.
        context: max_position_embeddings, which some scalings use.
        interleaved: rotate pairs of neighboring channels, instead of channel i with channel i + size / 2.
        stretching: the items of `scaling` as a hashable tuple; empty without scaling.
    """

    theta: float
    head_dim: int
    share: float
    context: int
    interleaved: bool = False
    stretching: Items = ()

    @property
    def scaling(self) -> Scaling | None:
        """Return the fields of `rope_scaling` with its `rope_type`; None without scaling."""
        values = {}
        for name, value in self.stretching:
            if isinstance(value, tuple):
                # A tuple only to be hashable: transformers, and config.json, have a list.
                values[name] = list(value)
            else:
                values[name] = value
        return values or None

    @property
    def size(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.share)

    @property
    def original_context(self) -> int:
        """Positions before any stretching."""
        return (self.scaling or {}).get("original_max_position_embeddings", self.context)

    @property
    def longest_sequence(self) -> int:
        """Positions per row: max_position_embeddings, or the stretched context where that is longer.

        The factor of dynamic NTK is relative to max_position_embeddings, in YaRN and LongRoPE to the original
        context.
        """
        scaling = self.scaling or {}
        if scaling.get("rope_type") not in ("dynamic", "yarn", "longrope"):
            return self.context
        return max(self.context, int(self.original_context * scaling.get("factor", 1)))


def frozen(scaling: Scaling | None) -> Items:
    """Return the items of `rope_scaling` as a hashable tuple, with tuples in place of lists."""
    items = []
    for name, value in (scaling or {}).items():
        items.append((name, tuple(value) if isinstance(value, list) else value))
    return tuple(items)


def rotary_mistakes(head_dim: int, factor: float) -> Iterator[str]:
    """Yield a line if RoPE would not rotate pairs of channels."""
    size = int(head_dim * factor)
    if size < 2 or size % 2 or size > head_dim:
        yield (
            f"partial_rotary_factor={factor} rotates {size} of head_dim={head_dim} channels: it must be an even number "
            "from 2 to head_dim"
        )


def checked_sliding_rope(rope: Scaling, head_dim: int) -> Scaling:
    """Return `sliding_rope` with exactly the fields that it needs: the base, and the share and the scaling if any.

    Raises:
        ConfigError: it lacks `rope_theta`, or a field is unknown, has a wrong value, or is not supported.
    """
    scaling = dict(rope)
    names = list(_SLIDING)
    # The share is a field of this scaling, and not of the rotary embedding before it.
    if _kind(scaling) == "proportional":
        names.remove("partial_rotary_factor")
    sliding = {}
    for name in names:
        if name in scaling:
            sliding[name] = scaling.pop(name)
    if "rope_theta" not in sliding:
        raise ConfigError("sliding_rope lacks rope_theta")
    for name, value in sliding.items():
        _SLIDING[name].check(value)
    # A share of one is the default: equal models have equal configs.
    if sliding.get("partial_rotary_factor") == 1.0:
        del sliding["partial_rotary_factor"]
    # "default" is the name that transformers gives to RoPE without scaling.
    if _kind(scaling) == "default":
        scaling = {name: value for name, value in scaling.items() if name not in KIND}
    share = sliding.get("partial_rotary_factor", 1.0)
    refuse(rotary_mistakes(head_dim, share), ConfigError)
    if scaling:
        pairs = int(head_dim * share) // 2
        sliding |= checked_scaling(scaling, pairs)
    return sliding


def checked_scaling(scaling: Scaling, pairs: int) -> Scaling:
    """Return `rope_scaling` with exactly the fields of its type; a ConfigError names a field that is not supported."""
    scaling_values = {}
    for name, value in scaling.items():
        # transformers takes an mscale of 0 as none.
        absent = value is None or (name.startswith("mscale") and value == 0)
        if name not in KIND and not absent:
            scaling_values[name] = value
    kind = _kind(scaling)
    refuse(_scaling_mistakes(kind, scaling_values, pairs), ConfigError)
    required, optional = ROPE_SCALINGS[kind]
    checked = {"rope_type": kind}
    for name in required + optional:
        if name in scaling_values:
            checked[name] = scaling_values[name]
    return checked


KIND = ("rope_type", "type")  # names of the field that says which scaling it is


def _kind(scaling: Scaling) -> Any:
    return scaling.get("rope_type", scaling.get("type"))


def _scaling_mistakes(kind: object, scaling: Scaling, pairs: int) -> Iterator[str]:
    """Yield a line for each missing or unsupported field of a kind of scaling, and for each wrong number of values."""
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        yield f"rope_scaling of type {kind!r} is not supported: choose from {', '.join(ROPE_SCALINGS)}"
        return
    required, optional = ROPE_SCALINGS[kind]
    known = required + optional
    for name, value in scaling.items():
        if name not in known:
            yield f"rope_scaling of type {kind!r} with {name}={value!r} is not supported: it takes {known}"
        _FIELDS[name].check(value)
        if name in PER_PAIR and len(value) != pairs:
            yield f"rope_scaling.{name} has {len(value)} numbers: give {pairs}, one for each pair of rotated channels"
    if missing := [name for name in required if name not in scaling]:
        yield f"rope_scaling of type {kind!r} lacks {', '.join(missing)}"
