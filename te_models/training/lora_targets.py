"""The modules that an adapter names, and the rows of our fused weights that correspond to them.

transformers has a linear for each of q, k, v, gate and up, and an adapter of peft names those. Here several of them are
rows of one te.Linear. Their adapters become one adapter of it: the A's are stacked, and each B has its own rows and
columns. An adapter of the whole te.Linear becomes one adapter for each of their linears, with the same A and its rows
of B. Both conversions are exact. The experts of a layer are two parameters in transformers, each a te.GroupedLinear.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.errors import ConfigError, UsageError
from te_models.interop.hf import Place, expert_places, tensor_places
from te_models.interop.hf_families import family_for, family_of
from te_models.interop.hf_family import ROOTS
from te_models.model.decoder import Decoder
from te_models.model.options import SKETCH

Found = TypeVar("Found")


@dataclass(frozen=True)
class Wanted:
    """An adapter of one module: B(A(x)) * scaling, with A [rank, in] and B [rows of `place`, rank]."""

    place: Place
    rank: int
    scaling: float


@dataclass(frozen=True)
class Fused:
    """The adapter of one te.Linear [out, in]: the sum of `parts`, or none if it has all rows under all ranks."""

    rank: int
    scaling: float
    parts: tuple[Wanted, ...]

    def divided(self) -> Iterator[tuple[Wanted, slice]]:
        """Yield each part with its ranks among those of the whole, one after the other."""
        for part, end in zip(self.parts, accumulate(part.rank for part in self.parts), strict=True):
            yield part, slice(end - part.rank, end)

    def factors(self, rows: int) -> Tensor:
        """Return FP32 [rows, rank]: the factor of each element of B, 0 outside the parts."""
        factors = torch.zeros(rows, self.rank)
        for part, ranks in self.divided():
            values = torch.full((part.place.shape[0], part.rank), part.scaling / self.scaling)
            part.place.load(factors[:, ranks], values)
        return factors


@dataclass(frozen=True)
class Modules:
    """The adaptable modules of a model by name, each with its rows."""

    theirs: Mapping[
        str, Place
    ]  # of transformers, by their names in its model with a head ("model.layers.0...")
    ours: Mapping[str, Place]  # the te.Linear, or each GEMM of a te.GroupedLinear, whole
    experts: Mapping[
        str, Place
    ]  # those of transformers' parameters ("model.layers.0.mlp.experts.down_proj")
    counts: Mapping[str, int]  # the te.GroupedLinears with their numbers of experts
    whole: Mapping[
        str, str
    ]  # their modules that may be fully trained (`modules_to_save`) -> the name of ours
    architecture: str  # the model_type of transformers that the names are of
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # parts of the names -> what its models have instead
    root: str = "model."  # of the names of layers

    def named(self, headless: bool) -> dict[str, Place]:
        """Return the names in an adapter of transformers' model with a head, or without one, which are like ours."""
        if not headless:
            return dict(self.theirs)
        own = {name: place for name, place in self.ours.items() if name not in self.counts}
        return {name.removeprefix("model."): place for name, place in self.theirs.items()} | own

    def as_stored(self, name: str) -> str:
        """Return a name with the parts of these names in place of those in a model of transformers."""
        for stored, there in self.renamed.items():
            name = name.replace(there, stored)
        return name

    def as_in(self, names: Iterable[str]) -> "Modules":
        """Return the modules by the names of transformers' model in which an adapter has modules of these `names`.

        Those of a text model are "model.layers.0..."; where it is inside a multimodal one they have another prefix.
        """
        names = list(names)
        roots = [self.root, *ROOTS]
        if self.root == "model.":  # a text model without its head has names of its own, see `named`
            roots.remove("")
        for root in roots:
            if any(name.startswith(f"{root}layers.") for name in names):
                return self._below(root)
        return self

    def _below(self, root: str) -> "Modules":
        def moved(places: Mapping[str, Found]) -> dict[str, Found]:
            found = {}
            for name, place in places.items():
                inside = name.startswith(self.root)
                found[root + name.removeprefix(self.root) if inside else name] = place
            return found

        return dataclasses.replace(
            self,
            theirs=moved(self.theirs),
            experts=moved(self.experts),
            whole=moved(self.whole),
            root=root,
        )

    def in_transformers(self, name: str) -> str:
        """Return a name in a model of transformers, the inverse of `as_stored`."""
        for stored, there in self.renamed.items():
            name = name.replace(stored, there)
        return name

    @property
    def routers(self) -> set[str]:
        """Those of `theirs` that are no linears in transformers, but modules with a parameter "weight"."""
        return {name for name, place in self.theirs.items() if module_of(place).endswith(".router")}

    def parameters_named(self, targets: Iterable[str], headless: bool = False) -> dict[str, Place]:
        """Return the parameters of experts and routers that peft's `target_parameters` name, by the end of their names.

        The end of the name of the experts' module, such as "experts", names all of its parameters.
        """
        every = {**self.experts, **{f"{name}.weight": self.theirs[name] for name in self.routers}}
        names = {
            name.removeprefix("model.") if headless else name: place
            for name, place in every.items()
        }
        ends = tuple(f".{target}" for target in targets)
        return {
            name: place
            for name, place in names.items()
            if f".{name}".endswith(ends)
            or f".{name.rpartition('.')[0]}".endswith(ends)
            and module_of(place) in self.counts
        }

    def parts_of(self, module: str) -> dict[str, Place]:
        """Return their names of the rows of our te.Linear, or of their parameter of our te.GroupedLinear."""
        every = {**self.theirs, **self.experts}
        return {name: place for name, place in every.items() if module_of(place) == module}

    def sizes(self, one: Wanted) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B in a file; those of experts are side by side (LoraExperts)."""
        ranks = one.rank * self.counts.get(module_of(one.place), 1)
        rows, inputs = one.place.shape
        return (ranks, inputs), (rows, ranks)


def module_of(place: Place) -> str:
    """Return the name of our te.Linear that a place is in."""
    return place.name.removesuffix(".weight")


def adaptable_modules(model: CausalLM) -> Modules:
    """Return the names of the modules of `model` in adapters; the model may have adapters already."""
    sketch = Decoder(model.config, **SKETCH)
    shapes = {name: parameter.shape for name, parameter in sketch.named_parameters()}
    linears = [
        name for name, module in sketch.named_modules() if isinstance(module, sketch.te.Linear)
    ]
    if model.config.tie_word_embeddings:
        linears.remove("lm_head")  # an update of it would be one of the embedding too
    counts = {
        name: linear.experts for name, linear in model.config.linears.items() if linear.experts
    }
    sizes = {
        name: shapes[f"{name}.weight{'0' if name in counts else ''}"]
        for name in (*linears, *counts)
    }
    ours = {name: Place.whole(f"{name}.weight", shape) for name, shape in sizes.items()}
    config = model.origin.config
    try:
        family = family_for(model.config, family_of(config) if config else None)
    except ConfigError:  # transformers has no names for it
        named = {name if name == "lm_head" else f"model.{name}": ours[name] for name in linears}
        return Modules(
            named, ours, expert_places("model.", model.config, shapes, {}), counts, {}, "te_models"
        )
    named = dataclasses.replace(family, root=family.module_root, head="lm_head")
    places = tensor_places(named, model.config, shapes)
    theirs = {
        name.removesuffix(".weight"): _in_one_piece(place)
        for name, place in places.items()
        if name.endswith(".weight") and module_of(place) in linears
    }
    tops = () if model.config.tie_word_embeddings else ("embed_tokens.weight", "lm_head.weight")
    whole = {
        name.removesuffix(".weight"): place.name
        for name, place in places.items()
        if place.name in tops
    }
    whole = {name: own.removesuffix(".weight") for name, own in whole.items()}
    experts = expert_places(named.root, model.config, shapes, places, family.mlp)
    return Modules(
        theirs, ours, experts, counts, whole, family.model_type, family.renamed, named.root
    )


def _in_one_piece(place: Place) -> Place:
    """Return a place with consecutive blocks merged, so that two names of the same rows are equal."""
    if place.groups != 1:
        return place
    blocks: list[tuple[int, int]] = []
    for start, rows in place.blocks:
        if blocks and sum(blocks[-1]) == start:
            start, rows = blocks[-1][0], blocks.pop()[1] + rows
        blocks.append((start, rows))
    return dataclasses.replace(place, blocks=tuple(blocks))


def fuse(wanted: Iterable[Wanted], modules: Modules) -> dict[str, Fused]:
    """Return our te.Linear -> the adapter that is the sum of those of `wanted` in it.

    Raises:
        UsageError: `wanted` has an adapter of a whole fused linear and one of a part of it.
    """
    groups: dict[str, list[Wanted]] = {}
    for one in wanted:
        groups.setdefault(module_of(one.place), []).append(one)
    return {
        module: _fused(members, modules.ours[module], module) for module, members in groups.items()
    }


def _fused(members: Sequence[Wanted], whole: Place, module: str) -> Fused:
    if members[0].place.shape == whole.shape and len(members) == 1:
        return Fused(members[0].rank, members[0].scaling, ())
    if any(member.place == whole for member in members):
        raise UsageError(f"the targets have {module} and a part of it: choose one of the two")
    parts = tuple(sorted(members, key=lambda member: member.place.blocks))
    scaling = next((part.scaling for part in parts if part.scaling), 1.0)
    return Fused(sum(part.rank for part in parts), scaling, parts)


def alpha_of(scaling: float, rank: int, rslora: bool) -> float:
    """Return the lora_alpha that makes peft scale an adapter of this rank by `scaling`, as an int if it is one."""
    alpha = scaling * (math.sqrt(rank) if rslora else rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def split(
    fused: Fused, theirs: Mapping[str, Place], a: Tensor, b: Tensor
) -> dict[str, tuple[Wanted, Tensor, Tensor]]:
    """Return their name -> its rank and scaling, A and B, for the adapter `fused` of a te.Linear.

    `theirs` are their names of its rows; `a` is [rank, in] and `b` [out, rank]. Experts' have E times as many ranks.
    """
    if not fused.parts:
        return {
            name: (
                Wanted(place, fused.rank, fused.scaling),
                a.clone(),
                place.save(b).clone().contiguous(),
            )
            for name, place in theirs.items()
        }
    names = {place: name for name, place in theirs.items()}
    return {
        names[part.place]: (
            part,
            a[ranks].clone(),
            part.place.save(b[:, ranks]).clone().contiguous(),
        )
        for part, ranks in fused.divided()
    }


def join(
    fused: Fused, whole: Place, tensors: Mapping[Place, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank] of an adapter whose parts have these A and B; the inverse of `split`."""
    if not fused.parts:
        if whole in tensors:
            return tensors[whole]
        first = next(iter(tensors.values()))
        b = torch.zeros(whole.shape[0], first[1].shape[1], dtype=first[1].dtype)
        for place, (_, rows) in tensors.items():
            place.load(b, rows)
        return first[0], b
    a = torch.cat([tensors[part.place][0] for part in fused.parts])
    b = torch.zeros(whole.shape[0], fused.rank, dtype=a.dtype)
    for part, ranks in fused.divided():
        part.place.load(b[:, ranks], tensors[part.place][1])
    return a, b


def share_a(
    fused: Fused, theirs: Mapping[str, Place], tensors: Mapping[Place, tuple[Tensor, Tensor]]
) -> Fused:
    """Return the adapter of the whole te.Linear if `fused` came from `split`: all its parts have the same A."""
    parts = fused.parts
    if not parts or {part.place for part in parts} != set(theirs.values()) or len(parts) == 1:
        return fused
    first = parts[0]
    same = all(
        (part.rank, part.scaling) == (first.rank, first.scaling)
        and torch.equal(tensors[part.place][0], tensors[first.place][0])
        for part in parts
    )
    return Fused(first.rank, first.scaling, ()) if same else fused
