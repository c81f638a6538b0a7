"""A te.Linear and a te.RMSNorm without gradients, by the calls of Transformer Engine's library that they end in.

A call of te.Linear takes the host 170 microseconds in BF16 and 290 under FP8 on an H100, and a te.RMSNorm 230, which is
most of the time of a prompt: 72 ms of the host beside 13 of the device for 2,048 tokens of a 1.7B. What they do
beyond these calls serves backward, tensor parallelism and debugging.

A part of te_models.engine.native. Sections are in docs/internals/transformer_engine.md.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import transformer_engine.pytorch  # noqa: F401  makes transformer_engine_torch known
import transformer_engine_torch as tex
from torch import Tensor
from torch.nn import Module, Parameter
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.pytorch import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Linear,
    QuantizedTensor,
    RMSNorm,
)
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.distributed import is_fp8_activation_recompute_enabled
from transformer_engine.pytorch.module.base import quantize_weight
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from te_models.device.hooks import is_untouched
from te_models.engine.native_linear import LinearOfTorch

ROWS = 8  # an FP8 product takes a multiple of so many rows


def linear(module: Module, x: Tensor, is_first_microbatch: bool | None) -> Tensor | None:
    """Return a te.Linear of x [N, I] without gradients: [N, O]; None where only the module computes what is asked for.

    `module` may be anything in a te.Linear's place, such as a layer of peft, which computes more.
    `is_first_microbatch` decides, as in te.Linear, whether the FP8 weight is made anew (True), taken from the module's
    cache (False), or made and not kept (None).
    """
    if not _is_plain(module, x):
        return None
    weight: Any = module._parameters["weight"]
    bias = module.bias if module.use_bias else None
    if not FP8GlobalStateManager.is_fp8_enabled():
        if FP8GlobalStateManager.is_fp8_calibration() or isinstance(weight, QuantizedTensor):
            return None
        return general_gemm(weight, x, out_dtype=x.dtype, bias=bias)[0]

    if not _is_prepared(module):
        module.init_fp8_metadata(num_gemms=1)
    x_quantizer, weight_quantizer = module.quantizers["scaling_fwd"][:2]
    if not isinstance(x_quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        return None
    if x.shape[0] % ROWS:
        return None  # te.Linear has a message for it
    x_quantizer.internal = True
    x_quantizer.set_usage(rowwise=True, columnwise=False)
    if isinstance(weight, QuantizedTensor):
        weight.update_usage(rowwise_usage=True)
    else:
        weight = _quantized(module, weight_quantizer, is_first_microbatch)
    # Delayed scaling has no setting for its products.
    gemm_setting = getattr(module.fp8_meta["recipe"], "fp8_gemm_fprop", None)
    split_accumulator = gemm_setting is not None and gemm_setting.use_split_accumulator
    results = general_gemm(
        weight,
        # As `x_quantizer(x)`, which would look for gradients and groups of processes first.
        x_quantizer.quantize_impl(x),
        out_dtype=x.dtype,
        bias=bias,
        use_split_accumulator=split_accumulator,
    )
    return results[0]  # [N, O]


def _is_plain(module: Module, x: Tensor) -> TypeGuard[Linear]:
    """Return whether the module is a te.Linear that would do no more for x than cast and multiply."""
    # By their very type: a subclass, which parametrizations make too, computes what it likes.
    if type(module) is not Linear and type(module) is not LinearOfTorch:
        return False
    if type(x) is not Tensor or x.dim() != 2 or not is_untouched(module):
        return False
    # nn.Module's look-up by name takes longer. It has no parameter where others make the weight, as pruning does.
    weight: Any = module._parameters.get("weight")
    if type(weight) is not Parameter and not isinstance(weight, QuantizedTensor):
        return False
    if module.tp_size > 1 or module.is_fsdp2 or module.fsdp_group is not None:
        return False
    if module.return_bias or module.gemm_bias_unfused_add:
        return False
    if TEDebugState.debug_enabled or torch.is_autocast_enabled("cuda"):
        return False
    # A checkpoint's forward pass has no gradients either, and te.Linear keeps its scales for the second one.
    if is_fp8_activation_recompute_enabled() or torch.compiler.is_compiling():
        return False
    # te.Linear casts a bias of another dtype, and one of FP32 for products in FP8, which write no FP32.
    if module.use_bias and module.bias.dtype != x.dtype:
        return False
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and weight.dtype == x.dtype and x.is_contiguous()


def _is_prepared(module: Linear) -> bool:
    """Return whether a te.Linear has the quantizers of the recipe that is enabled now.

    Transformer Engine compares all fields of both recipes, which takes longer than to see that they are one object.
    """
    if not (module.fp8_initialized and module.fp8):
        return False
    return module.fp8_meta.get("recipe") is FP8GlobalStateManager.get_fp8_recipe()


def _quantized(module: Linear, quantizer: Any, is_first_microbatch: bool | None) -> Any:
    """Return the weight of a te.Linear in FP8, and keep it where te.Linear would."""
    if is_first_microbatch is False:
        cached = module._fp8_workspaces.get("weight")
        # The product reads this copy alone; what te.Linear looks for beyond it is for backward.
        if isinstance(cached, Float8TensorStorage) and cached._data is not None:
            return cached
    quantizer.internal = True
    quantizer.set_usage(rowwise=True, columnwise=False)
    keeps = is_first_microbatch is not None
    weight, new = quantize_weight(
        tensor=module.weight,
        quantizer=quantizer,
        workspace=module._fp8_workspaces.get("weight") if keeps else None,
        update_workspace=is_first_microbatch is not False,
        workspace_dtype=module.weight.dtype,
        cache=keeps,
    )
    if new is not None:
        module._fp8_workspaces["weight"] = new.detach() if isinstance(new, Tensor) else new
    return weight


def is_plain_norm(module: Module, x: Tensor) -> TypeGuard[RMSNorm]:
    """Return whether the module is a te.RMSNorm that would do no more for x [N, D] than its kernel does."""
    if type(module) is not RMSNorm or not is_untouched(module) or type(x) is not Tensor:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"):
        return False
    return module.weight.dtype == x.dtype and x.dim() == 2


def norm(module: Module, x: Tensor) -> Tensor:
    """Return a te.RMSNorm of x [N, D] without gradients, in the dtype of x."""
    if not is_plain_norm(module, x):
        return module(x)
    # Positional, as Transformer Engine itself calls it: out (None: a new tensor), quantizer, dtype of the output,
    # multiprocessors to leave free, zero-centred weight.
    y, _, _ = tex.rmsnorm_fwd(
        x.contiguous(),
        module.weight,
        module.eps,
        None,
        None,
        TE_DType[x.dtype],
        0,
        module.zero_centered_gamma,
    )
    return y
