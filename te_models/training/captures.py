"""Captured steps: the state before a step and its batch, from which `te-models replay` runs the step again.

A capture is a folder `captures/step-<N>` of the run with the tensors of a saved model (without the optimizer's), the
group "batch" and the document "capture". One after a checkpoint has no model of its own: its state is that checkpoint.
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
from te_models.saving.run_folder import Checkpoints
from te_models.training.evaluation import Batch
from te_models.training.failed_run import broken_tensor
from te_models.training.recording import RecordedStep, Recorder, RecordLog
from te_models.training.resume import run_choices, saved_choices

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

FOLDER = "captures"
MARKS = "capture.json"  # in the folder of a run: the steps to capture
RANDOM = "random"  # beside the micro-batches
KEPT = 1_000_000  # captures are deleted by hand


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
    """Writes the captures of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.marks = Marks()
        self._read_at: int | None = None  # the time of change of the file that was read
        self.bad_step: int | None = None  # the bad step that was kept

    def begin(self) -> None:
        """Read the marks when a run starts; several processes agree on the marks of the first."""
        trainer = self.trainer
        marks = trainer.parallel.ranks.from_first(lambda: asdict(read_marks(trainer.out)))
        self.marks = Marks(tuple(marks["steps"]), marks["every"])

    def is_due(self, step: int) -> bool:
        """Return whether a step is marked; one process looks for new marks."""
        if self.trainer.parallel.ranks.world == 1:
            self._read_again()
        return self.marks.has(step)

    def _read_again(self) -> None:
        # A stat for each step; the file is read where it has changed.
        try:
            changed = os.stat(self.trainer.out / MARKS).st_mtime_ns
        except OSError:
            return
        if changed != self._read_at:
            self._read_at = changed
            self.marks = read_marks(self.trainer.out)

    def recorder_of(self, step: int, micro_batches: list[Batch]) -> Recorder | None:
        """Return the recorder if a step, which has begun, is to be recorded; capture the step if it is marked."""
        trainer = self.trainer
        captured = self.is_due(step)
        if captured and trainer.recorder is None:
            self._record_from_now_on()
        # A bad step that was kept stays, though the run takes the step once more.
        if step != self.bad_step:
            if captured:
                self.save(step, micro_batches)
            # The checkpoint before this step is a state to replay from: with the batch it makes a capture, for few
            # bytes.
            elif trainer.recorder is not None and trainer.saved_step == step - 1:
                self.save_batch(step, micro_batches)
        recorder = trainer.recorder
        return recorder if recorder is not None and (captured or recorder.is_due(step)) else None

    def _record_from_now_on(self) -> None:
        """Make a recorder for captured steps. A graph that was captured without one counts nothing, so it goes."""
        trainer = self.trainer
        trainer.recorder = Recorder.of_run(trainer.model, trainer.parallel, trainer.config, every=0)
        trainer.passes.use_recorder(trainer.recorder)
        trainer.guard.use_recorder(trainer.recorder)

    def save(self, step: int, micro_batches: list[Batch], bad: bool = False) -> bool:
        """Write the state before a step, which has begun, and its batch. All processes call this together.

        `bad` says that the step did not count: the run may take another one of this number. Return whether it was
        written: a state that is broken itself is not, since no model could be loaded from it.
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
            folder = trainer.new_checkpoints(trainer.out / FOLDER, keep_last=KEPT)
            self._drop_record(step)
            folder.save(step, tensors, documents)
        return True

    def save_batch(self, step: int, micro_batches: list[Batch]) -> None:
        """Write the batch of the step after a checkpoint, whose state the checkpoint has."""
        batch = self._whole_batch(micro_batches)
        if not self.trainer.parallel.ranks.first:
            return
        root = self.trainer.out / FOLDER
        self._drop_stale(root)
        path = capture_folder(self.trainer.out, step)
        self._drop_record(step)
        save_folder(path, {"batch": batch}, {"capture": self._document(step, len(micro_batches))})

    def save_bad_step(
        self, step: int, micro_batches: list[Batch], recorded: RecordedStep | None
    ) -> None:
        """Write the capture of the first bad step of a run that goes on; further ones would fill the disk.

        What the recorder saw of it goes into the capture, since the run may take another step of this number.
        """
        if self.bad_step is not None:
            return
        if not self.save(step, micro_batches, bad=True):
            return
        self.bad_step = step
        recorder = self.trainer.recorder
        if recorder is None or recorded is None or not self.trainer.parallel.ranks.first:
            return
        log = RecordLog(recorder, capture_folder(self.trainer.out, step), after_step=0)
        log.write(recorded)
        log.close()

    def _drop_record(self, step: int) -> None:
        """Delete the record in the capture of a bad step that a resumed run takes again: no save replaces it."""
        if self.trainer.parallel.ranks.first:
            shutil.rmtree(
                capture_folder(self.trainer.out, step) / RECORD_FOLDER, ignore_errors=True
            )

    def _drop_stale(self, root: Path) -> None:
        """Delete batches whose checkpoint is gone."""
        states = {path.name for path in self.trainer.checkpoints.all()}
        for path in Checkpoints(root).all():
            before = f"step-{int(path.name.removeprefix('step-')) - 1:08d}"
            if not _has_own_model(path) and before not in states:
                # Another process or the user may delete it at the same moment; nothing depends on it.
                shutil.rmtree(path, ignore_errors=True)

    def _document(self, step: int, micro_batches: int) -> Fields:
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
        """Return the micro-batches of all shares of the data, "<number>.<share>.<name>" -> [B, S], and "random".

        That is the state of each process's random numbers, uint8 [processes, length], which stochastic rounding draws
        from.
        """
        parallel = self.trainer.parallel
        local_share: list[Any] = [parallel.data_rank]
        for batch in micro_batches:
            local_share.append({name: tensor.tolist() for name, tensor in batch.items()})
        # Of processes that share a model (tensor parallelism) all have the same rows: one of each share counts.
        shares = {gathered[0]: gathered[1:] for gathered in parallel.ranks.gather(local_share)}
        whole = {RANDOM: self._random_states()}
        for number, batch in enumerate(micro_batches):
            for name, tensor in batch.items():
                for share, rows in shares.items():
                    values = torch.tensor(rows[number][name], dtype=tensor.dtype)
                    whole[f"{number}.{share}.{name}"] = values
        return whole

    def _random_states(self) -> Tensor:
        """Return the state of each process's random numbers when the step began, uint8 [processes, length]."""
        begun = self.trainer.begun
        random_state = torch.get_rng_state() if begun is None else begun.random
        states = self.trainer.parallel.ranks.gather(random_state.tolist())
        return torch.tensor(states, dtype=torch.uint8)


