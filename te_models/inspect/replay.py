"""A captured step of a run, run again: whether its tensors come out as recorded, and what other recipes make of it.

The step runs twice. Two runs that differ speak for the hardware or for kernels without a fixed order; two equal ones
that differ from the record on the same kind of device speak for a fault while the run went; equal ones all around for
the software, which will do the same again.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_models.causal_lm import CausalLM
from te_models.config.recipe import SCHEMES, Recipe, get_recipe, list_recipes
from te_models.config.training import TrainConfig
from te_models.errors import CheckpointError, DataError, TeModelsError, UsageError
from te_models.fp8.scaling_state import WIDTHS, delayed_states, fp8_max
from te_models.inspect.replay_report import (
    Replay,
    StepRun,
    TensorComparison,
    TensorNumbers,
    Variant,
    within,
)
from te_models.recorder.layout import RecordedTensor
from te_models.recorder.record import Record, has_record, read_record
from te_models.training.captures import Capture, device_name, read_capture
from te_models.training.metrics import read_events, read_metrics
from te_models.training.parallel import Parallel
from te_models.training.recipe_schedule import in_bf16
from te_models.training.recording import Recorder
from te_models.training.resume import saved_choices
from te_models.training.routers import weigh_losses
from te_models.training.step_passes import StepPasses
from te_models.training.timing import Row


def replay(
    run: str | Path,
    step: int,
    *,
    device: str | None = None,
    engine: str = "emulated",
    twice: bool = True,
    recipes: Sequence[str] = (),
    bf16: Sequence[str] = (),
    margins: Sequence[int] = (),
    histories: Sequence[int] = (),
) -> Replay:
    """Run a captured step of a run again, compare it with the record, and try changes.

    Args:
        run: the folder of the run.
        step: the step; `te-models capture` marks steps in advance, and with a record so does every checkpoint.
        device: where to run it; None: the CPU for the emulated engine, else the first GPU.
        engine: "emulated", or "native" on a GPU.
        twice: run it twice, to tell faults of the hardware from faults of the software.
        recipes: names of recipes to try; "all": every one.
        bf16: patterns of te.Linears to try in BF16, such as "layers.3.*", beside the run's own.
        margins: of DelayedScaling, to try.
        histories: amax_history_len of DelayedScaling, to try.

    Raises:
        CheckpointError: the step was not captured.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise CheckpointError(f"{run} is no folder of a run")
    capture = read_capture(folder, step)
    if device is None:
        device = "cpu" if engine == "emulated" else "cuda"
    run_recipe = saved_choices(capture.state)["recipe"]
    place: dict[str, Any] = {"device": device, "engine": engine}
    first = run_step(capture, run_recipe, place)
    # The same again: two runs that differ cannot tell anything about a third.
    second = run_step(capture, run_recipe, place) if twice else None
    variants = [
        _variant(name, capture, recipe, place)
        for name, recipe in _changes(run_recipe, recipes, bf16, margins, histories)
    ]
    name = device_name(torch.device(device))
    return Replay(
        run=str(run),
        step=step,
        device=name,
        engine=engine,
        recorded_on=_recorded_on(capture),
        recorded_loss=_recorded_loss(folder, capture),
        first=first,
        second=second,
        tensors=_compared(folder, capture, first.record),
        variants=variants,
    )


def try_recipes(run: str | Path, step: int, recipes: Mapping[str, Recipe]) -> list[Variant]:
    """Run a captured step under each of several recipes, by name, with the emulated engine on the CPU.

    Raises:
        CheckpointError: the step was not captured.
    """
    capture = read_capture(Path(run), step)
    place = {"device": "cpu", "engine": "emulated"}
    return [_variant(name, capture, recipe, place) for name, recipe in recipes.items()]


