"""Numbers that processes send each other in FP8: E4M3 with a power of two for each 128 of them, 1.008 bytes each.

A message is uint8: the E4M3 codes of a row, padded with zeros, and then a byte of E8M0 for each block of 128 codes. A
power of two costs no precision, since codes are floating-point numbers. A block in which anything is infinite or NaN
arrives as NaN, so that the receiver sees that the sum is not finite.
"""

import torch
from torch import Tensor

from te_models.numerics import fused
from te_models.numerics.blocks import cast_fp8_blocks
from te_models.numerics.casts import decode_fp8
from te_models.numerics.e8m0 import e8m0_from_amax, e8m0_to_float
from te_models.numerics.formats import DType

BLOCK = 128
_ALIGNED = 16 * BLOCK  # so that every row of a message begins at a multiple of 16 bytes
_BLOCKS = 16  # of a program
_E4M3 = DType.kFloat8E4M3


def padded(n: int) -> int:
    """Return the number of codes in the message of a row of n numbers."""
    return -(-n // _ALIGNED) * _ALIGNED


def pack(x: Tensor) -> Tensor:
    """Return the message of each row of x: [rows, n] in FP32 or BF16 -> uint8 [rows, padded(n) * 129 / 128]."""
    rows, n = x.shape
    size = padded(n)
    message = x.new_empty(rows, size + size // BLOCK, dtype=torch.uint8)
    if fused.active(x):
        fused.run(
            "pack_kernel",
            (size // BLOCK // _BLOCKS, rows),
            (x.contiguous(), message),
            numbers=(n, size, message.shape[1]),
            options={"BLOCKS": _BLOCKS, "num_warps": 4},
        )
        return message
    values = torch.nn.functional.pad(x.float(), (0, size - n)).reshape(-1, BLOCK)
    amax = values.abs().amax(1, keepdim=True)
    finite = amax.isfinite()
    exponents = e8m0_from_amax(torch.where(finite, amax, 0.0), _E4M3)
    codes = cast_fp8_blocks(values, e8m0_to_float(exponents, inverse=True), (1, BLOCK), _E4M3)
    message[:, :size] = codes.view(rows, size)
    message[:, size:] = torch.where(finite, exponents, 255).view(rows, -1)
    return message


def sum_into(out: Tensor, message: Tensor) -> None:
    """Write the sum of all rows of a message to `out` [n], added in FP32 in their order."""
    n = out.numel()
    size = padded(n)
    rows, stride = message.shape
    if fused.active(out):
        fused.run(
            "sum_kernel",
            (size // BLOCK // _BLOCKS,),
            (message, out),
            numbers=(n, size, stride, rows),
            options={"BLOCKS": _BLOCKS, "num_warps": 4},
        )
        return
    total = torch.zeros(size // BLOCK, BLOCK, device=out.device)
    for row in message:
        values = decode_fp8(row[:size].contiguous(), _E4M3).view(-1, BLOCK)
        total += values * e8m0_to_float(row[size:])[:, None]
    out.copy_(total.view(-1)[:n].view_as(out))
