"""Does gated attention allow a higher learning rate? Gates, recipes, learning rates and seeds on real text.

    python benchmarks/gated_learning_rates.py run --folder lr --out gated_learning_rates.json     # on one GPU or more
    python benchmarks/gated_learning_rates.py run --tiny --folder lr --out lr.json       # anywhere: does it work?
    python benchmarks/gated_learning_rates.py draw lr.json --out lr.png

About 20 million parameters and 30 million tokens for each run, or with --size 124m gated-124m and 33 million. Called
again with the same folder, one for each size, it goes on with the runs that are missing. After training each model is
looked at: the largest activation between its blocks, and the share of attention that goes to the first token of a text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import te_models
from benchmarks.small_runs import SmallRun, report, run_all, write_results, write_tokens
from te_models import CausalLM
from te_models.inspect.environment import environment
from te_models.model.attention import GatedAttention

GATES = ("none", "headwise", "elementwise")
RECIPES = ("bf16", "delayed", "current")
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)
# Of the model that ships: pieces of Python and English.
TOKENIZER = Path(te_models.__file__).parent / "pretrained" / "gated-nano" / "tokenizer.json"
VOCABULARY = 4096
CORPUS = 120_000_000  # bytes, more than 30 million tokens
SHAPE_20M = dict(
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=9,
    num_attention_heads=6,
    num_key_value_heads=6,
)
STEPS = dict(
    steps=1831, batch_size=32, seq_len=512, warmup_steps=100, eval_every=0, eval_batches=16
)
STEPS_124M = {**STEPS, "steps": 1000, "batch_size": 64}
TINY = dict(steps=4, batch_size=2, seq_len=64, warmup_steps=1, eval_every=0, eval_batches=1)
LOOKED_AT = 256  # tokens of each row
WARM = 16  # queries before this one have few tokens to attend to


def runs(
    size: str,
    norms: Sequence[bool],
    recipes: Sequence[str],
    seeds: Sequence[int],
    tiny: bool,
) -> list[SmallRun]:
    """Return every run, all of a seed before those of the next, so that a study cut short has whole seeds."""
    made = []
    settings = settings_of(size, tiny)
    rates = RATES
    shape: dict[str, Any] = {"name": "gated-nano", **SHAPE_20M}
    if size == "124m":
        shape = {"name": "gated-124m"}
    if tiny:
        rates = RATES[:1]
        shape = {"name": "gated-nano", "num_hidden_layers": 3}
    for norm, seed, rate, recipe, gate in itertools.product(norms, seeds, rates, recipes, GATES):
        model = {**shape, "vocab_size": VOCABULARY, "recipe": recipe}
        model |= {"attention_gate": gate, "qk_norm": norm}
        config = {**settings, "learning_rate": rate, "seed": seed}
        name = f"{gate}-{recipe}-{rate:g}-{seed}{'-qknorm' if norm else ''}"
        made.append(SmallRun(name=name, model=model, config=config, look=look))
    return made


def settings_of(size: str, tiny: bool) -> dict[str, Any]:
    """Return the fields of TrainConfig that all runs have."""
    if tiny:
        return TINY
    return STEPS if size == "20m" else STEPS_124M


@contextmanager
def watched(model: CausalLM) -> Iterator[dict[str, float]]:
    """Note the largest activation between blocks, and the mean share of attention on the first token, of each pass."""
    found = {"largest_activation": 0.0, "first_token": 0.0}
    shares: list[float] = []

    def note(block: Any, inputs: Any, output: Tensor) -> None:
        found["largest_activation"] = max(found["largest_activation"], float(output.abs().max()))

    def attend(self: GatedAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys = k.repeat_interleave(group, dim=1).float()
        scores = q.float() @ keys.mT * self.spec.heads.dim**-0.5  # [B, A, S, S]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        shares.append(float(weights[..., WARM:, 0].mean()))
        return own(self, q, k, v, mask)

    own = GatedAttention._attention
    hooks = [block.register_forward_hook(note) for block in model.layers]
    GatedAttention._attention = attend  # type: ignore[method-assign]
    try:
        with model.unfused():
            yield found
    finally:
        GatedAttention._attention = own  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    found["first_token"] = sum(shares) / max(1, len(shares))


@torch.no_grad()
def look(model: CausalLM, ids: Tensor) -> dict[str, float]:
    """Return what `watched` notes of a trained model, in BF16, over rows of ids, int64 [B, S]."""
    model.set_recipe("bf16")
    model.eval()
    with watched(model) as found:
        model(ids[:, :LOOKED_AT].to(model.device))
    return {name: round(value, 4) for name, value in found.items()}


@click.group()
def main() -> None:
    """Train, collect and draw."""


@main.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--size", type=click.Choice(["20m", "124m"]), default="20m")
@click.option("--qk-norm", type=click.Choice(["no", "yes", "both"]), default="no")
@click.option("--recipes", default=",".join(RECIPES), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--per-gpu", default=3, show_default=True, help="Worker processes on each GPU.")
@click.option("--seconds", default=3600.0, show_default=True, help="Nothing runs after this time.")
@click.option("--mps", is_flag=True, help="Let the workers of a GPU share it by NVIDIA's MPS.")
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def run(
    folder: Path,
    out: Path,
    size: str,
    qk_norm: str,
    recipes: str,
    seeds: str,
    per_gpu: int,
    seconds: float,
    mps: bool,
    tiny: bool,
) -> None:
    """Train what is missing, and write the results of all finished runs whenever one ends."""
    norms = {"no": (False,), "yes": (True,), "both": (False, True)}[qk_norm]
    asked = runs(size, norms, recipes.split(","), list(map(int, seeds.split(","))), tiny)
    about = dict(environment=environment(), size=size, settings=settings_of(size, tiny))
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


@main.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def draw(results: Path, out: Path) -> None:
    """Draw held-out loss over learning rate, a panel for each recipe; crosses are runs that diverged."""
    from te_models.training.plots import new_figure, save_figure

    document = json.loads(results.read_text())
    figure = new_figure((10, 4))
    panels = figure.subplots(1, len(RECIPES), sharey=True)
    for axes, recipe in zip(panels, RECIPES, strict=True):
        for number, gate in enumerate(GATES):
            points: dict[float, list[float]] = {}
            lost = []
            for name, found in document["runs"].items():
                parts = name.split("-")
                # A rate such as 1e-3 is written 0.001, without a dash.
                if parts[0] != gate or parts[1] != recipe or name.endswith("qknorm"):
                    continue
                if found["diverged"] is None and found["held_out"] is not None:
                    points.setdefault(float(parts[2]), []).append(found["held_out"])
                else:
                    lost.append(float(parts[2]))
            rates = sorted(points)
            means = [sum(points[rate]) / len(points[rate]) for rate in rates]
            axes.plot(rates, means, marker="o", color=f"C{number}", label=f"gate {gate}")
            for rate in rates:
                axes.scatter(
                    [rate] * len(points[rate]), points[rate], s=8, color=f"C{number}", alpha=0.5
                )
            top = max((max(values) for values in points.values()), default=0.0)
            axes.scatter(lost, [top] * len(lost), marker="x", color=f"C{number}")
        axes.set(xscale="log", title=recipe, xlabel="learning rate")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out loss (nats per token)")
    panels[0].legend(frameon=False, fontsize=8)
    save_figure(figure, out)


if __name__ == "__main__":
    main()
