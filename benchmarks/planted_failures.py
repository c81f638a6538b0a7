"""Plant failures of FP8 training into tiny runs, and see what record, advice and the advised change make of them.

    python benchmarks/planted_failures.py [--alone 80] [--together 60] [--out RESULT.json] [--screenshot FILE.png]

Each failure (tests/planted.py) runs under each recipe, and where it shows, with the advised change. The result says
which tensor is named, in which step after the failure began, whether the rule still finds it after the change, and
which recipe the record speaks for. Then as many cases are drawn at random (tests/planted_kinds.py) of other kinds of
models, in one process and in two: a kind, a failure, a recipe, a place, and the way in which two processes share the
run. With --screenshot, a Chromium draws the report of one of the runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from te_models.inspect.advice import diagnose
from te_models.inspect.environment import environment
from te_models.inspect.recipe_advice import advise_recipe
from te_models.inspect.record_report import write_report
from te_models.inspect.run_facts import read_facts
from te_models.training.parallel import Parallel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import plain_numbers  # noqa: E402
from distributed_job import start  # noqa: E402
from planted import FAILURES, NATIVE_RECIPES, heals, run_planted  # noqa: E402
from planted_kinds import PROCESSES, Case, draw, fault_of, run_case  # noqa: E402

SHOWN = "gradients overflow E5M2"


def try_failure(name: str, recipe: str, folder: Path) -> dict[str, Any]:
    """Return what the advice says about a run with a failure, and about one with the advised change."""
    failure = FAILURES[name]
    run = run_planted(folder / "ill", recipe, failure)
    found = [one for one in diagnose(read_facts(run)).findings if one.rule == failure.rule]
    row: dict[str, Any] = dict(failure=name, recipe=recipe, rule=failure.rule, tensor="", step=None)
    if found:
        row |= dict(tensor=found[0].tensor, step=found[0].step, message=found[0].message)
        row["steps_after"] = found[0].step - failure.begun
    advice = advise_recipe(run)
    row["advised"] = advice.recipe.name
    row["advised_precision"] = dict(advice.recipe.precision)
    if found and any(failure.heal):
        run_planted(folder / "healed", recipe, failure, healed=True)
        row["change"] = {**failure.heal[0], **failure.heal[1]}
        row["healed"] = heals(folder / "healed", failure)
    return row


def case_row(case: Case, folder: Path) -> dict[str, Any]:
    """Return a case that has run, and what is wrong with the record, the advice or the change; "" for nothing."""
    fault = fault_of(case, folder)
    return dict(
        model=case.model,
        failure=case.failure,
        recipe=case.recipe,
        processes=case.processes,
        place=case.site.name,
        fault=fault,
    )


def alone(count: int, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Run cases in this process."""
    torch.set_num_threads(1)
    rows = []
    with plain_numbers.plain():
        for seed in range(count):
            case = draw(random.Random(seed), "one")
            run_case(Parallel(), folder / str(seed), case)
            rows.append(case_row(case, folder / str(seed)))
            console.print(f"{case}: {rows[-1]['fault'] or 'named'}")
    return rows


def in_two(shared: Parallel, root: Path, case: Case, name: str) -> dict[str, Any]:
    """Run a case in this process's share of it."""
    run_case(shared, root / name, case)
    return {}


def together(count: int, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Run cases in two processes, which share them in each way by turns."""
    ways = PROCESSES[1:]
    cases = {str(seed): draw(random.Random(seed), ways[seed % len(ways)]) for seed in range(count)}
    jobs = {name: partial(in_two, case=case, name=name) for name, case in cases.items()}
    found = start(folder, 2, jobs)
    rows = []
    for name, case in cases.items():
        assert found[name] == {}
        rows.append(case_row(case, folder / name))
        console.print(f"{case}: {rows[-1]['fault'] or 'named'}")
    return rows


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
    parser.add_argument("--alone", type=int, default=80, help="cases of other kinds in one process")
    parser.add_argument("--together", type=int, default=60, help="the same in two")
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
        cases = alone(options.alone, Path(temporary) / "alone", console)
        shared = Path(temporary) / "together"
        shared.mkdir()
        cases += together(options.together, shared, console)
        if options.screenshot:
            screenshot(Path(temporary), options.screenshot)
    if options.out:
        result = dict(environment=environment(), rows=rows, cases=cases)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
