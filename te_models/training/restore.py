"""Checks of saved training state other than model and optimizer, before the live run changes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.files.atomic import explained

COUNT_LIMIT = 2**62
LATER = {"best_eval_loss", "best_step", "evaluations_since_best", "stopped_early", "signal"}


def check_random_state(state: object, rank: int, generator: torch.Generator, name: str) -> Tensor:
    """Return the random state of `rank` in `state`, uint8 [bytes] of one process or [ranks, bytes] of any number.

    It is a copy: PyTorch's setters read from the start of the storage, whatever the tensor's offset. `generator` is
    a generator of the device that nothing else uses; its state is set as a test. `name` names the state in errors.
    """
    with explained(f"{name} is not a random state of a {generator.device.type} device", RuntimeError, TypeError):
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() not in (1, 2) or not len(state):
            raise TypeError("it is not uint8 [bytes], or a row of that per rank")
        own = (state if state.dim() == 1 else state[rank % len(state)]).clone()
        generator.set_state(own)
        return own


def read_random_states(
    state: Mapping[str, object], folder: Path, rank: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return the random states of `rank` on the CPU and on its CUDA device, if any, from a saved training state."""
    random = check_random_state(state["rng"], rank, torch.Generator(), f"{folder}: rng")
    if state["cuda_rng"] is None or device.type != "cuda":
        return random, None
    return random, check_random_state(state["cuda_rng"], rank, torch.Generator(device), f"{folder}: cuda_rng")


def position_mistakes(saved: Any, live: Any, name: str = "dataset") -> Iterator[str]:
    """Yield what is wrong with `saved` unless it has the structure of `live`, a dataset's state_dict, and no number
    below 0.

    Lists may have other lengths, and dicts of numbered lanes other lanes; the dataset judges those.
    """
    if type(saved) is not type(live):
        yield f"training.json: {name} is a {type(saved).__name__} where a {type(live).__name__} belongs"
    elif isinstance(live, dict):
        for key, value in live.items():
            if key in saved:
                yield from position_mistakes(saved[key], value, f"{name}.{key}")
            elif not key.isdecimal() or len(saved) == len(live):
                yield f"training.json: {name} lacks {key}"
    elif isinstance(live, (list, tuple)):
        for number, value in enumerate(saved):
            yield from position_mistakes(value, live[0] if live else value, f"{name}.{number}")
    elif isinstance(live, int) and not 0 <= saved < COUNT_LIMIT and saved != live:
        yield f"training.json: {name} is {saved}"


def waiting_in_vain(saved: Mapping[str, object], patience: int) -> dict[str, object]:
    """Return the table for `refuse` of a run that stopped early, where nothing has changed that lets it continue."""
    since = saved.get("evaluations_since_best", 0)
    assert isinstance(since, int)
    line = f"the run stopped early at step {saved['step']}: {since} evaluations brought no lower loss; give a larger "
    return {f"{line}--patience, or 0": saved.get("stopped_early") and patience and since >= patience}


def result_mistakes(saved: Any, live: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with `saved` unless it has the fields of `live`, a Result as a dict, of the same types.

    Checkpoints of earlier versions lack LATER ones.
    """
    optional: dict[str, tuple[type, ...]] = {"peak_memory": (int, type(None)), "checkpoint": (str, type(None))}
    if not isinstance(saved, dict) or not live.keys() - LATER <= saved.keys() <= live.keys():
        yield f"training.json: result must have {', '.join(live)}"
    for name in saved:
        value = live[name]
        kinds = optional.get(name, (float, int) if isinstance(value, float) else (type(value),))
        if type(saved[name]) not in kinds:
            yield f"training.json: result.{name} is a {type(saved[name]).__name__}"
    if not 0 <= saved["step"] < COUNT_LIMIT:
        yield f"training.json: result.step is {saved['step']}"
