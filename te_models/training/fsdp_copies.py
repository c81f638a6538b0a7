"""FSDP2's copies between one buffer and many tensors, in a form that a CUDA graph can replay."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def no_host_copies() -> Iterator[None]:
    """Inside, FSDP2 copies between one buffer and many tensors by kernels that a graph can hold, in place of its own.

    FSDP2's kernels read the tensors' addresses from host memory that has been reused by the time of a replay. The ones
    here take the addresses of many tensors as arguments. FSDP2 finds its kernels in torch.ops.fsdp at each
    call. A TorchDispatchMode could replace them, too, but inside one TorchDynamo gives up each compiled function that
    is called, for the rest of the process.
    """
    operations: Any = torch.ops.fsdp
    before = operations.split_with_sizes_copy, operations.chunk_cat
    operations.split_with_sizes_copy = _split
    operations.chunk_cat = _chunk_cat
    try:
        yield
    finally:
        operations.split_with_sizes_copy, operations.chunk_cat = before


def _split(source: Tensor, sizes: list[int], dim: int = 0, *, out: list[Tensor]) -> None:
    """Copy the pieces of `source` [n, ...] of these sizes along dimension 1 into the tensors `out`."""
    assert dim == 1
    # Row by row, since the kernel for many copies takes contiguous tensors.
    sources = []
    targets = []
    for piece, tensor in zip(source.split(sizes, dim), out, strict=True):
        sources += piece.unbind()
        targets += tensor.unbind()
    _copy_many(targets, sources)


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """Split the rows of each tensor into `num_chunks` chunks, padded with zeros; row i of `out` gets all chunks i."""
    assert dim == 0
    first = 0
    sources = []
    targets = []
    for tensor in tensors:
        # Rounded up, as torch.chunk does it: the last chunk may be shorter, and some may be missing.
        rows = -(-tensor.shape[0] // num_chunks)
        size = rows * tensor[0].numel()
        # Only then is there padding; otherwise the copies below fill every element.
        if tensor.shape[0] % num_chunks:
            out[:, first : first + size].zero_()
        # Not strict: a tensor of few rows has fewer chunks than `out` has rows, and those stay zeros.
        for row, chunk in zip(out, tensor.split(rows), strict=False):
            sources.append(chunk.flatten())
            targets.append(row[first : first + chunk.numel()])
        first += size
    _copy_many(targets, sources)


def _copy_many(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy contiguous tensors, in words of four bytes where both consist of them.

    A thread of the kernel copies four elements at a time, and 16 bytes are the fastest: 3.7 TB/s on an H200, where
    elements of 16 bits reach 3.0, and elements of 64 bits 3.15.
    """
    in_words: tuple[list[Tensor], list[Tensor]] = [], []
    others: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        wide = target.dtype == source.dtype and _has_words(target) and _has_words(source)
        if wide:
            in_words[0].append(target.view(torch.int32))
            in_words[1].append(source.view(torch.int32))
        else:
            others[0].append(target)
            others[1].append(source)
    for to, taken in (in_words, others):
        if to:
            torch._foreach_copy_(to, taken)


def _has_words(tensor: Tensor) -> bool:
    begin = tensor.storage_offset() * tensor.element_size()
    return begin % 4 == 0 and tensor.nbytes % 4 == 0
