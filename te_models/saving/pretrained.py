"""Models as folders: which state of a model is saved, and how it is loaded into a new or a live model.

A folder has config.json, model.safetensors (or shards), recipe.json (resolved values), fp8_state.safetensors (only for
a stateful recipe that has run), fp8_weights.safetensors (data and scales of FP8 primary weights) and manifest.json.
te_models.saving.folder writes and checks folders; this file decides their content.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from te_models.config.model import ModelConfig, config_fields
from te_models.config.precision import precisions
from te_models.config.recipe import AUTO, Recipe, recipe_fields, recipe_from_dict
from te_models.errors import CheckpointError, ConfigError, unknown
from te_models.files.atomic import first_line, readable
from te_models.files.formats import all_finite, check_finite, list_some, read_json, unflatten_state
from te_models.fp8.extra_state import EXTRA, extra_states
from te_models.fp8.primary_weights import (
    is_quantized,
    keep_initial_value,
    load_quantized_weights,
    plain,
    quantize_weights_alike,
    quantized_weights,
    write_weight,
)
from te_models.fp8.region import saving
from te_models.fp8.scaling_state import check_fp8_state
from te_models.interop.hf import (
    check_shape,
    check_sizes,
    config_dtype,
    double_output_projections,
    gated,
    is_hugging_face,
    read_hugging_face,
    tokenizer_files,
    write_hugging_face,
)
from te_models.interop.hf_families import family_of
from te_models.interop.hub import local_folder, saved_dtype
from te_models.interop.origin import Origin
from te_models.interop.quantized import CONFIG_KEYS, read_scheme
from te_models.interop.te_checkpoint import TECheckpoint, read_te_checkpoint, te_files
from te_models.model.decoder import Decoder
from te_models.model.expert_parallel import stand_in
from te_models.model.options import SKETCH
from te_models.model.tensor_parallel import gather_state, shard_state
from te_models.saving.folder import (
    MANIFEST,
    MAX_SHARD_BYTES,
    Folder,
    load_folder,
    match,
    read_listed,
    save_folder,
)
from te_models.saving.run_folder import Checkpoints, offering_older

Model = TypeVar("Model", bound=Decoder)

MODEL_TYPE = "te_models"
FORMATS = ("te", "hf")
ADAPTERS = "adapter_config.json"
WRAPPED = "model."  # the prefix of names in a TEModelsForCausalLM


def model_content(
    model: Decoder, origin: Origin, masters: Mapping[int, Tensor] | None = None, parts: bool = False
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the tensors and documents of a saved model, for te_models.saving.folder.save_folder.

    `masters` are the values of FP8 primary weights by the id of the parameter; a weight without one is dequantized.
    `parts` returns this rank's parts of parameters that several ranks share, for te_models.saving.sharded.
    """
    own = weights(model, masters)
    if parts:
        tensors = {"model": dict(model.ep.every(own.items(), stand_in))}
    else:
        tensors = {"model": model.ep.gather(gather_state(own, model.config, model.tp), model.device)}
    if state := model.copied_fp8_state():
        tensors["fp8_state"] = state
    if quantized := quantized_weights(model):
        tensors["fp8_weights"] = quantized
    dtype = str(model.dtype).removeprefix("torch.")
    config = {"model_type": MODEL_TYPE, "dtype": dtype, **model.config.to_dict()}
    return tensors, {"config": config, "recipe": model.recipe.to_dict(), **origin.documents()}


