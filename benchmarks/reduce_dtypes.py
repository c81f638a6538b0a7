"""Loss over 500 steps, and tokens/s, of FSDP2 with gradients sent in FP32, in BF16 and in FP8.

    python -m benchmarks.reduce_dtypes --processes 2 --folder runs --out reduce.json   # on two GPUs
    python -m benchmarks.reduce_dtypes --tiny --folder runs --out tiny.json        # on a CPU: does it work?

Each run is `te-models pretrain` under torchrun, on the text of installed packages; one after the other, and FP32 again
at the end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.small_runs import POINTS, TOKENIZER, write_corpus
from te_models.inspect.environment import environment
from te_models.training.metrics import read_metrics
from te_models.training.plots import smooth

RUNS = {"float32": "float32", "bfloat16": "bfloat16", "float8": "float8", "again": "float32"}
CORPUS = 40_000_000  # bytes
STEPS: dict[str, Any] = dict(
    preset="gated-124m", steps=500, batch_size=32, seq_len=1024, warmup_steps=100, learning_rate=1e-3, recipe="delayed",
    eval_every=250, eval_batches=16,
)  # fmt: skip
TINY = STEPS | dict(
    preset="gated-nano", num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_attention_heads=2,
    num_key_value_heads=2, batch_size=4, seq_len=64, eval_batches=4, recipe="bf16",
)  # fmt: skip
WARM_UP = 50  # steps whose speed does not count


@click.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--processes", default=2, show_default=True)
@click.option("--only", default=",".join(RUNS), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", type=int, help="Instead of 500.")
@click.option("--seconds", default=600.0, show_default=True, help="No run starts after this time.")
@click.option("--tiny", is_flag=True, help="A small shape anywhere.")
def main(
    folder: Path,
    out: Path,
    processes: int,
    only: str,
    seed: int,
    steps: int | None,
    seconds: float,
    tiny: bool,
) -> None:
    """Train each, and write the results after each."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus, 1_000_000 if tiny else CORPUS)
    settings = (TINY if tiny else STEPS) | dict(seed=seed)
    if steps is not None:
        settings |= dict(steps=steps, eval_every=steps)
    rows: dict[str, Any] = {}
    document = dict(environment=environment(), processes=processes, settings=settings, rows=rows)
    begun = time.monotonic()
    for name in only.split(","):
        if time.monotonic() - begun > seconds:
            rows[name] = dict(error="no time was left")
        else:
            rows[name] = train(settings, RUNS[name], corpus, folder / name, processes)
        out.write_text(json.dumps(document) + "\n")
        print(name, {key: value for key, value in rows[name].items() if key != "curve"}, flush=True)


def train(
    settings: dict[str, Any], reduce_dtype: str, corpus: Path, out: Path, processes: int
) -> dict[str, Any]:
    """Return losses and speed of one run."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    flags += [f"--data={corpus}", f"--tokenizer={TOKENIZER}", "--vocab-size=4096"]
    flags += ["--packing=stream", "--sample-tokens=0", "--save-every=0", "--no-keep-best"]
    flags += ["--parallel=fsdp", f"--reduce-dtype={reduce_dtype}", f"--out={out}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "te_models", "pretrain", *flags]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    with out.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=os.environ | threads).returncode
    if code:
        return dict(error=out.with_suffix(".log").read_text()[-2000:])
    metrics = read_metrics(out / "metrics.jsonl")
    losses = [row["loss"] for row in metrics if "loss" in row]
    speeds = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    held_out = [row["eval_loss"] for row in metrics if "eval_loss" in row]
    curve = smooth(losses)
    return dict(
        loss=sum(losses[-20:]) / len(losses[-20:]),
        held_out=held_out[-1],
        tokens_per_second=statistics.median(speeds[WARM_UP:] or speeds),
        curve=[round(loss, 4) for loss in curve[:: max(1, len(curve) // POINTS)]],
    )


if __name__ == "__main__":
    main()
