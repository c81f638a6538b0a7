"""Steps of several micro-batches as CUDA graphs: the losses, gradients, weights and scales of the eager loop."""

from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from bits import assert_same_bits
from fewer import chosen, every
from graph_tape import pretend_cuda
from places import PLACE
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from te_models import CausalLM, list_recipes
from te_models.config.training import TrainConfig
from te_models.errors import Diverged
from te_models.fp8.scaling_state import fp8_state
from te_models.training.cuda_graph import ATTEMPTS, WARM_UP, GraphedStep, step_obstacle
from te_models.training.trainer import Trainer, deterministic

SHAPE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
                             num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
WIDE: dict[str, Any] = SHAPE | dict(hidden_size=256, intermediate_size=512)  # heads of 64 channels
HYBRID: dict[str, Any] = dict(
    layer_types=("linear_attention", "full_attention") * 2,
    linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
    num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0,
)  # fmt: skip
# A layer under the recipe, and one in BF16.
SHORT: dict[str, Any] = dict(num_hidden_layers=2, num_layers_at_start_in_bf16=0)
EXPERTS: dict[str, Any] = dict(
    moe=dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96)
)
STEPS = WARM_UP + 3


class Answers:
    """Micro-batches that count different numbers of tokens, the third of each four none."""

    def __init__(self, length: int = 16, rows: int = 2) -> None:
        self.length, self.rows, self.position = length, rows, 0

    def __iter__(self) -> "Answers":
        return self

    def __next__(self) -> dict[str, Tensor]:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        ids = torch.randint(0, 256, (self.rows, self.length), generator=generator)
        labels = ids.clone()
        labels[:, : 3 * self.position % self.length] = -100
        if self.position % 4 == 3:
            labels[:] = -100
        return {"input_ids": ids, "labels": labels}


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps are captured as on a GPU; the graphs that were made."""
    with suppress(ImportError):
        import_module("te_models.training.lora")  # transformers looks at torch.cuda.CUDAGraph
    monkeypatch.setattr("te_models.training.cuda_graph.obstacle", lambda model: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    return pretend_cuda(monkeypatch)


def build(recipe: str, lora: bool = False, **options: Any) -> Any:
    """A model, or what add_lora returned."""
    torch.manual_seed(1)
    place = dict(device="cpu", engine="emulated", recipe=recipe)
    if recipe == "bf16":
        options = {name: value for name, value in options.items() if "in_bf16" not in name}
    model = CausalLM.from_preset("gated-nano", **{**place, **SHAPE, **options})
    if lora:
        torch.manual_seed(2)
        module = pytest.importorskip("te_models.training.lora")
        return module.add_lora(model, r=4, lora_alpha=64)
    return model


def run_of(model: Any, out: Path, graph: bool, count: int, **fields: Any) -> Trainer:
    settings: dict[str, Any] = dict(
        steps=100, batch_size=2, seq_len=16, learning_rate=0.01, eval_every=0, optimizer="adamw"
    )
    settings |= dict(gradient_accumulation=count, cuda_graph=graph)
    return Trainer(model, Answers(), None, TrainConfig(**settings | fields), out)


def trained(run: Trainer, batches: Any, steps: int = STEPS) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses and norms of the steps, with an evaluation between them; weights, scales and sums after them."""
    batches = run.passes.calibrated(batches)
    rows = []
    for number in range(steps):
        torch.manual_seed(number)  # for stochastic rounding
        row = run.step(batches)
        rows.append((row["loss"], row["grad_norm"]))
        if number % 2:
            run.model.generate([1, 2, 3], max_new_tokens=3, cuda_graph=False)  # caches weights too
    sums = {
        f"sum {name}": total.clone()
        for name, p in run.model.named_parameters()
        if p.requires_grad and (total := run.gradients.of(p)) is not None
    }
    state = {**run.model.state_dict(), **fp8_state(run.model), **sums}
    return rows, {name: value for name, value in state.items() if isinstance(value, Tensor)}


def same(eager: Trainer, graphed: Trainer, steps: int = STEPS) -> None:
    assert eager.passes.graph is None and graphed.passes.graph is not None
    wanted, found = (trained(run, Answers(), steps) for run in (eager, graphed))
    assert found[0] == wanted[0]
    assert len({loss for loss, _ in wanted[0]}) == steps
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert_same_bits(name, found[1][name], value)


