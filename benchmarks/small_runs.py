"""Many short training runs of small models: a few worker processes per GPU take them one after the other.

A process imports and starts CUDA once, and the text is encoded once for all. Each run is a Trainer over batches of its
own, without checkpoints, evaluated once at its end. What it found is written at once, so that a study that is cut off
loses only the runs under way and goes on with the others when it is called again with the same folder.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import statistics
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import te_models
from benchmarks.shared_gpus import VISIBLE, gpus, shared_gpus, variables
from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.tokenizer import load_tokenizer
from te_models.data.tokenizer_base import end_of_text
from te_models.errors import Diverged
from te_models.files.atomic import replace_text
from te_models.training.plots import smooth
from te_models.training.trainer import Trainer

# Of the model that ships: pieces of Python and English.
TOKENIZER = Path(te_models.__file__).parent / "pretrained" / "gated-nano" / "tokenizer.json"
FILE_BYTES = range(1_000, 200_000)
CORPUS = 120_000_000  # bytes of text of every study, more than 30 million tokens
POINTS = 100  # of each curve in the results
HELD_OUT = 100  # one document of so many is not trained on
RESTARTS = 3  # of a worker whose run failed
PAUSE = 0.5  # seconds between two looks at the workers
Found = dict[str, Any]


@dataclass(frozen=True)
class SmallRun:
    """A run of a study.

    Attributes:
        name: of the file with what it found.
        model: keywords of CausalLM.from_preset, the preset's as `name`.
        config: fields of TrainConfig.
        look: called with the trained model and rows of held-out ids, int64 [B, S]; returns more values to note.
    """

    name: str
    model: Mapping[str, Any]
    config: Mapping[str, Any]
    look: Callable[[CausalLM, Tensor], Found] | None = None


@dataclass
class Stopwatch:
    """Seconds of the parts of a run, one after the other."""

    parts: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    def note(self, part: str) -> None:
        """Note the time since the last note as that of `part`."""
        now = time.monotonic()
        self.parts[part] = round(now - self.begun, 3)
        self.begun = now


def write_corpus(file: Path, size: int) -> int:
    """Write Python sources and documentation found on this machine as JSON Lines, about `size` bytes; return them.

    The files of the standard library and of all installed packages, in an order that is the same on every machine that
    has them.
    """
    written = 0
    with file.open("w") as out:
        for path in _sources():
            text = path.read_text(errors="ignore")
            if len(text) not in FILE_BYTES:
                continue
            written += out.write(json.dumps({"text": text}) + "\n")
            if written >= size:
                break
    return written


def _sources() -> Iterator[Path]:
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    for root in sorted(roots):
        for pattern in ("*.py", "*.rst", "*.md"):
            yield from sorted(root.rglob(pattern))


def write_tokens(folder: Path, tokenizer: Path, size: int) -> None:
    """Write about `size` bytes of text as tokens: train.npy and held_out.npy, int32 [tokens], which appear last."""
    if (folder / "train.npy").exists():
        return
    corpus = folder / "corpus.jsonl"
    write_corpus(corpus, size)
    with corpus.open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    loaded = load_tokenizer(tokenizer)
    end = np.array([end_of_text(loaded)], dtype=np.int32)
    train: list[NDArray[np.int32]] = []
    held_out: list[NDArray[np.int32]] = []
    for number, ids in enumerate(loaded.encode_batch(texts)):
        part = held_out if number % HELD_OUT == 0 else train
        part += [ids.astype(np.int32), end]
    for name, parts in {"held_out": held_out, "train": train}.items():
        # Workers wait for the file: it must be whole when it appears.
        with (folder / f"{name}.tmp").open("wb") as file:
            np.save(file, np.concatenate(parts))
        (folder / f"{name}.tmp").rename(folder / f"{name}.npy")


def rows_of(tokens: NDArray[np.int32], seq_len: int) -> NDArray[np.int32]:
    """Return the tokens as rows [N, seq_len]."""
    count = len(tokens) // seq_len
    return tokens[: count * seq_len].reshape(count, seq_len)


def batch_of(rows: NDArray[np.int32]) -> dict[str, Tensor]:
    """Return rows as a batch, int64 [B, S]; a model shifts the labels itself."""
    ids = torch.from_numpy(rows.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def shuffled(rows: NDArray[np.int32], batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of all rows in an order that `seed` gives, and again in another order, without an end."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(rows))
        for first in range(0, len(order) - batch_size + 1, batch_size):
            yield batch_of(rows[np.sort(order[first : first + batch_size])])


def train(
    run: SmallRun,
    tokens: NDArray[np.int32],
    held_out: NDArray[np.int32],
    folder: Path,
    deadline: float,
) -> Found | None:
    """Return what became of a run, or None where the deadline (of time.monotonic) came before its end."""
    watch = Stopwatch()
    config = TrainConfig(**run.config, save_every=0)
    torch.manual_seed(config.seed)
    model = CausalLM.from_preset(**run.model)
    # Batches of one shape, for training and evaluation: operations are compiled for a shape.
    size = config.batch_size
    rows = rows_of(held_out, config.seq_len)[: size * config.eval_batches]
    batches = [batch_of(rows[at : at + size]) for at in range(0, len(rows) - size + 1, size)]
    trainer = Trainer(
        model=model,
        dataset=shuffled(rows_of(tokens, config.seq_len), size, config.seed),
        eval_batches=batches,
        config=config,
        out=folder / "unused",
    )
    watch.note("build")
    metrics: list[Mapping[str, Any]] = []
    try:
        # As Trainer.run begins a run, but nothing is written.
        torch.manual_seed(config.seed)
        for row in trainer.steps(trainer.passes.calibrated(iter(trainer.data))):
            metrics.append(row)
            if row["step"] == 1:
                watch.note("first step")
            if time.monotonic() > deadline:
                return None
    except Diverged:
        pass  # its summary says so
    finally:
        trainer.passes.close()
        model.te.FP8GlobalStateManager.reset()
    watch.note("steps")
    found = summary(metrics, config.steps)
    if run.look is not None and found["steps"] == config.steps:
        try:
            found |= run.look(model, batches[0]["input_ids"][:4])
        except Exception:
            # The training counts all the same.
            (folder / f"{run.name}.error").write_text(traceback.format_exc())
    watch.note("look")
    speeds = sorted(row["tokens_per_second"] for row in metrics) or [0.0]
    found["tokens_per_second"] = round(speeds[len(speeds) // 2])
    found["seconds"] = watch.parts
    return found


def summary(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Return what became of a run of `steps`: final and held-out loss, spikes, the first step that diverged, a curve.

    A spike is a loss above the smoothed curve before it by half of a nat; a run has diverged from the first step on
    after which its smoothed loss stays above its lowest by one nat, or is not finite.
    """
    losses = [float(row["loss"]) for row in rows if "loss" in row]
    held_out = [float(row["eval_loss"]) for row in rows if "eval_loss" in row]
    finite = [loss for loss in losses if math.isfinite(loss)]
    curve = smooth(finite)
    spikes = sum(loss > before + 0.5 for loss, before in zip(finite[1:], curve[:-1], strict=True))
    diverged = None
    lowest = math.inf
    for step, loss in enumerate(curve, 1):
        lowest = min(lowest, loss)
        if loss <= lowest + 1.0:
            diverged = None
        elif diverged is None:
            diverged = step
    if diverged is None and len(finite) < steps:
        diverged = len(finite) + 1
    every = max(1, len(curve) // POINTS)
    return {
        "steps": len(losses),
        "loss": round(sum(finite[-20:]) / max(1, len(finite[-20:])), 4),
        "held_out": round(held_out[-1], 4) if held_out else None,
        "spikes": int(spikes),
        "diverged": diverged,
        "curve": [round(loss, 3) for loss in curve[::every]],
    }


def work(runs: Any, complete: Any, folder: Path, deadline: float) -> None:
    """Take runs from a queue and write what became of each; a failure ends the process.

    Args:
        runs: a queue of SmallRun.
        complete: an event after which no more runs come: the process ends where the queue is empty.
        folder: has the tokens, and gets the results.
        deadline: of time.monotonic().
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    if torch.cuda.is_available():
        torch.zeros(1).cuda()  # makes the context while the text is encoded
    while not (folder / "train.npy").exists():
        time.sleep(PAUSE / 10)
    tokens = np.load(folder / "train.npy", mmap_mode="r")
    held_out = np.load(folder / "held_out.npy", mmap_mode="r")
    while time.monotonic() < deadline:
        try:
            run = runs.get(timeout=PAUSE)
        except Empty:
            if complete.is_set():
                return
            continue
        try:
            found = train(run, tokens, held_out, folder, deadline)
        except Exception:
            (folder / f"{run.name}.error").write_text(traceback.format_exc())
            os._exit(1)  # a broken CUDA context may hang at an orderly end
        if found is not None:
            text = json.dumps(found) + "\n"
            (folder / f"{run.name}.tmp").write_text(text)
            (folder / f"{run.name}.tmp").rename(folder / f"{run.name}.json")
        gc.collect()  # the model, to which only circles of objects lead now
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_all(
    runs: list[SmallRun],
    folder: Path,
    *,
    prepare: Callable[[], None],
    per_gpu: int,
    seconds: float,
    mps: bool = False,
    changed: Callable[[dict[str, Found]], None],
    follow: Callable[[dict[str, Found]], list[SmallRun]] | None = None,
) -> dict[str, Found]:
    """Train the runs that `folder` does not have; return what became of each that is finished, by its name.

    Args:
        runs: in the order in which they begin; those that `follow` returns are added to the list.
        folder: has a file for each finished run, and for each that failed its traceback.
        prepare: writes the tokens (`write_tokens`), while the workers start.
        per_gpu: worker processes on each GPU.
        seconds: nothing runs after this time.
        mps: let processes share each GPU by NVIDIA's MPS where it can be started.
        changed: called with the results when there are new ones.
        follow: called with the results, too: returns more runs that they call for, which may be in `runs` already.
    """
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    context = get_context("spawn")
    queue = context.Queue()
    complete = context.Event()
    arguments = (queue, complete, folder, deadline)
    for run in runs:
        if not (folder / f"{run.name}.json").exists():
            queue.put(run)

    def put_more(found: dict[str, Found]) -> None:
        """Put the runs into the queue that the results call for; where all have ended, no more come."""
        names = {run.name for run in runs}
        more = [] if follow is None else follow(found)
        for run in more:
            if run.name in names:
                continue
            runs.append(run)
            if not (folder / f"{run.name}.json").exists():
                queue.put(run)
        ended = {file.stem for kind in ("json", "error") for file in folder.glob(f"*.{kind}")}
        if follow is None or {run.name for run in runs} <= ended:
            complete.set()

    places = gpus() * per_gpu
    workers: list[Any] = []

    def start(device: str, sharing: Mapping[str, str]) -> Any:
        # A process reads them when it starts CUDA.
        with variables({**sharing, VISIBLE: device}):
            worker = context.Process(target=work, args=arguments)
            worker.start()
        return worker

    known: dict[str, Found] = {}
    left = RESTARTS * len(places)
    with shared_gpus(folder) if mps else nullcontext({}) as sharing:
        print(f"{len(places)} workers on {len(gpus())} devices, MPS: {bool(sharing)}", flush=True)
        try:
            queue.cancel_join_thread()  # runs that are left do not keep the program
            workers += [start(device, sharing) for device in places]
            prepare()
            while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline + 5:
                time.sleep(PAUSE)
                for number, worker in enumerate(workers):
                    if not worker.is_alive() and worker.exitcode and left:
                        left -= 1
                        # Alone: what broke may be the sharing.
                        workers[number] = start(places[number], {})
                found = finished(runs, folder)
                if len(found) > len(known):
                    known = found
                    changed(known)
                put_more(found)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join(5)
            known = finished(runs, folder)
            changed(known)
    return known


def finished(runs: Sequence[SmallRun], folder: Path) -> dict[str, Found]:
    """Return what became of the runs that are finished, by name."""
    found = {}
    for run in runs:
        file = folder / f"{run.name}.json"
        if file.exists():
            found[run.name] = json.loads(file.read_text())
    return found


def run_study(
    asked: list[SmallRun],
    folder: Path,
    out: Path,
    about: Mapping[str, Any],
    *,
    text_bytes: int,
    per_gpu: int,
    seconds: float,
    mps: bool,
    follow: Callable[[dict[str, Found]], list[SmallRun]] | None = None,
) -> dict[str, Found]:
    """Train the runs of a study that `folder` does not have, write all results whenever one ends, and report.

    Args:
        asked: the runs, on text in the tokens of the model that ships.
        folder: as in `run_all`; it gets the tokens, too.
        out: gets the results as JSON.
        about: what it says of the study beside them.
        text_bytes: of text that becomes tokens.
        per_gpu: as in `run_all`, like `seconds`, `mps` and `follow`.
    """
    results = run_all(
        asked,
        folder,
        prepare=lambda: write_tokens(folder, TOKENIZER, text_bytes),
        per_gpu=per_gpu,
        seconds=seconds,
        mps=mps,
        changed=lambda found: write_results(out, {**about, "gpus": len(gpus())}, asked, found),
        follow=follow,
    )
    report(results, folder)
    return results


def write_results(
    out: Path, about: Mapping[str, Any], asked: Sequence[SmallRun], results: Mapping[str, Found]
) -> None:
    """Write what became of a study's runs, with the names of those that are missing."""
    missing = [run.name for run in asked if run.name not in results]
    replace_text(out, json.dumps({**about, "missing": missing, "runs": results}) + "\n")


def spread(values: Sequence[float]) -> str:
    """Return the mean of the seeds, with the standard deviation where there are several."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def report(results: Mapping[str, Found], folder: Path) -> None:
    """Print how many runs there are, the time that they took, and the tracebacks of those that failed."""
    seconds = [found["seconds"] for found in results.values()]
    total = sum(sum(parts.values()) for parts in seconds)
    print(f"{len(results)} runs, {total / max(1, len(results)):.1f} s for each in its process")
    for part in ("build", "first step", "steps", "look"):
        spent = sum(parts.get(part, 0.0) for parts in seconds)
        print(f"  {part}: {spent / max(1, len(results)):.2f} s, {spent / max(total, 1e-9):.0%}")
    errors = sorted(folder.glob("*.error"))
    for file in errors[:3]:
        print(f"{file.stem} failed:\n{file.read_text()[-1500:]}")
    if errors:
        print(f"{len(errors)} failed in all")
