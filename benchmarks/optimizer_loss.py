"""The same 500 steps under each optimizer: one model, one seed, one data order, Python's own docs and sources as text.

    python benchmarks/optimizer_loss.py [--out RESULT.json] [--optimizers muon,muon8bit] [--set hidden_size=192]

The default model is gated-nano cut to what one CPU core trains in minutes. It reports the loss on held-out text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents, split_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.training.trainer import Trainer

SHAPE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
)
RUN: dict[str, Any] = dict(
    steps=500, batch_size=8, seq_len=128, eval_every=100, eval_batches=16, warmup_steps=25
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {}, "muon8bit": {}, "adamw": {}, "galore": {"rank": 16}, "adamwfp8": {}, "adamw8bit": {},
}  # fmt: skip


def train(optimizer: str, shape: dict[str, Any], documents: tuple[Any, Any]) -> dict[str, Any]:
    """Return the held-out losses of one run, in nats per byte, by step."""
    config = TrainConfig(optimizer=optimizer, optimizer_options=OPTIMIZERS[optimizer], **RUN)
    torch.manual_seed(0)
    model = CausalLM.from_preset("gated-nano", recipe="bf16", **shape)
    words = load_tokenizer(None)
    training, held_out = (
        TokenDataset(
            part, words, config.seq_len, batch_size=config.batch_size, seed=0, shuffle=shuffle
        )
        for part, shuffle in zip(documents, (True, False), strict=True)
    )
    losses: dict[int, float] = {}

    def note(row: dict[str, Any]) -> None:
        if "eval_loss" in row:
            losses[row["step"]] = row["eval_loss"]
            print(f"{optimizer:10} step {row['step']:4}  {row['eval_loss']:.4f}", flush=True)

    # torchao compiles its step; for matrices as small as the default's that takes longer than the run.
    small = model.device.type == "cpu" and model.config.hidden_size <= 128
    eager = torch.compiler.set_stance("force_eager") if small else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, eager:
        run = Trainer(
            model,
            training,
            held_out.eval_batches(config.eval_batches),
            config,
            Path(folder),
            on_step=note,
        )
        result = run.run()
    return {
        "eval_loss": result.eval_loss,
        "eval_losses": losses,
        "tokens_per_second": result.tokens_per_second,
    }


def main() -> None:
    """Train under each, write the JSON after each, print the losses against muon's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "h200" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results" / f"optimizer_loss_{device}.json",
    )
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the shape"
    )
    given = parser.parse_args()
    shape = SHAPE | {name: int(value) for name, value in (pair.split("=") for pair in given.set)}
    documents = split_documents(load_documents(None), seed=0)
    result: dict[str, Any] = {
        "environment": environment(),
        "shape": shape,
        "run": RUN,
        "optimizers": {},
    }
    for optimizer in given.optimizers.split(","):
        result["optimizers"][optimizer] = train(optimizer, shape, documents)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    reference = result["optimizers"].get("muon", {}).get("eval_loss")
    for optimizer, data in result["optimizers"].items():
        against = f"{data['eval_loss'] / reference - 1:+.2%} against muon" if reference else ""
        print(f"{optimizer:10} {data['eval_loss']:.4f} nats per byte  {against}")


if __name__ == "__main__":
    main()
