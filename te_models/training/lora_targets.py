"""The modules that an adapter names, and the rows of our fused weights that correspond to them.

transformers has a linear for each of q, k, v, gate and up, and an adapter of peft names those. Here several of them are
rows of one te.Linear. In files an adapter of the whole te.Linear becomes one for each of their linears, with the same A
and its rows of B, which is exact. The experts of a layer are two parameters in transformers, each a te.GroupedLinear.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.errors import ConfigError, UsageError
from te_models.interop.hf_expert_families import taken_for_experts
from te_models.interop.hf_families import family_for, family_of
from te_models.interop.hf_family import ROOTS
from te_models.interop.tensor_places import Place, expert_places, module_places
from te_models.model.decoder import Decoder
from te_models.model.options import SKETCH

Value = TypeVar("Value")


@dataclass(frozen=True)
class Adapter:
    """An adapter of one module: B(A(x)) * scaling, with A [rank, in] and B [rows of `place`, rank]."""

    place: Place
    rank: int
    scaling: float


@dataclass(frozen=True)
class Modules:
    """The adaptable modules of a model by name, each with its rows.

    Attributes:
        theirs: linears of transformers, by their names in its model with a head ("model.layers.0...").
        ours: our te.Linears, or each GEMM of our te.GroupedLinears, whole.
        experts: experts, by the names of transformers' parameters ("model.layers.0.mlp.experts.down_proj").
        counts: our te.GroupedLinears with their numbers of experts.
        whole: transformers' modules that may be fully trained (`modules_to_save`) -> the name of ours.
        every: the names of all modules of transformers' model that have parameters, or hold modules that do.
        architecture: the model_type of transformers that the names are of.
        renamed: parts of names in files of its models -> the names that the models have instead.
        root: what names of layers begin with, before "layers".
        swapped: whether peft takes inputs of experts for outputs (Family.swapped_by_peft).
    """

    theirs: Mapping[str, Place]
    ours: Mapping[str, Place]
    experts: Mapping[str, Place]
    counts: Mapping[str, int]
    whole: Mapping[str, str]
    every: frozenset[str]
    architecture: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    root: str = "model."
    swapped: bool = False

    def named(self, headless: bool) -> dict[str, Place]:
        """Return the names in an adapter of transformers' model with a head, or without one, which are like ours."""
        if not headless:
            return dict(self.theirs)
        names = {name.removeprefix("model."): place for name, place in self.theirs.items()}
        for name, place in self.ours.items():
            if name not in self.counts:
                names[name] = place
        return names

    def without_head(self) -> "Modules":
        """Return the modules of transformers' model without its head, whose names do not begin with "model."."""
        whole = {}
        for name, ours in self.whole.items():
            if ours != "lm_head":
                whole[name.removeprefix("model.")] = ours
        every = {name.removeprefix("model.") for name in self.every} - {"lm_head"}
        return dataclasses.replace(self, whole=whole, every=frozenset(every))

    def stored(self) -> dict[str, Place]:
        """Return the names in files of transformers' models that are others in the models."""
        in_files = {}
        for name, place in self.theirs.items():
            # With a dot behind: a part to rename may end with one.
            in_file = f"{name}."
            for stored, in_model in self.renamed.items():
                in_file = in_file.replace(in_model, stored)
            if in_file != f"{name}.":
                in_files[in_file.removesuffix(".")] = place
        return in_files

    def as_in(self, names: Iterable[str]) -> "Modules":
        """Return the modules by the names of transformers' model in which an adapter has modules of these `names`.

        Names of a text model are "model.layers.0..."; where it is inside a multimodal one they have another prefix.
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
        """Return the modules by names that begin with `root` where they began with `self.root`."""

        def moved(places: Mapping[str, Value]) -> dict[str, Value]:
            renamed = {}
            for name, place in places.items():
                if name.startswith(self.root):
                    name = root + name.removeprefix(self.root)
                renamed[name] = place
            return renamed

        return dataclasses.replace(
            self,
            theirs=moved(self.theirs),
            experts=moved(self.experts),
            whole=moved(self.whole),
            every=frozenset(moved(dict.fromkeys(self.every))),
            root=root,
        )

    def in_transformers(self, name: str) -> str:
        """Return a name in a model of transformers, which may be given as a file of the model has it."""
        for stored, in_model in self.renamed.items():
            name = name.replace(stored, in_model)
        return name

    def in_adapter_file(self, name: str) -> str:
        """Return the name of a tensor in a file, from which peft makes the name in a model of transformers.

        That is the latter itself, unless the renaming, whose dots match any character, would match it once more.
        """
        for stored, in_model in self.renamed.items():
            if re.search(stored, in_model):
                name = name.replace(in_model, stored)
        return name

    @property
    def routers(self) -> set[str]:
        """The part of `theirs` that are no linears in transformers, but modules with a parameter "weight"."""
        return {name for name, place in self.theirs.items() if module_of(place).endswith(".router")}

    @property
    def taken_for_experts(self) -> set[str]:
        """The names in `theirs` that peft takes for experts if `target_modules` names them."""
        return {name for name in self.theirs if taken_for_experts(self.architecture, [name])}

    def parameters_named(self, targets: Iterable[str], headless: bool = False) -> dict[str, Place]:
        """Return the parameters that peft's `target_parameters` name, by the end of their names.

        They are the parameters of experts and routers, and the weights of linears. The end of the name of the experts'
        module, such as "experts", names all of its parameters.
        """
        parameters = dict(self.experts)
        for name, place in self.theirs.items():
            parameters[f"{name}.weight"] = place
        ends = tuple(f".{target}" for target in targets)
        targeted = {}
        for name, place in parameters.items():
            if headless:
                name = name.removeprefix("model.")
            module = name.rpartition(".")[0]
            is_named = f".{name}".endswith(ends)
            is_of_named_experts = module_of(place) in self.counts and f".{module}".endswith(ends)
            if is_named or is_of_named_experts:
                targeted[name] = place
        return targeted

    def parts_of(self, module: str) -> dict[str, Place]:
        """Return their names of the rows of our te.Linear, or of their parameter of our te.GroupedLinear."""
        parts = {}
        for name, place in [*self.theirs.items(), *self.experts.items()]:
            if module_of(place) == module:
                parts[name] = place
        return parts

    def in_tree(self, place: Place) -> str:
        """Return the name of rows in a CausalLM with adapters on them, which is transformers' without its root."""
        (name,) = (name for name, rows in self.theirs.items() if rows == place)
        return name.removeprefix(self.root)

    def sizes(self, adapter: Adapter) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B in a file; matrices of experts are side by side (LoraExperts)."""
        ranks = adapter.rank * self.counts.get(module_of(adapter.place), 1)
        rows, inputs = adapter.place.shape
        if self.swaps(adapter.place):
            rows, inputs = inputs, rows
        return (ranks, inputs), (rows, ranks)

    def swaps(self, place: Place) -> bool:
        """Return whether a file has A and B of the transposed weights (te_models.adapters.low_rank.swapped_factors)."""
        return self.swapped and module_of(place) in self.counts


def module_of(place: Place) -> str:
    """Return the name of our te.Linear that a place is in."""
    return place.name.removesuffix(".weight")


def adaptable_modules(model: CausalLM) -> Modules:
    """Return the names of the modules of `model` in adapters; the model may have adapters already."""
    sketch = Decoder(model.config, **SKETCH)
    shapes = {name: parameter.shape for name, parameter in sketch.named_parameters()}
    linears = []
    for name, module in sketch.named_modules():
        if isinstance(module, sketch.te.Linear):
            linears.append(name)
    if model.config.tie_word_embeddings:
        linears.remove("lm_head")  # an update of it would be one of the embedding too
    counts = {}
    for name, linear in model.config.linears.items():
        if linear.experts:
            counts[name] = linear.experts
    ours = {}
    for name in linears:
        ours[name] = Place.whole(f"{name}.weight", shapes[f"{name}.weight"])
    for name in counts:
        # All experts have weights of one shape.
        ours[name] = Place.whole(f"{name}.weight", shapes[f"{name}.weight0"])
    config = model.origin.config
    try:
        family = family_for(model.config, family_of(config) if config else None)
    except ConfigError:  # transformers has no names for it
        named = {name if name == "lm_head" else f"model.{name}": ours[name] for name in linears}
        return Modules(
            named,
            ours,
            experts=expert_places("model.", model.config, shapes, {}),
            counts=counts,
            whole={},
            every=with_holders(named),
            architecture="te_models",
        )
    root = family.module_root
    places = module_places(family, model.config, shapes, root)
    theirs = {}
    for name, place in places.items():
        if name.endswith(".weight") and module_of(place) in linears:
            theirs[name.removesuffix(".weight")] = _in_one_piece(place)
    tops = () if model.config.tie_word_embeddings else ("embed_tokens.weight", "lm_head.weight")
    whole = {}
    for name, place in places.items():
        if place.name in tops:
            whole[name.removesuffix(".weight")] = place.name.removesuffix(".weight")
    experts = expert_places(root, model.config, shapes, places, family.expert_module)
    renamed = {} if family.modules else family.renamed
    return Modules(
        theirs=theirs,
        ours=ours,
        experts=experts,
        counts=counts,
        whole=whole,
        every=with_holders(["lm_head", *(name.rpartition(".")[0] for name in places)]),
        architecture=family.model_type,
        renamed=renamed,
        root=root,
        swapped=family.swapped_by_peft,
    )


def with_holders(names: Iterable[str]) -> frozenset[str]:
    """Return the names of modules and of the modules that hold them."""
    modules = set()
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            modules.add(".".join(parts[:count]))
    return frozenset(modules)


def _in_one_piece(place: Place) -> Place:
    """Return a place with consecutive blocks merged, so that two names of the same rows are equal."""
    if place.groups != 1:
        return place
    blocks: list[tuple[int, int]] = []
    for start, rows in place.blocks:
        if blocks and sum(blocks[-1]) == start:
            # It begins where the block before ends: both become one.
            first, rows_before = blocks.pop()
            blocks.append((first, rows_before + rows))
        else:
            blocks.append((start, rows))
    return dataclasses.replace(place, blocks=tuple(blocks))


def layers_of(adapters: Iterable[Adapter], modules: Modules) -> dict[str, Adapter]:
    """Return the name in a CausalLM of each layer that gets an adapter -> its adapter.

    An adapter of all rows of a te.Linear, or of the experts of a te.GroupedLinear, is on that module itself.

    Raises:
        UsageError: `adapters` has an adapter of a whole fused linear and one of a part of it.
    """
    by_module: dict[str, list[Adapter]] = {}
    for adapter in adapters:
        by_module.setdefault(module_of(adapter.place), []).append(adapter)
    layers: dict[str, Adapter] = {}
    for module, members in by_module.items():
        whole = modules.ours[module]
        # All rows of the te.Linear: the adapter is on the module itself, without rows to pick.
        if len(members) == 1 and members[0].place.shape == whole.shape:
            layers[module] = dataclasses.replace(members[0], place=whole)
            continue
        if any(member.place == whole for member in members):
            raise UsageError(f"the targets have {module} and a part of it: choose one of the two")
        for member in members:
            layers[modules.in_tree(member.place)] = member
    return layers


def alpha_of(scaling: float, rank: int, rslora: bool) -> float:
    """Return the lora_alpha that makes peft scale an adapter of this rank by `scaling`, as an int if it is one."""
    alpha = scaling * (math.sqrt(rank) if rslora else rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def join(whole: Place, tensors: Mapping[Place, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank] of a whole te.Linear, all of whose rows have the same A."""
    if whole in tensors:
        return tensors[whole]
    first = next(iter(tensors.values()))
    b = torch.zeros(whole.shape[0], first[1].shape[1], dtype=first[1].dtype)
    for place, (_, rows) in tensors.items():
        place.load(b, rows)
    return first[0], b


