"""Captured steps: the state before a step and its batch, from which `te-models replay` runs the step again.

A capture is a folder `captures/step-<N>` of the run. It holds a saved model (without the optimizer's state), the batch
in the group "batch", and the settings of the step in the document "capture". The capture of the step after a checkpoint
has no model of its own, since that checkpoint is the state before it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_models.config.recipe import Recipe, recipe_from_dict
from te_models.errors import CheckpointError, ConfigError, DataError
from te_models.files.atomic import replace_text
from te_models.files.formats import Fields, read_json
from te_models.fp8.region import saving
from te_models.recorder.record import FOLDER as RECORD_FOLDER
from te_models.saving.folder import load_folder, save_folder
from te_models.saving.run_folder import Checkpoints, step_name, step_of
from te_models.training.evaluation import Batch
from te_models.training.failed_run import broken_tensor
from te_models.training.recording import RecordedStep, Recorder, RecordLog
from te_models.training.resume import run_choices, saved_choices

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

FOLDER = "captures"
MARKS = "capture.json"  # in the folder of a run: the steps to capture
RANDOM = "random"  # the state of the random numbers, beside the micro-batches in the group "batch"


@dataclass(frozen=True)
class Marks:
    """The steps that a run is to capture: those listed, and each `every`-th (0: no others)."""

    steps: tuple[int, ...] = ()
    every: int = 0

    def has(self, step: int) -> bool:
        """Return whether a step is to be captured."""
        return step in self.steps or (self.every > 0 and step % self.every == 0)


def read_marks(run: Path) -> Marks:
    """Return the marks of a run; none without a file of them.

    Raises:
        DataError: the file cannot be read.
    """
    path = run / MARKS
    if not path.exists():
        return Marks()
    marks = read_json(path)
    try:
        assert isinstance(marks, dict)
        return Marks(tuple(int(step) for step in marks["steps"]), int(marks["every"]))
    except (AssertionError, KeyError, TypeError, ValueError):
        raise DataError(f"{path} does not list steps: write it with te-models capture") from None


def write_marks(run: Path, marks: Marks) -> None:
    """Mark steps of a run, which reads them when it starts; one process reads them before each step."""
    run.mkdir(parents=True, exist_ok=True)
    replace_text(run / MARKS, json.dumps({"steps": list(marks.steps), "every": marks.every}) + "\n")


class Captures:
    """Writes the captures of a run.

    Attributes:
        marks: the steps to capture.
        bad_step: the bad step whose capture was written; None: there was none yet.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.marks = Marks()
        self.bad_step: int | None = None
        # When the file that was read last had changed, in nanoseconds.
        self._marks_changed: int | None = None

    def begin(self) -> None:
        """Read the marks when a run starts; several processes agree on the marks of the first."""
        trainer = self.trainer
        marks = trainer.parallel.ranks.from_first(lambda: asdict(read_marks(trainer.out)))
        self.marks = Marks(tuple(marks["steps"]), marks["every"])

    def is_due(self, step: int) -> bool:
        """Return whether a step is marked; one process looks for new marks."""
        if self.trainer.parallel.ranks.world == 1:
            self._reread_marks()
        return self.marks.has(step)

    def _reread_marks(self) -> None:
        """Read the file of marks if it has changed; to find that out takes one call of stat per step."""
        try:
            changed = os.stat(self.trainer.out / MARKS).st_mtime_ns
        except OSError:
            return
        if changed != self._marks_changed:
            self._marks_changed = changed
            self.marks = read_marks(self.trainer.out)

    def begin_step(self, step: int, micro_batches: list[Batch]) -> Recorder | None:
        """Capture a step that has begun, if it is marked; return the recorder if the step is to be recorded, else None.

        Where a checkpoint has the state before the step, write the batch at least: both together can be replayed.
        """
        trainer = self.trainer
        captured = self.is_due(step)
        if captured and trainer.recorder is None:
            self._record_from_now_on()
        recorder = trainer.recorder
        if step == self.bad_step:
            # The run takes the bad step once more: its capture stays as it is.
            pass
        elif captured:
            self.save(step, micro_batches)
        elif recorder is not None and trainer.saved_step == step - 1:
            self.save_batch(step, micro_batches)
        if recorder is not None and (captured or recorder.is_due(step)):
            return recorder
        return None

    def _record_from_now_on(self) -> None:
        """Make a recorder for captured steps. A graph that was captured without one counts nothing, so it goes."""
        trainer = self.trainer
        trainer.recorder = Recorder.of_run(trainer.model, trainer.parallel, trainer.config, every=0)
        trainer.passes.use_recorder(trainer.recorder)
        trainer.guard.use_recorder(trainer.recorder)

    def save(self, step: int, micro_batches: list[Batch], bad: bool = False) -> bool:
        """Write the state before a step, which has begun, and its batch. All processes call this together.

        Args:
            step: its number.
            micro_batches: this process's.
            bad: whether the step did not count, so that the run may take another one of this number.

        Returns:
            whether it was written: a state with a NaN is not, since no model could be loaded from it.
        """
        trainer = self.trainer
        batch = self._whole_batch(micro_batches)
        # No other thread may train the model while its weights are copied.
        with saving(trainer.model):
            tensors, documents = trainer.saved_model()
            if broken_tensor(tensors, trainer.parallel.ranks) is not None:
                return False
            tensors = {**tensors, "batch": batch}
            documents = {
                **documents,
                "run": run_choices(trainer.model),
                "capture": self._document(step, len(micro_batches)) | {"bad": bad},
            }
            captures = trainer.new_checkpoints(trainer.out / FOLDER, keep_last=None)
            self._drop_record(step)
            captures.save(step, tensors, documents)
        return True

    def save_batch(self, step: int, micro_batches: list[Batch]) -> None:
        """Write the batch of the step after a checkpoint, whose state the checkpoint has."""
        batch = self._whole_batch(micro_batches)
        if not self.trainer.parallel.ranks.first:
            return
        self._drop_batches_without_checkpoint()
        self._drop_record(step)
        path = capture_folder(self.trainer.out, step)
        save_folder(path, {"batch": batch}, {"capture": self._document(step, len(micro_batches))})

    def save_bad_step(
        self, step: int, micro_batches: list[Batch], recorded: RecordedStep | None
    ) -> None:
        """Write the capture of the first bad step of a run that goes on; further ones would fill the disk.

        The recorder's entry of the step goes into the capture, since the run may take another step of this number.
        """
        if self.bad_step is not None:
            return
        written = self.save(step, micro_batches, bad=True)
        if not written:
            return
        self.bad_step = step
        recorder = self.trainer.recorder
        if recorder is None or recorded is None or not self.trainer.parallel.ranks.first:
            return
        log = RecordLog(recorder, capture_folder(self.trainer.out, step), after_step=0)
        log.write(recorded)
        log.close()

    def _drop_record(self, step: int) -> None:
        """Delete the record in an older capture of a step, which a save leaves in place.

        A bad step has one, and a resumed run may take that step again.
        """
        if self.trainer.parallel.ranks.first:
            folder = capture_folder(self.trainer.out, step) / RECORD_FOLDER
            shutil.rmtree(folder, ignore_errors=True)

    def _drop_batches_without_checkpoint(self) -> None:
        """Delete captures without a model of their own whose checkpoint is gone."""
        checkpoints = {path.name for path in self.trainer.checkpoints.all()}
        for path in Checkpoints(self.trainer.out / FOLDER).all():
            before = step_name(step_of(path) - 1)
            if not _has_own_model(path) and before not in checkpoints:
                # Another process or the user may delete it at the same moment; nothing depends on it.
                shutil.rmtree(path, ignore_errors=True)

    def _document(self, step: int, micro_batches: int) -> Fields:
        """Return the document "capture": the settings of a step with this number of micro-batches."""
        trainer = self.trainer
        config: Fields = {}
        for name, value in asdict(trainer.config).items():
            # Tables of options are read-only mappings, which JSON does not take.
            if isinstance(value, str | int | float | None):
                config[name] = value
            else:
                config[name] = dict(value)
        # "auto" was resolved where the processes met.
        config["parallel"] = trainer.parallel.kind
        return {
            "step": step,
            "micro_batches": micro_batches,
            "engine": trainer.model.engine,
            "device": device_name(trainer.device),
            "processes": trainer.parallel.ranks.world,
            "shares": trainer.parallel.data_world,
            # A schedule may have changed it since the checkpoint before this step.
            "recipe": trainer.model.recipe.to_dict(),
            "calibrates": trainer.passes.calibrates,
            "config": config,
        }

    def _whole_batch(self, micro_batches: list[Batch]) -> dict[str, Tensor]:
        """Return the tensors of the group "batch", of all processes, which call this together.

        Returns:
            "<number>.<share>.<name>": of each micro-batch and share of the data, an argument of the model [B, S].
            "random": the state of each process's random numbers, uint8 [processes, length], which stochastic rounding
                draws from.
        """
        parallel = self.trainer.parallel
        own_batches = []
        for batch in micro_batches:
            own_batches.append({name: tensor.tolist() for name, tensor in batch.items()})
        own_share: list[Any] = [parallel.data_rank, own_batches]
        shares: dict[int, list[Any]] = {}
        for share, batches in parallel.ranks.gather(own_share):
            # Processes that share a model (tensor parallelism) have the same rows: any of them will do.
            shares[share] = batches
        tensors = {RANDOM: self._random_states()}
        for number, batch in enumerate(micro_batches):
            for name, tensor in batch.items():
                for share, batches in shares.items():
                    values = torch.tensor(batches[number][name], dtype=tensor.dtype)
                    tensors[f"{number}.{share}.{name}"] = values
        return tensors

    def _random_states(self) -> Tensor:
        """Return the state of each process's random numbers when the step began, uint8 [processes, length]."""
        begun = self.trainer.begun
        random_state = torch.get_rng_state() if begun is None else begun.random.cpu
        states = self.trainer.parallel.ranks.gather(random_state.tolist())
        return torch.tensor(states, dtype=torch.uint8)


