"""What a user walks through at the command line, as a table: default flags, real shapes,
and what each journey must leave.

    python tests/journeys.py --jobs 10                     # the whole table; on two GPUs those for two as well
    python tests/journeys.py delayed resume two-fsdp       # these
    python tests/journeys.py --tiny --jobs 2 delayed kill  # a tiny model on the CPU: does the table itself work?

A journey is a few commands, one after the other, in a folder of its own (`{out}`, `{again}`); several journeys run at a
time. tests/test_journeys.py asserts what `problems` finds. A new feature adds a row.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from te_models.inspect.environment import environment
from te_models.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
BASE = "--preset gated-124m --batch-size 8 --seq-len 512 --steps 24 --eval-every 8 --sample-tokens 0"
WIDE = "--preset gated-350m --num-hidden-layers 6"  # head_dim 128
TINY = (
    "--preset gated-nano --vocab-size 288 --hidden-size 64 --intermediate-size 96 --num-hidden-layers 4 --head-dim 32 "
    "--num-attention-heads 2 --num-key-value-heads 2 --seq-len 32 --batch-size 4 --device cpu --engine emulated "
    "--learning-rate 0.005 --warmup-steps 2"
)
SMALL_TEXTS = "--data te_models/config"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
RESTARTING = f"{TORCHRUN} --max-restarts 1"
MARK = "TE_MODELS_JOURNEY"  # in the environment of all processes of a journey
SECONDS = 240  # a command may take


@dataclasses.dataclass(frozen=True)
class Journey:
    """Commands, each what follows `python`, and what is expected of the last run."""

    commands: tuple[str, ...]
    steps: int = 24  # which the last run's metrics.jsonl must have
    falls: float = 0.5  # nats a token, by which the mean loss of the last three steps is below that of the first three
    graph: bool = True  # whether a GPU captures the step
    gpus: int = 1
    needs: tuple[str, ...] = ()  # packages
    prints: str = ""  # what the output must have in it
    native: bool = False  # whether the emulated engine cannot do it
    killed: str = ""  # "all" or "one" process, in the first command, once it has saved


def train(flags: str, **fields: Any) -> Journey:
    """A journey of one run of `te-models pretrain`."""
    return Journey((pretrain(flags),), **fields)


def pretrain(flags: str, out: str = "{out}", launch: str = "") -> str:
    """One run's command."""
    return f"{launch} -m te_models pretrain {BASE} {flags} --out {out}".strip()


def together(flags: str, **fields: Any) -> Journey:
    """One run on two GPUs."""
    return Journey((pretrain(flags, launch=TORCHRUN),), **{"gpus": 2, **fields})


