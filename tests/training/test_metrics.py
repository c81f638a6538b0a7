"""metrics.jsonl: rows come back, half a last line is left out, a damaged line is named before a run goes on."""

import errno
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from te_models.errors import DataError, SaveError
from te_models.training.metrics import MetricsLog, read_metrics
from te_models.training.plots import plot_run


def row(step: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 0.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens_per_second": 9.0,
        **changes,
    }


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in row(2).items() if key != name}


def test_rows_come_back_without_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write(row(step))
    log.close()
    path.write_text(path.read_text() + '{"step": 4')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    MetricsLog(path, after_step=2).close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def event(step: int, action: str) -> dict[str, Any]:
    return {"step": step, "event": "nonfinite", "action": action}


@pytest.mark.parametrize(
    ("after_step", "kept"),
    [
        (0, []),  # begun anew
        (2, [1, 2, "stop"]),  # of a checkpoint from before the steps that were taken back
        (3, [1, 2, "rewind", 3, "stop"]),
        (4, [1, 2, "rewind", 3, 4, "stop"]),
    ],
)
def test_a_resumed_run_keeps_the_events_of_its_history(
    after_step: int, kept: list[int | str], tmp_path: Path
) -> None:
    """A return from step 5 to step 2, two steps that were taken again, a skipped step, and the end of the run."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    actions = [row(1), row(2), event(5, "rewind"), row(3), row(4), event(5, "skip"), event(6, "stop")]  # fmt: skip
    for action in actions:
        log.write(action)
    log.close()
    MetricsLog(path, after_step=after_step).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one.get("action", one["step"]) for one in rows] == kept


LINES = [b"{", b"3", b"{}", b"\xff", b"", b"[" * 100_000, b'{"step": 1, "step": 1}']
VALUES = [
    *(("step", value) for value in (None, True, "2", -1, 2.0, 2**62, math.nan)),
    *(("loss", value) for value in ("0.5", math.nan, True, [1])),
    *(("learning_rate", value) for value in (None, math.inf, {})),
    *(("tokens_per_second", value) for value in ([1], 10**400, math.nan)),
    *(("eval_loss", value) for value in ("1", math.inf, None)),
]
LINES += [json.dumps(row(**{"step": 2, name: value})).encode() for name, value in VALUES]
LINES += [
    json.dumps(without(name)).encode()
    for name in ("step", "loss", "learning_rate", "tokens_per_second")
]


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, third = (json.dumps(row(step)).encode() for step in (1, 3))
    path.write_bytes(first + b"\n" + line + b"\n" + third + b"\n")
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2") as caught:
        MetricsLog(path, after_step=9)
    assert len(str(caught.value)) < 500 and b'"step": 3' in path.read_bytes()


def test_rows_that_are_read_can_be_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, odd = (
        tmp_path / "metrics.jsonl",
        dict(grad_norm="?", eval_loss=math.nan, loss=-1e29, tokens_per_second=0),
    )
    rows = [
        row(0),
        *(row(n, **{name: odd[name]}) for n, name in enumerate(odd, 2)),
        row(2**61, learning_rate=1e29),
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    plot_run(tmp_path / "loss.png", read_metrics(path), "a run")
    assert (tmp_path / "loss.png").stat().st_size > 1000


class Full(io.StringIO):
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.close()
    monkeypatch.setattr(log, "file", Full())
    with pytest.raises(SaveError, match=r"metrics\.jsonl: .*No space left"):
        log.write({"step": 1})
