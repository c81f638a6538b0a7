"""The report of a recorded run: one HTML file with a heat map of every statistic, which needs no network."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from te_models.errors import SaveError
from te_models.files.atomic import replace_text, reraising
from te_models.inspect.advice import RULES, Diagnosis, diagnose
from te_models.inspect.run_facts import RunFacts
from te_models.planning.printable import Printable
from te_models.recorder.record import FOLDER, Floats, Record

TEMPLATE = Path(__file__).with_name("record_page.html")
FILE = "report.html"  # in the folder record/ of a run
MOST_COLUMNS = 400  # of the map: recorded steps, or the worst of several
MOST_ROWS = 3000  # beyond them, experts of a linear share a row
LEAST_SHARE = 1e-6  # the light end of the scale of shares


@dataclass(frozen=True)
class Statistic:
    """A statistic of the report.

    Attributes:
        key: its name in the data of the page.
        label: its name for people.
        values: a function from a record to the statistic, [steps, tensors].
        unit: shown behind a value; "": none.
        kind: "share" of the elements, "count" of them, or "number".
        log: whether the colors follow the logarithm.
        worst: np.fmax or np.fmin, whichever gives the worse value where a cell holds several steps or experts.
    """

    key: str
    label: str
    values: Callable[[Record], Floats]
    unit: str = ""
    kind: str = "number"
    log: bool = False
    worst: Any = np.fmax


STATISTICS = (
    Statistic(
        key="saturated",
        label="share saturated",
        values=lambda record: record.share("saturated"),
        kind="share",
        log=True,
    ),
    Statistic(
        key="flushed",
        label="share flushed to zero",
        values=lambda record: record.share("flushed"),
        kind="share",
        log=True,
    ),
    Statistic(
        key="subnormal",
        label="share subnormal",
        values=lambda record: record.share("subnormal"),
        kind="share",
        log=True,
    ),
    Statistic(
        key="sqnr",
        label="SQNR of the cast",
        values=lambda record: record.sqnr(),
        unit="dB",
        worst=np.fmin,
    ),
    Statistic(key="amax", label="amax", values=lambda record: record.field("amax"), log=True),
    Statistic(
        key="amax_between",
        label="largest amax since the step recorded before",
        values=lambda record: record.field("amax_between"),
        log=True,
    ),
    Statistic(
        key="scale",
        label="scale",
        values=lambda record: record.field("scale_min"),
        log=True,
        worst=np.fmin,
    ),
    Statistic(
        key="scale_age",
        label="age of the scale",
        values=lambda record: record.field("scale_age"),
        unit="steps",
    ),
    Statistic(
        key="nonfinite",
        label="NaN or infinite values",
        values=lambda record: record.field("nonfinite"),
        kind="count",
        log=True,
    ),
    Statistic(
        key="block_spread",
        label="spread of log2(scale) over blocks",
        values=lambda record: record.block_spread(),
    ),
)


def report_data(facts: RunFacts, diagnosis: Diagnosis, title: str) -> dict[str, Any]:
    """Return the data of the page as plain JSON values."""
    record = facts.record
    shown = np.flatnonzero(record.counted.any(0))
    groups, rows = _rows(record, shown)
    columns = _columns(len(record.steps))
    statistics = []
    for statistic in STATISTICS:
        values = statistic.values(record)
        if statistic.key == "amax_between" and np.isnan(values).all():
            continue  # each step is recorded, or no scale has a history
        grid = _folded(values, groups, columns, statistic.worst)
        low, high = _range(grid, statistic)
        statistics.append(
            {
                "key": statistic.key,
                "label": statistic.label,
                "unit": statistic.unit,
                "kind": statistic.kind,
                "log": statistic.log,
                "reversed": statistic.worst is np.fmin and statistic.key == "sqnr",
                "low": low,
                "high": high,
                # Numbers as text would take four times the bytes; the page decodes little-endian FP32.
                "values": base64.b64encode(grid.astype("<f4").tobytes()).decode(),
            }
        )
    steps = record.steps
    return {
        "title": title,
        "about": f"recipe {facts.recipe.name}, {len(steps)} recorded steps, {len(shown)} tensors",
        "columns": [[steps[part.start], steps[part.stop - 1]] for part in columns],
        "rows": rows,
        "stats": statistics,
        "opens": _first_shown(diagnosis),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "events": [_event(row) for row in facts.events],
        "metrics": {
            "steps": [row["step"] for row in facts.rows],
            "loss": [_finite(row.get("loss")) for row in facts.rows],
            "grad_norm": [_finite(row.get("grad_norm")) for row in facts.rows],
        },
    }


def _first_shown(diagnosis: Diagnosis) -> str:
    """Return the key of the statistic that the page opens with: the one that shows its first finding."""
    if not diagnosis.findings:
        return "sqnr"
    return next(rule.shown_by for rule in RULES if rule.key == diagnosis.findings[0].rule)


def _rows(record: Record, shown: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return for each row of the map the indices of its tensors, and its names for the page.

    A row is one tensor; in a model of more than MOST_ROWS tensors it is all experts of a linear.
    """
    # Thousands of experts would make a page of many megabytes, and rows thinner than a pixel.
    merge = len(shown) > MOST_ROWS
    members: dict[str, list[int]] = {}
    for place in shown:
        tensor = record.tensors[place]
        name = f"{tensor.linear}.{tensor.operand}" if merge else tensor.name
        members.setdefault(name, []).append(int(place))
    rows = []
    for name, places in members.items():
        first = record.tensors[places[0]]
        rows.append({"name": name, "layer": first.layer, "operand": first.operand})
    return list(members.values()), rows


