"""Models as folders: which state of a model is saved, and how a new model is made of a folder of any format.

A folder has config.json, model.safetensors (or shards), recipe.json (resolved values), fp8_state.safetensors (only for
a stateful recipe that has run), fp8_weights.safetensors (data and scales of FP8 primary weights) and manifest.json.
te_models.saving.folder writes and checks folders; this file decides their content.
"""

import dataclasses
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from te_models.config.base_weights import BASE_WEIGHTS, STORED
from te_models.config.model import ModelConfig, config_fields
from te_models.config.recipe import AUTO, RECIPE_FIELDS, Recipe
from te_models.errors import CheckpointError, UsageError, check_known, plural
from te_models.files.atomic import first_line, readable
from te_models.files.formats import Document, Fields, read_json
from te_models.fp8.extra_state import extra_states
from te_models.fp8.primary_weights import is_quantized, plain, quantized_weights, write_weight
from te_models.fp8.region import saving
from te_models.interop.hf import hugging_face_documents, open_hugging_face, read_description
from te_models.interop.hf_writing import VOCABULARIES, tokenizer_files, write_hugging_face
from te_models.interop.hub import local_folder
from te_models.interop.origin import MODEL_TYPE, TOKEN_IDS, TRAINED, Opened, Origin, read_own_config
from te_models.interop.quantized import WeightStorage, read_storage
from te_models.interop.te_checkpoint import te_files
from te_models.model.decoder import Decoder
from te_models.model.decoder_of import decoder_of, refuse_compiled
from te_models.model.expert_parallel import stand_in
from te_models.model.options import SKETCH
from te_models.model.tensor_parallel import gather_state
from te_models.numerics.stored import StoredWeight
from te_models.saving.adapters import merged_beside, trained_config
from te_models.saving.checkpoint_choice import (
    ADAPTER_CONFIG,
    describe_missing_checkpoint,
    holds_model,
)
from te_models.saving.folder import MANIFEST, MAX_SHARD_BYTES, load_folder, read_listed, save_folder
from te_models.saving.load_model import load_weights, open_te_folder, own_folder, read_recipe
from te_models.saving.loadable import refuse_unloadable
from te_models.saving.run_folder import LATEST, Checkpoints, offering_older

Model = TypeVar("Model", bound=Decoder)

FORMATS = ("te", "hf")
NOT_STORED = (
    "{} has no quantized weights that can stay as they are: leave out base_weights='stored'"
)
# Further parts of a folder of ours, where they exist.
EXTRAS = ("fp8_state", "fp8_weights", "hf_config", "generation_config", TRAINED)


def model_content(
    model: Decoder, origin: Origin, masters: Mapping[int, Tensor] | None = None, parts: bool = False
) -> tuple[dict[str, dict[str, Tensor]], Fields]:
    """Return the tensors and documents of a saved model, for te_models.saving.folder.save_folder.

    `masters` are the values of FP8 primary weights by the id of the parameter; a weight without one is dequantized.
    `parts` returns this rank's parts of parameters that several ranks share, for te_models.saving.sharded.
    """
    values = weights(model, masters)
    if parts:
        # Stand-ins for other ranks' experts keep the order of the whole model, by which ranks agree on shards.
        tensors = {"model": dict(model.ep.every(values.items(), stand_in))}
    else:
        tensors = {
            "model": model.ep.gather(gather_state(values, model.config, model.tp), model.device)
        }
    if state := model.copied_fp8_state():
        tensors["fp8_state"] = state
    if quantized := quantized_weights(model):
        tensors["fp8_weights"] = quantized
    documents = {"config": config_document(model), "recipe": model.recipe.to_dict()}
    return tensors, {**documents, **origin.documents()}


