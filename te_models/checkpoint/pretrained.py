"""What of a model is saved and how it comes back: weights, config, recipe and FP8 state, without a pickle.

The folder: config.json, model.safetensors (or shards), recipe.json (resolved values), fp8_state.safetensors (only for a
stateful recipe that has run), fp8_weights.safetensors (codes and scales of FP8 primary weights), manifest.json. te_models.checkpoint.folder knows how a folder is written and checked; this file knows
what belongs into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.checkpoint.flatten import unflatten_state
from te_models.checkpoint.folder import MANIFEST, Folder, load_folder, match, save_folder
from te_models.checkpoint.run_folder import Checkpoints
from te_models.config.model import ModelConfig, config_fields
from te_models.config.recipe import Recipe, recipe_fields, recipe_from_dict
from te_models.errors import CheckpointError, unknown
from te_models.files.formats import read_json
from te_models.fp8.primary_weights import (
    is_quantized,
    keep_initial_value,
    load_codes,
    plain,
    same_codes,
    weight_codes,
    write_weight,
)
from te_models.fp8.scaling_state import fp8_state
from te_models.interop.hf import (
    Origin,
    double_output_projections,
    gated,
    is_hugging_face,
    local_folder,
    read_hugging_face,
    write_hugging_face,
)
from te_models.interop.te_checkpoint import TECheckpoint, read_te_checkpoint, te_files
from te_models.model.tensor_parallel import gather_state, shard_state

MODEL_TYPE = "te_models"
FORMATS = ("te", "hf")


def model_content(
    model: Any, masters: Mapping[int, Tensor] | None = None, parts: bool = False
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and documents that make up a saved model, as te_models.checkpoint.folder.save_folder takes them.

    `masters` gives the values of FP8 primary weights by the id of the parameter; without one, they are dequantized.
    `parts`: of parameters that several ranks share, this rank's parts (for te_models.checkpoint.sharded).
    """
    own = weights(model, masters)
    tensors = {"model": own if parts else gather_state(model, own)}
    if state := fp8_state(model) if model.recipe.stateful else {}:
        tensors["fp8_state"] = {name: tensor.clone() for name, tensor in state.items()}  # the next forward writes to it
    if codes := weight_codes(model):
        tensors["fp8_weights"] = codes
    dtype = str(model.dtype).removeprefix("torch.")
    config = {"model_type": MODEL_TYPE, "dtype": dtype, **model.config.to_dict()}
    return tensors, {"config": config, "recipe": model.recipe.to_dict(), **model.origin.documents()}


