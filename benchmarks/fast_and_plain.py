"""Does the fast path change what is learned? The same 300 steps with it and without, and with other data order for scale.

    python benchmarks/fast_and_plain.py --out benchmarks/results/fast_and_plain_h200.json

"fast" is what a GPU runs by default: fused operations, FP8 handed from module to module, the step as a CUDA graph. "plain"
is each module by itself with plain PyTorch between them. "again" is plain with another seed of the weights, for comparison.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM
from te_models.data import TokenDataset, load_documents, split_documents
from te_models.environment import environment
from te_models.tokenizer import load_tokenizer
from te_models.train import Trainer
from te_models.train_config import TrainConfig

WAYS: dict[str, dict[str, Any]] = {
    "plain": dict(fused=False, compile=False, graph=False, seed=0),
    "fast": dict(fused=True, compile=True, graph=True, seed=0),
    "again": dict(fused=False, compile=False, graph=False, seed=1),
}


def train(way: str, preset: str, recipe: str, steps: int, batch_size: int, seq_len: int) -> dict[str, Any]:
    """The training loss of every step and the held-out loss at the end, nats a byte."""
    options = dict(WAYS[way])
    graph, seed = options.pop("graph"), options.pop("seed")
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
            model, data, held_out.eval_batches(8), config, Path(folder), on_step=lambda r: losses.append(r["loss"])
        )
        run.checkpoints.save = lambda *args, **options: Path(folder)  # type: ignore[method-assign]  the losses are all
        result = run.run()
    return {"losses": losses, "eval_loss": result.eval_loss, "tokens_per_second": result.tokens_per_second}


@click.command()
@click.option("--preset", default="gated-124m")
@click.option("--recipe", default="delayed")
@click.option("--steps", default=300)
@click.option("--batch-size", default=8)
@click.option("--seq-len", default=512)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(preset: str, recipe: str, steps: int, batch_size: int, seq_len: int, out: Path) -> None:
    """Train in each way; print and write how far the losses are apart."""
    settings = dict(preset=preset, recipe=recipe, steps=steps, batch_size=batch_size, seq_len=seq_len)
    runs = {way: train(way, **settings) for way in WAYS}
    found: dict[str, Any] = {"environment": environment(), "settings": settings, "ways": WAYS, "runs": runs}
    last = {way: statistics.mean(run["losses"][-50:]) for way, run in runs.items()}
    for way, run in runs.items():
        apart = [abs(a / b - 1) for a, b in zip(run["losses"], runs["plain"]["losses"], strict=True)]
        row = dict(last_50_steps=last[way], against_plain=last[way] / last["plain"] - 1, eval_loss=run["eval_loss"],
                   eval_against_plain=run["eval_loss"] / runs["plain"]["eval_loss"] - 1,
                   median_apart=statistics.median(apart), worst_apart=max(apart))  # fmt: skip
        found.setdefault("summary", {})[way] = row
        print(f"{way:6} " + "  ".join(f"{name} {value:.5f}" for name, value in row.items()), flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
