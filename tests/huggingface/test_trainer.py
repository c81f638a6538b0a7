"""transformers' Trainer and accelerate: interrupted and resumed runs have the same bits, and their saves load."""

import errno
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from fewer import every
from judge import transformers
from kinds import KINDS
from kinds import build as build_kind
from places import PLACE
from safetensors.torch import load_file, load_model, save_model
from torch import nn

from te_models import CausalLM, TEModelsForCausalLM
from te_models.errors import CheckpointError, SaveError
from te_models.files import atomic
from te_models.fp8.scaling_state import fp8_state
from te_models.huggingface import saving
from te_models.saving import folder as saved_folder
from te_models.training.trainer import deterministic

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore")]

RECIPES = ("bf16", "delayed", "current")
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))


class Windows(torch.utils.data.Dataset):
    """Rows of random tokens, equal in every run."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer(model: nn.Module, out: Path, **fields: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(out), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.01,
        lr_scheduler_type="constant", save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1,
        use_cpu=inner(model).device.type == "cpu",
        report_to=[], disable_tqdm=True, seed=1, **fields,
    )  # fmt: skip
    arguments._n_gpu = min(arguments.n_gpu, 1)  # more would be DataParallel, which is refused
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=Windows(), eval_dataset=Windows()
    )


def inner(model: Any) -> CausalLM:
    return model.model if isinstance(model, TEModelsForCausalLM) else model


def assert_same_model(ours: Any, wanted: Any) -> None:
    assert_same_tensors(
        dict(inner(ours).named_parameters()), dict(inner(wanted).named_parameters())
    )
    states = fp8_state(inner(ours)), fp8_state(inner(wanted))
    assert bool(states[0]) == (inner(wanted).recipe.name == "delayed")
    assert_same_tensors(*states)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """A device and its engine; a GPU sums in an order that does not vary."""
    accelerate.state.AcceleratorState._reset_state(
        reset_partial_state=True
    )  # it keeps the first device of a process
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if request.param == "cpu":
        yield dict(device="cpu", engine="emulated")
    else:
        with deterministic():
            yield PLACE


@pytest.fixture
def build(place: dict[str, Any], build: Callable[..., CausalLM]) -> Callable[..., CausalLM]:
    """The function of conftest.py, for both devices."""
    return functools.partial(build, **place)


@pytest.mark.parametrize(("recipe", "tied", "rope"), [
    ("bf16", True, dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    ("delayed", False, dict(rope_type="yarn", factor=4.0)),
    ("current", True, None),
])  # fmt: skip
def test_a_trainer_resumes_to_the_same_bits_and_its_checkpoints_load(
    recipe: str,
    tied: bool,
    rope: dict[str, Any] | None,
    build: Callable[..., CausalLM],
    place: dict[str, Any],
    tmp_path: Path,
) -> None:
    scaling = rope and {**rope, "original_max_position_embeddings": 8}

    def fresh(seed: int = 0) -> TEModelsForCausalLM:
        return TEModelsForCausalLM.wrap(
            build(recipe, seed, tie_word_embeddings=tied, rope_scaling=scaling)
        )

    whole = trainer(fresh(), tmp_path / "whole")
    whole.train()
    again = trainer(fresh(1), tmp_path / "again")
    with warnings.catch_warnings():
        # transformers reads config.json as its base class, which warns of a field of transformers 4.
        warnings.filterwarnings("error", "`rope_scaling` is deprecated", FutureWarning)
        again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert_same_model(again.model, whole.model)
    whole.save_model(str(tmp_path / "whole"))
    device, ids = place["device"], IDS.to(place["device"])
    whole.save_model(str(tmp_path / "whole"))  # over the first, beside the checkpoints
    for folder in (tmp_path / "whole", tmp_path / "whole/checkpoint-4"):
        assert_same_model(CausalLM.from_pretrained(folder, device=device), whole.model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=device)
        assert_same_model(loaded, whole.model)
        assert_same_bits("logits", loaded(ids).logits, whole.model.eval()(ids).logits)


@pytest.mark.parametrize(
    "kind",
    [
        "one part per layer",
        pytest.param("Mamba 2 beside attention", marks=pytest.mark.slow),
        pytest.param("Kimi Delta Attention", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_resumes_kinds_of_layers_that_transformers_does_not_have(
    kind: str, tmp_path: Path
) -> None:
    """It reads config.json as its base class, which knows its own kinds alone."""

    def fresh() -> TEModelsForCausalLM:
        return TEModelsForCausalLM.wrap(build_kind(KINDS[kind]))

    whole = trainer(fresh(), tmp_path / "whole", gradient_checkpointing=True)
    whole.train()
    again = trainer(fresh(), tmp_path / "again", gradient_checkpointing=True)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert_same_model(again.model, whole.model)


def test_the_loss_of_a_step_is_the_mean_over_the_tokens_of_all_micro_batches(
    build: Callable[..., CausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, counts = trainer(TEModelsForCausalLM.wrap(build()), tmp_path), []
    forward = TEModelsForCausalLM.forward

    @functools.wraps(forward)
    def noting(*args: Any, **options: Any) -> Any:
        counts.append(options.get("num_items_in_batch"))
        return forward(*args, **options)

    monkeypatch.setattr(TEModelsForCausalLM, "forward", noting)
    run.train()
    assert {int(count) for count in counts} == {
        2 * 2 * 11,
        8 * 11,
    }  # of two micro-batches, of a batch of the evaluation


def test_the_best_model_is_loaded_at_the_end(
    build: Callable[..., CausalLM], place: dict[str, Any], tmp_path: Path
) -> None:
    run = trainer(
        TEModelsForCausalLM.wrap(build("delayed")),
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    scores = iter((1.0, 2.0))
    run.add_callback(Scores(scores))
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    assert_same_model(run.model, CausalLM.from_pretrained(tmp_path / "checkpoint-2", **place))


class Scores(transformers.TrainerCallback):
    """Puts given losses in the place of those of the evaluations."""

    def __init__(self, scores: Any) -> None:
        self.scores = scores

    def on_evaluate(self, *others: Any, metrics: dict[str, float], **more: Any) -> None:
        metrics["eval_loss"] = next(self.scores)


def test_a_plain_causal_lm_resumes_too_and_its_checkpoint_says_what_it_lacks(
    build: Callable[..., CausalLM], tmp_path: Path
) -> None:
    """Trainer saves no config of a module that is not a PreTrainedModel."""
    whole = trainer(build("delayed"), tmp_path / "whole")
    whole.train()
    again = trainer(build("delayed", 1), tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert_same_model(again.model, whole.model)
    with pytest.raises(CheckpointError, match="TEModelsForCausalLM"):
        CausalLM.from_pretrained(tmp_path / "whole/checkpoint-4", device="cpu")


def train(model: Any, accelerator: Any, optimizer: Any, steps: int) -> None:
    model.train()
    for row in range(steps):
        batch = Windows()[row]["input_ids"][None].to(accelerator.device)
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("recipe", "tied", "wrapped"),
    every(3, [*RECIPES, "current FP8"], [True, False], [True, False]),
)
def test_accelerate_saves_and_restores_a_state(
    recipe: str,
    tied: bool,
    wrapped: bool,
    build: Callable[..., CausalLM],
    place: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Also of FP8 weights, whose values and scales come back."""
    name, _, stored = recipe.partition(" ")

    def prepared(seed: int) -> tuple[Any, Any, Any]:
        model: nn.Module = build(name, seed, tie_word_embeddings=tied, fp8_params=bool(stored))
        model = TEModelsForCausalLM.wrap(model) if wrapped else model
        accelerator = accelerate.Accelerator(cpu=place["device"] == "cpu")
        return accelerator, *accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )

    accelerator, model, optimizer = prepared(0)
    train(model, accelerator, optimizer, 2)
    accelerator.save_state(str(tmp_path / "state"))
    train(model, accelerator, optimizer, 2)
    other, again, its = prepared(1)
    other.load_state(str(tmp_path / "state"))
    train(again, other, its, 2)
    assert_same_model(again, model)


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


