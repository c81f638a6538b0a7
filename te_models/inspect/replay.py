"""A captured step of a run, run again: whether its tensors come out as recorded, and what other recipes make of it.

The step runs twice. Two runs that differ speak for the hardware or for kernels without a fixed order; two equal ones
that differ from the record on the same kind of device speak for a fault while the run went; equal ones all around for
the software, which will do the same again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from te_models.config.recipe import Recipe, get_recipe, list_recipes
from te_models.device.choice import choose_device
from te_models.errors import DataError, TeModelsError, UsageError, plural
from te_models.inspect.replay_processes import processes_here, run_steps
from te_models.inspect.replay_report import (
    Replay,
    StepRun,
    TensorComparison,
    TensorNumbers,
    Variant,
    place_name,
    within,
)
from te_models.recorder.layout import RecordedTensor
from te_models.recorder.record import Record, has_record, read_record
from te_models.saving.checkpoint_choice import check_run
from te_models.training.captures import Capture, capture_folder, device_name, read_capture
from te_models.training.metrics import read_events, read_metrics
from te_models.training.recipe_schedule import in_bf16
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
    one_process: bool = False,
) -> Replay:
    """Run a captured step of a run again, compare it with the record, and try changes.

    A step of several processes runs in as many, which are started for it, so that each casts the share that it cast;
    on GPUs where there is one for each.

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
        one_process: start no processes; one takes the whole batch, with other scales and sums than the run's.

    Raises:
        DataError: there is no such folder, or it is not the folder of a run.
        CheckpointError: the step was not captured.
        TeModelsError: the processes failed.
    """
    folder = Path(run)
    check_run(folder)
    capture = read_capture(folder, step)
    if device is None:
        device = "cpu" if engine == "emulated" else "cuda"
    else:
        # An unknown one is refused here, and not in each of several processes.
        choose_device(device)
    run_recipe = capture.recipe
    # The same twice: two runs that differ cannot tell anything about a third.
    same = [run_recipe, run_recipe] if twice else [run_recipe]
    changes = list(_changes(run_recipe, recipes, bf16, margins, histories))
    changed = [recipe for _, recipe in changes if isinstance(recipe, Recipe)]
    processes = 1 if one_process else processes_here(capture, device)
    results = run_steps(
        folder,
        capture,
        [*same, *changed],  # one list, so that the processes are started once for all of them
        device=device,
        engine=engine,
        processes=processes,
    )
    first, *again = _without_errors(results[: len(same)])
    tensors, uncompared = _compared(folder, capture, first.record)
    return Replay(
        run=str(run),
        step=step,
        device=device_name(torch.device(device)),
        engine=engine,
        processes=processes,
        recorded_on=_recorded_on(capture),
        recorded_processes=capture.about.get("processes", 1),
        recorded_loss=_recorded_loss(folder, capture),
        first=first,
        second=again[0] if again else None,
        tensors=tensors,
        uncompared=uncompared,
        variants=_variants(changes, results[len(same) :]),
    )


def _without_errors(results: Sequence[StepRun | TeModelsError]) -> list[StepRun]:
    """Return the results, or raise the first error among them."""
    runs = []
    for result in results:
        if isinstance(result, TeModelsError):
            raise result
        runs.append(result)
    return runs


def try_recipes(run: str | Path, step: int, recipes: Mapping[str, Recipe]) -> list[Variant]:
    """Run a captured step under each of several recipes, by name, with the emulated engine on the CPU.

    Raises:
        CheckpointError: the step was not captured.
    """
    capture = read_capture(Path(run), step)
    results = run_steps(
        Path(run),
        capture,
        list(recipes.values()),
        device="cpu",
        engine="emulated",
        processes=processes_here(capture, "cpu"),
    )
    return _variants(list(recipes.items()), results)


def _changes(
    recorded: Recipe,
    recipes: Sequence[str],
    bf16: Sequence[str],
    margins: Sequence[int],
    histories: Sequence[int],
) -> Iterator[tuple[str, Recipe | TeModelsError]]:
    """Yield (what is changed, the recipe to try); an error in place of a recipe that does not exist."""
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
    """Return what `make` returns, or the error that it raises."""
    try:
        return make()
    except (UsageError, DataError) as error:
        return error


def _variants(
    changes: Sequence[tuple[str, Recipe | TeModelsError]],
    results: Sequence[StepRun | TeModelsError],
) -> list[Variant]:
    """Return the outcome of each change.

    `results` are of the changes that are recipes, in their order; a change that is an error is its own outcome.
    """
    remaining = iter(results)
    variants = []
    for name, change in changes:
        result = next(remaining) if isinstance(change, Recipe) else change
        variants.append(_variant(name, result))
    return variants


def _variant(name: str, result: StepRun | TeModelsError) -> Variant:
    """Return the outcome of the step under another recipe: loss, gradient norm, bad tensors, SQNR per layer."""
    if isinstance(result, TeModelsError):
        return Variant(name, reason=str(result))
    record = result.record
    bad = np.nan_to_num(record.field("nonfinite")[0]) > 0
    bad_tensors = [
        tensor.name for tensor, is_bad in zip(record.tensors, bad, strict=True) if is_bad
    ]
    sqnr = record.sqnr()[0]  # [tensors]
    # Without the tensors that were not cast, or exactly: their SQNR is NaN or infinite.
    layers: dict[int, float] = {}
    for tensor, value in zip(record.tensors, sqnr, strict=True):
        if tensor.layer is not None and math.isfinite(value):
            # A layer is as exact as its least exact cast.
            layers[tensor.layer] = min(layers.get(tensor.layer, math.inf), float(value))
    finite_sqnr = sqnr[np.isfinite(sqnr)]
    finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm) and not bad_tensors
    return Variant(
        name=name,
        finite=finite,
        loss=result.loss,
        grad_norm=result.grad_norm,
        bad_tensors=tuple(bad_tensors),
        layers=layers,
        sqnr=float(finite_sqnr.mean()) if len(finite_sqnr) else math.nan,
    )


def _compared(run: Path, capture: Capture, replayed: Record) -> tuple[list[TensorComparison], str]:
    """Compare each tensor that both the record and the replay have; without any, say why, else ""."""
    # A bad step's capture has the entry; the run may have taken another step of this number.
    folder = capture_folder(run, capture.step) if capture.about.get("bad", False) else run
    if not has_record(folder):
        return [], "the run has no record (--record)"
    record = read_record(folder)
    places = [place for place, step in enumerate(record.steps) if step == capture.step]
    if not places:
        return [], _not_recorded(record, capture.step)
    if record.version != replayed.version:
        raise DataError(
            f"{run} was recorded by an older te-models, whose hashes of FP8 data are others: replay it with that one"
        )
    recorded = numbers(record, places[-1])
    replayed_numbers = numbers(replayed, 0)
    if not recorded:
        return [], "nothing ran in FP8 in this step"
    compared = []
    for tensor, then in recorded.items():
        now = replayed_numbers.get(tensor)
        if now is not None:
            equal = then.codes == now.codes
            # Equal codes need no bound; others are compared by their counts.
            compared.append(TensorComparison(tensor, then, now, equal, equal or within(then, now)))
    return compared, "" if compared else "none of the recorded tensors ran in FP8 here"


def _not_recorded(record: Record, step: int) -> str:
    """Return why a record lacks a step: one that follows a checkpoint is kept, and recorded only where that is due."""
    if not record.steps:
        return "the record has no step yet"
    nearest = min(record.steps, key=lambda one: abs(one - step))
    return (
        f"the record does not have this step (of {plural(len(record.steps), 'step')} the nearest is {nearest}), since "
        "--record N takes one step of N, beside those that te-models capture marks"
    )


def _recorded_on(capture: Capture) -> str:
    """Return the device and the engine of a captured step, and its processes if there were several."""
    about = capture.about
    return place_name(about["device"], about["engine"], about.get("processes", 1))


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
    """Return the statistics of every tensor that was quantized in a step; `place` is its index in `record.steps`."""
    # Each [tensors].
    amax = record.field("amax")[place]
    scale = record.field("scale_min")[place]
    saturated = record.share("saturated")[place]
    flushed = record.share("flushed")[place]
    nonfinite = record.field("nonfinite")[place]
    sqnr = record.sqnr()[place]
    statistics = {}
    for row, tensor in enumerate(record.tensors):
        if record.counted[place, row]:
            statistics[tensor] = TensorNumbers(
                amax=float(amax[row]),
                scale=float(scale[row]),
                saturated=float(saturated[row]),
                flushed=float(flushed[row]),
                nonfinite=float(nonfinite[row]),
                sqnr=float(sqnr[row]),
                codes=int(record.codes[place, row]),
            )
    return statistics


def _recorded_loss(run: Path, capture: Capture) -> float | None:
    """Return the loss of a captured step by the run's metrics; None without one, NaN if it was not finite."""
    path = run / "metrics.jsonl"
    if path.exists() and not capture.about.get("bad", False):
        for row in read_metrics(path):
            if row["step"] == capture.step:
                return row.get("loss")
    event = _bad_event(run, capture.step)
    if event is None or "loss" not in event:
        return None
    return math.nan if event["loss"] is None else float(event["loss"])
