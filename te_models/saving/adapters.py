"""Folders of adapters: the model that they were trained on, as it ran, and what they bring for it.

A folder of adapters names a model. A run may have changed its shape, as --rope-theta and --vocab-size do, so the shape
that it had is in the folder too, in base_config.json.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_models.config.model import ModelConfig
from te_models.files.atomic import readable
from te_models.files.formats import Document, read_json
from te_models.interop.origin import TRAINED, as_facts, read_own_config
from te_models.saving.folder import MANIFEST, load_folder

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM

BASE_CONFIG = "base_config"
GENERATION = "generation_config"


class Trained(NamedTuple):
    """Shape and dtype of the model that adapters were trained on."""

    config: ModelConfig
    dtype: torch.dtype


def trained_config(folder: Path) -> Trained | None:
    """Return the shape of the model on which the adapters in `folder` were trained; None if it is not in the folder.

    Raises:
        CheckpointError: it is damaged.
    """
    document = _document(folder, BASE_CONFIG)
    if document is None:
        return None
    return Trained(*read_own_config(folder / f"{BASE_CONFIG}.json", document))


def trained_generation(folder: Path) -> Document | None:
    """Return the generation_config.json of the model that adapters were trained on; None if the folder has none."""
    return _document(folder, GENERATION)


def facts_in(folder: Path) -> Document | None:
    """Return the facts of the run that trained the model or the adapters in `folder`; None if they are not there."""
    return as_facts(_document(folder, TRAINED), folder)


def merged_beside(folder: Path) -> Path | None:
    """Return the model in merged/ that has the adapters in `folder` in its weights; None if there is none.

    `te-models finetune --lora --merge` writes it beside the adapters when a run ends. Until a resumed run ends, and for
    older checkpoints, it has the adapters of another step.
    """
    for parent in folder.parents[:2]:
        merged = parent / "merged"
        if merged.is_dir() and _trained_step(merged) == _trained_step(folder):
            return merged
    return None


def _trained_step(folder: Path) -> object:
    """Return the step of the run that wrote a folder; None if the folder does not say it."""
    facts = facts_in(folder)
    return None if facts is None else facts.get("step")


def _document(folder: Path, name: str) -> Any:
    """Return a JSON document of a folder, which peft may have written; None if there is none."""
    folder = readable(folder)
    if (folder / MANIFEST).exists():
        return load_folder(folder, [], optional=[name]).documents.get(name)
    file = folder / f"{name}.json"
    return read_json(file) if file.is_file() else None


def adapter_reader() -> Callable[..., CausalLM]:
    """Return te_models.training.lora_run.load_adapted, which needs peft, and packages above this one."""
    return importlib.import_module("te_models.training.lora_run").load_adapted