def config_document(model: Decoder) -> Fields:
    """Return the content of a config.json of ours: the model's shape and dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model_type": MODEL_TYPE, "dtype": dtype, **model.config.document()}


def weights(model: nn.Module, masters: Mapping[int, Tensor] | None = None) -> dict[str, Tensor]:
    """Return name -> values of every parameter, tied ones under each of their names.

    Transformer Engine's `_extra_state`, a pickle, is left out; its content is saved as fp8_state.

    Raises:
        UsageError: adapters are in the model, which no reader of a saved model expects.
    """
    refuse_adapters(model)
    masters = masters or {}
    values = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_quantized(parameter) and id(parameter) in masters:
            # The master's value and not the FP8 one: whoever loads the folder without FP8 gets what the optimizer has.
            values[name] = masters[id(parameter)].detach().to(parameter.dtype)
        elif isinstance(parameter, StoredWeight):
            values[name] = plain(parameter).cpu()  # the device has no room for all of them
        else:
            values[name] = plain(parameter)
    return values


def refuse_adapters(model: nn.Module) -> None:
    """Raise a UsageError if a model that is to be saved or trained as a whole has adapters in it."""
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise UsageError(
            "the model has LoRA adapters: give what add_lora returned to Trainer or save_lora, or what its "
            "merge_and_unload() returns, a model with the adapters in its weights; from_pretrained of a folder of "
            "adapters has merge_adapters=True for that"
        )


def refuse_pickle(safe_serialization: bool) -> None:
    """Raise a UsageError if a caller asks for a pickle, which can run code when it is loaded."""
    if not safe_serialization:
        raise UsageError(
            "safe_serialization=False would write a pickle, which can run code: leave it out"
        )


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
    check_known("format", format, FORMATS)
    model = decoder_of(model)
    refuse_compiled(model)
    with saving(model):
        tensors, documents = model_content(model, origin)
        # All ranks took part in gathering; one writes.
        if model.tp.rank == model.ep.rank == 0:
            refuse_unloadable(model, tensors["model"])
            # Read before the folder is replaced, which may be the one that the model came from.
            tokenizer = read_tokenizer(origin)
            if format == "hf":
                write_hugging_face(
                    model, origin, folder, tensors["model"], tokenizer, max_shard_bytes, name=name
                )
            else:
                tensors["model"] |= extra_states(tensors.get("fp8_state", {}))
                save_folder(folder, tensors, documents | tokenizer, max_shard_bytes=max_shard_bytes)
        # So that no rank reads the folder, or ends, before it is there.
        model.tp.wait()
        model.ep.wait()


def read_tokenizer(origin: Origin) -> dict[str, bytes]:
    """Return the files of the tokenizer that came with a model, or with its adapters: file name -> bytes."""
    files = _tokenizer_in(origin.folder)
    adapter_files = _tokenizer_in(origin.adapters)
    if adapter_files.keys() & set(VOCABULARIES):
        return adapter_files
    if any("chat_template" in name for name in adapter_files):  # the base's would come before it
        files = {name: content for name, content in files.items() if "chat_template" not in name}
    return files | adapter_files


def _tokenizer_in(folder: Path | None) -> dict[str, bytes]:
    return {} if folder is None else read_listed(folder, tokenizer_files(folder))


def read_pretrained(
    build: Callable[..., Model], folder: Path, options: Document
) -> tuple[Model, Origin]:
    """Return the model saved in a local folder, built by `build(config, **options)`, and its origin.

    Names, shapes and scales are checked before a model is built. Without `recipe=`, or with "auto", the saved recipe is
    used, and fields of the recipe in `options` override it. FP8 state is converted to another stateful recipe, and
    dropped with a warning for any other. FP8 primary weights remain FP8 under the saved recipe, unless `fp8_params=`
    says otherwise.
    """
    with open_model(build, folder, options) as (model, source):
        origin = source.origin
        changed = {}
        for name in TOKEN_IDS:
            value = getattr(model.config, name)
            if value != getattr(source.config, name):
                changed[name] = list(value) if isinstance(value, tuple) else value
        # generation_config.json has token ids too, where there is one.
        if changed and origin.generation is not None:
            origin = origin.with_token_ids(changed)
        return model, origin


@contextmanager
def open_model(
    build: Callable[..., Model], folder: Path, options: Document
) -> Iterator[tuple[Model, Opened]]:
    """Provide the model of `read_pretrained`, and the open folder that it was read from."""
    folder = saved_folder(folder)
    fields = config_fields()
    options = dict(options)
    base_weights = options.pop("base_weights", None)
    if base_weights is not None:
        check_known("base_weights", base_weights, BASE_WEIGHTS)
    shape = {name: value for name, value in options.items() if name in fields}
    with ExitStack() as stack:
        # An error about a damaged checkpoint names an older, undamaged one.
        stack.enter_context(offering_older(folder))
        source: Opened
        if (documents := hugging_face_documents(folder)) is not None:
            source = stack.enter_context(open_hugging_face(folder, documents))
        elif _is_te_folder(folder):
            source = open_te_folder(folder, read_json(folder / "config.json"))
        else:
            source = own_folder(load_folder(folder, ["config", "model", "recipe"], optional=EXTRAS))
        try:
            # A model on the meta device, so that a mistake is found before any memory is allocated.
            sketch: Decoder = build(source.config, **SKETCH)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / 'config.json'}: {first_line(error)}") from None
        source.fit({name: p.shape for name, p in sketch.named_parameters(remove_duplicate=False)})
        config = _reshaped(build, source, shape) if shape else source.config
        stored: frozenset[str] = frozenset()
        model_options = _with_saved_recipe(source, options, shape)
        if base_weights == STORED:
            stored = _stored_linears(source, config)
            model_options["stored_linears"] = stored
        model = build(config, **model_options, initialize=False)
        if stored:
            _take_stored(model, source)
        tensors = source.parameters(model.embed_tokens.weight, without=stored)
        # A reshaped model has weights of other sizes, so the saved FP8 values no longer belong to them.
        if config == source.config:
            load_weights(model, tensors, source.fitting_fp8(model))
        else:
            load_weights(model, _grown(tensors, model))
        # A new gate changes the amaxes of qkvg_proj and o_proj: their scales start afresh.
        if config.attention_gate == source.config.attention_gate:
            source.restore_fp8(model)
        else:
            _double_output_projections(model)
        yield model, source


def _stored_linears(source: Opened, config: ModelConfig) -> frozenset[str]:
    """Return the names of the linears whose weights stay as a folder has them, of a model of this shape.

    Raises:
        UsageError: there are none, or the model changes their rows.
    """
    names = frozenset(source.storable())
    if not names:
        raise UsageError(NOT_STORED.format(source.path))
    if config.attention_gate != source.config.attention_gate:
        raise UsageError(
            "attention_gate adds rows to weights, which base_weights='stored' leaves as they are: leave out one of "
            "them"
        )
    return names


def _take_stored(model: Decoder, source: Opened) -> None:
    """Put the weights that stay as they are stored into their linears, frozen."""
    for name, weight in source.stored_parameters(model.stored_linears, model.embed_tokens.weight):
        module, _, parameter_name = name.rpartition(".")
        parameter = nn.Parameter(weight, requires_grad=False)
        model.get_submodule(module).register_parameter(parameter_name, parameter)


def _is_te_folder(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint of Transformer Engine's modules; refuse one without any model."""
    has_manifest = (folder / MANIFEST).exists()
    config = (folder / "config.json").exists()
    problem = ""
    if (folder / ADAPTER_CONFIG).is_file() and not config:
        merged = merged_beside(folder)
        if merged is not None:
            first = ""
            model = shlex.quote(str(merged))
        else:
            adapters = shlex.quote(str(folder))
            first = f"te-models convert --format te --model {adapters} --out MERGED, then "
            model = "MERGED"
        problem = (
            f"holds adapters and not a model: {first}--model {model} has both (in Python: "
            "CausalLM.from_pretrained of this folder, with merge_adapters=True)"
        )
    elif folder.is_dir() and not has_manifest and not config:
        trainer = (folder / "trainer_state.json").exists()
        hint = ""
        if trainer:
            hint = (
                ": a Trainer saves it for TEModelsForCausalLM.wrap(model), and not for a CausalLM"
            )
        no_model = f"has no config.json: it holds no model, or only a part of one{hint}"
        problem = describe_missing_checkpoint(folder) or no_model
    if problem:
        raise CheckpointError(f"{folder} {problem}")
    # Our own folders have a manifest, and their config.json is of our model type.
    return config and not has_manifest and bool(te_files(folder))


