"""Soak test: a long run by the command line, killed three times. Memory must stay flat, and the loss must continue.

    python benchmarks/soak.py --out benchmarks/results/soak_h200.json --figure docs/results/soak_h200.png
    python benchmarks/soak.py --tiny --steps 240 --every 20 --out soak.json --figure soak.png    # on a CPU

It takes about 4 minutes on a GPU. `te-models pretrain` evaluates and saves every 50 steps. At three random steps
(drawn from --seed) it gets SIGKILL, and is started again with --resume. Meanwhile the memory of the host (VmRSS of the
run's processes) and of the device (nvidia-smi; nothing else may run there) is sampled, and the largest sample per 50
steps is kept; PyTorch's own peak is in the checkpoints.

The exit code is 1 if one of these fails:

* memory: after its first 100 steps no process grows by more than --device-growth and --host-growth;
* loss where a process took over: the mean of the 20 steps behind minus the mean of the 20 before is within 4 standard
  deviations of what this difference is elsewhere in the run;
* loss of steps that two processes computed: the first such step agrees within 0.01 %, and all within --repeat;
* files: metrics.jsonl has every step once, and the run leaves no temporary files.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from te_models.inspect.environment import environment
from te_models.saving.run_folder import Checkpoints
from te_models.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
REAL = "--preset gated-124m --recipe delayed --batch-size 8 --seq-len 512"
TINY = (
    "--preset gated-nano --hidden-size 64 --intermediate-size 96 --num-hidden-layers 3 --num-attention-heads 2 "
    "--device cpu --num-key-value-heads 1 --recipe delayed --batch-size 2 --seq-len 32 --eval-batches 2 "
    "--data te_models/config"
)
SETTLED = 100  # steps of a process after which its memory must stay flat
WINDOW = 20  # steps per mean of the loss
MIB = 2**20

# Step, rounded up to a multiple of `every` -> "host", "device" and "torch_peak" -> largest sample in bytes.
Samples = dict[int, dict[str, Any]]


def host_memory(pid: int) -> int:
    """Return VmRSS of a process and its children, in bytes; 0 for one that has ended."""
    memory = 0
    for line in read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmRSS:"):
            memory += int(line.split()[1]) * 1024  # in kB
    for child in read(Path(f"/proc/{pid}/task/{pid}/children")).split():
        memory += host_memory(int(child))
    return memory


def read(path: Path) -> str:
    """Return the content of a file, or "" if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def device_memory() -> int | None:
    """Return the bytes in use on the first visible GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    query = [
        "nvidia-smi",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0]}",
    ]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * MIB


def torch_peak(run: Path) -> int | None:
    """Return the peak in bytes that PyTorch reported in the newest checkpoint; None before there is one."""
    checkpoint = Checkpoints(run / "checkpoints").latest()
    if checkpoint is None:
        return None
    text = read(checkpoint / "training.json")
    # The run may have deleted that checkpoint in the meantime.
    if not text:
        return None
    return json.loads(text).get("result", {}).get("peak_memory")


def newest_step(run: Path) -> int:
    """Return the last step in metrics.jsonl; 0 before there is one."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        # Without the part behind the last line break, which may be half a line, and without the cut first line.
        lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    return json.loads(lines[-1])["step"] if lines else 0


class Soak:
    """The run, in several processes, one after the other.

    Args:
        run: the folder of the run.
        flags: options of `te-models pretrain`, separated by spaces.
        steps: the steps of the whole run.
        every: steps between saves, and between evaluations.

    Attributes:
        lives: for each process its first and last step, its seconds, memory samples and losses by step.
    """

    def __init__(self, run: Path, flags: str, steps: int, every: int) -> None:
        self.run = run
        self.every = every
        self.steps = steps
        self.command = [sys.executable, "-m", "te_models", "pretrain", *flags.split()]
        self.command += ["--sample-tokens", "0"]
        self.command += ["--steps", str(steps)]
        self.command += ["--eval-every", str(every)]
        self.command += ["--save-every", str(every)]
        self.command += ["--out", str(run)]
        self.lives: list[dict[str, Any]] = []

    def start(self, kill_at: int | None) -> None:
        """Start a process, and kill it once it has logged step `kill_at`; None: wait for its end."""
        checkpoint = Checkpoints(self.run / "checkpoints").latest()
        first = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
        log = self.run.with_suffix(".log")
        samples: Samples = {}
        began = time.perf_counter()
        with log.open("a") as file:
            command = self.command + (["--resume"] if first else [])
            job = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
            try:
                step = self.watch(job, first, kill_at, samples)
            finally:
                job.send_signal(signal.SIGKILL)
                code = job.wait()
        if kill_at is None and code:
            raise SystemExit(f"the run ended with exit code {code}\n{log.read_text()[-3000:]}")
        if kill_at is not None and code != -signal.SIGKILL:
            raise SystemExit(
                f"the run ended with exit code {code} before step {kill_at}\n{log.read_text()[-3000:]}"
            )
        losses = {row["step"]: row["loss"] for row in read_metrics(self.run / "metrics.jsonl")}
        seconds = round(time.perf_counter() - began, 1)
        self.lives.append(
            dict(first=first, last=step, seconds=seconds, memory=samples, losses=losses)
        )
        print(f"steps {first + 1} to {max(losses)} in {seconds} s, exit code {code}", flush=True)

    def watch(
        self, job: subprocess.Popen[bytes], first: int, kill_at: int | None, samples: Samples
    ) -> int:
        """Sample memory until the process ends or has logged step `kill_at`; return its newest step."""
        step = first
        last_query = 0.0
        while job.poll() is None:
            time.sleep(0.05)
            step = max(first, newest_step(self.run))
            if kill_at is not None and step >= kill_at:
                break
            # Neither while the process starts nor behind the last step, where it draws the loss curve.
            if not first < step < self.steps:
                continue
            device = None
            # nvidia-smi is slow: ask it once a second.
            if time.perf_counter() - last_query > 1.0:
                device = device_memory()
                last_query = time.perf_counter()
            note(
                samples,
                step=math.ceil(step / self.every) * self.every,
                host=host_memory(job.pid),
                device=device,
                peak=torch_peak(self.run),
            )
        return max(step, newest_step(self.run))


