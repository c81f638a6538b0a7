"""The guard and the record of runs through Transformer Engine: policies in CUDA graphs, fifty steps, and commands.

A batch holds a token that makes a tensor of one linear NaN, computed on the device, so that a graph contains it.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PLACE
from torch import nn

from te_models import CausalLM, TrainConfig, Trainer, list_recipes
from te_models.cli import main
from te_models.errors import Diverged
from te_models.inspect.replay import replay
from te_models.saving.folder import load_folder
from te_models.saving.run_folder import Checkpoints
from te_models.training.metrics import read_events, read_metrics

pytestmark = pytest.mark.gpu
STEPS, BAD = 12, 8  # graphs are captured before it
POISON = 255  # a token of one batch alone
LINEAR = "layers.1.mlp.down_proj"
SHAPE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
RECIPES = [name for name in list_recipes() if name not in ("mxfp8", "nvfp4")]


def poisoned(model: CausalLM) -> None:
    """Make the input of LINEAR NaN while it runs in FP8, in passes whose tokens hold POISON."""
    factor: list[torch.Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        one = torch.ones((), device=ids.device)
        factor[:] = [torch.where((ids == POISON).any(), one * math.nan, one)]

    def spoil(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if model.precision.recipe_of(LINEAR) is None:
            return args
        x = args[0] * factor[0].to(args[0].dtype)
        return (x, *args[1:])

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.get_submodule(LINEAR).register_forward_pre_hook(spoil)


def trainer(
    out: Path, recipe: str, steps: int = STEPS, bad: int = 0, graph: bool = True, **fields: Any
) -> tuple[Trainer, list[bool]]:
    """Return a run, and a list that gets for each of its steps whether its graph was captured."""
    torch.manual_seed(1)
    history = dict(amax_history_len=8) if recipe == "delayed" else {}
    model = CausalLM.from_preset("gated-nano", recipe=recipe, **PLACE, **history, **SHAPE)
    ids = torch.randint(0, POISON, (steps + 4, 2, 128), generator=torch.Generator().manual_seed(0))
    if bad:
        ids[bad - 1, 0, 5] = POISON
        poisoned(model)
    usual = dict(batch_size=2, seq_len=128, eval_every=0, record=1, deterministic=True)
    config = TrainConfig(**{**usual, "steps": steps, "cuda_graph": graph, **fields})
    batches = [dict(input_ids=part, labels=part.clone()) for part in ids]
    run = Trainer(model, batches, None, config, out)
    captured: list[bool] = []

    def note(row: dict[str, Any]) -> None:
        step = run.passes.graph
        captured.append(step is not None and step.captured)

    run.on_step = note
    return run, captured


def finished(run: Trainer) -> str:
    """Run to the end; return the error that ended it, "" for none."""
    try:
        run.run()
    except Diverged as error:
        return str(error)
    return ""


def contents(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the newest checkpoint."""
    folder = Checkpoints(out / "checkpoints").all()[-1]
    found = load_folder(folder, ["training", "model"], optional=["fp8_state", "fp8_weights"])
    return {
        f"{group}.{name}": tensor
        for group, members in found.tensors.items()
        for name, tensor in members.items()
    }


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_bit_of_fifty_steps_changes(recipe: str, tmp_path: Path) -> None:
    for name, record in (("plain", 0), ("recorded", 1), ("some", 7)):
        run, captured = trainer(tmp_path / name, recipe, steps=50, record=record)
        assert finished(run) == ""
        assert captured[-1]
    rows = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "recorded")}
    wanted = [(row["loss"], row["grad_norm"]) for row in rows["plain"]]
    assert [(row["loss"], row["grad_norm"]) for row in rows["recorded"]] == wanted
    assert len(wanted) == 50
    plain = contents(tmp_path / "plain")
    assert same_bits(plain, contents(tmp_path / "recorded"))
    assert same_bits(plain, contents(tmp_path / "some"))


@pytest.mark.parametrize("policy", ["stop", "skip", "demote", "rewind"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_policies_in_cuda_graphs_are_those_of_eager_steps(
    recipe: str, policy: str, tmp_path: Path
) -> None:
    last = {}
    for graph in (True, False):
        out = tmp_path / f"{graph}"
        run, captured = trainer(
            out, recipe, bad=BAD, graph=graph, on_nan=policy, save_every=4, keep_last=9
        )
        error = finished(run)
        if graph:
            assert captured[BAD - 2]
        (event,) = read_events(out / "metrics.jsonl")
        assert (event["step"], event["action"]) == (BAD, policy)
        assert event["tensor"] == f"{LINEAR}.input" and event["reproduced"]
        assert (f"first bad tensor is {LINEAR}.input" in error) == (policy == "stop")
        if policy == "demote":
            assert event["demoted"] == "layers.1.*"
            assert run.model.precision.recipe_of(LINEAR) is None
        rows = read_metrics(out / "metrics.jsonl")
        assert all(math.isfinite(row["loss"]) for row in rows)
        assert rows[-1]["step"] == (BAD - 1 if policy == "stop" else STEPS)
        for folder in Checkpoints(out / "checkpoints").all():
            found = load_folder(folder, ["training", "model"], optional=["fp8_state"])
            for members in found.tensors.values():
                assert all(bool(tensor.isfinite().all()) for tensor in members.values())
        last[graph] = ([(row["step"], row["loss"]) for row in rows], contents(out))
    assert last[True][0] == last[False][0]
    assert same_bits(last[True][1], last[False][1])


@pytest.mark.filterwarnings("ignore:.*was saved under recipe")  # the advised one may be another
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_commands_about_a_run(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step of a GPU again on the CPU, the card against itself, advice from the record, and MFU."""
    out = tmp_path / "run"
    assert main(["capture", str(out), "--step", "10"]) == 0
    run, _ = trainer(out, recipe, save_every=5, keep_last=9)
    assert finished(run) == ""
    rows = read_metrics(out / "metrics.jsonl")
    assert all(row["peak_memory"] > 0 for row in rows)
    assert all(0 < row["mfu"] < 1 for row in rows[1:])
    again = replay(out, 10, device="cpu")
    assert again.recorded_loss == pytest.approx(again.first.loss, rel=2e-3)
    weights = [one for one in again.tensors if one.tensor.operand == "weight"]
    assert weights and all(one.equal for one in weights)
    inputs = [one for one in again.tensors if one.tensor.operand == "input"]
    assert sum(one.within for one in inputs) >= 0.9 * len(inputs)
    capsys.readouterr()
    assert main(["verify", "--against", str(out), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["ok"] and card["loss"] == card["recorded"]["loss"]
    assert card["products"] and all(one["equal"] for one in card["products"])
    assert main(["verify", "--from-record", str(out), "--batch-size", "2", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert advice["recipe"]
    assert main(["replay", str(out), "--step", "10", "--engine", "native", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["repeatable"] and here["runs"][0]["loss"] == here["recorded_loss"]
    assert all(one["equal"] for one in here["tensors"])