def share_a(
    layers: Mapping[str, Adapter],
    modules: Modules,
    tensors: Mapping[Place, tuple[Tensor, Tensor]],
) -> dict[str, Adapter]:
    """Return the layers, with one for a whole te.Linear in place of its parts, as files have it.

    All rows of the te.Linear then have an adapter, with the same A.
    """
    parts: dict[str, list[str]] = {}
    for name, adapter in layers.items():
        module = module_of(adapter.place)
        if adapter.place != modules.ours[module]:
            parts.setdefault(module, []).append(name)
    replaced = dict(layers)
    for module, names in parts.items():
        adapters = [layers[name] for name in names]
        all_rows = {one.place for one in adapters} == set(modules.parts_of(module).values())
        # Files have one A per linear of transformers; where all parts of a te.Linear have equal ones, it was one A.
        if all_rows and _have_one_a(adapters, tensors):
            for name in names:
                del replaced[name]
            replaced[module] = dataclasses.replace(adapters[0], place=modules.ours[module])
    return replaced


def _have_one_a(adapters: list[Adapter], tensors: Mapping[Place, tuple[Tensor, Tensor]]) -> bool:
    """Return whether adapters differ in nothing but their rows and B."""
    first = adapters[0]
    first_a, _ = tensors[first.place]
    for adapter in adapters[1:]:
        a, _ = tensors[adapter.place]
        if (adapter.rank, adapter.scaling) != (first.rank, first.scaling):
            return False
        if not torch.equal(a, first_a):
            return False
    return True
