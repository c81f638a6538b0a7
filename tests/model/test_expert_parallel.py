"""Ranks that share experts compute what one process does, in every gradient, and save the folder that it saves."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from te_models import CausalLM, ModelConfig
from te_models.cli import main
from te_models.config.moe import places_of_experts
from te_models.config.training import TrainConfig
from te_models.distributed.planned_ranks import PlannedRanks
from te_models.kernels.expert_rows import PLAIN
from te_models.model import moe
from te_models.model.expert_parallel import ExpertParallel, arrivals
from te_models.model.forward_context import ForwardContext
from te_models.model.gathered_tokens import packed
from te_models.model.graph_obstacle import graph_obstacle
from te_models.model.router import Places, places
from te_models.saving.folder import load_folder
from te_models.training.launch import meshes, parallel
from te_models.training.parallel import Parallel
from te_models.training.step_passes import StepPasses

SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, attention_gate="none", qk_norm=True,
)  # fmt: skip
# Without the balance loss, which is that of each process's own tokens where no run says otherwise.
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, router_aux_loss_coef=0.0)
CONFIG = ModelConfig(**SHAPE, moe=MOE)
# Only experts in FP8: their amaxes are over the tokens of all ranks, as in one process; those of attention are not.
FP8: dict[str, Any] = dict(
    recipe="current", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0
)
FP8["precision"] = {"*.self_attn.*": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts in FP8": FP8,
    "recomputed": dict(activation_checkpointing="full"),
    "partly recomputed": dict(activation_checkpointing="selective", **FP8),
    "padding": {},
    "biases": dict(config=ModelConfig(**SHAPE, moe=MOE | dict(bias=True, swiglu_limit=1.0)), **FP8),
    "scaled inputs": dict(
        config=ModelConfig(**SHAPE, moe=MOE | dict(scale_inputs=True, router_scores="sigmoid")),
        **FP8,
    ),
    "idle rank": {},  # all tokens go to experts of rank 0
}


def build(mesh: DeviceMesh | None = None, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    options = {"config": CONFIG, "recipe": "bf16", "dtype": torch.float32, **options}
    return CausalLM(device="cpu", engine="emulated", ep_mesh=mesh, **options)


def batch(name: str) -> dict[str, Tensor]:
    """Four rows, of which each of two ranks gets two."""
    ids = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(1))
    if name != "padding":
        return dict(input_ids=ids, labels=ids)
    real = torch.ones_like(ids)
    real[0, 20:] = real[3, 20:] = 0  # as many on each rank, so that their losses have equal weights
    return dict(input_ids=ids, labels=ids, attention_mask=real)


def gradients(
    model: CausalLM, values: dict[str, Tensor], name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    if name == "idle rank":
        with torch.no_grad():
            for layer in model.layers:
                router = layer.get_submodule("mlp.router")
                router.get_parameter(
                    "weight"
                ).zero_()  # of equal scores the first two experts are chosen
    loss = model(**values).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def all_tokens(model: CausalLM) -> Iterator[None]:
    """Let ranks give each other all tokens, as on GPUs, on an engine that needs numbers of rows on the host."""

    def known(*arguments: Any, on_device: bool, **options: Any) -> Places:
        return places(*arguments, on_device=False, **options)

    model.ranks_alike = True
    with (
        patch.object(ForwardContext, "counts_on_device", lambda self, *modules: True),
        patch.object(moe, "places", known),
        patch.object(ExpertParallel, "exchange", side_effect=AssertionError),
    ):
        yield
    model.ranks_alike = False


def compare(name: str, mesh: DeviceMesh, alike: bool) -> dict[str, float]:
    """Return the relative difference of the loss and of every gradient from those of one process.

    With `alike` every rank gets all tokens, else the rows of its experts.
    """
    ep, values = ExpertParallel(mesh, CONFIG), batch(name)
    mine = {key: value.chunk(2)[ep.rank] for key, value in values.items()}
    model = build(mesh, **CASES[name])
    with all_tokens(model) if alike else nullcontext():
        loss, own = gradients(model, mine, name)
    expected, whole = gradients(build(**CASES[name]), values, name)
    found = ep.gather(own, torch.device("cpu"))
    for parameter, gradient in found.items():
        if ep.owner(parameter) is None:
            dist.all_reduce(gradient)  # experts have the gradients of all tokens already
    dist.all_reduce(loss)
    assert found.keys() == whole.keys()
    errors = {
        n: ((found[n] / 2 - g).norm() / g.norm().clamp(min=1e-9)).item() for n, g in whole.items()
    }
    return errors | {"loss": ((loss / 2 - expected) / expected).abs().item()}


def save_and_load(mesh: DeviceMesh, folder: Path) -> None:
    """Every rank's experts come back from a folder of the whole model, and from one of Hugging Face."""
    model = build(mesh)
    for form in ("te", "hf"):
        model.save_pretrained(folder / form, format=form)
        place: dict[str, Any] = dict(device="cpu", engine="emulated")
        ways: list[dict[str, Any]] = [dict(ep_mesh=mesh), dict(build=Parallel(ep=mesh).build)]
        for way in ways:
            again = CausalLM.from_pretrained(folder / form, **place, **way)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, again.get_parameter(name)), name


