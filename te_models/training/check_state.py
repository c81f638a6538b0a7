"""Training state other than model and optimizer: random numbers of all processes, and checks of what was saved."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.distributed.control import Ranks
from te_models.errors import CheckpointError, UsageError, plural
from te_models.files.atomic import reraising
from te_models.training.parallel import Parallel
from te_models.training.result import Result
from te_models.training.run_file import read_provenance
from te_models.training.step_start import RandomState

COUNT_LIMIT = 2**62


def check_random_state(state: object, rank: int, generator: torch.Generator, name: str) -> Tensor:
    """Return the random state of `rank` in `state`, uint8 [bytes] of one process or [ranks, bytes] of any number.

    It is a copy: PyTorch's setters read from the start of the storage, whatever the tensor's offset. `generator` is
    a generator of the device that nothing else uses; its state is set as a test. `name` names the state in errors.
    """
    with reraising(
        f"{name} is not a random state of a {generator.device.type} device", RuntimeError, TypeError
    ):
        if (
            not isinstance(state, Tensor)
            or state.dtype != torch.uint8
            or state.dim() not in (1, 2)
            or not len(state)
        ):
            raise TypeError("it is not uint8 [bytes], or a row of that per rank")
        # A run may go on with more processes than it was saved by: states are then used several times.
        random = (state if state.dim() == 1 else state[rank % len(state)]).clone()
        generator.set_state(random)
        return random


def read_random_state(
    state: Mapping[str, object], folder: Path, rank: int, device: torch.device
) -> RandomState:
    """Return the random numbers of `rank` on the CPU and on its CUDA device, if any, from a saved training state."""
    cpu = check_random_state(state["rng"], rank, torch.Generator(), f"{folder}: rng")
    cuda = None
    # A run may go on with another kind of device than it was saved on.
    if state["cuda_rng"] is not None and device.type == "cuda":
        generator = torch.Generator(device)
        cuda = check_random_state(state["cuda_rng"], rank, generator, f"{folder}: cuda_rng")
    return RandomState(cpu, cuda)


def random_states(random: Tensor, ranks: Ranks) -> Tensor:
    """Return the random states of all ranks, one per row; a single process's state is not in a row."""
    if ranks.world == 1:
        return random
    return torch.tensor(ranks.gather(random.tolist()), dtype=torch.uint8)


def check_structure(saved: Any, live: Any, name: str) -> None:
    """Compare `saved`, the part `name` of a training state, with the `live` value that it is to replace.

    Lists may have other lengths, and dicts of numbered lanes other lanes; the dataset judges those. None stands for a
    number or a text that is not there yet.

    Raises:
        CheckpointError: `saved` has another structure, or a number below 0 or far too large.
    """
    # JSON writes a float such as 2.0 that was assigned as an int without its point.
    kinds = {type(None): (int, str, type(None)), float: (float, int)}.get(type(live), (type(live),))
    if type(saved) not in kinds:
        raise CheckpointError(
            f"training.json: {name} is a {type(saved).__name__} where a {kinds[0].__name__} belongs"
        )
    if isinstance(live, dict):
        for key, value in live.items():
            if key in saved:
                check_structure(saved[key], value, f"{name}.{key}")
            # Another number of lanes is a matter of the data, which says so in a message of its own.
            elif not key.isdecimal() or len(saved) == len(live):
                raise CheckpointError(f"training.json: {name} lacks {key}")
        for key in saved.keys() - live.keys():
            if not str(key).isdecimal():
                raise CheckpointError(
                    f"training.json: {name} has {str(key)[:60]}, which this version does not know"
                )
    elif isinstance(live, (list, tuple)):
        for number, value in enumerate(saved):
            check_structure(value, live[0] if live else value, f"{name}.{number}")
    # -1 and the like stand where the live state has them too.
    elif isinstance(live, int) and not 0 <= saved < COUNT_LIMIT and saved != live:
        raise CheckpointError(f"training.json: {name} is {saved}")


def gradient_factor(state: Mapping[str, Any], folder: Path, parallel: Parallel) -> int:
    """Return how many times larger gradients were, in the run that saved a training state, than they are now.

    Up to November 2026 each process divided its loss by its own share of the tokens, and gradients were averages over
    the processes that shared a batch: with N of them they were N times as large. Such a checkpoint does not record N;
    it has a random state for each process, and run.toml, written when the run started, says how the batch was shared.
    """
    if "gradient_factor" in state:
        check_structure(state["gradient_factor"], 1, "gradient_factor")
        return state["gradient_factor"]
    random = state["rng"]
    world = len(random) if random.dim() == 2 else 1
    processes = str(read_provenance(folder).get("processes", ""))
    described = re.match(r"(\d+), [a-z+]+ \((?:batches in (\d+))?", processes)
    if described is not None and int(described[1]) == world:
        return int(described[2] or 1)
    return parallel.data_world if parallel.ranks.world == world else world


def check_trained(saved: object, live: list[str], folder: Path) -> None:
    """Compare the names of the parameters that a saved run trained, or None if it has none, with those trained now.

    Raises:
        CheckpointError: the saved names are not a list of text.
        UsageError: other parameters are trained, that is, others are frozen.
    """
    if saved is None:  # a checkpoint up to November 2026 does not say
        return
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError("training.json: trained is not a list of names of parameters")
    now_frozen = sorted(set(saved) - set(live))
    now_trained = sorted(set(live) - set(saved))
    differences = []
    if now_frozen:
        differences.append(f"{_first_names(now_frozen)} trained then and not now")
    if now_trained:
        differences.append(f"{_first_names(now_trained)} frozen then and not now")
    if differences:
        raise UsageError(
            f"{folder} is of a run that trained other parameters: {', '.join(differences)}; resume with the same "
            "requires_grad, or start a new run from the checkpoint with --model"
        )


def _first_names(names: list[str]) -> str:
    """Return the first two names and the number of the others, with a verb."""
    if len(names) == 1:
        return f"{names[0]} was"
    if len(names) == 2:
        return f"{names[0]} and {names[1]} were"
    return f"{names[0]}, {names[1]} and {len(names) - 2} more were"


def read_result(saved: Any) -> Result:
    """Return the outcome so far in a training state; checkpoints of earlier versions lack some of its fields."""
    live = asdict(Result())
    if isinstance(saved, dict):
        live = {name: value for name, value in live.items() if name in saved}
    check_structure(saved, live, "result")
    return Result(**{name: saved[name] for name in live})


def check_patience(result: Result, patience: int) -> None:
    """Raise UsageError for a run that stopped early, where nothing has changed that lets it continue."""
    since = result.evaluations_since_best
    if result.stopped_early and patience and since >= patience:
        raise UsageError(
            f"the run stopped early at step {result.step}: {plural(since, 'evaluation')} brought no lower loss; give "
            "a larger --patience, or 0"
        )
