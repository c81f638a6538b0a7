"""te.Linear split over two processes (gloo on the CPU) against the same layer in one."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from ranks import as_one_of, run_ranks
from torch import Tensor

import te_models.engine.emulated as te
from te_models.distributed import collectives

SIZE, HALF = 256, 128  # each rank has whole 128x128 blocks of everything
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "blockwise": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "high_precision": te.recipe.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": te.recipe.MXFP8BlockScaling(backward_override="dequantized"),
}
# (recipe, parallel_mode, sequence_parallel)
CASES: list[tuple[str, str, bool]] = [
    (name, mode, sequence)
    for name in RECIPES
    for mode in ("column", "row")
    for sequence in (False, True)
]


def matrix(seed: int, scale: float) -> Tensor:
    """FP32 [SIZE, SIZE] of four different quarters with the same amax in every block, so that the shards of a tensor
    have its scales: what is left to compare is what travels where."""
    base = torch.randn(HALF, HALF, generator=torch.Generator().manual_seed(seed)) * scale
    quarters = [sign * base.roll(16 * i, 0) for i, sign in enumerate((1, -1, 1, 1))]
    return torch.cat([torch.cat(quarters[:2], 1), torch.cat(quarters[2:], 1)])


W, X, DY = matrix(0, 0.1), matrix(1, 2.0), matrix(2, 1e-3)
# Tokens are another matter: the ranks have to agree on the amax of what they gather.
X[HALF:] *= 0.3
DY[HALF:] *= 0.3
BIAS = torch.randn(SIZE, generator=torch.Generator().manual_seed(3)).bfloat16().float()


def run(
    recipe: Any, weight: Tensor, bias: Tensor, x: Tensor, dy: Tensor, **options: Any
) -> dict[str, Any]:
    """Two steps of a te.Linear in FP32, FP8 inside; what the second gives."""
    m = te.Linear(SIZE, SIZE, params_dtype=torch.float32, **options)
    with torch.no_grad():
        m.weight.copy_(weight)
        m.bias.copy_(bias)
    for factor in (1.0, 0.75):
        m.zero_grad()
        inp = (x * factor).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = m(inp)
        y.backward(dy * factor)
    found = {"y": y.detach(), "dx": inp.grad, "dw": m.weight.grad, "db": m.bias.grad}
    if recipe is not None and recipe.delayed():
        found |= {
            f"{d}.{name}": getattr(m.fp8_meta[d], name)
            for d in te_directions()
            for name in ("scale", "amax_history")
        }
    return found


def te_directions() -> tuple[str, str]:
    return "scaling_fwd", "scaling_bwd"


def half(t: Tensor, rank: int, dim: int) -> Tensor:
    return t.chunk(2, dim)[rank].contiguous()


def work(rank: int, folder: str) -> None:
    """All cases, one after the other: starting processes is what takes the time."""
    sent: list[torch.dtype] = []
    gather = collectives._ALL_GATHER

    def recorded(out: Tensor, x: Tensor, **options: Any) -> Any:
        sent.append(x.dtype)
        return gather(out, x, **options)

    collectives._ALL_GATHER = recorded
    for number, (name, mode, sequence) in enumerate(CASES):
        sent.clear()
        column = mode == "column"
        x = X if column else half(X, rank, 1)
        dy = half(DY, rank, 1) if column else DY
        if sequence:
            x, dy = (half(x, rank, 0), dy) if column else (x, half(dy, rank, 0))
        weight, bias = half(W, rank, 0 if column else 1), half(BIAS, rank, 0) if column else BIAS
        split = dict(parallel_mode=mode, tp_group=dist.group.WORLD, sequence_parallel=sequence)
        found: dict[str, Any] = run(RECIPES[name], weight, bias, x, dy, **split)
        torch.save(found | {"sent": sent}, f"{folder}/{number}-{rank}.pt")
    torch.save(uneven(rank), f"{folder}/uneven-{rank}.pt")


def uneven(rank: int) -> dict[str, Any]:
    """A step whose ranks have half a block of tokens each, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight, x, dy = half(W, rank, 0), X[rank * 64 : (rank + 1) * 64], half(DY, rank, 1)[:128]
        split = dict(parallel_mode="column", tp_group=dist.group.WORLD, sequence_parallel=True)
        found = run(te.recipe.Float8BlockScaling(), weight, half(BIAS, rank, 0), x, dy, **split)
    return found | {"warnings": [str(w.message) for w in caught]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    run_ranks(work, folder, 2, exact=True)
    return folder


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).norm() / expected.norm()).item()


