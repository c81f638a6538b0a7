"""Where the tensors of a Hugging Face model are in ours: rows of a parameter, by the tables of hf_places."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from te_models.config.layer import LayerSpec
from te_models.config.model import ModelConfig
from te_models.interop.hf_families import Family
from te_models.interop.hf_places import TOP


@dataclass(frozen=True)
class Place:
    """The rows of our parameter `name` that hold one tensor of theirs: (start, rows per group) of each block."""

    name: str
    blocks: tuple[tuple[int, int], ...]
    groups: int
    shape: tuple[int, ...]  # of their tensor
    form: bool = False  # whether that has other dimensions than ours, with the same numbers in the same order

    @classmethod
    def whole(cls, name: str, shape: Iterable[int]) -> Place:
        """Return the place of a tensor that is all of our parameter `name`."""
        rows, *others = shape
        # One block of all rows in one group.
        return cls(name, ((0, rows),), 1, (rows, *others))

    def pieces(self, parameter: Tensor) -> list[Tensor]:
        """Return views [groups, rows, ...] of each block of the parameter."""
        blocks = []
        for start, rows in self.blocks:
            if rows:
                blocks.append(
                    parameter[start : start + self.groups * rows].unflatten(0, (self.groups, rows))
                )
        return blocks

    def load(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy their tensor into its rows; the dtype is converted on the device."""
        sizes = [rows for _, rows in self.blocks if rows]
        if self.form:
            tensor = tensor.reshape(-1, *parameter.shape[1:])
        # To the device in the dtype of the file: BF16 takes half of FP32's way over the bus. [rows, ...] -> [groups,
        # rows per group, ...]
        tensor = tensor.to(parameter.device).unflatten(0, (self.groups, sum(sizes)))
        for piece, values in zip(self.pieces(parameter), tensor.split(sizes, dim=1), strict=True):
            piece.copy_(values)

    def save(self, parameter: Tensor) -> Tensor:
        """Return their tensor: a view where it is one block."""
        pieces = self.pieces(parameter)
        # torch.cat of one piece would copy it, and the writer wants a view of the weight where it can have one.
        grouped = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        rows = grouped.flatten(0, 1)
        return rows.reshape(self.shape) if self.form else rows


def tensor_places(
    family: Family, config: ModelConfig, shapes: Mapping[str, torch.Size]
) -> dict[str, Place]:
    """Return their tensor's name -> its place in ours, in their order; `shapes` are our parameters'."""
    places = _PlacesSoFar(shapes)
    _find_ends(places, family, config)
    modules = _modules_of_layers(shapes)
    for depth, layer in enumerate(config.layers):
        _find_layer(places, family, depth, layer, modules[f"layers.{depth}"])
    return places.places


