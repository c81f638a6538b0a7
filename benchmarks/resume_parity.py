"""Does a resumed run go on with the same bits? 100 steps at once against 50, a checkpoint, and 50 more.

    python benchmarks/resume_parity.py --out benchmarks/results/resume_parity_h200.json                     # 4 minutes
    python benchmarks/resume_parity.py --device cpu --tiny --steps 8 --rounds 2 --out resume_parity.json    # anywhere

Every run has a process of its own. Under the default flags cuDNN's attention adds in an order that varies from run to
run, so there the question is whether a resumed run is as near to one in a piece as a second run in a piece is; with
deterministic=True whether they are the same in every bit: losses after the checkpoint, weights, scales and amax
histories, masters and moments. A third run of 100 steps saves after 50 and goes on, which must change nothing either.

The cost of deterministic=True: milliseconds per step of both, in turns, at gated-124m and gated-350m.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents, split_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.saving.folder import load_folder
from te_models.saving.run_folder import Checkpoints
from te_models.training.metrics import read_metrics
from te_models.training.trainer import Trainer, deterministic

SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=288,
)  # fmt: skip
Settings = dict[str, Any]


def train(
    settings: Settings,
    folder: Path,
    until: int,
    exactly: bool,
    save_every: int = 0,
    resume: bool = False,
) -> None:
    """A run up to step `until` in `folder`; the schedule is always that of all steps."""
    torch.set_num_threads(1)
    config = TrainConfig(steps=settings["steps"], batch_size=settings["batch_size"], seq_len=settings["seq_len"],
                         eval_every=0, save_every=save_every, keep_last=9, deterministic=exactly, seed=3)  # fmt: skip
    torch.manual_seed(config.seed)
    model = CausalLM.from_preset(settings["preset"], recipe=settings["recipe"], device=settings["device"],
                                 **settings["shape"])  # fmt: skip
    words, parts = load_tokenizer(None), split_documents(load_documents(settings["data"]), seed=0)
    data, held_out = (
        TokenDataset(
            part, words, config.seq_len, batch_size=config.batch_size, seed=0, shuffle=shuffle
        )
        for part, shuffle in zip(parts, (True, False), strict=True)
    )
    run = Trainer(model, data, held_out.eval_batches(2), config, folder)

    def stop(row: dict[str, Any]) -> None:
        run.stopping = run.stopping or row["step"] >= until

    run.on_step = stop
    result = run.run(resume=resume)
    assert result.step == until, f"stopped after {result.step} instead of {until}"


def alone(function: Any, *arguments: Any) -> Any:
    """A call in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compare(one: Path, other: Path, after: int) -> dict[str, Any]:
    """Losses after step `after`, and each group of tensors of the newest checkpoint: how many differ,
    and by how much."""
    curves = [
        [row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["step"] > after]
        for run in (one, other)
    ]
    gaps = [abs(a / b - 1) for a, b in zip(*curves, strict=True)]
    found: dict[str, Any] = dict(
        losses=dict(equal=curves[0] == curves[1], first=gaps[0], last=gaps[-1], most=max(gaps))
    )
    folders = [Checkpoints(run / "checkpoints").latest() for run in (one, other)]
    assert folders[0] is not None and folders[1] is not None and folders[0].name == folders[1].name
    contents = [load_folder(folder) for folder in folders if folder is not None]
    for group, tensors in contents[0].tensors.items():
        theirs = contents[1].tensors[group]
        assert tensors.keys() == theirs.keys(), group
        names = [name for name in tensors if not same_bits(tensors[name], theirs[name])]
        floats = [
            name for name in tensors if tensors[name].is_floating_point() and tensors[name].numel()
        ]
        gap, size = (
            sum(float(value.double().square().sum()) for value in values) ** 0.5
            for values in (
                [tensors[name].double() - theirs[name].double() for name in floats],
                [tensors[name] for name in floats],
            )
        )
        found[group] = dict(
            tensors=len(tensors),
            different=len(names),
            distance=gap / size if size else gap,
            names=names[:5],
        )
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def equal(found: dict[str, Any]) -> bool:
    """Return True if a comparison found no difference."""
    return found["losses"]["equal"] and not any(part.get("different") for part in found.values())


def parity(settings: Settings, exactly: bool, root: Path) -> dict[str, Any]:
    """Four runs, and how far the other three are from the first."""
    steps, half = settings["steps"], settings["steps"] // 2
    first = [
        ("whole", steps, 0),
        ("again", steps, 0),
        ("saving", steps, half),
        ("resumed", half, half),
    ]  # a save: no step after it is queued
    with ThreadPoolExecutor(len(first)) as pool:
        runs = [
            pool.submit(alone, train, settings, root / name, end, exactly, save)
            for name, end, save in first
        ]
        for run in runs:
            run.result()
    alone(train, settings, root / "resumed", steps, exactly, 0, True)
    found = {name: compare(root / "whole", root / name, 0) for name in ("again", "saving")}
    found["resumed"] = compare(root / "whole", root / "resumed", half)
    found["before the checkpoint"] = compare(root / "whole", root / "resumed", 0)
    return {name: dict(equal=equal(row), **row) for name, row in found.items()}