def _with_saved_recipe(source: Opened, options: Document, shape: Document) -> Fields:
    """Return the keywords of the model, without fields of its config: the caller's, else the folder's dtype and recipe.

    A recipe in `options` replaces the saved one; single fields of a recipe change the saved one.
    """
    merged: Fields = {"dtype": source.dtype}
    for name, value in options.items():
        if name not in shape:
            merged[name] = value
    if source.recipe is not None and merged.get("recipe", AUTO) == AUTO:
        fields = {name: merged.pop(name) for name in list(merged) if name in RECIPE_FIELDS}
        merged["recipe"] = source.recipe.replace(**fields)
        merged.setdefault("fp8_params", source.in_fp8)
    return merged


def _gated(config: ModelConfig, overrides: Document) -> ModelConfig:
    """Return `config` with `overrides`; a gate may be added to an ungated model but not changed or removed."""
    changed = dataclasses.replace(config, **overrides)
    before = config.attention_gate
    after = changed.attention_gate
    activation = changed.attention_gate_activation
    change = f"the model has attention_gate={before!r}, which cannot become {after!r}"
    # A trained gate cannot be taken out without changing what the model computes.
    if before not in ("none", after):
        raise UsageError(f"{change}: only an ungated model can be given a gate")
    if before != after and activation != "sigmoid":
        raise UsageError(
            f"attention_gate_activation={activation!r} would change the model's outputs: only a sigmoid gate "
            "can be added"
        )
    return changed


