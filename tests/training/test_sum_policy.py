"""The dtype in which FSDP2 sums gradients, by the number of processes that it sums over."""

from typing import Any

import pytest
import torch
from tiny_runs import tiny_model

from te_models.config.training import TrainConfig
from te_models.training.parallel import Parallel, sum_policy


def policy(
    processes: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> torch.dtype | None:
    """The dtype of a tiny model's sums; None: the gradients' own."""
    config = TrainConfig(parallel="fsdp", **options)
    model = tiny_model().to(dtype)
    shared = Parallel(device=torch.device(device), config=config)
    return sum_policy(model, shared, processes).reduce_dtype


def test_the_sum_of_two_bf16_gradients_is_not_sent_in_fp32() -> None:
    """With more processes or micro-batches FP32 loses less; a CPU's gloo and other dtypes keep it."""
    fp32 = torch.float32
    assert policy(2) is None and policy(1) is None
    assert policy(3) == policy(4) == fp32
    assert policy(2, gradient_accumulation=2) == policy(1, gradient_accumulation=2) == fp32
    assert policy(2, dtype=fp32) == policy(2, device="cpu") == fp32


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float8", None)])
def test_what_the_user_chose_stays(name: str, dtype: torch.dtype | None) -> None:
    """Values that were sent in FP8 are added in FP32."""
    assert policy(2, reduce_dtype=name) == policy(4, reduce_dtype=name) == (dtype or torch.float32)


def test_a_sum_of_two_is_rounded_once_either_way() -> None:
    """All exponents of the smaller gradient beside the larger one, and all last bits."""
    g = torch.Generator().manual_seed(0)
    a = torch.rand(4096, 1, generator=g).add(1).bfloat16()
    b = (torch.rand(1, 40, generator=g) + 1).mul(2.0 ** -torch.arange(40.0)).bfloat16()
    for other in (b, -b):
        exact = a.double() + other.double()  # 53 bits hold every sum
        through = (a.float() + other.float()).bfloat16().double()
        # The distance to the exact sum is that of the nearest BF16 number.
        apart = (through - exact).abs()
        up = torch.nextafter(through.bfloat16(), torch.tensor(torch.inf).bfloat16()).double()
        down = torch.nextafter(through.bfloat16(), torch.tensor(-torch.inf).bfloat16()).double()
        assert (apart <= (up - exact).abs()).all() and (apart <= (down - exact).abs()).all()
