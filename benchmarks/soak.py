"""A long run through the command line that is killed three times: does memory stay flat, and does the loss continue?

    python benchmarks/soak.py --out benchmarks/results/soak_h200.json --figure docs/results/soak_h200.png
    python benchmarks/soak.py --tiny --steps 240 --every 20 --out soak.json --figure soak.png    # on a CPU

It takes about 4 minutes on a GPU. `te-models pretrain` evaluates and saves every 50 steps. At three random steps
(drawn from --seed) it is sent SIGKILL and started again with --resume. While it runs, its host
memory (VmRSS of its processes) and the device's (nvidia-smi; nothing else may run there) are sampled, and the largest
of every 50 steps is kept; PyTorch's own peak is in the checkpoints.

Checked, with exit code 1 if one fails:

* memory: after its first 100 steps no process grows by more than --device-growth and --host-growth;
* loss: where a process took over, the mean of the 20 steps after differs from that of the 20 before by no more than 4
  times as much as at other places of the run; of the steps that were done twice the first one has the same loss within
  0.01 %, and all within --repeat;
* every step is there once, and nothing is left behind.
"""

from __future__ import annotations

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
SETTLED = 100  # steps of a process after which its memory has to stay
WINDOW = 20  # steps of which a mean is taken
MIB = 2**20

Samples = dict[int, dict[str, Any]]  # by step, a multiple of `every`


def host_memory(pid: int) -> int:
    """VmRSS of a process and its children, in bytes; 0 for one that has ended."""
    status, children = (
        read(Path(f"/proc/{pid}") / name) for name in ("status", f"task/{pid}/children")
    )
    own = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")]
    return sum(own) + sum(host_memory(int(child)) for child in children.split())


def read(path: Path) -> str:
    """Return the content of a file, or nothing if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def device_memory() -> int | None:
    """Bytes in use on the first visible GPU; None without one."""
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
    """The peak that PyTorch reported in the newest checkpoint."""
    newest = Checkpoints(run / "checkpoints").latest()
    text = read(newest / "training.json") if newest else ""  # which may just have been replaced
    return json.loads(text or "{}").get("result", {}).get("peak_memory")


def newest_step(run: Path) -> int:
    """The last step of metrics.jsonl; 0 before there is one."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    return json.loads(lines[-1])["step"] if lines else 0