@pytest.mark.parametrize("wrapped", [True, False])
def test_accelerate_saves_and_restores_every_expert(
    wrapped: bool, build: Callable[..., CausalLM], place: dict[str, Any], tmp_path: Path
) -> None:
    """Experts lie together in memory, which accelerate and safetensors would take for tied tensors."""

    def made(seed: int) -> Any:
        model = build("bf16", seed, moe=EXPERTS)
        return TEModelsForCausalLM.wrap(model) if wrapped else model

    accelerator = accelerate.Accelerator(cpu=place["device"] == "cpu")
    model = accelerator.prepare(made(0))
    accelerator.save_state(str(tmp_path / "state"))
    saved = load_file(tmp_path / "state/model.safetensors")
    wanted = {name: value.cpu() for name, value in model.state_dict().items() if value.numel()}
    assert_same_tensors({name: value for name, value in saved.items() if value.numel()}, wanted)
    other = made(1)
    load_model(other, str(tmp_path / "state/model.safetensors"))
    assert_same_model(other, model)
    save_model(other, str(tmp_path / "again.safetensors"))
    accelerator.load_state(str(tmp_path / "state"))


def test_writing_into_a_state_dict_changes_the_experts(build: Callable[..., CausalLM]) -> None:
    """And counts as a change, by which quantized copies of weights are recognized as old."""
    model = build("bf16", moe=EXPERTS)
    weight = model.get_parameter("layers.0.mlp.gate_up_proj.weight1")
    version = weight._version
    value = model.state_dict()["layers.0.mlp.gate_up_proj.weight1"]
    assert weight._version == version
    value.fill_(0.5)
    assert bool((weight == 0.5).all()) and weight._version == version + 1


