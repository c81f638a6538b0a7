"""The bytes of weights that stay as a quantized release stores them, for the memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_models.config.layer import LinearSpec
from te_models.config.model import ModelConfig
from te_models.errors import check_known
from te_models.interop.quantized import MXFP4, WeightStorage
from te_models.numerics.stored import StoredRows, StoredWeight


class StoredForm(NamedTuple):
    """The storage of a weight [out, in].

    Attributes:
        packed: whether two values are in a byte.
        width: the columns that share a scale; 0: all.
        height: the rows that share one.
        scale: the dtype of a scale.
        factor: whether each row has one more scale, in FP32.
    """

    packed: bool
    width: int
    height: int
    scale: torch.dtype
    factor: bool = False

    def rows(self, outputs: int, inputs: int) -> StoredRows:
        """Return rows of this form on the meta device."""
        with torch.device("meta"):
            width = self.width or inputs
            heights = -(-outputs // self.height)
            shared = self.height > 1
            return StoredRows(
                data=torch.empty(outputs, inputs // (2 if self.packed else 1), dtype=torch.uint8),
                scales=torch.empty(heights, -(-inputs // width), dtype=self.scale),
                width=width,
                packed=self.packed,
                scale_rows=torch.empty(outputs, dtype=torch.int32) if shared else None,
                factors=torch.empty(outputs) if self.factor else None,
            )


# Of the releases that there are, with the names of export formats.
FORMS = {
    "mxfp4": StoredForm(True, 32, 1, torch.uint8),
    "nvfp4": StoredForm(True, 16, 1, torch.float8_e4m3fn, factor=True),
    "fp8-block": StoredForm(False, 128, 128, torch.float32),
}
# Of gpt-oss alone: a release in MXFP4 has its experts so.
OF_EXPERTS = ("mxfp4",)


@dataclass(frozen=True)
class StoredBase:
    """The linears of a model whose weights stay as they are stored, by their names in the model, and their form."""

    form: StoredForm
    linears: frozenset[str]

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> StoredBase:
        """Return the base of a release in the form `name`, which has all linears of blocks so, but routers.

        Under "mxfp4" it has only experts so.

        Raises:
            UsageError: an unknown name.
        """
        check_known("base_weights", name, FORMS)
        found = []
        for linear, spec in config.linears.items():
            if linear.startswith("layers.") and spec.fp8 and _suits(spec, name):
                found.append(linear)
        return cls(FORMS[name], frozenset(found))

    @classmethod
    def in_folder(cls, storages: Mapping[str, WeightStorage]) -> StoredBase:
        """Return the base of a folder, of which these linears stay as they are stored."""
        storage = next(iter(storages.values()))
        rows, columns = storage.block
        scale = storage.scale_dtypes[0]
        form = StoredForm(
            packed=storage.packed or storage is MXFP4,
            width=columns,
            height=rows or 2**30,
            scale=scale,
            factor=storage.packed,
        )
        return cls(form, frozenset(storages))

    @classmethod
    def in_model(cls, linears: Mapping[str, StoredWeight]) -> StoredBase | None:
        """Return the base of a model, of which these linears have such weights; None if none has."""
        if not linears:
            return None
        rows = next(iter(linears.values())).rows
        form = StoredForm(
            packed=rows.packed,
            width=rows.width,
            height=1 if rows.scale_rows is None else 128,
            scale=rows.scales.dtype,
            factor=rows.factors is not None,
        )
        return cls(form, frozenset(linears))


def _suits(spec: LinearSpec, name: str) -> bool:
    return bool(spec.experts) or name not in OF_EXPERTS
