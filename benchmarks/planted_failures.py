"""Plant failures of FP8 training into tiny runs, and see what record, advice and the advised change make of them.

    python benchmarks/planted_failures.py [--out RESULT.json] [--screenshot FILE.png]

Each failure (tests/planted.py) runs under each recipe, and where it shows, with the advised change. The result says
which tensor is named, in which step after the failure began, whether the rule still finds it after the change, and
which recipe the record speaks for. With --screenshot, a Chromium draws the report of one of the runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from te_models.inspect.advice import diagnose
from te_models.inspect.environment import environment
from te_models.inspect.recipe_advice import advise_recipe
from te_models.inspect.record_report import write_report
from te_models.inspect.run_facts import read_facts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from planted import BEGIN, FAILURES, NATIVE_RECIPES, run_planted  # noqa: E402

# The steps in which failures begin that are not planted in step BEGIN.
BEGUN = {"stale-scale": 3, "uncalibrated": 1, "learning-rate": 1}
SHOWN = "gradients overflow E5M2"


def try_failure(name: str, recipe: str, folder: Path) -> dict[str, Any]:
    """Return what the advice says about a run with a failure, and about one with the advised change."""
    failure = FAILURES[name]
    run = run_planted(folder / "ill", recipe, failure)
    found = [one for one in diagnose(read_facts(run)).findings if one.rule == failure.rule]
    row: dict[str, Any] = dict(failure=name, recipe=recipe, rule=failure.rule, tensor="", step=None)
    if found:
        row |= dict(tensor=found[0].tensor, step=found[0].step, message=found[0].message)
        row["steps_after"] = found[0].step - BEGUN.get(failure.rule, BEGIN)
    advice = advise_recipe(run)
    row["advised"] = advice.recipe.name
    row["advised_precision"] = dict(advice.recipe.precision)
    if found and any(failure.heal):
        healed = diagnose(read_facts(run_planted(folder / "healed", recipe, failure, healed=True)))
        row["change"] = {**failure.heal[0], **failure.heal[1]}
        row["healed"] = failure.rule not in {one.rule for one in healed.findings}
    return row


def screenshot(folder: Path, file: Path) -> None:
    """Draw the report of a run with a failure."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("there is no Chromium for --screenshot")
    run = run_planted(folder / "overflow", "delayed", FAILURES[SHOWN])
    page = write_report(run, read_facts(run))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--window-size=1200,1040", f"--screenshot={file.resolve()}"]
    subprocess.run([*command, f"{page.as_uri()}#row=11&column=6"], check=True, capture_output=True)


def main() -> None:
    """Run the failures, print a line each, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--screenshot", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in FAILURES:
            for recipe in NATIVE_RECIPES:
                row = try_failure(name, recipe, Path(temporary) / f"{name}-{recipe}")
                rows.append(row)
                after = row.get("steps_after", "not found")
                console.print(f"{name}, {recipe}: {row['tensor']} {after} {row.get('healed', '')}")
        if options.screenshot:
            screenshot(Path(temporary), options.screenshot)
    if options.out:
        result = dict(environment=environment(), rows=rows)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
