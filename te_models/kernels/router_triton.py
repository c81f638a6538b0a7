"""The choice of experts and the places of their rows in Triton: five small kernels in place of three sorts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.groups import Groups

TOKENS = 32  # of a program
# Of a program that sums up the counts of all blocks: blocks that it reads at a time, and its experts.
BLOCKS = 128
SUMMED_EXPERTS = 8
ROWS = 1024  # of a program that marks rows as padding


@triton.jit
def _choose_kernel(
    # FP32 [tokens, count]; bool [tokens] or None; int64 [tokens, k]
    scores,
    real,
    out,
    # sizes: tokens, experts, and experts of a token
    tokens,
    count,
    k,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the k experts of the highest scores of each token to `out`, in descending order."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    inside = (t < tokens)[:, None] & (e < count)[None, :]
    value = tl.load(scores + t[:, None] * count + e[None, :], inside, float("-inf"))
    value = tl.where(value == value, value, float("inf"))  # NaN comes first
    # [TOKENS, EXPERTS]: the experts that a token has not chosen yet.
    free = (e < count)[None, :] & (t[:, None] >= 0)
    for _ in range(k):
        remaining = tl.where(free, value, float("-inf"))
        best = free & (remaining == tl.max(remaining, 1)[:, None])
        # Of equal scores the expert with the lowest number.
        first = tl.min(tl.where(best, e[None, :], EXPERTS), 1)
        free = free & (e[None, :] != first[:, None])
    chosen = (e < count)[None, :] & (free == 0)
    place = k - tl.cumsum(chosen.to(tl.int32), 1)  # in descending order
    experts = e[None, :] + tl.zeros([TOKENS, EXPERTS], tl.int64)
    if real is not None:
        # Padding gets no expert: the number behind the last.
        is_real = tl.load(real + t, t < tokens, 0) != 0
        experts = tl.where(is_real[:, None], experts, count)
    tl.store(out + t[:, None] * k + place, experts, chosen & (t < tokens)[:, None])


@triton.jit
def _count_kernel(chosen, counts, tokens, count, k, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Write the rows of each expert in each block of TOKENS tokens to `counts`, int32 [blocks, count]."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    per_token = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for j in range(k):
        expert = tl.load(chosen + t * k + j, t < tokens, count)
        per_token += (expert[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * count + e, tl.sum(per_token, 0), e < count)


@triton.jit
def _before_kernel(
    # of each block of tokens, int32 [blocks, E]: becomes the rows of the blocks before it
    counts,
    # of all blocks, int64 [E]
    total,
    blocks,
    count,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Replace the counts of each block of tokens by the sums of the blocks before; write the sums of all blocks."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        inside = (block < blocks)[:, None] & (e < count)[None, :]
        at = counts + block[:, None] * count + e[None, :]
        rows = tl.load(at, inside, 0)
        tl.store(at, before[None, :] + tl.cumsum(rows, 0) - rows, inside)
        before += tl.sum(rows, 0)
    tl.store(total + e, before.to(tl.int64), e < count)


@triton.jit
def _padding_kernel(
    # tokens of each expert, int64 [E], and where its rows begin, int64 [E + 1]
    counts,
    first,
    token,
    tokens,
    count,
    most,
    alignment,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Mark all rows as padding: as token T where experts have rows, as token T + 1 behind the last expert's rows."""
    e = tl.arange(0, EXPERTS)
    rows = tl.load(counts + e, e < count, 0)
    ends = tl.cumsum((rows + alignment - 1) // alignment * alignment, 0)
    if tl.program_id(0) == 0:
        tl.store(first + e, tl.zeros_like(ends), e == 0)
        tl.store(first + 1 + e, ends, e < count)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    behind = (row >= tl.max(ends, 0)).to(tl.int64)
    tl.store(token + row, tokens + behind, row < most)


@triton.jit
def _place_kernel(
    # experts of the tokens, int64 [tokens, k]; an expert's rows in earlier blocks, int64 [blocks, count]
    chosen,
    before,
    # where each expert begins, int64 [count + 1]
    first,
    # results: the token of each row [most], and the rows of each token [tokens, k]
    token,
    row,
    # sizes: tokens, experts, experts of a token, and rows
    tokens,
    count,
    k,
    most,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Give each token a row of each of its experts, in the order of the tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    counts = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for j in range(k):
        expert = tl.load(chosen + t * k + j, t < tokens, count)
        counts += (expert[:, None] == e[None, :]).to(tl.int32)
    begin = tl.load(first + e, e < count, 0)
    begin += tl.load(before + tl.program_id(0) * count + e, e < count, 0)
    # The expert's rows before this token: rows of earlier programs, and of earlier tokens of this program.
    place = begin[None, :] + tl.cumsum(counts, 0) - counts
    for j in range(k):
        expert = tl.load(chosen + t * k + j, t < tokens, count)
        has_row = (t < tokens) & (expert < count)
        at = tl.sum(tl.where(expert[:, None] == e[None, :], place, 0), 1)
        tl.store(row + t * k + j, tl.where(has_row, at, most), t < tokens)
        tl.store(token + at, t, has_row)


def choose(scores: Tensor, k: int, real: Tensor | None) -> Tensor:
    """Return the k experts of the highest scores FP32 [T, E], int64 [T, k], in descending order; see router.choose.

    `real` bool [T, 1] is False at padding, which gets E.
    """
    tokens, count = scores.shape
    out = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    if tokens:
        with torch.cuda.device_of(out):
            _choose_kernel[(triton.cdiv(tokens, TOKENS),)](
                scores=scores.contiguous(),
                real=real,
                out=out,
                tokens=tokens,
                count=count,
                k=k,
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
    # Rows of each expert in each block, then in all blocks before it.
    of_blocks = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int64, device=device)
    first = torch.empty(experts + 1, dtype=torch.int64, device=device)
    row = torch.empty(tokens, k, dtype=torch.int64, device=device)
    token = torch.empty(most, dtype=torch.int64, device=device)
    chosen = chosen.contiguous()
    summed_experts = min(SUMMED_EXPERTS, size)
    with torch.cuda.device_of(row):
        _count_kernel[(blocks,)](
            chosen=chosen,
            counts=of_blocks,
            tokens=tokens,
            count=experts,
            k=k,
            **sizes,
        )
        _before_kernel[(triton.cdiv(experts, summed_experts),)](
            counts=of_blocks,
            total=counts,
            blocks=blocks,
            count=experts,
            BLOCKS=BLOCKS,
            EXPERTS=summed_experts,
            num_warps=4,
        )
        _padding_kernel[(max(1, triton.cdiv(most, ROWS)),)](
            counts=counts,
            first=first,
            token=token,
            tokens=tokens,
            count=experts,
            most=most,
            alignment=alignment,
            EXPERTS=size,
            ROWS=ROWS,
            num_warps=4,
        )
        _place_kernel[(blocks,)](
            chosen=chosen,
            before=of_blocks,
            first=first,
            token=token,
            row=row,
            tokens=tokens,
            count=experts,
            k=k,
            most=most,
            **sizes,
        )
    return token, row, Groups(first, most), counts
