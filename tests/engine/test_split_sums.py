"""Products of few results and a long K: the runs that cuBLAS took on GPUs, and mmaemu's sums in as many."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated.short_rows import short_rows
from te_models.engine.emulated.split_sums import MOST_PRODUCTS, is_known, runs_of_k
from te_models.engine.emulated.tensor_core import TENSOR_CORES

mmaemu = pytest.importorskip("mmaemu")
load_table = pytest.importorskip("mmaemu.platform.splitk_table").load_table
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
E4M3 = torch.float8_e4m3fn


def numbers(rows: int, k: int, seed: int) -> Tensor:
    """FP8 numbers [rows, k] with which current scaling has scales of 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).mul_(8)
    x[0, 0] = 448.0
    return x.to(E4M3)


def linear(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [N, K] transposed, as te.Linear computes it."""
    module = te.Linear(
        b.shape[1], b.shape[0], bias=False, params_dtype=torch.bfloat16, device="cpu"
    )
    module.weight.data.copy_(b)
    recipe = te.recipe.Float8CurrentScaling()
    with torch.no_grad(), te.exact_gemm(), te.autocast(enabled=True, recipe=recipe):
        return module(a.bfloat16())


def whole(a: Tensor, b: Tensor) -> Tensor:
    """The same product without a split."""
    sums = mmaemu.accumulate(a, b, use_fast_accum=True, profile="hopper", splitk=1)
    return sums.bfloat16()


def test_the_rule_is_what_an_h100_did() -> None:
    result: dict[str, Any] = json.loads((RESULTS / "split_k_h100.json").read_text())
    for rows in result["shapes"].values():
        for row in rows:
            assert row["runs"] == [runs_of_k(row["m"], row["k"], row["n"])], row


def test_the_rule_is_what_an_h200_did() -> None:
    result: dict[str, Any] = json.loads((RESULTS / "split_k_bits_h200.json").read_text())
    found = 0
    for m, k, n, runs in result["shapes"]:
        if is_known(m, k, n):
            assert runs == runs_of_k(m, k, n), (m, k, n)
            found += 1
    assert found == 368


def test_the_rule_is_what_cublas_chose_on_an_h200() -> None:
    """But for seven shapes of the longest K, whose sides are no powers of two."""
    result: dict[str, Any] = json.loads((RESULTS / "split_k_choices_h200.json").read_text())
    found = 0
    others = []
    for k, table in result["splits"].items():
        for (m, n), runs in zip(
            itertools.product(result["m"], result["n"]), itertools.chain(*table), strict=True
        ):
            if not is_known(m, int(k), n):
                continue
            found += 1
            if runs != runs_of_k(m, int(k), n):
                others.append((m, int(k), n))
    assert found == 6527
    assert len(others) == 7 and min(k for _, k, _ in others) == 49152


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("left", ["e4m3", "e5m2"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_the_rule_is_what_cublas_chose_on_another_h100(fast: bool, left: str, out: str) -> None:
    table = load_table("heur_h100pcie_lt12.8.3.14")
    found = 0
    for m, k, n in itertools.product(
        (16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048),
        (1024, 2048, 4096, 5760, 8192, 12288, 16384),
        (64, 96, 128, 192, 256, 384, 512, 768, 1024),
    ):
        row = table.lookup(m, n, k, left, "e4m3", out, fast, 32 << 20)
        if row is not None and m * k * n <= MOST_PRODUCTS:
            assert row["splitK"] == runs_of_k(m, k, n), (m, k, n)
            found += 1
    assert found > 200


def test_where_no_rule_is_known_there_is_one_run() -> None:
    assert runs_of_k(512, 16384, 512) == 1
    assert runs_of_k(16, 16384, 16, TENSOR_CORES["ada"]) == 1
    # Rows and columns count as whole tiles of 16.
    assert runs_of_k(1, 8192, 3056) == 3
    assert runs_of_k(1, 8192, 3072) == 1
    assert runs_of_k(1, 16384, 512) == 6
    assert runs_of_k(1, 16384, 528) == 1


@pytest.mark.filterwarnings("ignore:mmaemu split-K")
@pytest.mark.parametrize(
    "m, k, n, runs", [(32, 8192, 128, 3), (64, 16384, 32, 6), (16, 4096, 64, 1)]
)
def test_a_linear_sums_in_the_runs_of_an_h100(m: int, k: int, n: int, runs: int) -> None:
    a, b = numbers(m, k, 1), numbers(n, k, 2)
    how = 1 if runs == 1 else (runs, "contiguous")
    # A corner is enough: the sums of an element depend on K and the number of runs alone.
    expected = mmaemu.accumulate(a[:8], b[:8], use_fast_accum=True, profile="hopper", splitk=how)
    out = linear(a, b)
    assert torch.equal(out[:8, :8], expected.bfloat16())
    if runs > 1:
        assert not torch.equal(out[:8, :8], whole(a[:8], b[:8]))


def test_a_row_of_generation_has_the_bits_that_it_has_among_zeros() -> None:
    x, weight = numbers(16, 8192, 1).bfloat16(), numbers(16, 8192, 2).bfloat16()
    x[1:] = 0
    module = te.Linear(8192, 16, bias=False, params_dtype=torch.bfloat16, device="cpu").eval()
    module.weight.data.copy_(weight)
    recipe = te.recipe.Float8CurrentScaling()
    with torch.no_grad(), te.exact_gemm(), te.autocast(enabled=True, recipe=recipe):
        many = module(x)
        with short_rows(16):
            one = module(x[:1])
    assert torch.equal(one, many[:1])
    assert not torch.equal(one, whole(x[:1].to(E4M3), weight.to(E4M3)))