def run_step(capture: Capture, recipe: Recipe, place: dict[str, Any]) -> StepRun:
    """Run a captured step under a recipe, on a model that is loaded anew, without an update."""
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    # A capture of another version may have settings that this one does not know.
    fields = {name: value for name, value in capture.about["config"].items() if name in known}
    choices = saved_choices(capture.state)
    saved: Recipe = choices["recipe"]
    same = saved.to_dict() == recipe.to_dict()
    # One process computes the whole batch, with no graph; scales are the saved ones if the recipe is the run's own.
    fields |= dict(parallel="none", cuda_graph=False, calibrate=not same, recipe_schedule="")
    fields |= dict(tensor_parallel_size=0, expert_parallel_size=0, fp8_dispatch=False)
    config = TrainConfig(**fields | {"sequence_parallel": False})
    # Anew for each run: a pass changes scales and histories.
    model = CausalLM.from_pretrained(
        capture.state, recipe=recipe, fp8_params=bool(choices["fp8_params"]) and same, **place
    )
    # Under another recipe the saved scales would be the wrong ones, or for a format that it does not use.
    if not same:
        _scales_of(model)
    # A model with adapters is loaded to be used, and its run trains them alone.
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(True)
    weigh_losses(model, config)
    parallel = Parallel()
    count = len(capture.micro_batches)
    gradients = parallel.gradients(model, count)
    recorder = Recorder(model, parallel, every=0, micro_batches=count)
    passes = StepPasses(model, gradients, parallel, config, recorder)
    recorder.begin()
    # Stochastic rounding draws the numbers that the run drew.
    # The caller's random numbers go on as if nothing had run.
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(capture.random)
        loss = passes.run(capture.micro_batches, eager=True)
    entry = recorder.end(capture.step)
    entry.wait()
    recorder.detach()
    trained = [p for p in model.parameters() if gradients.of(p) is not None]
    norm = parallel.norm(trained, [gradients.of(p) for p in trained])  # type: ignore[misc]
    record = Record(
        tensors=recorder.tensors,
        steps=[capture.step],
        values=entry.values.numpy()[None],
        codes=entry.codes.numpy().view(np.uint64)[None],
    )
    return StepRun(loss=float(loss), grad_norm=float(norm), record=record)


@torch.no_grad()
def _scales_of(model: CausalLM) -> None:
    """Make delayed scales anew from the histories that the model has, by the rules of its own recipe."""
    for name, state in delayed_states(model).items():
        owner, _, direction = name.rpartition(".")
        recipe = model.precision.recipe_of(owner)
        if recipe is None or not SCHEMES[recipe.scheme].stateful or len(state.amax_history) < 2:
            continue
        # Row 0 is the maximum of the step that is under way.
        history = state.amax_history[1:]
        uses_newest = recipe.fields["amax_compute_algo"] == "most_recent"
        used = history[-1] if uses_newest else history.amax(0)
        largest = fp8_max(recipe, direction) * 2.0 ** -recipe.fields["margin"]
        usable = (used > 0) & used.isfinite()
        state.scale.copy_(torch.where(usable, largest / used, state.scale))
        assert len(state.scale) % WIDTHS[direction] == 0


def _changes(
    recorded: Recipe,
    recipes: Sequence[str],
    bf16: Sequence[str],
    margins: Sequence[int],
    histories: Sequence[int],
) -> Iterator[tuple[str, Recipe | TeModelsError]]:
    """Yield the recipes to try, each with what it changes; an error in place of one that there is not."""
    names: list[str] = []
    for name in recipes:
        names += list_recipes() if name == "all" else [name]
    # "all" may repeat names that were given.
    for name in dict.fromkeys(names):
        yield f"recipe {name}", _tried(lambda name=name: _with_edges(get_recipe(name), recorded))
    for pattern in bf16:
        yield f"{pattern} in BF16", _tried(lambda pattern=pattern: in_bf16(recorded, [pattern]))
    for margin in margins:
        yield f"margin {margin}", _tried(lambda margin=margin: recorded.replace(margin=margin))
    for length in histories:
        yield (
            f"amax_history_len {length}",
            _tried(lambda length=length: recorded.replace(amax_history_len=length)),
        )


def _with_edges(recipe: Recipe, recorded: Recipe) -> Recipe:
    """Return a recipe with the BF16 layers of the run's own."""
    return recipe if not recipe.quantized else recorded.followed_by(recipe.name)


def _tried(make: Callable[[], Recipe]) -> Recipe | TeModelsError:
    try:
        return make()
    except (UsageError, DataError) as error:
        return error


