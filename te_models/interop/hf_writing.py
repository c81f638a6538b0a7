"""Hugging Face folders written: a model as transformers loads it, with its tokenizer, card and own config.json."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.files.atomic import replacing_folder, write_file
from te_models.files.formats import Document, Fields, list_some, render_index, render_json
from te_models.files.tensors import split_by_size, write_safetensors
from te_models.interop.hf import (
    INDEX,
    WEIGHTS,
    HuggingFaceFolder,
    hugging_face_documents,
    open_hugging_face,
)
from te_models.interop.hf_families import Family, family_for, family_of
from te_models.interop.model_card import CARD, model_card, user_card
from te_models.interop.origin import Origin
from te_models.interop.quantized import MODELOPT_FILE
from te_models.interop.stacked_experts import stacked
from te_models.interop.tensor_places import Place, tensor_places
from te_models.model.decoder import Decoder

# Code for transformers, for models of which it has no architecture.
CODE = Path(__file__).parent / "remote_code"
MAX_SHARD_BYTES = 5 * 10**9  # as in transformers
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
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
# (places of their tensors, our parameters, config.json) -> (the tensors to write, the config.json to write).
Quantize = Callable[
    [Mapping[str, Place], Mapping[str, Tensor], Document], tuple[dict[str, Tensor], Fields]
]


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
    # A link to the folder stays a link: the folder behind it is replaced.
    folder = Path(os.path.realpath(folder))
    refuse_other_files(folder)
    # A quantized export is of the text model alone.
    form = _choose_form(model, origin, folder, with_others=quantize is None)
    family = form.family
    places = tensor_places(
        form.stored_as, model.config, {name: p.shape for name, p in parameters.items()}
    )
    config = _config_document(model, origin, family)
    if quantize is None:
        tensors = {name: place.save(parameters[place.name]) for name, place in places.items()}
    else:
        tensors, config = quantize(places, parameters, config)
    # Stacked after quantization, which works on single experts.
    if family.stacked:
        stacks = stacked(tensors, form.stored_as.stacked)
        tensors = {family.as_stored(name): tensor for name, tensor in stacks.items()}
    shards = split_by_size("model", {**tensors, **form.other_tensors}, max_shard_bytes)
    files = {
        "config.json": render_json(config, "config.json"),
        "generation_config.json": render_json(_generation(model, origin), "generation_config.json"),
        **tokenizer,
        **_index(shards),
        **(_code() if family.code else {}),
    }
    # A card that somebody wrote is kept.
    card = user_card(folder) or model_card(model, origin, config, name or folder.name, family.code)
    if card is not None:
        files[CARD] = card
    _write(folder, files, shards)
    _warn_of_own_code(model, family, str(name or folder))


def _code() -> dict[str, bytes]:
    """Return the files of te-models' own code for transformers."""
    return {path.name: path.read_bytes() for path in sorted(CODE.glob("*.py"))}


def _index(shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, bytes]:
    """Return the file that says which tensor is in which shard; none where all are in one."""
    if len(shards) == 1:
        return {}
    weight_map = {}
    size = 0
    for file, tensors in shards.items():
        for name, tensor in tensors.items():
            weight_map[name] = file
            size += tensor.nbytes
    return {INDEX: render_index(weight_map, size)}


