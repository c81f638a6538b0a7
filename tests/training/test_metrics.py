"""metrics.jsonl: rows come back, half a last line is left out, a damaged line is named."""

from pathlib import Path

import pytest

from te_models.errors import DataError
from te_models.training.metrics import MetricsLog, read_metrics


def test_rows_come_back_without_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 0.5})
    log.close()
    path.write_text(path.read_text() + '{"step": 4')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    MetricsLog(path, after_step=2).close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", [b"{", b"3", b"{}", b'{"step": null}', b"\xff", b"", b'{"step": NaN}', b"[" * 100_000])
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2") as caught:
        MetricsLog(path, after_step=9)
    assert "\n" not in str(caught.value) and b'"step": 3' in path.read_bytes()
