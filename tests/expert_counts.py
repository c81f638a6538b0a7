"""Counts of casts, for tests of the kernels that make them."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.count_experts_triton import ExpertCounts
from te_models.recorder.layout import FIELDS, INDEX

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APART = 3  # rows of the table from one expert to the next, as of three operands


def counts_of(experts: int, device: torch.device, spread: int = 2) -> ExpertCounts:
    """An empty table."""
    rows = APART * experts
    fields = torch.zeros(rows, spread, len(FIELDS), dtype=torch.float64, device=device)
    fields[:, :, INDEX["scale_min"]] = math.inf
    codes = torch.zeros(rows, dtype=torch.int64, device=device)
    return ExpertCounts(fields, codes, APART)


def counted_by(kernel: Any, *arguments: Any, spread: int = 2) -> tuple[Any, dict[str, float], int]:
    """The result of a kernel, and the fields and the hash that it counted."""
    fields = torch.zeros(spread, len(FIELDS), dtype=torch.float64, device=DEVICE)
    fields[:, INDEX["scale_min"]] = math.inf
    codes = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    result = kernel(*arguments, counts=Counts(fields, codes))
    found = dict(zip(FIELDS, fields.sum(0).tolist(), strict=True))
    for name in ("amax", "scale_max", "format"):
        found[name] = fields[:, INDEX[name]].amax().item()
    found["scale_min"] = fields[:, INDEX["scale_min"]].amin().item()
    return result, found, int(codes.item())


def assert_counts(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    """Assert that the fields of a cast are those of the definition: sums of squares to a millionth."""
    # A kernel subtracts value times inverse scale in one operation, without the rounding of the product to FP32, which
    # is half of 2^-23 of the product at most. Of a sum of squared errors that is 2^-23 times the sum of error times
    # value, which the product of the roots of noise and signal bounds.
    ratio = math.sqrt(wanted["signal"] / wanted["noise"]) if wanted["noise"] > 0 else 0.0
    exact = {name: value for name, value in wanted.items() if name != "noise"}
    assert {name: found[name] for name in exact} == pytest.approx(exact, rel=1e-6, nan_ok=True)
    noise = pytest.approx(wanted["noise"], rel=1e-6 + 2.0**-23 * ratio, nan_ok=True)
    assert found["noise"] == noise
