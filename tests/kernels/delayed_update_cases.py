"""The update of many scales, in every bit that of te_models.numerics.scale_rules.delayed_update.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch

from te_models.kernels.delayed_update_triton import update
from te_models.numerics.scale_rules import delayed_update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide", "ignore:invalid")
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "count"), [(1, 3), (2, 20), (130, 40), (257, 6)])
def test_the_bits_of_the_plain_update(length: int, count: int, algorithm: str) -> None:
    """With tensors that were not cast, amaxes of zero, infinity and NaN in a history, and several steps."""
    g = torch.Generator().manual_seed(length)
    history = torch.rand(length, count, generator=g).mul_(8).exp_()
    history[torch.rand(length, count, generator=g) < 0.3] = 0.0
    history[:, 0] = 0.0
    if length > 2:
        history[2, 1] = torch.inf
        history[1, 2] = torch.nan
        history[1:, 4] = 1e-45
    scale = torch.rand(count, generator=g)
    history, scale = history.to(DEVICE), scale.to(DEVICE)
    for _ in range(3):
        amax = torch.rand(count, generator=g).mul_(3)
        amax[torch.rand(count, generator=g) < 0.4] = 0.0
        amax[-1] = torch.inf
        amax = amax.to(DEVICE)
        wanted = delayed_update(history, scale, amax, algorithm=algorithm, margin=1, fp8_max=448.0)
        update(amax, history, scale, largest=224.0, most_recent=algorithm == "most_recent")
        for found, expected in zip((history, scale), wanted, strict=True):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        history[0, ::2] = 0.5  # what the casts of the next step raise