ONE_GPU: dict[str, Journey] = {
    # Recipes; those of Blackwell run with plain PyTorch's numbers, slowly.
    "delayed": train("--recipe delayed --sample-tokens 20"),
    "bf16": train("--recipe bf16"),
    "current": train("--recipe current"),
    "blockwise": train("--recipe blockwise"),
    "mxfp8": train("--recipe mxfp8 --engine emulated --steps 8 --warmup-steps 2", steps=8),
    "nvfp4": train("--recipe nvfp4 --engine emulated --steps 8 --warmup-steps 2", steps=8),
    # Saving.
    "save": train("--recipe delayed --save-every 8"),
    "save-eager": train("--recipe current --save-every 8 --no-cuda-graph", graph=False),
    "resume": Journey((pretrain("--recipe delayed --steps 12"), pretrain("--recipe delayed --resume"))),
    "kill": Journey(
        (pretrain("--recipe delayed --steps 60 --save-every 20"), pretrain("--recipe delayed --steps 60 --resume")),
        steps=60, killed="all",
    ),
    "tune-again": Journey(
        (pretrain("--recipe delayed"),
         "-m te_models finetune --model {out} --recipe current --learning-rate 1e-3 --steps 32 --seq-len 512 --sample-tokens 0 --out {again}"),
        steps=32, falls=0.05,
    ),
    "generate": Journey(
        (pretrain("--recipe delayed --steps 12"),
        '-m te_models generate --model {out} --prompt "def f(" --max-new-tokens 40'),
        steps=12, prints="def f(",
    ),
    "lora": Journey(
        (pretrain("--recipe delayed --steps 12"),
         "examples/finetune_lora.py --model {out} --recipe delayed --steps 24 --seq-len 512 --batch-size 8 --out {again}"),
        falls=0.02, needs=("peft",), prints="adapter and merged model in",
    ),
    "lora-flag": Journey(
        (pretrain("--recipe delayed --steps 12"),
         "-m te_models finetune --model {out} --recipe current --fp8-params --lora 16 --merge --steps 24 --seq-len 512 "
         "--learning-rate 1e-3 --sample-tokens 0 --out {again}"),
        falls=0.02, needs=("peft",), prints="merged",
    ),
    "run-file": Journey(
        (pretrain("--recipe delayed --steps 12"), "-m te_models pretrain {out}/run.toml --steps 24 --out {again}"),
    ),
    "early-stop": train("--recipe current --patience 2 --schedule warmup-stable-decay --log tensorboard",
                        needs=("tensorboard",)),
    # Micro-batches and memory.
    "accumulate": train("--recipe delayed --gradient-accumulation 4", graph=False),
    "accumulate-save": train("--recipe current --gradient-accumulation 4 --save-every 8", graph=False),
    "selective": train("--recipe delayed --activation-checkpointing selective"),
    "selective-bf16": train("--recipe bf16 --activation-checkpointing selective"),
    "full": train("--recipe current --activation-checkpointing full"),
    "full-save": train("--recipe delayed --activation-checkpointing full --save-every 8"),
    "offload": train("--recipe delayed --activation-offload", graph=False),
    "fp8-params": train("--recipe delayed --fp8-params"),
    "fp8-params-current": train("--recipe current --fp8-params"),
    "fp8-params-accumulate": train("--recipe current --fp8-params --gradient-accumulation 2", graph=False),
    "fp8-params-save": train("--recipe delayed --fp8-params --save-every 8"),
    # Data.
    "documents": train("--recipe delayed --packing documents"),
    "streaming": train("--recipe delayed --streaming --data {texts}"),
    "streaming-documents": train("--recipe bf16 --streaming --packing documents --data {texts}"),
    # Optimizers.
    "adamw8bit": train("--recipe delayed --optimizer adamw8bit", needs=("torchao",)),
    "adamwfp8": train("--recipe delayed --optimizer adamwfp8", needs=("torchao",)),
    "te-adam": train("--recipe delayed --optimizer te-adam", native=True),
    "muon": train("--recipe delayed --optimizer muon"),
    "muon8bit": train("--recipe delayed --optimizer muon8bit"),
    "galore": train("--recipe delayed --optimizer galore"),
    "optimizer-offload": train("--recipe delayed --optimizer-offload"),
    # Lengths, shapes, and other ways through the model.
    "length-333": train("--recipe delayed --seq-len 333 --batch-size 3"),
    "length-1000": train("--recipe bf16 --seq-len 1000 --batch-size 4"),
    "length-48": train("--recipe delayed --seq-len 48 --batch-size 5"),
    "window": train("--recipe delayed --sliding-window 128"),
    "headwise": train("--recipe delayed --attention-gate headwise"),
    "ungated": train("--recipe delayed --attention-gate none"),
    "fp8-head": train("--recipe delayed --lm-head fp8 --num-layers-at-end-in-bf16 0"),
    "deterministic": train("--recipe delayed --deterministic"),
    "wide": train(f"{WIDE} --recipe delayed"),
    "wide-bf16": train(f"{WIDE} --recipe bf16 --seq-len 333 --batch-size 3"),
    "wide-grouped": train(f"{WIDE} --recipe current --num-key-value-heads 2 --activation-checkpointing selective"),
    "wide-blockwise": train(f"{WIDE} --recipe blockwise --seq-len 1000 --batch-size 4"),
    "wide-1b": train("--preset gated-1b --num-hidden-layers 4 --recipe delayed --fp8-params --seq-len 2048"),
    "heads-of-96": train("--num-attention-heads 8 --recipe delayed"),
    "heads-of-256": train("--num-attention-heads 3 --recipe delayed"),
}  # fmt: skip

