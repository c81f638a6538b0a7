"""A save is the state of its step, in every kind of run: beside the next step, on several processes, beside threads."""

import copy
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from fewer import every
from ranks import run_ranks
from small_run import STEPS, make_trainer, trained
from torch import Tensor

import te_models.engine.emulated as emulated
from te_models import CausalLM, list_recipes
from te_models.config.training import TrainConfig
from te_models.errors import EngineError
from te_models.fp8.region import evaluating
from te_models.fp8.scaling_state import fp8_state
from te_models.saving.folder import load_folder
from te_models.saving.run_folder import Checkpoints
from te_models.saving.sharded import ShardedCheckpoints
from te_models.training.launch import parallel
from te_models.training.run_state import checkpoint_content
from te_models.training.trainer import Callback, Row, Trainer

OPTIMIZERS = ("adamw8bit", "adamwfp8", "muon", "muon8bit", "galore")
KINDS: dict[str, dict[str, Any]] = {recipe: dict(recipe=recipe) for recipe in list_recipes()}
KINDS |= {
    f"{recipe}-weights": dict(recipe=recipe, fp8_params=True)
    for recipe in ("delayed", "current", "blockwise", "mxfp8")
}
KINDS |= {name: dict(optimizer=name) for name in OPTIMIZERS}
KINDS |= {
    "offload": dict(optimizer_offload=True),
    "accumulation": dict(gradient_accumulation=2),
    "recomputation": dict(activation_checkpointing="full"),
    "lora": dict(lora={}),
    "lora-weights": dict(lora={}, fp8_params=True),
    "lora-parts": dict(lora=dict(targets=("q_proj", "down_proj"), dropout=0.3)),
    "lora-current": dict(lora={}, recipe="current"),
}
SHARDED = {
    "ddp": dict(parallel="ddp"),
    "fsdp-weights": dict(parallel="fsdp", fp8_params=True, reshard_after_forward=False),
    "ddp-lora": dict(parallel="ddp", lora={}),
}
Content = tuple[dict[str, dict[str, Tensor]], Any]


class Witness(Callback):
    """Copies everything that a checkpoint of the step contains, right after the step."""

    def __init__(self) -> None:
        self.seen: dict[int, Content] = {}

    def on_step(self, trainer: Trainer, row: Row) -> None:
        tensors, documents = checkpoint_content(trainer)
        if isinstance(trainer.checkpoints, ShardedCheckpoints):
            whole = trainer.checkpoints._whole
            tensors = {
                g: {n: whole(n, t.detach()) for n, t in members.items()}
                for g, members in tensors.items()
            }
        self.seen[row["step"]] = (
            copy.deepcopy(tensors),
            without_result(json.loads(json.dumps(documents["training"]))),
        )


def without_result(document: dict[str, Any]) -> dict[str, Any]:
    """The training state without the run's result, to which an evaluation after the step is added."""
    return {name: value for name, value in document.items() if name != "result"}


def assert_saved(root: Path, seen: dict[int, Content]) -> None:
    """Each checkpoint in `root` is, bit for bit, what was seen after its step."""
    assert list(seen) == [1, 2, 3]
    for step, (tensors, document) in seen.items():
        found = load_folder(root / f"step-{step:08d}")
        assert found.tensors.keys() == tensors.keys()
        assert without_result(found.documents["training"]) == document
        for group, members in tensors.items():
            assert_same_tensors(found.tensors[group], members)
    (first, _), (last, _) = seen[1], seen[3]
    for group in first.keys() - {"fp8_weights"}:  # whose codes may stay the same
        assert any(
            not torch.equal(tensor, last[group][name]) for name, tensor in first[group].items()
        ), group


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background saves copy their tensors at the last moment that they may: when the next update waits for it."""
    due, snapshot, copied, join = (
        threading.Event(),
        Checkpoints._snapshot,
        Checkpoints.wait_for_copy,
        Checkpoints._join,
    )

    def wait_then_copy(self: Checkpoints, *args: Any) -> Any:
        assert due.wait(60)
        return snapshot(self, *args)

    def until_copied(function: Any) -> Any:
        def call(self: Checkpoints) -> None:
            due.set()
            function(self)
            due.clear()

        return call

    monkeypatch.setattr(Checkpoints, "_snapshot", wait_then_copy)
    monkeypatch.setattr(Checkpoints, "wait_for_copy", until_copied(copied))
    monkeypatch.setattr(Checkpoints, "_join", until_copied(join))


@pytest.mark.parametrize("kind", every(3, KINDS))
def test_a_save_beside_the_next_step(kind: str, late: None, tmp_path: Path) -> None:
    witness = Witness()
    with (
        emulated.exact_gemm(0),
        torch.compiler.set_stance("force_eager"),
    ):  # torchao compiles its step
        run = make_trainer(tmp_path, KINDS[kind])
        run.callbacks = [witness]
        run.run()
    assert_saved(tmp_path / "checkpoints", witness.seen)


def run_sharded(names: Sequence[str], rank: int, folder: str) -> None:
    with parallel(TrainConfig(parallel="ddp"), "cpu") as shared:
        for name in names:
            case = SHARDED[name]
            witness = Witness()
            run = make_trainer(Path(folder, name), case, shared)
            run.callbacks = [witness]
            run.run()
            if shared.ranks.first:
                assert_saved(Path(folder, name, "checkpoints"), witness.seen)


@pytest.mark.parametrize(
    "names", [["ddp", "fsdp-weights"], pytest.param(["ddp-lora"], marks=pytest.mark.slow)]
)
def test_a_save_of_two_processes(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_ranks(partial(run_sharded, names), tmp_path, 2, backend=None)


def step(model: CausalLM) -> None:
    model(torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()


def in_thread(function: Any, *args: Any) -> BaseException | None:
    """Run a function in a thread of its own; return what it raised."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            function(*args)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


