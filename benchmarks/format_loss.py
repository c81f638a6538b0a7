"""Held-out loss after the same steps under each FP8 format: E4M3, HYBRID (E5M2 for gradients), block scales, MXFP8.

    python -m benchmarks.format_loss --out benchmarks/results/format_loss_cpu.json

gated-nano cut to what a CPU core trains in a minute, on Python's own documentation and sources, on the emulated engine.
Runs of a seed have the same first weights and batches.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.optimizer_loss import SHAPE
from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents, split_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.training.trainer import Trainer

RUN: dict[str, Any] = dict(
    steps=300, batch_size=8, seq_len=64, eval_every=0, eval_batches=32, warmup_steps=25, learning_rate=2e-3
)  # fmt: skip
# Name of the row -> recipe and its options; all layers in the recipe.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "current, HYBRID": ("current", {"fp8_format": "HYBRID"}),
    "current, E4M3": ("current", {"fp8_format": "E4M3"}),
    "delayed, HYBRID": ("delayed", {"fp8_format": "HYBRID"}),
    "delayed, E4M3": ("delayed", {"fp8_format": "E4M3"}),
    "mxfp8, E4M3": ("mxfp8", {}),
    "blockwise, E4M3": ("blockwise", {}),
}
ALL_LAYERS = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)


def train(row: str, seed: int, documents: tuple[Any, Any]) -> float:
    """Return the held-out loss of one run, in nats per byte."""
    recipe, options = ROWS[row]
    config = TrainConfig(seed=seed, **RUN)
    torch.manual_seed(seed)
    edges = {} if recipe == "bf16" else ALL_LAYERS
    model = CausalLM.from_preset("gated-nano", recipe=recipe, **SHAPE, **edges, **options)
    words = load_tokenizer(None)
    training, held_out = (
        TokenDataset(
            part, words, config.seq_len, batch_size=config.batch_size, seed=seed, shuffle=shuffle
        )
        for part, shuffle in zip(documents, (True, False), strict=True)
    )
    held = held_out.eval_batches(config.eval_batches)
    with tempfile.TemporaryDirectory() as folder:
        result = Trainer(model, training, held, config, Path(folder)).run()
    model.te.FP8GlobalStateManager.reset()
    assert result.eval_loss is not None
    return result.eval_loss


@click.command()
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="No seed starts after this.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(seeds: str, seconds: float, out: Path) -> None:
    """Train under each, and write the losses after each run."""
    documents = split_documents(load_documents(None), seed=0)
    rows: dict[str, dict[str, float]] = {row: {} for row in ROWS}
    document = dict(environment=environment(), shape=SHAPE, run=RUN, rows=rows)
    begun = time.monotonic()
    for seed in seeds.split(","):
        if time.monotonic() - begun > seconds:
            break
        for row in ROWS:
            rows[row][seed] = train(row, int(seed), documents)
            out.write_text(json.dumps(document, indent=1) + "\n")
            print(f"{row:18} seed {seed}  {rows[row][seed]:.4f}", flush=True)


if __name__ == "__main__":
    main()
