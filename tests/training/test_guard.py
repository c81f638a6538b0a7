"""The guard: bad steps are skipped, named, and answered by each policy, read at once or a step late."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from fewer import every
from planted import BEGIN, Site, nan_in_fp8
from tiny_runs import TINY, losses, tiny_model, tiny_trainer
from typed import submodule

from te_models.config.toml import read_toml
from te_models.distributed.control import Ranks
from te_models.errors import Diverged, UsageError
from te_models.files.tensors import all_finite
from te_models.inspect.replay import replay
from te_models.numerics.quantizers import Quantizer
from te_models.recorder.layout import RecordedTensor
from te_models.recorder.record import read_record
from te_models.saving.folder import load_folder
from te_models.saving.run_folder import Checkpoints
from te_models.training.bad_tensor import BadTensors, first_of_all
from te_models.training.captures import Marks, captured_steps, write_marks
from te_models.training.metrics import read_events
from te_models.training.spikes import FEWEST, SpikeBounds, robust_bound
from te_models.training.trainer import Trainer

STEPS, BAD = 8, 4
LINEAR = "layers.1.mlp.down_proj"


def trainer(out: Path, policy: str, ahead: bool, recipe: str = "delayed", **fields: Any) -> Trainer:
    usual = dict(steps=STEPS, batch_size=2, eval_every=0, keep_best=False, keep_last=STEPS)
    model = fields.pop("model", None) or tiny_model(recipe, **fields.pop("build", {}))
    run = tiny_trainer(model, out, on_nan=policy, **{**usual, **fields})
    run.ahead = ahead and run.optimizer.can_skip
    return run


def breaking(run: Trainer, break_it: Callable[[Trainer], Any], *steps: int) -> Trainer:
    """The run whose forward pass is broken for the data of these steps, as often as it is run."""
    model = run.model
    queue = run._queue
    draw = run._draw
    bad: set[bytes] = set()
    left = list(steps)
    now = 0

    def key(batch: Any) -> bytes:
        return batch["input_ids"].numpy().tobytes()

    def forward(**batch: Any) -> Any:
        if key(batch) in bad:
            break_it(run)
        return model(**batch)

    def queueing(step: int, batches: Any, before: Any) -> Any:
        nonlocal now
        now = step
        return queue(step, batches, before)

    def drawing(batches: Any) -> Any:
        drawn = draw(batches)
        if now in left:
            left.remove(now)
            bad.update(key(batch) for batch in drawn.micro_batches)
        return drawn

    run._queue, run._draw = queueing, drawing
    run.passes.train_model = forward
    return run


def spoil_input(run: Trainer) -> None:
    """An infinity in the input of one linear."""
    module = run.model.get_submodule(LINEAR)

    def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        handle.remove()
        x = inputs[0].clone()
        x[..., 0] = math.nan
        return (x, *inputs[1:])

    handle = module.register_forward_pre_hook(hook, prepend=True)


def spoil_gradient(run: Trainer) -> None:
    """A NaN in the gradient of one linear's output."""
    module = run.model.get_submodule(LINEAR)

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        output = output * 1
        output.register_hook(lambda gradient: gradient * math.nan)
        return output

    handle = module.register_forward_hook(hook, prepend=True)


def hide_infinity(run: Trainer) -> None:
    """An infinity in the input of one linear, of which the cast makes the largest number of FP8."""
    module = run.model.get_submodule(LINEAR)

    def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        handle.remove()
        x = inputs[0].clone()
        x[..., 0] = math.inf
        return (x, *inputs[1:])

    handle = module.register_forward_pre_hook(hook, prepend=True)


BREAKS = {
    "input": (spoil_input, f"{LINEAR}.input"),
    "grad_output": (spoil_gradient, f"{LINEAR}.grad_output"),
}


def finite_checkpoints(out: Path) -> list[str]:
    folders = Checkpoints(out / "checkpoints").all()
    for folder in folders:
        found = load_folder(folder, ["training", "model"], optional=["fp8_state"])
        for members in found.tensors.values():
            assert all(all_finite(tensor) for tensor in members.values())
    return [folder.name[-2:] for folder in folders]


