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
    """The storage of a quantized weight [out, in], as far as its bytes depend on it.

    Attributes:
        packed: whether two values share a byte (FP4).
        width: the columns that share a scale; 0: all.
        height: the rows that share a scale.
        scale: the dtype of a scale.
        factor: whether each row has one more scale, in FP32.
    """

    packed: bool
    width: int
    height: int
    scale: torch.dtype
    factor: bool = False

    def rows(self, outputs: int, inputs: int) -> StoredRows:
        """Return a weight [outputs, inputs] of this form on the meta device, where only its bytes count."""
        with torch.device("meta"):
            width = self.width or inputs
            heights = -(-outputs // self.height)
            # Blocks of several rows need the number of the scale for each row, since fused weights are cut elsewhere.
            has_shared_scales = self.height > 1
            return StoredRows(
                data=torch.empty(outputs, inputs // (2 if self.packed else 1), dtype=torch.uint8),
                scales=torch.empty(heights, -(-inputs // width), dtype=self.scale),
                width=width,
                packed=self.packed,
                scale_rows=torch.empty(outputs, dtype=torch.int32) if has_shared_scales else None,
                factors=torch.empty(outputs) if self.factor else None,
            )


# The forms of known releases, under the names of export formats.
FORMS = {
    "mxfp4": StoredForm(packed=True, width=32, height=1, scale=torch.uint8),
    "nvfp4": StoredForm(packed=True, width=16, height=1, scale=torch.float8_e4m3fn, factor=True),
    "fp8-block": StoredForm(packed=False, width=128, height=128, scale=torch.float32),
}
# The forms in which a release has only its experts, as gpt-oss does.
OF_EXPERTS = ("mxfp4",)
ALL_ROWS = 2**30  # the height of a form with one scale per weight


@dataclass(frozen=True)
class StoredBase:
    """The linears of a model whose weights stay quantized as a release stores them.

    Attributes:
        form: of all of these weights.
        linears: their names in the model, such as "layers.0.mlp.down_proj".
    """

    form: StoredForm
    linears: frozenset[str]

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> StoredBase:
        """Return the base of a release in the form `name`.

        All linears of blocks but routers are stored in that form, under "mxfp4" only the experts.

        Raises:
            UsageError: an unknown name.
        """
        check_known("base_weights", name, FORMS)
        parts = []
        for linear, spec in config.linears.items():
            if linear.startswith("layers.") and spec.fp8 and _suits(spec, name):
                parts.append(linear)
        return cls(FORMS[name], frozenset(parts))

    @classmethod
    def in_folder(cls, storages: Mapping[str, WeightStorage]) -> StoredBase:
        """Return the base of a folder; `storages` has the linears that stay as they are stored, by their names."""
        storage = next(iter(storages.values()))  # all have the same
        rows, columns = storage.block
        scale = storage.scale_dtypes[0]
        form = StoredForm(
            packed=storage.packed or storage is MXFP4,
            width=columns,
            height=rows or ALL_ROWS,
            scale=scale,
            factor=storage.packed,
        )
        return cls(form, frozenset(storages))

    @classmethod
    def in_model(cls, linears: Mapping[str, StoredWeight]) -> StoredBase | None:
        """Return the base of a model with these stored weights, by names of linears; None without any."""
        if not linears:
            return None
        rows = next(iter(linears.values())).rows
        form = StoredForm(
            packed=rows.packed,
            width=rows.width,
            # Rows share scales only in FP8 with blocks of 128 x 128.
            height=1 if rows.scale_rows is None else 128,
            scale=rows.scales.dtype,
            factor=rows.factors is not None,
        )
        return cls(form, frozenset(linears))


def _suits(spec: LinearSpec, name: str) -> bool:
    """Return whether a release in the form `name` stores such a linear in it."""
    return bool(spec.experts) or name not in OF_EXPERTS
