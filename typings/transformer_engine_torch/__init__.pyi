from typing import Any

from torch import Tensor
from transformer_engine.pytorch import DType

def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor | None, Tensor]: ...
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]: ...
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor, Tensor]: ...
def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]: ...

# Activations: (input, quantizer) to the output; gradients: (gradient, input, quantizer).
def swiglu(input: Tensor, quantizer: Any) -> Any: ...
def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any: ...
def silu(input: Tensor, quantizer: Any) -> Any: ...
def dsilu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any: ...
def geglu(input: Tensor, quantizer: Any) -> Any: ...
def dgeglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any: ...
def gelu(input: Tensor, quantizer: Any) -> Any: ...
def dgelu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any: ...
def sreglu(input: Tensor, quantizer: Any) -> Any: ...
def dsreglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any: ...
def srelu(input: Tensor, quantizer: Any) -> Any: ...
def dsrelu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any: ...
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
    /,
) -> None: ...
