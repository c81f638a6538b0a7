"""NVFP4: E2M1 data, an E4M3 scale per 16 elements and an FP32 scale per tensor.

The rules follow Transformer Engine's own Python reference (`custom_recipes/reference_nvfp4.py`, 2.20), since no
Hopper GPU runs the kernels. The reference differs from torchao 0.18: it multiplies and inverts the two levels of scales
in another order, so that values within an FP32 step of a rounding boundary may differ by one step of E2M1, and a block
whose scale underflows has scale 0 where torchao has E4M3's smallest normal number. A NaN makes the whole tensor NaN.

Stochastic rounding has no reference in Python. Here a value is rounded up with the probability of its distance from the
E2M1 number below, in steps of 2^-16, with random numbers from the quantizer's `generator` (None: the device's global
one). Row scaling and "4over6" are not emulated.
"""

import functools

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_models.device.host import device_type
from te_models.distributed.collectives import all_reduce_max
from te_models.errors import require
from te_models.numerics import casts, fused
from te_models.numerics.blocks import scale_blocks_, split_blocks
from te_models.numerics.formats import FLT_MAX, DType
from te_models.numerics.matrices import (
    BlockScaled,
    Operand,
    as_matrix,
    pad_to,
    rows_first,
    rows_last,
)
from te_models.numerics.quantizers import Quantizer, StorageFields
from te_models.numerics.tensors import BlockStorage, QuantizedTensor

