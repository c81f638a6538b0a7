"""A base weight with the updates of adapters in it, and the way back, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from te_models.distributed.dtensor import whole
from te_models.engine import engine_of
from te_models.errors import UsageError
from te_models.fp8.primary_weights import (
    E4M3_MAX,
    is_quantized,
    plain,
    restore_weight,
    saved_weight,
    write_weight,
)
from te_models.fp8.scaling_state import weight_scale
from te_models.numerics.scale_rules import scale_from_amax
from te_models.numerics.stored import StoredWeight

STORED = "stored"  # the part of a saved weight that is a StoredWeight
ATTRIBUTE = "_te_models_merged_weight"  # of a te module


class Merging(Protocol):
    """A layer whose adapters are merged."""

    def add_to(self, values: Tensor, gemm: int, adapters: Sequence[str]) -> None:
        """Add the updates of `adapters`, in this order, to the FP32 weight [out, in] of a GEMM, in place."""


class Merge(NamedTuple):
    """The adapters of a layer that are in the weight."""

    layer: Merging
    adapters: tuple[str, ...]


class MergedWeight:
    """The weights of a te module with updates in them, each sum made from the values before and rounded once.

    A weight that a release stores quantized is replaced by one in high precision, and comes back when it has no update.

    Args:
        owner: the te.Linear or te.GroupedLinear; no submodule of this object.
        names: its weights, one for each GEMM.
    """

    def __init__(self, owner: nn.Module, names: Sequence[str] = ("weight",)) -> None:
        self.owner = owner
        self.names = tuple(names)
        self.merges: list[Merge] = []
        self.saved: list[tuple[dict[str, Tensor], Tensor | None]] = []  # weight and scale before

    @torch.no_grad()
    def merge(self, layer: Merging, adapters: Sequence[str], safe: bool = False) -> None:
        """Put these adapters of a layer into the weights, in place of the layer's adapters that are in them.

        Raises:
            UsageError: with `safe`, a sum is not finite; the weights are then unchanged.
        """
        merges = [*self._others(layer), Merge(layer, tuple(adapters))]
        if safe and not all(bool(new.isfinite().all()) for new in self._sums(merges)):
            names = ", ".join(adapters)
            raise UsageError(
                f"merging {names} gives values that are not finite: the adapter is broken"
            )
        if not self.saved:
            # Once, before the first merge: later ones start from these values, not from a sum that has been rounded.
            self.saved = [self._save(gemm) for gemm in range(len(self.names))]
        self._write(merges)

    @torch.no_grad()
    def unmerge(self, layer: Merging) -> None:
        """Take the adapters of a layer out of the weights, which without any are those from before, to the bit."""
        merges = self._others(layer)
        if merges:
            self._write(merges)
            return
        for gemm in range(len(self.saved)):
            self._restore(gemm)
        self._drop_cached()
        self.keep()

    def keep(self) -> None:
        """Take the weights as they are for the model's own."""
        self.merges = []
        self.saved = []

    @torch.no_grad()
    def original(self, gemm: int = 0) -> Tensor:
        """Return the values of a weight without adapters, FP32 [out, in]."""
        weight = self._weight(gemm)
        if not self.merges:
            return whole(plain(weight)).float()
        stored = self.saved[gemm][0].get(STORED)
        if stored is not None:
            return plain(stored).float()
        merged = saved_weight(weight)
        restore_weight(weight, self.saved[gemm][0])
        # The weight has the adapters in it for now: put the old values back, copy them, and put the sums back.
        values = whole(plain(weight)).to(torch.float32, copy=True)
        restore_weight(weight, merged)
        return values

    def _others(self, layer: Merging) -> list[Merge]:
        return [merge for merge in self.merges if merge.layer is not layer]

    def _weight(self, gemm: int) -> nn.Parameter:
        return self.owner.get_parameter(self.names[gemm])

    def _replace(self, gemm: int, values: Tensor) -> None:
        """Give the module another parameter as its weight, frozen."""
        parameter = nn.Parameter(values, requires_grad=False)
        self.owner.register_parameter(self.names[gemm], parameter)

    def _scale(self, gemm: int) -> Tensor | None:
        """Return the live scale of a weight that delayed scaling casts in each pass; None without one."""
        return None if is_quantized(self._weight(gemm)) else weight_scale(self.owner, gemm)

    def _save(self, gemm: int) -> tuple[dict[str, Tensor], Tensor | None]:
        scale = self._scale(gemm)
        weight = self._weight(gemm)
        saved: dict[str, Tensor] = {STORED: weight}
        if not isinstance(weight, StoredWeight):
            saved = saved_weight(weight)
        return saved, None if scale is None else scale.clone()

    def _restore(self, gemm: int) -> None:
        values, before = self.saved[gemm]
        if STORED in values:
            self._replace(gemm, values[STORED])
        else:
            restore_weight(self._weight(gemm), values)
        scale = self._scale(gemm)
        if before is not None and scale is not None:
            scale.copy_(before)

    def _sums(self, merges: Sequence[Merge]) -> Iterator[Tensor]:
        """Yield each weight with updates, FP32 [out, in]."""
        for gemm in range(len(self.names)):
            values = self.original(gemm).clone()
            for layer, adapters in merges:
                layer.add_to(values, gemm, adapters)
            yield values

    def _write(self, merges: list[Merge]) -> None:
        for gemm, values in enumerate(self._sums(merges)):
            weight = self._weight(gemm)
            if isinstance(weight, StoredWeight):
                self._replace(gemm, values.to(weight.dtype))
            else:
                write_weight(weight, values, for_master=False)
            scale = self._scale(gemm)
            if scale is not None and (amax := values.abs().amax().float()) > 0:
                # The sum may exceed what the scale of the last training step allows.
                scale.copy_(scale_from_amax(amax, E4M3_MAX))
        self._drop_cached()
        self.merges = merges

    def _drop_cached(self) -> None:
        """Drop what the module has quantized of the weights: a layer that is switched off unmerges inside a pass."""
        te = engine_of(self.owner)
        if isinstance(self.owner, te.LINEARS):  # others, such as routers, are not quantized
            te.drop_cached_weights(self.owner)


def merged_weight(owner: nn.Module) -> MergedWeight:
    """Return the MergedWeight of a te module, the same one for all layers that change it."""
    merged = owner.__dict__.get(ATTRIBUTE)
    if merged is None:
        names = [name for name, _ in owner.named_parameters() if name.startswith("weight")]
        merged = MergedWeight(owner, names)
        owner.__dict__[ATTRIBUTE] = merged
    return merged


def forget_merges(owner: nn.Module) -> None:
    """Make the current weights of a te module its own: `unmerge` no longer restores the earlier ones."""
    owner.__dict__.pop(ATTRIBUTE, None)
