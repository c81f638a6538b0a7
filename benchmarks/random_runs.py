"""Runs of the command line with options paired at random, on one GPU or two: each must end well, with the losses of the
plain run of its model, data and recipe.

    python benchmarks/random_runs.py --count 60 --seed 1 --out benchmarks/results/random_runs_h100.json
    python benchmarks/random_runs.py --count 4 --tiny        # anywhere: does it work?

A group of runs shares a kind of model (dense, a hybrid, experts), a shape (heads of 32 to 256 channels, grouped
queries, windows, gates, norms), a length, a form of data and perhaps adapters on a model that was trained before; its
runs differ in options that change no number beyond the order of sums. Some stop after a few steps and are resumed, and
some are exported, and the export evaluated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECIPES = ("bf16", "delayed", "current", "blockwise")
PER_GROUP = 10  # runs, beside one plain run per recipe
# How far losses of the same run may lie apart: the order of sums, and under FP8 the codes that it changes.
BOUNDS = dict(bf16=0.005, delayed=0.02, current=0.02, blockwise=0.02)


@dataclass
class Run:
    """One run: its options, and what came of it."""

    group: int
    recipe: str
    options: list[str]
    world: int = 1
    resumed: bool = False
    export: str = ""
    code: int = 0
    said: str = ""
    losses: list[float] = field(default_factory=list)
    off: float = 0.0  # the largest relative difference from the plain run
    export_off: float = 0.0
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """True if the run was refused: it ended with one line that says what to do."""
        return self.code in (1, 2) and "te-models" in self.said and "Traceback" not in self.said

    @property
    def good(self) -> bool:
        """True if the run succeeded with losses within the bound of the plain run."""
        return self.code == 0 and max(self.off, self.export_off) <= BOUNDS[self.recipe]


@dataclass
class Group:
    """Options that all runs of a group have in common.

    Attributes:
        model: the preset and its shape, as options.
        data: length, batch size and form of the data, as options.
        adapters: options of LoRA; none trains all weights.
        parallel: ways that two processes may share the work.
        rows: sequences per step.
    """

    model: list[str]
    data: list[str]
    adapters: list[str]
    parallel: tuple[str, ...]
    rows: int

    def command(self, folder: Path) -> list[str]:
        """Return the command of its runs; adapters go onto the model in `folder`."""
        if self.adapters:
            return ["finetune", "--model", str(folder), *self.adapters, *self.data]
        return ["pretrain", *self.model, *self.data]


def draw_dense(rng: random.Random, length: int, tiny: bool) -> tuple[list[str], tuple[str, ...]]:
    """Return the options of a dense model, and the ways of two processes that it allows."""
    keys = rng.choice((1, 2, 4))
    width = 64 if tiny else rng.choice((512, 768))
    shape = dict(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=keys * rng.choice((1, 2, 3)), num_key_value_heads=keys,
        head_dim=rng.choice((32, 64, 80, 96, 128, 192, 256)),
        attention_gate=rng.choice(("elementwise", "headwise", "none")),
    )  # fmt: skip
    options = [
        "--preset",
        "gated-124m",
        *(f"--{name.replace('_', '-')}={value}" for name, value in shape.items()),
    ]
    for share, given in (
        (0.3, ["--sliding-window", str(length // 3)]), (0.4, ["--qk-norm"]),
        (0.3, ["--norm-position", rng.choice(("post", "both"))]), (0.3, ["--hidden-act", "gelu_pytorch_tanh"]),
    ):  # fmt: skip
        options += given if rng.random() < share else []
    return options, ("ddp", "fsdp", "auto", *(("tp",) if keys > 1 else ()))


def draw_group(rng: random.Random, tiny: bool) -> Group:
    """Draw the options that all runs of a group have in common."""
    length, rows = (48, 2) if tiny else (rng.choice((129, 384, 521, 1000)), 12)
    kind = rng.choice(("dense", "dense", "hybrid", "experts"))
    if kind == "dense":
        model, ways = draw_dense(rng, length, tiny)
    else:
        preset = {"hybrid": "gated-hybrid-nano", "experts": "gated-moe-nano"}[kind]
        model, ways = (
            ["--preset", preset],
            ("ddp", "fsdp", "fsdp+ep" if kind == "experts" else "auto"),
        )
    adapters: list[str] = []
    if rng.random() < 0.3:
        targets = (
            "all-linear,experts"
            if kind == "experts"
            else rng.choice(("all-linear", "q_proj,v_proj,down_proj"))
        )
        targets = "all-linear" if kind == "hybrid" else targets
        adapters, ways = ["--lora", rng.choice(("4", "16")), "--lora-targets", targets], ("ddp",)
    packing = rng.choice(("stream", "documents", "none"))
    source = (
        "docs" if packing == "stream" or length < 500 else rng.choice(("docs", "python-docstrings"))
    )
    data = [
        "--data",
        source,
        "--seq-len",
        str(length),
        "--batch-size",
        str(rows),
        "--packing",
        packing,
    ]
    data += [
        "--steps",
        "4" if tiny else "12",
        "--eval-every",
        "4" if tiny else "6",
        "--eval-batches",
        "2",
    ]
    data += [
        "--sample-tokens",
        "0",
        "--no-keep-best",
        "--schedule",
        "constant",
        "--warmup-steps",
        "2",
    ]
    data += [
        "--learning-rate",
        "2e-4",
    ]  # at the default rate losses jump, and where they do two runs part
    return Group(model, data, adapters, ways, rows)


def draw_run(rng: random.Random, number: int, group: Group, gpus: int, tiny: bool) -> Run:
    """Return a run with options that change no number."""
    options: list[str] = []
    mode = ["--activation-checkpointing", rng.choice(("selective", "full", "2"))]
    for share, given in (
        (0.5, mode), (0.2, ["--activation-offload"]), (0.3, ["--no-cuda-graph"]), (0.6, ["--no-compile"]),
        (0.3, ["--deterministic"]), (0.3, ["--optimizer-offload"]), (0.5, ["--save-every", rng.choice("135")]),
        (0.3, ["--fp8-params"]), (0.2, ["--no-cache-fp8-weights"]), (0.2, ["--data-workers", "0"]),
    ):  # fmt: skip
        options += given if rng.random() < share else []
    if rng.random() < 0.3:
        parts = rng.choice([n for n in (2, 3) if group.rows % n == 0] or [1])
        options += ["--gradient-accumulation", str(parts), "--batch-size", str(group.rows // parts)]
    world = rng.choice((1, 1, 2)) if gpus > 1 and not tiny else 1
    if world == 2:
        options += ["--parallel", rng.choice(group.parallel)]
    export = rng.choice(("fp8-block", "fp8-channel", "bf16")) if rng.random() < 0.3 else ""
    recipe = rng.choice(RECIPES)
    if recipe == "bf16":  # FP8 weights under BF16 are refused: nothing would be learned
        options = [option for option in options if option != "--fp8-params"]
    return Run(number, recipe, options, world, rng.random() < 0.3, export)


def call(arguments: list[str], world: int, gpu: int) -> subprocess.CompletedProcess[str]:
    """Run te-models in a process of its own, or in two."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(cards[:2]) if world == 2 else cards[gpu],
        "TOKENIZERS_PARALLELISM": "false",
    }
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if world == 2
        else []
    )
    command = [sys.executable, *launcher, "-m", "te_models", *arguments]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 124, "", f"timeout {late.stderr!r:.300}")


