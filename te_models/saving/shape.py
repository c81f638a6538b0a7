"""Shape, recipe and dtype of a saved model, read from its small files without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe, get_recipe
from te_models.errors import CheckpointError
from te_models.files.atomic import first_line, readable
from te_models.files.formats import read_json
from te_models.interop.hf import config_dtype, gated, is_hugging_face
from te_models.interop.hf_families import family_of
from te_models.interop.hub import local_folder
from te_models.saving.folder import MANIFEST, load_folder
from te_models.saving.pretrained import MODEL_TYPE, read_config, read_recipe, saved_folder
from te_models.saving.run_folder import offering_older


class Shape(NamedTuple):
    """Shape, saved recipe (BF16 for a model of Hugging Face), dtype, and whether FP8 weights are saved."""

    config: ModelConfig
    recipe: Recipe
    dtype: torch.dtype
    fp8_params: bool


def read_shape(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Shape | None:
    """Return the shape of the model that `CausalLM.from_pretrained(name)` loads; None for formats that only loading knows.

    Args:
        name: a saved model, run folder, Hugging Face folder or name, or a shipped model.
        overrides: fields of the config.

    Raises:
        ValueError: there is no such model, or its config is damaged; the error is that of loading it.
    """
    folder = saved_folder(local_folder(name))
    if is_hugging_face(folder, MODEL_TYPE):
        document = read_json(folder / "config.json")
        try:
            config = family_of(document).read(document)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}/config.json: {first_line(error)}") from None
        return Shape(gated(config, overrides or {}), get_recipe("bf16"), config_dtype(folder, document), False)
    if not (readable(folder) / MANIFEST).exists():
        return None
    with offering_older(folder):
        saved = load_folder(folder, ["config", "recipe"])
        config, dtype = read_config(saved)
        weights = any(readable(folder).glob("fp8_weights*"))
        return Shape(gated(config, overrides or {}), read_recipe(saved), dtype, weights)
