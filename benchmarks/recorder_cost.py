"""Time training steps with and without the recorder, in turns in one process.

    python benchmarks/recorder_cost.py gated-1b delayed --out benchmarks/results/recorder_cost.json

Prints the median milliseconds per step without a recorder, with one of 50 steps recorded and with each, and what they
cost in percent.
"""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from te_models import CausalLM, TrainConfig, Trainer
from te_models.inspect.environment import environment, require_gpu

RECORDS = (0, 50, 1)
WARM_UP = 10


def batches(vocabulary: int, batch_size: int, seq_len: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random tokens without end."""
    generator = torch.Generator().manual_seed(0)
    kept = [
        torch.randint(0, vocabulary, (batch_size, seq_len), generator=generator) for _ in range(4)
    ]
    while True:
        for ids in kept:
            yield {"input_ids": ids, "labels": ids}


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
@click.option("--out", type=click.Path(path_type=Path))
def main(
    preset: str,
    recipe: str,
    batch_size: int,
    seq_len: int,
    rounds: int,
    steps: int,
    out: Path | None,
) -> None:
    """See the module."""
    require_gpu()
    if steps % 50 != 0:
        raise click.UsageError(
            f"--steps {steps} is no multiple of 50, so fewer than one in 50 steps is recorded"
        )
    milliseconds: dict[int, list[float]] = {record: [] for record in RECORDS}
    for _ in range(rounds):
        for record in RECORDS:
            torch.manual_seed(0)
            model = CausalLM.from_preset(preset, recipe=recipe, device="cuda")
            config = TrainConfig(
                steps=WARM_UP + steps,
                batch_size=batch_size,
                seq_len=seq_len,
                eval_every=0,
                record=record,
            )
            data = batches(model.config.vocab_size, batch_size, seq_len)
            trainer = Trainer(model, data, None, config, Path("unused"))
            begun = 0.0
            for row in trainer.steps(iter(trainer.data)):
                if row["step"] == WARM_UP:
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
            torch.cuda.synchronize()
            milliseconds[record].append(1e3 * (time.perf_counter() - begun) / steps)
            click.echo(f"record={record}: {milliseconds[record][-1]:.2f} ms per step")
            trainer.passes.close()
            del trainer, model
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
        }
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