def said(stderr: str) -> str:
    """Return the line of te-models, below which torchrun prints much, or the end of what was printed."""
    own = [line for line in stderr.splitlines() if line.startswith("te-models")]
    return own[0] if own and "te_models/" not in stderr else stderr[-1500:]


def train(run: Run, command: list[str], folder: Path, gpu: int) -> Run:
    """Run it, with its resume and export, and note what came of it."""
    begun = time.monotonic()
    out = str(folder)
    arguments = [*command, "--recipe", run.recipe, *run.options, "--out", out]
    done = call([*arguments, *(["--steps", "3"] if run.resumed else [])], run.world, gpu)
    if run.resumed and done.returncode == 0:
        done = call([*arguments[:-2], "--resume", out], run.world, gpu)
    run.code, run.said = done.returncode, said(done.stderr) if done.returncode else ""
    if run.code == 0:
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        run.losses = [row["loss"] for row in rows if "loss" in row]
        if run.export:
            run.export_off = exported(run, out, gpu)
    run.seconds = round(time.monotonic() - begun, 1)
    return run


def exported(run: Run, out: str, gpu: int) -> float:
    """Return how far the loss of the run's export lies from the run's own, both evaluated anew in BF16."""
    found = []
    done = call(
        ["export", "--model", out, "--format", run.export, "--out", f"{out}/export"], 1, gpu
    )
    how = [
        "--recipes",
        "bf16",
        "--max-batches",
        "2",
        "--seq-len",
        "128",
        "--data",
        "README.md",
        "--json",
    ]
    for model in (out, f"{out}/export"):
        if done.returncode == 0:
            done = call(["evaluate", "--model", model, *how], 1, gpu)
            found.append(
                json.loads(done.stdout)["losses"][0]["loss"] if done.returncode == 0 else 0.0
            )
    if done.returncode:
        run.code, run.said = done.returncode, f"export: {said(done.stderr)}"
        return 0.0
    return abs(found[1] / found[0] - 1)


