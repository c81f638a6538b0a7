"""Tables of the advice about recorded runs: its rules, and the failures that were planted to try them."""

from __future__ import annotations

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
        healed = "" if "healed" not in row else "healed" if row["healed"] else "not healed"
        change = ", ".join(f"`{name}={value}`" for name, value in row.get("change", {}).items())
        rows.append(
            [
                row["failure"],
                f"`{row['recipe']}`",
                row["rule"],
                f"`{row['tensor']}`" if row["tensor"] else "the run",
                "not found" if after is None else str(after),
                f"{change}: {healed}" if change else "",
            ]
        )
    about = prose(
        f"A model of three layers on a CPU, 14 steps, recorded in each ({result['environment']['date']}). A layer "
        "without gradients and a NaN are no matter of FP8, and have no change to try."
    )
    header = "failure | recipe | rule | tensor named | steps after it began | change"
    return f"{about}\n\n{markdown(header, rows)}"