@pytest.mark.parametrize(
    ("kind", "recipe", "ahead"), every(3, BREAKS, ["bf16", "delayed", "current"], [True, False])
)
def test_skip_names_the_tensor_and_leaves_the_run_as_without_the_data(
    kind: str, recipe: str, ahead: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if recipe == "current" and not ahead:
        pytest.skip("covered by the others")
    break_it, name = BREAKS[kind]
    run = breaking(trainer(tmp_path, "skip", ahead, recipe, save_every=1), break_it, BAD)
    states: dict[int, Any] = {}
    run.on_step = lambda row: states.update({row["step"]: row["loss"]})
    result = run.run()
    assert result.step == STEPS and sorted(states) == [n for n in range(1, STEPS + 1) if n != BAD]
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert (event["step"], event["event"], event["action"]) == (BAD, "nonfinite", "skip")
    assert event["tensor"] == name and event["linear"] == LINEAR and event["layer"] == 1
    assert event["reproduced"] and event["operand"] == kind and event["expert"] is None
    assert name in caplog.text and f"step {BAD}" in caplog.text
    assert all(map(math.isfinite, losses(tmp_path)))
    assert str(BAD) not in "".join(finite_checkpoints(tmp_path))
    assert captured_steps(tmp_path) == [BAD]


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_skipping_a_step_late_gives_the_bits_of_skipping_at_once(
    recipe: str, tmp_path: Path
) -> None:
    """The step that was queued meanwhile is run again, with the scales from before the bad one."""
    for ahead in (False, True):
        run = breaking(trainer(tmp_path / f"{ahead}", "skip", ahead, recipe), spoil_input, BAD)
        run.run()
    assert losses(tmp_path / "False") == losses(tmp_path / "True")
    last = f"checkpoints/step-{STEPS:08d}"
    contents = [
        load_folder(tmp_path / name / last, ["training", "model"], optional=["fp8_state"])
        for name in ("False", "True")
    ]
    for group in contents[0].tensors:
        assert_same_tensors(contents[0].tensors[group], contents[1].tensors[group])
    states = [json.loads((tmp_path / n / last / "training.json").read_text()) for n in ("False", "True")]  # fmt: skip
    assert states[0]["dataset"] == states[1]["dataset"] and states[0]["rng"] == states[1]["rng"]


@pytest.mark.parametrize(("policy", "ahead"), every(2, ["stop", "skip", "rewind"], [False, True]))
def test_a_recorded_step_is_bad_by_a_tensor_that_the_loss_hides(
    policy: str, ahead: bool, tmp_path: Path
) -> None:
    run = trainer(tmp_path, policy, ahead, record=1, save_every=1)
    breaking(run, hide_infinity, BAD)
    if policy == "stop":
        with pytest.raises(Diverged, match=rf"step {BAD}: .* not finite.*is {LINEAR}\.input\. "):
            run.run()
    else:
        assert run.run().step == STEPS
    events = read_events(tmp_path / "metrics.jsonl")
    (event,) = events
    assert (event["step"], event["event"], event["action"]) == (BAD, "nonfinite", policy)
    assert event["tensor"] == f"{LINEAR}.input" and event["reproduced"]
    assert math.isfinite(event["loss"]) and math.isfinite(event["grad_norm"])


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_names_the_tensor_and_keeps_the_state_before(ahead: bool, tmp_path: Path) -> None:
    run = breaking(trainer(tmp_path, "stop", ahead), spoil_input, BAD)
    with pytest.raises(Diverged, match=f"first bad tensor is {LINEAR}.input"):
        run.run()
    assert finite_checkpoints(tmp_path) == [f"{BAD - 1:02d}"]
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert (event["action"], event["tensor"]) == ("stop", f"{LINEAR}.input")


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_search_leaves_a_recompute_as_it_is(mode: str, tmp_path: Path) -> None:
    """The search saves no tensor in the first pass: a recompute would save none in its place."""
    build = dict(activation_checkpointing=mode)
    run = trainer(tmp_path, "skip", False, steps=BEGIN + 1, build=build, gradient_accumulation=2)
    nan_in_fp8(run, Site(LINEAR))
    run.run()
    events = read_events(tmp_path / "metrics.jsonl")
    assert [event["tensor"] for event in events] == [f"{LINEAR}.input"] * 2


def bad_cast(monkeypatch: pytest.MonkeyPatch, run: Trainer, first: int) -> None:
    """From a step on, the cast of one linear's input makes a NaN of a finite value."""
    encode = Quantizer._fields
    queue = run._queue
    now = 0

    def queueing(step: int, batches: Any, before: Any) -> Any:
        nonlocal now
        now = step
        return queue(step, batches, before)

    def broken(self: Any, tensor: Any, rowwise: bool, columnwise: bool) -> Any:
        fields = encode(self, tensor, rowwise, columnwise)
        quantizers = submodule(run.model, LINEAR).quantizers["scaling_fwd"]
        own = bool(quantizers) and self is quantizers[0]
        if own and now >= first:
            fields["data"].view(-1)[0] = 0x7F
        return fields

    monkeypatch.setattr(Quantizer, "_fields", broken)
    monkeypatch.setattr(run, "_queue", queueing)


@pytest.mark.parametrize("ahead", [False, True])
def test_demote_moves_the_layer_to_bf16_for_good(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = dict(build={**TINY, "num_hidden_layers": 4})
    with monkeypatch.context() as patched:
        run = trainer(tmp_path, "demote", ahead, steps=BAD + 1, **deep)
        run.run_file = '# Settings.\n\n[recipe]\nname = "delayed"\n\n[run]\nsteps = 5\n'
        bad_cast(patched, run, BAD)
        assert run.run().step == BAD + 1
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert event["action"] == "demote" and event["demoted"] == "layers.1.*"
    assert event["tensor"] == f"{LINEAR}.input" and event["step"] == BAD
    assert len(losses(tmp_path)) == BAD + 1  # the step was repeated
    recipe = json.loads((tmp_path / f"checkpoints/step-{BAD + 1:08d}/recipe.json").read_text())
    assert recipe["precision"] == {"layers.1.*": "bf16"}
    written = read_toml(tmp_path / "run.toml")
    assert written["recipe"]["precision"] == {"layers.1.*": "bf16"}
    assert written["run"] == {"steps": 5}
    precision = run.model.precision
    assert precision.recipe_of(LINEAR) is None
    assert precision.recipe_of("layers.2.mlp.down_proj") is not None


def test_demote_of_the_only_layer_in_fp8_goes_on_in_bf16(tmp_path: Path) -> None:
    run = trainer(tmp_path, "demote", False, steps=BEGIN + 1, record=1)
    run.run_file = '# Settings.\n\n[recipe]\nname = "delayed"\n'
    nan_in_fp8(run, Site(LINEAR))
    assert run.run().step == BEGIN + 1
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert event["action"] == "demote" and "nothing of the model is left in FP8" in event["message"]
    recipe = read_toml(tmp_path / "run.toml")["recipe"]
    assert (recipe["name"], recipe["precision"]) == ("bf16", {"layers.1.*": "bf16"})
    saved = json.loads((tmp_path / f"checkpoints/step-{BEGIN + 1:08d}/recipe.json").read_text())
    assert (saved["name"], saved["precision"]) == ("bf16", {"layers.1.*": "bf16"})
    # The record has the step that broke, and the one that took its place. The first of them was kept, and here the
    # NaN does not come again.
    assert read_record(tmp_path).steps == [*range(1, BEGIN + 1), BEGIN, BEGIN + 1]
    found = replay(tmp_path, BEGIN, twice=False)
    assert math.isnan(found.recorded_loss or 0) and math.isfinite(found.first.loss)
    within = {one.tensor.name: one.within for one in found.tensors}
    assert not within[f"{LINEAR}.input"] and within["layers.1.mlp.gate_up_proj.input"]


def test_the_first_bad_tensor_is_that_of_the_rank_where_it_is() -> None:
    """A rank that holds no bad weight gets what another's experts made of it, a few modules later."""

    class TwoRanks(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, other, []]

    watched = BadTensors(tiny_model())
    watched.first = RecordedTensor("layers.2.self_attn.qkvg_proj", "input")
    watched.place = 9
    for place, operand, own in ((8, "output", False), (9, "weight", True), (10, "input", True)):
        other = [place, LINEAR, operand, 3]
        found = first_of_all(watched, TwoRanks())
        assert found == (watched.first if own else RecordedTensor(LINEAR, operand, 3))
    watched.first = None
    assert first_of_all(watched, TwoRanks()) == RecordedTensor(LINEAR, "input", 3)
    assert first_of_all(watched, Ranks()) is None


def test_a_bad_step_is_compared_with_its_own_record_after_rewinding(tmp_path: Path) -> None:
    run = breaking(trainer(tmp_path, "rewind", False, save_every=2, record=1), spoil_input, BAD)
    assert run.run().step == STEPS
    assert read_record(tmp_path).steps == list(range(1, STEPS + 1))
    found = replay(tmp_path, BAD)
    assert math.isnan(found.recorded_loss or 0)
    # Its NaN came from a hook, which a replay does not have: all before it has the recorded bits.
    bad = [one.tensor.name for one in found.tensors if one.recorded.nonfinite > 0]
    assert f"{LINEAR}.input" in bad
    equal = {one.tensor.name: one.equal for one in found.tensors}
    assert equal["layers.1.mlp.gate_up_proj.input"] and not equal[f"{LINEAR}.input"]


class Killed(BaseException):
    """The end of a run that has no time to save anything."""


@pytest.mark.parametrize(
    "policy",
    [
        "demote",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("skip", "rewind", "stop")),
    ],
)
def test_a_run_that_was_killed_takes_its_bad_step_again(policy: str, tmp_path: Path) -> None:
    """The capture of the bad step has a record, which the one of the second time replaces."""
    deep = dict(build={**TINY, "num_hidden_layers": 4})
    options: dict[str, Any] = dict(save_every=2, record=1, steps=BEGIN + 3, keep_last=9, **deep)

    def new_run(policy: str) -> Trainer:
        run = trainer(tmp_path, policy, False, **options)
        if policy != "demote":
            return breaking(run, spoil_input, BEGIN)
        nan_in_fp8(run, Site(LINEAR))
        return run

    def killed(row: dict[str, Any]) -> None:
        if read_events(tmp_path / "metrics.jsonl"):
            raise Killed

    run = new_run("skip" if policy == "stop" else policy)
    run.on_step = killed
    with pytest.raises(Killed):
        run.run()
    assert captured_steps(tmp_path)[-1] == BEGIN
    resumed = new_run(policy)
    if policy == "stop":
        with pytest.raises(Diverged):
            resumed.run(resume=True)
    else:
        assert resumed.run(resume=True).step == BEGIN + 3
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert (event["step"], event["action"]) == (BEGIN, policy)
    found = replay(tmp_path, BEGIN, twice=False)
    assert any(one.recorded.nonfinite for one in found.tensors)
    assert found.tensors[0].equal


def test_a_marked_step_that_is_bad_is_kept_as_such(tmp_path: Path) -> None:
    """The step that takes its place has no capture: there is one of each number."""
    write_marks(tmp_path, Marks(steps=(BEGIN,)))
    deep = dict(build={**TINY, "num_hidden_layers": 4})
    run = trainer(tmp_path, "demote", False, steps=BEGIN + 1, record=1, **deep)
    nan_in_fp8(run, Site(LINEAR))
    assert run.run().step == BEGIN + 1
    found = replay(tmp_path, BEGIN, twice=False)
    assert math.isnan(found.recorded_loss or 0)
    assert any(one.recorded.nonfinite for one in found.tensors)


def test_demotion_stays_under_a_schedule_of_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_run() -> Trainer:
        deep = {**TINY, "num_hidden_layers": 4}
        changes = f"current@{BAD + 2}"
        return trainer(tmp_path, "demote", False, build=deep, recipe_schedule=changes)

    with monkeypatch.context() as patched:
        run = new_run()
        bad_cast(patched, run, BAD)
        run.on_step = lambda row: run.stop() if row["step"] == BAD else None
        run.run()
    again = new_run()
    again.run(resume=True)
    assert again.model.recipe.name == "current"
    assert again.model.recipe.precision == {"layers.1.*": "bf16"}


def test_demote_is_refused_where_it_could_never_help(tmp_path: Path) -> None:
    model = tiny_model("current", fp8_params=True)
    with pytest.raises(
        UsageError, match=r"^on_nan='demote' moves .* no BF16 weights .* fp8_params$"
    ):
        trainer(tmp_path, "demote", False, model=model)


def test_demote_stops_where_it_cannot_help(tmp_path: Path) -> None:
    """A NaN that does not come from a cast comes again in BF16."""
    deep = dict(build={**TINY, "num_hidden_layers": 4})
    run = breaking(trainer(tmp_path, "demote", False, **deep), spoil_input, BAD)
    with pytest.raises(Diverged, match="layers.1.* runs in BF16 already"):
        run.run()
    assert [e["action"] for e in read_events(tmp_path / "metrics.jsonl")] == ["demote", "stop"]
    assert finite_checkpoints(tmp_path) == [f"{BAD - 1:02d}"]


@pytest.mark.parametrize("ahead", [False, True])
def test_rewind_restores_the_last_checkpoint_and_skips_its_data(
    ahead: bool, tmp_path: Path
) -> None:
    bad = BAD + 1
    run = breaking(trainer(tmp_path, "rewind", ahead, save_every=2, record=1), spoil_input, bad)
    seen: list[bytes] = []
    draw = run._draw

    def noting(batches: Any) -> Any:
        drawn = draw(batches)
        seen.append(drawn.micro_batches[0]["input_ids"].numpy().tobytes())
        return drawn

    run._draw = noting
    assert run.run().step == STEPS
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert (event["action"], event["to"], event["step"]) == ("rewind", BAD, bad)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "event" not in row] == list(range(1, STEPS + 1))
    # The step is taken again with data that no step has had, but for data of a step that was queued.
    repeated = 1 if run.ahead else 0
    assert len(set(seen)) == len(seen) - repeated
    finite_checkpoints(tmp_path)