def payload(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the rows that arrive where every rank sends some to each expert, in full and in FP8."""
    torch.manual_seed(3 + mesh.get_local_rank())
    rows = torch.randn(30, 64) * torch.logspace(-6, 4, 30)[:, None]
    rows[7] = 0
    dy = torch.randn(30, 64)
    sent = places(torch.arange(4).repeat(8)[:30, None], 4, 1)
    found: dict[str, Any] = {}
    for fp8 in (False, True):
        x = rows.clone().requires_grad_()
        _, exchange = ExpertParallel(mesh, CONFIG, fp8).exchange(sent, 16, PLAIN)
        arrived = exchange.to_experts(x)
        exchange.from_experts(arrived * 3).backward(dy)
        assert x.grad is not None and torch.equal(x.grad, 3 * dy), "gradients travel in full"
        found[f"{fp8}"] = arrived.detach()
    found["bytes"] = packed(rows).numel()
    return found


def refusals(mesh: DeviceMesh) -> list[str]:
    three, dense = ModelConfig(**SHAPE, moe={**MOE, "num_experts": 3}), ModelConfig(**SHAPE)
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    said = []
    for config, options in (
        (three, {}),
        (dense, {}),
        (CONFIG, dict(recipe="delayed", **edges)),
        (CONFIG, dict(recipe="current", fp8_params=True, **edges)),
    ):
        with pytest.raises(ValueError) as caught:
            CausalLM(
                config,
                **{"recipe": "bf16", **options},
                device="cpu",
                engine="emulated",
                ep_mesh=mesh,
            )
        said.append(str(caught.value))
    lora = pytest.importorskip("te_models.training.lora")
    with pytest.raises(ValueError, match="adapters on experts need all experts on each process"):
        lora.add_lora(build(mesh), target_modules=["experts"])
    return said


def on_each(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    found: dict[str, Any] = {}
    for name in CASES:
        found[name] = compare(name, mesh, alike=False)
        found[f"{name}, all tokens"] = compare(name, mesh, alike=True)
    found["refusals"] = refusals(mesh)
    found["payload"] = payload(mesh)
    save_and_load(mesh, Path(folder))
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    run_ranks(on_each, root, 2)
    return root


@pytest.mark.parametrize("way", ["", ", all tokens"], ids=["rows", "all tokens"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_loss_and_the_gradients_of_one(
    name: str, way: str, folder: Path
) -> None:
    errors = torch.load(folder / "found.pt")[name + way]
    # Sums in another order, in FP32; in FP8 that may move a value to the next code, of E5M2 2^-2 away.
    bound = 2e-3 if "recipe" in CASES[name] else 1e-5
    assert max(errors.values()) < bound, max(errors, key=errors.get)


def test_rows_in_fp8_are_rounded_once(folder: Path) -> None:
    found = torch.load(folder / "found.pt")["payload"]
    full, rounded = found["False"], found["True"]
    step = full.abs().amax(1, keepdim=True) / 448 * 2.0**-9  # between E4M3's subnormal numbers
    error = (rounded - full).abs()
    # Half the distance of two codes: 2^-4 of a normal number.
    assert (error <= torch.maximum(full.abs() * 2.0**-4, step / 2) * (1 + 1e-6)).all() and (
        error > 0
    ).any()
    assert not rounded[full.abs().amax(1) == 0].any()
    assert found["bytes"] == 30 * (64 + 4)


def ways_of_steps(everyone: Parallel, rank: int) -> dict[str, Any]:
    """Return how tokens travel in steps whose ranks have rows of equal and of different lengths, and their losses."""
    config = TrainConfig(parallel="fsdp+ep")
    assert everyone.device is not None
    shared = replace(everyone, config=config, **meshes(config, everyone.device))
    torch.manual_seed(0)
    model = shared.build(CONFIG, recipe="bf16", dtype=torch.float32)
    shared.prepare(model)
    passes = StepPasses(model, shared.gradients(model, 1), shared, config)
    alike = []
    model.register_forward_pre_hook(lambda module, _: alike.append(model.ranks_alike))
    ids = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    whole = CausalLM(CONFIG, device="cpu", recipe="bf16", dtype=torch.float32)
    losses = []
    for shortest in (24, 20):
        length = shortest if rank == 0 else 24
        row = ids[rank : rank + 1, :length]
        losses.append(shared.sum(passes.run([dict(input_ids=row, labels=row)])).item())
        total = torch.zeros(())
        for other in range(4):
            one = ids[other : other + 1, : shortest if other == 0 else 24]
            total += whole(one, labels=one).loss.detach() * (one.shape[1] - 1)
        losses.append((total / (shortest + 3 * 24 - 4)).item())
    return dict(alike=alike, losses=losses, after=model.ranks_alike)


def sharded(device: str, kind: str, rank: int, folder: str) -> None:
    """Everything sharded by FSDP2; by "fsdp+ep" experts divided as well, between two ranks or all."""
    found: dict[str, float] = {}
    steps = {}
    with parallel(TrainConfig(parallel=kind), device) as everyone:
        if device == "cpu":
            steps = ways_of_steps(everyone, rank)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        # FP8 has one process's amaxes only where an expert gets the rows of all.
        cases = [("plain", 2, False), ("experts in FP8", 0, False)]
        cases += [("plain", 2, True), ("experts in FP8", 0, True)]
        if kind == "fsdp":
            cases = [("plain", 0, False)]
        for name, size, alike in cases:
            config = TrainConfig(parallel=kind, expert_parallel_size=size)
            assert everyone.device is not None
            shared = replace(everyone, config=config, **meshes(config, everyone.device))
            options: dict[str, Any] = {"recipe": "bf16", **CASES[name], "dtype": dtype}
            torch.manual_seed(0)
            model = shared.build(CONFIG, **options)
            model.ranks_alike = alike
            values = {key: value.to(model.device) for key, value in batch(name).items()}
            with all_tokens(model) if alike and device == "cpu" else nullcontext():
                model(
                    **{key: value.chunk(shared.data_world)[rank] for key, value in values.items()}
                ).loss.backward()
            own = {
                n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None
            }
            torch.manual_seed(0)
            whole = CausalLM(CONFIG, device=model.device, **options)
            whole(**values).loss.backward()
            gathered = model.ep.gather(own, model.device)
            for n, p in whole.named_parameters():
                assert p.grad is not None
                found[f"{name}, {alike}: {n}"] = (
                    (gathered[n] - p.grad).norm() / p.grad.norm().clamp(min=1e-9)
                ).item()
    if rank == 0:
        torch.save(found, f"{folder}/sharded.pt")
        torch.save(steps, f"{folder}/steps.pt")


def test_sharded_experts_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    run_ranks(partial(sharded, "cpu", "fsdp+ep"), tmp_path, 4, backend=None)
    steps = torch.load(tmp_path / "steps.pt")
    # Only where all ranks have rows of one length do they give each other all tokens, and only in steps.
    assert steps["alike"] == [True, False] and not steps["after"]
    first, first_alone, second, second_alone = steps["losses"]
    assert first == pytest.approx(first_alone, rel=1e-5)
    assert second == pytest.approx(second_alone, rel=1e-5)
    errors = torch.load(tmp_path / "sharded.pt")
    for name, error in errors.items():
        assert error < (1e-5 if name.startswith("plain") else 2e-3), name  # as above


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["fsdp", "fsdp+ep"])
def test_sharded_experts_have_the_gradients_of_one_gpu(kind: str, tmp_path: Path) -> None:
    """Those that FSDP2 gathers again for the backward pass are elsewhere in memory then."""
    run_ranks(partial(sharded, "cuda", kind), tmp_path, 2, backend=None, gpus=True)
    # Some twenty operations round to BF16, 2^-9 each, and move some values to the next code; gradients that are not
    # averaged are off by a factor of 2.
    assert all(error < 2.0**-3 for error in torch.load(tmp_path / "sharded.pt").values())


def test_a_folder_is_that_of_one_process(folder: Path) -> None:
    build().save_pretrained(folder / "one")
    one, two = (load_folder(folder / name).tensors["model"] for name in ("one", "te"))
    assert list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def test_what_does_not_fit_is_refused_with_a_line(folder: Path) -> None:
    uneven, dense, delayed, weights = torch.load(folder / "found.pt")["refusals"]
    assert "num_experts=3 cannot be divided between 2 ranks" in uneven
    assert "this one has none" in dense
    assert "give them as ep_replicas" in delayed and "--fp8-params" in weights


def test_the_plan_says_which_experts_are_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "gated-moe-nano", "--expert-parallel-size", "2"]) == 0
    assert "experts: 0 to 3 on rank 0, 4 to 7 on rank 1 of every 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="num_experts=4 cannot be divided between 3 ranks"):
        places_of_experts(CONFIG.layers, 3)


@pytest.mark.parametrize(("ranks", "waits"), [(1, False), (2, False), (4, False), (8, True)])
def test_only_many_ranks_keep_a_step_from_being_a_graph(ranks: int, waits: bool) -> None:
    """On a GPU whose kernels read the numbers of rows there."""
    config = ModelConfig(**SHAPE, moe=MOE | dict(num_experts=8))
    model = build(config=config)
    model.kernels = replace(model.kernels, counts_on_device=lambda module, recipe: True)
    mesh: Any = None if ranks == 1 else PlannedRanks(ranks)
    model.ep = ExpertParallel(mesh, config)
    assert bool(graph_obstacle(model, ranks_alike=True)) == waits
    assert bool(graph_obstacle(model)) == (ranks > 1)


@pytest.mark.parametrize("alignment", [1, 16])
def test_rows_arrive_in_the_order_of_experts_and_ranks(alignment: int) -> None:
    """Against a sort of the experts of all rows; experts without rows, and ranks that send none, among them."""
    counts = torch.tensor([[3, 0, 20, 0], [0, 0, 0, 0], [1, 0, 5, 17]])
    found = arrivals(counts, counts.flatten().tolist(), alignment)
    expert = torch.arange(4).repeat(3).repeat_interleave(counts.flatten())
    wanted = places(expert[:, None], 4, alignment)
    assert found.rows == wanted.rows
    assert all(
        torch.equal(getattr(found, name), getattr(wanted, name))
        for name in ("token", "row", "counts")
    )
