"""The training loop: fine-tune a model on a dataset, evaluate, checkpoint, resume exactly, stop cleanly.

One step: `gradient_accumulation` forward and backward passes, clipping, the optimizer over FP32 master weights. All
state that a step depends on (weights, scales and amax histories, masters, optimizer state, data position, random
numbers) is in the checkpoint, so a resumed run continues with the same bits.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.own_batches import OwnBatches
from te_models.data.streaming import StreamingDataset
from te_models.device.determinism import deterministic
from te_models.errors import NamedFields, OutputInUse, UsageError
from te_models.files.atomic import replace_text
from te_models.files.formats import Fields
from te_models.files.lock import locked
from te_models.saving.run_folder import Checkpoints
from te_models.training.bad_step import BadStep
from te_models.training.callback import Callback
from te_models.training.captures import Captures
from te_models.training.card import keep_card
from te_models.training.evaluation import Batch, evaluate
from te_models.training.facts import facts_at_start
from te_models.training.failed_run import background_saves, save_failed_run
from te_models.training.guard import Drawn, Guard
from te_models.training.metrics import MetricsLog
from te_models.training.parallel import Parallel
from te_models.training.profiling import StepProfiler
from te_models.training.progress import progress as shown_progress
from te_models.training.recipe_schedule import RecipeSchedule
from te_models.training.recording import Recorder, RecordLog
from te_models.training.report import run_console
from te_models.training.result import Result
from te_models.training.routers import over_micro_batches, router_row, weigh_losses
from te_models.training.run_saves import (
    checkpoints_in,
    content_of_model,
    note_evaluation,
    reserve_room,
    wants_save,
    write_checkpoint,
)
from te_models.training.run_start import (
    check_arguments,
    check_folder,
    check_model,
    evaluation_batches,
    open_training_data,
    optimizer_of_run,
    rendered_documents,
)
from te_models.training.run_state import load_checkpoint
from te_models.training.saved import saved_part
from te_models.training.settings import RUN_FILE
from te_models.training.step_passes import StepPasses
from te_models.training.step_start import StepStart, StepStarts
from te_models.training.stop_signals import stop_signals
from te_models.training.timing import (
    QueuedStep,
    Row,
    copy_to_host,
    device_metrics,
    elapsed,
    timestamp,
)

if TYPE_CHECKING:
    from te_models.training.lora_run import SavedAdapters

RECENT = 100  # steps whose median speed is the speed of the run


@dataclass
class Trainer(NamedFields):
    """A training run of `model` on `dataset`; call `run`.

    Args:
        model: the model to train, modified in place; or one that `add_lora` returned, of which the run trains and saves
            the adapters.
        dataset: what `open_data` returns; or batches of your own, this process's share of each micro-batch: a list, a
            DataLoader, a generator (te_models.data.own_batches).
        eval_batches: this process's batches to evaluate on; None: no evaluation.
        config: the run's options. Of batches of your own it does not set the size.
        out: the run's folder, for metrics.jsonl and checkpoints; a str will do.
        documents: other JSON values for each checkpoint, such as the tokenizer's (`Tokenizer.documents`).
        run_file: the content of run.toml, which is written when the run starts; empty: not written.
        on_step: called with the metrics of every finished step, on every process.
        callbacks: called during the run, in this order.
        parallel: how processes share the run.
        about: facts for the model card that the Trainer does not know, such as the names of model and data.
        saved: the part of the model that checkpoints contain, with its loader; None: its adapters, if `add_lora`
            returned it, else all of it.
        recipe: the recipe of the first step, before config.recipe_schedule; None: the model's.

    Raises:
        ValueError: an unknown argument (the message names the nearest), optimizer or option.
    """

    model: CausalLM
    dataset: TokenDataset | StreamingDataset | Iterable[Mapping[str, Tensor]]
    eval_batches: Iterable[Mapping[str, Tensor]] | None
    config: TrainConfig
    out: Path
    documents: Fields = field(default_factory=dict)
    run_file: str = ""
    on_step: Callable[[Row], None] = lambda row: None
    callbacks: Sequence[Callback] = ()
    parallel: Parallel = field(default_factory=Parallel)
    saved: SavedAdapters | None = None
    recipe: Recipe | None = None
    about: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(self.out, self.config, self.callbacks)
        self.out = Path(self.out)
        # A PeftModel is unwrapped here: the run trains the model, and checkpoints hold the adapters.
        self.model, self.saved = saved_part(self.model, self.saved)
        check_model(self.model, self.config)
        self.device = self.model.device
        self.data = open_training_data(self.dataset, self.model, self.config, self.parallel)
        self.evaluation = evaluation_batches(self.eval_batches, self.config.patience)
        # All processes evaluate, or none does, as with data that was opened with eval_split=0.
        self.evaluates = any(self.parallel.ranks.gather(len(self.evaluation)))
        self._prepare_training()
        trace_folder = self.out if self.parallel.ranks.first else None
        self.profiler = StepProfiler(
            self.model, self.config.profile, trace_folder, last=self.config.steps
        )
        self.checkpoints = self.new_checkpoints(self.out / "checkpoints", self.config.keep_last)
        self.best = self.new_checkpoints(self.out / "best" / "checkpoints", keep_last=1)
        self.documents = rendered_documents(self.documents)
        self._begin_state()
        self.facts = facts_at_start(self, self.about)

    def _prepare_training(self) -> None:
        """Divide the model among the processes; make its optimizer, and the passes of a step."""
        config = self.config
        parallel = self.parallel
        # Before parallel.prepare, which may shard the model; the optimizer after it, over the shards.
        weigh_losses(self.model, config)
        parallel.prepare(self.model)
        self.optimizer = optimizer_of_run(self.model, config, parallel)
        self.gradients = self.optimizer.gradients  # an optimizer may project some of them
        self.schedule = RecipeSchedule(self.model, self.recipe or self.model.recipe, config)
        self.recorder: Recorder | None = None
        if config.record:
            self.recorder = Recorder.of_run(self.model, parallel, config, every=config.record)
        self.passes = StepPasses(self.model, self.gradients, parallel, config, self.recorder)
        # Read the loss of a step once the next one is queued: only if the device itself can skip a bad step's update.
        self.ahead = self.device.type == "cuda" and self.optimizer.can_skip

    def _begin_state(self) -> None:
        """Set what changes from step to step to the values before the first one."""
        self.speeds: deque[float] = deque(maxlen=RECENT)  # tokens per second of each step
        self.data_wait = 0.0  # seconds that the last step waited for its data
        self.starts = StepStarts(self.model, self.data)
        self.begun: StepStart | None = None  # of the step that has begun and has changed no weight
        self.drawn: Drawn | None = None  # of the newest step, for the guard
        self.guard = Guard(self)
        self.captures = Captures(self)
        self.updating = False  # whether the optimizer is changing the weights
        self.pending: QueuedStep | None = None  # the newest step, until its metrics are read
        self.saved_step: int | None = None  # of the checkpoint that was written or loaded last
        self.save_due = False  # as of the last step that was read, where save_every is not given
        self.saved_at = time.monotonic()
        self.stop_requested: Callable[[], int] = lambda: 0  # of this process: the signal's number
        self.stopping = False  # of any process, as of the last step that was read
        self.result = Result()

    def run(self, resume: bool = False, progress: bool = False) -> Result:
        """Train to `config.steps`, from the newest checkpoint in `out` if `resume`.

        `progress` shows a bar with loss, speed and time left, and in a log some lines, as the command line does.

        Raises:
            ValueError: with `resume`, there is no checkpoint or it is of another model or optimizer; without, there is
                one, which this run would replace.
            Diverged: loss or gradient norm became NaN or infinite.
            SaveError: checkpoints cannot be written.
            OutputInUse: another run writes to `out`.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(self.data, OwnBatches):
                stack.callback(self.data.pause)
            self.parallel.ranks.from_first(
                lambda: stack.enter_context(locked(self.out)), OutputInUse
            )
            self.parallel.ranks.from_first(lambda: check_folder(self, resume), UsageError)
            result = self._run(resume, progress)
        self.passes.close()  # the process group cannot be destroyed before
        return result

    def _run(self, resume: bool, progress: bool) -> Result:
        # Each share of the data draws its own dropout; ranks that share a model (tensor parallelism) draw the same.
        torch.manual_seed(self.config.seed + self.parallel.part)
        if resume:
            self.restore()
            # Wait for processes that read slowly: the first collective would take them for dead.
            self.parallel.ranks.gather(None)
        first = self.parallel.ranks.first
        if first and self.run_file:
            replace_text(self.out / RUN_FILE, self.run_file)
        metrics = MetricsLog(
            self.out / "metrics.jsonl" if first else None, after_step=self.result.step
        )
        with (
            deterministic(self.config.deterministic),
            contextlib.closing(metrics),
            RecordLog(self.recorder, self.out if first else None, self.result.step) as record,
            background_saves(self.checkpoints, self.best),
            stop_signals() as self.stop_requested,
            shown_progress(
                run_console(quiet=not (progress and first)), self.config, self.result.step
            ) as show,
        ):
            batches = iter(self.data)
            if not self.result.step:
                batches = self._before_first_step(batches)
            if self.device.type == "cuda":
                # The peak that a run reports is of its steps: calibration and the first evaluation come before.
                torch.cuda.reset_peak_memory_stats(self.device)
            self.saved_at = time.monotonic()
            self.guard.begin(metrics, record)
            self.captures.begin()
            try:
                for row in self.steps(batches):
                    # To the disk first: whatever a callback raises, the row is in the file.
                    metrics.write(row)
                    show(row)
                    self._after_step(row)
            except Exception as error:
                save_failed_run(self, error, metrics)
                raise
            ended_early = self.result.step < self.config.steps
            self.result.interrupted = ended_early and not self.result.stopped_early
            self.result.signal = max(0, self.stop_requested())
            self.save()
            keep_card(self)
        return self.result

    def _before_first_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Calibrate and evaluate the model of a new run; return the batches from the first step's on."""
        # A checkpoint of step 0 begins again before the batches and random numbers that calibration draws.
        self.begun = self.starts.take()
        # First scales of delayed scaling: under scales of 1 the first evaluation would saturate or underflow.
        batches = self.passes.calibrated(batches)
        if self.evaluates:
            self.result.first_eval_loss = self._evaluate()
            self.result.eval_loss = self.result.first_eval_loss
        return batches

    def _after_step(self, row: Row) -> None:
        """Call what waits for a step's metrics, and write the checkpoint that is due."""
        self.on_step(row)
        for callback in self.callbacks:
            callback.on_step(self, row)
        if "eval_loss" in row:
            note_evaluation(self, row)
        # A queued step has already changed the weights beyond the step of this row.
        if self.pending is None and self._save_due(row["step"]):
            self.save(blocking=False)

    def stop(self) -> None:
        """End the run with a checkpoint, as Ctrl-C does; from a callback after one more step. Any process may call."""
        self.stop_requested = lambda: -1

    def steps(self, batches: Iterator[Batch]) -> Iterator[Row]:
        """Take steps until the run ends; yield the metrics of each, with the evaluation loss where one is due.

        Reading a step's loss at once would keep the host from queueing the optimizer and the next forward pass, and the
        device would wait for both. With `ahead` it is read when the next backward pass is queued, except before an
        evaluation or a save.
        """
        step = self.result.step
        while self.pending is not None or (step < self.config.steps and not self.stopping):
            try:
                if step == self.config.steps or self.stopping:
                    yield self.finish_pending()
                    continue
                step += 1
                before = self.pending
                with self.profiler.profiling(step):
                    self.pending = self._queue(step, batches, before)
                if before is not None:
                    yield self._finish(before)
                # An evaluation or a save needs the weights of exactly this step, so nothing may be queued behind it.
                due = self._due(self.config.eval_every, step) or self._save_due(step)
                if not self.ahead or step == self.config.steps or due:
                    yield self.finish_pending()
            except BadStep as bad:
                # It skips the step, goes back or raises, as on_nan says, and returns the step to continue from.
                step = self.guard.act(bad, self.drawn)

    def step(self, batches: Iterator[Batch]) -> Row:
        """Take the next optimizer step on micro-batches from `batches`; return its metrics.

        Raises:
            Diverged: its loss or gradient norm is not finite, or a spike, whatever `on_nan` says.
        """
        try:
            step = self.result.step + 1
            with self.profiler.profiling(step):
                queued = self._queue(step, batches, None)
            return self._finish(queued)
        except BadStep as bad:
            raise self.guard.stopped(bad) from None

    def finish_pending(self) -> Row:
        """Return the metrics of the newest step, after which nothing is queued."""
        pending = self.pending
        self.pending = None
        assert pending is not None
        return self._finish(pending)

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _save_due(self, step: int) -> bool:
        """Return whether a checkpoint is to be written after `step`, besides the one at the end of the run."""
        if self.config.save_every is not None:
            return self._due(self.config.save_every, step)
        return self.save_due and step < self.config.steps

    def _queue(self, step: int, batches: Iterator[Batch], before: QueuedStep | None) -> QueuedStep:
        """Queue one optimizer step. Step `before` is checked in between; without `ahead` this step is too."""
        config = self.config
        # Steps follow each other without a gap: the end of one is the start of the next.
        start = timestamp(self.device) if before is None else before.end
        drawn = self._draw(batches)
        self.schedule.follow(step)
        recorder = self.captures.begin_step(step, drawn.micro_batches)
        if recorder is not None:
            recorder.begin(step)
        loss = self._forward_backward(drawn.micro_batches)
        router_losses, shares = over_micro_batches(self.passes.routed, loss)
        bad_values = torch.zeros_like(loss) if recorder is None else recorder.bad_values().to(loss)
        # One collective for the loss, counts, the router losses and the two questions whether to stop and to save.
        local_sums = torch.cat([torch.stack([loss, bad_values]), router_losses])
        sums = self.parallel.sum_and_any(local_sums, self.stop_requested() != 0, wants_save(self))
        loss = sums[0]
        bad_values = sums[1]
        router_losses = sums[2:-2]
        flags = sums[-2:]  # how many processes were asked to stop, and how many want a checkpoint
        norm = self.optimizer.take_gradients(config.clip_grad_norm)
        # One copy to the host, queued here and read in this order (`_check`) when the next step is queued.
        values = [torch.stack([loss, norm.to(loss), bad_values]), flags, router_losses, shares]
        host_values, ready = copy_to_host(torch.cat(values))
        queued = QueuedStep(
            step=step,
            start=start,
            micro_batches=drawn.micro_batches,
            values=host_values,
            ready=ready,
            begun=drawn.begun,
            learning_rate=config.learning_rate_at(step),
            data_wait=self.data_wait,
        )
        if before is not None:
            self._check(before)
        queued.bounds = self.guard.bounds()
        if not self.ahead:
            self._check(queued)
        self.optimizer.set_learning_rate(queued.learning_rate)
        self.checkpoints.wait_for_copy()  # a save in the background may still read what the update overwrites
        if self.ahead:
            counted = None if recorder is None else bad_values
            self.optimizer.skip_if(self.guard.is_bad(loss, norm, queued.bounds, counted))
        self.begun = None
        # An error or a signal between these two lines leaves half-updated weights, which must not be saved.
        self.updating = True
        self.optimizer.step()
        self.updating = False
        if recorder is not None:
            queued.recorded = recorder.end(step)
        queued.end = timestamp(self.device)
        return queued

    def _draw(self, batches: Iterator[Batch]) -> Drawn:
        """Return the micro-batches of the next step: new ones, or the same ones again for a repeated step."""
        begun = self.starts.take()
        if self.guard.requeued:
            again = self.guard.requeued.pop(0)
            begun = replace(begun, data=again.begun.data)
            self.begun = begun
            micro_batches = again.micro_batches
            self.data_wait = 0.0
        else:
            self.begun = begun
            asked = time.monotonic()
            micro_batches = [next(batches) for _ in range(self.config.gradient_accumulation)]
            self.data_wait = time.monotonic() - asked
        self.drawn = Drawn(begun, micro_batches)
        return self.drawn

    def _forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        """Compute the gradients of a step; return this process's part of its loss. A subclass may weigh it."""
        return self.passes.run(micro_batches, use_graph=not self.profiler.active)

    def _check(self, queued: QueuedStep) -> None:
        """Wait for a step's values; raise BadStep if the guard says so. Note whether a process was asked to stop."""
        # Checked already, by the step after it.
        if queued.row:
            return
        if queued.ready is not None:
            queued.ready.synchronize()
        loss, norm, bad_values, stops, saves, *routed = queued.values.tolist()
        self.stopping = self.stopping or bool(stops)
        self.save_due = self.save_due or bool(saves)
        self.guard.judge(queued, loss, norm, bad_values)
        queued.row = {
            "step": queued.step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": queued.learning_rate,
            **router_row(routed),
            **self.schedule.row(queued.step),
        }

    def _finish(self, queued: QueuedStep) -> Row:
        """Return a step's metrics once its values are there; evaluate if that is due."""
        self._check(queued)
        row = queued.row
        step = queued.step
        result = self.result
        seconds = elapsed(queued.start, queued.end)
        own_tokens = sum(batch["input_ids"].numel() for batch in queued.micro_batches)
        # Ranks have equally many tokens, so their own speed times the ranks is the speed of the run.
        self.speeds.append(self.parallel.data_world * own_tokens / seconds)
        result.step = step
        result.loss = row["loss"]
        result.tokens_per_second = statistics.median(self.speeds)
        row["tokens_per_second"] = self.speeds[-1]
        row["data_wait"] = queued.data_wait
        speed = self.speeds[-1] / self.parallel.ranks.world
        row |= device_metrics(self.device, self.model.config, self.config.seq_len, speed)
        result.peak_memory = row.get("peak_memory", result.peak_memory)
        if queued.recorded is not None:
            self.guard.record(queued.recorded)
        due = self._due(self.config.eval_every, step) or step == self.config.steps
        if due and self.evaluates:
            result.eval_loss = self._evaluate()
            row["eval_loss"] = result.eval_loss
        # After the first step the optimizer has its state, so the size of a checkpoint is known.
        if self.config.save_every and len(self.speeds) == 1 and self.parallel.ranks.world == 1:
            reserve_room(self)
        return row

    def _evaluate(self) -> float:
        return evaluate(self.model, self.evaluation, self.parallel.sum)

    def new_checkpoints(self, folder: Path, keep_last: int | None) -> Checkpoints:
        """Return a writer of checkpoints of this run in `folder`, which keeps the newest `keep_last`; None: all."""
        return checkpoints_in(self, folder, keep_last)

    def save(self, blocking: bool = True, interrupted: bool = False) -> None:
        """Write a checkpoint of everything that the next step depends on.

        With `blocking=False` a single process writes it in the background; several processes always save together.
        `interrupted` says that the run ends here, before its last step.
        """
        if interrupted:
            self.result.interrupted = True
        folder = write_checkpoint(self, blocking)
        self.save_due = False
        self.saved_step = self.result.step
        self.saved_at = time.monotonic()
        self.result.checkpoint = str(folder)
        for callback in self.callbacks:
            callback.on_save(self, folder)

    def saved_model(self) -> tuple[dict[str, dict[str, Tensor]], Fields]:
        """Return the part of a checkpoint that is a saved model."""
        return content_of_model(self)

    def restore(self) -> None:
        """Load the newest checkpoint of `out`.

        Raises:
            ValueError: there is none, or it is of another model or optimizer.
        """
        load_checkpoint(self, self.checkpoints.to_resume(), with_data=True)
