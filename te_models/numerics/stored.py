"""Weights that stay as a quantized release stores them, and whose values are made where a product needs them.

`StoredRows` is the form: E4M3 or E2M1 data, with a scale for each block of columns, which several rows may share. It
holds block FP8, FP8 per row or tensor, MXFP4 and NVFP4 alike; rows of several tensors of a release, such as q, k and v,
are rows of one form. `StoredWeight` is a form as the parameter of a te.Linear, or of one expert of a te.GroupedLinear.
Neither ever changes: a run trains adapters beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from te_models.errors import UsageError
from te_models.numerics import casts, nvfp4
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import DType

FROZEN = (
    "the weights of the base are as its release stores them and cannot be changed: load the model with "
    "base_weights='dequantized'"
)
# Values that are decoded at a time on a CPU, whose FP32 is four times as much memory as BF16 and the data together.
VALUES_AT_A_TIME = 2**24
# The largest magnitude of the data.
LARGEST = {True: 6.0, False: 448.0}
T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True)
class StoredRows:
    """Rows [out, in] of quantized weights, as they are stored.

    A value is its data times its scale, computed in FP32 and rounded once to the dtype that is asked for.

    Attributes:
        data: uint8 [out, in] with E4M3, or [out, in / 2] with two E2M1 per byte, the lower half first.
        scales: [n, ceil(in / width)], FP32, BF16 or FP16, E4M3, or uint8 with E8M0.
        width: the columns that share a scale.
        packed: whether the data is E2M1.
        scale_rows: int32 [out], the row of `scales` of each row; None: the same.
        factors: FP32 [out], by which the scales of a row are multiplied (NVFP4's scale of the tensor); None: 1.
        divide: whether the scales are divided by `factors` instead.
        plain_rows: int64 [m], rows of a release that are not quantized; None: all are.
        plain: their values [m, in].
    """

    data: Tensor
    scales: Tensor
    width: int
    packed: bool
    scale_rows: Tensor | None = None
    factors: Tensor | None = None
    divide: bool = False
    plain_rows: Tensor | None = None
    plain: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        rows, columns = self.data.shape
        return torch.Size((rows, columns * (2 if self.packed else 1)))

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.data.device

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that hold the rows; several experts may have the same scales."""
        named = (
            self.data,
            self.scales,
            self.scale_rows,
            self.factors,
            self.plain_rows,
            self.plain,
        )
        return [tensor for tensor in named if tensor is not None]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> StoredRows:
        """Return the rows with `function` applied to each tensor that holds them."""

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return replace(
            self,
            data=function(self.data),
            scales=function(self.scales),
            scale_rows=of(self.scale_rows),
            factors=of(self.factors),
            plain_rows=of(self.plain_rows),
            plain=of(self.plain),
        )

    def part(self, start: int, stop: int) -> StoredRows:
        """Return the rows from `start` to `stop`, in the same memory; none of them may be plain."""
        assert self.plain_rows is None
        part_rows = slice(start, stop)
        return replace(
            self,
            data=self.data[part_rows],
            scales=self.scales[part_rows] if self.scale_rows is None else self.scales,
            scale_rows=None if self.scale_rows is None else self.scale_rows[part_rows],
            factors=None if self.factors is None else self.factors[part_rows],
        )

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the values [out, in] in `dtype`, written into `out` [out, in] if it is given."""
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=self.device)
        # A plan counts the memory; there are no values.
        if out.is_meta:
            return out
        if out.is_cuda:
            self.dequantize_in_one_launch(out)
        else:
            rows = max(1, VALUES_AT_A_TIME // max(1, self.shape[1]))
            for start in range(0, len(out), rows):
                part_rows = slice(start, start + rows)
                out[part_rows] = self._values(part_rows)
        if self.plain_rows is not None and self.plain is not None:
            out.index_copy_(0, self.plain_rows, self.plain.to(out.dtype))
        return out

    def dequantize_in_one_launch(self, out: Tensor) -> None:
        """Write the values of the quantized rows into contiguous `out` [out, in], by Triton."""
        from te_models.numerics.stored_triton import dequantize  # noqa: PLC0415  needs Triton

        dequantize(
            out,
            data=self.data,
            scales=self.scales,
            width=self.width,
            packed=self.packed,
            scale_rows=self.scale_rows,
            factors=self.factors,
            divide=self.divide,
        )

    def _values(self, rows: slice) -> Tensor:
        """Return the values of some rows, FP32."""
        data = self.data[rows]
        if self.packed:
            values = nvfp4.unpack(data)
        else:
            values = casts.decode_fp8(data, DType.kFloat8E4M3)
        scales = self._scales(rows)
        if self.width >= values.shape[1]:
            return values.mul_(scales)
        # [rows, in]: the last block of a row may be incomplete.
        spread = scales.repeat_interleave(self.width, dim=1)[:, : values.shape[1]]
        return values.mul_(spread)

    def _scales(self, rows: slice) -> Tensor:
        """Return the scales of some rows, FP32 [rows, ceil(in / width)]."""
        row_scales = (
            self.scales[rows] if self.scale_rows is None else self.scales[self.scale_rows[rows]]
        )
        scales = (
            e8m0_to_float(row_scales) if row_scales.dtype == torch.uint8 else row_scales.float()
        )
        if self.factors is None:
            return scales
        factors = self.factors[rows, None]
        return scales / factors if self.divide else scales * factors

    def check_finite(self) -> bool:
        """Return whether no value is NaN or infinite, from the data and the largest scale."""
        if self.data.is_meta:
            return True
        # E4M3's only NaN; E2M1 has none.
        if not self.packed and bool(((self.data & 0x7F) == 0x7F).any()):
            return False
        largest = torch.zeros((), device=self.device)
        rows = max(1, VALUES_AT_A_TIME // max(1, self.shape[1]))
        for start in range(0, len(self.data), rows):
            scales = self._scales(slice(start, start + rows))
            if not bool(scales.isfinite().all()):
                return False
            largest = torch.maximum(largest, scales.abs().amax())
        values = (largest * LARGEST[self.packed]).isfinite()
        return bool(values) and (self.plain is None or bool(self.plain.isfinite().all()))


def joined(parts: Sequence[StoredRows]) -> StoredRows:
    """Return the rows of all parts, of one form, below each other; in the same memory where they follow each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    # Experts of one release tensor have its scales together, which are then kept once.
    same_scales = all(part.scales.data_ptr() == first.scales.data_ptr() for part in parts)
    if first.scale_rows is None:
        scales = _below([part.scales for part in parts])
        scale_rows = None
    elif same_scales:
        scales = first.scales
        scale_rows = _below([_given(part.scale_rows) for part in parts])
    else:
        scales = torch.cat([part.scales for part in parts])
        shifted = []
        above = 0
        for part in parts:
            # The numbers of rows of scales count from the first part's.
            shifted.append(_given(part.scale_rows) + above)
            above += len(part.scales)
        scale_rows = torch.cat(shifted)
    factors = None
    if first.factors is not None:
        factors = _below([_given(part.factors) for part in parts])
    return replace(
        first,
        data=_below([part.data for part in parts]),
        scales=scales,
        scale_rows=scale_rows,
        factors=factors,
    )


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _below(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one below the other: a view if they are in memory so, else a copy."""
    first = tensors[0]
    size = first.element_size()
    address = first.data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != address:
            return torch.cat(list(tensors))
        address += tensor.numel() * size
    storage = first.untyped_storage()
    if address > storage.data_ptr() + storage.nbytes():
        return torch.cat(list(tensors))  # different allocations that happen to touch
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class StoredWeight(Tensor):
    """Rows in their stored form as a frozen tensor [out, in] with a nominal dtype, such as BF16.

    An operation that does not know the form works on the dequantized values; one that would write them is refused.
    """

    rows: StoredRows

    @staticmethod
    def __new__(cls, rows: StoredRows, dtype: torch.dtype) -> StoredWeight:
        return Tensor._make_wrapper_subclass(cls, rows.shape, dtype=dtype, device=rows.device)

    def __init__(self, rows: StoredRows, dtype: torch.dtype) -> None:
        self.rows = rows

    # Functions of torch arrive at __torch_dispatch__, and not here.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[bad-override]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Return the values [out, in], rounded once to the nominal dtype, and then in `dtype` (None: as they are)."""
        values = self.rows.dequantize(self.dtype)
        return values if dtype is None else values.to(dtype)

    def get_data_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the rows, as quantized tensors do."""
        return tuple(self.rows.tensors)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        form = "E2M1" if self.rows.packed else "E4M3"
        return f"StoredWeight({list(self.shape)}, {form}, {self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, object]) -> StoredWeight:
        """Return a tensor with the same memory, which never changes."""
        copied = StoredWeight(self.rows, self.dtype)
        return _like(self, copied)

    def __reduce_ex__(self, proto: object) -> tuple[Callable[..., object], tuple[()]]:
        parameter = getattr(self, "_is_param", False)
        return functools.partial(_remade, self.rows, self.dtype, parameter), ()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor itself; assigning another form takes it, and anything else is refused."""
        return StoredWeight(self.rows, self.dtype)

    @data.setter
    def data(self, tensor: Tensor) -> None:
        if not isinstance(tensor, StoredWeight):
            raise UsageError(FROZEN)
        self.rows = tensor.rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is written in C
        cls,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # These change no value, so the stored form can stay.
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return StoredWeight(args[0].rows, args[0].dtype)
        if func is torch.ops.aten.clone.default:
            return StoredWeight(args[0].rows.mapped(torch.clone), args[0].dtype)
        moves = func is torch.ops.aten._to_copy.default
        # To another dtype it is the values that move: the branch below.
        if moves and kwargs.get("dtype") in (None, args[0].dtype):
            device = kwargs.get("device")
            return StoredWeight(args[0].rows.mapped(lambda t: t.to(device)), args[0].dtype)
        if _writes(func, args):
            raise UsageError(FROZEN)
        plain_args, plain_kwargs = tree_map(values_of, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def values_of(value: Any) -> Any:
    """Return the dequantized values of a StoredWeight; anything else as it is."""
    return value.dequantize() if isinstance(value, StoredWeight) else value


def _writes(func: torch._ops.OpOverload, args: Sequence[object]) -> bool:
    """Return whether an operation would write into a StoredWeight."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, StoredWeight):
            return True
    return False


def _like(source: Tensor, copied: T) -> T:
    """Return `copied` as a parameter if `source` is one."""
    if getattr(source, "_is_param", False):
        vars(copied)["_is_param"] = True
    return copied


def _remade(rows: StoredRows, dtype: torch.dtype, parameter: bool) -> StoredWeight:
    weight = StoredWeight(rows, dtype)
    if parameter:
        vars(weight)["_is_param"] = True
    return weight
