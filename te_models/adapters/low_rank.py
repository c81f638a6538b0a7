"""The one forward of LoRA: the low-rank updates of all adapters in a te.Linear or a te.GroupedLinear.

The frozen layer runs under the model's recipe, FP8 included, once for all of its rows. The low-rank products run beside
it in the dtype of its output, since a rank such as 8 is not a multiple of the alignment that FP8 GEMMs need. They are
the same bits whatever dtype the adapters are stored in: in a run, whose adapters have FP32 masters beside them, and in
a model that loads them in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.grouped_product import low_rank_product
from te_models.kernels.groups import Groups


class AdapterFactors(Protocol):
    """The A and B of a layer's adapters, by the adapter's name."""

    lora_A: Any
    lora_B: Any


class LoraLayer(AdapterFactors, Protocol):
    """The part of te_models.adapters.layers.LoraLinear that the products read."""

    training: bool
    lora_dropout: Any
    lora_magnitude_vector: Any
    scaling: dict[str, float]

    @property
    def disable_adapters(self) -> bool: ...

    @property
    def merged(self) -> bool: ...

    @property
    def active_adapters(self) -> list[str]: ...

    def length_factors(self, adapter: str) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """A layer with adapters, and which outputs of the te.Linear it updates: int64 [rows], None: all of them.

    With `swapped` its A and B belong to the transposed weights of experts (`swapped_factors`).
    """

    layer: LoraLayer
    columns: Tensor | None = None
    swapped: bool = False

    def has(self, adapter: str) -> bool:
        """Return whether the layer adds the update of this adapter, which is neither off nor in the weight."""
        layer = self.layer
        if layer.disable_adapters or layer.merged:
            return False
        return adapter in layer.active_adapters and adapter in layer.lora_A

    def drops(self, adapter: str) -> bool:
        """Return whether the adapter's input loses elements now."""
        return self.layer.training and isinstance(self.layer.lora_dropout[adapter], nn.Dropout)

    def a(self, adapter: str, dtype: torch.dtype) -> Tensor:
        """Return A [rank, in]."""
        weight: Tensor = self.layer.lora_A[adapter].weight
        return weight.to(dtype)

    def b(self, adapter: str, dtype: torch.dtype, outputs: int) -> Tensor:
        """Return B [outputs, rank], with zeros in the rows of other parts."""
        weight: Tensor = self.layer.lora_B[adapter].weight
        weight = weight.to(dtype)
        if self.columns is None:
            return weight
        # Zeros in the other rows let all parts of a fused linear share one product with B.
        return weight.new_zeros(outputs, weight.shape[1]).index_copy(0, self.columns, weight)


