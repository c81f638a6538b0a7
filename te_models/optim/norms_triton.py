"""The norms of many tensors in two kernels, which read every element once at the speed of a copy."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.optim.tensor_blocks import TensorBlocks, aligned

# Elements whose squares a program sums, 64 bytes of BF16 per thread, and its warps. Not timed yet.
BLOCK = 8192
WARPS = 8
# Sums of blocks that a program adds at a time.
SUMS = 1024


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, FP32 [tensors], summed in FP32.

    Args:
        tensors: on one CUDA device, of any shapes and floating-point dtypes.
    """
    flat = [tensor.contiguous() for tensor in tensors]
    # Their places, by what a launch has in common.
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for place, tensor in enumerate(flat):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, aligned([tensor])), []).append(place)
    norms = [tensors[0].new_zeros((), dtype=torch.float32)] * len(tensors)
    for (_, in_vectors), places in kinds.items():
        found = _norms_of_one_kind([flat[place] for place in places], in_vectors)
        if len(places) == len(tensors):
            return found
        for place, norm in zip(places, found.unbind(), strict=True):
            norms[place] = norm
    return torch.stack(norms)


def _norms_of_one_kind(tensors: list[Tensor], in_vectors: bool) -> Tensor:
    """Return the norms of contiguous tensors of one dtype, FP32 [tensors]; `in_vectors` says that all are aligned."""
    first = tensors[0]
    blocks = _blocks(tuple(tensor.numel() for tensor in tensors), first.device)
    sums = first.new_empty(blocks.programs, dtype=torch.float32)
    norms = first.new_empty(len(tensors), dtype=torch.float32)
    with torch.cuda.device_of(first):
        _squares_kernel[(blocks.programs,)](
            x=first,
            places=blocks.places([[tensor] for tensor in tensors]),
            counts=blocks.counts,
            begins=blocks.begins,
            owners=blocks.owners,
            sums=sums,
            ALIGNED=in_vectors,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        _norm_kernel[(len(tensors),)](
            sums=sums,
            counts=blocks.counts,
            begins=blocks.begins,
            norms=norms,
            BLOCK=BLOCK,
            SUMS=SUMS,
        )
    return norms


@functools.lru_cache(
    maxsize=16
)  # a step uses the same parameters as the last one, but for its experts
def _blocks(sizes: tuple[int, ...], device: torch.device) -> TensorBlocks:
    return TensorBlocks(sizes, BLOCK, device)


@triton.jit
def _squares_kernel(
    x,
    places,
    counts,
    begins,
    owners,
    sums,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the sum of the squares of each block."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    count = tl.load(counts + tensor)
    begin = tl.load(places + tensor)
    if ALIGNED:
        # Promises to the compiler, which then loads 16 bytes at a time.
        count = tl.multiple_of(count, 16)
        begin = tl.multiple_of(begin, 8)
    at = (program - tl.load(begins + tensor)) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + begin + at, at < count, 0.0).to(tl.float32)
    tl.store(sums + program, tl.sum(value * value))


@triton.jit
def _norm_kernel(sums, counts, begins, norms, BLOCK: tl.constexpr, SUMS: tl.constexpr):
    """Store the root of the sum over the blocks of each tensor."""
    tensor = tl.program_id(0)
    begin = tl.load(begins + tensor)
    blocks = tl.cdiv(tl.load(counts + tensor), BLOCK)
    total = tl.zeros([SUMS], tl.float32)
    for first in range(0, blocks, SUMS):
        at = first + tl.arange(0, SUMS)
        total += tl.load(sums + begin + at, at < blocks, 0.0)
    tl.store(norms + tensor, tl.sqrt_rn(tl.sum(total)))
