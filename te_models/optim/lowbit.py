"""AdamW with moments in 8 bits, from torchao: "adamw8bit" (dynamic 8-bit quantization) and "adamwfp8" (FP8 E4M3).

Both have one scale per block of 256 elements (Dettmers et al. 2021, arXiv 2110.02861), which makes 2.03 bytes of
moments per parameter. torchao fuses each update with torch.compile, on a CPU too; that takes seconds per shape and a
C++ compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit, AdamWFp8
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from te_models.optim.state_tensors import like

CLASSES: dict[str, Any] = {"adamw8bit": AdamW8bit, "adamwfp8": AdamWFp8}


def lowbit_adamw(
    name: str, groups: list[dict[str, Any]], lr: float, options: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """Return torchao's optimizer called `name`.

    With `stochastic_rounding` it updates BF16 parameters directly and rounds each update up or down at random, with
    probabilities that make the expected value exact. That saves the 4 bytes per parameter of FP32 master weights.
    """
    fields = dict(betas=(options["beta1"], options["beta2"]), eps=options["eps"])
    return [CLASSES[name](groups, lr=lr, bf16_stochastic_round=options["stochastic_rounding"], **fields)]


def expected_moment(optimizer: AdamW8bit | AdamWFp8, view: Tensor) -> Any:
    """Return a moment of one tensor as a template for te_models.optim.state_tensors.check_values."""
    block: int = optimizer.block_size
    if view.numel() < 4096 or view.numel() % block:
        return like(view)
    scale = like(view, view.numel() // block, dtype=torch.float32)
    if isinstance(optimizer, AdamW8bit):
        return dict(codes=like(view, dtype=torch.uint8), scale=scale, qmap=like(view, 256, dtype=torch.float32))
    return dict(codes=like(view, dtype=torch.float8_e4m3fn), scale=scale)


def moment(tensors: dict[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    """Return torchao's quantized moment made of these tensors; only the second moment is unsigned."""
    if "qmap" in tensors:
        return OptimState8bit(**tensors, signed=name == "exp_avg", dtype=parameter.dtype)
    return OptimStateFp8(**tensors, dtype=parameter.dtype)
