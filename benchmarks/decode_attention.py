"""Time the attention of a step of decoding with many tiles: milliseconds, and bytes of the cache per second.

    python -m benchmarks.decode_attention --out benchmarks/results/decode_attention_h200.json   # about 40 seconds

As in decode_tiles.py: the median of replays of a CUDA graph whose launches read different caches. Both kernels of
attention are timed together. A result is compared with the result of the constants in use.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from benchmarks.decode_tiles import COLD, LAUNCHES, milliseconds
from te_models.config.attention import Heads
from te_models.inspect.environment import environment, require_gpu
from te_models.kernels import decode_attention_triton as kernels
from te_models.kernels.decode import HeadNorms, Rotary, StepAttention, StepKeys

USED = 2049  # keys, the new one included
SLOTS = 2304
BATCHES = (1, 4, 8, 16)
PROGRAMS = (264, 528, 1056)


class Constants(NamedTuple):
    """The constants of decode_attention_triton.py that are varied."""

    keys: int
    warps: int
    stages: int
    programs: int


IN_USE = Constants(
    keys=kernels.KEYS[128],
    warps=kernels.WARPS,
    stages=kernels.STAGES,
    programs=kernels.PROGRAMS,
)
# keys, warps, stages
LOOPS = (
    (64, 4, 1),
    (64, 4, 2),
    (64, 4, 3),
    (64, 8, 2),
    (32, 4, 3),
    (32, 4, 5),
    (128, 8, 2),
)


@dataclass(frozen=True)
class Shape:
    """The attention of a model."""

    model: str
    heads: Heads
    normed: bool


SHAPES = (
    Shape("llama-3.1-8b", Heads(32, 8, 128, "none"), normed=False),
    Shape("qwen3-1.7b", Heads(16, 8, 128, "none"), normed=True),
)


class Step:
    """A step of `batch` rows with each of several caches."""

    def __init__(self, shape: Shape, batch: int, caches: int) -> None:
        heads = shape.heads
        factory: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
        self.batch = batch
        self.qkvg = torch.randn(batch, heads.q_size + 2 * heads.kv_size, **factory)
        angles = torch.rand(1, 1, heads.dim, device="cuda")
        rotary = Rotary(angles.cos().bfloat16(), angles.sin().bfloat16(), False)
        norms = None
        if shape.normed:
            gain = torch.ones(heads.dim, **factory)
            norms = HeadNorms(gain, gain, 1e-6, False)
        self.step = StepAttention(heads, heads.dim**-0.5, rotary=rotary, norms=norms)
        filled = torch.tensor([USED], device="cuda")
        mask = torch.zeros(batch, 1, 1, SLOTS, **factory)
        mask[..., USED:] = float("-inf")
        size = (batch, heads.key, SLOTS, heads.dim)
        self.caches = []
        for _ in range(caches):
            keys = torch.randn(size, **factory)
            values = torch.randn(size, **factory)
            self.caches.append(StepKeys(keys, values, filled, mask))

    def __call__(self, cache: StepKeys, constants: Constants) -> Tensor:
        """Attend, with these constants."""
        kernels.KEYS = {256: constants.keys}
        kernels.WARPS = constants.warps
        kernels.STAGES = constants.stages
        kernels.PROGRAMS = constants.programs
        return kernels.attention(self.qkvg, cache, self.step, self.batch)


def compile_kernels(shape: Shape, batch: int, constants: Constants) -> None:
    """Compile the kernels of a shape into Triton's cache on disk, in a process of its own."""
    step = Step(shape, batch, 1)
    step(step.caches[0], constants)


def time_constants(
    shape: Shape, step: Step, constants: Constants, exact: Tensor, size: int
) -> dict[str, Any]:
    """Return a row of the result."""
    found = step(step.caches[0], constants)
    distance = float((found.double() - exact).norm() / exact.norm())

    def attend_all() -> None:
        for cache in step.caches:
            step(cache, constants)

    ms = milliseconds(attend_all, len(step.caches))
    return dict(
        model=shape.model,
        batch=step.batch,
        **constants._asdict(),
        in_use=constants == IN_USE,
        ms=ms,
        gigabytes_per_second=size / ms / 1e6,
        distance=distance,
    )


def describe(row: dict[str, Any]) -> str:
    """Return the line of a row."""
    names = ("keys", "warps", "stages", "programs")
    settings = " ".join(f"{name} {row[name]!s:5}" for name in names)
    return (
        f"{row['model']:12} batch {row['batch']:2} {settings} {'in use' if row['in_use'] else '':6} "
        f"{row['ms']:.4f} ms {row['gigabytes_per_second']:5.0f} GB/s, distance {row['distance']:.5f}"
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--processes", default=14, show_default=True, help="That compile kernels.")
def main(out: Path, processes: int) -> None:
    """Measure, print and write."""
    require_gpu()
    choices = [IN_USE]
    for loop in LOOPS:
        for programs in PROGRAMS:
            constants = Constants(*loop, programs=programs)
            if constants != IN_USE:
                choices.append(constants)
    compiled = []
    for shape in SHAPES:
        for batch in (4, 16):  # of which 16 is compiled apart
            for loop in LOOPS:
                compiled.append((shape, batch, Constants(*loop, programs=264)))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(compile_kernels, compiled, chunksize=1)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for batch in BATCHES:
            size = 2 * 2 * batch * USED * shape.heads.kv_size
            step = Step(shape, batch, max(LAUNCHES, math.ceil(COLD / size)))
            exact = step(step.caches[0], IN_USE).double()
            found = []
            for constants in choices:
                found.append(time_constants(shape, step, constants, exact, size))
            found.sort(key=lambda row: row["ms"])
            for row in found:
                print(describe(row), flush=True)
            rows.extend(found)
            del step
    document = dict(environment=environment(), used=USED, slots=SLOTS, rows=rows)
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
