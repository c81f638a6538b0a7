from typing import Any

class QParams:
    power_2_scale: bool
    amax_epsilon: float

class MMParams:
    use_split_accumulator: bool

class Recipe:
    # Dataclasses with these and other fields, all with defaults.
    def __init__(self, **fields: Any) -> None: ...
    backward_override: str | None
    fp8_gemm_fprop: MMParams
    fp8_gemm_dgrad: MMParams
    fp8_gemm_wgrad: MMParams

class DelayedScaling(Recipe):
    margin: int
    amax_history_len: int
    amax_compute_algo: str
    reduce_amax: bool

class Float8CurrentScaling(Recipe):
    fp8_quant_fwd_inp: QParams
    fp8_quant_fwd_weight: QParams
    fp8_quant_bwd_grad: QParams

class Float8BlockScaling(Recipe):
    fp8_quant_fwd_inp: QParams
    fp8_quant_fwd_weight: QParams
    fp8_quant_bwd_grad: QParams
    x_block_scaling_dim: int
    w_block_scaling_dim: int
    grad_block_scaling_dim: int