def parity_in(settings: Settings, exactly: bool) -> dict[str, Any]:
    """`parity` in a folder that is then taken away."""
    with tempfile.TemporaryDirectory() as root:
        return parity(settings, exactly, Path(root))


class Timed:
    """A run in a process of its own, of which a few steps are timed now and then."""

    def __init__(self, settings: Settings, exactly: bool) -> None:
        self.pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), begin, (settings, exactly)
        )

    def seconds(self, steps: int) -> float:
        """Of a step, in the mean of `steps`, while no other process uses the device."""
        return self.pool.submit(turn, steps).result()


RUN: dict[str, Any] = {}  # in such a process


def begin(settings: Settings, exactly: bool) -> None:
    """Build the run."""
    torch.set_num_threads(1)
    config = TrainConfig(steps=10**6, batch_size=settings["batch_size"], seq_len=settings["seq_len"], eval_every=0,
                         deterministic=exactly)  # fmt: skip
    torch.manual_seed(0)
    place = dict(recipe=settings["recipe"], device=settings["device"])
    model = CausalLM.from_preset(settings["preset"], **place, **settings["shape"])
    documents, words = load_documents(settings["data"]), load_tokenizer(None)
    data = TokenDataset(documents, words, config.seq_len, batch_size=config.batch_size, seed=0)
    run = Trainer(model, data, [], config, Path("unused"))
    RUN.update(device=model.device, rows=run.steps(iter(data)), exactly=exactly)


def turn(steps: int) -> float:
    """Seconds a step, of the next `steps` ones."""
    with deterministic() if RUN["exactly"] else contextlib.nullcontext():
        wait(RUN["device"])
        start = time.perf_counter()
        for _ in itertools.islice(RUN["rows"], steps):
            pass
        wait(RUN["device"])
        return (time.perf_counter() - start) / steps


def wait(device: torch.device) -> None:
    """Wait for all queued work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def cost(settings: Settings, rounds: int, tiny: bool) -> dict[str, Any]:
    """Measure the cost of deterministic=True at two sizes."""
    found = {}
    for preset, batch, length in (("gated-124m", 8, 512), ("gated-350m", 4, 2048)):
        own = settings | ({} if tiny else dict(preset=preset, batch_size=batch, seq_len=length))
        runs = {name: Timed(own, name == "deterministic") for name in ("default", "deterministic")}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                spent = 1e3 * run.seconds(2 if tiny else 20)
                if number:  # the first turn compiles and captures
                    times[name].append(spent)
        row: dict[str, Any] = {
            name: dict(ms=statistics.median(of), quartiles=statistics.quantiles(of)[::2])
            for name, of in times.items()
        }
        for run in runs.values():
            run.pool.shutdown()
        ratio = row["deterministic"]["ms"] / row["default"]["ms"]
        found[preset] = dict(row, ratio=ratio, batch_size=own["batch_size"], seq_len=own["seq_len"])
        print(
            preset,
            {name: row[name]["ms"] for name in ("default", "deterministic")},
            f"ratio {ratio:.3f}",
            flush=True,
        )
    return found


@click.command()
@click.option("--steps", default=100)
@click.option(
    "--recipe", "recipes", multiple=True, help="May be repeated; default: delayed and current."
)
@click.option("--rounds", default=12, help="Turns of the timing; 0: none.")
@click.option("--device", default="cuda")
@click.option("--tiny", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    steps: int, recipes: tuple[str, ...], rounds: int, device: str, tiny: bool, out: Path
) -> None:
    """Compare, time, print and write; 1 if deterministic runs differ in a bit."""
    settings: Settings = dict(
        preset="gated-124m",
        shape={},
        batch_size=8,
        seq_len=512,
        steps=steps,
        device=device,
        data=None,
    )
    if tiny:
        data = str(Path(__file__).parent.parent / "te_models" / "config")
        settings |= dict(preset="gated-nano", shape=SMALL, batch_size=2, seq_len=32, data=data)
    document: dict[str, Any] = dict(environment=environment(), settings=settings, parity={})
    good = True
    cases = [
        (recipe, exactly)
        for recipe in recipes or ("delayed", "current")
        for exactly in (False, True)
    ]
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda case: parity_in(settings | dict(recipe=case[0]), case[1]), cases)
        )
    for (recipe, exactly), rows in zip(cases, found, strict=True):
        title = f"{recipe}, {'deterministic' if exactly else 'default'}"
        document["parity"][title] = rows
        good = good and (not exactly or all(row["equal"] for row in rows.values()))
        for name, row in rows.items():
            parts = {part: f"{value['different']}/{value['tensors']} differ, {value['distance']:.2g}"
                     for part, value in row.items() if isinstance(value, dict) and "tensors" in value}  # fmt: skip
            print(
                f"{title}, {name}: equal {row['equal']}, losses by {row['losses']['most']:.2g}",
                parts,
                flush=True,
            )
    out.write_text(json.dumps(document, indent=1) + "\n")
    if rounds:
        document["cost"] = cost(settings | dict(recipe="delayed"), rounds, tiny)
    out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
