"""The guard of a run: what happens after a step whose loss or gradient is not finite, or far above those before it.

Such a step changes no weight: on a CPU it ends before the update, on a GPU the update skips itself. The guard gives the
model the scales from before the step and runs the step once more, to name the tensor that broke it. Then it does what
the setting `on_nan` says: it stops, skips the step's data, moves the layer to BF16 and repeats the step ("demote"), or
goes back to the last checkpoint ("rewind").
"""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local
from te_models.errors import Diverged, UsageError
from te_models.fp8.primary_weights import quantized
from te_models.recorder.layout import INDEX, RecordedTensor
from te_models.training.bad_step import NONFINITE, SPIKE, BadStep
from te_models.training.bad_tensor import OUTPUT, BadTensors, first_of_all
from te_models.training.evaluation import KEPT, Batch, diagnosis
from te_models.training.metrics import MetricsLog, read_metrics
from te_models.training.recording import RecordedStep, Recorder, RecordLog, quantizing_modules
from te_models.training.run_saves import keep_recipe, newest_step, rewind
from te_models.training.spikes import Bounds, SpikeBounds
from te_models.training.step_start import RandomState, StepStart
from te_models.training.timing import QueuedStep, Row

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

MOST_BAD_IN_A_ROW = (
    10  # bad steps without a good one between them, after which a run ends under any policy
)
MOST_REWINDS = 3  # to one checkpoint, under "rewind"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawn:
    """The micro-batches of a step and the state in which it began: what it takes to run the step again."""

    begun: StepStart
    micro_batches: list[Batch]


@dataclass(frozen=True)
class SecondRun:
    """The result of running a bad step once more.

    Attributes:
        tensor: the tensor that broke the step; None: none was found.
        reproduced: whether the step was bad again; if not, the hardware may be at fault.
    """

    tensor: RecordedTensor | None
    reproduced: bool


