"""Hugging Face checkpoints in and out: safetensors folders streamed into te.Linear and te.RMSNorm, and written back.

Reading opens one shard at a time and copies each tensor straight into its rows of the parameter on the target device:
host memory holds one tensor at a time. te_models.interop.hf_families says which rows those are.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.distributed.dtensor import local, write_shard
from te_models.errors import CheckpointError, UsageError, field_values
from te_models.files.atomic import first_line, replacing_folder, write_file
from te_models.files.formats import (
    SafetensorsFile,
    check_finite,
    list_some,
    read_json,
    render_index,
    render_json,
    render_safetensors,
    split_by_size,
)
from te_models.fp8.primary_weights import plain, write_weight
from te_models.interop.hf_families import Family, family_for, family_of, text_part
from te_models.interop.hub import saved_dtype
from te_models.interop.model_card import CARD, model_card, user_card
from te_models.interop.origin import Origin
from te_models.interop.quantized import CONFIG_KEYS, MODELOPT_FILE, StoredWeights, open_weights, read_scheme
from te_models.interop.shards import INDEX, WEIGHTS, shard_files, shard_tensors, tensors_beside
from te_models.interop.stored_weights import keep_stored_weights
from te_models.interop.tensor_places import Place, tensor_places
from te_models.model.decoder import Decoder
from te_models.model.expert_parallel import scratch
from te_models.model.options import SKETCH

Model = TypeVar("Model", bound=Decoder)

log = logging.getLogger(__name__)

CODE = Path(__file__).parent / "remote_code"  # code for transformers, for models of which it has no architecture
MAX_SHARD_BYTES = 5 * 10**9  # as in transformers
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of templates beside the tokenizer's own
# Files that saving may replace in a folder; any other may be the user's work.
REPLACEABLE = (
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    "manifest.json",
    "recipe.json",
    *(path.name for path in CODE.glob("*.py")),
    MODELOPT_FILE,
)
# From the places and values of all parameters and config.json to the tensors and the config.json to write.
Quantize = Callable[
    [Mapping[str, "Place"], Mapping[str, Tensor], Mapping[str, Any]], tuple[dict[str, Tensor], dict[str, Any]]
]


def is_hugging_face(folder: Path, own_type: str) -> bool:
    """Return whether the folder's config.json is of a model type other than ours."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    config = read_json(file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not an object of names and values")
    return config.get("model_type") != own_type


@dataclass(frozen=True)
class OpenFolder:
    """A folder of Hugging Face whose names, shapes and scales are known to fit its config.json.

    Attributes:
        document: config.json without its quantization_config.
        shards: the safetensors files.
        stored: the tensors in them.
        config: the model's shape.
        places: name of each of their tensors -> its rows in ours.
    """

    document: dict[str, Any]
    shards: list[Path]
    stored: StoredWeights
    config: ModelConfig
    places: dict[str, Place]


def open_folder(build: Callable[..., Decoder], folder: Path) -> OpenFolder:
    """Read and check everything in `folder` except the values; `build(config, **options)` makes a model without values.

    Raises:
        CheckpointError: something in the folder is missing, damaged, of a wrong shape or not supported.
    """
    document, shards = read_json(folder / "config.json"), shard_files(folder)
    found = shard_tensors(folder, shards)
    text, root = text_part(document)
    check_sizes(folder / "config.json", text, found, f"{root}layers.", f"{root}embed_tokens.weight")
    stored = open_weights(folder, read_scheme(folder, document), found, shards)
    document = {key: value for key, value in document.items() if key not in CONFIG_KEYS}
    try:
        family = family_of(document)
        config = family.read(document)
        sketch: Decoder = build(config, **SKETCH)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json: {first_line(error)}") from None
    places = tensor_places(family, config, {name: p.shape for name, p in sketch.named_parameters()})
    own = {name: tensor for name, tensor in stored.tensors.items() if not name.startswith(family.aside)}
    check_tensors(folder, own, places, optional={f"{family.head}.weight"} if config.tie_word_embeddings else set())
    if others := len(stored.tensors) - len(own):
        log.warning(
            "%s: the text model is read; %s tensors of other parts (%s) are not, and save_pretrained(format='hf') "
            "copies them from there", folder, others, ", ".join(f"{prefix}*" for prefix in family.aside),
        )  # fmt: skip
    return OpenFolder(document, shards, stored, config, places)


