"""A captured step in as many processes as its run had: each casts its own share, with scales of its own.

One process with the whole batch would have other scales (of `current`, the largest magnitude of all rows in place of
each share's), divided layers would add in another order, and no bit would be the recorded one. The processes are
started as torchrun starts them; `python -m te_models.inspect.replay_processes FOLDER` is one of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import te_models
from te_models.config.recipe import Recipe, recipe_from_dict
from te_models.errors import LostPeer, TeModelsError
from te_models.inspect.replay_report import StepRun
from te_models.inspect.replay_step import ALONE, run_config, run_step
from te_models.recorder.layout import RecordedTensor
from te_models.recorder.record import Record
from te_models.training.captures import Capture, read_capture
from te_models.training.launch import parallel
from te_models.training.parallel import Parallel

MOST = 16  # processes on one machine; each needs memory for Python and PyTorch
# Seconds that processes wait for each other, which emulate FP8 on a slow machine.
PATIENCE = 24 * 3600
JOB = "job.json"


def processes_here(capture: Capture, device: str) -> int:
    """Return the number of processes that a replay of a step starts on a device: the run's, or 1.

    GPUs have one process each. More than MOST processes are no longer for one machine without GPUs.
    """
    room = torch.cuda.device_count() if torch.device(device).type == "cuda" else MOST
    return capture.processes if capture.processes <= room else 1


def run_steps(
    run: Path,
    capture: Capture,
    recipes: Sequence[Recipe],
    *,
    device: str,
    engine: str,
    processes: int,
) -> list[StepRun | TeModelsError]:
    """Run a captured step under each of several recipes; in place of a step that cannot run, return its error.

    Args:
        run: the folder of the run.
        capture: the step.
        recipes: under which it runs, one after the other.
        device: where the model is.
        engine: "emulated" or "native".
        processes: how many share the step; more than one are started.

    Raises:
        TeModelsError: the processes cannot be started, or one of them failed.
    """
    if processes == 1:
        return [_tried(capture, recipe, device, engine) for recipe in recipes]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_job(folder, run, capture.step, recipes, device=device, engine=engine)
        start_processes(folder, processes)
        return [_read(folder, number, capture.step) for number in range(len(recipes))]


def write_job(
    folder: Path, run: Path, step: int, recipes: Sequence[Recipe], *, device: str, engine: str
) -> None:
    """Write what processes are to run: a captured step of a run under each of several recipes."""
    job = dict(
        run=str(run.resolve()),
        step=step,
        device=device,
        engine=engine,
        recipes=[recipe.to_dict() for recipe in recipes],
    )
    (folder / JOB).write_text(json.dumps(job))


def run_share(folder: Path, shared: Parallel) -> None:
    """Run the steps of the job in a folder in this process's share; the first process writes what came of them."""
    job = json.loads((folder / JOB).read_text())
    capture = read_capture(Path(job["run"]), job["step"])
    for number, fields in enumerate(job["recipes"]):
        recipe = recipe_from_dict(fields)
        result = _tried(capture, recipe, job["device"], job["engine"], shared)
        if shared.ranks.first:
            _write(folder, number, result)


def _tried(
    capture: Capture, recipe: Recipe, device: str, engine: str, shared: Parallel = ALONE
) -> StepRun | TeModelsError:
    """Return the run of a step, or the error that keeps it from running."""
    try:
        with warnings.catch_warnings():
            if recipe.to_dict() != capture.recipe.to_dict():
                # It is tried to see what it does: its warnings are not about the run.
                warnings.simplefilter("ignore")
            return run_step(capture, recipe, device=device, engine=engine, shared=shared)
    except TeModelsError as error:
        return error
    except ValueError as error:
        return TeModelsError(str(error))


def start_processes(folder: Path, processes: int) -> None:
    """Run `main` in so many processes, to their end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", __name__, str(folder)]
    # The package of this process, wherever it was imported from.
    root = str(Path(te_models.__file__).parents[1])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    quiet: Any = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, **quiet) as torchrun:
        try:
            _, errors = torchrun.communicate()
        except BaseException:
            # torchrun ends its processes when it is asked to; killed, it would leave them behind.
            torchrun.terminate()
            raise
    if torchrun.returncode:
        raise TeModelsError(
            f"the {processes} processes that replay the step, as many as its run had, failed "
            f"({_reason(folder, errors)}): --one-process runs it in one, whose scales are then not the recorded ones"
        )


def _reason(folder: Path, errors: str) -> str:
    """Return why processes failed: the error of one that did not only lose another, else torchrun's last line.

    Of a process that is killed by a signal only torchrun knows; `errors` is what it printed.
    """
    reasons = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    reasons.sort(key=lambda reason: reason.startswith(LostPeer.__name__))
    return reasons[0] if reasons else errors.strip().rpartition("\n")[2]


def _write(folder: Path, number: int, result: StepRun | TeModelsError) -> None:
    """Write the run of a step, or its error, to files of the folder."""
    if isinstance(result, TeModelsError):
        (folder / f"{number}.json").write_text(json.dumps({"error": str(result)}))
        return
    record = result.record
    np.savez(folder / f"{number}.npz", values=record.values, codes=record.codes)
    document = dict(
        loss=result.loss,
        grad_norm=result.grad_norm,
        tensors=[tensor.to_dict() for tensor in record.tensors],
    )
    (folder / f"{number}.json").write_text(json.dumps(document))


def _read(folder: Path, number: int, step: int) -> StepRun | TeModelsError:
    """Return what `_write` wrote."""
    document = json.loads((folder / f"{number}.json").read_text())
    if "error" in document:
        return TeModelsError(document["error"])
    with np.load(folder / f"{number}.npz") as arrays:
        values = arrays["values"]
        codes = arrays["codes"]
    tensors = [RecordedTensor.from_dict(fields) for fields in document["tensors"]]
    record = Record(tensors=tensors, steps=[step], values=values, codes=codes)
    return StepRun(loss=document["loss"], grad_norm=document["grad_norm"], record=record)


def main(folder: Path) -> None:
    """Join the other processes, and run this one's share of the job in a folder."""
    job = json.loads((folder / JOB).read_text())
    try:
        capture = read_capture(Path(job["run"]), job["step"])
        config = dataclasses.replace(run_config(capture), collective_timeout=PATIENCE)
        adapters = (capture.state / "adapter_config.json").exists()
        with parallel(config, job["device"], frozen=adapters) as shared:
            run_share(folder, shared)
    except Exception as error:
        (folder / f"failed-{os.environ.get('RANK')}").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
