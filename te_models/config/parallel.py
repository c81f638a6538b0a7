"""Mixers beside each other as data: each reads the one input of the layer, and their outputs are added. No torch.

    x -+- mixer 1 -+-> +
       +- mixer 2 -+

Falcon-H1 has Mamba 2 beside attention in every layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from te_models.config.kinds import MIXERS
from te_models.config.layer import LinearSpec, MixerSpec, Section
from te_models.config.settings import Settings, setting
from te_models.errors import ConfigError

ALONE = ("parallel", "mlp")  # kinds that no layer has beside another


@dataclass(frozen=True)
class ParallelConfig(Settings):
    """The kinds of mixers that run beside each other in "parallel" layers, and their factors.

    Raises:
        ConfigError: there are fewer than two kinds, one of them is no mixer, or there is no factor for each.
    """

    prefix = "parallel_mixers."
    mixers: tuple[str, ...] = setting(
        ("full_attention", "mamba2"),
        "Kinds of mixers, by their names in layer_types.",
        choices=MIXERS,
    )
    input_multipliers: tuple[float, ...] | None = setting(
        None, "One factor per mixer, on its input; None: 1.", least=-math.inf
    )
    output_multipliers: tuple[float, ...] | None = setting(
        None, "One factor per mixer, on its output; None: 1.", least=-math.inf
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mixers) < 2:
            raise ConfigError(
                f"parallel_mixers.mixers={self.mixers!r} is one kind: give two or more"
            )
        for kind in ALONE:
            if kind in self.mixers:
                raise ConfigError(
                    f"parallel_mixers.mixers holds {kind!r}, which has no place there: leave it out"
                )
        for name in ("input_multipliers", "output_multipliers"):
            factors = getattr(self, name)
            if factors is None:
                object.__setattr__(self, name, (1.0,) * len(self.mixers))
            elif len(factors) != len(self.mixers):
                raise ConfigError(
                    f"parallel_mixers.{name} has {len(factors)} entries for {len(self.mixers)} mixers: give as many"
                )


@dataclass(frozen=True)
class ParallelSpec(MixerSpec):
    """The sum of mixers of one input. It answers for all of them, with their module's name before each name.

    Attributes:
        mixers: of this rank's share.
        input_multipliers, output_multipliers: a factor for each.
    """

    mixers: tuple[MixerSpec, ...]
    input_multipliers: tuple[float, ...]
    output_multipliers: tuple[float, ...]

    name: ClassVar[str] = "parallel"
    title: ClassVar[str] = "mixers beside each other"
    keeps = "states of several mixers"

    @property
    def members(self) -> tuple[MixerSpec, ...]:
        return self.mixers

    @property
    def named(self) -> dict[str, MixerSpec]:
        """Name of the module of each mixer, such as "self_attn", and "self_attn_2" of a second one -> the mixer."""
        seen: Counter[str] = Counter()
        mixers: dict[str, MixerSpec] = {}
        for mixer in self.mixers:
            seen[mixer.name] += 1
            number = seen[mixer.name]
            mixers[mixer.name if number == 1 else f"{mixer.name}_{number}"] = mixer
        return mixers

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        linears = []
        for name, mixer in self.named.items():
            for linear in mixer.linears:
                linears.append(dataclasses.replace(linear, name=f"{name}.{linear.name}"))
        return tuple(linears)

    @property
    def vectors(self) -> Mapping[str, int]:
        vectors: dict[str, int] = {}
        for name, mixer in self.named.items():
            for vector, size in mixer.vectors.items():
                vectors[f"{name}.{vector}"] = size
        return MappingProxyType(vectors)

    @property
    def vector_rows(self) -> Mapping[str, tuple[Section, ...]]:
        vectors = {}
        for name, mixer in self.named.items():
            for vector, rows in mixer.vector_rows.items():
                vectors[f"{name}.{vector}"] = rows
        return MappingProxyType(vectors)

    @property
    def obstacles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for mixer in self.mixers for name in mixer.obstacles))

    @property
    def graph_obstacle(self) -> str:
        return next((m.graph_obstacle for m in self.mixers if m.graph_obstacle), "")

    @property
    def features(self) -> Mapping[str, int]:
        features = {"hidden_size": self.hidden_size}
        for name, mixer in self.named.items():
            for feature, size in mixer.features.items():
                known = features.get(feature, size) != size
                features[f"{name}: {feature}" if known else feature] = size
        return features

    @property
    def divided(self) -> Mapping[str, int]:
        return {name: count for mixer in self.mixers for name, count in mixer.divided.items()}

    def rows_obstacle(self, ranks: int) -> str:
        return next(filter(None, (mixer.rows_obstacle(ranks) for mixer in self.mixers)), "")

    def local(self, ranks: int) -> ParallelSpec:
        return dataclasses.replace(self, mixers=tuple(mixer.local(ranks) for mixer in self.mixers))

    @property
    def divided_vectors(self) -> Mapping[str, tuple[Section, ...]]:
        vectors = {}
        for name, mixer in self.named.items():
            for vector, rows in mixer.divided_vectors.items():
                vectors[f"{name}.{vector}"] = rows
        return MappingProxyType(vectors)

    def parallel_obstacle(self, sequence: bool) -> str:
        obstacles = (mixer.parallel_obstacle(sequence) for mixer in self.mixers)
        return next((obstacle for obstacle in obstacles if obstacle), "")

    def rows_of(self, linear: LinearSpec, tokens: int) -> int:
        """Return the rows of one of the mixers' te.Linears, as that mixer counts them."""
        owner, _, name = linear.name.partition(".")
        mixer = self.named[owner]
        return mixer.rows_of(mixer.linear(name), tokens)

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        return sum(mixer.state_bytes(batch, slots, element) for mixer in self.mixers)
