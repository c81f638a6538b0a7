"""FP8 weights under FSDP2: each rank holds its rows as FP8 codes, and codes are what travels, one byte a parameter.

FSDP2 cuts a parameter up and gathers it by itself, but asks a tensor that has `fsdp_pre_all_gather` what to send and what
to make of what arrives (torch.distributed.fsdp, its extensions for tensor subclasses). `FP8Shard` answers for the
quantized tensors of either engine, which have the same attributes; Transformer Engine's own hooks are not used, so that
both engines do the same, activation checkpointing included.

One scale has to serve all rows, so it must be equal on all ranks: the module's under DelayedScaling, and under current
scaling that of the amax over the ranks that share the weight (te_models.fp8.primary_weights.make_shards).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class FP8Shard(torch.Tensor):
    """This rank's rows of an FP8 weight: a shell of its nominal dtype round the engine's quantized tensor `fp8`.

    The local tensor of a DTensor. An operation that knows no FP8 sees the dequantized values, and cannot change them.
    """

    fp8: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, fp8: Any, shape: Any = None) -> FP8Shard:
        """Round `fp8` [rows, I]; `shape` is that of the shell, where it is to look flat."""
        place: dict[str, Any] = dict(dtype=fp8.dtype, device=fp8.device)
        return torch.Tensor._make_wrapper_subclass(cls, shape or fp8.shape, **place)  # type: ignore[attr-defined]

    def __init__(self, fp8: Any, shape: Any = None) -> None:
        self.fp8 = fp8

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func is aten.as_strided.default:  # FSDP2's last step with what was gathered, in the shape that it has
            return args[0].fp8
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].fp8, args[0].shape)
        if func is aten.view.default:  # FSDP2 keeps a flat view, in place of what the parameter was before
            return cls(args[0].fp8, torch.empty(args[0].shape, device="meta").view(args[1]).shape)
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} cannot write to an FP8 weight: use te_models.fp8.primary_weights.write_weight"
            )
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FP8Shard({self.fp8!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where the codes lie; a shell has no memory of its own."""
        return self.fp8._data.untyped_storage()

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        """What to send, the codes uint8 [rows / ranks, I]; and what to remember, the inverse scale of all ranks."""
        return (self.fp8._data,), self.fp8._scale_inv

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], scale_inv: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The engine's quantized tensor of all rows, at first; later `out` is the one given then, with fresh codes.

        A transposed copy, which some GPUs need in backward, is te.Linear's to make and, under FSDP2, to drop.
        """
        whole = _empty(self.fp8, gathered[0], dtype) if out is None else out
        whole._data, whole._scale_inv = gathered[0], scale_inv
        whole.update_usage(columnwise_usage=False)  # one of the codes before
        return (FP8Shard(whole), ()) if out is None else None


def _plain(value: Any) -> Any:
    return value.fp8.dequantize().view(value.shape) if isinstance(value, FP8Shard) else value


def _empty(shard: Any, codes: Tensor, dtype: torch.dtype) -> Any:
    """A quantized tensor of the kind of `shard` for the codes of all rows; its quantizer reduces nothing."""
    quantizer = shard._quantizer.copy()
    if hasattr(quantizer, "with_amax_reduction"):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = False, None
    return quantizer.make_empty(codes.shape, dtype=dtype, device=codes.device)