def _columns(steps: int) -> list[slice]:
    """Return for each column of the map the slice of recorded steps that it shows, for a number of `steps`."""
    count = min(steps, MOST_COLUMNS)
    # As equal as whole steps allow.
    bounds = [round(i * steps / count) for i in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _folded(values: Floats, groups: list[list[int]], columns: list[slice], worst: Any) -> Floats:
    """Return the cells of the map, [rows, columns]: the worst of the values [steps, tensors] that a cell shows."""
    grid = np.full((len(groups), len(columns)), np.nan)
    for i, places in enumerate(groups):
        # The worst and not the mean: one bad expert, or one bad step, must not vanish among good ones.
        rows = worst.reduce(values[:, places], axis=1)
        for j, part in enumerate(columns):
            grid[i, j] = worst.reduce(rows[part])
    return grid


def _range(grid: Floats, statistic: Statistic) -> tuple[float, float]:
    """Return the lowest and the highest value of the color scale; of log10 of the statistic if `log` is set."""
    if statistic.kind == "share":
        # The same scale for every share, so that a color means the same on each map.
        return math.log10(LEAST_SHARE), 0.0
    known = grid[np.isfinite(grid)]
    if statistic.log:
        # A value of 0 has no logarithm; the page gives it the lowest color.
        known = np.log10(known[known > 0])
    if not known.size:
        return 0.0, 1.0
    if statistic.kind == "count":
        # 0 has the lightest color, and 1 a third of the way to the darkest: a single NaN may be the cause of all.
        most = float(known.max())
        return -most / 2 if most else -1.0, most
    return float(known.min()), float(known.max())


def _event(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": row["step"],
        "event": row["event"],
        "action": str(row.get("action", "")),
        "message": str(row.get("message") or row["event"]),
    }


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def render(data: dict[str, Any]) -> str:
    """Return the page."""
    # A name in the data must not end the script that holds it.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", text)


def write_report(run: str | Path, facts: RunFacts, out: str | Path | None = None) -> Path:
    """Write the report of a recorded run; return its file, record/report.html in the run's folder by default.

    Raises:
        SaveError: it cannot be written.
    """
    path = Path(run) / FOLDER / FILE if out is None else Path(out)
    name = Path(run).resolve().name
    page = render(report_data(facts, diagnose(facts), f"FP8 record of {name}"))
    with reraising(path, OSError, error=SaveError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, page)
    return path


@dataclass(frozen=True)
class WorstTensors(Printable):
    """The tensors of a run that stand out by each statistic, for a terminal."""

    facts: RunFacts
    count: int = 5

    def __rich__(self) -> Table:
        """Return a table: statistic, tensor, its worst value and the step of it."""
        table = Table("statistic", "tensor", "worst", "step", box=None, pad_edge=False)
        for row in self.to_dict()["worst"]:
            value = row["worst"]
            shown = f"{value:.1f} {row['unit']}" if row["unit"] else f"{value:.2%}"
            table.add_row(row["statistic"], row["tensor"], shown, str(row["step"]))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        record = self.facts.record
        rows = []
        # Shares and SQNR: of the others a large value need not be bad.
        for statistic in STATISTICS[:4]:
            values = statistic.values(record)
            lowest_is_worst = statistic.worst is np.fmin
            worst = statistic.worst.reduce(values, axis=0)  # [tensors]
            order = np.argsort(worst if lowest_is_worst else -worst)
            known = [int(tensor) for tensor in order if np.isfinite(worst[tensor])]
            for place in known[: self.count]:
                # From here on no tensor shows anything.
                if not lowest_is_worst and worst[place] == 0:
                    break
                column = values[:, place]
                step = int(np.nanargmin(column) if lowest_is_worst else np.nanargmax(column))
                rows.append(
                    {
                        "statistic": statistic.label,
                        "tensor": record.tensors[place].name,
                        "worst": float(worst[place]),
                        "unit": statistic.unit,
                        "step": record.steps[step],
                    }
                )
        return {"worst": rows}
