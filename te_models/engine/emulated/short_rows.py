"""Steps of generation on a CPU: without the zeros that would pad their few rows, and without waiting for threads."""

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from te_models.device.cpu_matmul import matmul
from te_models.device.cpu_threads import TOO_SMALL_TO_SHARE, one_thread, untracked_on_cpu
from te_models.device.measured import once
from te_models.numerics.quantizers import no_amax_recorded

# How `enough_rows` compares the product of many rows with products of few:
_MANY = 128  # the many rows
_MOST = 16  # from so many rows on, products have the bits of more: this is not measured
_DRAWN = 1024  # outputs of the weight that are drawn; a wider one repeats them
_COMPARED = 2**16  # numbers that are compared: sums in another order may agree by chance
# The number of rows that zeros would pad the rows of this pass to (`short_rows`).
_MULTIPLE: ContextVar[int] = ContextVar("short_rows", default=1)


@once
def enough_rows(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, columns: bool, threads: int
) -> int:
    """Return the number of rows, `rows` or somewhat more, whose product with a weight has the bits of many rows.

    Fewer rows may take another way through a CPU's library, in which sums differ in the last bit. From how many on they
    do not depends on the CPU, the shape [outputs, inputs] of the weight and its layout: with `columns` it is contiguous
    as [inputs, outputs], for which two or four often suffice where the other layout needs 16. 0: no few rows do.
    """
    # So many are taken to have the bits of more; only the other layout is always measured.
    if rows >= _MOST and not columns:
        return rows
    with _disable_current_modes():  # which record or count the step's operations
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(n, inputs, generator=generator).to(dtype)
            for n in (_MANY, min(outputs, _DRAWN))
        )
        # The way that a library takes depends on the shape, not on the values: drawing 128k rows would cost seconds.
        weight = weight.repeat(-(-outputs // _DRAWN), 1)[:outputs]
        many = matmul(x, weight.t())
        right = weight.t().contiguous() if columns else weight.t()
        counts = [rows]
        for power in range(_MOST.bit_length()):
            if 2**power > rows:
                counts.append(2**power)
        for count in counts:
            parts = max(1, min(_MANY, _COMPARED // outputs) // count)
            pairs = list(zip(x.split(count), many.split(count), strict=True))[:parts]
            if all(torch.equal(matmul(part, right), expected) for part, expected in pairs):
                return count
    return 0


class _Sizes(NamedTuple):
    """The sizes of a model that decide how its steps of generation run."""

    largest_weight: int  # elements
    norm_rows: int  # the multiple of rows that tells a norm of few rows which kernel it would have with all of them
    divided: bool  # under tensor parallelism, whose ranks exchange whole multiples of rows


_SIZES: weakref.WeakKeyDictionary[nn.Module, _Sizes] = weakref.WeakKeyDictionary()


def _sizes(model: nn.Module) -> _Sizes:
    """Return the sizes of a model, whose modules are searched once: a step of generation takes milliseconds."""
    sizes = _SIZES.get(model)
    if sizes is None:
        modules: list[Any] = list(model.modules())
        sizes = _SIZES[model] = _Sizes(
            largest_weight=max(parameter.numel() for parameter in model.parameters()),
            norm_rows=max(getattr(module, "row_multiple", 1) for module in modules),
            divided=any(getattr(module, "tp_size", 1) > 1 for module in modules),
        )
    return sizes


@contextlib.contextmanager
def row_padding(model: nn.Module, tokens: Tensor, multiple: int) -> Iterator[int]:
    """Surround a forward pass of a model over `tokens` [B, S, ...]; yield the multiple to pad its rows B * S to.

    A recipe pads rows to `multiple`, up to 128. A step of generation has one row per text, so the modules take its rows
    as if the zeros were there (`short_rows`), and its small products run on one thread. A pass on another device, with
    a backward or under a compiler is padded as the recipe says.
    """
    if not untracked_on_cpu(tokens):
        yield multiple
        return
    rows = tokens.shape[:2].numel()
    sizes = _sizes(model)
    with one_thread(rows * sizes.largest_weight <= TOO_SMALL_TO_SHARE):
        # Nothing to gain, or ranks that must agree on the rows.
        if rows >= multiple or sizes.norm_rows >= multiple or sizes.divided:
            yield multiple
        else:
            with short_rows(multiple):
                yield sizes.norm_rows


@contextlib.contextmanager
def short_rows(multiple: int) -> Iterator[None]:
    """Inside, te modules take rows as if zeros followed them up to `multiple`, with the same results.

    No pass has a backward, and none records an amax.
    """
    token = _MULTIPLE.set(multiple)
    try:
        with no_amax_recorded():
            yield
    finally:
        _MULTIPLE.reset(token)


def are_short() -> bool:
    """Return whether `short_rows` is around the caller."""
    return _MULTIPLE.get() > 1


def full_rows(rows: int) -> int:
    """Return the rows that `rows` stand for."""
    multiple = _MULTIPLE.get()
    return -(-rows // multiple) * multiple


def multiply(x: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `matmul`; inside `short_rows` the bits are those that the rows have among many."""
    # No compiler traces the variable.
    if torch.compiler.is_compiling() or not are_short() or not len(x):
        return matmul(x, right, bias)
    rows = len(x)
    inputs, outputs = right.shape
    # Positional, since `once` keeps results by these arguments: dtype, layout of the weight, threads.
    enough = enough_rows(
        rows, inputs, outputs, x.dtype, right.is_contiguous(), torch.get_num_threads()
    )
    if not enough:
        enough = max(rows, _MOST)
    if enough == rows:
        return matmul(x, right, bias)
    # Repeating the rows is faster than appending zeros.
    return matmul(torch.cat((x,) * -(-enough // rows))[:enough], right, bias)[:rows]