def read_hugging_face(
    build: Callable[..., Model], folder: Path, overrides: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Model, Origin]:
    """Return the model in `folder`, built by `build(config, **options)` and filled shard by shard, and its origin.

    Everything is checked before the model is built. Quantized weights are dequantized; FP8 primary weights keep the
    stored data and scales where both have the same blocks (te_models.interop.stored_weights).

    Raises:
        CheckpointError: something in the folder is missing, damaged, of a wrong shape or not supported.
    """
    opened = open_folder(build, folder)
    wanted = gated(opened.config, overrides)
    check_shape(build, folder, opened.config, wanted, overrides)
    dtype = config_dtype(folder, opened.document)
    model = build(wanted, **{"dtype": dtype, **options, "initialize": False})
    generation = folder / "generation_config.json"
    origin = Origin(folder, opened.document, read_json(generation) if generation.is_file() else None)
    fill(model, opened.places, opened.shards, opened.stored)
    if wanted.attention_gate != opened.config.attention_gate:
        double_output_projections(model)
    else:
        keep_stored_weights(model, opened.places, opened.shards, opened.stored)
    return model, origin


def gated(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """Return `config` with `overrides`; a gate may be added to an ungated model but not changed or removed."""
    wanted = dataclasses.replace(config, **overrides)
    if config.attention_gate not in ("none", wanted.attention_gate):
        raise UsageError(
            f"the model has attention_gate={config.attention_gate!r}, which cannot become {wanted.attention_gate!r}: "
            "only an ungated model can be given a gate"
        )
    if wanted.attention_gate != config.attention_gate and wanted.attention_gate_activation != "sigmoid":
        raise UsageError(
            f"a gate with attention_gate_activation={wanted.attention_gate_activation!r} would change the model's "
            "outputs: only a sigmoid gate can be added"
        )
    return wanted


def check_shape(
    build: Callable[..., Decoder],
    folder: Path,
    config: ModelConfig,
    wanted: ModelConfig,
    overrides: Mapping[str, Any],
) -> None:
    """Raise a UsageError if the weights of a model of `config` do not fit one of `wanted`, which `overrides` made.

    A gate and a larger vocabulary may be added: they are zeros.
    """
    before, after = field_values(config), field_values(wanted)
    changed = [name for name in overrides if before[name] != after[name]]
    if not changed:
        return
    allowed = {name: after[name] for name in ("attention_gate", "attention_gate_activation")}
    allowed["vocab_size"] = max(config.vocab_size, wanted.vocab_size)
    shapes = [
        {name: tuple(p.shape) for name, p in build(shape, **SKETCH).named_parameters()}
        for shape in (dataclasses.replace(config, **allowed), wanted)
    ]
    if shapes[0] != shapes[1]:
        given = ", ".join(f"{name}={after[name]!r}" for name in changed)
        raise UsageError(f"the weights in {folder} do not fit {given}: a model that has weights keeps their shape")
    if (more := wanted.vocab_size - config.vocab_size) > 0:
        warnings.warn(f"vocab_size={wanted.vocab_size} adds {more:,} tokens to the model, rows of zeros", stacklevel=2)


@torch.no_grad()
def double_output_projections(model: nn.Module) -> None:
    """Double every o_proj, the second half of adding a gate: a gate of zeros halves the output of attention.

    sigmoid(0) is 1/2. Both factors are powers of two, so the model's outputs keep every bit.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.o_proj.weight"):
            write_weight(parameter, plain(parameter) * 2)


def check_sizes(path: Path, values: Any, tensors: Mapping[str, Tensor], layers: str, embedding: str) -> None:
    """Compare the sizes in a config.json with the tensors of the model, before anything of such a size is made.

    Args:
        path: of the config.json, for errors.
        values: its content.
        tensors: all tensors of the model, on any device.
        layers: the prefix of the names of a layer's tensors, before its number.
        embedding: the name of the embedding table.

    Raises:
        CheckpointError: it has more layers, a larger vocabulary or a larger hidden size than the tensors.
    """
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not an object of names and values")
    numbers = {name.removeprefix(layers).split(".")[0] for name in tensors if name.startswith(layers)}
    actual: dict[str, int] = {"num_hidden_layers": len(numbers)}
    if embedding in tensors and tensors[embedding].dim() == 2:
        actual["vocab_size"], actual["hidden_size"] = tensors[embedding].shape
    for name, size in actual.items():
        if isinstance(values.get(name), int) and values[name] > size:
            raise CheckpointError(f"{path}: {name} is {values[name]}, and the tensors have {size}")


def check_tensors(folder: Path, found: Mapping[str, Tensor], places: Mapping[str, Place], optional: set[str]) -> None:
    """Raise CheckpointError unless `found` are exactly the tensors of `places`, each of its shape.

    Tensors in `optional` may be there and are not read.
    """
    wrong = []
    for name, tensor in found.items():
        if name in places and tuple(tensor.shape) != places[name].shape:
            wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(places[name].shape)}")
        if not tensor.is_floating_point():
            wrong.append(f"{name} is {tensor.dtype}")
    unexpected = {n for n in found if n not in places and n not in optional and not n.endswith("rotary_emb.inv_freq")}
    missing = places.keys() - found
    for what, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected)), ("different", wrong)):
        if names:
            raise CheckpointError(f"{folder}: the tensors do not fit config.json; {what}: {list_some(names, limit=2)}")


@torch.no_grad()
def fill(model: Decoder, places: Mapping[str, Place], shards: Iterable[Path], stored: StoredWeights) -> None:
    """Copy every tensor of `shards` into its place, dequantized; rows that no tensor fills become zero."""
    with model.tp.filling_all(model, model.config) as own:
        fill_parameters(dict(model.ep.every(own.items(), scratch)), places, shards, stored)


def fill_parameters(
    parameters: Mapping[str, Tensor], places: Mapping[str, Place], shards: Iterable[Path], stored: StoredWeights
) -> None:
    """Copy the tensors of `shards` that have a place into `parameters`, as `fill` does."""
    filled: dict[str, int] = {}
    for place in places.values():
        filled[place.name] = filled.get(place.name, 0) + place.shape[0]
    for name, rows in filled.items():
        if rows < len(parameters[name]):
            parameters[name].zero_()
    left = Counter(place.name for place in places.values())
    wholes: dict[str, Tensor] = {}  # of parameters that are sharded over ranks, until all their rows are there
    for shard in shards:
        with SafetensorsFile(shard) as file:
            for data in file.tensors:
                name = stored.name(data)
                if name not in places:
                    continue
                values = stored.values(data, file.read(data))
                if tuple(values.shape) != places[name].shape:
                    raise CheckpointError(f"{shard} changed while it was read")
                target = places[name].name
                parameter = parameters[target]
                if local(parameter) is not parameter:
                    parameter = wholes.setdefault(target, torch.zeros(parameter.shape, dtype=parameter.dtype))
                check_finite({name: values}, shard)
                places[name].load(parameter, values)
                left[target] -= 1
                if not left[target] and target in wholes:
                    write_shard(parameters[target], wholes.pop(target))
    if lost := sorted(name for name, count in left.items() if count):
        raise CheckpointError(f"the files lost tensors of {list_some(lost)} while they were read")


def write_hugging_face(
    model: Decoder,
    origin: Origin,
    folder: str | Path,
    parameters: Mapping[str, Tensor],
    tokenizer: Mapping[str, bytes] = MappingProxyType({}),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantize: Quantize | None = None,
    name: str | None = None,
) -> None:
    """Save `model` as a folder that transformers loads, atomically.

    A model that came from Hugging Face and still has its shape gets its own config.json back.

    Args:
        model: the model, of which config and dtype are used.
        origin: where it came from.
        folder: the folder to write; its parents are created.
        parameters: name -> values of the model's parameters, whole.
        tokenizer: file name -> content of the tokenizer to save with it.
        max_shard_bytes: weights larger than this are split into shards.
        quantize: returns the tensors and the config.json to write instead of the model's.
        name: the model's name in its card; None: the folder's name.

    Raises:
        UsageError: no architecture there computes what this model does, or `folder` holds other files.
        SaveError: writing failed; the previous content of `folder` is intact.
    """
    folder = Path(os.path.realpath(folder))
    if strangers := [path.name for path in _entries(folder) if not _replaceable(path.name)]:
        raise UsageError(f"{folder} holds {list_some(strangers)}, which saving would delete; choose another folder")
    preferred = family_of(origin.config) if origin.config else None
    aside = tensors_beside(origin, preferred) if quantize is None and preferred is not None else {}
    if preferred is not None and preferred.aside and not aside:
        preferred = None
        if quantize is None:
            warnings.warn(
                f"{folder} gets the text model alone: name the folder of the whole release (beside=, --beside) to have "
                "the other tensors copied from there",
                stacklevel=5,
            )
    family = family_for(model.config, preferred)
    places = tensor_places(family, model.config, {name: p.shape for name, p in parameters.items()})
    config = _config_document(model, origin, family)
    if quantize is None:
        tensors = {name: place.save(parameters[place.name]) for name, place in places.items()}
    else:
        tensors, config = quantize(places, parameters, config)
    files: dict[str, Iterable[bytes | memoryview]] = {
        "config.json": [render_json(config, "config.json")],
        "generation_config.json": [render_json(_generation_document(model, origin), "generation_config.json")],
    }
    tensors |= aside
    shards = split_by_size("model", tensors, max_shard_bytes)
    if len(shards) > 1:
        weight_map = {name: file for file, members in shards.items() for name in members}
        files[INDEX] = [render_index(weight_map, sum(tensor.nbytes for tensor in tensors.values()))]
    files |= {file: render_safetensors(members) for file, members in shards.items()}
    files |= {name: [content] for name, content in tokenizer.items()}
    if family.code:
        files |= {path.name: [path.read_bytes()] for path in sorted(CODE.glob("*.py"))}
    card = user_card(folder) or model_card(model, origin.folder, config, name or folder.name, family.code)
    if card is not None:
        files[CARD] = [card]
    with replacing_folder(folder) as temp:
        for file, chunks in files.items():
            (temp / file).parent.mkdir(exist_ok=True)
            write_file(temp / file, chunks)
    _say_what_loads(model, family, str(name or folder))


def _say_what_loads(model: Decoder, family: Family, name: str) -> None:
    """Warn where transformers itself has no code for the saved model."""
    if family.code or (not family.written and model.config.attention_gate != "none"):
        own = "its own code in transformers: from_pretrained(folder, trust_remote_code=True)"
        release = "the .py files of the release that the model came from, to load in transformers"
        warnings.warn(f"{name} needs {own if family.code else release}", stacklevel=5)


def _config_document(model: Decoder, origin: Origin, family: Family) -> dict[str, Any]:
    """Return config.json: the model's own if it still describes the model, else with the family's keys replaced."""
    dtype = str(model.dtype).removeprefix("torch.")
    own = dict(origin.config or {})
    if not own or family_of(own) is not family:
        return {**family.write(model.config), "torch_dtype": dtype}
    if family.read(own) != model.config:
        own = family.rewritten(own, model.config)
    if family.inner and own[family.inner].get("dtype"):
        own = {**own, family.inner: {**own[family.inner], "dtype": dtype}}
    return {**own, "dtype" if family.inner or "dtype" in own else "torch_dtype": dtype}


def _generation_document(model: Decoder, origin: Origin) -> dict[str, Any]:
    config = model.config.to_dict()
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    return dict(origin.generation) if origin.generation is not None else {"_from_model_config": True, **ids}


def tokenizer_files(folder: Path | None) -> list[str]:
    """Return the names of the tokenizer's files that may be in a model's folder, and of others that are there."""
    if folder is None:
        return []
    others = (*folder.glob("*.tiktoken"), *folder.glob(f"{TEMPLATES}/*.jinja"))
    return [*TOKENIZER_FILES, *sorted(str(path.relative_to(folder)) for path in others)]


def _entries(folder: Path) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        return [folder]
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _replaceable(name: str) -> bool:
    known = name in (*REPLACEABLE, TEMPLATES, CARD) or name.endswith(".tiktoken")
    return known or (name.startswith("model-") and name.endswith(".safetensors"))


def config_dtype(folder: Path, document: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a config.json of Hugging Face names, FP32 if it names none."""
    text, _ = text_part(document)
    named = [part.get(key) for part in (document, text) for key in ("dtype", "torch_dtype")]
    return saved_dtype(f"{folder}/config.json", next(filter(None, named), "float32"))
