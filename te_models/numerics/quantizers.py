"""Quantizers, with Transformer Engine's constructors: they turn high-precision tensors into quantized ones.

`quantizer(x)` returns a tensor subclass that autograd treats as the identity; with `quantizer.internal = True` it
returns the plain storage. `rowwise_usage` and `columnwise_usage` choose the copies to make. The formulas
are in casts.py, blocks.py, scale_rules.py and e8m0.py.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_models.distributed.collectives import all_reduce_max
from te_models.errors import require
from te_models.numerics import casts, fused
from te_models.numerics.blocks import block_amax, cast_fp8_blocks
from te_models.numerics.e8m0 import e8m0_from_amax, e8m0_to_float
from te_models.numerics.formats import FP8_MAX, DType
from te_models.numerics.matrices import as_matrix, like, pad_to, rows_last
from te_models.numerics.scale_rules import scale_from_amax
from te_models.numerics.tensors import (
    BLOCK,
    MX_BLOCK,
    Float8BlockwiseQTensor,
    Float8Tensor,
    MXFP8Tensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    StraightThrough,
)

StorageFields = dict[str, Any]  # of a storage, without the leading underscore


_RECORD_AMAX: ContextVar[bool] = ContextVar("record_amax", default=True)


@contextlib.contextmanager
def no_amax_recorded() -> Iterator[None]:
    """Inside, casts under delayed scaling leave amax histories as they are. This applies to the thread."""
    token = _RECORD_AMAX.set(False)
    try:
        yield
    finally:
        _RECORD_AMAX.reset(token)


def records_amax() -> bool:
    """Return whether casts under delayed scaling record an amax: they do, except inside `no_amax_recorded`."""
    return _RECORD_AMAX.get()


class Quantizer:
    """Base of the quantizers. A subclass defines `_tensor_class`, `scheme` and `_encode`."""

    _tensor_class: ClassVar[type[QuantizedTensor]]
    scheme: ClassVar[str]  # the name of the recipe class whose tensors it quantizes
    # Called after each cast with the values, the quantized tensor and `known_scale` (te_models.recorder.table).
    observer: Callable[[Tensor, QuantizedTensorStorage, Tensor | None], None] | None = None
    _multiple: ClassVar[int] = 1  # of which both matrix dimensions have to be multiples

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        """Choose the copies to make."""
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        # A tensor subclass by default, as in Transformer Engine; its modules ask for the plain storage, which costs the
        # host less.
        self.internal = False

    def __repr__(self) -> str:
        usage = f"rowwise_usage={self.rowwise_usage}, columnwise_usage={self.columnwise_usage}"
        return f"{type(self).__name__}({usage}, internal={self.internal})"

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the copies to make; None leaves the choice as it is."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    @property
    def known_scale(self) -> Tensor | None:
        """The scale of the next cast, FP32 [1], where it is known before the values."""
        return None

    def copy(self) -> Quantizer:
        """Return a shallow copy, which shares scale and amax tensors."""
        # Not copy.copy: the constructor of a subclass takes other arguments, and scale and amax have to stay the same
        # tensors.
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __call__(self, tensor: Tensor) -> Any:
        """Quantize a FP32, BF16 or FP16 tensor."""
        return self.quantize(tensor)

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Quantize `tensor`, into `out` if given. `dtype` is the nominal dtype (None: the tensor's)."""
        if out is not None:
            return self.update_quantized(tensor, out)
        if self.internal:
            return self._build(tensor, dtype)
        # A tensor among others, which autograd has to see: the gradient passes as if nothing had been rounded.
        return StraightThrough.apply(tensor, lambda t: self._build(t, dtype))

    def update_quantized(self, src: Tensor, dst: QuantizedTensorStorage) -> QuantizedTensorStorage:
        """Quantize `src` into the copies that `dst` has, and return `dst`."""
        usages = dst.get_usages()
        shape = tuple(src.shape)
        expected = tuple(dst._shape)
        require(shape == expected, f"cannot quantize shape {shape} into shape {expected}")
        for name, value in self._fields(src, usages["rowwise"], usages["columnwise"]).items():
            setattr(dst, f"_{name}", value)
        if self.observer is not None:
            self.observer(src, dst, self.known_scale)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensorStorage:
        """Return a quantized tensor of zeros, whose amax of 0 raises none and which no observer counts."""
        quantizer = self.copy()
        quantizer.observer = None
        # Zeros and not uninitialized memory: the cast would raise an amax by whatever is there.
        empty = quantizer._build(torch.zeros(tuple(shape), dtype=dtype, device=device), None)
        if isinstance(empty, Tensor):
            empty.requires_grad_(requires_grad)
        return empty

    def is_quantizable(self, inp: Tensor) -> bool:
        """Return True if both matrix dimensions are multiples of what the format needs."""
        step = self._multiple
        return step == 1 or (
            inp.ndim >= 2 and inp.shape[-1] % step == 0 and inp.shape[:-1].numel() % step == 0
        )

    def _build(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        fields = self._fields(tensor, self.rowwise_usage, self.columnwise_usage)
        # A copy, since the module sets the usage of its own quantizer anew at each call.
        fields |= {"shape": tensor.shape, "dtype": dtype or tensor.dtype, "quantizer": self.copy()}
        if self.internal:
            tensor_or_storage = self._tensor_class._storage_class()(**fields)
        else:
            tensor_or_storage = self._tensor_class(device=tensor.device, **fields)
        if self.observer is not None:
            self.observer(tensor, tensor_or_storage, self.known_scale)
        return tensor_or_storage

    def _fields(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> StorageFields:
        """Return the attributes of the storage for `tensor`."""
        if not self.is_quantizable(tensor):
            raise RuntimeError(
                f"{type(self).__name__.removesuffix('Quantizer')} requires tensor dims that are divisible by "
                f"{self._multiple} (got shape={tuple(tensor.shape)}): pad the tensor"
            )
        return self._encode(_bare(tensor), rowwise, columnwise)

    @abstractmethod
    def _encode(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> StorageFields:
        """Return the attributes of the storage for a contiguous, detached tensor of a suitable shape."""


def _bare(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and detached, with few calls of torch: each costs the host of a GPU microseconds."""
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


class _PerTensorQuantizer(Quantizer):
    """Delayed and current scaling: one scale per tensor, and the same FP8 data in both copies."""

    _tensor_class = Float8Tensor
    dtype: DType

    @abstractmethod
    def _cast(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return FP8 data (uint8, shape of `tensor`) and the inverse scale `[1]`."""

    def _encode(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> StorageFields:
        if not rowwise and columnwise and not self.internal:
            raise NotImplementedError(
                f"{type(self).__name__} makes no columnwise-only tensor: set rowwise=True and drop it with update_usage"
            )
        # One cast serves both copies: with one scale per tensor they are the same bytes.
        data, scale_inv = self._cast(tensor)
        return {
            "data": data if rowwise else None,
            "transpose": rows_last(data) if columnwise else None,
            "scale_inv": scale_inv,
            "fp8_dtype": self.dtype,
        }


class Float8Quantizer(_PerTensorQuantizer):
    """Delayed scaling: cast with `scale` as it stands and raise `amax` to the tensor's, both FP32 [1]."""

    scheme = "DelayedScaling"

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        """Use `scale` and `amax` in place; every cast updates `amax`."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = DType.cast(fp8_dtype)

    @property
    def known_scale(self) -> Tensor:
        """The scale of the next cast, FP32 [1]."""
        return self.scale.detach().reshape(1)

    def _cast(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        if fused.active(tensor) and self.amax.device == tensor.device:
            return fused.cast_delayed(tensor, self.scale, self.amax, self.dtype)
        # Detached: autograd must not see the history change.
        amax = self.amax.detach()
        scale = self.scale.detach().reshape(1)
        if tensor.numel() and records_amax():
            # Several casts between two updates of the scale (micro-batches) leave their largest.
            torch.maximum(amax, casts.amax(tensor).to(amax.device), out=amax)
        return casts.cast_fp8(tensor, scale, self.dtype), scale.reciprocal()


class Float8CurrentScalingQuantizer(_PerTensorQuantizer):
    """Current scaling: the scale follows from the tensor's own amax. `device` is accepted for its place only."""

    scheme = "Float8CurrentScaling"

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: ProcessGroup | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        """Use the largest amax over `amax_reduction_group` with `with_amax_reduction`."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn(
                "Float8CurrentScalingQuantizer ignores `use_existing_amax`, `scale` and `amax`",
                DeprecationWarning,
                stacklevel=2,
            )
        self.dtype = DType.cast(fp8_dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    def _cast(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        kernels = fused.active(tensor)
        # Two passes over the tensor: its scale is not known before its amax.
        amax = fused.amax(tensor) if kernels else casts.amax(tensor).reshape(1)
        if self.with_amax_reduction:
            amax = amax.amax().reshape(1)
            # The parts of a tensor that is gathered in FP8 have to share a scale.
            all_reduce_max(amax, self.amax_reduction_group)
        if kernels:
            return fused.cast_current(
                tensor, amax, self.dtype, self.force_pow_2_scales, self.amax_epsilon
            )
        scale = scale_from_amax(
            amax, FP8_MAX[self.dtype], self.force_pow_2_scales, self.amax_epsilon
        )
        return casts.cast_fp8(tensor, scale, self.dtype), scale.reciprocal()


class _BlockQuantizer(Quantizer):
    """Base of the quantizers of FP8 blocks, whose two copies are independent."""

    dtype: DType

    @abstractmethod
    def _cast(self, x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return FP8 data `[M, K]` of x `[M, K]` and one inverse scale, or scale byte, per block."""

    @abstractmethod
    def _copies(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple[Tensor, ...]:
        """Return data `[M, K]` and inverse scales of both copies of x `[M, K]`; one not asked for may be anything."""

    def _both(
        self, x: Tensor, size: int, rowwise: bool, columnwise: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `_copies` for blocks of `size` elements along each copy's contraction, with unpadded scales."""
        # The copies are cast on their own: blocks lie along the contraction, which differs.
        row = self._cast(x, (1, size)) if rowwise else (x, x[:0, :0])
        column = self._cast(x, (size, 1)) if columnwise else (x, x[:0, :0])
        return *row, *column

    def _encode(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> StorageFields:
        row_data, row_scale, column_data, column_scale = self._copies(
            as_matrix(tensor), rowwise, columnwise
        )
        fields: StorageFields = {"fp8_dtype": self.dtype}
        if rowwise:
            fields |= {"rowwise_data": like(row_data, tensor), "rowwise_scale_inv": row_scale}
        if columnwise:
            fields |= {
                "columnwise_data": like(column_data, tensor),
                "columnwise_scale_inv": column_scale,
            }
        return fields


class Float8BlockQuantizer(_BlockQuantizer):
    """128x128 blocks (`block_scaling_dim=2`) or 1x128 along the contraction (1), with FP32 scales."""

    _tensor_class = Float8BlockwiseQTensor
    scheme = "Float8BlockScaling"

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        """Round scales down to powers of two with `force_pow_2_scales`."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.cast(fp8_dtype)
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def _cast(self, x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        scale = scale_from_amax(
            block_amax(x, block),
            FP8_MAX[self.dtype],
            power_of_2=self.force_pow_2_scales,
            epsilon=self.amax_epsilon,
            # A block with an infinity is cast as one whose amax is the largest number of the dtype.
            infinite=torch.finfo(x.dtype).max,
        )
        return cast_fp8_blocks(x, scale, block, self.dtype), scale.reciprocal()

    def _copies(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple[Tensor, ...]:
        if fused.active(x):
            return fused.cast_blocks(
                x,
                self.dtype,
                two_d=self.block_scaling_dim == 2,
                rowwise=rowwise,
                columnwise=columnwise,
                power_of_2=self.force_pow_2_scales,
                epsilon=self.amax_epsilon,
            )
        if self.block_scaling_dim == 2:
            data, scale = self._cast(x, (BLOCK, BLOCK))
            return data, pad_to(scale, 1, 4), data, pad_to(scale.t(), 1, 4) if columnwise else scale
        row_data, row_scale, column_data, column_scale = self._both(x, BLOCK, rowwise, columnwise)
        return row_data, pad_to(row_scale.t(), 1, 4), column_data, pad_to(column_scale, 1, 4)

    def _encode(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> StorageFields:
        fields = super()._encode(tensor, rowwise, columnwise) | {
            "is_2D_scaled": self.block_scaling_dim == 2
        }
        if columnwise:
            # Stored transposed, as Hopper's FP8 GEMMs take only operands contracted over the last dimension.
            fields["columnwise_data"] = rows_last(fields["columnwise_data"])
        return fields


class MXFP8Quantizer(_BlockQuantizer):
    """Blocks of 32 elements with an E8M0 scale; `with_2d_quantization` shares a scale over 32x32 elements.

    Equal in every bit to torchao's `to_mx(..., ScaleCalculationMode.RCEIL)` (0.18), except where Transformer Engine's
    kernels differ: a NaN does not count for its block's scale (torchao loses the block); a block whose scale byte is 0
    is multiplied by 2^127 (torchao: by 1, so that it becomes 0); an FP32 maximum one step above a power of two times
    the format's maximum is rounded up (torchao's FP32 logarithm cannot see the step).
    """

    _tensor_class = MXFP8Tensor
    scheme = "MXFP8BlockScaling"
    _multiple = MX_BLOCK

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        """Make a quantizer of E4M3 or E5M2."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.cast(fp8_dtype)
        self.with_2d_quantization = with_2d_quantization

    def _cast(self, x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        # Shared over squares, both copies of a weight have the same scales, and so the same values.
        scaled = (MX_BLOCK, MX_BLOCK) if self.with_2d_quantization else block
        e = e8m0_from_amax(block_amax(x, scaled), self.dtype)
        data = cast_fp8_blocks(x, e8m0_to_float(e, inverse=True), scaled, self.dtype)
        if self.with_2d_quantization:
            # The GEMM reads one scale per 32 elements of each row, so the 32 x 32 one is written 32 times.
            e = e.repeat_interleave(MX_BLOCK, 1 if block[1] == 1 else 0)
        return data, e

    def _copies(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple[Tensor, ...]:
        if fused.active(x):
            return fused.cast_mx(x, self.dtype, self.with_2d_quantization, rowwise, columnwise)
        row_data, row_scale, column_data, column_scale = self._both(
            x, MX_BLOCK, rowwise, columnwise
        )
        return row_data, pad_to(row_scale, 128, 4), column_data, pad_to(column_scale, 4, 128)
