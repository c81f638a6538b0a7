"""Does the fast path change what is learned? The same 300 steps with it and without, from several seeds of the weights.

    python benchmarks/fast_and_plain.py --out benchmarks/results/fast_and_plain_h200.json

"fast" is what a GPU runs by default: fused operations, FP8 handed from module to module, the step as a CUDA graph.
"plain" is each module by itself with plain PyTorch between them. One pair of runs says little, since training magnifies
any last bit; so pairs are averaged, and the spread between seeds is given for scale.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents, split_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.training.trainer import Trainer

WAYS: dict[str, dict[str, Any]] = {
    "plain": dict(fused=False, compile=False, graph=False),
    "fast": dict(fused=True, compile=True, graph=True),
}


def train(
    way: str, seed: int, preset: str, recipe: str, steps: int, batch_size: int, seq_len: int
) -> dict[str, Any]:
    """Return the training loss of every step and the held-out loss at the end, in nats per byte."""
    options = dict(WAYS[way])
    graph = options.pop("graph")
    config = TrainConfig(steps=steps, batch_size=batch_size, seq_len=seq_len, learning_rate=3e-4, warmup_steps=30,
                         eval_every=0, cuda_graph=graph, seed=seed)  # fmt: skip
    torch.manual_seed(seed)
    model = CausalLM.from_preset(preset, recipe=recipe, **options)
    words, parts = load_tokenizer(None), split_documents(load_documents(None), seed=0)
    data, held_out = (
        TokenDataset(part, words, seq_len, batch_size=batch_size, seed=0, shuffle=shuffle)
        for part, shuffle in zip(parts, (True, False), strict=True)
    )
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(
            model,
            data,
            held_out.eval_batches(8),
            config,
            Path(folder),
            on_step=lambda r: losses.append(r["loss"]),
        )
        run.checkpoints.save = lambda *args, **options: Path(folder)  # only the losses are needed
        result = run.run()
    return {
        "losses": losses,
        "eval_loss": result.eval_loss,
        "tokens_per_second": result.tokens_per_second,
    }


def take_a_gpu(numbers: Any) -> None:
    """Make one GPU, in turn, visible to this process; call this before anything looks for GPUs."""
    all_of_them = ",".join(
        path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_of_them).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[numbers.get() % len(visible)]


def pair(settings: dict[str, Any], seed: int) -> dict[str, dict[str, Any]]:
    """Both ways from one seed."""
    found = {way: train(way, seed, **settings) for way in WAYS}
    print(
        f"seed {seed}:",
        *(f"{way} held-out {run['eval_loss']:.5f}" for way, run in found.items()),
        flush=True,
    )
    return found


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the relative difference of "fast" and "plain" per seed and in the mean, and that between seeds."""
    numbers = {
        "held_out": {way: [run["eval_loss"] for run in of] for way, of in runs.items()},
        "last_50_steps": {
            way: [statistics.mean(run["losses"][-50:]) for run in of] for way, of in runs.items()
        },
        "all_steps": {
            way: [statistics.mean(run["losses"]) for run in of] for way, of in runs.items()
        },
    }
    found = {}
    for name, of in numbers.items():
        pairs = [fast / plain - 1 for fast, plain in zip(of["fast"], of["plain"], strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5
        seeds = statistics.stdev(of["plain"]) / statistics.mean(of["plain"])
        found[name] = dict(
            mean=statistics.mean(pairs), standard_error=error, pairs=pairs, between_seeds=seeds
        )
    return found


@click.command()
@click.option("--preset", default="gated-124m")
@click.option("--recipe", default="delayed")
@click.option("--steps", default=300)
@click.option("--batch-size", default=8)
@click.option("--seq-len", default=512)
@click.option("--seeds", default=16, type=click.IntRange(min=2))
@click.option(
    "--processes", default=1, help="Pairs that run side by side; they share out the GPUs."
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(preset: str, recipe: str, steps: int, batch_size: int, seq_len: int, seeds: int, processes: int,
         out: Path) -> None:  # fmt: skip
    """Train in each way from each seed; print and write the differences of the losses."""
    settings = dict(
        preset=preset, recipe=recipe, steps=steps, batch_size=batch_size, seq_len=seq_len
    )
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(processes):
        numbers.put(number)
    with ProcessPoolExecutor(processes, context, take_a_gpu, (numbers,)) as pool:
        pairs = list(pool.map(partial(pair, settings), range(seeds)))
    runs = {way: [one[way] for one in pairs] for way in WAYS}
    found = {
        "environment": environment(),
        "settings": settings,
        "ways": WAYS,
        "runs": runs,
        "summary": summary(runs),
    }
    for name, row in found["summary"].items():
        found_mean = f"{row['mean']:+.3%} +- {row['standard_error']:.3%}"
        print(f"{name:14} fast / plain - 1 = {found_mean}; seeds {row['between_seeds']:.3%}")
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
