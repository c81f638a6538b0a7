"""Tables of the advice about recorded runs: its rules, and the failures that were planted to try them."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.text import load, markdown, prose, table
from te_models.inspect.advice import RULES


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
