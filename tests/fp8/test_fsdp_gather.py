"""FP8 primary weights under FSDP2: FP8 data is gathered, one scale serves all ranks,
and the run is the one of a single process."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_job import (
    SHAPE,
    assert_same_checkpoints,
    by_one,
    continue_from,
    make_trainer,
    solo,
    start,
)
from fewer import asked_for
from ranks import as_one_of, run_ranks

from te_models import CausalLM
from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import whole
from te_models.engine.emulated import DType, Float8CurrentScalingQuantizer, Float8Quantizer
from te_models.fp8.fsdp_gather import FP8Shard, amax_group, reduce_amax_over
from te_models.fp8.primary_weights import quantized, quantized_weights
from te_models.optim import build_optimizer
from te_models.training.launch import meshes
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer
from tests.training.test_parallel import assert_close

FSDP = dict(parallel="fsdp", fp8_params=True)
RUNS: dict[str, dict[str, Any]] = {
    "delayed": dict(FSDP, recipe="delayed"),
    "current": dict(FSDP, recipe="current"),
    "kept": dict(FSDP, recipe="delayed", reshard_after_forward=False),
    "recomputed": dict(FSDP, recipe="delayed", mode="full"),
    "accumulating": dict(
        FSDP, recipe="current", gradient_accumulation=2, tied=False, reshard_after_forward=False
    ),
}
SAVED = dict(FSDP, recipe="delayed", dtype="bfloat16", steps=4, save_every=2)
RESUMED = {
    "saved": SAVED,
    "resumed": dict(SAVED, resume="saved"),
    "from-one": dict(SAVED, resume="one"),
}


def born(recipe: str, shared: Parallel, root: Path) -> dict[str, Any]:
    """A fresh model's codes, what training it sends, and its codes against a cast of the whole masters after it."""
    run = make_trainer(shared, root / f"born-{recipe}", dict(FSDP, recipe=recipe, steps=2))
    fresh = {name: whole(codes).tolist() for name, codes in quantized_weights(run.model).items()}
    sent: list[int] = []
    name = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )  # what FSDP2 calls
    gather = getattr(dist, name)

    def counted(out: Any, own: Any, *args: Any, **options: Any) -> Any:
        sent.append(own.nbytes)
        return gather(out, own, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counted)
        shared.ranks.gather(run.run().loss)
    return dict(fresh=fresh, sent=sorted(set(sent)), wrong=differing(run))


def gpu_job(rank: int, folder: str) -> None:
    """On the engine of this process's device: losses with weights in pieces and whole,
    all ranks on the same batches."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    config, control = TrainConfig(parallel="fsdp"), Ranks(dist.new_group(backend="gloo"))
    shared = Parallel("fsdp", control, device, config=config, **meshes(config, device))
    for recipe, mode in itertools.product(("delayed", "current"), ("none", "full")):
        options: dict[str, Any] = dict(
            recipe=recipe, fp8_params=True, activation_checkpointing=mode, device=device
        )
        one, cut = (losses(build, options) for build in (CausalLM, shared.build))
        assert cut == pytest.approx(one, rel=2e-3), (recipe, mode)


def losses(build: Any, options: dict[str, Any], steps: int = 5) -> list[float]:
    torch.manual_seed(3)
    model = build(get_preset("gated-nano", **SHAPE), **options)
    model.te.FP8GlobalStateManager.reset()
    optimizer = build_optimizer("adamw", model, 3e-3, 0.1)
    ids = torch.randint(0, 256, (steps, 2, 64), generator=torch.Generator().manual_seed(0)).to(
        model.device
    )
    found = []
    for batch in ids:
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus_weights_in_pieces_train_as_whole_ones(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    run_ranks(gpu_job, tmp_path, ranks, "nccl")


def differing(run: Trainer) -> int:
    """Count FP8 values and scales that differ from those of one process with the whole masters and the same scale."""
    masters, wrong = run.optimizer.masters_by_id(), 0
    for parameter in run.model.parameters():
        if (fp8 := quantized(parameter)) is None:
            continue
        master, scale = whole(masters[id(parameter)]), fp8._scale_inv.reciprocal()
        if isinstance(fp8._quantizer, Float8Quantizer):
            scale = fp8._quantizer.scale
            wrong += int(fp8._scale_inv != scale.reciprocal())
        else:
            wrong += int(abs(scale * master.abs().max() - 448) > 1e-3)
        expected = Float8Quantizer(scale, torch.zeros(1), fp8._fp8_dtype)(master)._data
        wrong += int((gathered(fp8._data) != expected).sum())
    return wrong


def gathered(own: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gather")


@pytest.fixture(scope="module")
def two(root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The outcomes of the runs that are asked for, and of the others."""
    one = solo(root / "one", SAVED)
    fresh = {f"born-{recipe}": partial(born, recipe) for recipe in ("delayed", "current")}
    asked = {"delayed", *asked_for(request, "name")}
    runs = {name: case for name, case in RUNS.items() if name in asked}
    found = start(root, 2, {**runs, **RESUMED, **fresh})
    found["one"] = one
    return found


