"""README's table of what other reports claim of FP8 training and what came out here, from the results of the pages."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gated_learning_rates import GATES, RECIPES, of_kind
from benchmarks.tables.claims import compiled_rows, recomputation_peaks_of
from benchmarks.tables.optimizer_losses import STUDY, best_losses
from benchmarks.tables.optimizers import PLANS
from benchmarks.tables.speed import step_rows
from benchmarks.tables.speed_map import ratios
from benchmarks.tables.studies import FURTHER, GATED, best_said, interpolated_best, means
from benchmarks.tables.text import load, markdown, prose, table

PAGES = "docs/results"


@table
def readme_claims() -> str:
    """Claims of other reports, and what came out."""
    rows = [
        ["FP8 must be compiled to pay", _compilation(), _page("compilation", "compiled_fp8")],
        ["1.5 to 2 times BF16's speed", _speed_up(), _page("speed", "fp8_speedup")],
        ["small batches may be slower", _small(), _page("small batches", "small_models")],
        ["torchao's float8 needs more memory under full recomputation", _recomputation(),
         _page("recomputation", "recomputation")],
        ["another recipe, first and last layers in BF16 and a longer history help where FP8 diverges",
         _divergence(), _page("divergence", "divergence")],
        ["8-bit Muon: 74.2 % less state, 2.7 % slower", _muon(), _page("optimizers", "optimizers")],
        ["optimizer state in CPU memory: 10 to 20 % slower", _offload(), _page("optimizers", "optimizers")],
        ["20 to 30 GB for 282M parameters in FP32", _memory(), _page("optimizers", "optimizers")],
        ["gated attention allows a higher learning rate", _gates(), _page("gates", "learning_rates")],
    ]  # fmt: skip
    return markdown("claim | what came out here | page", rows)


def _page(name: str, file: str) -> str:
    return f"[{name}]({PAGES}/{file}.md)"


def _compilation() -> str:
    rows = compiled_rows("350m")
    base = rows["bf16"]["tokens_per_second"]
    compiled = rows["delayed"]["tokens_per_second"] / base
    plain = rows["delayed, plain operations, no graph"]["tokens_per_second"] / base
    return f"yes: {compiled:.2f} of BF16's speed compiled, {plain:.2f} without"


def _speed_up() -> str:
    theirs, ours = [], []
    for shape, key in (("gated-1b", "1b"), ("8B width, 4 layers", "8b-width")):
        _, rows, _ = step_rows(key)
        theirs.append(f"{rows['te-models delayed+no_edges+graph']['speed']:.2f}")
        times = {}
        for row in load("checkpoint_grid_h200")["rows"][shape]:
            if row["mode"] == "none" and not row["fp8_params"]:
                times[row["recipe"]] = row["ms"]
        ours.append(f"{times['bf16'] / times['delayed']:.2f}")
    return f"at 1B and 8B width {' and '.join(theirs)} times compiled PyTorch, {' and '.join(ours)} times our own BF16"


def _small() -> str:
    found = ratios("speed_map_h200", "delayed")
    few = [ratio for (_, experts, tokens), ratio in found.items() if tokens == 512 and not experts]
    widest = max(width for width, experts, _ in found if not experts)
    return (
        f"yes: {min(few):.2f} to {max(few):.2f} of BF16's speed at 512 tokens, "
        f"{found[widest, 0, 8192]:.2f} at 8,192 and width {widest:,}"
    )


def _recomputation() -> str:
    peaks = recomputation_peaks_of("gated-1b")
    theirs = peaks["torchao", False, "full"] / peaks["torch", False, "full"]
    ours = peaks["delayed", True, "full"] / peaks["bf16", False, "full"]
    return f"yes: {theirs:.2f} of BF16's peak; {ours:.2f} here, with FP8 weights"


def _divergence() -> str:
    rows: dict[str, dict[str, Any]] = load("divergence_advice_cpu")["rows"]
    healed = 0
    for row in rows.values():
        distances = {name: statistics.mean(each) for name, each in row["distances"].items()}
        # At least nine tenths of what the planted cause added to the loss is gone.
        added = distances["planted"] - distances["healthy"]
        healed += distances["advised"] - distances["healthy"] < 0.1 * added
    return f"each heals the cause that asks for it: {healed} of {len(rows)}"


def _muon() -> str:
    rows = load("optimizer_speed_1b_h100")["rows"]
    small, muon = rows["muon8bit, rest adamw8bit"], rows["muon"]
    saved = 1 - small["state_bytes"] / muon["state_bytes"]
    speed = small["tokens_per_second"] / muon["tokens_per_second"] - 1
    losses = {name: statistics.mean(each) for name, each in best_losses(load(STUDY)).items()}
    change = losses["muon8bit"] - losses["muon"]
    return f"{saved:.1%} less state, {speed:+.1%} tokens/s at 1B; {change:+.3f} nats after 1,000 steps at 124M"


def _offload() -> str:
    result = load("optimizer_speed_124m_h100")
    rows, size = result["rows"], result["size"]
    change = rows["adamw, in CPU memory"]["tokens_per_second"] / rows["adamw"]["tokens_per_second"]
    return f"{1 - change:.0%} slower at 124M and {size['batch_size']} x {size['seq_len']:,} tokens"


def _memory() -> str:
    peak = load("memory_breakdown_h200")["rows"][next(iter(PLANS))]["peak_bytes"]
    return f"{peak / 1e9:.1f} GB, as planned within 1 %"


@table
def readme_small() -> str:
    """The speed and the loss of a small model in FP8."""
    recipes = dict(load("first_light_h200")["recipes"])
    base = recipes.pop("bf16")
    speeds = [row["tokens_per_second"] / base["tokens_per_second"] for row in recipes.values()]
    changes = [row["eval_loss"] / base["eval_loss"] - 1 for row in recipes.values()]
    return prose(
        f"FP8 does not pay for small models, nor [for few tokens]({PAGES}/small_models.md): `gated-124m` trains at "
        f"{min(speeds):.2f} to {max(speeds):.2f} of BF16's speed, to a loss [within {max(map(abs, changes)):.1%}]"
        f"({PAGES}/accuracy.md) of BF16's."
    )


def _gates() -> str:
    runs = load(GATED)["runs"]
    best = {}
    for gate in GATES:
        rates = [interpolated_best(means(runs, gate, recipe, "held_out")) for recipe in RECIPES]
        best[gate] = statistics.mean(rates)
    higher = max(best[gate] / best["none"] - 1 for gate in ("headwise", "elementwise"))
    normed = of_kind(load(FURTHER)["runs"], "qknorm")
    with_norm = {gate: best_said(normed, gate, "bf16") for gate in ("none", "elementwise")}
    return (
        f"without `qk_norm` the best rate is {higher:.0%} higher at most; with it {with_norm['elementwise']} for an "
        f"elementwise gate and {with_norm['none']} for none"
    )