SHARED = "--recipe delayed --parallel"
TWO_GPUS: dict[str, Journey] = {
    "two-ddp": together(f"{SHARED} ddp", graph=False),
    "two-fsdp": together(f"{SHARED} fsdp"),
    "two-fsdp-bf16": together("--recipe bf16 --parallel fsdp"),
    "two-fsdp-current": together("--recipe current --parallel fsdp --no-reshard-after-forward"),
    "two-fsdp-fp8-params": together(f"{SHARED} fsdp --fp8-params", graph=False),
    "two-fsdp-full": together(f"{SHARED} fsdp --activation-checkpointing full"),
    "two-fsdp-selective": together(f"{SHARED} fsdp --activation-checkpointing selective"),
    "two-fsdp-accumulate": together(f"{SHARED} fsdp --gradient-accumulation 2", graph=False),
    "two-fsdp-save": together(f"{SHARED} fsdp --save-every 8"),
    "two-fsdp-length-333": together(f"{SHARED} fsdp --seq-len 333 --batch-size 6"),
    "two-ddp-save": together("--recipe current --parallel ddp --save-every 8", graph=False),
    "two-ddp-streaming": together(f"{SHARED} ddp --streaming --data {{texts}}", graph=False),
    "two-fsdp-muon": together(f"{SHARED} fsdp --optimizer muon"),
    "two-tp": together(f"{SHARED} tp", graph=False),
    "two-tp-save": together("--recipe current --parallel tp --save-every 8", graph=False),
    "two-tp-sequence": together(f"{SHARED} tp --sequence-parallel", graph=False),
    "two-then-one": Journey(
        (pretrain(f"{SHARED} fsdp --steps 12", launch=TORCHRUN), pretrain("--recipe delayed --resume")), gpus=2
    ),
    "one-then-two": Journey(
        (pretrain("--recipe delayed --steps 12"), pretrain(f"{SHARED} fsdp --resume", launch=TORCHRUN)), gpus=2
    ),
    "two-kill-one": Journey(
        (pretrain(f"{SHARED} fsdp --steps 60 --save-every 20", launch=RESTARTING),), steps=60, gpus=2, killed="one"
    ),
    "two-kill-all": Journey(
        (pretrain(f"{SHARED} fsdp --steps 60 --save-every 20", launch=TORCHRUN),
         pretrain(f"{SHARED} fsdp --steps 60 --resume", launch=TORCHRUN)),
        steps=60, gpus=2, killed="all",
    ),
}  # fmt: skip
JOURNEYS = ONE_GPU | TWO_GPUS