def _variant(
    name: str, capture: Capture, recipe: Recipe | TeModelsError, place: dict[str, Any]
) -> Variant:
    """Run the step under another recipe."""
    if not isinstance(recipe, Recipe):
        return Variant(name, reason=str(recipe))
    try:
        # A recipe is tried to see what it does: its warnings are not about the run.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run_step(capture, recipe, place)
    except (TeModelsError, ValueError) as error:
        return Variant(name, reason=str(error))
    record = result.record
    bad = np.nan_to_num(record.field("nonfinite")[0]) > 0
    tensors = [tensor.name for tensor, one in zip(record.tensors, bad, strict=True) if one]
    exact = record.sqnr()[0]
    # Without the tensors that were not cast, or exactly: their SQNR is NaN or infinite.
    layers: dict[int, float] = {}
    for tensor, value in zip(record.tensors, exact, strict=True):
        if tensor.layer is not None and math.isfinite(value):
            # A layer is as exact as its least exact cast.
            layers[tensor.layer] = min(layers.get(tensor.layer, math.inf), float(value))
    measured = exact[np.isfinite(exact)]
    return Variant(
        name=name,
        finite=math.isfinite(result.loss) and math.isfinite(result.grad_norm) and not tensors,
        loss=result.loss,
        grad_norm=result.grad_norm,
        bad_tensors=tuple(tensors),
        layers=layers,
        sqnr=float(measured.mean()) if len(measured) else math.nan,
    )


def _compared(run: Path, capture: Capture, replayed: Record) -> list[TensorComparison]:
    """Compare each tensor that both the record and the replay have."""
    if not has_record(run):
        return []
    record = read_record(run)
    place = _recorded_place(run, capture, record)
    if place is None:
        return []
    if record.version != replayed.version:
        raise DataError(
            f"{run} was recorded by an older te-models, whose hashes of FP8 data are others: replay it with that one"
        )
    recorded = numbers(record, place)
    replayed_numbers = numbers(replayed, 0)
    compared = []
    for tensor, then in recorded.items():
        now = replayed_numbers.get(tensor)
        if now is not None:
            equal = then.codes == now.codes
            # Equal codes need no bound; others are compared by their counts.
            compared.append(TensorComparison(tensor, then, now, equal, equal or within(then, now)))
    return compared


def _recorded_on(capture: Capture) -> str:
    """Return the device and the engine of a captured step, and its processes if there were several."""
    about = capture.about
    place = f"{about['device']}, {about['engine']}"
    processes = about.get("processes", 1)
    return place if processes == 1 else f"{place}, {processes} processes"


def _recorded_place(run: Path, capture: Capture, record: Record) -> int | None:
    """Return the place of a captured step in the record; None if it has none.

    A guard that demotes a layer takes the step again, so that it has two entries. One that rewinds takes another step
    of this number, and records that alone.
    """
    places = [place for place, step in enumerate(record.steps) if step == capture.step]
    if not places:
        return None
    if not capture.about.get("bad", False):
        return places[-1]
    event = _bad_event(run, capture.step)
    if event is not None and event["action"] == "rewind":
        return None
    return places[0]


def _bad_event(run: Path, step: int) -> Row | None:
    """Return the first event of a step; None if it has none."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return None
    for row in read_events(path):
        if row["step"] == step:
            return row
    return None


def numbers(record: Record, place: int) -> dict[RecordedTensor, TensorNumbers]:
    """Return the statistics of every tensor that was quantized in a step of a record."""
    columns = [
        record.field("amax"),
        record.field("scale_min"),
        record.share("saturated"),
        record.share("flushed"),
        record.field("nonfinite"),
        record.sqnr(),
    ]
    statistics = {}
    for row, tensor in enumerate(record.tensors):
        if record.counted[place, row]:
            values = [float(column[place, row]) for column in columns]
            statistics[tensor] = TensorNumbers(*values, codes=int(record.codes[place, row]))
    return statistics


def _recorded_loss(run: Path, capture: Capture) -> float | None:
    """Return the loss that the run's metrics have for a captured step; None if they have none, NaN if it was none."""
    path = run / "metrics.jsonl"
    if path.exists() and not capture.about.get("bad", False):
        for row in read_metrics(path):
            if row["step"] == capture.step:
                return row.get("loss")
    event = _bad_event(run, capture.step)
    if event is None or "loss" not in event:
        return None
    return math.nan if event["loss"] is None else float(event["loss"])
