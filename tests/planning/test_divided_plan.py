"""The memory plan of a model whose layers or experts GPUs share: against autograd and against measured peaks."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from autograd_bytes import autograd_bytes, held_bytes, planned_bytes
from fewer import every
from planned_shapes import SHAPE as SMALL
from ranks import as_one_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from te_models import CausalLM, get_recipe
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.errors import UsageError
from te_models.planning.memory_plan import plan_memory
from te_models.training.parallel import requantize_in_backward

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SHAPE: dict[str, Any] = SMALL | dict(max_position_embeddings=256)
EDGES: dict[str, Any] = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
MOE: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
# Name of a journey (tests/journeys.py) of gated-124m with 8 x 512 tokens -> its recipe, and how GPUs shared it.
JOURNEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "two-fsdp": ("delayed", dict(gpus=2)),
    "four-fsdp": ("delayed", dict(gpus=4)),
    "two-tp": ("delayed", dict(gpus=2, tensor_parallel_size=2)),
    "two-tp-save": ("current", dict(gpus=2, tensor_parallel_size=2)),
    "two-tp-sequence": (
        "delayed",
        dict(gpus=2, tensor_parallel_size=2, sequence_parallel=True),
    ),
    "four-fsdp-tp": ("delayed", dict(gpus=4, tensor_parallel_size=2)),
    "four-fsdp-tp-sequence": (
        "current",
        dict(gpus=4, tensor_parallel_size=2, sequence_parallel=True),
    ),
}


def measured_gib(name: str) -> float:
    for path in RESULTS.glob("journeys_h200_x*.json"):
        journeys = json.loads(path.read_text())["journeys"]
        if name in journeys:
            return journeys[name]["peak_gib"]
    raise AssertionError(name)


@pytest.mark.parametrize("name", JOURNEYS)
def test_peaks_of_shared_layers(name: str) -> None:
    recipe, division = JOURNEYS[name]
    plan = plan_memory(
        get_preset("gated-124m"), get_recipe(recipe), batch_size=8, seq_len=512, **division
    )
    assert plan.peak.total / 2**30 == pytest.approx(measured_gib(name), rel=0.05)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_peaks_of_shared_experts(recipe: str) -> None:
    """Buffers of rows have room for all tokens of both GPUs."""
    rows = json.loads((RESULTS / "expert_scaling_h200_x2.json").read_text())["rows"]
    row = next(r for r in rows if (r["recipe"], r["parallel"]) == (recipe, "fsdp+ep"))
    fields = {
        name: json.loads(value) for name, _, value in (f.partition("=") for f in row["shape"])
    }
    plan = plan_memory(
        get_preset(row["preset"], **fields),
        get_recipe(recipe),
        batch_size=2 * row["batch_size"],
        seq_len=row["seq_len"],
        gpus=2,
        expert_parallel_size=2,
    )
    assert plan.peak.total / 2**30 == pytest.approx(row["peak_gib"], rel=0.01)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_peaks_of_shared_rows(gpus: int, recipe: str) -> None:
    """The keys and values of a whole row are on each GPU, in the layer that runs."""
    rows = json.loads((RESULTS / "context_parallel_h200.json").read_text())["rows"]
    measured = next(row for row in rows if (row["gpus"], row["recipe"]) == (gpus, recipe))
    plan = plan_memory(
        get_preset("gated-1b", num_hidden_layers=16, max_position_embeddings=131072),
        get_recipe(recipe),
        batch_size=1,
        seq_len=131072,
        gpus=gpus,
        context_parallel_size=gpus,
        activation_checkpointing="full",
    )
    assert plan.peak.total / 2**30 == pytest.approx(measured["peak_gib"], rel=0.03)


def test_gathered_keys_of_a_row_wait_for_no_backward() -> None:
    """Four GPUs keep a quarter of what one keeps of the layers: backward gathers keys and values again.

    Beside it they keep the rotated keys, which the fused operations of one GPU rotate again; gathered keys and values
    would be 8 GiB more than the 19.
    """
    config = get_preset("gated-1b", num_hidden_layers=16, max_position_embeddings=65536)
    plan = partial(plan_memory, config, get_recipe("bf16"), batch_size=1, seq_len=65536)
    one = plan().peak.activations
    assert plan(context_parallel_size=4).peak.activations == pytest.approx(one / 4, rel=0.06)


@pytest.mark.parametrize(
    ("recipe", "sequence"),
    every(2, ["bf16", "delayed", "current", "blockwise", "mxfp8", "nvfp4"], [False, True]),
)
def test_a_rank_keeps_what_the_plan_says(recipe: str, sequence: bool) -> None:
    """To the byte: the rows and channels of one of two ranks."""
    with as_one_of(2):
        model = CausalLM.from_preset(
            "gated-nano",
            **SHAPE,
            recipe=recipe,
            engine="emulated",
            device="cpu",
            tp_mesh=init_device_mesh("cpu", (2,)),
            sequence_parallel=sequence,
        )
        kept = autograd_bytes(model, torch.randint(0, 288, (2, 128)))
        planned = planned_bytes(
            model, 2, 128, gpus=2, tensor_parallel_size=2, sequence_parallel=sequence
        )
        assert kept <= planned <= kept + held_bytes(model, 128)


STATES: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "conv"],
    linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
    short_conv={},
)


@pytest.mark.parametrize("shape", [{}, STATES], ids=["attention", "states"])
@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_rank_of_a_row_keeps_what_the_plan_says(recipe: str, shape: dict[str, Any]) -> None:
    """To the byte, but for what Python objects hold: masks, and the tokens and positions of whole rows."""
    with as_one_of(2):
        model = CausalLM.from_preset(
            "gated-nano",
            **SHAPE | dict(num_hidden_layers=3) | shape,
            recipe=recipe,
            engine="emulated",
            device="cpu",
            cp_mesh=init_device_mesh("cpu", (2,)),
        )
        kept = autograd_bytes(model, torch.randint(0, 288, (2, 128)), logits=False)
        planned = planned_bytes(model, 2, 128, gpus=1, context_parallel_size=2, logits=False)
    held = held_bytes(model, 128) + 2 * 8 * 128 + 32 * 128 * (1 + 2 * model.config.head_dim)
    assert kept <= planned <= kept + held, (kept, planned, held)


def test_rows_that_do_not_divide_are_planned_as_they_are_filled() -> None:
    """Two ranks share rows of a multiple of four tokens: what a row of 126 lacks is filled, and masked."""
    with as_one_of(2):
        model = CausalLM.from_preset(
            "gated-nano",
            **SHAPE,
            recipe="bf16",
            engine="emulated",
            device="cpu",
            cp_mesh=init_device_mesh("cpu", (2,)),
        )
        kept = autograd_bytes(model, torch.randint(0, 288, (2, 126)), logits=False)
        planned = planned_bytes(model, 2, 126, gpus=1, context_parallel_size=2, logits=False)
        whole = planned_bytes(model, 2, 128, gpus=1, context_parallel_size=2, logits=False)
    held = held_bytes(model, 128) + 2 * 8 * 128 + 32 * 128 * (1 + 2 * model.config.head_dim)
    assert whole <= planned
    assert kept <= planned <= kept + held, (kept, planned, whole, held)


def _kept_by_experts(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "replicas"))["replicas"]
    for recipe in ("bf16", "current"):
        torch.manual_seed(0)
        model = CausalLM.from_preset(
            "gated-moe-nano",
            **SHAPE | EDGES,
            moe=MOE,
            recipe=recipe,
            engine="emulated",
            device="cpu",
            ep_mesh=mesh,
            ep_replicas=alone,
        )
        requantize_in_backward(model, True)  # as under FSDP2, which keeps no FP8 copies of weights
        ids = torch.randint(0, 288, (8, 256)).chunk(2)[rank]
        kept = torch.tensor([float(autograd_bytes(model, ids))])
        dist.all_reduce(kept)
        planned = planned_bytes(model, 4, 256, gpus=2, expert_parallel_size=2)
        # Which rank has more rows depends on the tokens, of which the plan has half on each; in FP8 each expert's rows
        # are padded to a multiple of 16.
        ratio = float(kept) / planned / 2
        assert ratio == pytest.approx(1, rel=0.02), (recipe, ratio)


@pytest.mark.slow
def test_ranks_with_experts_keep_what_the_plan_says(tmp_path: Path) -> None:
    run_ranks(_kept_by_experts, tmp_path, 2)


def test_experts_on_more_gpus_take_less_of_each() -> None:
    config = get_preset("gated-moe-nano", moe=MOE, hidden_size=384)
    plan = partial(plan_memory, config, get_recipe("current"), batch_size=8, seq_len=256)
    whole, shared = plan(gpus=4), plan(gpus=4, expert_parallel_size=4)
    # What FSDP2 gathers of a block; shards are the same, whoever has them.
    assert shared.moments[0].weights < whole.moments[0].weights
    assert shared.moments[-1].optimizer == pytest.approx(whole.moments[-1].optimizer, rel=1e-6)
    assert shared.moments[-1].gradients == pytest.approx(whole.moments[-1].gradients, rel=1e-6)
    pairs = plan(gpus=4, expert_parallel_size=2)
    assert shared.moments[0].weights < pairs.moments[0].weights < whole.moments[0].weights
    assert pairs.moments[-1].optimizer == pytest.approx(whole.moments[-1].optimizer, rel=1e-6)
    assert plan(gpus=4, expert_parallel_size=4, fp8_dispatch=True).peak.total > 0


def test_layers_on_more_gpus_take_less_of_each(any_batch: None) -> None:
    plan = partial(plan_memory, get_preset("gated-1b"), get_recipe("current"), seq_len=2048)
    one = plan(batch_size=4)
    layers = plan(batch_size=4, gpus=4, tensor_parallel_size=4)
    tokens = plan(batch_size=4, gpus=4, tensor_parallel_size=4, sequence_parallel=True)
    assert tokens.peak.activations < layers.peak.activations < one.peak.activations
    assert tokens.num_trained == layers.num_trained < one.num_trained
    assert layers.peak.optimizer == pytest.approx(12 * layers.num_trained)
    assert "4 GPUs (layers and tokens in 4)" in str(tokens)


def test_adapters_of_a_70b_shape_on_several_gpus() -> None:
    """By hand: FP8 weights, half of them or a quarter on each, and whole adapters with FP32 masters and moments."""
    config = get_preset(
        "llama-3.1-8b", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        head_dim=128,
    )  # fmt: skip
    assert config.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    tables = 2 * 2 * 128256 * 8192  # bytes of embedding and head
    for gpus, size in ((2, 141), (4, 80)):
        plan = plan_memory(
            config, get_recipe("current"), batch_size=gpus, seq_len=4096, gpus=gpus, lora_rank=16,
            fp8_params=True, activation_checkpointing="full",
        )  # fmt: skip
        peak = plan.peak
        assert plan.fits(size)
        shard = (config.num_parameters - tables // 2 + tables) / gpus
        edges = 2 * (config.num_parameters - tables // 2) / 80  # first and last layer in BF16
        # Gathered: the last block in BF16 and the one before it in FP8.
        blocks = (2 + 1) * (config.num_parameters - tables // 2) / 80
        adapters = plan.num_trained
        assert peak.weights == pytest.approx(
            shard + edges / gpus + tables + blocks + 2 * adapters, rel=0.01
        )
        assert peak.optimizer == pytest.approx(12 * adapters, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(gpus=4, tensor_parallel_size=3), "tensor_parallel_size=3 does not divide gpus=4"),
        (dict(gpus=1, tensor_parallel_size=2), "does not divide"),
        (dict(gpus=8, tensor_parallel_size=8), "cannot be divided between 8 ranks: use 1, 2"),
        (dict(gpus=2, sequence_parallel=True), "give tensor_parallel_size"),
        (dict(gpus=2, expert_parallel_size=2), "this one has none"),
        (dict(gpus=2, fp8_dispatch=True), "give expert_parallel_size"),
        (dict(gpus=2, tensor_parallel_size=2, lora_rank=4), "adapters are on whole layers"),
        (dict(gpus=4, context_parallel_size=3), "context_parallel_size=3 does not divide gpus=4"),
        (
            dict(gpus=12, context_parallel_size=4),
            "shared by the 3 shares of a batch: give a multiple of 3",
        ),
        (dict(gpus=4, tensor_parallel_size=2, context_parallel_size=2), "neither layers nor exp"),
    ],
)
def test_divisions_that_no_run_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_memory(get_preset("gated-nano"), get_recipe("bf16"), batch_size=8, **options)


def test_command_line(any_batch: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--preset", "gated-nano", "--memory", "--seq-len", "64", "--batch-size", "4"]
    assert (
        main([*command, "--gpus", "2", "--tensor-parallel-size", "2", "--sequence-parallel"]) == 0
    )
    assert "2 GPUs (layers and tokens in 2)" in capsys.readouterr().out
    command[2] = "gated-moe-nano"
    assert main([*command, "--gpus", "2", "--expert-parallel-size", "2"]) == 0
    assert "2 GPUs (FSDP, experts in 2)" in capsys.readouterr().out
    command[2] = "gated-nano"
    assert main([*command, "--gpus", "4", "--context-parallel-size", "2"]) == 0
    found = capsys.readouterr().out
    assert "2 x 64 tokens per 2 GPUs" in found and "4 GPUs (FSDP, rows in 2)" in found
    assert main([*command[:3], "--tensor-parallel-size", "2"]) == 2
    assert "add --memory" in capsys.readouterr().err
