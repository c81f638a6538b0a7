"""Journeys of a user at the command line, as a table: default flags, real shapes, expected results.

A journey is a few commands, one after the other, in a folder of its own; several journeys run at a time. The table is
in tests/journey_table.py, and tests/test_journeys.py asserts what `problems` finds. A new feature adds a row.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from journey_data import write_records
from journey_table import BASE, JOURNEYS, ROOT, SMALL_TEXTS, TINY, TINY_DENSE

from te_models.inspect.environment import environment
from te_models.training.metrics import read_metrics

MARK = "TE_MODELS_JOURNEY"  # in the environment of all processes of a journey
SECONDS = 240  # a command may take
PLACES = dict(
    out="run",
    again="again",
    served="served",
    model="model",
    texts="texts.jsonl",
    chats="chats.jsonl",
)
PLACES |= dict(pairs="pairs.csv")


class Walk:
    """A journey that runs, in a folder of its own."""

    def __init__(self, name: str, folder: Path, tiny: bool = False) -> None:
        self.name, self.journey, self.tiny = name, JOURNEYS[name], tiny
        self.folder, self.mark = folder / name, f"{folder.name}-{name}-{os.getpid()}"
        self.places = {name: str(self.folder / place) for name, place in PLACES.items()}
        self.said: list[str] = []  # a command and its output each
        self.codes: list[int | None] = []

    def command(self, template: str) -> list[str]:
        """Return the command to execute."""
        words = shlex.split(template.format(**self.places))
        if self.tiny and "python-docs" in words:  # more texts than a test has time for
            at = words.index("python-docs")
            del words[at - 1 : at + 1]
        if self.tiny and {"pretrain", "finetune"} & set(words):
            if "--preset" in words:
                small = {"gated-hybrid-nano", "gated-moe-nano"} & set(words)
                words += shlex.split(TINY if small else f"{TINY_DENSE} {TINY}")
            elif "--model" in words:
                words += shlex.split("--device cpu --engine emulated")
                words += shlex.split(
                    "--batch-size 2 --eval-batches 1" if "--data" in words else "--seq-len 32"
                )
            if "--data" not in words and {"--preset", "--model"} & set(
                words
            ):  # a run.toml has all of it
                words += shlex.split(SMALL_TEXTS)
        elif self.tiny and words[0].startswith("examples/"):
            words += shlex.split(f"--seq-len 32 --batch-size 4 {SMALL_TEXTS}")
        elif self.tiny:
            words += (
                ["--tiny"]
                if words[0].startswith("tests/")
                else ["--device", "cpu", "--engine", "emulated"]
            )
        return [sys.executable, *words]

    def environment(self) -> dict[str, str]:
        """The processes' own folder for temporary files, shared caches of compilers,
        and a log of what the run decides."""
        caches = Path(tempfile.gettempdir())
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        write_records(self.folder)
        (self.folder / "log").mkdir(exist_ok=True)
        (self.folder / "log" / "sitecustomize.py").write_text(
            "import logging\nlogging.basicConfig()\nlogging.getLogger('te_models').setLevel('INFO')\n"
        )
        path = [str(self.folder / "log"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            MARK: self.mark,
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join(path),
        }
        shared = dict(
            OMP_NUM_THREADS="1",
            TORCHINDUCTOR_COMPILE_THREADS="2",
            COLUMNS="200",
            HF_HUB_OFFLINE="1",
        )
        shared |= dict(TORCHINDUCTOR_CACHE_DIR=str(caches / "te_models_inductor"))
        shared |= dict(TRITON_CACHE_DIR=str(caches / "te_models_triton"))
        return {**shared, **os.environ, **own}

    def go(self) -> dict[str, Any]:
        """Run the commands, until one fails; returns the row of the results."""
        start, env = time.perf_counter(), self.environment()
        for number, template in enumerate(self.journey.commands):
            command = self.command(template)
            log = self.folder / f"{number}.log"
            with log.open("w") as file:
                streams: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=file, stderr=file)
                job: subprocess.Popen[bytes] = subprocess.Popen(
                    command, cwd=ROOT, env=env, start_new_session=True, **streams
                )
                assert job.stdin is not None
                with job.stdin as typed, contextlib.suppress(BrokenPipeError):
                    typed.write(self.journey.typed.encode() if "chat" in command else b"")
                killed = number == 0 and bool(self.journey.killed) and self.kill(job)
                try:
                    self.codes.append(job.wait(SECONDS))
                except subprocess.TimeoutExpired:
                    self.codes.append(None)
                    end(self.mark)
            self.said.append(f"$ {shlex.join(command)}\n{log.read_text(errors='replace')}")
            if killed and self.journey.killed == "all":
                end(self.mark)
            elif self.codes[-1] != 0:
                break
        row = self.row() | dict(seconds=round(time.perf_counter() - start, 1))
        shutil.rmtree(self.folder)
        return row

    def kill(self, job: subprocess.Popen[bytes]) -> bool:
        """SIGKILL for the run's first command or, of several processes, for the last one, once it has saved."""
        latest, deadline = (
            Path(self.places["out"]) / "checkpoints" / "latest",
            time.time() + SECONDS,
        )
        while not latest.exists() and job.poll() is None and time.time() < deadline:
            time.sleep(0.02)
        if job.poll() is not None:
            return False
        if self.journey.killed == "all":
            end(self.mark, wait=0)
            return True
        workers = [pid for pid in marked(self.mark) if variable(pid, "LOCAL_RANK") == "1"]
        os.kill(min(workers), signal.SIGKILL)  # the oldest: its children end with it
        return True

    def row(self) -> dict[str, Any]:
        """Return the row of results; `problems` is empty if all is well."""
        said = "\n".join(self.said)
        rows = self.losses()
        losses = [row["loss"] for row in rows]
        found: dict[str, Any] = dict(
            commands=list(self.journey.commands[: len(self.said)]), codes=self.codes
        )
        found |= dict(
            steps=len(rows),
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
        )
        speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        found["tokens_per_second"] = round(statistics.median(speeds)) if speeds else None
        memory = [
            float(size) / (1 if unit == "G" else 1024)
            for size, unit in re.findall(r"peak memory\s+([\d.]+) ([GM])iB", said)
        ]
        found |= dict(peak_gib=memory[-1] if memory else None, cuda_graph=graph_of(said))
        left, stray = self.left_behind(), end(self.mark)
        found["problems"] = [*self.failures(rows, said), *left, *stray]
        if found["problems"]:
            found["output"] = "\n".join(map(tail, self.said))
        return found

    def losses(self) -> list[dict[str, Any]]:
        """Rows with step and loss of the last run: metrics.jsonl, or what a program printed."""
        last = self.said[-1]
        if found := re.findall(r"^step +(\d+) +loss ([\d.naif]+)$", last, re.MULTILINE):
            return [dict(step=int(step), loss=float(loss)) for step, loss in found]
        again = Path(self.places["again"])
        path = (again if again.exists() else Path(self.places["out"])) / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def failures(self, rows: list[dict[str, Any]], said: str) -> list[str]:
        """List problems with exit codes, steps and losses."""
        journey, losses = self.journey, [row["loss"] for row in rows]
        wanted: list[int | None] = [0] * len(journey.commands)
        if journey.killed == "all":
            wanted[0] = -signal.SIGKILL
        found = [] if self.codes == wanted else [f"exit codes {self.codes} instead of {wanted}"]
        steps = [row["step"] for row in rows]
        enough = 0 < len(steps) < journey.steps if journey.early else len(steps) == journey.steps
        if steps != list(range(1, len(steps) + 1)) or not enough:
            found.append(f"{journey.steps} steps were wanted, and those logged are {steps}")
        if not all(map(math.isfinite, losses)):
            found.append("a loss is not finite")
        elif len(losses) >= 6:
            fall = statistics.mean(losses[:3]) - statistics.mean(losses[-3:])
            least = min(journey.falls, 0.01) if self.tiny else journey.falls
            found += (
                [] if fall > least else [f"the loss fell by {fall:.3f} instead of {least} or more"]
            )
        if journey.prints not in "\n".join(
            text.partition("\n")[2] for text in self.said
        ):  # the commands left out
            found.append(f"{journey.prints!r} was not printed")
        graph = graph_of(said)
        if not self.tiny and journey.graph != graph.startswith("captured"):
            found.append(
                f"CUDA graph {'wanted' if journey.graph else 'not possible'}, and the run says: {graph}"
            )
        return found

    def left_behind(self) -> list[str]:
        """Temporary files and folders that the run did not take away; compilers' own are not ours."""
        runs = [Path(self.places[name]) for name in ("out", "again", "served")]
        strange = [
            path
            for run in runs
            for path in run.rglob("*")
            if path.name.startswith(".") or ".tmp" in path.name
        ]
        if not self.journey.killed:  # nobody can tidy up after that
            strange += [
                path
                for path in (self.folder / "tmp").iterdir()
                if not path.name.startswith(("torch", "triton"))
            ]
        return [f"left behind: {path.relative_to(self.folder)}" for path in strange]