class Walk:
    """A journey under way, in a folder of its own."""

    def __init__(self, name: str, folder: Path, tiny: bool = False) -> None:
        self.name, self.journey, self.tiny = name, JOURNEYS[name], tiny
        self.folder, self.mark = folder / name, f"{folder.name}-{name}-{os.getpid()}"
        self.places = dict(out=str(self.folder / "run"), again=str(self.folder / "again"))
        self.places |= dict(texts=str(self.folder / "texts.jsonl"))
        self.said: list[str] = []  # a command and its output each
        self.codes: list[int | None] = []

    def command(self, template: str) -> list[str]:
        """What to execute."""
        words = shlex.split(template.format(**self.places))
        if self.tiny and {"pretrain", "finetune"} & set(words):
            words += shlex.split(TINY if "--preset" in words else "--device cpu --engine emulated --seq-len 32")
            words += [] if "--streaming" in words else shlex.split(SMALL_TEXTS)
        elif self.tiny and words[0].startswith("examples/"):
            words += shlex.split(f"--seq-len 32 --batch-size 4 {SMALL_TEXTS}")
        elif self.tiny:
            words += ["--device", "cpu", "--engine", "emulated"]
        return [sys.executable, *words]

    def environment(self) -> dict[str, str]:
        """The processes' own folder for temporary files, shared caches of compilers,
        and a log of what the run decides."""
        caches = Path(tempfile.gettempdir())
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        write_texts(Path(self.places["texts"]))
        (self.folder / "log").mkdir(exist_ok=True)
        (self.folder / "log" / "sitecustomize.py").write_text(
            "import logging\nlogging.basicConfig()\nlogging.getLogger('te_models').setLevel('INFO')\n"
        )
        path = [str(self.folder / "log"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {MARK: self.mark, "TMPDIR": str(self.folder / "tmp"), "PYTHONPATH": os.pathsep.join(path)}
        shared = dict(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="2", COLUMNS="200", HF_HUB_OFFLINE="1")
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
                job = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
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
        latest, deadline = Path(self.places["out"]) / "checkpoints" / "latest", time.time() + SECONDS
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
        """What the journey came to; `problems` is empty if all is well."""
        said = "\n".join(self.said)
        rows = self.losses()
        losses = [row["loss"] for row in rows]
        found: dict[str, Any] = dict(commands=list(self.journey.commands[: len(self.said)]), codes=self.codes)
        found |= dict(
            steps=len(rows), first_loss=losses[0] if losses else None, last_loss=losses[-1] if losses else None
        )
        speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        found["tokens_per_second"] = round(statistics.median(speeds)) if speeds else None
        memory = re.findall(r"peak memory\s+([\d.]+) GiB", said)
        found |= dict(peak_gib=float(memory[-1]) if memory else None, cuda_graph=graph_of(said))
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
        """What is not as it should be in codes, steps and losses."""
        journey, losses = self.journey, [row["loss"] for row in rows]
        wanted: list[int | None] = [0] * len(journey.commands)
        if journey.killed == "all":
            wanted[0] = -signal.SIGKILL
        found = [] if self.codes == wanted else [f"exit codes {self.codes} instead of {wanted}"]
        if [row["step"] for row in rows] != list(range(1, journey.steps + 1)):
            found.append(f"{journey.steps} steps were wanted, and those logged are {[row['step'] for row in rows]}")
        if not all(map(math.isfinite, losses)):
            found.append("a loss is not finite")
        elif len(losses) >= 6:
            fall = statistics.mean(losses[:3]) - statistics.mean(losses[-3:])
            least = min(journey.falls, 0.01) if self.tiny else journey.falls
            found += [] if fall > least else [f"the loss fell by {fall:.3f} instead of {least} or more"]
        if journey.prints not in said:
            found.append(f"{journey.prints!r} was not printed")
        graph = graph_of(said)
        if not self.tiny and journey.graph != graph.startswith("captured"):
            found.append(f"CUDA graph {'wanted' if journey.graph else 'not possible'}, and the run says: {graph}")
        return found

    def left_behind(self) -> list[str]:
        """Temporary files and folders that the run did not take away; compilers' own are not ours."""
        runs = [Path(self.places[name]) for name in ("out", "again")]
        strange = [path for run in runs for path in run.rglob("*") if path.name.startswith(".") or ".tmp" in path.name]
        if not self.journey.killed:  # nobody can tidy up after that
            strange += [
                path for path in (self.folder / "tmp").iterdir() if not path.name.startswith(("torch", "triton"))
            ]
        return [f"left behind: {path.relative_to(self.folder)}" for path in strange]


def tail(said: str, lines: int = 40) -> str:
    """A command and the end of its output."""
    command, *output = said.splitlines()
    return "\n".join([command, *output[-lines:]])


def write_texts(path: Path) -> None:
    """This package's sources as a corpus of many small documents, some of which fall to evaluation."""
    texts = [file.read_text() for file in sorted((ROOT / "te_models").rglob("*.py"))]
    parts = [text[first : first + 2000] for text in texts for first in range(0, len(text), 2000)]
    path.write_text("".join(json.dumps(dict(text=part)) + "\n" for part in parts))


def graph_of(said: str) -> str:
    """Whether steps ran as a CUDA graph, from the log. One that was captured says nothing."""
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
    return next((value[len(name) + 1 :].decode() for value in values if value.startswith(f"{name}=".encode())), "")


def end(mark: str, wait: float = 5) -> list[str]:
    """Kill what still runs of a journey after `wait` seconds; returns what that was."""
    deadline = time.time() + wait
    while (left := marked(mark)) and time.time() < deadline:
        time.sleep(0.1)
    found = []
    for pid in left:
        try:
            found.append(f"still running: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:200]}")
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return found


def obstacle(name: str, tiny: bool = False) -> str:
    """Why a journey cannot be walked here; empty if it can."""
    journey = JOURNEYS[name]
    if missing := [package for package in journey.needs if importlib.util.find_spec(package) is None]:
        return f"{missing[0]} is not installed"
    if tiny:
        return "it is of the native engine" if journey.native else ""
    return "" if torch.cuda.device_count() >= journey.gpus else f"needs {journey.gpus} GPUs"


def walk(
    names: Iterable[str], folder: Path, jobs: int, tiny: bool = False, out: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Walk these journeys, `jobs` at a time (a third of that on two GPUs); returns a row each.

    The results so far are in the file `out` after each journey, so that a run cut short leaves its part.
    """
    found: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def one(name: str) -> None:
        try:
            found[name] = Walk(name, folder, tiny).go()
        except Exception as error:  # the other journeys' results are worth having
            found[name] = dict(problems=[f"{type(error).__name__}: {error}"], output="")
        said = found[name]["problems"] or f"{found[name]['first_loss']:.3f} to {found[name]['last_loss']:.3f}"
        print(f"{name}: {said}, {found[name].get('seconds')} s", file=sys.stderr, flush=True)  # noqa: T201
        if out is not None:
            with lock:
                write(out, dict(found), jobs)

    able = [name for name in names if not obstacle(name, tiny)]
    for group, workers in ((ONE_GPU, jobs), (TWO_GPUS, max(1, jobs // 3))):
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, [name for name in able if name in group]))
    return {name: found[name] for name in able}


def write(path: Path, rows: dict[str, dict[str, Any]], jobs: int) -> None:
    """The results as JSON, with what they were measured on."""
    gpus = torch.cuda.device_count()
    document = dict(environment=environment(), gpus=gpus, jobs_at_a_time=jobs, base=BASE, journeys=rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Walk, print and write; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(JOURNEYS), metavar="JOURNEY")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = walk(options.names, Path(folder), options.jobs, options.tiny, options.out)
    bad = {name: row for name, row in rows.items() if row["problems"]}
    for name, row in bad.items():
        print(f"\n=== {name}: {'; '.join(row['problems'])}\n{row['output']}")  # noqa: T201
    print(f"{len(rows) - len(bad)} of {len(rows)} journeys are as they should be")  # noqa: T201
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
