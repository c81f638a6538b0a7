"""The host's cost of knowing that a forward pass is a recompute: ours beside walks of the stack.

    python -m benchmarks.recompute_detection --out benchmarks/results/recompute_detection_h100.json
    python -m benchmarks.recompute_detection --tiny --out tiny.json                    # anywhere: does it work?

A report on activation checkpointing with FP8 would let every linear look for torch.utils.checkpoint in
`inspect.stack()`. Here a pass knows it: the recompute of a block enters a context, which also brings back the scales of
the first pass (te_models.model.recompute). `inspect.stack()` reads the source of every frame that it lists; a walk from
frame to frame that compares names alone is measured as well. Times of the host in eager steps under
activation_checkpointing="full", per call and per step; a CUDA graph runs none of them again.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.timed_steps import DEVICE, TINY, synchronize
from te_models import CausalLM, get_preset
from te_models.inspect.environment import environment
from te_models.model.block import Block
from te_models.model.recompute import Recompute

LINEARS = 4  # of a block
RECIPES = ("bf16", "delayed", "current")
STEPS = 8
WALKED_STEPS = 2  # a step with walks takes seconds


def in_checkpoint() -> bool:
    """Return whether a frame of torch.utils.checkpoint calls this, as the report proposes to find out."""
    return any(
        "checkpoint" in frame.filename and "checkpoint" in frame.function
        for frame in inspect.stack()
    )


def in_checkpoint_by_frames() -> bool:
    """Return the same from the names of frames alone."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if "checkpoint" in code.co_filename and "checkpoint" in code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def walking(seconds: list[float], walk: Callable[[], bool]) -> Iterator[None]:
    """Let every block walk the stack once for each of its linears before it runs; note how long that takes."""
    original = Block.forward

    def forward(self: Block, *args: Any, **kwargs: Any) -> Any:
        for _ in range(LINEARS):
            begun = time.perf_counter()
            walk()
            seconds.append(time.perf_counter() - begun)
        return original(self, *args, **kwargs)

    Block.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.forward = original  # type: ignore[method-assign]


@contextmanager
def timing_contexts(seconds: list[float]) -> Iterator[None]:
    """Note how long it takes to enter and to leave the context of each recompute."""
    original = {
        name: getattr(Recompute, name) for name in ("_as_in_first_pass", "_in_high_precision")
    }

    def timed(name: str) -> Any:
        @contextmanager
        def around(self: Recompute, *args: Any) -> Iterator[None]:
            begun = time.perf_counter()
            left = begun
            try:
                with original[name](self, *args):
                    entered = time.perf_counter()
                    try:
                        yield
                    finally:
                        left = time.perf_counter()
            finally:  # torch ends a recompute by an exception
                seconds.append(time.perf_counter() - left + entered - begun)

        return around

    for name in original:
        setattr(Recompute, name, timed(name))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(Recompute, name, function)


def measure(model: CausalLM, ids: torch.Tensor) -> dict[str, Any]:
    """Return milliseconds of eager steps, and calls and microseconds of each way to know."""

    def run(mode: str, steps: int = STEPS) -> float:
        model.activation_checkpointing = mode
        times = []
        for _ in range(steps):
            synchronize()
            begun = time.perf_counter()
            loss = model(ids, labels=ids, return_logits=False).loss
            assert loss is not None
            loss.backward()
            synchronize()
            times.append(time.perf_counter() - begun)
            model.zero_grad(set_to_none=True)
        return 1e3 * statistics.median(times)

    found: dict[str, Any] = {}
    run("none", 3)
    run("full", 3)
    found["none_ms"] = run("none")
    found["full_ms"] = run("full")
    contexts: list[float] = []
    with timing_contexts(contexts):
        found["full_timed_ms"] = run("full")
    frames: list[float] = []
    with walking(frames, in_checkpoint_by_frames):
        found["full_with_frames_ms"] = run("full")
    walks: list[float] = []
    with walking(walks, in_checkpoint):
        found["full_with_walks_ms"] = run("full", WALKED_STEPS)
    for name, seconds, steps in (
        ("context", contexts, STEPS),
        ("frame", frames, STEPS),
        ("walk", walks, WALKED_STEPS),
    ):
        found[f"{name}s_per_step"] = len(seconds) / steps
        found[f"{name}_us"] = 1e6 * statistics.median(seconds)
        found[f"{name}s_ms_per_step"] = 1e3 * sum(seconds) / steps
    return found


@click.command()
@click.option("--tiny", is_flag=True, help="A small shape anywhere: a test, not a measurement.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(tiny: bool, out: Path) -> None:
    """Measure under each recipe."""
    config = get_preset("gated-1b", **(TINY if tiny else {}))
    if DEVICE.type == "cpu" and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    batch, seq = (2, 64) if tiny else (8, 2048)
    rows: dict[str, Any] = {}
    settings = dict(preset="gated-1b", batch_size=batch, seq_len=seq)
    document = dict(environment=environment(), settings=settings, rows=rows)
    for recipe in RECIPES:
        torch.manual_seed(0)
        model = CausalLM(config, recipe=recipe, device=DEVICE)
        ids = torch.randint(0, config.vocab_size, (batch, seq)).to(DEVICE)
        rows[recipe] = measure(model, ids)
        out.write_text(json.dumps(document, indent=1) + "\n")
        print(recipe, {name: round(value, 3) for name, value in rows[recipe].items()}, flush=True)
        model.te.FP8GlobalStateManager.reset()
        del model


if __name__ == "__main__":
    main()
