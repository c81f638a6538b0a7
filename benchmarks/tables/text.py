"""Helpers of the tables: results, Markdown, and the register of all tables."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
GIB = 2**30
COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight"}
TABLES: dict[str, Callable[[], str]] = {}


def table(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function under its name, with hyphens, as the writer of a generated block."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def load(name: str) -> dict[str, Any]:
    """Return the content of a file in benchmarks/results/, named without its suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; `header` has its columns separated by "|"."""
    columns = [column.strip() for column in header.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prose(text: str) -> str:
    """Wrap one paragraph."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def measured_on(result: dict[str, Any]) -> str:
    """Return one sentence with the machine, versions and date of a result."""
    where = result["environment"]
    count = COUNTS[result.get("gpus", 1)]
    parts = [
        where.get("gpu") and f"{count} {where['gpu']}",
        f"torch {where['torch'].split('+')[0]}",
    ]
    # Some kernels are measured without it.
    if "gpu" in where and "transformer-engine" in where:
        parts.append(f"Transformer Engine {where['transformer-engine']}")
    return f"Measured on {', '.join(filter(None, parts))}, {where['date']}."