def test_rewind_has_a_state_to_go_back_to_from_the_first_step_on(tmp_path: Path) -> None:
    run = breaking(trainer(tmp_path, "rewind", False), spoil_input, 2)
    assert run.run().step == STEPS
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert event["to"] == 0


def test_rewinds_to_one_state_end(tmp_path: Path) -> None:
    """Where every way from a checkpoint leads to a bad step."""
    run = breaking(trainer(tmp_path, "rewind", False, save_every=2), spoil_input, *[BAD] * 9)
    with pytest.raises(Diverged, match="after 3 returns to step 2"):
        run.run()
    assert [event["to"] for event in read_events(tmp_path / "metrics.jsonl")[:-1]] == [2, 2, 2]


def test_endless_bad_steps_end_the_run(tmp_path: Path) -> None:
    run = breaking(trainer(tmp_path, "skip", False, steps=20), spoil_input, *range(3, 21))
    with pytest.raises(Diverged, match="the run ends after 10 other bad steps in a row"):
        run.run()
    assert finite_checkpoints(tmp_path) == ["12"]


def test_bounds_are_robust() -> None:
    assert robust_bound([1.0, 2.0, 3.0, 4.0, 100.0], 2) == pytest.approx(3 + 2 * 1.4826 * 1)
    assert robust_bound([5.0] * 30, 10) == pytest.approx(5.5)
    spikes = SpikeBounds(10, 50)
    for _ in range(FEWEST):
        assert spikes.bounds().loss == math.inf
        spikes.add(2.0, 1.0)
    assert spikes.bounds().loss == pytest.approx(2.2)
    assert SpikeBounds(0, 50).bounds().grad_norm == math.inf


