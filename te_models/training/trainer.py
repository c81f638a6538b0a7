"""The training loop: fine-tune a model on a dataset, evaluate, checkpoint, resume exactly, stop cleanly.

One step: `gradient_accumulation` forwards and backwards, clipping, the optimizer over FP32 masters, the schedule. All state that
a step depends on (weights, scales and amax histories, masters, moments, data position, random numbers) is in the
checkpoint, so a resumed run continues with the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.checkpoint.flatten import flatten_state
from te_models.checkpoint.pretrained import load_training_state, model_content
from te_models.checkpoint.run_folder import Checkpoints
from te_models.checkpoint.sharded import ShardedCheckpoints, cut_optimizer_state, shared_amaxes
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.errors import Diverged, SaveError
from te_models.files.formats import render_json
from te_models.optim import build_optimizer
from te_models.optim.master import MasterWeights
from te_models.training.cuda_graph import GraphedStep, obstacle
from te_models.training.metrics import MetricsLog
from te_models.training.parallel import Parallel, reshard

Batch = dict[str, Tensor]
Mark = torch.cuda.Event | float  # a moment: on a CUDA device when it gets there, elsewhere now

log = logging.getLogger(__name__)


@dataclass
class Result:
    """What a run ended with. Losses are mean cross-entropies in nats a token, memory in bytes (None on a CPU)."""

    step: int = 0
    first_eval_loss: float = math.nan
    eval_loss: float = math.nan
    loss: float = math.nan
    tokens_per_second: float = math.nan
    peak_memory: int | None = None
    interrupted: bool = False
    checkpoint: str | None = None


@dataclass
class Launched:
    """A step that is queued: `values` [3] on the host, from `ready` on, are loss, gradient norm, and who is to stop."""

    step: int
    start: Mark
    micro_batches: list[Batch]
    values: Tensor
    ready: torch.cuda.Event | None
    end: Mark = 0.0  # once the optimizer's update is queued
    row: dict[str, Any] = field(default_factory=dict)  # of metrics.jsonl, once the values have been read


@dataclass
class Trainer:
    """One training run of `model` on `dataset`; `out` is its folder. `on_step` is told of every finished step."""

    model: CausalLM
    dataset: TokenDataset | StreamingDataset
    eval_batches: list[Batch]
    config: TrainConfig
    out: Path
    documents: dict[str, Any] = field(default_factory=dict)  # further JSON for each checkpoint, such as the tokenizer
    on_step: Callable[[dict[str, Any]], None] = lambda row: None
    parallel: Parallel = field(default_factory=Parallel)  # how processes share the run; by default there is one

    def __post_init__(self) -> None:
        config = self.config
        self.optimizer = build_optimizer(
            config.optimizer,
            self.model,
            config.learning_rate,
            config.weight_decay,
            config.optimizer_options,
            config.optimizer_offload,
            self.parallel.owners(),
        )
        if self.parallel.sharded:
            self.optimizer.gradient_norm = self.parallel.gradient_norm  # type: ignore[union-attr]
        self.train_model = self.parallel.wrap(self.model)
        self.graphed = self._graphed()
        # Only where a step that went wrong can still be undone once the optimizer's kernels are queued.
        self.ahead = self.model.device.type == "cuda" and self.optimizer.can_skip
        self.seconds: deque[float] = deque(maxlen=100)  # that the newest steps took
        kind = ShardedCheckpoints if self.parallel.ranks.world > 1 else Checkpoints
        self.checkpoints = kind(self.out / "checkpoints", keep_last=self.config.keep_last)
        if isinstance(self.checkpoints, ShardedCheckpoints):
            self.checkpoints.ranks, self.checkpoints.model = self.parallel.ranks, self.model
            self.checkpoints.names = self._optimizer_names()
            self.checkpoints.fetch = getattr(self.optimizer, "fetch", None)
        # A tokenizer takes a second to render, which no step has to wait for.
        self.documents = {name: render_json(document, name) for name, document in self.documents.items()}
        self.stopped: Callable[[], bool] = lambda: False  # whether this process was asked to stop
        self.stopping = False  # whether any was, as all of them learnt in the last step
        self.result = Result()

    def run(self, resume: bool = False) -> Result:
        """Train to `config.steps`, from the newest checkpoint in `out` if `resume`; returns what it ended with."""
        torch.manual_seed(self.config.seed + self.parallel.data_rank)
        if resume:
            self.restore()
        first = self.parallel.ranks.first
        if first:
            self.out.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(self.out / "metrics.jsonl" if first else None, after_step=self.result.step)
        batches = iter(self.dataset)
        exact = deterministic() if self.config.deterministic else contextlib.nullcontext()
        with exact, contextlib.closing(log), self._background_saves(), _stop_signals() as self.stopped:
            if not self.result.step:
                self.result.first_eval_loss = self.result.eval_loss = self._evaluate()
            self._reset_peak_memory()
            for row in self._rows(batches):
                log.write(row)
                self.on_step(row)
                if self.config.save_every and self.result.step % self.config.save_every == 0:
                    self.save(blocking=False)
            self.result.interrupted = self.result.step < self.config.steps
            self.save()
        return self.result

    @contextlib.contextmanager
    def _background_saves(self) -> Iterator[None]:
        """No save is under way when the run ends, however it does; a save that failed ends a run that went well."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(SaveError):  # logged when it happened
                self.checkpoints.wait()
            raise
        self.checkpoints.wait()

    def _rows(self, batches: Iterator[Batch]) -> Iterator[dict[str, Any]]:
        """Take steps until the run ends; the row of metrics.jsonl of each, evaluated when that is due.

        Read at once, a step's loss would keep the host from queueing the optimizer and the next forward, and the device would
        wait for both. `ahead`, it is read when the next backward is queued, but at once before an evaluation or a save.
        """
        step, launched = self.result.step, None
        while step < self.config.steps and not self.stopping:
            step += 1
            before, launched = launched, self._launch(step, batches, launched)
            if before is not None:
                yield self._row(before)
            if not self.ahead or self._pauses(step):
                yield self._row(launched)
                launched = None
        if launched is not None:
            yield self._row(launched)

    def _step(self, batches: Iterator[Batch]) -> dict[str, Any]:
        """One step and its row."""
        return self._row(self._launch(self.result.step + 1, batches, None))

    def _pauses(self, step: int) -> bool:
        """Whether something other than the next step comes after this one."""
        every = (self.config.eval_every, self.config.save_every)
        return step == self.config.steps or any(number and step % number == 0 for number in every)

    def _launch(self, step: int, batches: Iterator[Batch], before: Launched | None) -> Launched:
        """Queue one optimizer step. In between the step `before` is checked; without `ahead` this one is as well."""
        config, start = self.config, mark(self.model.device) if before is None else before.end
        self.model.train()
        total = torch.zeros((), device=self.model.device)
        micro_batches = [next(batches) for _ in range(config.gradient_accumulation)]
        weights = self.parallel.weights([_counted(batch) for batch in micro_batches], self.model.device)
        cache = config.cache_fp8_weights and config.gradient_accumulation > 1 and self.parallel.keeps_weights
        for number, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
            inputs = _to(batch, self.model.device)
            if self.graphed is not None:
                total += self.graphed(weight=weight, **inputs)
                continue
            options = dict(is_first_microbatch=number == 0 if cache else None, return_logits=False)
            with self.parallel.micro_batch(self.train_model, last=number == len(micro_batches) - 1):
                loss = self.train_model(**inputs, **options).loss
                loss = loss * weight / config.gradient_accumulation
                loss.backward()
            total += loss.detach()
        total, stops = self.parallel.mean_and_any(total, self.stopped())
        norm = self.optimizer.take_gradients(config.clip_grad_norm)
        launched = Launched(step, start, micro_batches, *_to_host(torch.stack([total, norm.to(total), stops])))
        if before is not None:
            self._check(before)
        if not self.ahead:
            self._check(launched)
        self.optimizer.set_learning_rate(config.learning_rate_at(step))
        self.checkpoints.copied()
        if self.ahead:
            self.optimizer.skip_if(~(total + norm).isfinite())  # type: ignore[union-attr]
        self.optimizer.step()
        launched.end = mark(self.model.device)
        return launched

    def _check(self, launched: Launched) -> None:
        """Wait for a step's values; raise if they are not finite, and note whether a process was asked to stop."""
        if launched.row:
            return
        if launched.ready is not None:
            launched.ready.synchronize()
        loss, norm, stops = launched.values.tolist()
        self.stopping = self.stopping or bool(stops)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(self._diagnosis(launched.step, loss, norm, launched.micro_batches))
        rate = self.config.learning_rate_at(launched.step)
        launched.row = dict(step=launched.step, loss=loss, grad_norm=norm, learning_rate=rate)

    def _row(self, launched: Launched) -> dict[str, Any]:
        """A step's row, once its values are there, and with the evaluation if one is due."""
        self._check(launched)
        row, step = launched.row, launched.step
        self.result.step, self.result.loss = step, row["loss"]
        row["tokens_per_second"] = self._speed(elapsed(launched.start, launched.end))
        if (self.config.eval_every and step % self.config.eval_every == 0) or step == self.config.steps:
            row["eval_loss"] = self.result.eval_loss = self._evaluate()
        if self.config.save_every and len(self.seconds) == 1 and self.parallel.ranks.world == 1:
            self.checkpoints.reserve(*self._content())
        return row

    def _graphed(self) -> GraphedStep | None:
        """The step as a CUDA graph, if the run wants one and can have it."""
        if not self.config.cuda_graph:
            return None
        reason = obstacle(self.train_model)
        if self.config.gradient_accumulation > 1:
            reason = "gradients are accumulated"
        if reason:
            log.info("no CUDA graph of the step: %s", reason)
            return None
        return GraphedStep(self.model)

    def _evaluate(self) -> float:
        return evaluate(self.model, self.eval_batches, self.parallel.sum)

    def save(self, blocking: bool = True) -> None:
        """Write a checkpoint of everything the next step depends on; not blocking: in the background, once it is copied.

        Several processes save together, and wait for each other.
        """
        later = not blocking and self.parallel.ranks.world == 1
        options = dict(blocking=False, copy_later=True) if later else {}
        self.result.checkpoint = str(self.checkpoints.save(self.result.step, *self._content(), **options))

    def _content(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """The tensors and documents of a checkpoint."""
        reshard(self.model)
        shared_amaxes(self.model, self.parallel.ranks.world)
        tensors, documents = model_content(self.model, self.optimizer.masters_by_id(), parts=self.parallel.sharded)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "dataset": self.dataset.state_dict(),
            "rng": self._random_states(torch.get_rng_state()),
            "cuda_rng": self._random_states(torch.cuda.get_rng_state(self.model.device))
            if self.model.device.type == "cuda"
            else None,
            "result": asdict(self.result),
        }
        tensors["training"], documents["training"] = flatten_state(state)
        return tensors, {**documents, **self.documents}

    def restore(self) -> None:
        """Take over the newest checkpoint of `out`; a ValueError if there is none or it is not of this run."""
        newest = self.checkpoints.latest()
        if newest is None:
            raise ValueError(f"nothing to resume: {self.out} has no checkpoint; start without --resume")
        state = load_training_state(self.model, newest)
        saved = state["optimizer"]
        if self.parallel.sharded and self.parallel.owners() is None:
            assert isinstance(self.optimizer, MasterWeights)
            saved = cut_optimizer_state(saved, self.optimizer.masters, self.model, self._optimizer_names())
        self.optimizer.load_state_dict(saved)
        self.dataset.load_state_dict(state["dataset"])
        torch.set_rng_state(self._own(state["rng"]))
        if state["cuda_rng"] is not None and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(self._own(state["cuda_rng"]), self.model.device)
        self.result = Result(**state["result"])

    def _optimizer_names(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for parameter in self.optimizer.parameters]

    def _random_states(self, own: Tensor) -> Tensor:
        """The random states of all ranks, a row each; of a process alone its own, not in a row."""
        if self.parallel.ranks.world == 1:
            return own
        return torch.tensor(self.parallel.ranks.gather(own.tolist()), dtype=torch.uint8)

    def _own(self, states: Tensor) -> Tensor:
        """This rank's random state among those saved, which may be of another number of ranks."""
        return states if states.dim() == 1 else states[self.parallel.ranks.rank % len(states)].clone()

    def _speed(self, seconds: float) -> float:
        """Tokens per second of a step; the run's result is the median of the newest steps."""
        self.seconds.append(seconds)
        self.result.tokens_per_second = self.config.tokens_per_step / statistics.median(self.seconds)
        if self.model.device.type == "cuda":
            self.result.peak_memory = torch.cuda.max_memory_allocated(self.model.device)
        return self.config.tokens_per_step / seconds

    def _reset_peak_memory(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)

    def _diagnosis(self, step: int, loss: float, norm: float, micro_batches: list[Batch]) -> str:
        """One line: the step, and the first layer whose output is not finite."""
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        own = [first_bad_module(self.model, batch) for batch in micro_batches]  # all, as every rank must take part
        where = next(filter(None, sum(self.parallel.ranks.gather(own), [])), None)
        place = f"the first layer with such values is {where}" if where else "every forward value is finite"
        return (
            f"step {step}: the {what} is {loss if what == 'loss' else norm}; {place}. The weights "
            "are those of the step before: try a lower --learning-rate, --recipe current, or more BF16 layers"
        )


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Inside, the same inputs give the same bits on the same GPU, at the cost of cuDNN's attention, which does not."""
    fills: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses cuBLAS
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = False  # an aid for debugging
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]