def weights(model: nn.Module, masters: Mapping[int, Tensor] | None = None) -> dict[str, Tensor]:
    """Return name -> values of every parameter, tied ones under each of their names.

    Transformer Engine's `_extra_state`, a pickle, is left out; its content is saved as fp8_state.
    """
    masters = masters or {}
    return {
        name: masters[id(p)].detach().to(p.dtype) if is_quantized(p) and id(p) in masters else plain(p)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def write_pretrained(
    model: Decoder,
    origin: Origin,
    folder: str | Path,
    format: str = "te",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    name: str | None = None,
) -> None:
    """Save a model into `folder`, atomically, in our format or in Hugging Face's, with the tokenizer of its origin.

    In our format model.safetensors includes the FP8 state, as a state_dict does, for programs that read only that file
    (accelerate's load_checkpoint_in_model). `name` is the model's name in its card.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    with saving(model):
        tensors, documents = model_content(model, origin)
        if model.tp.rank == model.ep.rank == 0:
            tokenizer = read_listed(origin.folder, tokenizer_files(origin.folder)) if origin.folder is not None else {}
            if format == "hf":
                write_hugging_face(model, origin, folder, tensors["model"], tokenizer, max_shard_bytes, name=name)
            else:
                tensors["model"] |= extra_states(tensors.get("fp8_state", {}))
                save_folder(folder, tensors, documents | tokenizer, max_shard_bytes=max_shard_bytes)
        model.tp.wait()
        model.ep.wait()


def read_pretrained(
    build: Callable[..., Model], folder: str | Path, options: Mapping[str, Any]
) -> tuple[Model, Origin]:
    """Return the model saved in `folder`, built by `build(config, **options)`, and its origin.

    Everything is read and checked before a model is built. Without `recipe=`, or with "auto", the saved one is used,
    and fields of the recipe in `options` override it. FP8 state is converted to another stateful recipe, and dropped
    with a warning for any other. FP8 primary weights remain FP8 under the saved recipe, unless `fp8_params=` says
    otherwise.
    """
    folder = saved_folder(local_folder(folder))
    shape = {name: value for name, value in options.items() if name in config_fields()}
    options = {name: value for name, value in options.items() if name not in shape}
    with offering_older(folder):
        return _read_pretrained(build, folder, shape, options)


def _read_pretrained(
    build: Callable[..., Model], folder: Path, shape: Mapping[str, Any], options: dict[str, Any]
) -> tuple[Model, Origin]:
    """Return the model in a folder that is known to be local, and its origin; `shape` are fields of the config."""
    if is_hugging_face(folder, MODEL_TYPE):
        return read_hugging_face(build, folder, shape, options)
    if (folder / "config.json").is_file() and not (folder / MANIFEST).exists() and te_files(folder):
        return read_te_model(build, folder, shape, options), Origin()
    _refuse_other_folders(folder)
    extras = ["fp8_state", "fp8_weights", "hf_config", "generation_config"]
    saved = load_folder(folder, ["config", "model", "recipe"], optional=extras)
    saved.tensors["model"] = bare_weights(saved.tensors["model"])
    config, dtype = read_config(saved)
    wanted = gated(config, shape)
    check_shape(build, folder, config, wanted, shape)
    recipe = read_recipe(saved)
    sketch = _sketch(build, config, folder)
    match(dict(sketch.named_parameters(remove_duplicate=False)), saved.tensors["model"], check_dtype=False)
    check_finite(saved.tensors["model"], folder)
    options = {"dtype": dtype, **options}
    if options.get("recipe", AUTO) == AUTO:
        fields = {name: options.pop(name) for name in list(options) if name in recipe_fields()}
        options["recipe"] = recipe.replace(**fields)
        options.setdefault("fp8_params", "fp8_weights" in saved.tensors)
    model = build(wanted, **options, initialize=False)
    origin = Origin(folder, saved.documents.get("hf_config"), saved.documents.get("generation_config"))
    if wanted.attention_gate != config.attention_gate:
        load_weights(model, with_gate_rows(saved.tensors["model"], wanted))
        double_output_projections(model)
    else:
        restore_model(model, saved, recipe)
    return model, origin


def _refuse_other_folders(folder: Path) -> None:
    """Raise a CheckpointError for a folder of adapters without their model, and one without any."""
    if (folder / ADAPTERS).is_file() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} holds adapters and not a model: load the model that {ADAPTERS} names, then "
            "te_models.load_lora(model, folder); a run with --merge has both in its folder merged/"
        )
    if folder.is_dir() and not any((folder / name).exists() for name in ("config.json", MANIFEST)):
        hint = ""
        if (folder / "trainer_state.json").exists():
            hint = ": a Trainer saves it for TEModelsForCausalLM.wrap(model), and not for a CausalLM"
        raise CheckpointError(f"{folder} has no config.json: it holds no model, or only a part of one{hint}")


def bare_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters in model.safetensors by CausalLM's names.

    The FP8 state, which fp8_state has too, is left out; TEModelsForCausalLM has all names below "model.".
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{EXTRA}")}
    wrapped = all(name.startswith(WRAPPED) for name in found)
    return {name.removeprefix(WRAPPED): tensor for name, tensor in found.items()} if wrapped else found


def read_te_model(
    build: Callable[..., Model], folder: Path, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Model:
    """Return the model in a folder with a config.json of ours and a checkpoint of Transformer Engine's modules,
    named as ours.

    Without `recipe=` it runs under the recipe in the checkpoint's FP8 state, BF16 where there is none.
    """
    found, config, dtype = _read_te_folder(folder)
    wanted = gated(config, shape)
    options = {"dtype": dtype, **options}
    if options.get("recipe", AUTO) == AUTO:
        fields = {name: options.pop(name) for name in list(options) if name in recipe_fields()}
        options["recipe"] = found.recipe(config.num_hidden_layers).replace(**fields)
    model = build(wanted, **options, initialize=False)
    load_te_checkpoint(model, found)
    return model


def _read_te_folder(folder: Path) -> tuple[TECheckpoint, ModelConfig, torch.dtype]:
    """Return the checkpoint of Transformer Engine's modules in a folder, and the config and the dtype beside it."""
    found = read_te_checkpoint(folder)
    documents = {"config": read_json(folder / "config.json")}
    return found, *read_config(Folder(folder, {"model": found.weights}, documents))


def load_te_checkpoint(
    model: Decoder, source: TECheckpoint | str | Path, rename: Callable[[str], str] | None = None
) -> None:
    """Load the weights, scales and amax histories of a checkpoint of Transformer Engine's modules into `model`.

    `source` and `rename` are those of `read_te_checkpoint`. Scales that the model's recipe does not use are ignored
    with a warning.

    Raises:
        CheckpointError: it cannot be read or is of another model; `model` is unchanged.
    """
    found = source if isinstance(source, TECheckpoint) else read_te_checkpoint(source, rename)
    recipe = found.recipe(model.config.num_hidden_layers)
    path = Path("the Transformer Engine checkpoint" if isinstance(source, TECheckpoint) else source)
    tensors = {"model": dict(found.weights), "fp8_state": found.fp8_state}
    if model.config.tie_word_embeddings and "embed_tokens.weight" in found.weights:
        tensors["model"].setdefault("lm_head.weight", found.weights["embed_tokens.weight"])
    restore_model(model, Folder(path, tensors, {}), recipe)


def restore_model(model: Decoder, saved: Folder, recipe: Recipe) -> None:
    """Load the weights and the FP8 state of a folder that was saved under `recipe` into `model`.

    Scales and histories are converted to another stateful recipe; state without a place in the model is ignored with
    a warning.

    Raises:
        CheckpointError: the folder is of another model; `model` is unchanged.
    """
    check_restore(model, saved, recipe)
    _write_model(model, saved, recipe)


def check_restore(model: Decoder, saved: Folder, recipe: Recipe) -> None:
    """Raise CheckpointError unless the weights and the FP8 state of a folder fit `model`, which is left unchanged."""
    _fitting_quantized(model, saved, recipe)
    _fitting_weights(model, saved.tensors["model"])
    check_fp8_state(model, saved.tensors.get("fp8_state", {}))


def _write_model(model: Decoder, saved: Folder, recipe: Recipe) -> None:
    load_weights(model, saved.tensors["model"], _fitting_quantized(model, saved, recipe))
    state = saved.tensors.get("fp8_state", {})
    taken = model.take_fp8_state(state, recipe)
    if taken < len(state):
        lost = f"{len(state) - taken} of its {len(state)}" if taken else "its"
        new = model.recipe.name
        what = f"recipe {new!r}" if new != recipe.name else "with other linears in BF16 the model"
        warnings.warn(
            f"{saved.path} was saved under recipe {recipe.name!r}; {what} has no use for {lost} scales and amax "
            "histories, which are left out",
            stacklevel=5,
        )


def _fitting_quantized(model: Decoder, saved: Folder, recipe: Recipe) -> dict[str, Tensor]:
    """Return the saved FP8 data and scales that belong to FP8 weights of the model, once they are known to fit."""
    now, live = model.precision, quantized_weights(model)
    try:
        then = precisions(recipe, model.specs)
    except ConfigError as error:
        raise CheckpointError(f"{saved.path / 'recipe.json'}: {first_line(error)}") from None
    alike = {name for name in then if quantize_weights_alike(then[name].recipe, now.linears[name].recipe)}
    quantized = saved.tensors.get("fp8_weights", {})
    fitting = {name: tensor for name, tensor in quantized.items() if name in live and now.known(name) in alike}
    owners = {name.rsplit(".", 1)[0] for name in fitting}
    match({name: tensor for name, tensor in live.items() if name.rsplit(".", 1)[0] in owners}, fitting)
    for name, tensor in fitting.items():
        if name.endswith("data"):
            check_finite({name: tensor.view(torch.float8_e4m3fn)}, saved.path)
        elif not _are_scales(tensor):
            raise CheckpointError(f"{saved.path}: {name} has a scale that is negative or not finite")
    return fitting


def _are_scales(tensor: Tensor) -> bool:
    """Return whether all values are finite and not negative; MXFP8's are E8M0 (uint8), where 255 is NaN."""
    if tensor.is_floating_point():
        return all_finite(tensor) and bool((tensor >= 0).all())
    return bool((tensor < 255).all())


def saved_folder(folder: str | Path) -> Path:
    """Return `folder` itself, or the newest checkpoint in it if it is the folder of a training run."""
    runs = Path(folder) / "checkpoints"
    if runs.is_dir() and not (Path(folder) / "config.json").exists():
        return Checkpoints(runs).latest() or Path(folder)
    return Path(folder)


def adapter_folder(folder: str | Path) -> Path | None:
    """Return the folder with LoRA adapters: `folder` or its newest checkpoint; None if neither has any."""
    found = saved_folder(folder)
    return found if (found / ADAPTERS).is_file() and not (found / "config.json").exists() else None


def read_config(saved: Folder) -> tuple[ModelConfig, torch.dtype]:
    """Return the config and the dtype in a saved folder; sizes that contradict its tensors are refused first."""
    path = saved.path / "config.json"
    if not isinstance(saved.documents["config"], dict):
        raise CheckpointError(f"{path} is not an object of names and values")
    values = dict(saved.documents["config"])
    kind, name = values.pop("model_type", None), values.pop("dtype", None)
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{saved.path} holds a model of type {list_some([repr(kind)])}; this version reads {MODEL_TYPE!r}"
        )
    dtype = saved_dtype(path, name)
    if "model" in saved.tensors:
        check_sizes(path, values, saved.tensors["model"], "layers.", "embed_tokens.weight")
    try:
        return ModelConfig.from_dict(values), dtype
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {first_line(error)}") from None