def whole(parts: list[dict[str, Any]], name: str, mode: str, sequence: bool) -> Tensor:
    """The layer's own y, dx, dw or db, put together from the ranks'."""
    dims = (
        {"y": 1, "dx": None, "dw": 0, "db": 0}
        if mode == "column"
        else {"y": None, "dx": 1, "dw": 1, "db": None}
    )
    tensors, dim = [part[name] for part in parts], dims[name]
    if dim is not None:
        return torch.cat(tensors, dim)
    if not sequence:
        assert_same_bits("tensors[0]", tensors[0], tensors[1])
        return tensors[0]
    # Tokens are split; a bias gradient is each rank's tokens' share.
    return tensors[0] + tensors[1] if name == "db" else torch.cat(tensors)


@pytest.mark.parametrize(
    ("number", "case"), list(enumerate(CASES)), ids=["-".join(map(str, case)) for case in CASES]
)
def test_two_ranks_are_one_layer(number: int, case: tuple[str, str, bool], results: Path) -> None:
    name, mode, sequence = case
    parts = [torch.load(results / f"{number}-{rank}.pt", weights_only=False) for rank in range(2)]
    expected = run(RECIPES[name], W, BIAS, X, DY)
    for key in ("y", "dx", "dw", "db"):
        # FP32 sums in another order; the codes are the same.
        assert error(whole(parts, key, mode, sequence), expected[key]) < 2e-6, key
    for key in expected.keys() - {"y", "dx", "dw", "db"}:
        assert torch.equal(parts[0][key], expected[key]) and torch.equal(
            parts[1][key], expected[key]
        ), key
    quantized = name in ("delayed", "current", "blockwise", "mxfp8", "nvfp4")
    if not sequence:
        assert not parts[0]["sent"]
    elif quantized:
        # Codes travel, not values; 1x128 blocks have scales in FP32, two sides of two passes.
        assert parts[0]["sent"].count(torch.float32) == (4 if name == "blockwise" else 0)
        assert torch.uint8 in parts[0]["sent"]


def test_rows_without_whole_blocks_travel_in_high_precision(results: Path) -> None:
    expected = run(te.recipe.Float8BlockScaling(), W, BIAS, X[:128], DY[:128])
    parts = [torch.load(results / f"uneven-{rank}.pt", weights_only=False) for rank in range(2)]
    assert (
        all("all-gather in high precision" in message for message in parts[0]["warnings"])
        and parts[0]["warnings"]
    )
    for key in ("y", "dx", "dw", "db"):
        # The input is rounded twice.
        assert error(whole(parts, key, "column", True), expected[key]) < 0.03, key


def test_invalid_options_are_refused() -> None:
    m = te.Linear(SIZE, SIZE, parallel_mode="row", tp_size=2)
    with pytest.raises(
        RuntimeError, match="^Tensor parallel group not initialized. Call set_tensor_parallel_group"
    ):
        m(torch.ones(2, HALF))
    with as_one_of(2):
        m.set_tensor_parallel_group(dist.group.WORLD)
        assert m(torch.ones(2, HALF)).shape == (2, SIZE)
        with (
            te.autocast(recipe=RECIPES["current"]),
            pytest.raises(ValueError, match="use fp8_output=False"),
        ):
            m(torch.ones(32, HALF), fp8_output=True)
        m = te.Linear(
            SIZE, SIZE, parallel_mode="row", tp_group=dist.group.WORLD, sequence_parallel=True
        )
        recipe = te.recipe.DelayedScaling(reduce_amax=False)
        with (
            te.autocast(recipe=recipe),
            pytest.raises(AssertionError, match="^Amax reduction across tensor parallel"),
        ):
            m(torch.ones(32, HALF))


@pytest.mark.parametrize(("mode", "shape"), [("column", (HALF, SIZE)), ("row", (SIZE, HALF))])
def test_parameters_are_the_ranks_share(mode: str, shape: tuple[int, int]) -> None:
    m = te.Linear(SIZE, SIZE, sequence_parallel=True, parallel_mode=mode, tp_size=2)
    assert m.weight.shape == shape and m.bias.shape == ((HALF,) if mode == "column" else (SIZE,))
    assert (m.in_features, m.out_features) == shape[::-1]


@pytest.mark.parametrize(
    "options",
    [{"parallel_mode": "row", "in_features": 33}, {"parallel_mode": "column", "out_features": 33}],
)
def test_sizes_divide(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="33 is not divisible by 2"):
        te.Linear(**{"in_features": 32, "out_features": 32, "tp_size": 2} | options)


def test_one_rank_has_the_whole_weight() -> None:
    """Column and row of one rank are the plain layer; only a row-parallel bias is added after the rounding."""
    x = torch.randn(16, 32)
    for mode in ("column", "row"):
        m = te.Linear(32, 32, parallel_mode=mode, sequence_parallel=True)
        plain = te.Linear(32, 32)
        plain.load_state_dict(m.state_dict())
        assert not m.sequence_parallel and torch.allclose(m(x), plain(x))