@torch.no_grad()
def evaluate(
    model: CausalLM, batches: list[Batch], reduce: Callable[[Tensor], Tensor] = lambda totals: totals
) -> float:
    """Mean cross-entropy, nats a counted token, over `batches`; leaves the training state as it was.

    `reduce` sums over the processes that evaluate other batches, as many each.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)  # loss, tokens
    for batch in batches:
        counted = _counted(batch)
        loss = model(**_to(batch, model.device), return_logits=False).loss.double() * counted
        totals += torch.stack([loss, torch.full_like(loss, counted)])
    model.train(was_training)
    total, count = reduce(totals).tolist()
    return total / count if count else math.nan


@torch.no_grad()
def first_bad_module(model: CausalLM, batch: Batch) -> str | None:
    """The name of the first module, in order of execution, whose output or weight is NaN or infinite; None if none."""
    found: list[str] = []

    def check(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            values = [output, *module.parameters(recurse=False)]
            if not found and not all(bool(v.isfinite().all()) for v in values if isinstance(v, Tensor)):
                found.append(name)

        return hook

    hooks = [m.register_forward_hook(check(name)) for name, m in model.named_modules() if not list(m.children())]
    was_training = model.training
    try:
        model.eval()(**_to(batch, model.device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _counted(batch: Batch) -> int:
    """The tokens of a batch whose loss counts."""
    return int((batch["labels"][:, 1:] != -100).sum())


def _to(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; through pinned memory, since a copy from any other waits for all that is queued."""
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def mark(device: torch.device) -> Mark:
    """The moment at which `device` has done all that is queued."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed(start: Mark, end: Mark) -> float:
    """Seconds between two moments of one device; waits for the second."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event from which on it is there; None: it is."""
    if not values.is_cuda:
        return values, None
    host, ready = torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(values, non_blocking=True)
    ready.record()
    return host, ready


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C and SIGTERM ask the run to stop after its step; a second one stops it at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, ask)
    except ValueError:  # not in the main thread: the caller's own handling stays
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
