"""Threads of a CPU's products."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# Multiply-adds of a product, some 0.3 ms on one core, up to which threads cost more in waiting for each other than they
# save: beside other work one of them may not run for milliseconds, and a token takes dozens of products.
TOO_SMALL_TO_SHARE = 2**24


def untracked_on_cpu(tokens: Tensor) -> bool:
    """Return whether a pass over `tokens` on a CPU needs no graph, for a backward or of a compiler."""
    return (
        tokens.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


@contextlib.contextmanager
def one_thread(small: bool) -> Iterator[None]:
    """Inside, if `small`, run the operations of the calling thread without help from others.

    PyTorch stores the number per thread and restores it here on exit, so other threads that already run operations keep
    theirs. A thread whose first operation falls inside starts with one, as it does after torch.set_num_threads(1).
    """
    if not small or torch.compiler.is_compiling() or torch.get_num_threads() == 1:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
