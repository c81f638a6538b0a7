"""Amax reduction over a process group: two processes with gloo on the CPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import te_models.engine.emulated as te
from te_models.engine.emulated.recipe import DelayedScaling

BF16 = torch.bfloat16


def train(case: str, rank: int, folder: str) -> None:
    """Ranks 0, 1, 2 see inputs of 2, 8, 32 and gradients of 1, 2, 3; writes the scales of both directions."""
    options: dict[str, Any] = {}
    if case == "pair":
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        options["amax_reduction_group"] = groups[rank // 2]
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=case != "no reduction")
    m = te.Linear(32, 32, bias=False, params_dtype=BF16)
    x = torch.full((32, 32), 2.0 * 4**rank, dtype=BF16, requires_grad=True)
    with te.autocast(recipe=recipe, **options):
        y = m(x)
    y.backward(torch.full((32, 32), 1.0 + rank, dtype=BF16))
    result = {
        d: (m.fp8_meta[d].scale, m.fp8_meta[d].amax_history[-1])
        for d in ("scaling_fwd", "scaling_bwd")
    }
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.mark.parametrize(
    ("case", "inputs", "gradients"),
    [
        ("world", [8.0, 8.0], [2.0, 2.0]),
        ("no reduction", [2.0, 8.0], [1.0, 2.0]),
        ("pair", [8.0, 8.0, 32.0], [2.0, 2.0, 3.0]),
    ],
)
def test_amaxes_are_reduced_over_the_group(
    case: str, inputs: list[float], gradients: list[float], tmp_path: Path
) -> None:
    run_ranks(partial(train, case), tmp_path, len(inputs))
    for rank in range(len(inputs)):
        found = torch.load(tmp_path / f"{rank}.pt")
        for direction, amax, fp8_max in (
            ("scaling_fwd", inputs[rank], 448.0),
            ("scaling_bwd", gradients[rank], 57344.0),
        ):
            scale, history = found[direction]
            assert history[0] == amax and scale[0] == torch.tensor(fp8_max) / amax
