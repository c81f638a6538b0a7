"""The loss of 1,000 steps of gated-124m under each optimizer, on real text, from three seeds.

    python -m benchmarks.optimizer_study --folder optimizers --out optimizer_study.json     # on one GPU or more
    python -m benchmarks.optimizer_study --tiny --folder optimizers --out tiny.json         # anywhere: does it work?

Every optimizer has several learning rates, since they do not suit all alike, and each of those three seeds. Called
again with the same folder it goes on with the runs that are missing.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click

import te_models
from benchmarks.small_runs import SmallRun, report, run_all, write_results, write_tokens
from te_models.inspect.environment import environment

# The slowest first, so that none begins alone at the end.
OPTIMIZERS = ("muon", "muon8bit", "galore", "adamw8bit", "adamw")
RATES = (1e-3, 2e-3, 5e-4)
SEEDS = (0, 1, 2)
TOKENIZER = Path(te_models.__file__).parent / "pretrained" / "gated-nano" / "tokenizer.json"
CORPUS = 40_000_000  # bytes, more than the 4.1 million tokens of a run
PRESET = "gated-124m"
STEPS = dict(steps=1000, batch_size=8, seq_len=512, warmup_steps=100, eval_every=0, eval_batches=16)
TINY_MODEL = dict(name="gated-nano", num_hidden_layers=3, vocab_size=4096)
TINY = dict(steps=4, batch_size=2, seq_len=64, warmup_steps=1, eval_every=0, eval_batches=1)


def runs(rates: list[float], seeds: list[int], tiny: bool) -> list[SmallRun]:
    """Return every run: all seeds of the first rate, then of the next."""
    made = []
    for rate, seed, optimizer in itertools.product(rates, seeds, OPTIMIZERS):
        model: dict[str, Any] = {**(TINY_MODEL if tiny else {"name": PRESET}), "recipe": "delayed"}
        config = {**(TINY if tiny else STEPS)}
        config |= {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
        made.append(SmallRun(name=f"{optimizer}-{rate:g}-{seed}", model=model, config=config))
    return made


@click.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--rates", default=",".join(map(str, RATES)), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--per-gpu", default=3, show_default=True, help="Worker processes on each GPU.")
@click.option("--seconds", default=3600.0, show_default=True, help="Nothing runs after this time.")
@click.option("--mps", is_flag=True, help="Let the workers of a GPU share it by NVIDIA's MPS.")
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def main(
    folder: Path,
    out: Path,
    rates: str,
    seeds: str,
    per_gpu: int,
    seconds: float,
    mps: bool,
    tiny: bool,
) -> None:
    """Train what is missing, and write the results of all finished runs whenever one ends."""
    asked = runs([float(rate) for rate in rates.split(",")], list(map(int, seeds.split(","))), tiny)
    about = dict(environment=environment(), preset=PRESET, settings=TINY if tiny else STEPS)
    results = run_all(
        asked,
        folder,
        prepare=lambda: write_tokens(folder, TOKENIZER, 1_000_000 if tiny else CORPUS),
        per_gpu=per_gpu,
        seconds=seconds,
        mps=mps,
        changed=lambda found: write_results(out, about, asked, found),
    )
    report(results, folder)
    for name, found in results.items():
        print(f"{name:24} loss {found['loss']}, held out {found['held_out']}")


if __name__ == "__main__":
    main()
