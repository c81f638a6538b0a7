"""metrics.jsonl: one JSON object per training step, and one per event (docs/internals/recorder.md)."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from te_models.errors import DataError, SaveError
from te_models.files.atomic import replace_text, reraising
from te_models.files.formats import open_regular, parse_json
from te_models.training.check_state import COUNT_LIMIT
from te_models.training.timing import Row

MAX_LINE_BYTES = 2**16
PLOTTED = ("loss", "learning_rate", "tokens_per_second")  # numbers that each row has
EVENT = "event"  # the key that only rows about events have
STOP = "stop"  # the action of an event that ended the run
# A bound for numbers in the file: no metric is as large, and a plot can still compute with it.
LARGEST = 1e30


class MetricsLog:
    """The file metrics.jsonl of a run, written line by line.

    Args:
        path: of the file; None: nothing is written, as on every process of a run except the first.
        after_step: the step after which a resumed run goes on. Rows of later steps are dropped, since it takes these
            steps again; of events those that the state of this step does not know. 0: a run that begins anew.

    Raises:
        DataError: the file is there and has a damaged line.
        SaveError: it cannot be written.
    """

    def __init__(self, path: Path | None, after_step: int = 0) -> None:
        self.path = path
        self.file: TextIO | None = None
        if path is not None:
            rows = _read_rows(path) if path.exists() else []
            self._restart(path, _rows_until(rows, after_step))

    def drop_after(self, step: int) -> None:
        """Drop the rows of the steps after `step`, which the run takes once more, but not those about events."""
        if self.path is not None:
            rows = _read_rows(self.path)
            self.close()
            self._restart(self.path, [row for row in rows if row["step"] <= step or EVENT in row])

    def _restart(self, path: Path, rows: list[Row]) -> None:
        """Begin the file anew with these rows."""
        # A kill while rows are dropped leaves the old file or the new one, and never a part.
        replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        # A buffer of one line: each row is in the file when its step ends, for whoever watches it.
        self.file = path.open("a", buffering=1)

    def write(self, row: Mapping[str, object]) -> None:
        """Append the metrics of one step, which include "step"."""
        if self.file is not None and self.path is not None:
            with reraising(self.path, OSError, error=SaveError):
                self.file.write(json.dumps(dict(row)) + "\n")

    def close(self) -> None:
        """Close the file; nothing is written after that."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _rows_until(rows: list[Row], step: int) -> list[Row]:
    """Return the rows of a run's history up to the state of `step`."""
    kept: list[Row] = []
    followed = False
    # From the end: an event belongs to the history of the state if a step of that history comes after it.
    for row in reversed(rows):
        # What ended the run is no step that is taken again: without its row nobody would know why it was resumed.
        ended = bool(step) and row.get("action") == STOP
        if row["step"] <= step or (EVENT in row and (followed or ended)):
            kept.append(row)
            followed = followed or EVENT not in row
    return kept[::-1]


def read_metrics(path: str | Path) -> list[Row]:
    """Return the rows of the steps of a metrics.jsonl, except an incomplete last line after a kill."""
    return [row for row in _read_rows(path) if EVENT not in row]


def read_events(path: str | Path) -> list[Row]:
    """Return the rows about events: what a guard did about a step (te_models.training.guard)."""
    return [row for row in _read_rows(path) if EVENT in row]


def _read_rows(path: str | Path) -> list[Row]:
    """Return all complete rows of a metrics.jsonl; a DataError names the line that is none."""
    rows = []
    descriptor, _ = open_regular(Path(path), error=DataError)
    with open(descriptor, "rb") as file:
        lines = iter(functools.partial(file.readline, MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            # The last line of a run that was killed while it wrote.
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                break
            # NaN and infinity are legal here: a run that diverges writes them.
            row = parse_json(line, f"{path}, line {number}", DataError, finite=False)
            if reason := _mistake(row):
                raise DataError(
                    f"{path}, line {number}: this is no row of metrics: {reason}; delete the line to go on"
                )
            rows.append(row)
    return rows


def _mistake(row: object) -> str:
    """Return why a parsed line is no row of metrics that can be plotted, or ""."""
    step = row.get("step") if isinstance(row, dict) else None
    # type() and not isinstance(): True is an int as well.
    if not isinstance(row, dict) or type(step) is not int or not 0 <= step < COUNT_LIMIT:
        return "it must be an object with a step"
    if EVENT in row:
        return "" if isinstance(row[EVENT], str) else "its event is no text"
    for name in PLOTTED:
        if name not in row:
            return f"it lacks {name}"
        # "not <" and not ">=", so that a NaN is refused too.
        if type(row[name]) not in (int, float) or not abs(row[name]) < LARGEST:
            return f"its {name} is not a number"
    eval_loss = row.get("eval_loss", 0.0)
    # It may be NaN: evaluation data of which no token counts.
    if type(eval_loss) not in (int, float) or abs(eval_loss) >= LARGEST:
        return "its eval_loss is not a number"
    return ""