class Guard:
    """Judges the steps of a run, and acts on bad ones.

    Attributes:
        policy: the setting `on_nan`: "stop", "skip", "demote" or "rewind".
        metrics, record_log: where it writes what it did, while the run lasts.
        requeued: micro-batches that were drawn before and that the next steps take, oldest first.
        bad_in_a_row: bad steps since the last good one.
        rewinds: under "rewind", step of a checkpoint -> how often the run went back to it.
        first_rms: `weight_rms` when the run began or was resumed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        config = trainer.config
        self.policy = config.on_nan
        self.spikes = SpikeBounds(config.spike_deviations, config.spike_window)
        self.metrics: MetricsLog | None = None
        self.record_log: RecordLog | None = None
        self.requeued: list[Drawn] = []
        self.bad_in_a_row = 0
        self.rewinds: dict[int, int] = {}
        self.first_rms: float | None = None

    def begin(self, metrics: MetricsLog, record: RecordLog) -> None:
        """Prepare for a run: one that is resumed knows the steps before it from its metrics."""
        trainer = self.trainer
        self.metrics = metrics
        self.record_log = record
        self.first_rms = weight_rms(trainer.model, trainer.parallel.ranks)
        if self.spikes.deviations:
            self.spikes.replace(trainer.parallel.ranks.from_first(self._recent))
        # The first bad step may come before the first checkpoint, and needs a state to go back to.
        if self.policy == "rewind" and trainer.checkpoints.latest() is None:
            trainer.save()

    def _recent(self) -> list[list[float]]:
        """Return loss and gradient norm of the last steps in metrics.jsonl, on the process that has it."""
        path = None if self.metrics is None else self.metrics.path
        if path is None or not self.trainer.result.step:
            return []
        rows = read_metrics(path)[-self.trainer.config.spike_window :]
        return [[row["loss"], row["grad_norm"]] for row in rows if "grad_norm" in row]

    def use_recorder(self, recorder: Recorder) -> None:
        """Open the record of a run that began without one."""
        if self.record_log is not None:
            self.record_log.use(recorder)

    def record(self, recorded: RecordedStep) -> None:
        """Write the entry of a recorded step."""
        if self.record_log is not None:
            self.record_log.write(recorded)

    def bounds(self) -> Bounds:
        """Return the bounds of the next step's loss and gradient norm."""
        return self.spikes.bounds()

    @staticmethod
    def is_bad(
        loss: Tensor, grad_norm: Tensor, bounds: Bounds, bad_values: Tensor | None = None
    ) -> Tensor:
        """Return whether a step must not update the weights, a bool scalar on the device.

        `bad_values` is how many values of a recorded step's tensors are not finite; None: it is not recorded.
        """
        # The sum is finite where both are: one kernel in place of two.
        bad = ~(loss + grad_norm).isfinite()
        if bad_values is not None:
            bad = bad | (bad_values > 0)
        if math.isfinite(bounds.loss):
            bad = bad | (loss > bounds.loss) | (grad_norm > bounds.grad_norm)
        return bad

    def judge(
        self, queued: QueuedStep, loss: float, grad_norm: float, bad_values: float = 0
    ) -> None:
        """Let a good step count; raise BadStep for a bad one. `bad_values` as in `is_bad`."""
        bounds = queued.bounds
        if bad_values > 0 or not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise BadStep(queued, NONFINITE, loss, grad_norm, bad_values)
        if loss > bounds.loss or grad_norm > bounds.grad_norm:
            raise BadStep(queued, SPIKE, loss, grad_norm)
        self.spikes.add(loss, grad_norm)
        self.bad_in_a_row = 0

    def act(self, bad: BadStep, drawn: Drawn | None) -> int:
        """Do what the policy says about a bad step; return the number of the step after which the run goes on.

        All processes call this.

        Args:
            bad: the step.
            drawn: the step that was drawn last: the bad one, or on a GPU the next one.

        Raises:
            Diverged: the run ends.
        """
        trainer = self.trainer
        begun = bad.queued.begun
        # The second run draws random numbers too; a run that skips the step goes on with those that it has now.
        random = RandomState.now(trainer.device)
        # On a GPU the loss is read a step late: by then the next step has drawn its data, and begun.
        later = None if drawn is None or drawn.begun is begun else drawn
        trainer.pending = None
        trainer.begun = begun
        # Before the second run, which stops the recorder.
        entry = self._keep_entry(bad, next_step_has_begun=later is not None)
        if self.policy == "stop":
            # A replay needs the batch. It is written first, since the second run may fail.
            trainer.captures.save_batch(bad.step, bad.queued.micro_batches)
            raise self.stopped(bad) from None
        self._restore_start(begun)
        trainer.captures.save_bad_step(bad.step, bad.queued.micro_batches, entry)
        second_run = self._run_again(bad)
        self._restore_start(begun)
        # Counted under any policy: a model whose every step is bad would skip all its data, or rewind for ever.
        self.bad_in_a_row += 1
        if self.bad_in_a_row > MOST_BAD_IN_A_ROW:
            self._give_up(bad, second_run, f"{MOST_BAD_IN_A_ROW} other bad steps in a row")
        if self.policy == "demote":
            self._demote(bad, second_run)
            # The same step again, with the random numbers that it began with; then the one that was drawn after it.
            self.requeued = [Drawn(begun, bad.queued.micro_batches)]
            if later is not None:
                self.requeued.append(later)
            begun.random.restore(trainer.device)
            return bad.step - 1
        self.requeued = [] if later is None else [later]
        if self.policy == "rewind":
            return self._rewind(bad, second_run, later)
        return self._skip(bad, second_run, later, random)

    def _skip(
        self, bad: BadStep, second_run: SecondRun, later: Drawn | None, random: RandomState
    ) -> int:
        """Go on behind a bad step, as if `later` had been drawn in its place; return the bad step's number.

        `random` is the state of the random numbers with which a run goes on that has drawn nothing since.
        """
        trainer = self.trainer
        self._report(bad, "skip", second_run, "its data is skipped")
        trainer.begun = None
        if later is not None:
            # It drew its data already: its random numbers start where they did the first time.
            random = later.begun.random
            trainer.begun = later.begun
        random.restore(trainer.device)
        trainer.result.step = bad.step
        return bad.step

    def stopped(self, bad: BadStep) -> Diverged:
        """Return the error of a run that a bad step ends, which names what broke it; the event is written."""
        trainer = self.trainer
        begun = bad.queued.begun
        # The diagnosis runs the step again, and must find weights and FP8 state as they were before it.
        trainer.starts.put_back(begun)
        advice = ""
        if bad.event == SPIKE:
            cause = self._spike(bad)
        elif math.isfinite(bad.loss) and math.isfinite(bad.grad_norm):
            cause = f"step {bad.step}: {bad.reason}"
        else:
            cause, advice = diagnosis(
                trainer.model,
                trainer.parallel.ranks,
                bad.step,
                bad.loss,
                bad.grad_norm,
                bad.queued.micro_batches,
            )
        second_run = self._run_again(bad)
        self._restore_start(begun)
        self._report(bad, "stop", second_run, "the run ends")
        place = self._place(bad, second_run.tensor)
        return Diverged(f"{cause}{place}. {KEPT}{advice}")

    def _keep_entry(self, bad: BadStep, next_step_has_begun: bool) -> RecordedStep | None:
        """Write the recorder's entry of a bad step, and return it; None if the step was not recorded."""
        recorder = self.trainer.recorder
        entry = bad.queued.recorded
        # Without an entry the recorder may still be recording: this step, unless the next one has begun.
        still_recording = recorder is not None and recorder.recording and not next_step_has_begun
        if recorder is not None and still_recording and entry is None:
            entry = recorder.end(bad.step)
        # "rewind" takes the step again, and records it then.
        if entry is not None and self.policy != "rewind":
            self.record(entry)
        return entry

    def _restore_start(self, begun: StepStart) -> None:
        """Give the model the scales from before a step, and drop its gradients."""
        trainer = self.trainer
        trainer.starts.put_back(begun)
        for parameter in trainer.model.parameters():
            trainer.gradients.drop(parameter)
            parameter.grad = None

    def _run_again(self, bad: BadStep) -> SecondRun:
        """Run a bad step once more, without an update, to find the tensor that broke it."""
        trainer = self.trainer
        queued = bad.queued
        queued.begun.random.restore(trainer.device)
        if trainer.recorder is not None:
            # This second run is no step of the run, which is all that the record holds.
            trainer.recorder.stop()
        if bad.event == SPIKE:
            return SecondRun(tensor=self._least_exact(queued), reproduced=True)
        watched = BadTensors(trainer.model)
        with watched.watching():
            # Not as a captured CUDA graph: it calls no hooks.
            loss = trainer.passes.run(queued.micro_batches, eager=True)
        # The gradients are taken as in a step, since the norm may be what is not finite.
        norm = trainer.optimizer.take_gradients(trainer.config.clip_grad_norm)
        # A second run of the same numbers that is finite tells a fault of the hardware from one of the model.
        bad_here = watched.first is not None or not bool((loss + norm).isfinite())
        ranks = trainer.parallel.ranks
        tensor = first_of_all(watched, ranks)
        return SecondRun(tensor, reproduced=any(ranks.gather(bad_here)))

    def _least_exact(self, queued: QueuedStep) -> RecordedTensor | None:
        """Return the tensor of a spike that a cast changed most: by saturation, else by its noise over its signal."""
        trainer = self.trainer
        # A recorder of its own: the run's, if there is one, may be in the middle of a step.
        recorder = Recorder(trainer.model, trainer.parallel, every=0)
        recorder.begin()
        trainer.passes.run(queued.micro_batches, eager=True)
        entry = recorder.end(queued.step)
        entry.wait()
        recorder.detach()
        values = entry.values
        elements = values[:, INDEX["elements"]]
        if not bool((elements > 0).any()):
            return None
        saturated = values[:, INDEX["saturated"]] / elements.clamp(min=1)
        if bool((saturated > 0).any()):
            return recorder.tensors[int(saturated.argmax())]
        noise = values[:, INDEX["noise"]] / values[:, INDEX["signal"]].clamp(min=1e-300)
        return recorder.tensors[int(noise.argmax())]

    def _demote(self, bad: BadStep, second_run: SecondRun) -> None:
        """Move the layer of the tensor that broke a step to BF16 for the rest of the run.

        Raises:
            Diverged: that cannot help.
        """
        trainer = self.trainer
        model = trainer.model
        if second_run.tensor is None:
            reason = "no tensor of a te.Linear was found that broke it"
            self._cannot_demote(bad, second_run, reason)
        pattern = demoted_pattern(second_run.tensor)
        if not is_quantized_layer(trainer, pattern):
            self._cannot_demote(bad, second_run, f"{pattern} runs in BF16 already")
        try:
            # In the schedule, so that a change of recipe later does not undo it.
            trainer.schedule.demote(pattern, bad.step)
        except (UsageError, ValueError) as error:
            self._cannot_demote(bad, second_run, f"{pattern} cannot run in BF16: {error}")
        outcome = f"{pattern} runs in BF16 from here on, and the step is repeated"
        if not model.recipe.quantized:
            outcome += "; nothing of the model is left in FP8"
        self._report(bad, "demote", second_run, outcome, demoted=pattern)
        keep_recipe(trainer)
        assert model.recipe.precision[pattern] == "bf16"

    def _cannot_demote(self, bad: BadStep, second_run: SecondRun, reason: str) -> NoReturn:
        """End the run because no layer can be moved to BF16."""
        self._report(bad, "stop", second_run, reason)
        line = self._line(bad, second_run.tensor)
        raise Diverged(f"{line}; on_nan='demote' cannot help: {reason}") from None

    def _rewind(self, bad: BadStep, second_run: SecondRun, later: Drawn | None) -> int:
        """Restore the last checkpoint without its place in the data; return its step."""
        trainer = self.trainer
        trainer.begun = None if later is None else later.begun
        target = newest_step(trainer)
        # The data goes on, so each return tries other batches; if those fail too, the state itself is at fault.
        rewinds = self.rewinds.get(target, 0)
        if rewinds == MOST_REWINDS:
            self._give_up(bad, second_run, f"{MOST_REWINDS} returns to step {target}")
        self.rewinds[target] = rewinds + 1
        step = rewind(trainer)
        if self.metrics is not None:
            # Those steps are taken again, and a plot would show them twice.
            self.metrics.drop_after(step)
        if self.record_log is not None:
            self.record_log.drop_after(step)
        outcome = f"the run goes back to step {step} and on with the data that follows"
        self._report(bad, "rewind", second_run, outcome, to=step)
        return step

    def _give_up(self, bad: BadStep, second_run: SecondRun, reason: str) -> NoReturn:
        """End the run, whose policy does not help."""
        self.trainer.begun = bad.queued.begun
        self._report(bad, "stop", second_run, f"the run ends after {reason}")
        line = self._line(bad, second_run.tensor)
        raise Diverged(f"{line}; the run ends after {reason}")

    def _report(
        self, bad: BadStep, action: str, second_run: SecondRun, outcome: str, **more: object
    ) -> None:
        """Write the event to metrics.jsonl, with `more` keys, and a line to the log."""
        tensor = second_run.tensor
        line = f"{self._line(bad, tensor)}: {outcome}"
        if not second_run.reproduced:
            line += "; a second run of the step was finite, as after a fault of the hardware"
        rms = weight_rms(self.trainer.model, self.trainer.parallel.ranks)
        # All keys in each row, so that a reader of the file needs no case for events without a tensor.
        row: Row = {
            "step": bad.step,
            "event": bad.event,
            "action": action,
            "loss": finite_or_none(bad.loss),
            "grad_norm": finite_or_none(bad.grad_norm),
            "bound": bad.bound,
            "weight_rms": rms,
            "weight_growth": rms / self.first_rms if rms and self.first_rms else None,
            "tensor": None,
            "linear": None,
            "layer": None,
            "operand": None,
            "expert": None,
        }
        if tensor is not None:
            entry = tensor.to_dict()
            row["tensor"] = entry.pop("name")
            row |= entry
        row |= {"reproduced": second_run.reproduced, **more, "message": line}
        if self.metrics is not None:
            self.metrics.write(row)
        if self.trainer.parallel.ranks.first:
            log.warning("%s", line)

    def _line(self, bad: BadStep, tensor: RecordedTensor | None) -> str:
        """Describe a bad step, and the tensor that broke it."""
        place = self._place(bad, tensor)
        if bad.event == SPIKE:
            return f"{self._spike(bad)}{place}"
        return f"step {bad.step}: {bad.reason}{place}"

    @staticmethod
    def _place(bad: BadStep, tensor: RecordedTensor | None) -> str:
        """Return the words that name the tensor that broke a step; none if there is none."""
        if tensor is None:
            return ""
        if bad.event == SPIKE:
            return f"; the least exact tensor is {tensor.name}"
        if tensor.operand == OUTPUT:
            return f"; the first bad tensor is the product of {tensor.linear}"
        return f"; the first bad tensor is {tensor.name}"

    def _spike(self, bad: BadStep) -> str:
        """Describe a spike: the value that is too large, and its bound."""
        bounds = bad.queued.bounds
        by_loss = bad.loss > bounds.loss
        value = "loss" if by_loss else "gradient norm"
        number = bad.loss if by_loss else bad.grad_norm
        return (
            f"step {bad.step}: the {value} of {number:.4g} is above {bad.bound:.4g}, "
            f"{self.spikes.deviations:g} deviations over the median of the steps before"
        )


