"""AdamW with moments in 8 bits, from torchao: "adamw8bit" (dynamic 8-bit codes) and "adamwfp8" (FP8 E4M3).

Both keep a scale for each block of 256 elements (Dettmers et al. 2021, arXiv 2110.02861), so a parameter costs 2.03 bytes
of moments. torchao fuses each update with torch.compile, on a CPU too, which takes some seconds a shape and a C++ compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit, AdamWFp8
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

CLASSES: dict[str, Any] = {"adamw8bit": AdamW8bit, "adamwfp8": AdamWFp8}


def lowbit_adamw(
    name: str, groups: list[dict[str, Any]], lr: float, options: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """torchao's optimizer called `name`.

    With `stochastic_rounding` it works on BF16 parameters themselves and rounds each update up or down by chance, in
    proportion to the distance, so that on average none is lost: 4 bytes a parameter less than FP32 masters.
    """
    fields = dict(betas=(options["beta1"], options["beta2"]), eps=options["eps"])
    return [CLASSES[name](groups, lr=lr, bf16_stochastic_round=options["stochastic_rounding"], **fields)]


def moment(tensors: dict[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    """torchao's quantized moment from its tensors; the second moment alone has codes without a sign."""
    if "qmap" in tensors:
        return OptimState8bit(**tensors, signed=name == "exp_avg", dtype=parameter.dtype)
    return OptimStateFp8(**tensors, dtype=parameter.dtype)
