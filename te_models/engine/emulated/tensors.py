"""Quantized tensors: FP8 (or FP4) data with inverse scales, under Transformer Engine's attribute names.

Each format has a storage class, a plain object inside te.Linear, and a tensor class with the same data, which is a
`torch.Tensor` with a nominal dtype: quantizers return it, and it can be a parameter. An operation that does not know
quantized tensors works on the dequantized values; an in-place operation quantizes its result.

A columnwise copy that holds the same bytes as the rowwise one is a transposed view of it, not a second buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from te_models.engine.emulated import numerics
from te_models.engine.emulated.numerics import DType

BLOCK = 128
MX_BLOCK = 32
T = TypeVar("T")


class Operand(NamedTuple):
    """A matrix as a GEMM takes it: `values * scale`, both FP32; scale is None (1) or `[1]`.

    `narrow`: every value is a BF16 number, so that a GEMM with BF16 inputs computes the same products.
    """

    values: Tensor
    scale: Tensor | None
    narrow: bool

    @property
    def t(self) -> Operand:
        """The transposed operand."""
        return Operand(self.values.t(), self.scale, self.narrow)


class FP8Matrix(NamedTuple):
    """A matrix for a tensor core: `data` FP8 [rows, K], contracted over K, and its inverse scales.

    `scale` is FP32 [1] for the whole tensor, or [rows, ceil(K/128)].
    """

    data: Tensor
    scale: Tensor

    @property
    def per_tensor(self) -> bool:
        """True if the whole tensor has one scale."""
        return self.scale.ndim == 1

    def first(self, rows: int) -> FP8Matrix:
        """Return its first rows."""
        if rows == len(self.data):
            return self
        return FP8Matrix(self.data[:rows], self.scale if self.per_tensor else self.scale[:rows])

    @property
    def floor(self) -> int:
        """The exponent of the format's smallest normal number."""
        return -6 if self.data.dtype == torch.float8_e4m3fn else -14


