"""Time training steps with and without the recorder, in turns in one process.

    python benchmarks/recorder_cost.py gated-1b delayed --out benchmarks/results/recorder_cost.json

Prints the median milliseconds per step without a recorder, with one of 50 steps recorded and with each, and what they
cost in percent. --profile adds the kernels of a few further steps: of one that is not recorded (0 and 50), or is (1).
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM, TrainConfig, Trainer
from te_models.inspect.environment import environment, require_gpu

RECORDS = (0, 50, 1)
WARM_UP = 10
WARM_EVERY = 7  # of the steps of the warm-up is recorded, so that both graphs are captured there
PROFILED = 4  # steps after the timed ones
SHOWN = 12  # kernels


def batches(vocabulary: int, batch_size: int, seq_len: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random tokens without end."""
    generator = torch.Generator().manual_seed(0)
    kept = [
        torch.randint(0, vocabulary, (batch_size, seq_len), generator=generator) for _ in range(4)
    ]
    while True:
        for ids in kept:
            yield {"input_ids": ids, "labels": ids}


def taken(rows: Iterator[dict[str, Any]], count: int) -> None:
    """Take some steps, and wait for the device."""
    for _ in range(count):
        next(rows)
    torch.cuda.synchronize()


def kernel_times(run: Callable[[], None]) -> dict[str, float]:
    """Return the milliseconds of each kernel in a step, of PROFILED steps that `run` takes, the slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
    found = {
        event.key: event.self_device_time_total / 1e3 / PROFILED
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def show(times: dict[str, float], plain: dict[str, float]) -> None:
    """Print the sum of the kernels of a step, and those that differ most from a step without a recorder."""
    click.echo(f"  kernels: {sum(times.values()):.2f} ms per step")
    more = {name: time - plain.get(name, 0.0) for name, time in times.items()}
    for name, difference in sorted(more.items(), key=lambda item: -abs(item[1]))[:SHOWN]:
        click.echo(f"  {difference:+8.3f} ms of {times[name]:8.3f}: {name[:90]}")


@click.command()
@click.argument("preset")
@click.argument("recipe")
@click.option("--batch-size", default=8)
@click.option("--seq-len", default=2048)
@click.option("--rounds", default=3)
@click.option(
    "--steps",
    default=100,
    help="Timed in each round, a multiple of 50: as many recorded ones count.",
)
@click.option("--profile", is_flag=True, help="Add the time of each kernel.")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    preset: str,
    recipe: str,
    batch_size: int,
    seq_len: int,
    rounds: int,
    steps: int,
    profile: bool,
    out: Path | None,
) -> None:
    """See the module."""
    require_gpu()
    if steps % 50 != 0:
        raise click.UsageError(
            f"--steps {steps} is no multiple of 50, so fewer than one in 50 steps is recorded"
        )
    milliseconds: dict[int, list[float]] = {record: [] for record in RECORDS}
    peaks: dict[int, float] = {}
    kernels: dict[int, dict[str, float]] = {}
    for _ in range(rounds):
        for record in RECORDS:
            torch.manual_seed(0)
            model = CausalLM.from_preset(preset, recipe=recipe, device="cuda")
            config = TrainConfig(
                steps=WARM_UP + steps + PROFILED,
                batch_size=batch_size,
                seq_len=seq_len,
                eval_every=0,
                record=record,
            )
            data = batches(model.config.vocab_size, batch_size, seq_len)
            trainer = Trainer(model, data, None, config, Path("unused"))
            rows = trainer.steps(iter(trainer.data))
            torch.cuda.reset_peak_memory_stats()
            if trainer.recorder is not None:
                trainer.recorder.every = min(record, WARM_EVERY)
            taken(rows, WARM_UP)
            if trainer.recorder is not None:
                trainer.recorder.every = record
            begun = time.perf_counter()
            taken(rows, steps)
            milliseconds[record].append(1e3 * (time.perf_counter() - begun) / steps)
            peaks[record] = torch.cuda.max_memory_reserved() / 2**30
            click.echo(
                f"record={record}: {milliseconds[record][-1]:.2f} ms per step, "
                f"peak {peaks[record]:.2f} GiB"
            )
            if profile:
                kernels[record] = kernel_times(partial(taken, rows, PROFILED))
                show(kernels[record], kernels[RECORDS[0]])
            trainer.passes.close()
            # The generator of the rows holds the trainer, and its memory would count for the next one.
            del trainer, model, rows, data
            gc.collect()
            torch.cuda.empty_cache()
    medians = {record: statistics.median(values) for record, values in milliseconds.items()}
    cost = {record: 100 * (medians[record] / medians[0] - 1) for record in RECORDS[1:]}
    for record, value in medians.items():
        percent = "" if not record else f" ({cost[record]:+.2f} %)"
        click.echo(f"record={record}: {value:.2f} ms per step{percent}")
    if out is not None:
        found = {
            "environment": environment(),
            "preset": preset,
            "recipe": recipe,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "milliseconds": milliseconds,
            "median": medians,
            "cost_percent": cost,
            "peak_reserved_gib": peaks,
        }
        if profile:
            found["kernels_milliseconds"] = kernels
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
