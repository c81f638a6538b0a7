"""Parts of the Triton kernels around attention: the tiles of a head, rotary tables, the factor of the gate."""

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.attention_parts import Rotation


@triton.jit
def members(pair, half: tl.constexpr, interleaved: tl.constexpr):
    """Return the channels of a head that are the first and second members of some of its pairs."""
    if interleaved:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half
    return first, second


@triton.jit
def pairs(half: tl.constexpr, width: tl.constexpr, interleaved: tl.constexpr):
    """Return the pairs [width] of a head, and its channels that are their first and second members."""
    pair = tl.arange(0, width)
    first, second = members(pair, half, interleaved)
    return pair, first, second


@triton.jit
def norm_factor(weight, offset, channel, exists, zero_centered: tl.constexpr):
    """Return the factors of some channels after a norm, in FP32: 1 + weight if zero_centered.

    `offset` is where the head's channels begin in the weight, and 0 where all heads share one weight [H].
    """
    gamma = tl.load(weight + offset + channel, exists, 0.0).to(tl.float32)
    return gamma + 1 if zero_centered else gamma


@triton.jit
def gate_factor(logit, sigma, softplus: tl.constexpr):
    """Return the factor of a gate with FP32 logits: `sigma`, which is their sigmoid, or softplus(logit)."""
    factor = sigma
    if softplus:
        factor = tl.maximum(logit, 0.0) + tl.log(1 + tl.exp(-tl.abs(logit)))
    return factor


@triton.jit
def gate_factor_slope(sigma, softplus: tl.constexpr):
    """Return the derivative of `gate_factor` by the logit, from `sigma`, the sigmoid of the logit."""
    slope = sigma
    if not softplus:
        slope = sigma * (1 - sigma)
    return slope


def width_of(dim: int) -> int:
    """Return the width of a tile that holds `dim` channels: Triton's tensors have powers of two."""
    return triton.next_power_of_2(dim)


def rotation_tables(
    rotation: Rotation | None,
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int]]:
    """Return (cos, sin), or None for both, and the strides (per row of the batch, per token) of these tables."""
    if rotation is None:
        return (None, None), (0, 0)
    cos = rotation.cos.contiguous()
    sin = rotation.sin.contiguous()
    per_row = cos.ndim == 3 and len(cos) > 1
    return (cos, sin), (cos.stride(0) if per_row else 0, cos.stride(-2))


def head_tiles(dim: int, rotation: Rotation | None) -> dict[str, int | bool]:
    """Return the arguments of a kernel that describe the tiles of a head.

    dim: channels of a head; half: pairs that turn; interleaved: whether pairs are neighbors; width and rest: powers of
    two from the pairs on, and from the channels on that do not turn.
    """
    half = (dim if rotation is None else rotation.cos.shape[-1]) // 2
    return dict(
        dim=dim,
        half=half,
        interleaved=rotation is not None and rotation.interleaved,
        width=width_of(half),
        rest=width_of(max(1, dim - 2 * half)),
    )


def strides_of(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of each tensor [B, S, heads, H] in elements, as kernels name them: x_batch, x_seq, x_head."""
    strides = {}
    for name, tensor in tensors.items():
        strides[f"{name}_batch"] = tensor.stride(0)
        strides[f"{name}_seq"] = tensor.stride(1)
        strides[f"{name}_head"] = tensor.stride(2)
    return strides


HEADS = 8  # heads per program


@triton.jit
def heads_of_token(seq, heads, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """Return this program's token, row, place, heads [block, 1], channels [1, width], and which of them exist."""
    token = tl.program_id(0)
    row, place = row_and_place(token, seq)
    head = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, width)[None, :]
    inside = (head < heads) & (channel < dim)
    return token.to(tl.int64), row, place, head, channel, inside


@triton.jit
def row_and_place(i, seq):
    """Return the rows of a batch in which tokens i are, and their places in them."""
    # A batch has fewer than 2**31 tokens, and a division of 64 bits takes some hundred instructions.
    i = i.to(tl.int32)
    return (i // seq).to(tl.int64), (i % seq).to(tl.int64)
