"""The emulated engine with numbers that torch adds as it likes: a GPU's own order takes most of a tiny model's time."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import te_models.engine.emulated as emulated
from te_models.engine.emulated import rmsnorm


def reciprocal_rms(x: Tensor, wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)


def input_gradient(dy: Tensor, gamma: Tensor, x: Tensor, y_hat: Tensor, r: Tensor) -> Tensor:
    scaled = dy * gamma
    return (scaled - y_hat * (scaled * y_hat).mean(1, keepdim=True)).mul_(r)


def weight_gradient(dy: Tensor, x: Tensor, y_hat: Tensor) -> Tensor:
    return (dy * y_hat).sum(0)


PLAIN: tuple[Callable[..., Tensor], ...] = (reciprocal_rms, input_gradient, weight_gradient)
EXACT: tuple[Callable[..., Tensor], ...] = tuple(
    getattr(rmsnorm, function.__name__) for function in PLAIN
)


@contextlib.contextmanager
def numbers(products: int, norms: tuple[Callable[..., Tensor], ...]) -> Iterator[None]:
    with emulated.exact_gemm(products), pytest.MonkeyPatch.context() as patch:
        for function in norms:
            patch.setattr(rmsnorm, function.__name__, function)
        yield


def plain() -> contextlib.AbstractContextManager[None]:
    """Products and norms in the order of torch's own functions."""
    return numbers(0, PLAIN)


def exact() -> contextlib.AbstractContextManager[None]:
    """Norms, and products of usual sizes, as a GPU adds them."""
    return numbers(2**20, EXACT)