@dataclass(frozen=True)
class Capture:
    """A captured step.

    Attributes:
        step: its number.
        state: the folder of the model before it: the capture's own, or a checkpoint.
        shares: of each share of the data its micro-batches, whose tensors are [B, S].
        random: the state of each process's random numbers on the CPU, uint8 [processes, length].
        about: the document "capture".
    """

    step: int
    state: Path
    shares: list[list[Batch]]
    random: Tensor
    about: Fields

    @property
    def recipe(self) -> Recipe:
        """The recipe of the step; a schedule may have changed it since the state before the step was saved."""
        fields = self.about.get("recipe")
        if fields is None:  # of an earlier version
            saved: Recipe = saved_choices(self.state)["recipe"]
            return saved
        return recipe_from_dict(fields)

    @property
    def processes(self) -> int:
        """The number of processes that took the step; 1 for a capture of an early version, without their shares."""
        if "shares" not in self.about:
            return 1
        return int(self.about.get("processes", 1))

    def micro_batches_of_one_process(self, joined: bool) -> list[Batch]:
        """Return the micro-batches with which one process takes the step of all.

        With `joined` the rows of all shares are one micro-batch, where they have the same length. Otherwise the shares
        follow each other.
        """
        micro_batches = []
        for number in range(len(self.shares[0])):
            batches = [share[number] for share in self.shares]
            if joined and _have_same_length(batches):
                rows = {}
                for name in batches[0]:
                    rows[name] = torch.cat([batch[name] for batch in batches])
                micro_batches.append(rows)
            else:
                micro_batches += batches
        return micro_batches