def way_to_save(way: str, model: CausalLM) -> Callable[[Path], Any]:
    """Return a function that saves the model into a folder; adapters are added to it at once."""
    if way == "export":
        return partial(model.export, format="bf16")
    if way == "adapters":
        pytest.importorskip("peft")
        from te_models import add_lora, save_lora  # noqa: PLC0415  needs peft

        return partial(save_lora, add_lora(model, r=2))
    return partial(model.save_pretrained, format=way)


@pytest.mark.parametrize("way", ["te", "hf", "export", "adapters"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_save_beside_training_in_another_thread_is_refused(
    recipe: str, way: str, tmp_path: Path
) -> None:
    model = trained(recipe)
    save = way_to_save(way, model)
    error = in_thread(save, tmp_path / "out")
    assert (
        isinstance(error, EngineError)
        and "\n" not in str(error)
        and "'MainThread' trains the model" in str(error)
    )
    assert not (tmp_path / "out").exists()
    with evaluating(model, model.te, model.recipe):  # after which the training goes on
        assert isinstance(in_thread(save, tmp_path / "out"), EngineError)
    save(tmp_path / "out")


def test_a_run_is_not_saved_by_another_thread(tmp_path: Path) -> None:
    errors: list[BaseException | None] = []
    run = make_trainer(tmp_path, dict(recipe="bf16"))
    run.on_step = lambda row: errors.append(in_thread(run.save))
    run.run()
    assert len(errors) == STEPS and all(isinstance(error, EngineError) for error in errors)


def test_a_model_is_saved_by_another_thread_once_its_training_is_over(tmp_path: Path) -> None:
    model = trained("delayed")
    model.eval()
    assert in_thread(model.save_pretrained, tmp_path / "evaluating") is None
    model.train()
    assert isinstance(in_thread(model.save_pretrained, tmp_path / "training"), EngineError)
    assert in_thread(step, model) is None  # by a thread that has ended
    assert in_thread(model.save_pretrained, tmp_path / "after") is None
    copied = copy.deepcopy(trained("delayed"))
    assert in_thread(copied.save_pretrained, tmp_path / "copy") is None


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_model_is_not_trained_while_another_thread_saves_it(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(recipe)
    errors: list[BaseException | None] = []
    monkeypatch.setattr(
        "te_models.saving.pretrained.save_folder",
        lambda *a, **o: errors.append(in_thread(step, model)),
    )
    model.save_pretrained(tmp_path / "out")
    assert isinstance(errors[0], EngineError) and "is being saved in another thread" in str(
        errors[0]
    )
    step(model)


def test_scales_are_saved_between_the_passes_of_other_threads() -> None:
    """An evaluation records amaxes, and takes them back at its end."""
    model = trained("delayed").eval()
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    found: list[dict[str, Tensor]] = []
    saver = threading.Thread(target=lambda: found.append(model.copied_fp8_state()))

    def begin(*_: Any) -> None:
        assert any(
            not torch.equal(tensor, before[name]) for name, tensor in fp8_state(model).items()
        )
        saver.start()
        saver.join(0.2)

    model.norm.register_forward_hook(begin)
    with torch.no_grad():
        model(torch.arange(16)[None] + 100)
    saver.join(60)
    assert_same_tensors(found[0], before)