class Soak:
    """The run, in several processes, one after the other."""

    def __init__(self, run: Path, flags: str, steps: int, every: int) -> None:
        self.run, self.every, self.steps = run, every, steps
        self.command = [
            sys.executable,
            "-m",
            "te_models",
            "pretrain",
            *flags.split(),
            "--sample-tokens",
            "0",
        ]
        self.command += [
            "--steps", str(steps), "--eval-every", str(every), "--save-every", str(every), "--out", str(run),
        ]  # fmt: skip
        self.lives: list[
            dict[str, Any]
        ] = []  # of each process: where it began and ended, and its memory

    def live(self, kill_at: int | None) -> None:
        """One process, up to its end or until it has logged step `kill_at`."""
        newest = Checkpoints(self.run / "checkpoints").latest()
        first = int(newest.name.removeprefix("step-")) if newest else 0
        log, samples, began = self.run.with_suffix(".log"), {}, time.perf_counter()
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
        """Sample memory until the process ends or is to be killed; returns its newest step."""
        step, looked = first, 0.0
        while job.poll() is None:
            time.sleep(0.05)
            step = max(first, newest_step(self.run))
            if kill_at is not None and step >= kill_at:
                break
            if not first < step < self.steps:  # after the last one the loss is drawn
                continue
            device = None
            if time.perf_counter() - looked > 1.0:
                device, looked = device_memory(), time.perf_counter()
            note(
                samples,
                -(-step // self.every) * self.every,
                host_memory(job.pid),
                device,
                torch_peak(self.run),
            )
        return max(step, newest_step(self.run))


def note(samples: Samples, step: int, host: int, device: int | None, peak: int | None) -> None:
    """Keep the largest of each."""
    row = samples.setdefault(step, {})
    for name, value in dict(host=host, device=device, torch_peak=peak).items():
        if value is not None:
            row[name] = max(row.get(name, 0), value)


def growth(life: dict[str, Any], name: str) -> dict[str, float] | None:
    """Return by how many MiB a process grew after it settled: at most, and per thousand steps of a fitted line."""
    points = [
        (step, row[name])
        for step, row in life["memory"].items()
        if name in row and step - life["first"] > SETTLED
    ]
    if len(points) < 2:
        return None
    steps, values = zip(*points, strict=True)
    slope = statistics.linear_regression(steps, values).slope * 1000
    return dict(most=(max(values) - values[0]) / MIB, in_1000_steps=slope / MIB)


def jumps(losses: dict[int, float], places: list[int]) -> dict[str, Any]:
    """Return the change of the mean loss where a process took over, and that at other places."""

    def jump(step: int) -> float:
        after, before = range(step + 1, step + WINDOW + 1), range(step - WINDOW + 1, step + 1)
        return statistics.mean(losses[s] for s in after) - statistics.mean(
            losses[s] for s in before
        )

    later = [
        s for s in losses if s >= SETTLED + WINDOW and s + WINDOW in losses
    ]  # the loss falls steeply before
    usual = [jump(s) for s in later if all(abs(s - place) > WINDOW for place in places)]
    middle, spread = statistics.mean(usual), statistics.stdev(usual)
    found = [
        dict(step=place, jump=jump(place), in_spreads=(jump(place) - middle) / spread)
        for place in places
    ]
    return dict(places=found, usual=dict(mean=middle, spread=spread))


def repeated(lives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the relative difference of the losses of steps done twice."""
    found = []
    for before, after in zip(lives, lives[1:], strict=False):
        both = [step for step in before["losses"] if step > after["first"]]
        gaps = [
            abs(before["losses"][s] / after["losses"][s] - 1) for s in both if s in after["losses"]
        ]
        found.append(
            dict(steps=len(gaps), first=gaps[0] if gaps else 0.0, most=max(gaps, default=0.0))
        )
    return found


def judge(soak: Soak, limits: dict[str, float]) -> dict[str, Any]:
    """All that is checked, and what failed."""
    lives, losses = soak.lives, soak.lives[-1]["losses"]
    failures = (
        []
        if list(losses) == list(range(1, soak.steps + 1))
        else ["a step is missing or was logged twice"]
    )
    growths = []
    for number, life in enumerate(lives):
        for name in ("host", "device", "torch_peak"):
            if (found := growth(life, name)) is not None:
                growths.append(dict(process=number, memory=name, **found))
                if found["most"] > limits.get(name, math.inf):
                    failures.append(
                        f"process {number}: {name} memory grew by {found['most']:.0f} MiB"
                    )
    resumed = [place for place in (life["first"] for life in lives[1:]) if place > SETTLED + WINDOW]
    found = jumps(losses, resumed)
    for place in found["places"]:
        if abs(place["in_spreads"]) > 4:
            failures.append(f"the loss jumped by {place['jump']:.4f} at step {place['step']}")
    twice = repeated(lives)
    for row in twice:
        if row["first"] > 1e-4 or row["most"] > limits["repeat"]:
            failures.append(
                f"steps done twice differ by {row['first']:.3%} at once and by up to {row['most']:.3%}"
            )
    failures += [
        f"left behind: {path.name}" for path in soak.run.rglob("*") if path.name.startswith(".")
    ]
    return dict(growth=growths, jumps=found, repeated=twice, failures=failures)


def draw(path: Path, document: dict[str, Any]) -> None:
    """Loss, device and host memory over steps, with the kills."""
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
@click.option("--seed", default=0, help="Of the steps at which it is killed.")
@click.option("--device-growth", default=256.0, help="MiB")
@click.option("--host-growth", default=1024.0, help="MiB")
@click.option(
    "--repeat",
    default=0.05,
    help="By how much the losses of steps done twice may differ, relative.",
)
@click.option("--tiny", is_flag=True, help="A model for a CPU.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where the run is written; default: the temporary folder.",
)
@click.option("--figure", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(steps: int, every: int, kills: int, seed: int, device_growth: float, host_growth: float, repeat: float,
         tiny: bool, folder: Path | None, figure: Path | None, out: Path) -> None:  # fmt: skip
    """Run, kill, resume, check, write and draw."""
    drawn = random.Random(seed)
    share = (steps - 3 * every) // kills if kills else 0
    places = [every + number * share + drawn.randint(every, share) for number in range(kills)]
    with tempfile.TemporaryDirectory(dir=folder) as root:
        soak = Soak(Path(root) / "run", TINY if tiny else REAL, steps, every)
        for place in [*places, None]:
            soak.live(place)
        found = judge(soak, dict(device=device_growth, host=host_growth, repeat=repeat))
    killed = [dict(at=max(life["losses"]), resumed_from=after["first"])
              for life, after in zip(soak.lives, soak.lives[1:], strict=False)]  # fmt: skip
    lives = [
        {name: value for name, value in life.items() if name != "losses"} for life in soak.lives
    ]
    document = dict(
        environment=environment(),
        command=" ".join(soak.command[1:-1]),
        every=every,
        seed=seed,
        kills=killed,
    )
    document |= dict(checks=found, lives=lives, losses=list(soak.lives[-1]["losses"].values()))
    out.write_text(json.dumps(document, indent=1) + "\n")
    if figure is not None:
        draw(figure, document)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
