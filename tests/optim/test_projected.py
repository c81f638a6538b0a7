"""GaLore's gradients projected in backward: the bits of projecting full ones, none of which are kept."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_tape import pretend_cuda
from torch import Tensor

from te_models import CausalLM, TrainConfig, Trainer, get_preset, get_recipe
from te_models.errors import UsageError
from te_models.optim import build_optimizer
from te_models.optim.gradients import Gradients, GradientSums
from te_models.optim.groups import parts
from te_models.optim.projected import ProjectedGradients, projected_parameters
from te_models.planning.memory_plan import plan_memory

SHAPE: dict[str, Any] = dict(
    vocab_size=288, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32,
)  # fmt: skip
RANK = 16
KINDS: dict[str, dict[str, Any]] = {
    "bf16": dict(recipe="bf16"),
    "current": dict(recipe="current"),
    "delayed": dict(recipe="delayed"),
    "delayed, FP8 weights": dict(recipe="delayed", fp8_params=True),
    "headwise gate": dict(recipe="bf16", attention_gate="headwise"),
    "experts": dict(recipe="bf16", moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)),
}  # fmt: skip


MORE = ("current", "delayed", "headwise gate", "experts")
SLOW = pytest.mark.slow


def model_of(device: str = "cpu", **options: Any) -> CausalLM:
    """Return a small model with fixed weights."""
    torch.manual_seed(0)
    shape = {name: options.pop(name) for name in ("attention_gate", "moe") if name in options}
    preset = "gated-moe-nano" if "moe" in shape else "gated-nano"
    return CausalLM.from_preset(preset, **SHAPE, **shape, **options, device=device)


def batches(count: int) -> list[dict[str, Tensor]]:
    """Return batches of random tokens."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ids = torch.randint(0, SHAPE["vocab_size"], (2, 32), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def trainer_of(
    folder: Path, in_backward: bool, kind: str = "bf16", device: str = "cpu", **training: Any
) -> Trainer:
    """Return a run with GaLore of a small rank."""
    options = {"rank": RANK, "refresh": 3, "in_backward": in_backward}
    settings: dict[str, Any] = dict(
        steps=8, batch_size=2, seq_len=32, eval_every=0, clip_grad_norm=0.0, warmup_steps=0, save_every=4
    )  # fmt: skip
    settings |= training
    config = TrainConfig(optimizer="galore", optimizer_options=options, **settings)
    return Trainer(model_of(device, **KINDS[kind]), batches(7), None, config, folder)


def values_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return all masters, and all state of the optimizer."""
    found = {}
    saved = trainer.optimizer.state_dict()
    for number, master in enumerate(trainer.optimizer.masters):
        found[f"master {number}"] = master.detach().clone()
    for number, state in enumerate(saved["state"]):
        for name, value in state.items():
            if isinstance(value, Tensor):
                found[f"{name} {number}"] = value.clone()
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    "kind",
    ["bf16", "delayed, FP8 weights", *(pytest.param(kind, marks=SLOW) for kind in MORE)],
)
def test_a_run_is_that_of_full_gradients_in_every_bit(kind: str, tmp_path: Path) -> None:
    """Without clipping and with one micro-batch per step, over several projectors."""
    runs = []
    for in_backward in (False, True):
        trainer = trainer_of(tmp_path / str(in_backward), in_backward, kind)
        losses: list[float] = []
        trainer.on_step = lambda row, losses=losses: losses.append(row["loss"])
        trainer.run()
        runs.append((losses, values_of(trainer)))
    assert len(runs[0][0]) == 8
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


def test_sums_of_micro_batches_are_the_projected_sum(tmp_path: Path) -> None:
    """With the projector that full gradients give, to the rounding of FP32."""
    model = model_of(recipe="bf16")
    rows = parts(model)
    own = projected_parameters(rows, RANK)
    rest = [p for p in model.parameters() if id(p) not in set(map(id, own))]
    gradients = ProjectedGradients(rows, RANK, 1, GradientSums(rest))
    reference = GradientSums(list(model.parameters()))
    for source in (gradients, reference):
        with source.collecting():
            for number, batch in enumerate(batches(3)):
                with source.micro_batch(first=number == 0, last=number == 2):
                    (model(**batch, return_logits=False).loss / 3).backward()
    assert all(p.grad is None for p in model.parameters())
    for parameter in own:
        found = gradients.of(parameter)
        full = reference.of(parameter)
        assert found is not None and full is not None
        for part in gradients._parts[id(parameter)]:
            values = part.rows.of(full).float()
            if part.projector is not None:
                wide = values.mT if values.shape[0] > values.shape[1] else values
                values = part.projector.mT @ wide
            torch.testing.assert_close(part.of(found), values, rtol=1e-4, atol=1e-7)
    for parameter in rest:
        assert torch.equal(gradients.of(parameter), reference.of(parameter))  # type: ignore[arg-type]


def test_several_micro_batches_train_as_full_gradients_do(tmp_path: Path) -> None:
    """Projectors are of the first micro-batch there, so that losses are near and not equal."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    for in_backward, found in losses.items():
        trainer = trainer_of(tmp_path / str(in_backward), in_backward, gradient_accumulation=2)
        trainer.on_step = lambda row, found=found: found.append(row["loss"])
        trainer.run()
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True][-1] < losses[True][0]


