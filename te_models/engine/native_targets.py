"""Where kernels write FP8 for a te.Linear; a part of te_models.engine.native, for native_handover.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import Module
from transformer_engine.pytorch import (
    DType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Linear,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_models.engine.native_observers import give_observer, observer_of
from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.fp8_tiles_triton import FP8Data
from te_models.kernels.handover import CastScale

# The quantizers with one scale per tensor, for which one module hands FP8 to the next.
PerTensorQuantizer = Float8Quantizer | Float8CurrentScalingQuantizer


class QuantizerTarget(NamedTuple):
    """Where a kernel writes FP8 for a te.Linear, as its own quantizer would (te_models.kernels.handover.CastTarget)."""

    quantizer: PerTensorQuantizer

    @property
    def counts(self) -> Counts | None:
        """Where the kernel counts what it casts; None where nothing is recorded."""
        observer = observer_of(self.quantizer)
        return None if observer is None else observer.counts

    @property
    def cast_scale(self) -> CastScale:
        """The quantizer's own scale and amax, which only delayed scaling knows before the values."""
        assert isinstance(self.quantizer, Float8Quantizer)
        return CastScale(
            scale=self.quantizer.scale,
            amax=self.quantizer.amax,
            e5m2=self.quantizer.dtype == DType.kFloat8E5M2,
        )

    def tensor(self, fp8: FP8Data, dtype: torch.dtype) -> Float8Tensor:
        """Return Transformer Engine's tensor of FP8 data [N, K], with the nominal `dtype`."""
        assert fp8.transposed is not None
        return Float8Tensor(
            shape=fp8.transposed.shape[::-1],
            dtype=dtype,
            data=fp8.data,
            data_transpose=fp8.transposed,
            fp8_scale_inv=fp8.scale_inv,
            fp8_dtype=self.quantizer.dtype,
            quantizer=self.quantizer,
            device=fp8.transposed.device,
        )


def quantizer_of(
    linear: Module | None, direction: str, operand: int = 0
) -> PerTensorQuantizer | None:
    """Return a te.Linear's quantizer of the input ("scaling_fwd"; operand 1: the weight) or of dy ("scaling_bwd").

    It shares the module's scale and amax. None where the module takes BF16, and for block scaling, which gains nothing.
    """
    if not (isinstance(linear, Linear) and FP8GlobalStateManager.is_fp8_enabled()):
        return None
    # Without it there is no quantizer before the module's first forward.
    linear.init_fp8_metadata(num_gemms=1)
    of_operand = linear.quantizers[direction][operand]
    if not isinstance(of_operand, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        return None
    # A copy, which shares scale and amax: the module sets the usage of its own quantizer anew at each call.
    quantizer = of_operand.copy()
    # Autograd can pass on tensors, not Transformer Engine's bare storages.
    quantizer.internal = False
    quantizer.set_usage(rowwise=True, columnwise=linear.weight.requires_grad)
    give_observer(quantizer, linear, direction, operand)
    return quantizer


def target_of(quantizer: PerTensorQuantizer | None) -> QuantizerTarget | None:
    """Return the target of our own kernels: only for delayed scaling, whose scale is known before the values."""
    if isinstance(quantizer, Float8Quantizer) and quantizer.columnwise_usage:
        return QuantizerTarget(quantizer)
    return None


def current_target_of(quantizer: PerTensorQuantizer | None) -> QuantizerTarget | None:
    """Return the target of our own kernels under current scaling, which measure values before they write them."""
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        return None
    # Another rule of scales, or one scale for several processes, is left to Transformer Engine.
    usual = not quantizer.force_pow_2_scales and quantizer.amax_epsilon == 0
    if usual and quantizer.columnwise_usage and not quantizer.with_amax_reduction:
        return QuantizerTarget(quantizer)
    return None