def note(samples: Samples, step: int, host: int, device: int | None, peak: int | None) -> None:
    """Raise the largest sample of each kind of memory at a step, in bytes."""
    row = samples.setdefault(step, {})
    for name, value in dict(host=host, device=device, torch_peak=peak).items():
        if value is not None:
            row[name] = max(row.get(name, 0), value)


def growth(life: dict[str, Any], name: str) -> dict[str, float] | None:
    """Return the growth of a process' memory after it settled, in MiB: the most, and per 1000 steps of a fitted line.

    None with fewer than two samples.
    """
    steps = []
    values = []
    for step, row in life["memory"].items():
        if name in row and step - life["first"] > SETTLED:
            steps.append(step)
            values.append(row[name])
    if len(values) < 2:
        return None
    slope = statistics.linear_regression(steps, values).slope * 1000
    return dict(most=(max(values) - values[0]) / MIB, in_1000_steps=slope / MIB)


def jumps(losses: dict[int, float], places: list[int]) -> dict[str, Any]:
    """Return the change of the mean loss at the steps `places`, where a process took over, and elsewhere."""

    def jump(step: int) -> float:
        before = [losses[s] for s in range(step - WINDOW + 1, step + 1)]
        after = [losses[s] for s in range(step + 1, step + WINDOW + 1)]
        return statistics.mean(after) - statistics.mean(before)

    elsewhere = []
    for step in losses:
        # The loss falls steeply at first, and the last steps have too few behind them.
        if step < SETTLED + WINDOW or step + WINDOW not in losses:
            continue
        if all(abs(step - place) > WINDOW for place in places):
            elsewhere.append(jump(step))
    mean = statistics.mean(elsewhere)
    deviation = statistics.stdev(elsewhere)
    rows = []
    for place in places:
        deviations = (jump(place) - mean) / deviation
        rows.append({"step": place, "jump": jump(place), "in_spreads": deviations})
    return {"places": rows, "usual": {"mean": mean, "spread": deviation}}


