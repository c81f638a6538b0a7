"""Values of an opened folder in a model: checked against a live one before it changes, written into a new one."""

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.config.precision import precisions
from te_models.config.recipe import Recipe, recipe_from_dict
from te_models.errors import CheckpointError, ConfigError, UsageError
from te_models.files.atomic import first_line, reraising
from te_models.files.formats import Fields, unflatten_state
from te_models.files.tensors import all_finite, check_finite
from te_models.fp8.extra_state import EXTRA
from te_models.fp8.primary_weights import (
    keep_initial_value,
    load_quantized_weights,
    quantize_weights_alike,
    quantized_weights,
    write_weight,
)
from te_models.fp8.scaling_state import check_fp8_state
from te_models.interop.origin import TRAINED, Opened, Origin, as_facts, read_own_config
from te_models.interop.te_checkpoint import TECheckpoint, read_te_checkpoint
from te_models.model.decoder import Decoder
from te_models.model.decoder_of import decoder_of, refuse_compiled
from te_models.model.tensor_parallel import shard, shard_state
from te_models.saving.folder import Folder, load_folder, match
from te_models.saving.run_folder import offering_older

WRAPPED = "model."  # the prefix of names in a TEModelsForCausalLM


@dataclass(frozen=True, kw_only=True)
class OwnFolder(Opened):
    """A folder of ours, or a checkpoint of Transformer Engine's modules named as ours.

    Attributes:
        weights: parameters by name, in memory.
        fp8_state: scales and amax histories by their names in te_models.fp8.scaling_state.
        fp8_weights: data and scales of FP8 weights by their names in te_models.fp8.primary_weights.
    """

    weights: dict[str, Tensor]
    fp8_state: dict[str, Tensor] = field(default_factory=dict)
    fp8_weights: dict[str, Tensor] = field(default_factory=dict)

    def fit(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise a CheckpointError unless the weights are exactly the parameters."""
        # Only names and shapes are compared, so the tensors need no memory.
        expected = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        match(expected, self.weights, check_dtype=False)

    def parameters(
        self, like: Tensor, without: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each weight; none of ours can be left out."""
        yield from self.weights.items()

    def fitting_fp8(self, model: Decoder) -> dict[str, Tensor]:
        """Return the saved FP8 data and scales that belong to FP8 weights of the model, once they are known to fit."""
        if not self.fp8_weights or self.recipe is None:
            return {}
        precision = model.precision
        live = quantized_weights(model)
        with reraising(self.path / "recipe.json", ConfigError):
            saved_precisions = precisions(self.recipe, model.specs)
        fitting = {}
        for name, tensor in self.fp8_weights.items():
            if name not in live:
                continue
            linear = precision.known(name)
            if quantize_weights_alike(
                saved_precisions[linear].recipe, precision.linears[linear].recipe
            ):
                fitting[name] = tensor
        # A weight has several tensors, data and scales, and all of them must be there.
        weights = {name.rsplit(".", 1)[0] for name in fitting}
        expected = {}
        for name, tensor in live.items():
            if name.rsplit(".", 1)[0] in weights:
                expected[name] = tensor
        match(expected, fitting)
        for name, tensor in fitting.items():
            if name.endswith("data"):
                check_finite({name: tensor.view(torch.float8_e4m3fn)}, self.path)
            elif not _are_scales(tensor):
                raise CheckpointError(
                    f"{self.path}: {name} has a scale that is negative or not finite"
                )
        return fitting

    def restore_fp8(self, model: Decoder) -> None:
        """Give the model the saved scales and histories; those that it has no use for are left out with a warning."""
        if not self.fp8_state or self.recipe is None:
            return
        used = model.take_fp8_state(self.fp8_state, self.recipe)
        count = len(self.fp8_state)
        if used < count:
            lost = f"{count - used} of its {count}" if used else "its"
            same = model.recipe.name == self.recipe.name
            # It has no name, so that several linears give one warning.
            why = "with other linears in BF16 the model" if same else "another recipe"
            warnings.warn(
                f"{self.path} was saved under recipe {self.recipe.name!r}; {why} has no use for {lost} scales and "
                "amax histories, which are left out",
                stacklevel=6,
            )


def own_folder(saved: Folder) -> OwnFolder:
    """Return the contents of a folder of ours by our names, its config and recipe parsed; nothing is in a model yet.

    Raises:
        CheckpointError: its config or recipe is not valid, or a weight has a dtype that is not floating-point.
    """
    weights = bare_weights(saved.tensors["model"])
    config, dtype = read_own_config(saved.path / "config.json", saved.documents["config"], weights)
    if wrong := sorted(name for name, tensor in weights.items() if not tensor.is_floating_point()):
        raise CheckpointError(
            f"{saved.path}: {wrong[0]} is {weights[wrong[0]].dtype}, not a floating-point number"
        )
    # A model that came from Hugging Face carries its documents on, for the next save in that format.
    documents = saved.documents
    return OwnFolder(
        path=saved.path,
        config=config,
        dtype=dtype,
        origin=Origin(
            saved.path,
            documents.get("hf_config"),
            documents.get("generation_config"),
            shape=config,
            trained=as_facts(documents.get(TRAINED), saved.path),
        ),
        recipe=read_recipe(saved) if "recipe" in documents else None,
        fp8_state=saved.tensors.get("fp8_state", {}),
        fp8_weights=saved.tensors.get("fp8_weights", {}),
        in_fp8="fp8_weights" in saved.tensors,
        weights=weights,
    )


def read_recipe(saved: Folder) -> Recipe:
    """Return the recipe in a saved folder."""
    try:
        return recipe_from_dict(saved.documents["recipe"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{saved.path / 'recipe.json'}: {first_line(error)}") from None


def bare_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters in model.safetensors by CausalLM's names.

    The FP8 state, which fp8_state has too, is left out; TEModelsForCausalLM has all names below "model.".
    """
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{EXTRA}")}
    wrapped = all(name.startswith(WRAPPED) for name in weights)
    if not wrapped:
        return weights
    return {name.removeprefix(WRAPPED): tensor for name, tensor in weights.items()}


def restore_model(model: Decoder, source: OwnFolder) -> None:
    """Load the weights and the FP8 state of an opened folder into a live model.

    Scales and histories are converted to another stateful recipe; state without a place in the model is ignored with
    a warning.

    Raises:
        CheckpointError: the folder is of another model; `model` is unchanged.
    """
    prepare_restore(model, source)()


def prepare_restore(model: Decoder, source: OwnFolder) -> Callable[[], None]:
    """Return a function that does the work of `restore_model`, once everything is known to fit."""
    live = dict(model.named_parameters(remove_duplicate=False))
    # A tied table is in `live` under both of its names, as it is in the weights of a folder.
    local_weights = model.ep.local_parameters(
        shard_state(source.weights, model.config, model.tp.mesh).items()
    )
    match(live, dict(local_weights), check_dtype=False)
    quantized = source.fitting_fp8(model)
    check_fp8_state(model, source.fp8_state)

    def write() -> None:
        load_weights(model, source.weights.items(), quantized)
        source.restore_fp8(model)

    return write


@torch.no_grad()
def load_weights(
    model: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    quantized: Mapping[str, Tensor] | None = None,
) -> None:
    """Copy the values of whole parameters, by name, into the model's, in their dtype.

    FP8 weights get their data and scales from `quantized`; those that are not in it are quantized.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    in_fp8 = {name.rsplit(".", 1)[0] for name in quantized or {}}
    for name, tensor in model.ep.local_parameters(tensors):
        local_part = shard(name, tensor, model.config, model.tp)
        if name not in in_fp8:
            write_weight(live[name], local_part, model.keeps_initial_values)
        elif model.keeps_initial_values:
            keep_initial_value(live[name], local_part)
    if quantized:
        load_quantized_weights(model, quantized)


def _are_scales(tensor: Tensor) -> bool:
    """Return whether all values are finite and not negative; MXFP8's are E8M0 (uint8), where 255 is NaN."""
    if tensor.is_floating_point():
        return all_finite(tensor) and bool((tensor >= 0).all())
    return bool((tensor < 255).all())


def open_te_folder(folder: Path, config: object) -> OwnFolder:
    """Return a checkpoint of Transformer Engine's modules, named as ours, and the config.json of ours beside it.

    Its recipe is the one in the checkpoint's FP8 state, BF16 where there is none.
    """
    checkpoint = read_te_checkpoint(folder)
    source = own_folder(Folder(folder, {"model": checkpoint.weights}, {"config": config}))
    weights = _with_tied_head(checkpoint.weights, source.config)
    recipe = checkpoint.recipe(source.config.num_hidden_layers)
    return replace(
        source, origin=Origin(), weights=weights, recipe=recipe, fp8_state=checkpoint.fp8_state
    )


def load_te_checkpoint(
    model: nn.Module,
    source: TECheckpoint | str | Path,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Load the weights, scales and amax histories of a checkpoint of Transformer Engine's modules into `model`.

    `model` is a CausalLM, or a TEModelsForCausalLM; `source` and `rename` are as in `read_te_checkpoint`. Scales that
    the model's recipe does not use are ignored with a warning.

    Raises:
        UsageError: the model is compiled as a whole, or has adapters.
        CheckpointError: it cannot be read or is of another model; `model` is unchanged.
    """
    model = decoder_of(model)
    refuse_compiled(model)
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise UsageError(
            "the model has LoRA adapters, which rename its weights: load the checkpoint before add_lora"
        )
    if isinstance(source, TECheckpoint):
        te_checkpoint = source
        path = Path("the Transformer Engine checkpoint")  # its name in messages
    else:
        te_checkpoint = read_te_checkpoint(source, rename)
        path = Path(source)
    weights = _with_tied_head(te_checkpoint.weights, model.config)
    checkpoint = OwnFolder(
        path=path,
        config=model.config,
        dtype=model.dtype,
        recipe=te_checkpoint.recipe(model.config.num_hidden_layers),
        fp8_state=te_checkpoint.fp8_state,
        weights=weights,
    )
    restore_model(model, checkpoint)


def _with_tied_head(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights in which a tied table has both of its names."""
    table = weights.get("embed_tokens.weight")
    if config.tie_word_embeddings and table is not None:
        return {"lm_head.weight": table, **weights}
    return weights


@dataclass(frozen=True)
class TrainingState:
    """A training checkpoint whose weights and FP8 state are known to fit the model, which is still unchanged."""

    state: Fields  # of optimizer, dataset, random numbers and result, as it was saved
    write: Callable[[], None]  # puts the weights and the FP8 state into the model


def training_document(saved: Folder) -> Fields:
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
        saved = load_folder(
            folder, ["config", "model", "recipe", "training"], optional=["fp8_state", "fp8_weights"]
        )
    source = own_folder(saved)
    saved_config = source.config.to_dict()
    config = model.config.to_dict()
    # Before anything is written into the model, so that an error leaves it as it was.
    for key in config:
        if saved_config.get(key) != config[key]:
            raise CheckpointError(
                f"{folder} was trained with {key}={saved_config.get(key)!r}, not {config[key]!r}: "
                "resume with the same config, or start a new run from it with --model"
            )
    recipe = read_recipe(saved)
    saved_fields = recipe.to_dict()
    changes: Fields = {}
    for key, value in model.recipe.to_dict().items():
        if saved_fields.get(key) != value:
            changes[key] = value
    # No table is left out of the recipe's document, where the loop above would not see it.
    if recipe.precision and not model.recipe.precision:
        changes["precision"] = {}
    if model.fp8_params != ("fp8_weights" in saved.tensors):
        changes["fp8_params"] = model.fp8_params
    state = training_document(saved)
    write = prepare_restore(model, source)
    if changes:
        new = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        warnings.warn(
            f"{folder} was trained under recipe {recipe.name!r}; it goes on with {new}",
            stacklevel=3,
        )
    return TrainingState(state, write)
