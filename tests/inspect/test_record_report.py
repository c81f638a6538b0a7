"""The report of a record: its data, and what a browser draws of it."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from planted import FAILURES, run_planted

from te_models.cli import main
from te_models.inspect import record_report
from te_models.inspect.advice import RULES, diagnose
from te_models.inspect.record_report import WorstTensors, report_data, write_report
from te_models.inspect.run_facts import read_facts

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
NOT_COUNTED = (236, 238, 240)
LIGHT, DARK = (239, 246, 255), (8, 48, 107)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "<run> & 'co'"
    return run_planted(folder, "delayed", FAILURES["gradients overflow E5M2"])


def data_of(run: Path) -> dict[str, Any]:
    facts = read_facts(run)
    return report_data(facts, diagnose(facts), "title")


def grid_of(data: dict[str, Any], key: str) -> np.ndarray:
    statistic = next(one for one in data["stats"] if one["key"] == key)
    values = np.frombuffer(base64.b64decode(statistic["values"]), "<f4")
    return values.reshape(len(data["rows"]), len(data["columns"]))


def test_the_data_are_those_of_the_record(run: Path) -> None:
    facts, data = read_facts(run), data_of(run)
    shown = np.flatnonzero(facts.record.counted.any(0))
    assert [row["name"] for row in data["rows"]] == [facts.tensors[i].name for i in shown]
    assert data["columns"] == [[step, step] for step in facts.record.steps]
    expected = facts.record.share("saturated")[:, shown].T
    assert np.allclose(grid_of(data, "saturated"), expected, equal_nan=True)
    assert grid_of(data, "saturated").max() > 0.5
    assert data["findings"][0]["rule"] == "gradient-overflow"
    assert len(data["metrics"]["loss"]) == len(facts.rows)


@pytest.mark.parametrize("columns", [1, 3, 5, 14])
def test_many_steps_share_columns_by_the_worst(
    columns: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = data_of(run)
    monkeypatch.setattr(record_report, "MOST_COLUMNS", columns)
    data = data_of(run)
    assert len(data["columns"]) == columns
    assert data["columns"][0][0] == 1 and data["columns"][-1][1] == 14
    for key, worst in (("saturated", np.fmax), ("sqnr", np.fmin)):
        start = 0
        for place, (first, last) in enumerate(data["columns"]):
            part = grid_of(whole, key)[:, start : start + last - first + 1]
            assert np.array_equal(grid_of(data, key)[:, place], worst.reduce(part, axis=1), True)
            start += last - first + 1


def test_many_experts_share_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_planted(tmp_path, "current", FAILURES["NaN in one expert"])
    assert any(".experts.2." in row["name"] for row in data_of(run)["rows"])
    monkeypatch.setattr(record_report, "MOST_ROWS", 10)
    data = data_of(run)
    names = [row["name"] for row in data["rows"]]
    assert len(names) == len(set(names)) and not any(".experts." in name for name in names)


def test_one_nan_is_seen_beside_thousands(tmp_path: Path) -> None:
    """The first NaN is a single value, and what follows from it whole tensors."""
    run = run_planted(tmp_path, "current", FAILURES["NaN in one linear"])
    data = data_of(run)
    statistic = next(one for one in data["stats"] if one["key"] == "nonfinite")
    counts = grid_of(data, "nonfinite")
    names = [row["name"] for row in data["rows"]]
    assert counts[names.index("layers.1.mlp.down_proj.weight"), 5] == 1 and counts.max() > 1000
    seen = [expected_color(statistic, float(count)) for count in (0, 1, counts.max())]
    # Each is a third of the way from white or more apart.
    assert seen[0] == LIGHT and seen[2] == DARK and seen[0][0] - seen[1][0] > 70


def test_the_page_needs_no_network_and_no_name_ends_its_script(run: Path) -> None:
    page = write_report(run, read_facts(run)).read_text()
    assert not re.search(r"(src|href)=|https?://|@import|fetch\(", page)
    assert page.count("</script>") == 2 and "\\u003crun>" in page


def test_the_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "share saturated" in shown and "page.html" in shown
    assert (tmp_path / "page.html").exists()
    worst = WorstTensors(read_facts(run)).to_dict()["worst"]
    assert worst[0]["worst"] == max(row["worst"] for row in worst if row["unit"] == "")
    assert main(["report", str(tmp_path)]) == 2
    assert "has no record" in capsys.readouterr().err


def expected_color(statistic: dict[str, Any], value: float) -> tuple[int, ...]:
    """The color of a value, as the page promises: a ramp from light to dark, grey where nothing was counted."""
    if math.isnan(value):
        return NOT_COUNTED
    if statistic["log"]:
        value = math.log10(value) if value > 0 else statistic["low"]
    share = (value - statistic["low"]) / ((statistic["high"] - statistic["low"]) or 1)
    share = min(1.0, max(0.0, share))
    if statistic["reversed"]:
        share = 1 - share
    return tuple(round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("key", ["saturated", "sqnr", "amax"])
def test_a_browser_draws_the_map_that_the_data_say(key: str, run: Path, tmp_path: Path) -> None:
    page = write_report(run, read_facts(run), tmp_path / "page.html")
    data = data_of(run)
    # The page opens with the statistic that shows the first finding.
    assert data["opens"] == "saturated"
    address = page.as_uri() if key == data["opens"] else f"{page.as_uri()}#stat={key}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--force-device-scale-factor=1", "--window-size=1240,1600"]
    options += [f"--user-data-dir={tmp_path / 'profile'}"]
    assert CHROMIUM is not None
    picture = tmp_path / "picture.png"
    # One start for both: the picture, and the page as its script has made it.
    command = [CHROMIUM, *options, f"--screenshot={picture}", "--dump-dom", address]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "gradient-overflow" in shown and "Try: --recipe current" in shown
    left, cell, row = (
        float(re.search(rf'data-{name}="([\d.]+)"', shown)[1])  # type: ignore[index]
        for name in ("left", "cell", "row")
    )
    statistic = next(one for one in data["stats"] if one["key"] == key)
    grid = grid_of(data, key)
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    colors = [[expected_color(statistic, float(v)) for v in line] for line in grid]
    # The map lies where its first column of cells has the expected colors, one below the other.
    middle = [int(left + cell * (j + 0.5)) for j in range(grid.shape[1])]
    height = pixels.shape[0] - int(row * len(grid))
    here = np.ones((height, 80), dtype=bool)
    for i in range(len(grid)):
        for j in (0, len(middle) - 1):
            below = pixels[int(row * i) : int(row * i) + height, middle[j] : middle[j] + 80]
            here &= (below == colors[i][j]).all(-1)
    found = [(x, y) for x, y in np.argwhere(here.T)]
    assert found, "no place of the page has the colors of the first and the last step"
    x, y = found[len(found) // 2]
    for i, line in enumerate(colors):
        for j, color in enumerate(line):
            assert tuple(pixels[y + int(row * i), x + middle[j]]) == color, (i, j)
    assert len({color for line in colors for color in line}) > 5


def test_a_page_of_a_run_without_metrics_or_events(tmp_path: Path) -> None:
    run = run_planted(tmp_path, "current", None)
    (run / "metrics.jsonl").unlink()
    page = write_report(run, read_facts(run)).read_text()
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["opens"] == "sqnr"  # nothing was found
    assert data["metrics"] == {"steps": [], "loss": [], "grad_norm": []} and not data["events"]


def test_each_rule_names_a_statistic_of_the_page() -> None:
    assert {rule.shown_by for rule in RULES} <= {one.key for one in record_report.STATISTICS}