def _write(
    folder: Path, files: Mapping[str, bytes], shards: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write small files and safetensors files, file name -> content, in place of the folder's content."""
    with replacing_folder(folder) as temp:
        for file, content in files.items():
            (temp / file).parent.mkdir(exist_ok=True)
            write_file(temp / file, content)
        for file, members in shards.items():
            write_safetensors(temp / file, members)


def refuse_other_files(folder: Path) -> None:
    """Raise a UsageError if the folder has files that may be the user's work."""
    if folder.is_dir():
        present = sorted(os.listdir(folder))
    elif folder.exists():
        present = [folder.name]
    else:
        present = []
    if other_files := [name for name in present if not _replaceable(name)]:
        raise UsageError(
            f"{folder} holds {list_some(other_files)}, which saving would delete; choose another folder"
        )


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a model is written.

    Attributes:
        family: the family whose config.json it gets.
        stored_as: this family with the order of stacked experts, and the names in a layer, that the folder which the
            model came from has.
        other_tensors: tensors of the release that are not the text model's (of images, say), to write beside it.
    """

    family: Family
    stored_as: Family
    other_tensors: Mapping[str, Tensor]


def _choose_form(model: Decoder, origin: Origin, folder: Path, with_others: bool) -> _Form:
    """Return how the model is written; `with_others` includes the tensors of its release's other models."""
    if not origin.config:
        if with_others and origin.beside is not None:
            raise UsageError(
                f"this model came from no release, so no tensors of {origin.beside} belong beside it: leave out beside"
            )
        family = family_for(model.config)
        return _Form(family, stored_as=family, other_tensors={})
    preferred = family_of(origin.config)
    others: Mapping[str, Tensor] | None = {}
    stored_as = preferred
    if with_others:
        others, stored_as = _read_other_tensors(origin, preferred, model.config)
    # A text model without the rest of its release is written as the family of texts, which transformers loads alone.
    alone = bool(preferred.other_models) and not others
    prefixes = preferred.other_prefixes(origin.config)
    if with_others and (alone or (others is None and prefixes)):
        warnings.warn(
            f"{folder} gets the text model alone, without the {list_some(f'{name}*' for name in prefixes)} that a "
            "release has: name its folder (beside=, --beside) to have them copied from there",
            stacklevel=6,  # the user's call of save_pretrained
        )
    family = family_for(model.config, None if alone else preferred)
    if family is not preferred:
        stored_as = family
    return _Form(family, stored_as, others or {})


def _generation(model: Decoder, origin: Origin) -> Document:
    """Return generation_config.json: the origin's, or the special tokens of the model."""
    if origin.generation is not None:
        return dict(origin.generation)
    fields = model.config.to_dict()
    ids = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if fields[key] is not None:
            ids[key] = fields[key]
    return {"_from_model_config": True, **ids}


def _read_other_tensors(
    origin: Origin, family: Family, config: ModelConfig
) -> tuple[dict[str, Tensor] | None, Family]:
    """Return the tensors beside the text model in the folder that it came from, or in the one given as `beside`.

    The second value is `family` as this folder stores it: with its order of stacked experts and its names in a layer.
    Where the folder is not, or no longer, one of Hugging Face, the first is None and the second is `family` itself.

    Raises:
        UsageError: `beside` was given, but has no such tensors, or belongs to a model of another `family` or `config`.
    """
    folder = origin.beside or origin.folder
    others = None
    documents = None if folder is None else hugging_face_documents(folder)
    if folder is not None and documents is not None:
        with open_hugging_face(folder, documents) as opened:
            others = _tensors_of_others(opened)
            if origin.beside is not None and others:
                _refuse_another_release(origin.beside, opened, family, config)
            # The names follow this folder, so that its other files still fit.
            order = opened.family.stacked or family.stacked
            family = dataclasses.replace(family, stacked=order, layer=opened.family.layer)
    if origin.beside is not None and documents is None:
        raise UsageError(
            f"{origin.beside} is no folder of Hugging Face, and so has no tensors that belong beside this model: give "
            "the release that it came from"
        )
    if origin.beside is not None and not others:
        raise UsageError(
            f"{origin.beside} has no tensors that belong beside this model: leave out beside"
        )
    return others, family


def _refuse_another_release(
    beside: Path, opened: HuggingFaceFolder, family: Family, config: ModelConfig
) -> None:
    """Raise a UsageError if the folder given as `beside` is a release of another architecture or width."""
    release = family_of(opened.origin.config or {})
    advice = "give the folder of the release that the model came from"
    if release is not family:
        raise UsageError(
            f"{beside} is a release of {release.model_type}, and this model came from {family.model_type}: {advice}"
        )
    # What an image encoder hands over is as wide as the text model.
    if opened.config.hidden_size != config.hidden_size:
        raise UsageError(
            f"{beside} is a release with hidden_size={opened.config.hidden_size}, and this model has "
            f"{config.hidden_size}: {advice}"
        )


def _tensors_of_others(opened: HuggingFaceFolder) -> dict[str, Tensor]:
    """Return the tensors of a folder that are not the text model's, in their dtype, in BF16 where they are FP8.

    Their names are as the architecture in its config.json has them; names in the folder may have other prefixes.
    """
    dtypes = {}
    for name, tensor in opened.stored.tensors.items():
        if name.startswith(opened.other_prefixes):
            dtypes[name] = tensor.dtype
    if not dtypes or opened.origin.config is None:
        return {}
    stated = family_of(opened.origin.config)
    renamed = {}
    for _, name, values in opened.values_of(dtypes):
        renamed[stated.other_name(name, opened.family)] = values.to(dtypes[name])
    return renamed


def _warn_of_own_code(model: Decoder, family: Family, name: str) -> None:
    """Warn where transformers itself has no code for the saved model."""
    if family.code or (not family.written and model.config.attention_gate != "none"):
        reader = "its own code in transformers: from_pretrained(folder, trust_remote_code=True)"
        release = "the .py files of the release that the model came from, to load in transformers"
        # The level is the user's call of save_pretrained.
        warnings.warn(f"{name} needs {reader if family.code else release}", stacklevel=5)


def _config_document(model: Decoder, origin: Origin, family: Family) -> Fields:
    """Return config.json: the model's own if it still describes the model, else with the family's keys replaced."""
    dtype = str(model.dtype).removeprefix("torch.")
    document: Fields = dict(origin.config or {})
    if not document or family_of(document) is not family:
        return {**family.write(model.config), "torch_dtype": dtype}
    if family.read(document) != model.config:
        document = family.rewritten(document, model.config)
    architectures = document.get("architectures") or []
    if architectures and all(str(name).endswith("Model") for name in architectures):
        document["architectures"] = [family.architecture]  # it came without a head, and now has one
    nested = family.inner in document
    if nested and document[family.inner].get("dtype"):
        document = {**document, family.inner: {**document[family.inner], "dtype": dtype}}
    return {**document, "dtype" if nested or "dtype" in document else "torch_dtype": dtype}


def tokenizer_files(folder: Path | None) -> list[str]:
    """Return the names of the tokenizer's files that may be in a model's folder, and of others that are there."""
    if folder is None:
        return []
    others = (*folder.glob("*.tiktoken"), *folder.glob(f"{TEMPLATES}/*.jinja"))
    return [*TOKENIZER_FILES, *sorted(str(path.relative_to(folder)) for path in others)]


def _replaceable(name: str) -> bool:
    known = name in (*REPLACEABLE, TEMPLATES, CARD) or name.endswith(".tiktoken")
    return known or (name.startswith("model-") and name.endswith(".safetensors"))
