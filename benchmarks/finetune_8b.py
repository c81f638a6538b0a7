"""A full fine-tune of an 8B-shaped model on one GPU: true peak memory and speed of real training steps.

    python benchmarks/finetune_8b.py --out benchmarks/results/finetune_8b_h200.json

The weights are random, the text is Python's own documentation; every parameter trains. Nothing is saved at the end.
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
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.training.trainer import Trainer


@click.command()
@click.option("--preset", default="llama-3.1-8b")
@click.option("--recipe", default="delayed")
@click.option("--optimizer", default="adamw8bit")
@click.option("--optimizer-options", default="stochastic_rounding=true")
@click.option("--activation-checkpointing", default="full")
@click.option("--batch-size", default=2)
@click.option("--seq-len", default=4096)
@click.option("--steps", default=6)
@click.option("--out", type=click.Path(path_type=Path))
def main(preset: str, recipe: str, optimizer: str, optimizer_options: str, activation_checkpointing: str,
         batch_size: int, seq_len: int, steps: int, out: Path | None) -> None:  # fmt: skip
    """Train for a few steps and print their time and memory."""
    settings: dict[str, Any] = dict(preset=preset, recipe=recipe, activation_checkpointing=activation_checkpointing)
    config = TrainConfig(steps=steps, batch_size=batch_size, seq_len=seq_len, optimizer=optimizer, learning_rate=1e-5,
                         optimizer_options=optimizer_options, eval_every=0)  # fmt: skip
    model = CausalLM.from_preset(preset, recipe=recipe, activation_checkpointing=activation_checkpointing)
    data = TokenDataset(load_documents(None), load_tokenizer(None), seq_len, batch_size=batch_size, seed=0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(model, data, [], config, Path(folder), on_step=rows.append)
        run.checkpoints.save = lambda *args, **options: Path(folder)
        result = run.run()
    found = dict(settings, optimizer=optimizer, optimizer_options=optimizer_options, batch_size=batch_size,
                 seq_len=seq_len, parameters=model.config.num_parameters, losses=[row["loss"] for row in rows],
                 peak_gb=(result.peak_memory or 0) / 1e9,
                 tokens_per_second=statistics.median(row["tokens_per_second"] for row in rows[2:]))  # fmt: skip
    print(json.dumps(found))
    if out is not None and torch.cuda.is_available():
        out.write_text(json.dumps({"environment": environment(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
