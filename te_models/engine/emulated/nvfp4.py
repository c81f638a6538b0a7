"""NVFP4: E2M1 codes, an E4M3 scale for 16 elements and an FP32 scale for the tensor.

The rules are those of Transformer Engine's own Python reference (`custom_recipes/reference_nvfp4.py`, 2.20), since no
Hopper GPU runs the kernels. Where sources differ, the reference wins over torchao 0.18: the two levels of scales are
multiplied and inverted in another order, so that values within an FP32 step of a rounding boundary may differ by one
code, and a block whose scale underflows has scale 0 where torchao has E4M3's smallest normal number. A NaN makes the
whole tensor NaN.

Stochastic rounding has no reference in Python. Here a value goes up with the probability of its distance from the lower
code, with random numbers from the quantizer's `generator` (None: the global one of the device).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from te_models.engine.emulated import numerics
from te_models.engine.emulated.numerics import FLT_MAX, DType
from te_models.engine.emulated.quantizers import Quantizer
from te_models.engine.emulated.recipe import NVFP4BlockScaling
from te_models.engine.emulated.tensors import Operand, QuantizedTensor, QuantizedTensorStorage, pad_to

BLOCK = 16
FP4_MAX = 6.0
E4M3_MAX = 448.0
# Transformer Engine's fixed "random" signs of the Hadamard transform.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.cache
def hadamard(random_signs: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The orthogonal matrix `[16, 16]` of the transform: signs times Sylvester's Hadamard matrix over 4."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor(_SIGNS if random_signs else [1] * BLOCK, dtype=torch.float32)
    return (signs[:, None] * matrix / BLOCK**0.5).to(device, dtype)


def encode_e2m1(x: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """E2M1 codes (uint8, 0 to 15) of FP32 values within [-6, 6]; NaN gives a zero."""
    size = x.abs()
    # Codes are evenly spaced within [0, 2], [2, 4] and [4, 6]. The position within each range is exact in FP32, and its
    # parity is the code's, so that ties go to the even code.
    ranges = size.clamp(max=2).mul_(2), size.clamp(2, 4).sub_(2), size.clamp_(min=4).sub_(4).mul_(0.5)
    if stochastic:
        up = torch.rand(x.shape, generator=generator, device=x.device)
        positions = [position.add_(up).floor_() for position in ranges]
    else:
        positions = [position.round_() for position in ranges]
    codes = positions[0].add_(positions[1]).add_(positions[2]).nan_to_num_(nan=0.0).to(torch.uint8)
    return codes.bitwise_or_((x.view(torch.int32) >> 28).bitwise_and_(8).to(torch.uint8))


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte along the last dimension, the first one in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """FP32 values of packed codes; the last dimension doubles."""
    high = torch.stack([packed << 4, packed & 0xF0], -1).flatten(-2)
    # A code's three lower bits, put where FP32 has its exponent's end and its mantissa's start, are the value / 2^126.
    bits = high.view(torch.int8).to(torch.int32).bitwise_left_shift_(18).bitwise_and_(-0x7E400000)
    return bits.view(torch.float32).mul_(2.0**126)


def _global_scale(amax: Tensor, e4m3_max: float) -> Tensor:
    """The FP32 multiplier `[n, 1]` that brings `amax` `[n]` (one, or one a row) to the largest scale times code."""
    scale = torch.full_like(amax, e4m3_max * FP4_MAX).div_(amax).clamp_(max=FLT_MAX)
    return scale.masked_fill(scale == 0, 1.0)[:, None]


def _multiplier(scale: Tensor, whole: Tensor) -> Tensor:
    """What a block is multiplied by before rounding, given its E4M3 scale and the global one."""
    return (scale.float() * whole.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)


def _codes(x: Tensor, multiplier: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """E2M1 codes `[M, K]` of FP32 x `[M, K]` times one multiplier `[M, K/16]` for 16 elements."""
    scaled = (x.view(*multiplier.shape, BLOCK) * multiplier[..., None]).clamp_(-FP4_MAX, FP4_MAX)
    return encode_e2m1(scaled.view(x.shape), stochastic, generator)


def quantize(
    x: Tensor, amax: Tensor, two_d: bool, stochastic: bool = False, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Packed codes `[M, K/2]` and E4M3 scales as bytes `[M, K/16]` of x `[M, K]`.

    `amax` is the tensor's, `[1]`, or each row's, `[M]`; `two_d` shares a scale over 16x16 elements.
    """
    x, whole = x.float(), _global_scale(amax, E4M3_MAX)
    sixth = torch.ones_like(whole).div_(FP4_MAX)
    scale = (_block_amax(x, two_d) * (whole * sixth)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return pack(_codes(x, _multiplier(scale, whole), stochastic, generator)), scale.view(torch.uint8)


def quantize_4over6(x: Tensor, amax: Tensor, two_d: bool, e4m3_max: float, squared: bool) -> tuple[Tensor, Tensor]:
    """As `quantize`, with each block's maximum at 6 or at 4, whichever has the smaller error; a tie takes 6.

    The error is the sum of absolute (or squared) differences, added in the order of Transformer Engine's kernel.
    """
    x, whole = x.float(), _global_scale(amax, e4m3_max)
    base = _block_amax(x, two_d).div_(FP4_MAX) * whole
    candidates, errors = [], []
    for factor in (1.0, 1.5):
        scale = (base * factor).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
        packed = pack(_codes(x, _multiplier(scale, whole)))
        values = unpack(packed).view(*scale.shape, BLOCK) * scale.float()[..., None] * amax[:, None, None]
        difference = values.div_(FP4_MAX * e4m3_max).sub_(x.view(*scale.shape, BLOCK))
        difference = difference.square_() if squared else difference.abs_()
        error = torch.zeros_like(base)
        for column in difference.unbind(-1):
            error += column
        candidates.append((packed.view(*scale.shape, BLOCK // 2), scale.view(torch.uint8)))
        errors.append(_sum_rows(error) if two_d else error)
    four = errors[1] < errors[0]
    codes = torch.where(four[..., None], candidates[1][0], candidates[0][0])
    return codes.flatten(-2), torch.where(four, candidates[1][1], candidates[0][1])


def _block_amax(x: Tensor, two_d: bool) -> Tensor:
    """Largest magnitudes `[M, K/16]` of 16 elements, or of 16x16 repeated for each of their rows."""
    rows = BLOCK if two_d else 1
    return numerics.split_blocks(x.abs(), (rows, BLOCK)).amax((1, 3)).repeat_interleave(rows, 0)


def _sum_rows(error: Tensor) -> Tensor:
    """Sums over 16 rows of `[M, n]`, halving like a warp's reduction, repeated for each row."""
    rows = error.unflatten(0, (-1, BLOCK))
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows.expand(-1, BLOCK, -1).flatten(0, 1)


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4 data.

    For M rows and K columns: `_rowwise_data` uint8 `[..., K/2]`, `_columnwise_data` `[K, ..., M/2]`, both packed along
    the contraction; scale bytes rowwise `[M, K/16]` and columnwise `[K, M/16]`, padded to multiples of (128, 4);
    `_amax_rowwise` and `_amax_columnwise` FP32 `[1]`, or with row scaling `[M]` and `[K]`. `_nvfp4_e4m3_max` is the
    largest block scale that the tensor's scale allows for.
    """

    _tensors = (
        "_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise",
        "_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise",
    )  # fmt: skip
    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _amax_rowwise: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _amax_columnwise: Tensor | None
    _fp4_dtype: DType
    _nvfp4_e4m3_max: int

    def _metadata(self) -> dict[str, Any]:
        return super()._metadata() | {"fp4_dtype": self._fp4_dtype, "nvfp4_e4m3_max": self._nvfp4_e4m3_max}

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def _drop(self, columnwise: bool) -> None:
        for name in self._tensors[3:] if columnwise else self._tensors[:3]:
            setattr(self, name, None)

    def operand(self, columnwise: bool) -> Operand:
        """Codes times block scales, and the tensor's scale. A columnwise copy may be Hadamard-transformed."""
        m, k = self._matrix
        packed, scales, amax = (
            getattr(self, name) for name in (self._tensors[3:] if columnwise else self._tensors[:3])
        )
        rows, columns = (k, m) if columnwise else (m, k)
        scale = scales[:rows, : columns // BLOCK].view(torch.float8_e4m3fn).float()
        values = numerics.scale_blocks_(unpack(packed.reshape(rows, columns // 2)), scale, (1, BLOCK))
        made = Operand(values, amax[:, None] / (self._nvfp4_e4m3_max * FP4_MAX), narrow=True)
        return made.t if columnwise else made

    def _high_precision(self, dtype: torch.dtype | None) -> Tensor:
        if self._rowwise_data is None:
            raise NotImplementedError(
                "only the rowwise NVFP4 copy has a dequantize, as in Transformer Engine: quantize with rowwise=True"
            )
        return super()._high_precision(dtype)


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """`NVFP4TensorStorage` as a tensor."""


class NVFP4Quantizer(Quantizer):
    """Blocks of 16 elements, or 16x16 with `with_2d_quantization`.

    `row_scaled_nvfp4` has a global scale for each row, `nvfp4_use_4over6` chooses each block's range by its error.
    `with_rht` transforms the columnwise copy; `stochastic_rounding` draws from `generator` (None: the global generator
    of the device).
    """

    _tensor_class = NVFP4Tensor
    _recipe = NVFP4BlockScaling

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        """Transformer Engine's arguments, and `generator`."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if nvfp4_e4m3_max not in (256, 448):
            raise ValueError(f"nvfp4_e4m3_max must be 448 or 256, not {nvfp4_e4m3_max}")
        if nvfp4_4over6_err_mode.upper() not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode must be 'MAE' or 'MSE', not {nvfp4_4over6_err_mode!r}")
        if nvfp4_use_4over6 and (with_rht or stochastic_rounding):
            raise ValueError("NVFP4 4over6 quantization supports neither RHT nor stochastic rounding: turn them off")
        if row_scaled_nvfp4 and with_2d_quantization:
            raise ValueError("Row-scaled NVFP4 only supports 1x16 blocks: use with_2d_quantization=False")
        self.dtype = DType.cast(fp4_dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode.upper()
        self.with_random_sign_mask = with_random_sign_mask
        self.generator = generator

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether both matrix dimensions are multiples of 16."""
        return inp.ndim >= 2 and inp.shape[-1] % BLOCK == 0 and inp.shape[:-1].numel() % BLOCK == 0

    def _encode(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        if not self.is_quantizable(tensor):
            raise RuntimeError(
                f"NVFP4 requires tensor dims that are divisible by 16 (got shape={tuple(tensor.shape)}): pad the tensor"
            )
        fields: dict[str, Any] = {"fp4_dtype": self.dtype, "nvfp4_e4m3_max": self.nvfp4_e4m3_max}
        fields |= dict.fromkeys(name.removeprefix("_") for name in NVFP4TensorStorage._tensors)
        x = tensor.reshape(-1, tensor.shape[-1])
        if rowwise:
            packed, scale, amax = self._cast(x)
            fields["rowwise_data"] = packed.view(*tensor.shape[:-1], tensor.shape[-1] // 2)
            fields |= {"rowwise_scale_inv": pad_to(scale, 128, 4), "amax_rowwise": amax}
        if columnwise:
            packed, scale, amax = self._cast(self._transformed(x.t()))
            fields["columnwise_data"] = packed.view(tensor.shape[-1], *tensor.shape[:-2], tensor.shape[-2] // 2)
            fields |= {"columnwise_scale_inv": pad_to(scale, 128, 4), "amax_columnwise": amax}
        return fields

    def _transformed(self, x: Tensor) -> Tensor:
        """x `[K, M]` with the transform applied to each 16 elements of a row, in the dtype of x."""
        if not self.with_rht:
            return x
        matrix = hadamard(self.with_random_sign_mask, x.device, x.dtype)
        return (x.reshape(-1, BLOCK) @ matrix).view(x.shape)

    def _cast(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed codes, scale bytes and amax, `[1]` or one a row."""
        # The largest magnitude, with NaN: a format without NaN must not swallow it.
        amax = x.abs().amax(1).float() if x.shape[1] else torch.zeros(x.shape[0], device=x.device)
        if not self.row_scaled_nvfp4:
            amax = amax.amax().reshape(1) if len(amax) else torch.zeros(1, device=x.device)
        if self.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group)
        x = x.contiguous()
        if self.nvfp4_use_4over6:
            squared = self.nvfp4_4over6_err_mode == "MSE"
            return *quantize_4over6(x, amax, self.with_2d_quantization, self.nvfp4_e4m3_max, squared), amax
        return *quantize(x, amax, self.with_2d_quantization, self.stochastic_rounding, self.generator), amax