def read_recipe(saved: Folder) -> Recipe:
    """Return the recipe in a saved folder."""
    try:
        return recipe_from_dict(saved.documents["recipe"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{saved.path / 'recipe.json'}: {first_line(error)}") from None


def _sketch(build: Callable[..., Decoder], config: ModelConfig, folder: Path) -> Decoder:
    """Return a model of this config without values, to compare shapes with."""
    try:
        return build(config, **SKETCH)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {first_line(error)}") from None


def with_gate_rows(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of an ungated model with the gate's rows, zeros, after those of q, k and v."""
    grown = dict(tensors)
    for name, tensor in tensors.items():
        linear = config.linears.get(name.rpartition(".")[0])
        if linear is not None and "g" in linear.row_ranges:
            grown[name] = torch.cat((tensor, tensor.new_zeros(linear.outputs - len(tensor), *tensor.shape[1:])))
    return grown


def _fitting_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model's parameters, and this rank's part of `tensors`, once every name and shape is known to fit."""
    live: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own = model.ep.own(shard_state(tensors, model.config, model.tp.mesh))
    match(live, own, check_dtype=False)
    if wrong := sorted(name for name, tensor in own.items() if not tensor.is_floating_point()):
        raise CheckpointError(f"the saved tensor {wrong[0]} is {own[wrong[0]].dtype}, not a floating-point number")
    return live, own


@torch.no_grad()
def load_weights(model: Decoder, tensors: Mapping[str, Tensor], quantized: Mapping[str, Tensor] | None = None) -> None:
    """Copy `tensors` into the model's parameters once every name and shape is known to fit; dtypes are converted.

    FP8 primary weights get their data and scales from `quantized`; those that are not in it are quantized.
    """
    live, own = _fitting_weights(model, tensors)
    in_fp8 = {name.rsplit(".", 1)[0] for name in quantized or {}}
    for name, tensor in own.items():
        if name in in_fp8:
            keep_initial_value(live[name], tensor)
        else:
            write_weight(live[name], tensor)
    load_quantized_weights(model, quantized or {})


class Shape(NamedTuple):
    """Shape, saved recipe (None for a model of Hugging Face), dtype, and whether FP8 weights are saved."""

    config: ModelConfig
    recipe: Recipe | None
    dtype: torch.dtype
    fp8_params: bool


def read_shape(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of the model that `from_pretrained(name)` loads; `overrides` are fields of the config.

    Raises:
        ValueError: there is no such model, or its config is damaged; the error is that of loading it.
    """
    folder = saved_folder(local_folder(name))
    if is_hugging_face(folder, MODEL_TYPE):
        document = read_json(folder / "config.json")
        try:
            read_scheme(folder, document)
            document = {key: value for key, value in document.items() if key not in CONFIG_KEYS}
            config = family_of(document).read(document)
        except CheckpointError:
            raise
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}/config.json: {first_line(error)}") from None
        return Shape(gated(config, overrides or {}), None, config_dtype(folder, document), False)
    _refuse_other_folders(folder)
    if not (readable(folder) / MANIFEST).exists() and te_files(folder):
        found, config, dtype = _read_te_folder(folder)
        return Shape(gated(config, overrides or {}), found.recipe(config.num_hidden_layers), dtype, False)
    with offering_older(folder):
        saved = load_folder(folder, ["config", "recipe"])
        config, dtype = read_config(saved)
        weights = any(readable(folder).glob("fp8_weights*"))
        return Shape(gated(config, overrides or {}), read_recipe(saved), dtype, weights)


@dataclass(frozen=True)
class TrainingState:
    """A training checkpoint whose weights and FP8 state are known to fit the model, which is still unchanged."""

    state: dict[str, Any]  # of optimizer, dataset, random numbers and result, as it was saved
    write: Callable[[], None]  # puts the weights and the FP8 state into the model


def training_document(saved: Folder) -> dict[str, Any]:
    """Return the state of optimizer, dataset, random numbers and result in a training checkpoint."""
    state = unflatten_state(saved.tensors.get("training", {}), saved.documents["training"])
    names = ("optimizer", "dataset", "rng", "cuda_rng", "result")
    if not isinstance(state, dict) or any(name not in state for name in names):
        raise CheckpointError(f"{saved.path}/training.json lacks some of {', '.join(names)}")
    return state


def read_training_state(model: Decoder, folder: Path) -> TrainingState:
    """Read and check a training checkpoint for `model`.

    Under a recipe other than the saved one the run continues with a warning; see `restore_model` for its scales.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    with offering_older(folder):
        saved = load_folder(folder, ["config", "model", "recipe", "training"], optional=["fp8_state", "fp8_weights"])
    then, now = read_config(saved)[0].to_dict(), model.config.to_dict()
    for key in (key for key in now if then.get(key) != now[key]):
        raise CheckpointError(
            f"{folder} was trained with {key}={then.get(key)!r}, not {now[key]!r}: resume with the same config, or "
            "start a new run from it with --model"
        )
    check_finite(saved.tensors["model"], folder)
    recipe = read_recipe(saved)
    changes = {key: value for key, value in model.recipe.to_dict().items() if recipe.to_dict().get(key) != value}
    changes |= {"precision": {}} if recipe.precision and not model.recipe.precision else {}
    changes |= {"fp8_params": model.fp8_params} if model.fp8_params != ("fp8_weights" in saved.tensors) else {}
    state = training_document(saved)
    check_restore(model, saved, recipe)
    if changes:
        new = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        warnings.warn(f"{folder} was trained under recipe {recipe.name!r}; it goes on with {new}", stacklevel=3)
    return TrainingState(state, lambda: _write_model(model, saved, recipe))
