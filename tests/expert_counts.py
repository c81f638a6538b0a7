"""A table of counts of all experts, for tests of the kernels that add to it."""

import math

import torch

from te_models.kernels.count_experts_triton import ExpertCounts
from te_models.recorder.layout import FIELDS, INDEX

APART = 3  # rows of the table from one expert to the next, as of three operands


def counts_of(experts: int, device: torch.device, spread: int = 2) -> ExpertCounts:
    """An empty table."""
    rows = APART * experts
    fields = torch.zeros(rows, spread, len(FIELDS), dtype=torch.float64, device=device)
    fields[:, :, INDEX["scale_min"]] = math.inf
    codes = torch.zeros(rows, dtype=torch.int64, device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    return ExpertCounts(fields, codes, flag, APART)