class BlockScaled(NamedTuple):
    """A matrix of blocks with scales.

    FP8: `data` uint8 `[M, K]` with one scale, FP32 or an E8M0 byte, per `block` of elements. FP4: two values per byte
    along the block, scales as E4M3 bytes, one row of them per row or column, and a common factor `amax` [1] / `top`.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: DType
    amax: Tensor | None = None
    top: float = 1.0


class QuantizedTensorStorage:
    """Base of the storages. `_tensors` names the attributes that hold data; each of them may be None."""

    _tensors: ClassVar[tuple[str, ...]]
    _quantizer: Any
    _dtype: torch.dtype
    _shape: torch.Size
    _kept: dict[tuple[str, bool], Any] | None = None

    def __init__(self, *, shape: torch.Size, dtype: torch.dtype, quantizer: Any = None, **data: Any) -> None:
        """Take `shape` and `dtype` of the high-precision tensor; `data` sets the other attributes."""
        self._shape = torch.Size(shape)
        self._dtype = dtype
        self._quantizer = quantizer
        self.__dict__.update({f"_{name}": value for name, value in data.items()})

    @property
    def _matrix(self) -> tuple[int, int]:
        """The shape as a matrix, with the leading dimensions flattened."""
        columns = self._shape[-1] if self._shape else 1
        return self._shape.numel() // max(columns, 1), columns

    def operand(self, columnwise: bool) -> Operand:
        """Return the rowwise or columnwise copy as a matrix `[M, K]`."""
        raise NotImplementedError

    def keep(self) -> None:
        """Keep what products derive from the data from now on, for as long as this object lives and keeps its data."""
        self._kept = {}

    @property
    def keeps(self) -> bool:
        """True after `keep`."""
        return self._kept is not None

    def kept(self, name: str, columnwise: bool, make: Callable[[], T]) -> T:
        """Return make(), which runs once for each name and copy if this storage keeps what it derives."""
        if self._kept is None:
            return make()
        if (name, columnwise) not in self._kept:
            self._kept[name, columnwise] = make()
        return self._kept[name, columnwise]

    def blocks(self, columnwise: bool) -> BlockScaled | None:
        """Return the rowwise or columnwise copy `[M, K]` with its block scales; None for other formats."""
        return None

    def fp8_matrix(self, columnwise: bool) -> FP8Matrix | None:
        """Return a copy with its contracted dimension last; None where no tensor core is emulated."""
        return None

    def get_usages(self) -> dict[str, bool]:
        """Return which copies exist."""
        raise NotImplementedError

    def _drop(self, columnwise: bool) -> None:
        raise NotImplementedError

    def _derive(self, columnwise: bool) -> None:
        """Make the missing copy from the other one; by default this raises."""
        have, want = ("rowwise", "columnwise") if columnwise else ("columnwise", "rowwise")
        raise RuntimeError(
            f"{type(self).__name__} has no {want} data and cannot derive it from the {have} copy: "
            f"quantize again with quantizer.set_usage({want}=True)"
        )

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop (False), require or derive (True), or leave (None) the two copies."""
        for columnwise, usage in ((False, rowwise_usage), (True, columnwise_usage)):
            if usage and not self.get_usages()["columnwise" if columnwise else "rowwise"]:
                self._derive(columnwise)
        if rowwise_usage is False:
            self._drop(columnwise=False)
        if columnwise_usage is False:
            self._drop(columnwise=True)

    def _high_precision(self, dtype: torch.dtype | None) -> Tensor:
        values, scale, _ = self.operand(columnwise=not self.get_usages()["rowwise"])
        values = values if scale is None else values * scale
        return values.to(dtype or self._dtype).reshape(self._shape)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return high-precision values in `dtype` (None: the nominal dtype)."""
        return self._high_precision(dtype)

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that hold the data, in the order of `_tensors`."""
        return tuple(getattr(self, name) for name in self._tensors)

    def with_data_tensors(self, tensors: tuple[Tensor | None, ...]) -> QuantizedTensorStorage:
        """Return a storage with the same metadata and other tensors."""
        storage = self._storage_class()
        made = storage.__new__(storage)
        if not isinstance(self, Tensor):
            made.__dict__.update(self.__dict__)
        else:  # a parameter has more attributes than its own
            made.__dict__.update({f"_{name}": value for name, value in self._metadata().items()})
        made.set_data_tensors(tensors)
        return made

    def set_data_tensors(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Replace the tensors that hold the data."""
        self._kept = None
        self.__dict__.update(zip(self._tensors, tensors, strict=True))

    @classmethod
    @functools.cache
    def _data_names(cls) -> list[str]:
        return [name.removeprefix("_") for name in cls._tensors]

    def _metadata(self) -> dict[str, Any]:
        return {"shape": self._shape, "dtype": self._dtype, "quantizer": self._quantizer}

    @classmethod
    @functools.cache
    def _storage_class(cls) -> type[QuantizedTensorStorage]:
        """Return the plain storage class of this format."""
        return next(c for c in cls.__mro__ if issubclass(c, QuantizedTensorStorage) and not issubclass(c, Tensor))

    def quantize_(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Overwrite with the quantized values of a high-precision tensor."""
        self._quantizer.update_quantized(tensor, self)
        return self


class Float8TensorStorage(QuantizedTensorStorage):
    """One scale per tensor: `_data` uint8 `[..., K]`, `_transpose` uint8 `[K, ...]`, `_scale_inv` FP32 `[1]`."""

    _tensors = ("_data", "_transpose", "_scale_inv")
    _data: Tensor | None
    _transpose: Tensor | None
    _scale_inv: Tensor
    _fp8_dtype: DType

    def _metadata(self) -> dict[str, Any]:
        return super()._metadata() | {"fp8_dtype": self._fp8_dtype}

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._data is not None, "columnwise": self._transpose is not None}

    def _drop(self, columnwise: bool) -> None:
        setattr(self, "_transpose" if columnwise else "_data", None)

    def _derive(self, columnwise: bool) -> None:
        source = self._data if columnwise else self._transpose
        if source is None:
            super()._derive(columnwise)
        elif columnwise:
            self._transpose = rows_last(source)
        else:
            self._data = source.movedim(0, -1)

    def _bytes(self) -> Tensor:
        """Return the FP8 data uint8 `[M, K]`, which both copies share."""
        return rows_first(self._transpose) if self._data is None else as_matrix(self._data)

    def operand(self, columnwise: bool) -> Operand:
        """Return the unscaled values in FP32, and `_scale_inv`."""
        return Operand(numerics.decode_fp8(self._bytes(), self._fp8_dtype), self._scale_inv, narrow=True)

    def fp8_matrix(self, columnwise: bool) -> FP8Matrix:
        """Return the FP8 data and the inverse scale [1]."""
        data = self._bytes().view(numerics.TORCH_FP8[self._fp8_dtype])
        return FP8Matrix(data.t() if columnwise else data, self._scale_inv)