def test_a_shard_reads_as_its_values_and_is_read_only() -> None:
    fp8 = Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3)(
        torch.randn(4, 16)
    )
    shard = FP8Shard(fp8)
    assert torch.equal(shard * 2, fp8.dequantize() * 2) and torch.equal(
        shard.view(-1) * 2, fp8.dequantize().view(-1) * 2
    )
    with pytest.raises(NotImplementedError, match="use te_models.fp8.primary_weights.write_weight"):
        shard.add_(1)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_second_gather_brings_other_data(recipe: str) -> None:
    """FSDP2 writes into the tensor of the first gather, whose transpose backward has made meanwhile."""
    group: Any = object()
    quantizer: Any = Float8Quantizer(
        torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3, columnwise=False
    )
    if recipe == "current":
        quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)
    shards = [FP8Shard(quantizer(torch.randn(4, 16) * size)) for size in (1.0, 3.0)]
    for shard in shards:
        reduce_amax_over(shard.fp8._quantizer, group)
    found = None
    for shard in shards:
        (own,), scale_inv = shard.fsdp_pre_all_gather(None, None, None, None, None)
        gathered = (torch.cat([own, own]),)
        if found is None:
            first_gather = shard.fsdp_post_all_gather(gathered, scale_inv, torch.float32)
            assert first_gather is not None
            found = first_gather[0].fp8
        else:
            assert shard.fsdp_post_all_gather(gathered, scale_inv, torch.float32, out=found) is None
        expected = shard.fp8.dequantize().repeat(2, 1)
        assert torch.equal(found.dequantize(), expected) and found._transpose is None
        found.update_usage(columnwise_usage=True)
        assert torch.equal(found._transpose, found._data.t())
        # A cast of the gathered weight would otherwise wait for the other processes.
        assert amax_group(found._quantizer) is None and found._quantizer is not shard.fp8._quantizer
        assert amax_group(shard.fp8._quantizer) is (group if recipe == "current" else None)


@pytest.mark.parametrize(
    "name", ["delayed", pytest.param("current", marks=pytest.mark.slow), "accumulating"]
)
def test_two_processes_compute_what_one_does(
    name: str, two: dict[str, Any], tmp_path: Path
) -> None:
    expected, found = by_one(RUNS[name], tmp_path), two[name]
    assert_close(found, expected, RUNS[name]["recipe"])


@pytest.mark.parametrize("name", ["kept", pytest.param("recomputed", marks=pytest.mark.slow)])
def test_neither_gathering_again_nor_recomputing_changes_a_bit(
    name: str, two: dict[str, Any]
) -> None:
    """Codes are made once a step, where BF16 weights are quantized again in backward, with other scales."""
    assert two[name] == two["delayed"]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_codes_are_those_of_one_process_in_every_bit(
    recipe: str, two: dict[str, Any], tmp_path: Path
) -> None:
    case = {**FSDP, "recipe": recipe}
    del case["parallel"]
    fresh = quantized_weights(make_trainer(Parallel(), tmp_path, case).model)
    assert {name: codes.tolist() for name, codes in fresh.items()} == two[f"born-{recipe}"]["fresh"]
    assert two[f"born-{recipe}"]["wrong"] == 0


def test_a_block_sends_a_byte_a_parameter(two: dict[str, Any]) -> None:
    model = CausalLM(
        get_preset("gated-nano", **SHAPE, tie_word_embeddings=True),
        device="cpu",
        dtype=torch.float32,
    )
    matrices, vectors = (
        sum(p.numel() for p in model.layers[1].parameters() if p.dim() == dim) for dim in (2, 1)
    )
    plain = 4 * (matrices + vectors)  # a block at an end of the model, which stays as it is
    rest = 4 * sum(
        p.numel() for p in (model.embed_tokens.weight, model.norm.get_parameter("weight"))
    )
    assert two["born-delayed"]["sent"] == sorted(
        size // 2 for size in (matrices + 4 * vectors, rest, plain)
    )


def test_a_resume_on_as_many_ranks_is_exact(two: dict[str, Any], root: Path) -> None:
    assert two["resumed"] == two["saved"]
    assert_same_checkpoints(root / "saved", root / "resumed")


def test_any_number_of_processes_goes_on_from_any_other(
    two: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    continue_from(root / "saved", tmp_path / "run")
    found = solo(tmp_path / "run", SAVED, resume=True)
    assert found["losses"][:2] == two["saved"]["losses"][:2]
    assert_close(found, two["saved"], "delayed", ["losses"])
    assert two["from-one"]["losses"][:2] == two["one"]["losses"][:2]
    assert_close(two["from-one"], two["one"], "delayed", ["losses"])


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("ddp", dict(recipe="delayed"), "one process or --parallel fsdp, not ddp"),
        (
            "fsdp",
            dict(recipe="blockwise"),
            "need one scale per weight, which recipe 'blockwise' does not have",
        ),
        ("fsdp", dict(recipe="current", world=3), "cannot be divided evenly among 3 processes"),
    ],
)
def test_unsupported_gathers_are_refused_in_one_line(
    kind: str, options: dict[str, Any], reason: str
) -> None:
    config, device = TrainConfig(parallel=kind), torch.device("cpu")
    with as_one_of(options.pop("world", 2)):
        shared = Parallel(
            kind, Ranks(dist.group.WORLD), device, config=config, **meshes(config, device)
        )
        with pytest.raises(ValueError, match=reason) as found:
            shared.build(get_preset("gated-nano", **SHAPE), fp8_params=True, **options)
    assert "\n" not in str(found.value)
