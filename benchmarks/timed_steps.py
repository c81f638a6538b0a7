"""Whole training steps on random tokens: how studies of speed build a run and time its steps."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.whole_step import RandomTokens
from te_models import CausalLM, ModelConfig
from te_models.config.training import TrainConfig
from te_models.training.timing import Row, Timestamp, elapsed, timestamp
from te_models.training.trainer import Trainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A model that any machine trains in a second: a test of a study, not a measurement.
TINY: dict[str, Any] = dict(
    vocab_size=288,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=1,
    num_key_value_heads=1,
    max_position_embeddings=64,
)


@dataclass
class Run:
    """A run whose steps are to be timed.

    Attributes:
        trainer: the run.
        steps: runs a step with each `next`, and returns its metrics.
        start_bytes: memory of the GPU that was taken before the run was built.
        optimizer_spans: per step, when the norm of the gradients began and ended, and when the update did.
    """

    trainer: Trainer
    steps: Iterator[Row]
    start_bytes: int
    optimizer_spans: list[tuple[Timestamp, Timestamp, Timestamp, Timestamp]] = field(
        default_factory=list
    )

    def optimizer_ms(self) -> list[float]:
        """Return the milliseconds of the optimizer in each step so far."""
        return [
            1e3 * (elapsed(norm, clipped) + elapsed(update, end))
            for norm, clipped, update, end in self.optimizer_spans
        ]

    def close(self) -> None:
        """Free the run's memory."""
        self.trainer.passes.close()
        self.trainer.model.te.FP8GlobalStateManager.reset()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free_memory() -> int:
    """Collect garbage, and return the bytes that are in use on the GPU after it."""
    gc.collect()
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def build_run(config: ModelConfig, model_options: dict[str, Any], training: dict[str, Any]) -> Run:
    """Return a run of a new model on random tokens; it notes the time of its optimizer in each step."""
    start_bytes = free_memory()
    torch.manual_seed(0)
    model = CausalLM(config, device=DEVICE, **model_options)
    chosen = TrainConfig(steps=100_000, eval_every=0, **training)
    data = RandomTokens(config.vocab_size, chosen.batch_size, chosen.seq_len)
    trainer = Trainer(model, data, None, chosen, Path("unused"))
    run = Run(trainer, trainer.steps(trainer.passes.calibrated(iter(data))), start_bytes)
    _note_times(run)
    return run


def _note_times(run: Run) -> None:
    """Let the run's optimizer note how long its two parts take in each step."""
    optimizer: Any = run.trainer.optimizer
    take_gradients = optimizer.take_gradients
    step = optimizer.step
    spans: list[tuple[Timestamp, Timestamp]] = []

    def timed_take(max_norm: float) -> torch.Tensor:
        start = timestamp(DEVICE)
        norm = take_gradients(max_norm)
        spans.append((start, timestamp(DEVICE)))
        return norm

    def timed_step() -> None:
        start = timestamp(DEVICE)
        step()
        run.optimizer_spans.append((*spans.pop(), start, timestamp(DEVICE)))

    optimizer.take_gradients = timed_take
    optimizer.step = timed_step


def time_steps(run: Run, warm_up: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the seconds of a step in each of `rounds` rounds of `steps` steps, after `warm_up` others.

    With them: their median as tokens per second, the peak, the last loss, whether the step ran as a CUDA graph, and the
    optimizer's milliseconds in all steps, warm-up included.
    """
    config = run.trainer.config
    row: Row = {}
    for _ in range(warm_up):
        row = next(run.steps)
    seconds = []
    for _ in range(rounds):
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            row = next(run.steps)
        synchronize()
        seconds.append((time.perf_counter() - begun) / steps)
    graph = run.trainer.passes.graph
    found = {
        "seconds": seconds,
        "tokens_per_second": config.tokens_per_step / statistics.median(seconds),
        "loss": row["loss"],
        "graph": graph is not None and graph.captured,
        "optimizer_ms": run.optimizer_ms(),
    }
    if DEVICE.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - run.start_bytes
    return found


def write_rows(
    measures: Mapping[str, Callable[[], dict[str, Any]]], about: dict[str, Any], out: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the rows one after the other, write `about` and the rows so far after each, and yield its name and it."""
    rows: dict[str, Any] = {}
    for name, measure in measures.items():
        rows[name] = attempt(measure)
        out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        yield name, rows[name]


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns, or the error that it raised: one variant that fails must not cost the others."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
