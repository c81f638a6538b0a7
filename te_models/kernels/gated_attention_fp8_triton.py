"""The elementwise parts of attention that write FP8 for the next te.Linear, data and transposed copy at once."""

from te_models.kernels.attention_parts import FP8Operations
from te_models.kernels.fp8_tiles_triton import new_fp8
from te_models.kernels.gate_fp8_triton import gate_backward_fp8, gate_fp8
from te_models.kernels.head_norm_backward_fp8_triton import norm_backward_fp8
from te_models.kernels.rotate_fp8_triton import rotate_fp8

FP8 = FP8Operations(
    new=new_fp8,
    gate=gate_fp8,
    rotate=rotate_fp8,
    norm_backward=norm_backward_fp8,
    gate_backward=gate_backward_fp8,
)
