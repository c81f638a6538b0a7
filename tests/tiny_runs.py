"""Runs of a tiny model on a few lines of text, from Python and from the command line."""

import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document
from te_models.training.metrics import read_metrics
from te_models.training.report import print_outcome
from te_models.training.result import Result

TINY = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=1,
    num_key_value_heads=1,
)
TEXT = [
    Document(f"line {i}: the quick brown fox jumps over the lazy dog; {i * i}\n" * 3)
    for i in range(40)
]
# The options of a run from the command line, but for a model; with the fixture `texts`.
SHORT = ["--data", "texts", "--device", "cpu", "--seq-len", "16", "--batch-size", "1"]
SHORT += ["--sample-tokens", "0", "--eval-every", "0", "--eval-batches", "1"]
PRETRAIN = ["pretrain", "--preset", "gated-nano", *SHORT]
PRETRAIN += [
    word for name, size in TINY.items() for word in (f"--{name.replace('_', '-')}", str(size))
]


def tiny_model(recipe: str = "bf16", preset: str = "gated-nano", **options: Any) -> CausalLM:
    torch.manual_seed(5)
    history = dict(amax_history_len=8) if recipe == "delayed" else {}
    return CausalLM.from_preset(
        preset, **{**TINY, **history, **options, "recipe": recipe, "device": "cpu"}
    )


def tiny_trainer(
    model: CausalLM, out: Path, saved: Any = None, documents: Any = (), **fields: Any
) -> Trainer:
    """A run of the model on TEXT; `fields` are those of TrainConfig. Its best model is not saved unless they say so."""
    usual = dict(steps=8, batch_size=1, seq_len=16, warmup_steps=1, eval_every=1, keep_best=False)
    config, words = TrainConfig(**usual | fields), load_tokenizer(None)
    data = TokenDataset(
        TEXT[:30], words, config.seq_len, batch_size=config.batch_size, seed=config.seed
    )
    held_out = TokenDataset(TEXT[30:], words, config.seq_len, batch_size=2, seed=0, shuffle=False)
    return Trainer(model, data, held_out.eval_batches(1), config, out, dict(documents), saved=saved)


def losses(folder: Path | str) -> list[float]:
    """The training loss of each step of a run."""
    return [row["loss"] for row in read_metrics(Path(folder, "metrics.jsonl"))]


def said_at_the_end(result: Result, config: TrainConfig, folder: Path) -> str:
    """Return what the command prints of the outcome of a run."""
    out = io.StringIO()
    print_outcome(
        Console(file=out, width=200),
        result,
        config,
        command="finetune",
        folder=folder,
        written={},
    )
    return out.getvalue()