def demoted_pattern(tensor: RecordedTensor) -> str:
    """Return the pattern for a recipe's table `precision` that names the block of a tensor.

    Outside the blocks it names the te.Linear alone.
    """
    return tensor.linear if tensor.layer is None else f"layers.{tensor.layer}.*"


def is_quantized_layer(trainer: Trainer, pattern: str) -> bool:
    """Return whether any te.Linear that a pattern names runs below BF16."""
    model = trainer.model
    prefix = pattern.removesuffix("*")
    for name, module in model.named_modules():
        named = isinstance(module, model.te.LINEARS) and name.startswith(prefix)
        if named and model.precision.recipe_of(name) is not None:
            return True
    return False


def weight_rms(model: CausalLM, ranks: Ranks) -> float | None:
    """Return the median, over the trained weights of all te.Linears, of a weight's root mean square; None without any.

    All ranks call it; where they have parts of a weight, each part counts as a weight.
    """
    own_rms = []
    for _, module in quantizing_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if not name.startswith("weight") or not parameter.requires_grad:
                continue
            fp8 = quantized(parameter)
            values = (
                local(parameter.detach()) if fp8 is None else fp8.dequantize(dtype=torch.float32)
            )
            if values.numel():
                # The norm sums in FP32, without a copy of the weight in FP32.
                norm = torch.linalg.vector_norm(values, dtype=torch.float32)
                own_rms.append(norm / math.sqrt(values.numel()))
    own_values = torch.stack(own_rms).tolist() if own_rms else []
    finite = []
    for rank_values in ranks.gather(own_values):
        finite += [rms for rms in rank_values if math.isfinite(rms)]
    return statistics.median(finite) if finite else None


def finite_or_none(value: float) -> float | None:
    """Return a number, or None in place of NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
