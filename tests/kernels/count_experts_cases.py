"""Counts of all experts' FP8 by one Triton kernel, against those of each expert's cast in PyTorch.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch
from expert_counts import APART, counts_of
from torch import Tensor

from te_models.kernels.count_experts_triton import ExpertCounts, count_experts
from te_models.kernels.expert_cast_triton import Delayed, FP8Matrices, Matrices, cast
from te_models.kernels.grouped_linear_triton import matrices_of, on_device
from te_models.kernels.groups import Groups
from te_models.recorder.layout import FIELDS, INDEX
from te_models.recorder.statistics import Cast
from te_models.recorder.statistics import count_cast as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [16, 0, 32, 4]
COLUMNS = 144


def values(rows: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, COLUMNS, generator=g) * torch.logspace(-6, 1, COLUMNS)
    x[:, 3] = 0
    if rows > 2:
        x[2] = 0
        x[1, 5] = 3000.0
    return x.bfloat16().to(DEVICE)


def check(
    counts: ExpertCounts,
    parts: list[Tensor | None],
    groups: Groups,
    made: FP8Matrices,
    form: torch.dtype,
) -> None:
    """Compare the rows of each expert with the counts of its own cast, whose values are `parts`."""
    first = groups.first.tolist()
    for e in range(groups.experts):
        fields = counts.fields[APART * e].cpu()
        begin, end = first[e], first[e + 1]
        if begin == end:
            assert not fields[:, INDEX["elements"]].any() and not counts.codes[APART * e]
            continue
        codes = made.data[begin:end]
        own = Cast(
            codes, made.scale_inv[e].reshape(1, 1), tuple(codes.shape), 8 if form == E5M2 else 7, made.scale[e : e + 1]
        )  # fmt: skip
        expected, hashed = reference(parts[e], own)
        wanted = dict(zip(FIELDS, expected.tolist(), strict=True))
        found = dict(zip(FIELDS, fields.sum(0).tolist(), strict=True))
        for name in ("amax", "scale_max", "format"):
            found[name] = fields[:, INDEX[name]].amax().item()
        found["scale_min"] = fields[:, INDEX["scale_min"]].amin().item()
        for one in (wanted, found):
            del one["scale_age"]
        assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True), e
        assert counts.codes[APART * e].item() == hashed.item()
    # Rows of other operands stay as they were.
    others = torch.arange(len(counts.codes)) % APART != 0
    assert not counts.codes.cpu()[others].any()


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("delayed", [False, True])
def test_rows_of_experts(form: torch.dtype, delayed: bool) -> None:
    groups = Groups.of(ROWS, DEVICE)
    x = values(sum(ROWS), 1)
    scales = None
    if delayed:
        scales = Delayed(
            torch.tensor([5.0, 2.0, 0.5, 64.0], device=DEVICE), torch.zeros(4, device=DEVICE)
        )
    made = cast(Matrices(x, groups), form, scales, turn=False)
    counts = counts_of(4, DEVICE)
    count_experts(Matrices(x, groups), groups, made, form, counts)
    check(counts, list(x.split(ROWS)), groups, made, form)


def test_copies_of_tokens_times_a_factor() -> None:
    groups = Groups.of(ROWS, DEVICE)
    tokens = values(20, 2)
    g = torch.Generator().manual_seed(3)
    source = torch.randint(0, 21, (sum(ROWS),), generator=g)  # 20 is no token: a row of zeros
    # Powers of two, since Triton's interpreter cuts BF16 where a GPU rounds.
    factor = 2.0 ** -torch.randint(0, 5, (sum(ROWS),), generator=g)
    given = Matrices(tokens, groups, source=source.to(DEVICE), factor=factor.to(DEVICE))
    made = cast(given, E5M2, turn=False)
    counts = counts_of(4, DEVICE)
    count_experts(given, groups, made, E5M2, counts)
    padded = torch.cat([tokens, tokens.new_zeros(1, COLUMNS)])
    rows = (padded[source.to(DEVICE)].float() * factor.to(DEVICE)[:, None]).to(tokens.dtype)
    check(counts, list(rows.split(ROWS)), groups, made, E5M2)


def test_weights_and_data_alone() -> None:
    memory = values(2 * 48, 4)
    weights = [memory[:48], memory[48:]]
    places = on_device([0, 48 * COLUMNS], DEVICE)
    given = matrices_of(weights, places)
    made = cast(given, E4M3, turn=False)
    counts = counts_of(2, DEVICE)
    count_experts(given, given.groups, made, E4M3, counts)
    check(counts, list(weights), given.groups, made, E4M3)
    alone = counts_of(2, DEVICE)
    count_experts(None, given.groups, made, E4M3, alone)
    check(alone, [None, None], given.groups, made, E4M3)


def test_nothing_is_counted_in_a_step_that_is_not_recorded() -> None:
    groups = Groups.of(ROWS, DEVICE)
    x = values(sum(ROWS), 1)
    counts = counts_of(4, DEVICE)
    counts.flag.zero_()
    before = counts.fields.clone()
    count_experts(Matrices(x, groups), groups, cast(Matrices(x, groups), E4M3), E4M3, counts)
    assert torch.equal(counts.fields, before) and not counts.codes.any()
