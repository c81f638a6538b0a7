"""The quantized weights of a Hugging Face folder in the form in which they are stored, as weights of our linears.

Rows of several of their tensors are one weight of ours. Data and scales per row move with their rows; where several
rows share a scale, each row remembers which one. A linear of ours stays stored if all of its rows are quantized alike,
but for whole tensors of a te.Linear that are not quantized at all; others are dequantized when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from te_models.config.layer import LinearSpec
from te_models.errors import CheckpointError
from te_models.interop.quantized import MXFP4, WeightStorage
from te_models.interop.tensor_places import Place
from te_models.numerics.stored import StoredRows, StoredWeight


@dataclass(frozen=True)
class RawWeight:
    """A quantized weight as it is stored: data uint8 [out, bytes], scales [rows, columns] of its grid, and a factor.

    `factor` is FP32 [], None where the scales are all there is.
    """

    data: Tensor
    scales: Tensor
    factor: Tensor | None = None


class StoredFolder(Protocol):
    """A folder from which stored weights are read (te_models.interop.hf.HuggingFaceFolder)."""

    @property
    def places(self) -> Mapping[str, Place]:
        """The rows of each of their tensors in ours."""
        ...

    @property
    def quantized(self) -> Mapping[str, WeightStorage]:
        """The storage of each quantized weight."""
        ...

    def raw_weights(self, names: Iterable[str]) -> Iterator[tuple[str, RawWeight | Tensor]]:
        """Yield name and content of these weights, raw if they are quantized."""
        ...


def storable(source: StoredFolder, linears: Mapping[str, LinearSpec]) -> dict[str, list[str]]:
    """Return the names of our linears that can stay as they are stored -> the names of their weights in them."""
    parts: dict[str, list[str]] = {}
    for theirs, place in source.places.items():
        module, _, kind = place.name.rpartition(".")
        # The head and the embedding lie outside the layers, and are never left as they are stored.
        if kind.startswith("weight") and module in linears and module.startswith("layers."):
            parts.setdefault(module, []).append(theirs)
    alike = {}
    for module, names in parts.items():
        if _alike(source, names, linears[module]):
            alike[module] = names
    return alike


def _alike(source: StoredFolder, names: list[str], linear: LinearSpec) -> bool:
    """Return whether the weights of a linear are quantized in one way."""
    quantized = [name for name in names if name in source.quantized]
    if not quantized or (linear.experts and len(quantized) < len(names)):
        return False
    if not linear.fp8:
        return False  # a router, for example, which is no te.Linear
    if any(source.places[name].form for name in names):
        return False
    return len({source.quantized[name] for name in quantized}) == 1


class _Rows:
    """The stored rows of one of our linears, filled tensor by tensor."""

    def __init__(
        self,
        linear: LinearSpec,
        storage: WeightStorage,
        missing: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.linear = linear
        self.storage = storage
        self.missing = missing  # tensors that are still to come
        self.device = device
        self.dtype = dtype
        # The weights of all experts below each other, [experts * outputs, bytes].
        rows = linear.gemms * linear.outputs
        width = linear.inputs // 2 if storage.packed or storage is MXFP4 else linear.inputs
        self.data = torch.zeros(rows, width, dtype=torch.uint8, device=device)
        # One row of scales per row of the weight; or one per block of rows, and the number of the one of each row.
        self.scales: Tensor | None = None
        self.shared_scales: list[Tensor] = []
        self.scale_rows: Tensor | None = None
        self.shared_count = 0  # rows in `shared_scales`
        self.factors: Tensor | None = None
        # Rows that the release left in BF16, and their values.
        self.plain_rows: list[Tensor] = []
        self.plain: list[Tensor] = []

    def add(self, place: Place, content: RawWeight | Tensor) -> None:
        """Take the content of one of their tensors."""
        self.missing -= 1
        gemm = int(place.name.rpartition(".weight")[2] or 0)
        outputs = self.linear.outputs
        gemm_rows = slice(gemm * outputs, (gemm + 1) * outputs)
        if isinstance(content, Tensor):
            rows = place.save(torch.arange(outputs))
            self.plain_rows.append(rows)
            self.plain.append(content.to(self.dtype))
            return
        place.load(self.data[gemm_rows], content.data)
        step, _ = self.storage.steps((place.shape[0], place.shape[1]))
        if step == 1:
            if self.scales is None:
                self.scales = self._zeros(content.scales.shape[1], content.scales.dtype)
            # Some operations of torch know no FP8.
            place.load(_as_bytes(self.scales[gemm_rows]), _as_bytes(content.scales))
        else:
            if self.scale_rows is None:
                self.scale_rows = torch.zeros(len(self.data), dtype=torch.int32, device=self.device)
            # [rows]: the row of `shared_scales` of each row; those of earlier tensors come before.
            blocks = torch.arange(place.shape[0], dtype=torch.int32) // step
            place.load(self.scale_rows[gemm_rows], self.shared_count + blocks)
            self.shared_scales.append(content.scales)
            self.shared_count += len(content.scales)
        if content.factor is not None:
            if self.factors is None:
                # One per row, although a tensor has only one: q, k and v in one weight have different ones.
                self.factors = torch.ones(len(self.data), device=self.device)
            place.load(self.factors[gemm_rows], content.factor.float().expand(place.shape[0]))

    def _zeros(self, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self.data), columns, dtype=dtype, device=self.device)

    def finished(self) -> StoredRows:
        """Return the rows, once all tensors were added."""
        scales = self.scales
        if scales is None:
            scales = torch.cat(self.shared_scales).to(self.device)
        plain_rows = None
        plain = None
        if self.plain:
            plain_rows = torch.cat(self.plain_rows).to(self.device)
            plain = torch.cat(self.plain).to(self.device)
        return StoredRows(
            data=self.data,
            scales=scales.contiguous(),
            width=self.storage.block[1] or self.linear.inputs,
            packed=self.data.shape[1] < self.linear.inputs,
            scale_rows=self.scale_rows,
            factors=self.factors,
            divide=self.storage.divide,
            plain_rows=plain_rows,
            plain=plain,
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def stored_weights(
    source: StoredFolder,
    linears: Mapping[str, LinearSpec],
    modules: Mapping[str, list[str]],
    device: torch.device,
    dtype: torch.dtype,
    describe: Callable[[str], str],
) -> Iterator[tuple[str, StoredWeight]]:
    """Yield name and stored weight of each GEMM of the linears `modules` (`storable`), with the nominal `dtype`.

    `describe` returns the name of a linear for errors.

    Raises:
        CheckpointError: a value is not finite.
    """
    owner = {}
    for module, names in modules.items():
        for name in names:
            owner[name] = module
    begun: dict[str, _Rows] = {}
    for name, content in source.raw_weights(owner):
        module = owner[name]
        if module not in begun:
            storages = [source.quantized[n] for n in modules[module] if n in source.quantized]
            begun[module] = _Rows(linears[module], storages[0], len(modules[module]), device, dtype)
        rows = begun[module]
        rows.add(source.places[name], content)
        # One te.Linear joins several tensors, which may lie in different files.
        if rows.missing:
            continue
        del begun[module]
        stored = rows.finished()
        if not stored.check_finite():
            raise CheckpointError(f"{describe(module)} has a value that is not finite")
        linear = linears[module]
        if not linear.experts:
            yield f"{module}.weight", StoredWeight(stored, dtype)
            continue
        for expert, weight in enumerate(linear.weights):
            # All experts of a layer were read as one matrix; each parameter is a slice of it.
            part = stored.part(expert * linear.outputs, (expert + 1) * linear.outputs)
            yield f"{module}.{weight}", StoredWeight(part, dtype)