class BlockStorage(QuantizedTensorStorage):
    """Base of the block-scaled storages, whose copies are independent; the first half of `_tensors` is rowwise."""

    _tensors = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    _rowwise_data: Any = None  # Tensor or None, as the next three
    _rowwise_scale_inv: Any = None
    _columnwise_data: Any = None
    _columnwise_scale_inv: Any = None
    _fp8_dtype: DType

    def _half(self, columnwise: bool) -> slice:
        """Return the places of a copy in `_tensors`."""
        half = len(self._tensors) // 2
        return slice(half, None) if columnwise else slice(half)

    def _copy(self, columnwise: bool) -> list[Any]:
        """Return the data and the inverse scales of a copy."""
        return list(self.get_data_tensors()[self._half(columnwise)])

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def _drop(self, columnwise: bool) -> None:
        for name in self._tensors[self._half(columnwise)]:
            setattr(self, name, None)


class Float8BlockwiseQTensorStorage(BlockStorage):
    """One FP32 scale per 1x128 or 128x128 elements.

    `_rowwise_data` is `[..., K]`, `_columnwise_data` `[K, ...]`. Inverse scales for M rows and K columns, unpadded:
    1-D rowwise `[K/128, M]`, 1-D columnwise `[M/128, K]`, 2-D rowwise `[M/128, K/128]`, 2-D columnwise its transpose;
    the last dimension is padded to a multiple of 4.
    """

    _is_2D_scaled: bool

    def _metadata(self) -> dict[str, Any]:
        return super()._metadata() | {"fp8_dtype": self._fp8_dtype, "is_2D_scaled": self._is_2D_scaled}

    def operand(self, columnwise: bool) -> Operand:
        """Return the dequantized FP32 values of the rowwise or columnwise copy."""
        matrix = self.fp8_matrix(columnwise)
        values = numerics.decode_fp8(matrix.data.view(torch.uint8), self._fp8_dtype)
        values = numerics.scale_blocks_(values, matrix.scale, (1, BLOCK))
        return Operand(values.t() if columnwise else values, None, narrow=self._quantizer.force_pow_2_scales)

    def fp8_matrix(self, columnwise: bool) -> FP8Matrix:
        """Return the copy's data and scales; a 128x128 block's scale is repeated for each of its rows."""
        m, k = self._matrix
        rows, contracted = (k, m) if columnwise else (m, k)
        data, scale = self._copy(columnwise)
        data = data.reshape(rows, contracted).view(numerics.TORCH_FP8[self._fp8_dtype])
        if self._is_2D_scaled:
            return FP8Matrix(data, scale[:, : -(-contracted // BLOCK)].repeat_interleave(BLOCK, 0)[:rows])
        return FP8Matrix(data, scale[:, :rows].t())

    def blocks(self, columnwise: bool) -> BlockScaled | None:
        """Return the copy's data and scales; None unless the products are BF16 numbers."""
        if not self._quantizer.force_pow_2_scales:
            return None
        data, scale = self._copy(columnwise)
        data = rows_first(data) if columnwise else as_matrix(data)
        # 1-D rowwise scales are [K/128, M], 2-D columnwise ones [K/128, M/128].
        scale = scale.t() if self._is_2D_scaled == columnwise else scale
        block = (BLOCK, BLOCK) if self._is_2D_scaled else (BLOCK, 1) if columnwise else (1, BLOCK)
        return BlockScaled(data, scale, block, self._fp8_dtype)

    def _derive(self, columnwise: bool) -> None:
        if not self._is_2D_scaled:
            super()._derive(columnwise)
        m, k = (-(-size // BLOCK) for size in self._matrix)
        if columnwise:
            self._columnwise_data = self._rowwise_data.movedim(-1, 0)
            self._columnwise_scale_inv = pad_to(self._rowwise_scale_inv[:m, :k].t(), 1, 4)
        else:
            self._rowwise_data = self._columnwise_data.movedim(0, -1)
            self._rowwise_scale_inv = pad_to(self._columnwise_scale_inv[:k, :m].t(), 1, 4)


class MXFP8TensorStorage(BlockStorage):
    """One E8M0 byte per 32 elements; both copies of the data are `[..., K]`.

    Scale bytes for M rows and K columns: rowwise `[M, K/32]` padded to multiples of (128, 4), columnwise `[M/32, K]`
    padded to multiples of (4, 128).
    """

    def _metadata(self) -> dict[str, Any]:
        return super()._metadata() | {"fp8_dtype": self._fp8_dtype}

    def operand(self, columnwise: bool) -> Operand:
        """Return the dequantized FP32 values of the rowwise or columnwise copy."""
        data, e, block, dtype, *_ = self.blocks(columnwise)
        scale = numerics.e8m0_to_float(e[: -(-data.shape[0] // block[0]), : -(-data.shape[1] // block[1])])
        return Operand(numerics.scale_blocks_(numerics.decode_fp8(data, dtype), scale, block), None, narrow=True)

    def blocks(self, columnwise: bool) -> BlockScaled:
        data, scale = self._copy(columnwise)
        return BlockScaled(as_matrix(data), scale, (MX_BLOCK, 1) if columnwise else (1, MX_BLOCK), self._fp8_dtype)


def as_matrix(tensor: Any) -> Tensor:
    """Return `[..., K]` as `[M, K]`, with few calls of torch: each costs the host of a GPU microseconds."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1] if tensor.ndim else 1)


def rows_first(tensor: Any) -> Tensor:
    """Return `[K, ...]` as `[M, K]`."""
    return tensor.t() if tensor.ndim == 2 else as_matrix(tensor.movedim(0, -1))


def rows_last(tensor: Tensor) -> Tensor:
    """Return `[..., K]` as `[K, ...]`."""
    return tensor.t() if tensor.ndim == 2 else tensor.movedim(-1, 0)


def like(matrix: Tensor, tensor: Tensor) -> Tensor:
    """Return `[M, K]` in the shape of `tensor`."""
    return matrix if tensor.ndim == 2 else matrix.view(tensor.shape)


def pad_to(scale: Tensor, *multiples: int) -> Tensor:
    """Return `scale` contiguous, with its dimensions zero-padded to whole multiples."""
    pad = [p for size, step in zip(reversed(scale.shape), reversed(multiples), strict=True) for p in (0, -size % step)]
    if any(pad):
        return torch.nn.functional.pad(scale, pad)
    return scale if scale.is_contiguous() else scale.contiguous()


class StraightThrough(torch.autograd.Function):
    """Quantize or dequantize with a function; the gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: Callable[[Any], Tensor]) -> Tensor:
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad, None


class QuantizedTensor(torch.Tensor, QuantizedTensorStorage):
    """A quantized tensor with a nominal dtype. Mixed with a storage class."""

    @staticmethod
    def __new__(
        cls, *, shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool = False, **_: Any
    ) -> QuantizedTensor:
        """Make an empty shell; the storage's `__init__` fills it."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)

    def __init__(self, *, device: torch.device, requires_grad: bool = False, **arguments: Any) -> None:
        """Fill the shell; see `QuantizedTensorStorage`."""
        QuantizedTensorStorage.__init__(self, **arguments)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return high-precision values in `dtype` (None: the nominal dtype)."""
        return StraightThrough.apply(self, lambda tensor: tensor._high_precision(dtype))

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return the value on the CPU that the tensor was made from, if it was preserved."""
        return self.__dict__.get("_high_precision_init_val")

    def clear_high_precision_init_val(self) -> None:
        """Free the value that the tensor was made from."""
        self.__dict__.pop("_high_precision_init_val", None)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of a constructor that makes the same tensor."""
        data = dict(zip(self._data_names(), self.get_data_tensors(), strict=True))
        return self._metadata() | {"device": self.device} | data

    def _like(self, **changes: Any) -> QuantizedTensor:
        """Return a tensor of the same class with some constructor arguments replaced."""
        return type(self)(**self._arguments() | changes)

    def _mapped(self, function: Any) -> QuantizedTensor:
        """Return a tensor of the same class with `function` applied to the tensors that hold the data."""
        tensors = zip(self._data_names(), self.get_data_tensors(), strict=True)
        data = {name: function(tensor) for name, tensor in tensors if tensor is not None}
        return self._like(**data, device=next(iter(data.values())).device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self._high_precision(None)!r}, quantizer={self._quantizer!r})"

    def __reduce_ex__(self, proto: Any) -> Any:
        return _rebuild, (type(self), self._arguments() | {"requires_grad": self.requires_grad})

    @property
    def data(self) -> Tensor:
        """The tensor without its graph; assigning a high-precision tensor quantizes it."""
        return self.detach()

    @data.setter
    def data(self, tensor: Tensor) -> None:
        with torch.no_grad():
            self.copy_(tensor)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is written in C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]._like()
        if func is torch.ops.aten.clone.default:
            return args[0]._mapped(torch.clone)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]._mapped(lambda t: t.to(kwargs.get("device"), copy=True))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], QuantizedTensor):
            source = _plain(args[1])
            args[0].quantize_(source.expand(args[0].shape))
            return args[0]
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        written = _written(func, args, kwargs, plain_args, plain_kwargs)
        for target, value in written:
            target.quantize_(value)
        return written[0][0] if written and isinstance(result, Tensor) else result


def _plain(value: Any) -> Any:
    return value._high_precision(None) if isinstance(value, QuantizedTensor) else value


def _written(func: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> list[tuple[Any, Tensor]]:
    """Return the quantized arguments that an in-place operation wrote to, with their new high-precision values."""
    arguments = func._schema.arguments
    given = {argument.name: both for argument, both in zip(arguments, zip(args, plain_args, strict=True), strict=False)}
    given |= {name: (value, plain_kwargs[name]) for name, value in kwargs.items()}
    found = []
    for argument in arguments:
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write:
            original, plain = given[argument.name]
            items = zip(original, plain, strict=True) if isinstance(original, (list, tuple)) else [(original, plain)]
            found += [(a, b) for a, b in items if isinstance(a, QuantizedTensor)]
    return found


def _rebuild(cls: type, arguments: dict[str, Any]) -> QuantizedTensor:
    return cls(**arguments)


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """`Float8TensorStorage` as a tensor."""


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):
    """`Float8BlockwiseQTensorStorage` as a tensor."""


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """`MXFP8TensorStorage` as a tensor."""
