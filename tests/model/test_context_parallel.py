"""Context parallelism: the losses and gradients of ranks that share rows are those of one rank with whole rows."""

import itertools
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from short_conv import ShortConvSpec
from torch.distributed.device_mesh import init_device_mesh

from te_models import CausalLM, ModelConfig
from te_models.config.layer import LayerSpec
from te_models.distributed.planned_ranks import PlannedRanks
from te_models.errors import UsageError
from te_models.model import context_parallel
from te_models.model.context_parallel import ContextParallel
from te_models.model.targets import IGNORED, shifted

TINY = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
LATENT = dict(
    q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
)
MAMBA = dict(num_heads=4, head_dim=6, state_dim=8, num_groups=1, conv_kernel_dim=4)
CASES = {
    "gated": {},
    "windows and qk norm": dict(
        sliding_window=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"], qk_norm=True
    ),
    "sinks": dict(attention_sinks=True, attention_gate="none"),
    "caps": dict(attn_logit_softcapping=5.0),
    "experts": dict(moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    "convolutions": dict(layer_types=["conv", "full_attention", "conv"], short_conv=dict(kernel_dim=4, bias=True)),
    "delta rule": dict(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6),
    ),
    "kimi delta attention": dict(
        layer_types=["kda", "full_attention", "kda"], kda=dict(num_heads=2, head_dim=8, gate_rank=4)
    ),
    "mamba, a group": dict(layer_types=["mamba2"] * 3, mamba2=MAMBA),
    "mamba, groups beside attention": dict(
        layer_types=["parallel"] * 3,
        parallel_mixers=dict(input_multipliers=(0.9, 1.2), output_multipliers=(1.1, 0.7)),
        mamba2=MAMBA | dict(num_groups=4, norm="before_gate", multipliers=(0.9, 0.8, 1.1, 1.2, 0.7)),
    ),
}  # fmt: skip
ATTENTION = list(CASES)[:5]
STATES = list(CASES)[5:]
ROWS = ["whole", "documents", "padding", "odd"]


def batch_of(rows: str) -> dict[str, torch.Tensor]:
    """Return two rows: of 48 tokens, in documents, with padding, or of 45 tokens, which no two ranks divide."""
    generator = torch.Generator().manual_seed(3)
    seq = 45 if rows == "odd" else 48
    ids = torch.randint(0, 97, (2, seq), generator=generator)
    labels = ids.masked_fill(torch.rand(2, seq, generator=generator) < 0.2, IGNORED)
    batch = {"input_ids": ids, "labels": labels}
    if rows == "documents":
        lengths = torch.tensor([5, 20, 15, 8])
        one = torch.repeat_interleave(torch.arange(4), lengths)
        other = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([30, 2, 9, 7]))
        batch["document_ids"] = torch.stack((one, other))
    if rows == "padding":
        mask = torch.ones(2, seq, dtype=torch.int64)
        mask[0, :7] = 0
        mask[1, 40:] = 0
        batch["attention_mask"] = mask
    return batch


def model_of(case: str, **options: object) -> CausalLM:
    """Return a tiny model in FP32 with the same weights on every rank."""
    torch.manual_seed(0)
    config = ModelConfig(**{**TINY, **CASES[case]})
    return CausalLM(config, recipe="bf16", dtype=torch.float32, device="cpu", **options)


def gradients(
    model: CausalLM, batch: dict[str, torch.Tensor], weight: float
) -> dict[str, torch.Tensor]:
    """Return the loss times `weight` and its gradients, by name."""
    model.train()
    output = model(**batch, return_logits=False)
    loss = output.loss if output.routing is None else output.routing.prediction_loss
    (loss * weight).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": (loss * weight).detach()}


def compare(rank: int, folder: str, pairs: list[tuple[str, str]]) -> None:
    """Compare the sums over two ranks with one model's, for these cases and kinds of rows."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for case, rows in pairs:
        batch = batch_of(rows)
        wanted = gradients(model_of(case), batch, 1.0)
        model = model_of(case, cp_mesh=mesh["cp"])
        share = model.cp.share(batch["input_ids"].shape[1])
        assert share is not None
        targets = shifted(batch["labels"], batch.get("attention_mask"), batch.get("document_ids"))
        own = int((share.own_filled(targets, IGNORED) != IGNORED).sum())
        assert 0 < own < int((targets != IGNORED).sum()), "each rank has a part of the targets"
        got = gradients(model, batch, own / int((targets != IGNORED).sum()))
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            torch.distributed.all_reduce(value)
            error = (value - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-8)
            assert error < 2e-5, f"{case}, {rows}: {name} differs by {error:.1e}"


@pytest.mark.parametrize(
    ("case", "ranks", "message"),
    [
        ("delta rule", 4, "linear_attention.num_key_heads=2: give 2, or leave it out"),
        ("kimi delta attention", 4, "does not divide the heads of Kimi Delta Attention, kda"),
        ("mamba, a group", 8, "mamba2.num_heads=4: give 2 or 4, or leave it out"),
        ("mamba, groups beside attention", 3, "and mamba2.num_groups=4: one has to be a multiple"),
        ("convolutions", 5, "hidden_size=32: give 2 or 4 or 8 or 16, or leave"),
    ],
)
def test_heads_that_ranks_cannot_divide_are_refused(case: str, ranks: int, message: str) -> None:
    config = ModelConfig(**{**TINY, **CASES[case]})
    with pytest.raises(UsageError, match=message):
        CausalLM(config, recipe="bf16", device="meta", cp_mesh=PlannedRanks(ranks))


def test_a_kind_that_says_nothing_of_its_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="whose state passes from token to token"):
        ContextParallel(PlannedRanks(2)).check_layers(
            (LayerSpec(mixer=ShortConvSpec(32), mlp=None),)
        )


def pairs_of(cases: list[str], rows: list[str], remainder: int) -> list[tuple[str, str]]:
    """Return each second pair of a case and a kind of rows: both calls together have all of them."""
    return [
        (case, row)
        for number, case in enumerate(cases)
        for place, row in enumerate(rows)
        if (number + place) % 2 == remainder
    ]


@pytest.mark.parametrize(
    "pairs",
    [
        pairs_of(ATTENTION, ROWS, 0),
        [(case, "documents") for case in STATES],
        pytest.param(
            [
                *pairs_of(ATTENTION, ROWS, 1),
                *itertools.product(STATES, ["whole", "padding", "odd"]),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["attention", "states", "others"],
)
def test_ranks_that_share_rows_have_the_gradients_of_one(
    pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    run_ranks(partial(compare, pairs=pairs), tmp_path, 2)


def abandon(rank: int, folder: str) -> None:
    """A pass whose backward never runs leaves no tensor behind."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = model_of("gated", cp_mesh=mesh["cp"]).train()
    outputs = []
    attention = context_parallel.prefix_attention

    def attended(*args: Any, **options: Any) -> torch.Tensor:
        out = attention(*args, **options)
        outputs.append(weakref.ref(out.untyped_storage()))
        return out

    with patch.object(context_parallel, "prefix_attention", attended):
        model(**batch_of("whole"), return_logits=False)
    assert len(outputs) == 6 and not any(output() for output in outputs)


def test_an_abandoned_pass_is_freed(tmp_path: Path) -> None:
    run_ranks(abandon, tmp_path, 2)
