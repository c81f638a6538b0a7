"""Tables of advice: the rules about recorded runs, and failures that were planted to try them and others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables.text import load, markdown, measured_on, prose, table
from te_models.inspect.advice import RULES
from te_models.training.plots import new_figure, save_figure


@table
def advice_rules() -> str:
    """The rules of `te-models doctor`, in their order."""
    return markdown("`doctor` calls it | what it sees | what to change", _rules())


def _rules() -> list[list[str]]:
    return [[rule.key, rule.symptom, rule.change] for rule in RULES]


@table
def planted_failures() -> str:
    """Planted failures: which tensor is named, after how many steps, and whether the change heals it."""
    result = load("planted_failures_cpu")
    rows = []
    for row in result["rows"]:
        after = row.get("steps_after")
        tensor = f"`{row['tensor']}`" if row["tensor"] else "the run"
        precisions = "".join(
            f", `{name}` in {used}" for name, used in row["advised_precision"].items()
        )
        rows.append(
            [
                row["failure"],
                f"`{row['recipe']}`",
                row["rule"] if after is not None else "does not show",
                tensor if after is not None else "",
                "" if after is None else str(after),
                _change(row),
                f"`{row['advised']}`{precisions}",
            ]
        )
    about = prose(
        f"A model of three layers on a CPU, 14 steps, recorded in each ({result['environment']['date']}). A layer "
        "without gradients and a NaN in a weight are no matter of FP8, and have no change to try. Where a failure does "
        "not show, the recipe has no scale that it could spoil. The last column is the recipe that the record speaks "
        "for."
    )
    header = (
        "failure | recipe | rule | tensor named | steps after it began | change | by the record"
    )
    return f"{about}\n\n{markdown(header, rows)}"


@table
def planted_kinds() -> str:
    """Failures planted in other kinds of models and in two processes: how many cases, and how many went wrong."""
    result = load("planted_failures_cpu")
    cases = result["cases"]
    ways = {
        "one": "one process",
        "ddp": "two, DDP",
        "fsdp": "two, FSDP2",
        "fsdp+ep": "two, experts divided",
    }
    rows = []
    for model in sorted({case["model"] for case in cases}):
        own = [case for case in cases if case["model"] == model]
        row = [model]
        for way in ways:
            row.append(_share([case for case in own if case["processes"] == way]))
        rows.append(row)
    about = prose(
        f"{len(cases)} cases drawn at random ({result['environment']['date']}): a kind of model, a failure of the "
        "table above, a recipe under which it shows, and any te.Linear or expert as its place. Each cell has the cases "
        "in which the record named this tensor and its cause within five steps, and the advised change healed it, of "
        "all."
    )
    return f"{about}\n\n{markdown(' | '.join(['model', *ways.values()]), rows)}"


def _share(cases: list[dict[str, Any]]) -> str:
    """Return how many of these cases went right; "" without any."""
    if not cases:
        return ""
    right = sum(not case["fault"] for case in cases)
    return f"{right} of {len(cases)}"


def _change(row: dict[str, Any]) -> str:
    """Return the change that was tried, and whether it healed the failure."""
    if "healed" not in row:
        return ""
    change = ", ".join(f"`{name}={value}`" for name, value in row["change"].items())
    return f"{change}: {'healed' if row['healed'] else 'not healed'}"


# What takes FP8's gain away: the rows in FP8 and in BF16, the change that brings it back, and what a run says of it.
NO_SPEED_UP = (
    ("Transformer Engine is not used", "delayed, without Transformer Engine", "bf16", "Transformer Engine", "engine"),
    ("plain operations, no CUDA graph", "delayed, plain operations", "bf16", "the defaults", "compiled"),
    ("512 tokens per micro-batch", "delayed, few tokens", "bf16, few tokens", "8 x 2,048 tokens", ""),
)  # fmt: skip


def _no_speed_up() -> dict[str, tuple[float, float]]:
    """Return the speed of FP8 relative to BF16 with each cause, and with the change that heals it."""
    rows = load("no_speed_up_h200")["rows"]
    speeds = {name: row["tokens_per_second"] for name, row in rows.items()}
    found = {}
    for cause, fp8, bf16, _, _ in NO_SPEED_UP:
        found[cause] = (speeds[fp8] / speeds[bf16], speeds["delayed"] / speeds["bf16"])
    return found


@table
def no_speed_up() -> str:
    """Planted causes that take FP8's gain away, and the change that brings it back."""
    result = load("no_speed_up_h200")
    ratios = _no_speed_up()
    lines = []
    for cause, fp8, _, change, said in NO_SPEED_UP:
        planted, healed = ratios[cause]
        printed = (
            f"`{said}`: {result['rows'][fp8]['said'][said]}"
            if said
            else "`speed`: as measured near this size"
        )
        lines.append([cause, f"{planted:.2f}", change, f"{healed:.2f}", printed])
    about = prose(
        f"Whole steps of {result['layers']} layers of `gated-1b`'s width, all in the recipe `delayed`, "
        f"{result['size']['batch_size']} x {result['size']['seq_len']:,} tokens: speed relative to `bf16` without the "
        f"cause, of few tokens to `bf16` with as few. {measured_on(result)}"
    )
    header = "planted | FP8's speed with it | change | FP8's speed with the change | what a run prints with it"
    return f"{about}\n\n{markdown(header, lines)}"


def draw_no_speed_up(path: Path) -> None:
    """Draw the speed of FP8 relative to BF16 with each cause, and with the change that heals it."""
    ratios = _no_speed_up()
    figure = new_figure((8, 2.6))
    axes = figure.subplots()
    for number, label in enumerate(("with the cause", "with the change")):
        places = [place + 0.4 * number for place in range(len(ratios))]
        bars = axes.barh(places, [pair[number] for pair in ratios.values()], 0.36, label=label)
        axes.bar_label(bars, fmt="{:.2f}", fontsize=8, padding=3)
    axes.set_yticks([place + 0.2 for place in range(len(ratios))], list(ratios))
    axes.axvline(1, color="gray", linestyle=":")
    axes.invert_yaxis()
    axes.set(xlabel="speed of `delayed` relative to `bf16`", xlim=(0, 1.6))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, path)