def weights(model: nn.Module, masters: Mapping[int, Tensor] | None = None) -> dict[str, Tensor]:
    """Name -> values of a parameter; tied ones under each of their names. Transformer Engine's `_extra_state` is not
    among them: it holds a pickle, and its content is saved as fp8_state."""
    masters = masters or {}
    return {
        name: masters[id(p)].detach().to(p.dtype) if is_quantized(p) and id(p) in masters else plain(p)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


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
    fields in `options` override it; FP8 state moves along to another stateful recipe and is dropped with a warning by any
    other. FP8 primary weights stay such under the saved recipe, unless `fp8_params=` says otherwise.
    """
    folder = saved_folder(local_folder(folder))
    shape = {name: value for name, value in options.items() if name in config_fields()}
    options = {name: value for name, value in options.items() if name not in shape}
    if is_hugging_face(folder, MODEL_TYPE):
        return read_hugging_face(build, folder, shape, options)
    if (folder / "config.json").is_file() and not (folder / MANIFEST).exists() and te_files(folder):
        return read_te_model(build, folder, shape, options)
    if folder.is_dir() and not any((folder / name).exists() for name in ("config.json", MANIFEST)):
        raise CheckpointError(f"{folder} has no config.json: it holds no model, or only a part of one")
    extras = ["fp8_state", "fp8_weights", "hf_config", "generation_config"]
    saved = load_folder(folder, ["config", "model", "recipe"], optional=extras)
    config, dtype = read_config(saved)
    wanted = gated(config, shape)
    recipe = recipe_from_dict(saved.documents["recipe"])
    options = {"dtype": dtype, **options}
    if "recipe" not in options:
        fields = {name: options.pop(name) for name in list(options) if name in recipe_fields()}
        options["recipe"] = recipe.replace(**fields)
        options.setdefault("fp8_params", "fp8_weights" in saved.tensors)
    model = build(wanted, **options, initialize=False)
    model.origin = Origin(folder, saved.documents.get("hf_config"), saved.documents.get("generation_config"))
    if wanted.attention_gate != config.attention_gate:
        load_weights(model, with_gate_rows(saved.tensors["model"], wanted))
        double_output_projections(model)
        return model
    restore_model(model, saved, recipe)
    return model


def read_te_model(build: Any, folder: Path, shape: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The model in a folder with a config.json of ours and a checkpoint of Transformer Engine's modules of our names.

    Without `recipe=` it is the one in the checkpoint's FP8 state, BF16 where there is none.
    """
    config, dtype = read_config(Folder(folder, {}, {"config": read_json(folder / "config.json")}, {}))
    found = read_te_checkpoint(folder)
    wanted = gated(config, shape)
    options = {"dtype": dtype, **options}
    if "recipe" not in options:
        fields = {name: options.pop(name) for name in list(options) if name in recipe_fields()}
        options["recipe"] = found.recipe(config.num_hidden_layers).replace(**fields)
    model = build(wanted, **options, initialize=False)
    load_te_checkpoint(model, found)
    return model


def load_te_checkpoint(
    model: Any, source: TECheckpoint | str | Path, rename: Callable[[str], str] | None = None
) -> None:
    """Put the weights, scales and amax histories of a checkpoint of Transformer Engine's modules into `model`.

    `source` and `rename` are those of `read_te_checkpoint`. Scales that the model's recipe has no use for are left out
    with a warning.

    Raises:
        CheckpointError: it cannot be read or is of another model, which is then untouched.
    """
    found = source if isinstance(source, TECheckpoint) else read_te_checkpoint(source, rename)
    recipe = found.recipe(model.config.num_hidden_layers)
    path = Path("the Transformer Engine checkpoint" if isinstance(source, TECheckpoint) else source)
    tensors = {"model": dict(found.weights), "fp8_state": found.fp8_state}
    if model.config.tie_word_embeddings and "embed_tokens.weight" in found.weights:
        tensors["model"].setdefault("lm_head.weight", found.weights["embed_tokens.weight"])
    restore_model(model, Folder(path, tensors, {}, {}), recipe)


def restore_model(model: Any, saved: Folder, recipe: Recipe) -> None:
    """Put the weights and the FP8 state of a folder that was saved under `recipe` into `model`.

    Scales and histories move along to another stateful recipe; what has no place in the model is left out with a warning.

    Raises:
        CheckpointError: the folder is of another model, which is then untouched.
    """
    codes = saved.tensors.get("fp8_weights", {})
    fitting = fitting_codes(model, codes) if same_codes(recipe, model.recipe) else {}
    load_weights(model, saved.tensors["model"], fitting)
    state = saved.tensors.get("fp8_state", {})
    taken = model.take_fp8_state(state, recipe)
    if taken < len(state):
        what = f"{len(state) - taken} of its {len(state)}" if taken else "its"
        warnings.warn(
            f"{saved.path} was saved under recipe {recipe.name!r}; recipe {model.recipe.name!r} has no use for {what} scales "
            "and amax histories, which are left out",
            stacklevel=4,
        )


def fitting_codes(model: nn.Module, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the saved `codes` that belong to FP8 weights of the model, once they are known to fit."""
    live = weight_codes(model)
    fitting = {name: tensor for name, tensor in codes.items() if name in live}
    owners = {name.rsplit(".", 1)[0] for name in fitting}
    match({name: tensor for name, tensor in live.items() if name.rsplit(".", 1)[0] in owners}, fitting)
    return fitting


def saved_folder(folder: str | Path) -> Path:
    """`folder` itself, or the newest checkpoint in it if it is the folder of a training run."""
    runs = Path(folder) / "checkpoints"
    if runs.is_dir() and not (Path(folder) / "config.json").exists():
        return Checkpoints(runs).latest() or Path(folder)
    return Path(folder)


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
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], codes: Mapping[str, Tensor] | None = None) -> None:
    """Copy `tensors` into the model's parameters once every name and shape is known to fit; dtypes are converted.

    FP8 primary weights take their `codes` (`fitting_codes`), and are quantized where there are none.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    tensors = shard_state(tensors, model.config, model.tp.mesh)  # type: ignore[arg-type,union-attr]
    match(live, tensors, check_dtype=False)
    coded = {name.rsplit(".", 1)[0] for name in codes or {}}
    for name, tensor in tensors.items():
        if name in coded:
            keep_initial_value(live[name], tensor)
        else:
            write_weight(live[name], tensor)
    load_codes(model, codes or {})


def load_training_state(model: Any, folder: Path) -> Any:
    """Put a training checkpoint's weights and FP8 state into `model`; returns the rest of its state as it was saved.

    Under another recipe than the saved one the run goes on with a warning; see `restore_model` for its scales.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model; `model` is then untouched.
    """
    saved = load_folder(folder, ["config", "model", "recipe", "training"], optional=["fp8_state", "fp8_weights"])
    then, now = saved.documents["config"], model.config.to_dict()
    for key in (key for key in now if then.get(key) != now[key]):
        raise CheckpointError(
            f"{folder} was trained with {key}={then.get(key)!r}, not {now[key]!r}: resume with the same config, or start "
            "a new run from it with --model"
        )
    recipe = recipe_from_dict(saved.documents["recipe"])
    changes = {key: value for key, value in model.recipe.to_dict().items() if recipe.to_dict().get(key) != value}
    changes |= {"fp8_params": model.fp8_params} if model.fp8_params != ("fp8_weights" in saved.tensors) else {}
    if changes:
        new = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        warnings.warn(f"{folder} was trained under recipe {recipe.name!r}; it goes on with {new}", stacklevel=3)
    state = unflatten_state(saved.tensors.get("training", {}), saved.documents["training"])
    restore_model(model, saved, recipe)
    return state


def save_tie_once(model: nn.Module) -> None:
    """Have a tied table in the model's state_dict once, as in Hugging Face's files: safetensors, and with it
    transformers.Trainer, saves no tensor under two names."""
    model.register_state_dict_post_hook(_leave_out_tie)
    model.register_load_state_dict_pre_hook(_restore_tie)


def _leave_out_tie(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[f"{prefix}lm_head.weight"]


def _restore_tie(model: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    if f"{prefix}embed_tokens.weight" in state:
        state.setdefault(f"{prefix}lm_head.weight", state[f"{prefix}embed_tokens.weight"])