def tail(said: str, lines: int = 40) -> str:
    """A command and the end of its output."""
    command, *output = said.splitlines()
    return "\n".join([command, *output[-lines:]])


def graph_of(said: str) -> str:
    """Say from the log whether steps ran as a CUDA graph; a captured one logs nothing."""
    if refused := re.findall(r"no CUDA graph of the step: (.*)", said):
        return f"none: {refused[-1]}"
    if "--no-cuda-graph" in said or "all further steps run without it" in said:
        return "none: " + ("switched off" if "--no-cuda-graph" in said else "capture failed")
    failures = said.count("the next step tries again")
    return f"captured after {failures} failures" if failures else "captured"


def marked(mark: str) -> list[int]:
    """The processes whose environment says that they are of this journey, oldest first."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in sorted(pids) if variable(pid, MARK) == mark]


def variable(pid: int, name: str) -> str:
    """A variable in the environment of a process; empty for one that has ended."""
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next(
        (
            value[len(name) + 1 :].decode()
            for value in values
            if value.startswith(f"{name}=".encode())
        ),
        "",
    )


def end(mark: str, wait: float = 5) -> list[str]:
    """Kill what still runs of a journey after `wait` seconds; returns what that was."""
    deadline = time.time() + wait
    while (left := marked(mark)) and time.time() < deadline:
        time.sleep(0.1)
    found = []
    for pid in left:
        try:
            found.append(
                f"still running: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:200]}"
            )
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return found


def obstacle(name: str, tiny: bool = False) -> str:
    """Return why a journey cannot run here; empty if it can."""
    journey = JOURNEYS[name]
    if missing := [
        package for package in journey.needs if importlib.util.find_spec(package) is None
    ]:
        return f"{missing[0]} is not installed"
    if tiny:
        return "it is of the native engine" if journey.native else ""
    return "" if torch.cuda.device_count() >= journey.gpus else f"needs {journey.gpus} GPUs"


def walk(
    names: Iterable[str], folder: Path, jobs: int, tiny: bool = False, out: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Walk these journeys, `jobs` at a time (a third of that on two GPUs, a sixth on four); returns a row each.

    The results so far are in the file `out` after each journey, so that a run cut short leaves its part.
    """
    found: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def one(name: str) -> None:
        try:
            found[name] = Walk(name, folder, tiny).go()
        except Exception as error:  # the other journeys' results are worth having
            found[name] = dict(problems=[f"{type(error).__name__}: {error}"], output="")
        said = (
            found[name]["problems"]
            or f"{found[name]['first_loss']:.3f} to {found[name]['last_loss']:.3f}"
        )
        print(f"{name}: {said}, {found[name].get('seconds')} s", file=sys.stderr, flush=True)  # noqa: T201
        if out is not None:
            with lock:
                write(out, dict(found), jobs)

    able = [name for name in names if not obstacle(name, tiny)]
    for gpus, workers in ((1, jobs), (2, max(1, jobs // 3)), (4, max(1, jobs // 6))):
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, [name for name in able if JOURNEYS[name].gpus == gpus]))
    return {name: found[name] for name in able}


def write(path: Path, rows: dict[str, dict[str, Any]], jobs: int) -> None:
    """The results as JSON, with what they were measured on."""
    gpus = torch.cuda.device_count()
    document = dict(
        environment=environment(), gpus=gpus, jobs_at_a_time=jobs, base=BASE, journeys=rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