def compared(run: Run, plain: Run) -> Run:
    """Note how far the losses of a run lie from those of the plain run of its group and recipe."""
    pairs = list(zip(run.losses, plain.losses, strict=False))
    same = len(run.losses) == len(plain.losses) > 0
    run.off = max(abs(one / other - 1) for one, other in pairs) if same else 9.0
    return run


def main() -> int:
    """Draw, run, compare and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1e9, help="no run starts after this many")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rng, groups, runs = random.Random(given.seed), [], []
    for number in range(-(-given.count // PER_GROUP)):
        groups.append(draw_group(rng, given.tiny))
        count = min(PER_GROUP, given.count - number * PER_GROUP)
        drawn = [draw_run(rng, number, groups[-1], given.gpus, given.tiny) for _ in range(count)]
        plain = [Run(number, recipe, []) for recipe in sorted({run.recipe for run in drawn})]
        runs += [*plain, *drawn]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        bases = [Path(folder, f"base{number}") for number in range(len(groups))]
        few = ["--recipe", "bf16", "--steps", "2", "--warmup-steps", "1", "--eval-every", "0"]
        first = {
            number: pool.submit(call, ["pretrain", *group.model, *group.data, *few, "--out", str(base)], 1,
                                number % given.gpus)
            for number, (group, base) in enumerate(zip(groups, bases, strict=True)) if group.adapters
        }  # fmt: skip
        for job in first.values():
            if job.result().returncode:
                raise SystemExit(job.result().stderr[-1500:])
        end = time.monotonic() + given.seconds

        finished: list[Run] = []

        def start(n: int, run: Run) -> None:
            if time.monotonic() > end:
                return
            train(
                run,
                groups[run.group].command(bases[run.group]),
                Path(folder, str(n)),
                n % given.gpus,
            )
            finished.append(run)
            if run.code:  # at once: whoever ends this program early shall know
                print("ended with", run.code, json.dumps(asdict(run)), flush=True)
            if given.out:
                given.out.write_text(
                    json.dumps(summary(given, groups, finished, runs), indent=1) + "\n"
                )

        list(pool.map(start, range(len(runs)), runs))
    result = summary(given, groups, finished, runs)
    print(json.dumps({name: value for name, value in result.items() if name != "groups"}, indent=1))
    return 1 if result["bad"] else 0


def summary(
    given: argparse.Namespace, groups: list[Group], finished: list[Run], runs: list[Run]
) -> dict[str, Any]:
    """Compare every finished run with the plain one of its group and recipe; return what is committed."""
    import torch

    from te_models.inspect.environment import environment

    plains = {(run.group, run.recipe): run for run in reversed(runs)}  # the first of each
    drawn = []
    failures = [run for run in finished if run.code and not run.refused]
    for run in list(finished):
        plain = plains[run.group, run.recipe]
        if run is not plain and (plain.losses or run.code):
            drawn.append(compared(run, plain))
            failures += [run] if run.code == 0 and not run.good else []
    good = [run for run in drawn if run.good]
    return dict(
        environment=environment() if torch.cuda.is_available() else {"torch": torch.__version__}, seed=given.seed,
        gpus=given.gpus, runs=len(drawn), bad=len(failures), refused=sum(run.refused for run in drawn),
        two_gpus=sum(run.world == 2 for run in good),
        resumed=sum(run.resumed for run in good), exported=sum(bool(run.export) for run in good),
        largest_difference={r: max((run.off for run in good if run.recipe == r), default=0.0) for r in RECIPES},
        largest_difference_of_exports=max((run.export_off for run in good), default=0.0),
        failures=[asdict(run) for run in failures],
        groups=[" ".join(group.command(Path("base")) + group.model * bool(group.adapters)) for group in groups],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
