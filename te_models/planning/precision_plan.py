"""Which layer runs in what, on which engine, and why: a table that prints."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("layer", "module", "gemm", "precision", "engine", "reason")


@dataclass(frozen=True)
class PlanRow:
    """One te.Linear: `gemm` is "in -> out" features, `precision` "BF16" or the FP8 formats, forward/backward."""

    layer: str
    module: str
    gemm: str
    precision: str
    engine: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The rows of a model, in order of execution. Iterates over PlanRow; prints as a table."""

    title: str
    rows: tuple[PlanRow, ...]

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, precision: str) -> int:
        """How many linears run in "BF16", or below it ("FP8")."""
        bf16 = sum(row.precision == "BF16" for row in self.rows)
        return bf16 if precision == "BF16" else len(self.rows) - bf16

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, overflow="fold")
        for row in self.folded():
            style = "" if row[3] == "BF16" else "green"
            table.add_row(*row, style=style)
        return table

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=140, no_color=True).print(self)
        return out.getvalue().rstrip()

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain JSON values."""
        return [dict(row.__dict__) for row in self.rows]

    def folded(self) -> Iterator[tuple[str, ...]]:
        """Rows that differ in the layer alone, as one row with a range of layers."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            groups.setdefault((row.module, row.gemm, row.precision, row.engine, row.reason), []).append(row.layer)
        for rest, layers in groups.items():
            yield (layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1]}", *rest)
