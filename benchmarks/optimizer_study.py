"""The loss of 1,000 steps of gated-124m under each optimizer, on real text, from three seeds.

    python -m benchmarks.optimizer_study --folder optimizers --out optimizer_study.json     # on one GPU or more
    python -m benchmarks.optimizer_study --tiny --folder optimizers --out tiny.json         # anywhere: does it work?

Every optimizer has three learning rates, since they do not suit all alike, and each of those three seeds. Called again
with the same folder it goes on with the runs that are missing.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import click

import te_models
from benchmarks.many_runs import run_all, summary, write_corpus
from te_models.inspect.environment import environment

OPTIMIZERS = ("adamw", "adamw8bit", "muon", "muon8bit", "galore")
RATES = (5e-4, 1e-3, 2e-3)
SEEDS = (0, 1, 2)
TOKENIZER = Path(te_models.__file__).parent / "pretrained" / "gated-nano" / "tokenizer.json"
VOCABULARY = 4096
CORPUS = 40_000_000  # bytes, more than the 8.2 million tokens of a run
STEPS = dict(
    preset="gated-124m", steps=1000, batch_size=16, seq_len=512, warmup_steps=100, eval_every=250, eval_batches=16
)  # fmt: skip
TINY = dict(
    preset="gated-nano", num_hidden_layers=3, steps=4, batch_size=2, seq_len=64, warmup_steps=1, eval_every=2,
    eval_batches=1,
)  # fmt: skip


def runs(rates: list[float], seeds: list[int], tiny: bool) -> dict[str, list[str]]:
    """Return the options of every run by its name, all of a seed before those of the next."""
    made = {}
    for seed, rate, optimizer in itertools.product(seeds, rates, OPTIMIZERS):
        options: dict[str, Any] = {**(TINY if tiny else STEPS), "recipe": "delayed"}
        options |= {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
        options |= {"tokenizer": TOKENIZER, "vocab_size": VOCABULARY}
        options |= {"packing": "stream", "sample_tokens": 0, "save_every": 0}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        flags.append("--no-keep-best")
        made[f"{optimizer}-{rate:g}-{seed}"] = flags
    return made


@click.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--rates", default=",".join(map(str, RATES)), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--per-gpu", default=3, show_default=True, help="Runs at a time on each GPU.")
@click.option("--minutes", default=8.0, show_default=True, help="No run starts after this time.")
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def main(
    folder: Path, out: Path, rates: str, seeds: str, per_gpu: int, minutes: float, tiny: bool
) -> None:
    """Train what is missing, and write the results of all finished runs."""
    asked = runs(
        [float(rate) for rate in rates.split(",")], [int(seed) for seed in seeds.split(",")], tiny
    )
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus, 1_000_000 if tiny else CORPUS)
    asked = {name: [*flags, f"--data={corpus}"] for name, flags in asked.items()}
    metrics = run_all(asked, folder, 1 if tiny else per_gpu, minutes)
    settings = TINY if tiny else STEPS
    document = dict(
        environment=environment(),
        settings=settings,
        missing=[name for name in asked if name not in metrics],
        runs={name: summary(rows, int(settings["steps"])) for name, rows in metrics.items()},
    )
    out.write_text(json.dumps(document) + "\n")
    for name, found in document["runs"].items():
        print(f"{name:24} loss {found['loss']}, held out {found['held_out']}")


if __name__ == "__main__":
    main()
