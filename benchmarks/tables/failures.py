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
        "without gradients and a NaN are no matter of FP8, and have no change to try. Where a failure does not show, "
        "the recipe has no scale that it could spoil. The last column is the recipe that the record speaks for."
    )
    header = (
        "failure | recipe | rule | tensor named | steps after it began | change | by the record"
    )
    return f"{about}\n\n{markdown(header, rows)}"


def _change(row: dict[str, Any]) -> str:
    """Return the change that was tried, and whether it healed the failure."""
    if "healed" not in row:
        return ""
    change = ", ".join(f"`{name}={value}`" for name, value in row["change"].items())
    return f"{change}: {'healed' if row['healed'] else 'not healed'}"
