import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformer_engine.common.recipe import Recipe

class DType(enum.IntEnum):
    kByte = 0
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

class Quantizer:
    internal: bool
    rowwise_usage: bool
    columnwise_usage: bool
    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None: ...
    def copy(self) -> Any: ...
    def quantize_impl(self, tensor: Tensor) -> Any: ...
    def __call__(self, tensor: Tensor) -> Any: ...

class Float8Quantizer(Quantizer):
    scale: Tensor
    amax: Tensor
    dtype: DType
    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: DType) -> None: ...

class Float8CurrentScalingQuantizer(Quantizer):
    dtype: DType
    force_pow_2_scales: bool
    amax_epsilon: float
    with_amax_reduction: bool
    def __init__(self, fp8_dtype: DType, device: torch.device) -> None: ...

class Float8BlockQuantizer(Quantizer):
    dtype: DType
    block_scaling_dim: int
    def __init__(self, fp8_dtype: DType, **options: Any) -> None: ...

class MXFP8Quantizer(Quantizer):
    dtype: DType
    def __init__(self, fp8_dtype: DType) -> None: ...

class QuantizedTensor(Tensor):
    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None: ...

class Float8Tensor(QuantizedTensor):
    _data: Tensor
    _scale_inv: Tensor
    _transpose: Tensor | None
    # Its metaclass takes the arguments of a storage, which torch.Tensor's own stubs do not know.
    def __new__(cls, *args: Any, **kwargs: Any) -> Float8Tensor: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class _Quantizing(torch.nn.Module):
    fp8_meta: dict[str, Any]
    quantizers: dict[str, list[Any]]
    fp8_initialized: bool
    fp8_meta_tensors_initialized: bool
    use_bias: bool
    is_fsdp2: bool
    in_features: int
    out_features: int
    _fp8_workspaces: dict[str, Any]
    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...
    def prepare_forward_ctx(
        self, inp: Tensor, num_gemms: int = 1
    ) -> AbstractContextManager[Tensor]: ...

class Linear(_Quantizing):
    weight: torch.nn.Parameter
    tp_size: int
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        **options: Any,
    ) -> None: ...

class GroupedLinear(_Quantizing):
    num_gemms: int
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, **options: Any
    ) -> None: ...

class RMSNorm(torch.nn.Module):
    weight: torch.nn.Parameter
    eps: float
    zero_centered_gamma: bool
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None: ...

class LayerNorm(torch.nn.Module):
    weight: torch.nn.Parameter
    eps: float
    zero_centered_gamma: bool
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None: ...
    def reset_parameters(self, defer_init: bool | None = None) -> None: ...

class RotaryPositionEmbedding(torch.nn.Module): ...
class TransformerLayer(torch.nn.Module): ...

class autocast(AbstractContextManager[None]):
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: ProcessGroup | None = None,
    ) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
) -> autocast: ...
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]: ...
def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any: ...
def get_default_recipe() -> Recipe: ...
def is_fp8_available(return_reason: bool = False) -> Any: ...
def is_fp8_block_scaling_available(return_reason: bool = False) -> Any: ...
def is_mxfp8_available(return_reason: bool = False) -> Any: ...
def is_nvfp4_available(return_reason: bool = False) -> Any: ...