@dataclass(frozen=True)
class Capture:
    """A captured step.

    Attributes:
        step: its number.
        state: the folder of the model before it.
        shares: the micro-batches of each share of the data.
        random: the states of the random numbers of each process on the CPU, uint8 [processes, length].
        about: the document "capture".
    """

    step: int
    state: Path
    shares: list[list[Batch]]
    random: Tensor
    about: Fields

    @property
    def recipe(self) -> Recipe:
        """The recipe of the step, which may be another than the one that its state was saved under."""
        fields = self.about.get("recipe")
        if fields is None:  # of an earlier version
            saved: Recipe = saved_choices(self.state)["recipe"]
            return saved
        return recipe_from_dict(fields)

    @property
    def processes(self) -> int:
        """The number of processes that took the step; 1 for a capture that has not kept their shares apart."""
        return int(self.about.get("processes", 1)) if "shares" in self.about else 1

    def of_one_process(self, joined: bool) -> list[Batch]:
        """Return all micro-batches for one process, with the rows of the shares joined, or one share after another."""
        count = len(self.shares[0])
        micro_batches = []
        for number in range(count):
            of_shares = [share[number] for share in self.shares]
            shapes = [{name: tensor.shape[1:] for name, tensor in one.items()} for one in of_shares]
            # Rows of different lengths cannot be joined.
            if joined and all(other == shapes[0] for other in shapes):
                rows = {name: torch.cat([one[name] for one in of_shares]) for name in shapes[0]}
                micro_batches.append(rows)
            else:
                micro_batches += of_shares
        return micro_batches


def capture_folder(run: Path, step: int) -> Path:
    """Return the folder of a captured step."""
    return run / FOLDER / f"step-{step:08d}"


def captured_steps(run: Path) -> list[int]:
    """Return the steps that can be replayed: those with a batch, and the state before them."""
    steps = []
    for path in Checkpoints(run / FOLDER).all():
        step = int(path.name.removeprefix("step-"))
        if _state_of(run, step).is_dir():
            steps.append(step)
    return steps


def steps_saved(run: Path) -> int:
    """Return the step of a run's newest checkpoint, from which a resumed run goes on; 0 without one."""
    steps = [
        int(path.name.removeprefix("step-")) for path in Checkpoints(run / "checkpoints").all()
    ]
    return max(steps, default=0)


def _state_of(run: Path, step: int) -> Path:
    captured = capture_folder(run, step)
    return captured if _has_own_model(captured) else run / "checkpoints" / f"step-{step - 1:08d}"


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
        steps = ", ".join(map(str, captured_steps(run)))
        others = f"but of {steps}" if steps else "nor of another"
        name = shlex.quote(str(run))
        # A step in the past can only be taken again, one in the future can still be marked.
        if step <= steps_saved(run):
            what_to_do = (
                f"that step has passed, so mark it for a new folder with `te-models capture NEW --step {step}`, and "
                f"repeat the run there from {shlex.quote(f'{run}/run.toml')} with --out NEW"
            )
        else:
            what_to_do = f"mark steps in advance with `te-models capture {name} --step {step}`, and run or --resume it"
        raise CheckpointError(
            f"{run} has not kept state and batch of step {step} ({others}): {what_to_do}"
        )
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
    # Names are "0.1.input_ids": the numbers of the micro-batch and of the share, and the argument of the model.
    for name, tensor in tensors.items():
        number, _, rest = name.partition(".")
        share, _, part = rest.partition(".") if "shares" in about else ("0", ".", rest)
        shares[int(share)][int(number)][part] = tensor
    # Captures of earlier versions have the first process's state alone.
    states = random.reshape(-1, random.shape[-1])
    return Capture(step, _state_of(run, step), shares, states, about)


def device_name(device: torch.device) -> str:
    """Return the name of a device, by which two of a kind are recognized."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
