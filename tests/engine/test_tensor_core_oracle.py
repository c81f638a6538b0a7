"""The emulated tensor cores beside the package mmaemu, which was compared with an H100 PCIe and an RTX 4060."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated.tensor_core import TENSOR_CORES, Factor, tensor_core_matmul
from te_models.errors import UsageError

mmaemu = pytest.importorskip("mmaemu")

FLOORS = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}


def numbers(rows: int, k: int, dtype: torch.dtype, spread: float, seed: int) -> Tensor:
    """FP8 numbers [rows, k] over many binades, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randn(rows, k, generator=generator) * spread)
    x[torch.rand(rows, k, generator=generator) < 0.1] = 0
    return x.clamp(-448, 448).to(dtype)


def product(a: Tensor, b: Tensor, promote: bool, gpu: str, splits: int = 1) -> Tensor:
    left = Factor.of(a.float(), FLOORS[a.dtype])
    right = Factor.of(b.float(), FLOORS[b.dtype])
    return tensor_core_matmul(left, right, promote, TENSOR_CORES[gpu], splits)


@settings(max_examples=40, deadline=None)
@given(
    gpu=st.sampled_from(list(TENSOR_CORES)),
    dtypes=st.tuples(st.sampled_from(list(FLOORS)), st.sampled_from(list(FLOORS))),
    k=st.sampled_from([16, 32, 48, 128, 144, 256, 528, 1024]),
    promote=st.booleans(),
    spread=st.floats(0, 5),
    seed=st.integers(0, 10_000),
)
def test_whole_products(
    gpu: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    k: int,
    promote: bool,
    spread: float,
    seed: int,
) -> None:
    a = numbers(5, k, dtypes[0], spread, seed)
    b = numbers(6, k, dtypes[1], spread, seed + 1)
    expected = mmaemu.accumulate(a, b, use_fast_accum=not promote, profile=gpu, splitk=1)
    assert torch.equal(product(a, b, promote, gpu), expected)


# Its recordings of split products are of E4M3 alone, as those of forward are.
@pytest.mark.filterwarnings("ignore:mmaemu split-K")
@settings(max_examples=40, deadline=None)
@given(
    k=st.sampled_from([256, 384, 640, 1024, 1040, 2048]),
    splits=st.integers(2, 9),
    promote=st.booleans(),
    spread=st.floats(0, 5),
    seed=st.integers(0, 10_000),
)
def test_split_products_of_hopper(
    k: int, splits: int, promote: bool, spread: float, seed: int
) -> None:
    tiles = -(-k // 128)
    assume((splits - 1) * -(-tiles // splits) < tiles)  # no run is empty, as in its recordings
    a = numbers(4, k, torch.float8_e4m3fn, spread, seed)
    b = numbers(7, k, torch.float8_e5m2, spread, seed + 1)
    expected = mmaemu.accumulate(
        a, b, use_fast_accum=not promote, profile="hopper", splitk=(splits, "contiguous")
    )
    assert torch.equal(product(a, b, promote, "hopper", splits), expected)


@pytest.mark.parametrize("gpu", TENSOR_CORES)
def test_a_linear_has_the_products_of_the_gpu_that_is_asked_for(gpu: str) -> None:
    weight = numbers(64, 512, torch.float8_e4m3fn, 1.0, 1).bfloat16()
    x = numbers(32, 512, torch.float8_e4m3fn, 1.0, 2).bfloat16()
    weight[0, 0] = x[0, 0] = 448.0  # with which current scaling has scales of 1
    module = te.Linear(512, 64, bias=False, params_dtype=torch.bfloat16, device="cpu")
    module.weight.data.copy_(weight)
    recipe = te.recipe.Float8CurrentScaling()
    with torch.no_grad(), te.exact_gemm(gpu=gpu), te.autocast(enabled=True, recipe=recipe):
        out = module(x)
    a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    expected = mmaemu.accumulate(a, b, use_fast_accum=True, profile=gpu, splitk=1)
    assert torch.equal(out, expected.bfloat16())


def test_a_gpu_without_a_model_is_named() -> None:
    message = "unknown gpu 'blackwell'.* choose one of ada, hopper"
    with pytest.raises(UsageError, match=message), te.exact_gemm(gpu="blackwell"):
        pass
