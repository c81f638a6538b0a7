"""The choice of experts and the places of their rows in Triton: three small kernels in place of three sorts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.groups import Groups

TOKENS = 32  # of a program


@triton.jit
def _choose_kernel(
    scores, real, out, tokens, count, k, EXPERTS: tl.constexpr, TOKENS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    inside = (t < tokens)[:, None] & (e < count)[None, :]
    value = tl.load(scores + t[:, None] * count + e[None, :], inside, float("-inf"))
    value = tl.where(value == value, value, float("inf"))  # NaN comes first
    # [TOKENS, EXPERTS], of both: experts that no token has chosen yet.
    free = (e < count)[None, :] & (t[:, None] >= 0)
    for _ in range(k):
        left = tl.where(free, value, float("-inf"))
        best = free & (left == tl.max(left, 1)[:, None])
        # Of equal scores the expert with the lowest number.
        first = tl.min(tl.where(best, e[None, :], EXPERTS), 1)
        free = free & (e[None, :] != first[:, None])
    chosen = (e < count)[None, :] & (free == 0)
    place = k - tl.cumsum(chosen.to(tl.int32), 1)  # in descending order
    experts = e[None, :] + tl.zeros([TOKENS, EXPERTS], tl.int64)
    if real is not None:
        # Padding gets no expert: the number behind the last.
        there = tl.load(real + t, t < tokens, 0) != 0
        experts = tl.where(there[:, None], experts, count)
    tl.store(out + t[:, None] * k + place, experts, chosen & (t < tokens)[:, None])


@triton.jit
def _count_kernel(chosen, counts, tokens, count, k, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    per_token = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for j in range(k):
        one = tl.load(chosen + t * k + j, t < tokens, count)
        per_token += (one[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * count + e, tl.sum(per_token, 0), e < count)


@triton.jit
def _place_kernel(
    chosen,
    before,
    first,
    token,
    row,
    tokens,
    count,
    k,
    most,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    counts = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for j in range(k):
        one = tl.load(chosen + t * k + j, t < tokens, count)
        counts += (one[:, None] == e[None, :]).to(tl.int32)
    begin = tl.load(first + e, e < count, 0)
    begin += tl.load(before + tl.program_id(0) * count + e, e < count, 0)
    # The expert's rows before this token: rows of earlier programs, and of earlier tokens of this program.
    place = begin[None, :] + tl.cumsum(counts, 0) - counts
    for j in range(k):
        one = tl.load(chosen + t * k + j, t < tokens, count)
        there = (t < tokens) & (one < count)
        at = tl.sum(tl.where(one[:, None] == e[None, :], place, 0), 1)
        tl.store(row + t * k + j, tl.where(there, at, most), t < tokens)
        tl.store(token + at, t, there)


def choose(scores: Tensor, k: int, real: Tensor | None) -> Tensor:
    """Return the k experts of the highest scores FP32 [T, E], int64 [T, k], in descending order; see router.choose.

    `real` bool [T, 1] is False at padding, which gets E.
    """
    tokens, count = scores.shape
    out = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    if tokens:
        with torch.cuda.device_of(out):
            _choose_kernel[(triton.cdiv(tokens, TOKENS),)](
                scores.contiguous(),
                real,
                out,
                tokens,
                count,
                k,
                EXPERTS=triton.next_power_of_2(count),
                TOKENS=TOKENS,
                num_warps=4,
            )
    return out


def places(
    chosen: Tensor, experts: int, alignment: int, most: int
) -> tuple[Tensor, Tensor, Groups, Tensor]:
    """Return the fields of router.Places for chosen [T, k], of which a token names none twice, with `most` rows."""
    tokens, k = chosen.shape
    device = chosen.device
    blocks = max(1, triton.cdiv(tokens, TOKENS))
    size = triton.next_power_of_2(experts)
    sizes = dict(EXPERTS=size, TOKENS=TOKENS, num_warps=4)
    of_blocks = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    row = torch.empty(tokens, k, dtype=torch.int64, device=device)
    token = torch.full((most,), tokens, device=device)
    chosen = chosen.contiguous()
    with torch.cuda.device_of(row):
        _count_kernel[(blocks,)](chosen, of_blocks, tokens, experts, k, **sizes)
        # Rows of an expert in all blocks up to each: a kernel for counts, one for places, and this sum between them.
        up_to = of_blocks.cumsum(0)  # int64
        counts = up_to[-1].clone()
        first = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        padded = (counts + alignment - 1) // alignment * alignment
        torch.cumsum(padded, 0, out=first[1:])
        # Behind the last expert's rows a number more.
        token += torch.arange(most, device=device) >= first[-1]
        _place_kernel[(blocks,)](
            chosen, up_to - of_blocks, first, token, row, tokens, experts, k, most, **sizes
        )
    return token, row, Groups(first, most), counts
