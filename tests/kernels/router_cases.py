"""The choice of experts and their places in Triton: the plain functions' results, in every bit.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch

from te_models.config.moe import MoEConfig
from te_models.kernels import groups_triton, router_triton
from te_models.kernels.expert_rows_triton import TRITON
from te_models.kernels.groups import Groups
from te_models.model.router import Places, choose, places

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(1, 2, 1), (70, 5, 3), (33, 16, 8), (64, 12, 12), (0, 4, 2)]


def same(found: Places, wanted: Places) -> None:
    assert torch.equal(found.row, wanted.row) and torch.equal(found.counts, wanted.counts)
    assert torch.equal(found.token, wanted.token)
    assert not isinstance(found.rows, list) and not isinstance(wanted.rows, list)
    assert torch.equal(found.rows.first, wanted.rows.first)
    assert found.rows.most == wanted.rows.most == len(found.token)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), CASES)
def test_the_results_of_the_plain_functions(
    tokens: int, experts: int, k: int, coarse: bool, padded: bool
) -> None:
    """With many equal scores too, and experts that no one chooses; padding reaches none."""
    g = torch.Generator().manual_seed(tokens + k)
    logits = torch.randn(tokens, experts, generator=g)
    if coarse:
        logits = logits.round()
    logits[:, -1] -= 100.0 * (experts > k)
    if tokens > 8:
        logits[3] = -torch.inf
        logits[5, 0] = torch.inf
        logits[7] = 0.0
        logits[7, ::2] = -0.0
    logits = logits.to(DEVICE)
    real = (torch.rand(tokens, 1, generator=g) < 0.7).to(DEVICE) if padded else None
    moe = MoEConfig(num_experts=experts, num_experts_per_tok=k, moe_intermediate_size=8)
    found = choose(logits, None, real, moe, TRITON)
    assert torch.equal(found, choose(logits, None, real, moe))
    for alignment in (1, 16):
        same(
            places(found, experts, alignment, True, TRITON),
            places(found, experts, alignment, True),
        )


def test_a_bias_and_groups() -> None:
    """Which change the scores before the choice."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 8, generator=g).to(DEVICE)
    bias = torch.randn(8, generator=g).to(DEVICE)
    moe = MoEConfig(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, n_group=4, topk_group=2,
        expert_bias=True, router_scores="sigmoid",
    )  # fmt: skip
    found = choose(logits, bias, None, moe, TRITON)
    assert torch.equal(found, choose(logits, bias, None, moe))


def test_nan_chooses_other_experts_each_time() -> None:
    """So that no place is taken twice, and the loss says that it is not finite."""
    moe = MoEConfig(num_experts=6, num_experts_per_tok=4, moe_intermediate_size=8)
    logits = torch.full((3, 6), torch.nan, device=DEVICE)
    assert choose(logits, None, None, moe, TRITON).tolist() == [[3, 2, 1, 0]] * 3


def test_more_blocks_of_tokens_than_a_program_sums_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And more experts than one program has, and rows than one fills."""
    monkeypatch.setattr(router_triton, "BLOCKS", 2)
    monkeypatch.setattr(router_triton, "SUMMED_EXPERTS", 4)
    monkeypatch.setattr(router_triton, "ROWS", 128)
    g = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(9, generator=g)[:3] for _ in range(300)])
    chosen[200:] = 9  # padding
    chosen = chosen.sort(1, descending=True).values.to(DEVICE)
    same(places(chosen, 9, 16, True, TRITON), places(chosen, 9, 16, True))


@pytest.mark.parametrize("rows", [[3], [16, 0, 80, 1], [0, 0, 128], [129] * 33])
def test_ends_of_tiles(rows: list[int]) -> None:
    groups = Groups.of(rows, torch.device("cpu"))
    first = groups.first.to(DEVICE)
    for height in (1, 32, 128):
        assert torch.equal(groups_triton.tiles(first, height).cpu(), groups.tiles(height))
    assert torch.equal(groups_triton.aligned(first, 128).cpu(), groups.aligned.first)
