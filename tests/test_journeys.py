"""The journeys of a user (tests/journeys.py) end as they should: exit code, steps, a falling loss, nothing left behind.

They are walked several at a time before the first test. TE_MODELS_JOBS says how many; TE_MODELS_RESULTS is a file for
the results, such as benchmarks/results/journeys_h200.json. With TE_MODELS_DRY_RUN=1 the models are tiny and run on a
CPU: does the table itself work?
"""

import json
import os
from pathlib import Path
from typing import Any

import journey_table
import journeys
import pytest
from places import DRY_RUN

JOBS = int(os.environ.get("TE_MODELS_JOBS", 10))


@pytest.fixture(scope="module")
def walked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """A row of results for each journey that was selected."""
    tests = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_a_journey"
    ]
    wanted = [item.callspec.params["name"] for item in tests]
    path = os.environ.get("TE_MODELS_RESULTS")
    return journeys.walk(
        wanted, tmp_path_factory.mktemp("journeys"), JOBS, DRY_RUN, Path(path) if path else None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", journeys.JOURNEYS)
def test_a_journey(name: str, walked: dict[str, dict[str, Any]]) -> None:
    if reason := journeys.obstacle(name, DRY_RUN):
        pytest.skip(reason)
    row = walked[name]
    assert not row["problems"], f"{name}: {'; '.join(row['problems'])}\n{row['output']}"


@pytest.mark.slow
def test_the_table_works_on_a_cpu(tmp_path: Path) -> None:
    rows = journeys.walk(["delayed", "kill"], tmp_path, jobs=2, tiny=True)
    assert {name: row["problems"] for name, row in rows.items()} == {"delayed": [], "kill": []}
    assert rows["kill"]["codes"] == [-9, 0] and len(rows["kill"]["commands"]) == 2
    journeys.write(tmp_path / "rows.json", rows, 2)
    assert json.loads((tmp_path / "rows.json").read_text())["journeys"].keys() == rows.keys()


@pytest.mark.slow
def test_a_failed_journey_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = journey_table.train("--recipe nonsense")
    monkeypatch.setitem(journeys.JOURNEYS, "wrong", wrong)
    monkeypatch.setitem(journeys.JOURNEYS, "wrong", wrong)
    row = journeys.walk(["wrong"], tmp_path, jobs=1, tiny=True)["wrong"]
    assert "exit codes [2] instead of [0]" in row["problems"] and "nonsense" in row["output"]
    assert row["output"].startswith("$ ") and not list(tmp_path.iterdir())