@pytest.mark.parametrize(
    ("recipe", "tied", "how"),
    [
        ("bf16", True, "save_pretrained"),
        ("delayed", False, "save_model"),
        ("current", True, "save_pretrained"),
        pytest.param("delayed", True, "shards", marks=pytest.mark.slow),
    ],
)
def test_accelerate_loads_a_checkpoint_into_a_model(
    recipe: str,
    tied: bool,
    how: str,
    build: Callable[..., CausalLM],
    place: dict[str, Any],
    tmp_path: Path,
) -> None:
    ids = IDS.to(place["device"])
    for wrap in (TEModelsForCausalLM.wrap, lambda model: model):
        folder = tmp_path / type(wrap).__name__
        model: Any = wrap(build(recipe, tie_word_embeddings=tied))
        model(input_ids=ids, labels=ids).loss.backward()
        if how == "save_model":
            accelerate.Accelerator(cpu=place["device"] == "cpu").save_model(model, str(folder))
        else:
            model.save_pretrained(folder, **({"max_shard_size": "30KB"} if how == "shards" else {}))
        fresh: Any = wrap(build(recipe, 1, tie_word_embeddings=tied))
        accelerate.load_checkpoint_in_model(fresh, str(folder))
        assert_same_model(fresh, model)
        assert_same_bits("logits", fresh.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("recipe", "tied"), [("bf16", False), ("delayed", True), ("current", False)]
)
def test_accelerate_sets_parameters_by_name_for_a_device_map(
    recipe: str,
    tied: bool,
    build: Callable[..., CausalLM],
    place: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parameters, and nothing else: it says that scales of delayed scaling are left out."""
    ids = IDS.to(place["device"])
    model = TEModelsForCausalLM.wrap(build(recipe, tie_word_embeddings=tied))
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "model")
    with accelerate.init_empty_weights():
        fresh = TEModelsForCausalLM.wrap(build(recipe, 1, tie_word_embeddings=tied))
    assert {p.device.type for p in fresh.parameters()} == {"meta"}
    fresh.tie_weights()
    with caplog.at_level(logging.WARNING):
        accelerate.load_checkpoint_in_model(
            fresh, str(tmp_path / "model"), device_map={"": place["device"]}
        )
    assert_same_tensors(dict(fresh.named_parameters()), dict(model.named_parameters()))
    assert ("_extra_state" in caplog.text) == (recipe == "delayed")


def test_shards_of_an_earlier_save_are_gone(build: Callable[..., CausalLM], tmp_path: Path) -> None:
    model = TEModelsForCausalLM.wrap(build("delayed"))
    ids = IDS.to(model.device)
    model(ids, labels=ids).loss.backward()
    (tmp_path / "mine.txt").write_text("keep")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "fp8_state.safetensors", "generation_config.json", "manifest.json", "mine.txt",
        "model.safetensors", "recipe.json",
    ]  # fmt: skip


def test_a_save_removes_what_a_killed_one_left(
    build: Callable[..., CausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no file of the user, whatever its name."""
    model = TEModelsForCausalLM.wrap(build("bf16"))
    mine = ["model-notes.txt", "model_before.safetensors", "model.fp16.safetensors"]
    for name in mine:
        (tmp_path / name).write_text("keep")

    def kill(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "_move_in", kill)
        # As after a kill: nothing tidies up.
        patch.setattr(atomic.shutil, "rmtree", lambda *args, **options: None)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*mine, "config.json", "generation_config.json", "manifest.json", "model.safetensors", "recipe.json"]
    )  # fmt: skip


@pytest.mark.parametrize("there", [True, False])
def test_an_error_of_a_save_names_its_folder(
    there: bool, build: Callable[..., CausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TEModelsForCausalLM.wrap(build("bf16"))
    folder = tmp_path / "folder"
    if there:
        model.save_pretrained(folder)
    before = sorted(folder.rglob("*"))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/.hidden.name")

    monkeypatch.setattr(saved_folder, "write_safetensors", full)
    with pytest.raises(SaveError) as error:
        model.save_pretrained(folder)
    message = f"could not save {folder}: No space left on device; what was there before is intact"
    assert str(error.value) == message
    assert sorted(folder.rglob("*")) == before
