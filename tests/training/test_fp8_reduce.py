"""Gradients that FSDP2 sums over CPU processes with FP8 on the wire, against sums of numbers that PyTorch rounded."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from te_models.distributed.dtensor import local
from te_models.numerics.sent_blocks import pack, padded, sum_into
from te_models.training.fp8_reduce import FP8ReduceScatter

RANKS = 3
OUTPUTS, INPUTS = 7, 50  # no multiples of the ranks or of a block


def rounded(values: Tensor) -> Tensor:
    """Return values [n] rounded to E4M3 times the power of two that lets the largest of each 128 just fit."""
    out = torch.empty_like(values)
    for start in range(0, len(values), 128):
        block = values[start : start + 128].double()
        largest = block.abs().max().item()
        factor = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
        codes = (block / factor).to(torch.float8_e4m3fn)
        out[start : start + 128] = (codes.double() * factor).float()
    return out


def gradient(rank: int) -> Tensor:
    """Return the gradient of a rank's loss: [OUTPUTS, INPUTS], over many octaves."""
    generator = torch.Generator().manual_seed(rank)
    sizes = torch.exp2(torch.randn(OUTPUTS, INPUTS, generator=generator) * 6)
    return torch.randn(OUTPUTS, INPUTS, generator=generator) * sizes


def reduce(rank: int, folder: str) -> None:
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    unit = fully_shard(linear)
    unit.set_custom_reduce_scatter(FP8ReduceScatter())
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    # The gradient of sum(y * slope) for rows of the identity is slope's transpose.
    (linear(torch.eye(INPUTS)) * gradient(rank).t()).sum().backward()
    found = local(linear.weight.grad)
    rows = -(-OUTPUTS // RANKS)
    expected = torch.zeros(rows * INPUTS)
    for other in range(RANKS):
        whole = torch.zeros(rows * RANKS, INPUTS)
        whole[:OUTPUTS] = gradient(other)
        expected += rounded(whole[rows * rank : rows * (rank + 1)].reshape(-1))
    assert torch.equal(found, expected.view(rows, INPUTS)[: len(found)])
    dist.barrier()


def test_fsdp_sums_what_was_rounded_once(tmp_path: Path) -> None:
    run_ranks(reduce, tmp_path, RANKS)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_as_such(poison: float) -> None:
    x = torch.ones(2, 300)
    x[1, 130] = poison
    out = torch.empty(300)
    sum_into(out, pack(x))
    assert out[128:256].isnan().all()
    assert torch.equal(out[:128], torch.full((128,), 2.0)) and torch.equal(
        out[256:], torch.full((44,), 2.0)
    )


def test_a_message_has_a_byte_per_number_and_one_per_block() -> None:
    n = 16 * 2048
    message = pack(torch.randn(2, n))
    assert padded(n) == n
    assert message.nbytes == 2 * n * 129 / 128


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 3e38])
def test_extreme_blocks(size: float) -> None:
    """Zeros, subnormal numbers and the largest ones keep E4M3's precision, as far as FP32 has it."""
    x = torch.full((1, 128), size)
    out = torch.empty(128)
    sum_into(out, pack(x))
    assert out.tolist() == pytest.approx(x[0].tolist(), rel=2.0**-4, abs=2.0**-136)
