"""Comparison of tensors bit for bit, with a message that says where they differ."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of the bits of a tensor, in hex digits."""
    return hashlib.sha256(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def assert_same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Fail unless both have the same names, and under each the same bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert_same_bits(name, tensor, other[name])


def assert_same_bits(name: str, a: Tensor, b: Tensor) -> None:
    """Fail unless `a` and `b` have one shape, one dtype and the same bits; NaNs and zeros of both signs count as bits.

    The message names the tensor, the first places where they differ with both values, and the largest difference.
    """
    for kind, one, other in (("shape", list(a.shape), list(b.shape)), ("dtype", a.dtype, b.dtype)):
        assert one == other, f"{name}: {kind} {one} against {other}"
    one, other = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    if one.numel() == 0:
        return
    size = one.element_size()
    different = (
        (one.reshape(-1).view(torch.uint8) != other.reshape(-1).view(torch.uint8))
        .view(-1, size)
        .any(1)
    )
    count = int(different.sum())
    if not count:
        return
    one, other = one.reshape(-1), other.reshape(-1)
    places = [
        f"[{', '.join(str(int(i)) for i in torch.unravel_index(place, a.shape))}] {one[place]!s} != {other[place]!s}"
        for place in different.nonzero()[:3, 0]
    ]
    largest = (one[different].double() - other[different].double()).abs().amax().item()
    raise AssertionError(
        f"{name}: {count} of {different.numel()} elements differ, by up to {largest:.3g}; first at {'; '.join(places)}"
    )