def test_the_norm_is_of_projected_gradients_and_clips_them(tmp_path: Path) -> None:
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for in_backward, found in rows.items():
        trainer = trainer_of(
            tmp_path / str(in_backward), in_backward, clip_grad_norm=0.1, steps=1, save_every=0
        )
        trainer.on_step = found.append
        trainer.run()
    full = rows[False][0]["grad_norm"]
    projected = rows[True][0]["grad_norm"]
    assert 0.1 < projected < full
    model = model_of(recipe="bf16")
    optimizer = build_optimizer(
        "galore", model, 1e-3, 0.0, {"rank": RANK, "in_backward": True, "beta1": 0.0}
    )
    with optimizer.gradients.collecting():
        model(**batches(1)[0], return_logits=False).loss.backward()
    norm = optimizer.take_gradients(0.1)
    optimizer.step()
    assert float(norm) == pytest.approx(projected, rel=1e-6)
    # With beta1 = 0 the first moment is the clipped gradient.
    total = 0.0
    for built in optimizer.optimizers:
        for state in built.state.values():
            total += float(state["exp_avg"].double().square().sum())
    assert total**0.5 == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=SLOW)])
def test_a_resumed_run_is_the_same_in_every_bit(accumulation: int, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", True, gradient_accumulation=accumulation)
    whole.run()
    first = trainer_of(tmp_path / "parts", True, gradient_accumulation=accumulation)
    rows = first.steps(first.passes.calibrated(iter(first.data)))
    while next(rows)["step"] < 4:
        pass
    first.save()
    second = trainer_of(tmp_path / "parts", True, gradient_accumulation=accumulation)
    second.run(resume=True)
    assert second.result.step == 8
    assert_equal(values_of(whole), values_of(second))


def test_a_run_may_be_resumed_with_full_gradients(tmp_path: Path) -> None:
    """The state is the same, so either way of the option continues the other's run."""
    trainer_of(tmp_path, True, steps=4, schedule="constant").run()
    resumed = trainer_of(tmp_path, False, schedule="constant")
    resumed.run(resume=True)
    again = trainer_of(tmp_path / "whole", False, schedule="constant")
    again.run()
    assert_equal(values_of(resumed), values_of(again))


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("kind", ["bf16", pytest.param("delayed", marks=SLOW)])
def test_replayed_steps_are_the_eager_ones(
    kind: str, accumulation: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stand-in for CUDA graphs, whose tape replays operations at their addresses."""
    monkeypatch.setattr("te_models.training.cuda_graph.obstacle", lambda model: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    tapes = pretend_cuda(monkeypatch)
    found = []
    for graph in (False, True):
        trainer = trainer_of(
            tmp_path / str(graph), True, kind, gradient_accumulation=accumulation, cuda_graph=graph, steps=100
        )  # fmt: skip
        rows = []
        batches_of_run = trainer.passes.calibrated(iter(trainer.data))
        for number in range(14):
            row = trainer.step(batches_of_run)
            rows.append((row["loss"], row["grad_norm"]))
            if number == 10:  # a graph reads loaded projectors too
                trainer.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))
        assert (trainer.passes.graph is not None and trainer.passes.graph.captured) == graph
        found.append((rows, values_of(trainer)))
    assert len(tapes) == accumulation
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["bf16", "current", "delayed, FP8 weights"])
def test_as_a_cuda_graph_it_is_the_same_in_every_bit(
    kind: str, accumulation: int, tmp_path: Path
) -> None:
    """Steps with new projectors run without the graph, between replays."""
    found = []
    for graph in (False, True):
        trainer = trainer_of(
            tmp_path / str(graph), True, kind, "cuda", gradient_accumulation=accumulation, cuda_graph=graph,
            deterministic=True, steps=14,
        )  # fmt: skip
        captured: list[bool] = []
        trainer.on_step = lambda row, own=trainer, captured=captured: captured.append(
            own.passes.graph is not None and own.passes.graph.captured
        )
        trainer.run()
        assert any(captured) == graph
        found.append(values_of(trainer))
    assert_equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "current", "delayed, FP8 weights"])
def test_on_a_gpu_a_run_is_that_of_full_gradients(kind: str, tmp_path: Path) -> None:
    found = []
    for in_backward in (False, True):
        trainer = trainer_of(
            tmp_path / str(in_backward), in_backward, kind, "cuda", deterministic=True
        )
        trainer.run()
        found.append(values_of(trainer))
    assert_equal(*found)


def test_loaded_projectors_are_at_the_same_address() -> None:
    """A CUDA graph reads them there."""
    model = model_of(recipe="bf16")
    options = {"rank": RANK, "in_backward": True}
    optimizer = build_optimizer("galore", model, 1e-3, 0.0, options)
    gradients = optimizer.gradients
    assert isinstance(gradients, ProjectedGradients)

    def step() -> None:
        with gradients.collecting():
            model(**batches(1)[0], return_logits=False).loss.backward()
        optimizer.take_gradients(0.0)
        optimizer.step()

    assert gradients.changes_projectors
    step()
    assert not gradients.changes_projectors
    part = next(p for own in gradients._parts.values() for p in own if p.projector is not None)
    assert part.projector is not None
    address = part.projector.data_ptr()
    before = part.projector.clone()
    saved = optimizer.state_dict()
    part.projector.zero_()
    saved["state"] = [
        {n: before if v is part.projector else v for n, v in state.items()}
        for state in saved["state"]
    ]
    optimizer.load_state_dict(saved)
    assert part.projector.data_ptr() == address
    assert torch.equal(part.projector, before)
    assert part.state["projector"] is part.projector


def test_no_full_gradient_of_a_matrix_outlives_its_hook() -> None:
    model = model_of(recipe="bf16")
    optimizer = build_optimizer("galore", model, 1e-3, 0.0, {"rank": RANK, "in_backward": True})
    alive: list[int] = []

    def count(parameter: Tensor) -> None:
        own = optimizer.gradients.parameters  # type: ignore[attr-defined]
        alive.append(sum(p.grad is not None for p in own))

    with optimizer.gradients.collecting():
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(count)
        model(**batches(1)[0], return_logits=False).loss.backward()
    assert len(alive) == len(list(model.parameters()))
    assert max(alive) == 0


def test_backward_outside_collecting_is_an_error() -> None:
    model = model_of(recipe="bf16")
    optimizer = build_optimizer("galore", model, 1e-3, 0.0, {"rank": RANK, "in_backward": True})
    model(**batches(1)[0], return_logits=False).loss.backward()
    with pytest.raises(UsageError, match="inside `optimizer.gradients.collecting"):
        optimizer.take_gradients(1.0)


def test_a_gradient_that_is_not_finite_gives_no_projector() -> None:
    rows = parts(model_of(recipe="bf16"))
    gradients = ProjectedGradients(rows, RANK, 1, Gradients())
    parameter = gradients.parameters[0]
    parameter.grad = torch.full_like(parameter, float("nan"))
    gradients._add(parameter)
    sums = gradients.of(parameter)
    assert sums is not None and not sums.isfinite().any()
    assert all(
        part.projector is None or not part.projector.any()
        for part in gradients._parts[id(parameter)]
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (dict(optimizer_offload=True), "in_backward=true projects on the GPU"),
        (dict(gpus=2), "in_backward=true projects the gradients of one GPU"),
    ],
)
def test_what_it_cannot_be_combined_with_is_said_in_a_line(
    given: dict[str, Any], line: str
) -> None:
    options: dict[str, Any] = dict(
        optimizer="galore", optimizer_options={"rank": RANK, "in_backward": True}
    )
    with pytest.raises(UsageError, match=line):
        plan_memory(get_preset("gated-124m"), get_recipe("bf16"), **options, **given)
    if "gpus" not in given:
        model = model_of(recipe="bf16")
        with pytest.raises(UsageError, match=line):
            build_optimizer("galore", model, 1e-3, 0.0, {"in_backward": True}, offload=True)


@pytest.mark.parametrize(
    ("accumulation", "fp8_params"),
    [(1, True), (4, False), pytest.param(1, False, marks=SLOW), pytest.param(4, True, marks=SLOW)],
)
def test_the_plan_has_no_full_gradients(accumulation: int, fp8_params: bool) -> None:
    """At the update what is left of full gradients is the tables' and norms', by hand."""
    config = get_preset("gated-1b")
    found = {}
    for in_backward in (False, True):
        plan = plan_memory(
            config, get_recipe("delayed"), batch_size=2, seq_len=1024, optimizer="galore",
            optimizer_options={"rank": 256, "in_backward": in_backward}, activation_checkpointing="full",
            gradient_accumulation=accumulation, fp8_params=fp8_params,
        )  # fmt: skip
        found[in_backward] = plan
    tables = 2 * config.vocab_size * config.hidden_size
    norms = config.hidden_size * (2 * config.num_hidden_layers + 1)
    low = 0
    for inputs, outputs in LINEARS_1B:
        low += 256 * max(inputs, outputs)
    low *= config.num_hidden_layers
    update = 2 * 4 * max(inputs * outputs for inputs, outputs in LINEARS_1B)
    at_update = found[True].moments[-1]
    assert at_update.moment == "optimizer step"
    assert at_update.gradients == 4 * low + 4 * (tables + norms) + update
    assert found[True].peak.total < found[False].peak.total - 2**30
    backward = found[True].moments[1]
    assert backward.gradients < found[False].moments[1].gradients


# Logical matrices of a layer of gated-1b: q, k, v, the gate, o, and the three of SwiGLU.
LINEARS_1B = [(2048, 2048)] * 5 + [(2048, 5632)] * 3
