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
def factor(weight, offset, channel, exists, zero_centered: tl.constexpr):
    """Load the factors of some channels of a norm in FP32."""
    factor = tl.load(weight + offset + channel, exists, 0.0).to(tl.float32)
    return factor + 1 if zero_centered else factor


@triton.jit
def opening_of(logit, squashed, softplus: tl.constexpr):
    """Return the factor of a gate, of FP32 logits and their sigmoid."""
    factor = squashed
    if softplus:
        factor = tl.maximum(logit, 0.0) + tl.log(1 + tl.exp(-tl.abs(logit)))
    return factor


@triton.jit
def opening_slope(squashed, softplus: tl.constexpr):
    """Return the derivative of `opening_of`, of the sigmoid of the logits."""
    slope = squashed
    if not softplus:
        slope = squashed * (1 - squashed)
    return slope


def width_of(dim: int) -> int:
    """Return the channels of a tile."""
    return triton.next_power_of_2(dim)


def rotation_tables(
    rotation: Rotation | None,
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int]]:
    """Return cos and sin, or None for both, and the strides of their rows and places."""
    if rotation is None:
        return (None, None), (0, 0)
    cos = rotation.cos.contiguous()
    sin = rotation.sin.contiguous()
    per_row = cos.ndim == 3 and len(cos) > 1
    return (cos, sin), (cos.stride(0) if per_row else 0, cos.stride(-2))


def head_tiles(dim: int, rotation: Rotation | None) -> dict[str, int | bool]:
    """Return the keywords of a kernel that tell a head's tiles."""
    half = (dim if rotation is None else rotation.cos.shape[-1]) // 2
    return dict(
        dim=dim,
        half=half,
        interleaved=rotation is not None and rotation.interleaved,
        width=width_of(half),
        rest=width_of(max(1, dim - 2 * half)),
    )


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
