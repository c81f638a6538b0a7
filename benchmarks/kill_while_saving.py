"""Kill a process with SIGKILL while it saves checkpoints, again and again, and check the files that are left.

    python benchmarks/kill_while_saving.py --kills 100

Each round forks a child that saves one checkpoint after the other and is killed: three times out of four at a random
file operation of its first few saves, else after a random time. The parent then demands that `latest()` names a
checkpoint that loads, that every tensor in it is of one and the same save, and that no save that had returned is lost.
Four ways of saving take turns: a new folder per step or the same folder again, blocking or in the background. Prints a
JSON summary to stdout and exits with 1 if any checkpoint was damaged or lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from te_models.saving.folder import load_folder
from te_models.saving.run_folder import Checkpoints

WAYS = [
    (folder, blocking) for folder in ("new folder", "same folder") for blocking in (True, False)
]
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


class ChildFailed(Exception):
    """The child could not save on top of what the last kill had left."""


def content(number: int) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Tensors and documents that all carry `number`; about 1 MB, in two shards."""
    tensors = {
        "model": {f"layer.{i}.weight": torch.full((256, 256), float(number)) for i in range(4)},
        "training": {"number": torch.tensor(number)},
    }
    return tensors, {"training": {"number": number}}


def checkpoints(root: Path) -> Checkpoints:
    """Return the run folder's checkpoints with the settings of a training run."""
    return Checkpoints(root, keep_last=2, max_shard_bytes=600_000)


def save_until_killed(
    root: Path, done: int, start: int, way: tuple[str, bool], kill_at: int | None
) -> None:
    """Run the child: save forever, writing the number of each finished save to the file descriptor `done`."""
    run, (folder, blocking) = checkpoints(root), way
    operations = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in FILE_EVENTS and str(root) in str(arguments[0]):
            operations += 1
            if operations == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    for number in range(start, start + 10_000):
        step = number if folder == "new folder" else 7
        run.save(step, *content(number), blocking=blocking)
        run.wait()
        os.write(done, number.to_bytes(8, "little"))


def kill_one(
    root: Path, start: int, way: tuple[str, bool], kill_at: int | None, delay: float
) -> int | None:
    """Forks a child, kills it and returns the number of its last finished save."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            save_until_killed(root, writer, start, way, kill_at)
        finally:
            os._exit(1)
    os.close(writer)
    if kill_at is None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with open(reader, "rb") as pipe:
        finished = pipe.read()
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise ChildFailed(
            f"a save failed after the last kill; the child ended with status {status}"
        )
    return int.from_bytes(finished[-8:], "little") if finished else None


def newest_number(root: Path) -> int | None:
    """The number that the newest checkpoint carries throughout; None without a checkpoint, ValueError if damaged."""
    path = checkpoints(root).latest()
    if path is None:
        return None
    found = load_folder(path)
    number = found.documents["training"]["number"]
    values = [
        found.tensors["training"]["number"],
        *(tensor.unique() for tensor in found.tensors["model"].values()),
    ]
    if len(values) != 5 or any(value.numel() != 1 or value.item() != number for value in values):
        raise ValueError(f"{path} mixes saves")
    return number


def run(kills: int, seed: int, root: Path) -> dict[str, Any]:
    """Kills `kills` times in `root` and returns the summary."""
    rng = random.Random(seed)
    outcome: Counter[str] = Counter()
    problems: list[str] = []
    expected: dict[tuple[str, bool], int | None] = dict.fromkeys(WAYS)
    number = 1
    began = time.perf_counter()
    for kill in range(kills):
        way = WAYS[kill % len(WAYS)]
        folder = root / f"{way[0].replace(' ', '-')}-{way[1]}"
        kill_at = rng.randint(1, 80) if kill // len(WAYS) % 4 < 3 else None
        try:
            finished = kill_one(folder, number, way, kill_at, rng.uniform(0.0, 0.08))
            lower = finished if finished is not None else expected[way]
            found = newest_number(folder)
            if lower is not None and (found is None or found < lower):
                raise LookupError(f"{folder}: {found} where {lower} had been saved")
        except (ChildFailed, LookupError, ValueError) as error:
            outcome["lost" if isinstance(error, LookupError) else "damaged"] += 1
            problems.append(str(error))
            shutil.rmtree(folder)
            found = None
        else:
            outcome["whole" if found is not None else "none saved yet"] += 1
        expected[way] = found
        number += 10_000
    return {
        "kills": kills,
        **{key: outcome[key] for key in ("whole", "none saved yet", "damaged", "lost")},
        "leftovers_after_a_clean_save": leftovers(root, number),
        "problems": problems[:5],
        "seconds": round(time.perf_counter() - began, 2),
    }


def leftovers(root: Path, number: int) -> list[str]:
    """List leftovers in each folder after a last, undisturbed save."""
    found = []
    for folder in root.iterdir():
        run = checkpoints(folder)
        run.save(number, *content(number))
        kept = {"latest", *(path.name for path in run.all())}
        found += [str(entry) for entry in folder.iterdir() if entry.name not in kept]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to save; a temporary folder otherwise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        summary = run(options.kills, options.seed, root)
    finally:
        shutil.rmtree(root)
    print(json.dumps(summary, indent=2))
    sys.exit(
        1 if summary["damaged"] or summary["lost"] or summary["leftovers_after_a_clean_save"] else 0
    )


if __name__ == "__main__":
    main()