BLOCK = 16
FP4_MAX = 6.0
E4M3_MAX = 448.0
TOP = E4M3_MAX * FP4_MAX  # the largest block scale times the largest value
# Transformer Engine's fixed "random" signs of the Hadamard transform.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.cache
def hadamard(random_signs: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the orthogonal matrix `[16, 16]` of the transform: signs times Sylvester's Hadamard matrix over 4."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor(_SIGNS if random_signs else [1] * BLOCK, dtype=torch.float32)
    return (signs[:, None] * matrix / BLOCK**0.5).to(device, dtype)


def _transform(x: Tensor, random_signs: bool) -> Tensor:
    """Transform each 16 elements of the columns of x `[M, K]`, summing in FP32."""
    groups = x.view(-1, BLOCK, x.shape[1])
    matrix = hadamard(random_signs, x.device, x.dtype).t().expand(len(groups), BLOCK, BLOCK)
    return torch.bmm(matrix, groups).view(x.shape)


def encode_e2m1(
    x: Tensor, stochastic: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    """Round FP32 values within [-6, 6], which are overwritten, to E2M1 (uint8, 0 to 15); NaN becomes zero."""
    sign = (x.view(torch.int32) < 0).view(torch.uint8).bitwise_left_shift_(3)
    size = x.nan_to_num_(nan=0.0).abs_()
    # E2M1 numbers in [2^e, 2^(e+1)) are 2^(e-1) apart, numbers below 1 as in [1, 2). Adding 2^(e+22) rounds to a
    # multiple of that, ties to even, and leaves the multiple in the last bits of the sum; the byte is 2e more. The
    # exponent field holds e + 127: twice that is 2e + 254, and with the 2 added below, 2e modulo 256.
    octave = (size.view(torch.int32) & 0x7F800000).clamp_(min=0x3F800000)
    if stochastic:
        spacing = (octave - (17 << 23)).view(torch.float32)
        # Odd numbers / 2 within (-2^15, 2^15): never zero, never a tie. A draw yields four.
        words = _random_words(x.numel(), 1, generator, x.device)[0, : x.numel()]
        size.add_(words.view(x.shape).float().add_(0.5).mul_(spacing))
    sums = (octave + ((22 << 23) + 2)).view(torch.float32).add_(size).view(torch.int32)
    return sums.add_(octave.bitwise_right_shift_(22)).to(torch.uint8).bitwise_or_(sign)


def _random_words(
    n: int, draws: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Return random int16 numbers `[draws, n]`, with n rounded up to a multiple of 4."""
    words = torch.empty(draws, -(-n // 4), dtype=torch.int64, device=device)
    # One draw per copy: rows and columns are rounded with numbers of their own.
    for draw in words:
        draw.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)


def pack(data: Tensor) -> Tensor:
    """Pack two values per byte along the last dimension, the first one in the low half."""
    pairs = data.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def pack_rows(data: Tensor) -> Tensor:
    """Pack two values per byte along the first dimension, the first one in the low half."""
    return data[::2] | data[1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Return the FP32 values of bytes packed along the last dimension, which doubles."""
    pairs = packed.to(torch.int16)
    return _decode((pairs << 4).bitwise_or_(pairs << 8).bitwise_and_(-0x0F10).view(torch.int8))


def unpack_rows(packed: Tensor) -> Tensor:
    """Return the FP32 values of bytes packed along the first dimension, which doubles."""
    return _decode(torch.stack([packed << 4, packed & 0xF0], 1).flatten(0, 1).view(torch.int8))


def _decode(high: Tensor) -> Tensor:
    """Return the FP32 values of E2M1 numbers in the upper halves of bytes whose lower halves are 0."""
    # The three lower bits, moved to the end of FP32's exponent and the start of its mantissa, are the value / 2^126.
    bits = high.to(torch.int32).bitwise_left_shift_(18).bitwise_and_(-0x7E400000)
    return bits.view(torch.float32).mul_(2.0**126)


def _global_scale(amax: Tensor) -> Tensor:
    """Return the FP32 multiplier `[1]` that brings `amax` to the largest scale times the largest value."""
    scale = torch.full_like(amax, TOP).div_(amax).clamp_(max=FLT_MAX)
    return scale.masked_fill_(scale == 0, 1.0)


def _multiplier(scale: Tensor, whole: Tensor) -> Tensor:
    """Return the multipliers of the blocks before rounding, given their E4M3 scales and the global one."""
    return (scale.float() * whole.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)


def _round_blocks(
    x: Tensor,
    multiplier: Tensor,
    block: tuple[int, int],
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return E2M1 data `[M, K]` of x `[M, K]` times one multiplier per block."""
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for rows in casts.row_tiles(x, block[0]):
        factors = multiplier[rows.start // block[0] : -(-rows.stop // block[0]), None, :, None]
        scaled = (split_blocks(x[rows].float(), block) * factors).clamp_(-FP4_MAX, FP4_MAX)
        data[rows] = encode_e2m1(scaled.view(-1, x.shape[1]), stochastic, generator)
    return data


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitudes of the blocks of x, FP32; a NaN is larger than any number."""
    # As integers, which have the same order: torch's FP32 maximum over 16 neighbors is four times slower on CPU.
    parts = [
        x[rows].float().view(torch.int32) & 0x7FFFFFFF for rows in casts.row_tiles(x, block[0])
    ]
    return torch.cat([split_blocks(part, block).amax((1, 3)) for part in parts]).view(torch.float32)


class NVFP4TensorStorage(BlockStorage):
    """NVFP4 data.

    For M rows and K columns: `_rowwise_data` uint8 `[..., K/2]`, `_columnwise_data` `[K, ..., M/2]`, both packed along
    the contraction; scale bytes rowwise `[M, K/16]` and columnwise `[K, M/16]`, padded to multiples of (128, 4);
    `_amax_rowwise` and `_amax_columnwise` FP32 `[1]`.
    """

    _copies = (
        ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
        ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
    )
    _tensors = _copies[0] + _copies[1]
    _facts = ("shape", "dtype", "quantizer", "fp4_dtype")
    _amax_rowwise: Tensor | None = None
    _amax_columnwise: Tensor | None = None
    _fp4_dtype: DType

    def operand(self, columnwise: bool) -> Operand:
        """Return values times block scales, and the tensor's scale. A columnwise copy may be Hadamard-transformed."""
        packed, scale, block, _, amax, _ = self.blocks(columnwise)
        assert amax is not None
        values = unpack_rows(packed) if columnwise else unpack(packed)
        rows, columns = values.shape[::-1] if columnwise else values.shape
        scale = scale[:rows, : columns // BLOCK].view(torch.float8_e4m3fn).float()
        values = scale_blocks_(values, scale.t() if columnwise else scale, block)
        # A division by a Python number would be a product on a GPU.
        return Operand(values, amax / torch.full_like(amax, TOP), narrow=True)

    def blocks(self, columnwise: bool) -> BlockScaled:
        data, scale, amax = self._copy(columnwise)
        data, block = (
            (rows_first(data), (BLOCK, 1)) if columnwise else (as_matrix(data), (1, BLOCK))
        )
        return BlockScaled(data, scale, block=block, dtype=self._fp4_dtype, amax=amax, top=TOP)

    def _high_precision(self, dtype: torch.dtype | None) -> Tensor:
        line = "only the rowwise NVFP4 copy has a dequantize, as in Transformer Engine: quantize with rowwise=True"
        require(self._rowwise_data is not None, line, NotImplementedError)
        return super()._high_precision(dtype)


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """`NVFP4TensorStorage` as a tensor."""


class NVFP4Quantizer(Quantizer):
    """Blocks of 16 elements, or 16x16 with `with_2d_quantization`.

    `with_rht` transforms the columnwise copy; `stochastic_rounding` draws from `generator` (None: the global generator
    of the device).
    """

    _tensor_class = NVFP4Tensor
    scheme = "NVFP4BlockScaling"
    _multiple = BLOCK

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: ProcessGroup | None = None,
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
        """Accept Transformer Engine's arguments, and `generator`."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        line = "row_scaled_nvfp4 and nvfp4_use_4over6 are not emulated: leave them out"
        require(not (row_scaled_nvfp4 or nvfp4_use_4over6), line, NotImplementedError)
        self.dtype = DType.cast(fp4_dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.with_random_sign_mask = with_random_sign_mask
        self.generator = generator

    def _encode(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> StorageFields:
        x = as_matrix(tensor)
        shape = tensor.shape
        copies = self._fused if fused.active(x) else self._plain
        row, row_scale, row_amax, column, column_scale, column_amax = copies(x, rowwise, columnwise)
        if len(shape) != 2:
            if rowwise:
                row = row.view(*shape[:-1], shape[-1] // 2)
            if columnwise:
                column = column.view(*shape[:-2], shape[-2] // 2, shape[-1])
        fields: StorageFields = {"fp4_dtype": self.dtype}
        if rowwise:
            fields |= {
                "rowwise_data": row,
                "rowwise_scale_inv": row_scale,
                "amax_rowwise": row_amax,
            }
        if columnwise:
            fields |= {"columnwise_data": rows_last(column), "columnwise_scale_inv": column_scale}
            fields["amax_columnwise"] = column_amax
        return fields

    def _plain(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple[Tensor, ...]:
        """Return data, scale bytes and amax of x `[M, K]`, rowwise, data `[M, K/2]`, and columnwise, `[M/2, K]`."""
        block_rows = BLOCK if self.with_2d_quantization else 1
        row = column = (x,) * 3  # a copy that was not asked for may be anything
        rowwise_parts = self._cast_blocks(x, (block_rows, BLOCK)) if rowwise else None
        if rowwise_parts is not None:
            data, scale, amax = rowwise_parts
            row = pack(data), pad_to(scale.repeat_interleave(block_rows, 0), 128, 4), amax
        if columnwise:
            # Whether both copies hold the same values.
            same = self.with_2d_quantization and not (self.with_rht or self.stochastic_rounding)
            data, scale, amax = (same and rowwise_parts) or self._cast_blocks(
                self._transformed(x), (BLOCK, block_rows)
            )
            # The amax is a tensor of its own, as in Transformer Engine.
            column = (
                pack_rows(data),
                pad_to(scale.repeat_interleave(block_rows, 1).t(), 128, 4),
                amax.clone(),
            )
        return *row, *column

    def _fused(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple[Tensor, ...]:
        """Return what `_plain` returns, from the kernels; a copy that was not asked for is empty."""
        t = self._transformed(x) if columnwise else x
        both = rowwise and t is not x
        amax = fused.amax(x if rowwise else t, t if both else None, nan=True)
        if self.with_amax_reduction:
            amax = amax.amax(-1, keepdim=True)
            all_reduce_max(amax, self.amax_reduction_group)
        noise = None
        if self.stochastic_rounding:
            noise = _random_words(x.numel(), rowwise + columnwise, self.generator, x.device)
        return fused.cast_nvfp4(x, t, amax, noise, self.with_2d_quantization, rowwise, columnwise)

    def _transformed(self, x: Tensor) -> Tensor:
        """Transform each 16 elements of the columns of x `[M, K]`, in the dtype of x."""
        if not self.with_rht:
            return x
        if device_type(x) != "cpu":
            return _transform(x, self.with_random_sign_mask)
        # In FP32, because a processor without BF16 instructions takes 20 times as long for BF16.
        tiles = (x[rows].float() for rows in casts.row_tiles(x, BLOCK))
        return torch.cat(
            [_transform(tile, self.with_random_sign_mask).to(x.dtype) for tile in tiles]
        )

    def _cast_blocks(self, x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return E2M1 data `[M, K]` of x `[M, K]`, one scale byte per block, and the amax `[1]`."""
        # Two levels of scales: one FP32 factor for the tensor brings the block scales into the range of E4M3.
        largest = _block_amax(x, block)
        amax = largest.amax().reshape(1) if largest.numel() else largest.new_zeros(1)
        if self.with_amax_reduction:
            all_reduce_max(amax, self.amax_reduction_group)
        whole = _global_scale(amax)
        # Times 1/6 as FP32 has it, like the kernels: a division by 6 would round otherwise.
        sixth = torch.ones_like(whole).div_(FP4_MAX)
        scale = (largest * (whole * sixth)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
        # With the scale as it was rounded, so that the block is divided by what it will be multiplied with.
        data = _round_blocks(
            x, _multiplier(scale, whole), block, self.stochastic_rounding, self.generator
        )
        return data, scale.view(torch.uint8), amax
