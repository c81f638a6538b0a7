"""The places of Hugging Face's tensors in the parameters of a model: which rows of which parameter each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def pieces(self, parameter: Tensor) -> list[Tensor]:
        """Return views [groups, rows, ...] of each block of the parameter."""
        return [
            parameter[start : start + self.groups * rows].unflatten(0, (self.groups, rows))
            for start, rows in self.blocks
            if rows
        ]

    def load(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy their tensor into its rows; the dtype is converted on the device."""
        sizes = [rows for _, rows in self.blocks if rows]
        tensor = tensor.to(parameter.device).unflatten(0, (self.groups, sum(sizes)))
        for piece, values in zip(self.pieces(parameter), tensor.split(sizes, dim=1), strict=True):
            piece.copy_(values)

    def save(self, parameter: Tensor) -> Tensor:
        """Return their tensor: a view where it is one block."""
        pieces = self.pieces(parameter)
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).flatten(0, 1)


def tensor_places(family: Family, config: ModelConfig, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
    """Return their tensor's name -> its place in ours, in their order; `shapes` are those of our parameters."""
    found: dict[str, Place] = {}

    def place(theirs: str, module: str, blocks: list[tuple[int, int]], groups: int, expert: str = "") -> None:
        """Note the place of their weight and bias: these blocks of rows (none: all), which alternate `groups` times.

        `module` may also be a parameter itself.
        """
        for kind in (".weight", ".bias", ""):
            ours = f"{module}{kind}{expert}"
            if ours in shapes:
                ranges = blocks or [(0, shapes[ours][0])]
                shape = (sum(rows for _, rows in ranges), *shapes[ours][1:])
                found[f"{theirs}{kind}"] = Place(ours, tuple((at, n // groups) for at, n in ranges), groups, shape)

    for theirs, module in TOP.items():
        if theirs != "lm_head":
            place(theirs.replace("model.", family.root), module, [], 1)
        elif not config.tie_word_embeddings:
            place(family.head, module, [], 1)
    for depth, layer in enumerate(config.layers):
        counts = {name: count for part in layer.parts for name, count in part.divided.items()}
        for name, rows in family.layer.items():
            linear = layer.linears.get(rows.module)
            if rows.experts != bool(linear and linear.experts):
                continue  # of a dense layer, or of one with experts
            ranges = linear.row_ranges if rows.blocks and linear else {}
            blocks = [ranges.get(block, (0, 0)) for block in rows.blocks]
            if rows.blocks and not any(used for _, used in blocks):
                continue  # a model without a gate, or a layer of another kind
            groups = 1 if rows.per is None else counts[rows.per]
            for expert in range(linear.experts) if linear and linear.experts else ("",):
                theirs, ours = f"{family.root}layers.{depth}.{name.format(expert)}", f"layers.{depth}.{rows.module}"
                place(theirs, ours, blocks, groups, str(expert))
    return found
