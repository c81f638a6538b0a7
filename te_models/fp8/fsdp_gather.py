"""FP8 weights under FSDP2: each rank stores its rows in FP8, and gathers FP8, one byte per parameter.

FSDP2 shards and gathers parameters by itself, but calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a tensor
that defines them (torch.distributed.fsdp, extensions for tensor subclasses). `FP8Shard` defines them for the quantized
tensors of either engine, which have the same attributes. Transformer Engine's own hooks are not used, so that both
engines behave the same, also under recompute.

All rows share one scale, which must be equal on all ranks: the module's under DelayedScaling, and under current scaling
the scale of the amax over the ranks that share the weight (te_models.fp8.primary_weights.make_shards).
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from te_models.numerics.tensors import Float8Tensor, Keywords


class FP8Shard(torch.Tensor):
    """This rank's rows of an FP8 weight: a wrapper of its nominal dtype around the engine's quantized tensor `fp8`.

    It is the local tensor of a DTensor. Operations that do not know FP8 see the dequantized values and cannot change
    them.
    """

    fp8: Float8Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[override]  # as in torch's docs

    @staticmethod
    def __new__(cls, fp8: Float8Tensor, shape: torch.Size | None = None) -> FP8Shard:
        """Wrap `fp8` [rows, I]; `shape` is the wrapper's, if it is to look flat."""
        return torch.Tensor._make_wrapper_subclass(
            cls, shape or fp8.shape, dtype=fp8.dtype, device=fp8.device
        )

    def __init__(self, fp8: Float8Tensor, shape: torch.Size | None = None) -> None:
        self.fp8 = fp8

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is written in C
        cls,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Keywords | None = None,
    ) -> object:
        aten = torch.ops.aten
        # FSDP2's last step gives the gathered tensor its own shape.
        if func is aten.as_strided.default:
            return args[0].fp8
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].fp8, args[0].shape)
        if func is aten.view.default:  # FSDP2 replaces the parameter by a flat view
            return cls(args[0].fp8, torch.empty(args[0].shape, device="meta").view(args[1]).shape)
        # Writing to dequantized values would be lost: the FP8 bytes would stay as they are.
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} cannot write to an FP8 weight: use te_models.fp8.primary_weights.write_weight"
            )
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FP8Shard({self.fp8!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the FP8 data; a wrapper has no memory of its own."""
        return self._codes.untyped_storage()

    @property
    def _codes(self) -> Tensor:
        assert self.fp8._data is not None
        return self.fp8._data

    def fsdp_pre_all_gather(  # FSDP2 counts the parameters
        self, mesh: object, size: object, stride: object, module: object, policy: object
    ) -> tuple[tuple[Tensor], Tensor]:
        """Return the tensors to gather, FP8 data uint8 [rows / ranks, I], and the inverse scale of all ranks."""
        # One byte per parameter over the network, half of BF16's.
        return (self._codes,), self.fp8._scale_inv

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        scale_inv: Tensor,
        dtype: torch.dtype,
        *,
        out: Float8Tensor | None = None,
    ) -> tuple[FP8Shard, tuple[()]] | None:
        """Return the engine's quantized tensor of all rows; with `out`, write the gathered data into that one.

        te.Linear makes the transposed copy that some GPUs need in backward, and drops it under FSDP2.
        """
        whole = _empty(self.fp8, gathered[0], dtype) if out is None else out
        # FSDP2 reuses `out` between gathers: only the pointers change.
        whole._data = gathered[0]
        whole._scale_inv = scale_inv
        whole.update_usage(columnwise_usage=False)  # the copy of the data before
        return (FP8Shard(whole), ()) if out is None else None


def _plain(value: Any) -> Any:
    return value.fp8.dequantize().view(value.shape) if isinstance(value, FP8Shard) else value


def _empty(shard: Float8Tensor, gathered: Tensor, dtype: torch.dtype) -> Float8Tensor:
    """Return an empty quantized tensor like `shard` for all rows, whose quantizer reduces no amax."""
    # The gathered weight is whole on each rank: a collective to quantize it would wait for ranks that do nothing of the
    # kind.
    quantizer = shard._quantizer.copy()
    reduce_amax_over(quantizer, None)
    return cast(
        Float8Tensor, quantizer.make_empty(gathered.shape, dtype=dtype, device=gathered.device)
    )


@runtime_checkable
class _ReducesAmax(Protocol):
    """A quantizer of either engine that can take its amax over several processes; some formats have none."""

    with_amax_reduction: bool
    amax_reduction_group: ProcessGroup | None


def reduce_amax_over(quantizer: object, group: ProcessGroup | None) -> None:
    """Make a quantizer of either engine take its amax over the processes of `group` (None: of the tensor only).

    Quantizers of delayed scaling, which have a scale already, stay as they are.
    """
    if isinstance(quantizer, _ReducesAmax):
        quantizer.with_amax_reduction = group is not None
        quantizer.amax_reduction_group = group


def amax_group(quantizer: object) -> ProcessGroup | None:
    """Return the processes over which a quantizer takes its amax (None: of the tensor only)."""
    if isinstance(quantizer, _ReducesAmax) and quantizer.with_amax_reduction:
        return quantizer.amax_reduction_group
    return None
