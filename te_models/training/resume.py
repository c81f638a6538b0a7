"""The folder of a run, whether the run starts or resumes there, and the settings that a resumed run inherits."""

import itertools
import os
from pathlib import Path

import torch

from te_models.causal_lm import CausalLM
from te_models.config.base_weights import STORED
from te_models.config.model import config_fields
from te_models.config.recipe import AUTO, RECIPE_FIELDS, Recipe, get_recipe
from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import readable
from te_models.files.formats import Document, Fields
from te_models.interop.origin import read_own_config
from te_models.model.dtypes import DTYPES
from te_models.saving.adapters import BASE_CONFIG
from te_models.saving.folder import load_folder
from te_models.saving.load_model import read_recipe
from te_models.saving.run_folder import Checkpoints, offering_older
from te_models.training.settings import RunSettings

RUN_CHOICES = ("engine", "fp8_params", "activation_checkpointing", "activation_offload")
DTYPE = "dtype"  # recorded beside them, by name
# Recorded where the weights of a release stay as they are stored.
BASE = "base_weights"


def run_folder(settings: RunSettings, restarted: bool = False) -> Path:
    """Return the run's folder: the one that the settings name, else runs/<model>-<recipe>.

    A run from another run's file does not use the folder of an existing run: it gets the first free folder with a
    number, or after a restart (`restarted`) the last one in use.
    """
    if settings.out:
        return Path(settings.out)
    folder = Path("runs", f"{settings.label}-{get_recipe(settings.recipe).name}")
    if settings.file is None:
        return folder
    last = candidate = folder
    # The first folder without a checkpoint: a run that failed before its first one leaves its folder free.
    for number in itertools.count(2):
        if Checkpoints(candidate / "checkpoints").latest() is None:
            break
        last = candidate
        candidate = folder.with_name(f"{folder.name}-{number}")
    return last if restarted else candidate


def resumed_options(settings: RunSettings, saved: Document) -> Fields:
    """Return the keywords of CausalLM of a resumed run: the choices in its checkpoint, then what the user gave.

    The engine is the one that was asked for, so that "auto" is native on a GPU wherever the run began.
    """
    # Later ones count: the settings, then the checkpoint, then what the user gave.
    options = {name: value for name, value in settings.build.items() if name not in RECIPE_FIELDS}
    for name, value in saved.items():
        if name != "engine":
            options[name] = value
    for name, value in settings.build.items():
        if name in settings.set_by_user:
            options[name] = value
    if settings.recipe == AUTO or "recipe" not in settings.set_by_user:
        return options
    # The recipe that the user gave is the one of the first step. A run that has passed a change of recipe goes on under
    # the one of its checkpoint.
    later_recipes = [recipe.to_dict() for recipe in scheduled_recipes(settings)[1:]]
    if saved["recipe"].to_dict() in later_recipes:
        return {name: value for name, value in options.items() if name not in RECIPE_FIELDS}
    options["recipe"] = settings.recipe
    # Another recipe may have no such weights.
    options["fp8_params"] = settings.build.get("fp8_params", False)
    return options


def scheduled_recipes(settings: RunSettings) -> list[Recipe]:
    """Return the recipe of a run's first step, which is not "auto", and those that follow it in its schedule."""
    fields = {name: value for name, value in settings.build.items() if name in RECIPE_FIELDS}
    first = get_recipe(settings.recipe, **fields)
    return [first, *(first.followed_by(name) for _, name in settings.train.recipe_changes)]


def run_choices(model: CausalLM) -> Fields:
    """Return the choices that a checkpoint records besides config and recipe, as JSON."""
    choices: Fields = {name: getattr(model, name) for name in RUN_CHOICES}
    choices[DTYPE] = str(model.dtype).removeprefix("torch.")
    if model.stored_linears:
        choices[BASE] = STORED
    return choices


def saved_choices(checkpoint: Path) -> Fields:
    """Return the recipe, dtype, engine, kind of weights and recompute mode of a checkpoint, as keywords of CausalLM.

    The engine is the one that ran, where it is known, and not the one that was asked for. Of a checkpoint of adapters
    the fields of the config are among the keywords: their model's, which the run may have changed.
    """
    with offering_older(checkpoint):
        saved = load_folder(checkpoint, ["recipe"], optional=["config", "run", BASE_CONFIG])
    config = saved.documents.get("config", {})
    run = saved.documents.get("run", {})
    if (
        not isinstance(run, dict)
        or not run.keys() <= {*RUN_CHOICES, DTYPE, BASE}
        or not isinstance(config, dict)
    ):
        raise CheckpointError(
            f"{checkpoint / 'run.json'} must have some of {', '.join(RUN_CHOICES)}"
        )
    choices: Fields = {
        "recipe": read_recipe(saved),
        # Checkpoints without a document "run", which would say it, have files of FP8 weights.
        "fp8_params": any(readable(checkpoint).glob("fp8_weights*")),
    }
    for name, value in run.items():
        if name != DTYPE:
            choices[name] = value
    # A checkpoint of adapters has no config, and one of an earlier version no dtype: their model is loaded in its own.
    # The dtype is checked with the weights.
    dtype_name = config.get("dtype") or run.get(DTYPE)
    if config or dtype_name:
        choices[DTYPE] = DTYPES.get(str(dtype_name), torch.bfloat16)
    # Checkpoints of adapters describe the model below them, except those of an earlier version.
    base_config = saved.documents.get(BASE_CONFIG)
    if base_config is not None:
        model, choices[DTYPE] = read_own_config(checkpoint / f"{BASE_CONFIG}.json", base_config)
        for name in config_fields():
            choices[name] = getattr(model, name)
    return choices


def check_unfinished(settings: RunSettings, folder: Path, step: int, steps: int) -> None:
    """Raise UsageError if a run that continues after `step` has nothing left to do.

    A run of all `steps` continues if a file is missing that its end writes, or if the user names another merge_dtype.
    """
    files = ["loss.png"]
    if settings.lora is not None:
        files.append("adapter")
        if settings.lora.merge:
            files.append("merged")
    # A run that was killed after its last step has its checkpoint, and not what the end writes.
    missing = any(not os.path.lexists(folder / name) for name in files)
    unfinished = missing or "merge_dtype" in settings.set_by_user
    if step > steps or (step == steps and not unfinished):
        raise UsageError(
            f"{folder} has already reached step {step}: give --steps of more than {step}"
        )