def _reshaped(build: Callable[..., Decoder], source: Opened, overrides: Document) -> ModelConfig:
    """Return the config of an opened folder with `overrides`, if its weights fit: a gate of zeros may be added, and a
    larger vocabulary, whose new rows are the mean of the others."""
    config = source.config
    gated = _gated(source.config, overrides)
    before = config.to_dict()
    after = gated.to_dict()
    changed = [name for name in overrides if before[name] != after[name]]
    if not changed:
        return gated
    allowed = {name: after[name] for name in ("attention_gate", "attention_gate_activation")}
    # Growing only: whoever asks for a smaller vocabulary gets the error below.
    allowed["vocab_size"] = max(config.vocab_size, gated.vocab_size)

    def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        sketch = build(config, **SKETCH)
        return {name: tuple(parameter.shape) for name, parameter in sketch.named_parameters()}

    if shapes(dataclasses.replace(config, **allowed)) != shapes(gated):
        changes = ", ".join(f"{name}={after[name]!r}" for name in changed)
        raise UsageError(
            f"the weights in {source.path} do not fit {changes}: a model that has weights keeps their shape"
        )
    if (more := gated.vocab_size - config.vocab_size) > 0:
        warnings.warn(
            f"vocab_size={gated.vocab_size} adds {plural(more, 'token')} to the model: new rows of embedding and head "
            "are the mean of the others",
            stacklevel=2,
        )
    return gated