def repeated(lives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the relative differences of the losses of steps that two processes computed, for each pair of them."""
    rows = []
    for before, after in itertools.pairwise(lives):
        gaps = []
        for step, loss in before["losses"].items():
            if step > after["first"] and step in after["losses"]:
                gaps.append(abs(loss / after["losses"][step] - 1))
        first = gaps[0] if gaps else 0.0
        rows.append({"steps": len(gaps), "first": first, "most": max(gaps, default=0.0)})
    return rows


def judge(soak: Soak, limits: dict[str, float]) -> dict[str, Any]:
    """Return the figures of all checks, and under "failures" a line for each that failed.

    Args:
        soak: the run, after its last process.
        limits: "host" and "device": MiB of growth; "repeat": relative difference of losses.
    """
    lives = soak.lives
    losses = lives[-1]["losses"]
    failures = []
    if list(losses) != list(range(1, soak.steps + 1)):
        failures.append("a step is missing or was logged twice")
    growths = []
    for number, life in enumerate(lives):
        for name in ("host", "device", "torch_peak"):
            grown = growth(life, name)
            if grown is None:
                continue
            growths.append({"process": number, "memory": name, **grown})
            if grown["most"] > limits.get(name, math.inf):
                failures.append(f"process {number}: {name} memory grew by {grown['most']:.0f} MiB")
    # Earlier takeovers are among the steps where the loss falls steeply anyway.
    resumed = [life["first"] for life in lives[1:] if life["first"] > SETTLED + WINDOW]
    loss_jumps = jumps(losses, resumed)
    for place in loss_jumps["places"]:
        if abs(place["in_spreads"]) > 4:
            failures.append(f"the loss jumped by {place['jump']:.4f} at step {place['step']}")
    repeats = repeated(lives)
    for row in repeats:
        if row["first"] > 1e-4 or row["most"] > limits["repeat"]:
            failures.append(
                f"steps done twice differ by {row['first']:.3%} at once and by up to {row['most']:.3%}"
            )
    for path in soak.run.rglob("*"):
        if path.name.startswith("."):
            failures.append(f"left behind: {path.name}")
    return {"growth": growths, "jumps": loss_jumps, "repeated": repeats, "failures": failures}


def draw(path: Path, document: dict[str, Any]) -> None:
    """Draw loss, device memory and host memory over steps, with the kills."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), dpi=130, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    curve = document["losses"]
    axes[0].plot(range(1, len(curve) + 1), curve, color="C0", linewidth=0.7)
    settled = curve[len(curve) // 20 :]
    axes[0].set(ylabel="loss (nats per token)", ylim=(0.9 * min(settled), 1.1 * max(settled)))
    axes[0].set_title(
        f"{len(curve):,} steps, saved every {document['every']}, killed {len(document['kills'])} times"
    )
    for panel, names in ((axes[1], ("device", "torch_peak")), (axes[2], ("host",))):
        for number, life in enumerate(document["lives"]):
            for color, name in enumerate(names):
                points = [
                    (int(step), row[name] / 2**30)
                    for step, row in life["memory"].items()
                    if name in row
                ]
                label = {
                    "device": "device, nvidia-smi",
                    "torch_peak": "PyTorch's peak",
                    "host": "host, VmRSS",
                }[name]
                if points:
                    style = dict(color=f"C{color + 1}", linewidth=1.5, marker=".", markersize=3)
                    panel.plot(*zip(*points, strict=True), label=None if number else label, **style)
        panel.set(ylabel="GiB", ylim=(0, 1.1 * panel.get_ylim()[1]))
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=8, loc="lower right")
        else:
            panel.text(
                0.5, 0.5, "no GPU", transform=panel.transAxes, ha="center", va="center", color="0.5"
            )
    for panel in axes:
        for number, kill in enumerate(document["kills"]):
            panel.axvline(
                kill["at"],
                color="C3",
                linestyle="--",
                linewidth=1,
                label=None if number else "SIGKILL",
            )
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("step")
    figure.savefig(path)


@click.command()
@click.option("--steps", default=3000)
@click.option("--every", default=50, help="Steps between saves, and between evaluations.")
@click.option("--kills", default=3)
@click.option("--seed", default=0, help="Seed of the random steps at which it is killed.")
@click.option("--device-growth", default=256.0, help="MiB")
@click.option("--host-growth", default=1024.0, help="MiB")
@click.option(
    "--repeat",
    default=0.05,
    help="Largest relative difference of the losses of a step that two processes computed.",
)
@click.option("--tiny", is_flag=True, help="A model for a CPU.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where the run is written; default: the temporary folder.",
)
@click.option("--figure", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    steps: int,
    every: int,
    kills: int,
    seed: int,
    device_growth: float,
    host_growth: float,
    repeat: float,
    tiny: bool,
    folder: Path | None,
    figure: Path | None,
    out: Path,
) -> None:
    """Run, kill, resume, check, write and draw."""
    generator = random.Random(seed)
    # One kill in each of `kills` equal parts of the run, behind the first save of the part.
    part = (steps - 3 * every) // kills if kills else 0
    kill_steps = []
    for number in range(kills):
        kill_steps.append(every + number * part + generator.randint(every, part))
    with tempfile.TemporaryDirectory(dir=folder) as root:
        soak = Soak(Path(root) / "run", TINY if tiny else REAL, steps, every)
        for step in kill_steps:
            soak.start(kill_at=step)
        soak.start(kill_at=None)
        checks = judge(soak, {"device": device_growth, "host": host_growth, "repeat": repeat})
    killed = []
    for life, after in itertools.pairwise(soak.lives):
        killed.append({"at": max(life["losses"]), "resumed_from": after["first"]})
    lives = []
    for life in soak.lives:
        lives.append({name: value for name, value in life.items() if name != "losses"})
    document = {
        "environment": environment(),
        "command": " ".join(soak.command[1:-1]),
        "every": every,
        "seed": seed,
        "kills": killed,
        "checks": checks,
        "lives": lives,
        "losses": list(soak.lives[-1]["losses"].values()),
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    if figure is not None:
        draw(figure, document)
    print(json.dumps(checks, indent=1))
    sys.exit(bool(checks["failures"]))


if __name__ == "__main__":
    main()