def _have_same_length(batches: list[Batch]) -> bool:
    """Return whether the rows of several batches can be joined."""
    shapes = []
    for batch in batches:
        shapes.append({name: tensor.shape[1:] for name, tensor in batch.items()})
    return all(shape == shapes[0] for shape in shapes)


def capture_folder(run: Path, step: int) -> Path:
    """Return the folder of a captured step."""
    return run / FOLDER / step_name(step)


def captured_steps(run: Path) -> list[int]:
    """Return the steps that can be replayed: those with a batch, and the state before them."""
    steps = []
    for path in Checkpoints(run / FOLDER).all():
        step = step_of(path)
        if _state_of(run, step).is_dir():
            steps.append(step)
    return steps


def newest_saved_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint, from which a resumed run goes on; 0 without one."""
    checkpoints = Checkpoints(run / "checkpoints").all()
    return max((step_of(path) for path in checkpoints), default=0)


def _state_of(run: Path, step: int) -> Path:
    """Return the folder of the model before a captured step: the capture itself, or the checkpoint before the step."""
    captured = capture_folder(run, step)
    if _has_own_model(captured):
        return captured
    return run / "checkpoints" / step_name(step - 1)


def _has_own_model(capture: Path) -> bool:
    """Return whether a capture has a model, as marked steps do; one after a checkpoint has only the batch."""
    # A LoRA run saves adapters alone.
    return (capture / "config.json").exists() or (capture / "adapter_config.json").exists()


def read_capture(run: Path, step: int) -> Capture:
    """Return a captured step of a run.

    Raises:
        CheckpointError: the step was not captured; the message lists those that were.
        ConfigError: it was captured by another version, whose settings this one does not know.
    """
    if step not in captured_steps(run):
        raise CheckpointError(_not_captured(run, step))
    folder = load_folder(capture_folder(run, step), ["batch", "capture"])
    about = folder.documents["capture"]
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise ConfigError(f"{capture_folder(run, step)} is no capture of this version")
    count = int(about["micro_batches"])
    shares: list[list[Batch]] = []
    for _ in range(int(about.get("shares", 1))):
        shares.append([{} for _ in range(count)])
    tensors = dict(folder.tensors["batch"])
    random = tensors.pop(RANDOM, None)
    if random is None:
        raise CheckpointError(f"{capture_folder(run, step)} has no state of random numbers")
    for name, tensor in tensors.items():
        # "0.1.input_ids": the numbers of the micro-batch and of the share, and the argument of the model. Captures of
        # early versions have one share, and names without its number.
        number, _, argument = name.partition(".")
        share = "0"
        if "shares" in about:
            share, _, argument = argument.partition(".")
        shares[int(share)][int(number)][argument] = tensor
    return Capture(
        step=step,
        state=_state_of(run, step),
        shares=shares,
        # Captures of early versions have the first process's state alone, [length].
        random=random.reshape(-1, random.shape[-1]),
        about=about,
    )


def _not_captured(run: Path, step: int) -> str:
    """Return the error for a step that was not captured: what there is, and what to do."""
    steps = ", ".join(map(str, captured_steps(run)))
    others = f"but of {steps}" if steps else "nor of another"
    # A step in the past can only be taken again, one in the future can still be marked.
    if step <= newest_saved_step(run):
        advice = (
            f"that step has passed, so mark it for a new folder with `te-models capture NEW --step {step}`, and "
            f"repeat the run there from {shlex.quote(f'{run}/run.toml')} with --out NEW"
        )
    else:
        name = shlex.quote(str(run))
        advice = f"mark steps in advance with `te-models capture {name} --step {step}`, and run or --resume it"
    return f"{run} has not kept state and batch of step {step} ({others}): {advice}"


def device_name(device: torch.device) -> str:
    """Return the name of a device, by which two of a kind are recognized."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