@pytest.mark.parametrize("ahead", [False, True])
def test_a_spike_of_the_gradient_is_skipped(ahead: bool, tmp_path: Path) -> None:
    def scale_loss(run: Trainer) -> None:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return output * 50

        handle = run.model.norm.register_forward_hook(hook)

    bad = FEWEST + 3
    run = trainer(tmp_path, "skip", ahead, "current", steps=bad + 3, spike_bound=30)
    breaking(run, scale_loss, bad).run()
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert (event["event"], event["action"], event["step"]) == ("spike", "skip", bad)
    largest = max(event["loss"], event["grad_norm"])
    assert largest > event["bound"] and event["tensor"] is not None
    resumed = trainer(tmp_path, "skip", ahead, "current", steps=bad + 4, spike_bound=30)
    resumed.run(resume=True)
    assert list(resumed.guard.spikes.losses) == losses(tmp_path)


def test_a_gradient_that_a_hook_makes_is_the_one_of_its_linear(tmp_path: Path) -> None:
    """In BF16 no cast sees it; what the hook returns has a gradient without a NaN."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * math.nan

    run = trainer(tmp_path, "stop", False, "bf16", steps=1)
    module = run.model.get_submodule(LINEAR)
    module.register_forward_hook(lambda module, inputs, output: Spoiled.apply(output))
    with pytest.raises(Diverged, match=f"first bad tensor is {LINEAR}.grad_output"):
        run.run()
