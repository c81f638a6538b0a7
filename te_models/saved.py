"""What of a model is saved and how it comes back: weights, config, recipe and FP8 state, without a pickle.

The folder: config.json, model.safetensors (or shards), recipe.json (resolved values), fp8_state.safetensors (only for a
stateful recipe that has run), manifest.json. te_models.state knows how a folder is written and checked; this file knows
what belongs into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.checkpoints import Checkpoints
from te_models.config import ModelConfig, config_fields
from te_models.errors import unknown
from te_models.fp8_state import fp8_state, load_fp8_state
from te_models.hf import (
    Origin,
    double_output_projections,
    gated,
    is_hugging_face,
    local_folder,
    read_hugging_face,
    write_hugging_face,
)
from te_models.recipe import recipe_fields, recipe_from_dict
from te_models.sharded import put
from te_models.state import CheckpointError, Folder, load_folder, match, save_folder, unflatten_state
from te_models.tensor_parallel import gather_state, shard_state

MODEL_TYPE = "te_models"
FORMATS = ("te", "hf")


def model_content(model: Any, parts: bool = False) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and documents that make up a saved model, as te_models.state.save_folder takes them.

    `parts`: of parameters that several ranks share, this rank's parts (for te_models.dist_state).
    """
    tensors = {"model": weights(model) if parts else gather_state(model)}
    if state := fp8_state(model) if model.recipe.stateful else {}:
        tensors["fp8_state"] = state
    dtype = str(model.dtype).removeprefix("torch.")
    config = {"model_type": MODEL_TYPE, "dtype": dtype, **model.config.to_dict()}
    return tensors, {"config": config, "recipe": model.recipe.to_dict(), **model.origin.documents()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter; tied ones under each of their names. Transformer Engine's `_extra_state` is not among them:
    it holds a pickle, and its content is saved as fp8_state."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def write_pretrained(model: Any, folder: str | Path, format: str = "te") -> None:
    """Save a model into `folder`, atomically, in our format or in Hugging Face's, with the tokenizer it came with."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    tensors, documents = model_content(model)
    if model.tp.rank == 0 and format == "hf":
        write_hugging_face(model, folder, parameters=tensors["model"])
    elif model.tp.rank == 0:
        save_folder(folder, tensors, {**documents, **model.origin.tokenizer()})
    model.tp.wait()


def read_pretrained(build: Any, folder: str | Path, options: Mapping[str, Any]) -> Any:
    """The model saved in `folder`, built by `build(config, **options)` (CausalLM).

    Everything is read and checked before a model is built. Without `recipe=` the saved one is used and the recipe's
    fields in `options` override it; FP8 state that another recipe cannot use is dropped with a warning.
    """
    folder = saved_folder(local_folder(folder))
    shape = {name: value for name, value in options.items() if name in config_fields()}
    options = {name: value for name, value in options.items() if name not in shape}
    if is_hugging_face(folder, MODEL_TYPE):
        return read_hugging_face(build, folder, shape, options)
    saved = load_folder(folder, ["config", "model", "recipe"], optional=["fp8_state", "hf_config", "generation_config"])
    config, dtype = read_config(saved)
    wanted = gated(config, shape)
    recipe = recipe_from_dict(saved.documents["recipe"])
    options = {"dtype": dtype, **options}
    if "recipe" not in options:
        fields = {name: options.pop(name) for name in list(options) if name in recipe_fields()}
        options["recipe"] = recipe.replace(**fields)
    model = build(wanted, **options, initialize=False)
    model.origin = Origin(folder, saved.documents.get("hf_config"), saved.documents.get("generation_config"))
    if wanted.attention_gate != config.attention_gate:
        load_weights(model, with_gate_rows(saved.tensors["model"], wanted))
        double_output_projections(model)
        return model
    load_weights(model, saved.tensors["model"])
    if state := saved.tensors.get("fp8_state", {}):
        if model.recipe.stateful and model.recipe.formats == recipe.formats:
            load_fp8_state(model, state, model.te_recipe)
        else:
            warnings.warn(
                f"{folder} was saved under recipe {recipe.name!r}; recipe {model.recipe.name!r} has no use for its scales "
                "and amax histories, which are left out",
                stacklevel=3,
            )
    return model


def saved_folder(folder: str | Path) -> Path:
    """`folder` itself, or the newest checkpoint in it if it is the folder of a training run."""
    runs = Path(folder) / "checkpoints"
    if runs.is_dir() and not (Path(folder) / "config.json").exists():
        return Checkpoints(runs).latest() or Path(folder)
    return Path(folder)


def tokenizer_of(tokenizer: str | None, model: str | Path | None) -> Path | None:
    """Where the tokenizer is read from: `tokenizer` itself, else the model's folder; None for bytes.

    Raises:
        ValueError: the model is one of Hugging Face, so its text is not bytes, and its folder has no tokenizer.json.
    """
    if tokenizer is not None or model is None:
        return None if tokenizer is None else Path(tokenizer)
    folder = saved_folder(local_folder(model))
    if (folder / "tokenizer.json").exists():
        return folder
    if is_hugging_face(folder, MODEL_TYPE):
        raise ValueError(f"{folder} has no tokenizer.json: give --tokenizer the path of one")
    return None


def read_config(saved: Folder) -> tuple[ModelConfig, torch.dtype]:
    """The config and the dtype in a saved folder."""
    values = dict(saved.documents["config"])
    kind, dtype = values.pop("model_type", None), values.pop("dtype", None)
    if kind != MODEL_TYPE:
        raise CheckpointError(f"{saved.path} holds a model of type {kind!r}; this version reads {MODEL_TYPE!r}")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{saved.path}/config.json: dtype {dtype!r} is not bfloat16, float16 or float32")
    try:
        return ModelConfig.from_dict(values), getattr(torch, dtype)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{saved.path}/config.json: {error}") from None


def with_gate_rows(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of an ungated model with the gate's rows of zeros after those of q, k and v."""
    grown = dict(tensors)
    for name, tensor in tensors.items():
        if ".qkvg_proj." in name:
            grown[name] = torch.cat((tensor, tensor.new_zeros(config.gate_size, *tensor.shape[1:])))
    return grown


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters once every name and shape is known to fit; dtypes are converted."""
    live, tensors = weights(model), shard_state(tensors, model.config, model.tp.mesh)  # type: ignore[arg-type,union-attr]
    match(live, tensors, check_dtype=False)
    for name, tensor in tensors.items():
        put(live[name], tensor)


def load_training_state(model: Any, folder: Path) -> Any:
    """Put a training checkpoint's weights and FP8 state into `model`; returns the rest of its state as it was saved.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or recipe; `model` is then untouched.
    """
    saved = load_folder(folder, ["config", "model", "recipe", "training"], optional=["fp8_state"])
    for name, now in (("config", model.config.to_dict()), ("recipe", model.recipe.to_dict())):
        then = saved.documents[name]
        for key in (key for key in now if then.get(key) != now[key]):
            raise CheckpointError(
                f"{folder} was trained with {key}={then.get(key)!r}, not {now[key]!r}: resume with the same {name}, or start "
                "a new run from it with --model"
            )
    state = unflatten_state(saved.tensors.get("training", {}), saved.documents["training"])
    load_weights(model, saved.tensors["model"])
    if "fp8_state" in saved.tensors:
        load_fp8_state(model, saved.tensors["fp8_state"], model.te_recipe)
    return state
