"""Quantized tensors: FP8 (or FP4) data with inverse scales, under Transformer Engine's attribute names.

Each format has a storage class, a plain object inside te.Linear, and a tensor class with the same data, which is a
`torch.Tensor` with a nominal dtype: quantizers return it, and it can be a parameter. An operation that does not know
quantized tensors works on the dequantized values; an in-place operation quantizes its result.

A columnwise copy that holds the same bytes as the rowwise one is a transposed view of it, not a second buffer.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from te_models.device.autograd import Context
from te_models.numerics import casts
from te_models.numerics.blocks import scale_blocks_
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import TORCH_FP8, DType
from te_models.numerics.matrices import (
    BlockScaled,
    FP8Matrix,
    Operand,
    as_matrix,
    pad_to,
    rows_first,
    rows_last,
)

if TYPE_CHECKING:
    from te_models.numerics.quantizers import Float8BlockQuantizer, Quantizer

BLOCK = 128
MX_BLOCK = 32
# Rows and columns of a block of Float8BlockScaling, and elements of one of MXFP8.
T = TypeVar("T")
Keywords = dict[str, Any]


class QuantizedTensorStorage:
    """Base of the storages. `_tensors` names the attributes that hold data; each of them may be None.

    `_copies` names them for the rowwise and for the columnwise copy, the FP8 data first; `_facts` names others that
    a constructor takes, without the underscore.
    """

    _tensors: ClassVar[tuple[str, ...]]
    _copies: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    _facts: ClassVar[tuple[str, ...]] = ("shape", "dtype", "quantizer", "fp8_dtype")
    _quantizer: Quantizer
    _dtype: torch.dtype
    _shape: torch.Size
    _fp8_dtype: DType
    _cache: dict[tuple[str, bool], object] | None = None

    def __init__(
        self,
        *,
        shape: torch.Size,
        dtype: torch.dtype,
        quantizer: Quantizer | None = None,
        **data: object,
    ) -> None:
        """Take `shape` and `dtype` of the high-precision tensor; `data` sets the other attributes."""
        self._shape = torch.Size(shape)
        self._dtype = dtype
        self._quantizer = cast("Quantizer", quantizer)
        self.__dict__.update({f"_{name}": value for name, value in data.items()})

    @property
    def _matrix(self) -> tuple[int, int]:
        """The shape as a matrix, with the leading dimensions flattened."""
        columns = self._shape[-1] if self._shape else 1
        return self._shape.numel() // max(columns, 1), columns

    @abstractmethod
    def operand(self, columnwise: bool) -> Operand:
        """Return the rowwise or columnwise copy as a matrix `[M, K]`."""

    def start_caching(self) -> None:
        """Keep what products derive from the data from now on, for as long as this object lives and keeps its data."""
        # (name, columnwise) -> what a product derived; `set_data_tensors` drops it.
        self._cache = {}

    @property
    def is_caching(self) -> bool:
        """True after `start_caching`."""
        return self._cache is not None

    def cached(self, name: str, columnwise: bool, make: Callable[[], T]) -> T:
        """Return make(), which runs once for each name and copy if this storage keeps what it derives."""
        if self._cache is None:
            return make()
        if (name, columnwise) not in self._cache:
            self._cache[name, columnwise] = make()
        return cast(T, self._cache[name, columnwise])

    def blocks(self, columnwise: bool) -> BlockScaled | None:
        """Return the rowwise or columnwise copy `[M, K]` with its block scales; None for other formats."""
        return None

    def fp8_matrix(self, columnwise: bool) -> FP8Matrix | None:
        """Return a copy with its contracted dimension last; None where no tensor core is emulated."""
        return None

    def get_usages(self) -> dict[str, bool]:
        """Return which copies exist."""
        rowwise, columnwise = (getattr(self, names[0]) is not None for names in self._copies)
        return {"rowwise": rowwise, "columnwise": columnwise}

    def _derive(self, columnwise: bool) -> None:
        """Make the missing copy from the other one; by default this raises."""
        have, want = ("rowwise", "columnwise") if columnwise else ("columnwise", "rowwise")
        raise RuntimeError(
            f"{type(self).__name__} has no {want} data and cannot derive it from the {have} copy: "
            f"quantize again with quantizer.set_usage({want}=True)"
        )

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop (False), require or derive (True), or leave (None) the two copies."""
        # Derive before dropping: one copy may be made from the other that goes.
        for columnwise, usage in ((False, rowwise_usage), (True, columnwise_usage)):
            if usage and not self.get_usages()["columnwise" if columnwise else "rowwise"]:
                self._derive(columnwise)
        for names, usage in zip(self._copies, (rowwise_usage, columnwise_usage), strict=True):
            if usage is False:
                for name in names:
                    setattr(self, name, None)

    def _high_precision(self, dtype: torch.dtype | None) -> Tensor:
        # The columnwise copy serves where the rowwise one has been dropped, as after a forward pass.
        values, scale, _ = self.operand(columnwise=not self.get_usages()["rowwise"])
        if scale is not None:
            values = values * scale
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
        result = storage.__new__(storage)
        if not isinstance(self, Tensor):
            result.__dict__.update(self.__dict__)
        else:  # a parameter has more attributes than its own
            result.__dict__.update({f"_{name}": value for name, value in self._known().items()})
        result.set_data_tensors(tensors)
        return result

    def set_data_tensors(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Replace the tensors that hold the data."""
        # A product of the old data may not be taken for one of the new.
        self._cache = None
        self.__dict__.update(zip(self._tensors, tensors, strict=True))

    @classmethod
    @functools.cache
    def _data_names(cls) -> list[str]:
        return [name.removeprefix("_") for name in cls._tensors]

    def _known(self) -> dict[str, object]:
        return {name: getattr(self, f"_{name}") for name in self._facts}

    @classmethod
    @functools.cache
    def _storage_class(cls) -> type[QuantizedTensorStorage]:
        """Return the plain storage class of this format."""
        for base in cls.__mro__:
            if issubclass(base, QuantizedTensorStorage) and not issubclass(base, Tensor):
                return base
        raise AssertionError(f"{cls.__name__} has no plain storage class")

    def quantize_(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Overwrite with the quantized values of a high-precision tensor."""
        self._quantizer.update_quantized(tensor, self)
        return self


MaybeQuantized = Tensor | QuantizedTensorStorage  # in high precision, or quantized


class Float8TensorStorage(QuantizedTensorStorage):
    """One scale per tensor: `_data` uint8 `[..., K]`, `_transpose` uint8 `[K, ...]`, `_scale_inv` FP32 `[1]`."""

    _tensors = ("_data", "_transpose", "_scale_inv")
    _copies = (("_data",), ("_transpose",))
    _data: Tensor | None
    _transpose: Tensor | None
    _scale_inv: Tensor

    def _derive(self, columnwise: bool) -> None:
        source = self._data if columnwise else self._transpose
        if source is None:
            super()._derive(columnwise)
        elif columnwise:
            self._transpose = rows_last(source)
        else:
            # A view as well: Float8Tensor has one buffer.
            self._data = source.movedim(0, -1)

    def _bytes(self) -> Tensor:
        """Return the FP8 data uint8 `[M, K]`, which both copies share."""
        if self._data is not None:
            return as_matrix(self._data)
        assert self._transpose is not None
        # A transposed view has the same bytes, so either copy gives both.
        return rows_first(self._transpose)

    def operand(self, columnwise: bool) -> Operand:
        """Return the unscaled values in FP32, and `_scale_inv`."""
        return Operand(
            casts.decode_fp8(self._bytes(), self._fp8_dtype), self._scale_inv, narrow=True
        )

    def fp8_matrix(self, columnwise: bool) -> FP8Matrix:
        """Return the FP8 data and the inverse scale [1]."""
        # [M, K], whichever copy holds the bytes.
        data = self._bytes().view(TORCH_FP8[self._fp8_dtype])
        return FP8Matrix(data.t() if columnwise else data, self._scale_inv)


class BlockStorage(QuantizedTensorStorage):
    """Base of the block-scaled storages, whose copies are independent."""

    _copies = (
        ("_rowwise_data", "_rowwise_scale_inv"),
        ("_columnwise_data", "_columnwise_scale_inv"),
    )
    _tensors = _copies[0] + _copies[1]
    _rowwise_data: Tensor | None = None
    _rowwise_scale_inv: Tensor | None = None
    _columnwise_data: Tensor | None = None
    _columnwise_scale_inv: Tensor | None = None

    def _copy(self, columnwise: bool) -> list[Tensor]:
        """Return the data and the inverse scales of a copy, which exists."""
        return [getattr(self, name) for name in self._copies[columnwise]]


class Float8BlockwiseQTensorStorage(BlockStorage):
    """One FP32 scale per 1x128 or 128x128 elements.

    `_rowwise_data` is `[..., K]`, `_columnwise_data` `[K, ...]`. Inverse scales for M rows and K columns, unpadded:
    1-D rowwise `[K/128, M]`, 1-D columnwise `[M/128, K]`, 2-D rowwise `[M/128, K/128]`, 2-D columnwise its transpose;
    the last dimension is padded to a multiple of 4.
    """

    _facts = (*BlockStorage._facts, "is_2D_scaled")
    _is_2D_scaled: bool

    @property
    def _scales_are_powers_of_2(self) -> bool:
        return cast("Float8BlockQuantizer", self._quantizer).force_pow_2_scales

    def operand(self, columnwise: bool) -> Operand:
        """Return the dequantized FP32 values of the rowwise or columnwise copy."""
        matrix = self.fp8_matrix(columnwise)
        values = casts.decode_fp8(matrix.data.view(torch.uint8), self._fp8_dtype)
        values = scale_blocks_(values, matrix.scale, (1, BLOCK))
        return Operand(
            values.t() if columnwise else values, None, narrow=self._scales_are_powers_of_2
        )

    def fp8_matrix(self, columnwise: bool) -> FP8Matrix:
        """Return the copy's data and scales; a 128x128 block's scale is repeated for each of its rows."""
        m, k = self._matrix
        # The columnwise copy is stored transposed, [K, M], so that both are contracted over their last dimension.
        rows, contracted = (k, m) if columnwise else (m, k)
        data, scale = self._copy(columnwise)
        data = data.reshape(rows, contracted).view(TORCH_FP8[self._fp8_dtype])
        if self._is_2D_scaled:
            return FP8Matrix(
                data, scale[:, : -(-contracted // BLOCK)].repeat_interleave(BLOCK, 0)[:rows]
            )
        # [K/128, M] -> [M, K/128], without the columns that pad the scales.
        return FP8Matrix(data, scale[:, :rows].t())

    def blocks(self, columnwise: bool) -> BlockScaled | None:
        """Return the copy's data and scales; None unless the products are BF16 numbers."""
        if not self._scales_are_powers_of_2:
            return None
        data, scale = self._copy(columnwise)
        data = rows_first(data) if columnwise else as_matrix(data)
        # Turn the scales into rows of blocks: 1-D rowwise ones are [K/128, M], 2-D columnwise ones [K/128, M/128].
        if self._is_2D_scaled == columnwise:
            scale = scale.t()
        if self._is_2D_scaled:
            block = (BLOCK, BLOCK)
        elif columnwise:
            block = (BLOCK, 1)
        else:
            block = (1, BLOCK)
        return BlockScaled(data, scale, block, self._fp8_dtype)

    def _derive(self, columnwise: bool) -> None:
        # 1 x 128 and 128 x 1 blocks have different scales: neither copy follows from the other.
        if not self._is_2D_scaled:
            super()._derive(columnwise)
        m, k = (-(-size // BLOCK) for size in self._matrix)
        if columnwise:
            data, scale = self._copy(False)
            self._columnwise_data = data.movedim(-1, 0)
            self._columnwise_scale_inv = pad_to(scale[:m, :k].t(), 1, 4)
        else:
            data, scale = self._copy(True)
            self._rowwise_data = data.movedim(0, -1)
            self._rowwise_scale_inv = pad_to(scale[:k, :m].t(), 1, 4)


class MXFP8TensorStorage(BlockStorage):
    """One E8M0 byte per 32 elements; both copies of the data are `[..., K]`.

    Scale bytes for M rows and K columns: rowwise `[M, K/32]` padded to multiples of (128, 4), columnwise `[M/32, K]`
    padded to multiples of (4, 128).
    """

    def operand(self, columnwise: bool) -> Operand:
        """Return the dequantized FP32 values of the rowwise or columnwise copy."""
        data, e, block, dtype, *_ = self.blocks(columnwise)
        scale = e8m0_to_float(e[: -(-data.shape[0] // block[0]), : -(-data.shape[1] // block[1])])
        return Operand(
            scale_blocks_(casts.decode_fp8(data, dtype), scale, block),
            None,
            narrow=True,
        )

    def blocks(self, columnwise: bool) -> BlockScaled:
        data, scale = self._copy(columnwise)
        return BlockScaled(
            as_matrix(data), scale, (MX_BLOCK, 1) if columnwise else (1, MX_BLOCK), self._fp8_dtype
        )


class StraightThrough(torch.autograd.Function):
    """Quantize or dequantize with a function; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Context, tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(tensor)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad, None


class QuantizedTensor(torch.Tensor, QuantizedTensorStorage):
    """A quantized tensor with a nominal dtype. Mixed with a storage class."""

    @staticmethod
    def __new__(
        cls,
        *,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
        **_: object,
    ) -> QuantizedTensor:
        """Make an empty shell; the storage's `__init__` fills it."""
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def __init__(
        self, *, device: torch.device, requires_grad: bool = False, **arguments: Any
    ) -> None:
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

    def _arguments(self, **changes: object) -> dict[str, Any]:
        """Return the arguments of a constructor that makes the same tensor, some of them replaced."""
        data = dict(zip(self._data_names(), self.get_data_tensors(), strict=True))
        return self._known() | {"device": self.device} | data | changes

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Return a tensor of the same class with `function` applied to the tensors that hold the data."""
        tensors = zip(self._data_names(), self.get_data_tensors(), strict=True)
        data = {name: function(tensor) for name, tensor in tensors if tensor is not None}
        return type(self)(**self._arguments(**data, device=next(iter(data.values())).device))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"{type(self).__name__}({self._high_precision(None)!r}, quantizer={self._quantizer!r})"
        )

    def __reduce_ex__(self, proto: object) -> tuple[Callable[..., QuantizedTensor], tuple[()]]:
        # pickle calls this with no arguments: a constructor with names only.
        make = functools.partial(type(self), **self._arguments(requires_grad=self.requires_grad))
        return make, ()

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
        cls,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return type(args[0])(**args[0]._arguments())
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


def _written(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Keywords,
    plain_args: Sequence[Any],
    plain_kwargs: Keywords,
) -> list[tuple[QuantizedTensor, Tensor]]:
    """Return the quantized arguments that an in-place operation wrote to, with their new high-precision values."""
    arguments = func._schema.arguments
    values = {}
    # Not strict: the schema goes on with the arguments that are given by name.
    for argument, value, plain in zip(arguments, args, plain_args, strict=False):
        values[argument.name] = (value, plain)
    values |= {name: (value, plain_kwargs[name]) for name, value in kwargs.items()}
    written = []
    for argument in arguments:
        if (
            argument.name in values
            and argument.alias_info is not None
            and argument.alias_info.is_write
        ):
            original, plain = values[argument.name]
            if isinstance(original, (list, tuple)):
                items = zip(original, plain, strict=True)
            else:
                items = [(original, plain)]
            for quantized, high_precision in items:
                if isinstance(quantized, QuantizedTensor):
                    written.append((quantized, high_precision))
    return written


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """`Float8TensorStorage` as a tensor."""


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):
    """`Float8BlockwiseQTensorStorage` as a tensor."""


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """`MXFP8TensorStorage` as a tensor."""