def expert_factors(
    layer: AdapterFactors,
    adapter: str,
    experts: int,
    dtype: torch.dtype,
    swapped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return A [E, r, in] and B [E, out, r] of the experts, which an adapter has side by side as files have them.

    Its A [E * r, in] has the experts' matrices one after the other; in its B [out, r * E] column j * E + e is column j
    of expert e. With `swapped` those are of the transposed weights.
    """
    a: Tensor = layer.lora_A[adapter].weight
    b: Tensor = layer.lora_B[adapter].weight
    a = a.to(dtype).unflatten(0, (experts, -1))
    b = b.to(dtype).unflatten(1, (-1, experts)).permute(2, 0, 1)
    return (b.mT, a.mT) if swapped else (a, b)


def swapped_factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A and B of the transposed weights of experts, from A [E * r, in] and B [out, r * E] as files have them.

    The transpose of B A is A^T B^T: the new A is [E * r, out], the new B [in, r * E]. Twice, it changes nothing.
    """
    own_a = a.unflatten(0, (experts, -1))  # [E, r, in]
    own_b = b.unflatten(1, (-1, experts))  # [out, r, E]
    return own_b.permute(2, 1, 0).flatten(0, 1), own_a.permute(2, 1, 0).flatten(1, 2)


def add_expert_updates(
    result: Tensor,
    x: Tensor,
    parts: Iterable[Part],
    experts: int,
    rows: list[int] | Groups,
) -> Tensor:
    """Return the output of a te.GroupedLinear with the updates of all active adapters of its experts.

    Args:
        result: its output of x [R, out].
        x: its input [R, in].
        parts: its layers with adapters.
        experts: their number.
        rows: how many rows each expert has.
    """
    dtype = result.dtype
    for part in parts:
        layer = part.layer
        for adapter in layer.active_adapters:
            if not part.has(adapter):
                continue
            a, b = expert_factors(layer, adapter, experts, dtype, part.swapped)
            if part.columns is not None:
                # An adapter of up alone, for one, leaves the rows of gate as they are.
                b = torch.zeros_like(b).index_copy(1, part.columns, b)
            dropped = layer.lora_dropout[adapter](x.to(dtype))
            result = result + low_rank_product(dropped, a, b, layer.scaling[adapter], rows)
    return result


def add_updates(
    result: Tensor,
    x: Tensor,
    parts: Sequence[Part],
    base: Callable[[Tensor], Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Return the output of a te.Linear with the updates of all active adapters.

    Args:
        result: the te.Linear's output of x [..., out].
        x: its input [..., in].
        parts: its layers with adapters.
        base: the te.Linear, for the inputs after a dropout under DoRA.
        bias: the bias of the te.Linear [out]; None: it has none.
    """
    adapters: dict[str, None] = {}
    for part in parts:
        adapters |= dict.fromkeys(part.layer.active_adapters)
    # A caller's torch.autocast would cast the products, which have the dtype of the result already.
    with _no_autocast(result):
        for adapter in adapters:
            members = [part for part in parts if part.has(adapter)]
            if members:
                result = _add_update(result, x, members, adapter, base, bias)
    return result


def _no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _add_update(
    result: Tensor,
    x: Tensor,
    parts: Sequence[Part],
    adapter: str,
    base: Callable[[Tensor], Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Return `result` with the update of one adapter, which all `parts` have."""
    dtype = result.dtype
    outputs = result.shape[-1]
    inputs = x.to(dtype)
    # Each linear of transformers has a dropout of its own, as in peft. Without dropout they share one product with A.
    if len(parts) > 1 and any(part.drops(adapter) for part in parts):
        dropped = [part.layer.lora_dropout[adapter](inputs) for part in parts]
        low = [F.linear(x, part.a(adapter, dtype)) for part, x in zip(parts, dropped, strict=True)]
        together = torch.cat(low, dim=-1)  # [..., the sum of their ranks]
    else:
        dropped = [parts[0].layer.lora_dropout[adapter](inputs)] * len(parts)
        a = [part.a(adapter, dtype) for part in parts]
        together = F.linear(dropped[0], a[0] if len(a) == 1 else torch.cat(a))
    scalings = [part.layer.scaling[adapter] for part in parts]
    # One factor for the whole product; where parts differ, B takes up the ratio.
    scaling = next((scaling for scaling in scalings if scaling), 0.0)
    blocks = []  # B [out, rank] of each part
    for part, part_scaling in zip(parts, scalings, strict=True):
        b = part.b(adapter, dtype, outputs)
        blocks.append(b if part_scaling == scaling else b * (part_scaling / scaling))
    b = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    if result.dim() == 2:
        # One kernel multiplies, scales and adds: the update is rounded once, with the sum.
        updated = torch.addmm(result, together, b.t(), alpha=scaling)
    else:
        rows = torch.addmm(result.flatten(0, -2), together.flatten(0, -2), b.t(), alpha=scaling)
        updated = rows.view_as(result)
    if not any(adapter in part.layer.lora_magnitude_vector for part in parts):
        return updated
    return _scale_rows(result, updated, parts, adapter, dropped, base, bias)


def _scale_rows(
    result: Tensor,
    updated: Tensor,
    parts: Sequence[Part],
    adapter: str,
    dropped: Sequence[Tensor],
    base: Callable[[Tensor], Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Return the output under DoRA, which gives the rows of the updated weight lengths that are trained.

    `dropped` are the inputs of `parts` after their dropouts; base and update are both computed from these.
    """
    factors = torch.ones(result.shape[-1], dtype=torch.float32, device=result.device)
    unscaled = result
    for part, left in zip(parts, dropped, strict=True):
        if adapter not in part.layer.lora_magnitude_vector:
            continue
        part_factors = part.layer.length_factors(adapter)
        factors = (
            part_factors
            if part.columns is None
            else factors.index_copy(0, part.columns, part_factors)
        )
        if not part.drops(adapter):
            continue
        # peft applies dropout to the base's input too under DoRA, so that this part of it runs again.
        product = base(left)
        if part.columns is None:
            unscaled = product
        else:
            unchanged_rows = product.index_select(-1, part.columns)
            unscaled = unscaled.index_copy(-1, part.columns, unchanged_rows)
    # factors * (base + update) + bias, where the update is `updated` - `result`, which have the bias already.
    without_bias = unscaled if bias is None else unscaled - bias.to(result.dtype)
    return updated + (factors.to(result.dtype) - 1) * (without_bias + updated - result)