@pytest.mark.parametrize(
    ("recipe", "kind", "count"),
    chosen(
        [
            ("bf16", "hybrid", 4),
            ("delayed", "lora", 3),
            ("current", "recompute", 4),
            ("nvfp4", "dense", 2),
        ],
        every(2, list_recipes(), ["dense", "hybrid", "lora", "recompute"], [2, 3, 4], rest=2),
    ),
)
def test_replayed_micro_batches_are_the_eager_ones(
    recipe: str, kind: str, count: int, tapes: list[Any], tmp_path: Path
) -> None:
    options = {
        "dense": SHORT,
        "hybrid": dict(HYBRID, num_hidden_layers=2, layer_types=HYBRID["layer_types"][:2]),
        "lora": dict(SHORT, lora=True),
        "recompute": dict(SHORT, activation_checkpointing="selective"),
    }[kind]
    runs = [run_of(build(recipe, **options), tmp_path, graph, count) for graph in (False, True)]
    same(*runs)
    assert len(tapes) == min(count, 3)
    eager = -(-WARM_UP // count)
    assert [tape.replays for tape in tapes] == [
        STEPS - eager,
        *[(count - 2) * (STEPS - eager)] * (count > 2),
        STEPS - eager,
    ]


@pytest.mark.parametrize(
    ("recipe", "kind", "count"),
    # Recorded hybrids take a third of the time of all; replayed ones are above.
    chosen(
        [("delayed", "dense", 3), ("current", "recompute", 1)],
        every(3, list_recipes(), ["dense", "recompute", "hybrid"], [3, 1], rest=3),
    ),
)
def test_recorded_steps_have_graphs_of_their_own(
    recipe: str, kind: str, count: int, tapes: list[Any], tmp_path: Path
) -> None:
    """No bit of training changes, the counts are those of eager steps, and the other graphs count nothing."""
    options = {
        "dense": SHORT,
        "hybrid": dict(HYBRID, num_hidden_layers=2, layer_types=HYBRID["layer_types"][:2]),
        "recompute": dict(SHORT, activation_checkpointing="full"),
    }[kind]
    runs = [
        run_of(build(recipe, **options), tmp_path, graph, count, record=record)
        for graph, record in ((False, 0), (False, 3), (True, 3))
    ]
    counted: list[list[Any]] = []
    for run in runs[1:]:
        entries: list[Any] = []
        counted.append(entries)
        guard: Any = run.guard
        guard.record = entries.append
    steps = WARM_UP + 6
    plain, eager, graphed = (trained(run, Answers(), steps) for run in runs)
    for found in (eager, graphed):
        assert found[0] == plain[0]
        for name, value in plain[1].items():
            assert_same_bits(name, found[1][name], value)
    assert [one.step for one in counted[0]] == [one.step for one in counted[1]] == [3, 6, 9]
    for one, other in zip(*counted, strict=True):
        assert_same_bits("values", other.values, one.values)
        assert_same_bits("codes", other.codes, one.codes)
    kinds = min(count, 3)
    assert len(tapes) == 2 * kinds
    if recipe != "bf16":
        recorded, others = sorted((tapes[:kinds], tapes[kinds:]), key=lambda some: some[0].replays)
        for one, other in zip(recorded, others, strict=True):
            assert len(one.calls) > len(other.calls)


@pytest.mark.parametrize(
    ("recipe", "count"),
    [("delayed", 3), ("bf16", 2), pytest.param("current", 4, marks=pytest.mark.slow)],
)
def test_micro_batches_under_fsdp2_are_one_graph(
    recipe: str, count: int, tapes: list[Any], tmp_path: Path
) -> None:
    """With the sums of their gradients, which FSDP2 keeps in tensors of its own between them."""
    runs = [run_of(build(recipe, **SHORT), tmp_path, graph, count) for graph in (False, True)]
    runs[1].passes.graph.fsdp_modules = [create_autospec(FSDPModule)]
    same(*runs)
    assert [tape.replays for tape in tapes] == [STEPS - -(-WARM_UP // count)]


def test_which_accumulated_steps_are_eager_under_fsdp2() -> None:
    model = create_autospec(FSDPModule)

    def obstacle_of(count: int, reshards: bool) -> str | None:
        config = TrainConfig(gradient_accumulation=count, reshard_after_forward=reshards)
        return step_obstacle(model, config)

    # The mock is no CausalLM: what comes after the reasons of FSDP2.
    other = "the model is wrapped (by LoRA or another module)"
    for reshards in (True, False):
        assert obstacle_of(1, reshards) == obstacle_of(16, reshards) == other
        assert obstacle_of(17, reshards) == (
            "FSDP2 collects the gradients of more than 16 micro-batches eagerly"
        )


@pytest.mark.parametrize("cached", [True, False])
def test_weights_are_quantized_once_per_step(
    cached: bool, tapes: list[Any], tmp_path: Path
) -> None:
    """Further micro-batches do less work by the casts of the weights, and only if they may use them again."""
    run = run_of(build("current"), tmp_path, True, 3, cache_fp8_weights=cached)
    trained(run, Answers())
    first, further, last = (len(tape.calls) for tape in tapes)
    assert (further < first - 20) == cached
    assert abs(further - last) < 20


@pytest.mark.parametrize("failing", every(3, [1, 0, 2]))
def test_a_disturbed_capture_costs_an_eager_step(
    failing: int,
    tapes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """One of the three graphs fails once: the step is right, and the next is captured."""
    eager = run_of(build("delayed", **SHORT), tmp_path, False, 3)
    graphed = run_of(build("delayed", **SHORT), tmp_path, True, 3)
    number = iter(range(100))

    @contextmanager
    def disturbed(tape: Any, stream: Any, pool: Any = None) -> Any:
        with tape.capture():
            yield
            if next(number) == failing:
                raise torch.AcceleratorError("CUDA error: operation failed during capture")

    monkeypatch.setattr("te_models.training.cuda_graph.capture", disturbed)
    same(eager, graphed)
    assert len(tapes) == failing + 1 + 3
    assert graphed.passes.graph is not None and graphed.passes.graph.captured
    assert [record.message for record in caplog.records if "tries again" in record.message]


def test_after_many_failures_steps_are_eager(
    tapes: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = [run_of(build("delayed", **SHORT), tmp_path, graph, 2) for graph in (False, True)]

    @contextmanager
    def broken(tape: Any, stream: Any, pool: Any = None) -> Any:
        with tape.capture():
            yield
            raise torch.AcceleratorError("CUDA error: operation failed during capture")

    monkeypatch.setattr("te_models.training.cuda_graph.capture", broken)
    same(*runs, steps=WARM_UP + ATTEMPTS + 1)
    assert len(tapes) == ATTEMPTS and not runs[1].passes.graph.captured


def test_batches_of_another_shape_run_eagerly(
    tapes: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the graph goes on with those of its own shape; a warning says so once."""
    runs = [run_of(build("current", **SHORT), tmp_path, graph, 2) for graph in (False, True)]
    rows: list[list[float]] = [[], []]
    for run, losses in zip(runs, rows, strict=True):
        usual, short = Answers(), Answers(length=7)
        for number in range(9):
            losses.append(run.step(short if number in (4, 6) else usual)["loss"])
    assert rows[0] == rows[1]
    assert all(tape.replays == 5 for tape in tapes)
    assert len([r for r in caplog.records if "without their CUDA graph" in r.message]) == 1


def test_a_changed_recipe_makes_new_graphs(tapes: list[Any], tmp_path: Path) -> None:
    fields = dict(steps=8, recipe_schedule="bf16@5")
    runs = [
        run_of(build("current", **SHORT), tmp_path, graph, 2, **fields) for graph in (False, True)
    ]
    same(*runs, steps=8)
    assert len(tapes) == 4


def test_a_bad_micro_batch_ends_the_run_before_the_update(tapes: list[Any], tmp_path: Path) -> None:
    run = run_of(build("bf16"), tmp_path, True, 2)
    batches = Answers()
    for _ in range(4):
        run.step(batches)
    before = [p.detach().clone() for p in run.model.parameters()]
    assert run.passes.graph.captured
    with torch.no_grad():
        run.model.norm.get_parameter("weight")[0] = float("nan")
    with pytest.raises(Diverged):
        run.step(batches)
    assert (
        sum(not torch.equal(p, q) for p, q in zip(before, run.model.parameters(), strict=True)) == 1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "experts", "lora", "recompute"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise"])
def test_replayed_micro_batches_are_the_eager_ones_on_a_gpu(
    recipe: str, kind: str, count: int, tmp_path: Path
) -> None:
    """Every bit, with deterministic kernels."""
    if kind == "experts" and recipe == "blockwise":
        pytest.skip("the host counts the rows of experts under this recipe")
    options: dict[str, Any] = {
        "dense": {},
        "hybrid": HYBRID,
        "experts": EXPERTS,
        "lora": dict(lora=True),
        "recompute": dict(activation_checkpointing="selective"),
    }[kind]
    options = {**WIDE, **options, **PLACE}
    with deterministic():
        runs = [run_of(build(recipe, **options), tmp_path, graph, count) for graph in (False, True)]
        same(*runs)
    assert isinstance(runs[1].passes.graph, GraphedStep) and runs[1].passes.graph.captured


# PyTorch says at each use that the mode does not find every wait yet.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_replayed_step_reads_nothing_from_the_device(
    recipe: str, count: int, tmp_path: Path
) -> None:
    """A number that the host reads costs the time in which it could have queued the update and the next step."""
    run = run_of(build(recipe, **WIDE, **PLACE), tmp_path, True, count)
    batches = run.passes.calibrated(repeat(next(Answers())))
    for _ in range(STEPS):
        run.step(batches)
    assert run.passes.graph is not None and run.passes.graph.captured and run.ahead

    def unwaiting(function: Any) -> Any:
        def called(*given: Any, **options: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*given, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return called

    run.passes.run = unwaiting(run.passes.run)
    run.optimizer.take_gradients = unwaiting(run.optimizer.take_gradients)
    run.optimizer.skip_if = unwaiting(run.optimizer.skip_if)
    run.optimizer.step = unwaiting(run.optimizer.step)
    for _ in range(3):
        run.step(batches)