@dataclass(frozen=True)
class _PlacesSoFar:
    """The places that are found so far, by the names of their tensors; `shapes` are our parameters'."""

    shapes: Mapping[str, torch.Size]
    places: dict[str, Place] = dataclasses.field(default_factory=dict)

    def note(
        self,
        theirs: str,
        ours: str,
        blocks: Sequence[tuple[int, int]] = (),
        groups: int = 1,
        expert: str = "",
        form: tuple[int, ...] = (),
    ) -> None:
        """Note the places of the weight and the bias of their module in our module (or parameter) `ours`.

        `blocks` of rows, (first row, rows) each, alternate `groups` times in their tensor; none: all rows. `form`
        is the shape of their tensor where it has other dimensions, with -1 for the rows.
        """
        # "": a parameter without a module, such as a vector per head.
        for kind in (".weight", ".bias", ""):
            name = f"{ours}{kind}{expert}"
            if name not in self.shapes:
                continue
            # All rows of the parameter are one block.
            ranges = blocks or [(0, self.shapes[name][0])]
            shape = (sum(rows for _, rows in ranges), *self.shapes[name][1:])
            if form:
                shape = tuple(shape[0] if size < 0 else size for size in form)
            self.places[f"{theirs}{kind}"] = Place(
                name=name,
                blocks=tuple((start, rows // groups) for start, rows in ranges),
                groups=groups,
                shape=shape,
                form=bool(form),
            )


def _find_ends(places: _PlacesSoFar, family: Family, config: ModelConfig) -> None:
    """Note the places of the tensors outside layers; a head that is tied to the embedding has no tensor."""
    for theirs, module in TOP.items():
        if theirs.startswith("model.") and module not in ("embed_tokens", "norm"):
            places.note(family.root + theirs.removeprefix("model."), module)
        elif theirs != "lm_head":
            name = family.norm if module == "norm" else family.embedding
            places.note(family.root + name, module)
        elif not config.tie_word_embeddings:
            places.note(family.head, module)


def _find_layer(
    places: _PlacesSoFar, family: Family, depth: int, layer: LayerSpec, modules: set[str]
) -> None:
    """Note the places of the tensors of one layer, in which we have these modules.

    The family's table has the modules of every kind of layer; a row applies where this layer has such rows.
    """
    # How many groups of rows a table's `per` stands for, such as the heads.
    counts = layer.divided
    for name, either in family.layer.items():
        rows = either.among(modules)
        linear = layer.linears.get(rows.module)
        if rows.experts != bool(linear and linear.experts):
            continue  # of a dense layer, or of one with experts
        sections = linear or layer.vector_rows.get(rows.module)
        ranges = sections.row_ranges if rows.blocks and sections else {}
        blocks = [ranges.get(block, (0, 0)) for block in rows.blocks]
        if rows.blocks and not any(used for _, used in blocks):
            continue  # a model without a gate, or a layer of another kind
        groups = 1
        if rows.per == "row":
            groups = blocks[0][1]
        elif rows.per is not None:
            groups = counts[rows.per]
        # One note per expert, whose number is in both names; "" for what has none.
        experts = range(linear.experts) if linear and linear.experts else ("",)
        for expert in experts:
            places.note(
                f"{family.root}{family.blocks}.{depth}.{name.format(expert)}",
                f"layers.{depth}.{rows.module}",
                blocks=blocks,
                groups=groups,
                expert=str(expert),
                form=rows.form,
            )


def _modules_of_layers(shapes: Mapping[str, torch.Size]) -> dict[str, set[str]]:
    """Return "layers.<number>" -> the modules in it, such as "mlp.down_proj", that have parameters."""
    modules: dict[str, set[str]] = defaultdict(set)
    for name in shapes:
        if name.startswith("layers."):
            _, depth, *path = name.split(".")
            modules[f"layers.{depth}"].add(".".join(path[:-1]))
    return modules


def module_places(
    family: Family, config: ModelConfig, shapes: Mapping[str, torch.Size], root: str = "model."
) -> dict[str, Place]:
    """Return `tensor_places` by the names in a model of transformers, "model.layers.0..." and "lm_head".

    `root` comes before "layers"; by default a text model's root.
    """
    text = family.in_models(root)
    places = {}
    for name, place in tensor_places(text, config, shapes).items():
        if family.modules:
            places[name] = place
        else:
            places[text.in_transformers(name)] = place
    return places


def names_taken(root: str, config: ModelConfig, places: Mapping[str, Place]) -> list[str]:
    """Return the linears of transformers, without `root`, whose names other linears have here.

    peft cannot adapt these in place. Gemma 4 has a dense MLP beside its experts, and the name of its last linear,
    mlp.down_proj, names a product of the experts here. `places` are by the names of linears or their weights.
    """
    names = []
    for theirs, place in places.items():
        name = theirs.removesuffix(".weight").removeprefix(root)
        ours = place.name.removesuffix(".weight")
        if ours in config.linears and name != ours and name in config.linears:
            names.append(name)
    return names


def expert_places(
    root: str,
    config: ModelConfig,
    shapes: Mapping[str, torch.Size],
    places: Mapping[str, Place],
    experts: str = "mlp.experts",
) -> dict[str, Place]:
    """Return the experts' parameters of transformers, which have the same names in every family.

    `shapes` are our parameters', and `experts` is the family's name of the experts below a layer. The rows are in
    the order of ours, or of one of `places` that fills all of an expert's weight.
    """
    entire = {}
    for place in places.values():
        if place.shape == tuple(shapes[place.name]):
            entire[place.name] = place
    by_name = {}
    for name, linear in config.linears.items():
        if linear.experts:
            parent, _, leaf = name.rpartition(".")
            if leaf == "gate_up_proj" and not config.mlp_gate:
                leaf = "up_proj"  # as Nemotron-H has it
            theirs = f"{root}{parent.removesuffix('mlp')}{experts}.{leaf}"
            first = f"{name}.weight0"
            place = entire.get(first) or Place.whole(first, shapes[first])
            by_name[theirs] = dataclasses.replace(place, name=f"{name}.weight")
    return by_name
