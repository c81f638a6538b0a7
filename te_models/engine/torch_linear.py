"""te.Linears for tools that look for torch.nn.Linear and pass on sequences, as peft's layers do."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from te_models.config.recipe import SCHEMES

# FP8 products take multiples of this many rows under every recipe.
ROWS = max(scheme.rows for scheme in SCHEMES.values())


class TorchLinear(nn.Linear):
    """A base of the class in each engine that is its te.Linear and a torch.nn.Linear at once.

    A missing bias is None, as in torch; in Transformer Engine it is an empty tensor.
    """

    @classmethod
    def of(cls, linear: nn.Module) -> TorchLinear:
        """Return a te.Linear as a module of this class, which takes its place: both have the same state."""
        twin = cls.__new__(cls)
        object.__setattr__(twin, "__dict__", linear.__dict__)
        if "bias" not in linear._parameters:
            twin.__dict__["bias"] = None
        return twin


def padded_product(
    linear: Callable[..., Tensor], x: Tensor, fp8: bool, *args: object, **options: object
) -> Tensor:
    """Return linear(x) of x [..., in]; with `fp8` on rows of zeros up to the multiple that every recipe takes."""
    if x.dim() == 2:
        return linear(x, *args, **options)
    count = x.shape[:-1].numel()
    rows = x.reshape(count, x.shape[-1])
    if fp8 and count % ROWS:
        rows = F.pad(rows, (0, 0, 0, -count % ROWS))
    out = linear(rows, *args, **options)
    # Of a slice, since the output of an autograd.Function that is a view itself cannot be changed in place.
    return out[:count].unflatten(0, x.shape[:-1])