def _grown(tensors: Iterator[tuple[str, Tensor]], model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with more rows where the model has more: zeros for a gate, and for new tokens the mean of the rows.

    An embedding at the mean of the others is a usual one for the model, and its logit neither the largest nor the
    smallest. transformers' resize_token_embeddings draws new rows from a narrow normal distribution around it.
    """
    linears = model.config.linears
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors:
        module = name.rpartition(".")[0]
        linear = linears.get(module)
        rows = len(parameters[name]) if linear is None else linear.outputs
        missing = rows - len(tensor)
        if missing > 0 and module in ("embed_tokens", "lm_head"):
            # Rounded to the dtype that is stored, so that a load in another dtype has the same rows.
            mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
            yield name, torch.cat([tensor, mean.expand(missing, *tensor.shape[1:])])
        else:
            yield name, pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))


@torch.no_grad()
def _double_output_projections(model: Decoder) -> None:
    """Double every o_proj, the second half of adding a gate: a gate of zeros halves the output of attention.

    sigmoid(0) is 1/2. Both factors are powers of two, so the model's outputs keep every bit.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.o_proj.weight"):
            write_weight(parameter, plain(parameter) * 2, model.keeps_initial_values)


def saved_folder(folder: str | Path) -> Path:
    """Return `folder` itself, or the newest checkpoint in it if it is the folder of a run or of its checkpoints."""
    runs = Path(folder) if (Path(folder) / LATEST).is_file() else Path(folder) / "checkpoints"
    if runs.is_dir() and not holds_model(Path(folder)):
        return readable(Checkpoints(runs).latest() or Path(folder))
    return Path(folder)


def adapter_folder(folder: str | Path) -> Path | None:
    """Return the folder with LoRA adapters: `folder` or its newest checkpoint; None if neither has any."""
    adapters = saved_folder(folder)
    return (
        adapters
        if (adapters / ADAPTER_CONFIG).is_file() and not (adapters / "config.json").exists()
        else None
    )


def stored_storages(build: Callable[..., Decoder], name: str | Path) -> dict[str, WeightStorage]:
    """Return the names of the linears whose weights can stay as the folder `name` has them -> their storage.

    `build` as for `read_pretrained`. No value and no scale is read.

    Raises:
        UsageError: there are none.
    """
    folder = saved_folder(local_folder(name))
    documents = hugging_face_documents(folder)
    if documents is None:
        raise UsageError(NOT_STORED.format(folder))
    with open_hugging_face(folder, documents, read_scales=False) as source:
        # On the meta device, for the shapes of the parameters.
        sketch = build(source.config, **SKETCH)
        source.fit({name: p.shape for name, p in sketch.named_parameters(remove_duplicate=False)})
        by_linear = source.storable()
        if not by_linear:
            raise UsageError(NOT_STORED.format(folder))
        quantized = source.quantized
        storages = {}
        for linear, parts in by_linear.items():
            storages[linear] = next(quantized[part] for part in parts if part in quantized)
        return storages


class SavedShape(NamedTuple):
    """Shape, saved recipe (None for a model of Hugging Face), dtype, and whether FP8 weights are saved."""

    config: ModelConfig
    recipe: Recipe | None
    dtype: torch.dtype
    fp8_params: bool


def read_shape(name: str | Path, overrides: Document | None = None) -> SavedShape:
    """Return the shape of the model that `from_pretrained(name)` loads; `overrides` are fields of the config.

    Raises:
        ValueError: there is no such model, or its config is damaged; loading it raises the same error.
    """
    folder = saved_folder(local_folder(name))
    documents = hugging_face_documents(folder)
    with offering_older(folder):
        if documents is not None:
            described = read_description(folder, documents)
            # Only to refuse a folder whose weights loading could not read.
            read_storage(folder, documents["config"])
            shape = SavedShape(described.config, None, described.dtype, False)
        elif _is_te_folder(folder):
            source = open_te_folder(folder, read_json(folder / "config.json"))
            shape = SavedShape(source.config, source.recipe, source.dtype, False)
        else:
            saved = load_folder(folder, ["config", "recipe"])
            config, dtype = read_own_config(folder / "config.json", saved.documents["config"])
            shape = SavedShape(
                config, read_recipe(saved), dtype, any(readable(folder).glob("fp8_weights*"))
            )
    return shape._replace(config=_gated(shape.config, overrides or {}))


def trained_shape(name: str | Path) -> ModelConfig:
    """Return the shape of a saved model; for a folder with adapters, the shape of the model they were trained on."""
    adapters = adapter_folder(name)
    trained = None if adapters is None else trained_config(adapters)
    return read_shape(name).config if trained is None else trained.config
