"""The folder of a run, whether the run starts or resumes there, and the choices that a resumed run inherits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from te_models.causal_lm import CausalLM
from te_models.config.recipe import get_recipe
from te_models.config.training import TrainConfig
from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import readable
from te_models.saving.folder import load_folder
from te_models.saving.pretrained import read_recipe
from te_models.saving.run_folder import Checkpoints, offering_older

RUN_CHOICES = ("engine", "fp8_params", "activation_checkpointing", "activation_offload")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def run_folder(out: str | None, label: str, recipe: str | None, resume: bool) -> Path | None:
    """Return the run's folder: `out`, else runs/<label>-<recipe>; None if that depends on the model's own recipe.

    Args:
        out: the folder, if the user named it.
        label: name of the model.
        recipe: the recipe that the user named, if any.
        resume: without `out` and `recipe`, take the only run of the model that there is.

    Raises:
        ValueError: several runs could be resumed.
    """
    if out is not None:
        return Path(out)
    if recipe is not None:
        return Path("runs", f"{label}-{get_recipe(recipe).name}")
    runs = [folder.parent for folder in sorted(Path("runs").glob(f"{label}-*/checkpoints"))] if resume else []
    if len(runs) > 1:
        raise UsageError(f"several runs could be resumed ({', '.join(map(str, runs))}): give one of them as --out")
    return runs[0] if runs else None


def run_choices(model: CausalLM) -> dict[str, Any]:
    """Return what a checkpoint records of how the model is run, beside config and recipe, as JSON."""
    return {name: getattr(model, name) for name in RUN_CHOICES}


def saved_choices(folder: Path | None) -> dict[str, Any]:
    """Return the recipe, engine, precision of weights and recompute mode of the newest checkpoint in a run's folder.

    They are the defaults of a resumed run, as keywords of CausalLM; empty if there is no checkpoint.
    """
    newest = Checkpoints(folder / "checkpoints").latest() if folder is not None else None
    if newest is None:
        return {}
    with offering_older(newest):
        saved = load_folder(newest, ["config", "recipe"], optional=["run"])
    fp8_params = any(readable(newest).glob("fp8_weights*"))  # checkpoints before "run" was part of them
    config, run = saved.documents["config"], saved.documents.get("run", {})
    if not isinstance(run, dict) or not run.keys() <= {*RUN_CHOICES} or not isinstance(config, dict):
        raise CheckpointError(f"{newest / 'run.json'} must have some of {', '.join(RUN_CHOICES)}")
    dtype = DTYPES.get(str(config.get("dtype")), torch.bfloat16)  # checked when the weights are loaded
    return {"recipe": read_recipe(saved), "dtype": dtype, "fp8_params": fp8_params, **run}


def starting_step(folder: Path, resume: bool, config: TrainConfig) -> int:
    """Return the step of the checkpoint to resume from, 0 for a new run.

    Raises:
        ValueError: there is nothing to resume, or a new run would overwrite an old one.
    """
    newest = Checkpoints(folder / "checkpoints").latest()
    if resume and newest is None:
        raise UsageError(f"nothing to resume: {folder} has no checkpoint; start without --resume")
    if newest is None:
        return 0
    step = int(newest.name.removeprefix("step-"))
    if not resume:
        raise UsageError(f"{folder} already holds a run of {step} steps: add --resume or give another --out")
    if step >= config.steps:
        raise UsageError(f"{folder} has already reached step {step}: give more than --steps {config.steps}")
    return step
