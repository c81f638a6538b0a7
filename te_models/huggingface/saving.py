"""Folders of a TEModelsForCausalLM: our format, beside the files of a Trainer and its tokenizer in the same folder."""

import dataclasses
import os
import re
import warnings
from pathlib import Path

from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.errors import CheckpointError, SaveError
from te_models.files.atomic import reason, staging_folder, write_file
from te_models.files.formats import Fields, list_some, read_json
from te_models.fp8.extra_state import EXTRA, extra_states
from te_models.fp8.primary_weights import plain
from te_models.huggingface.adapters import is_adapted
from te_models.interop.hf_families import beside_text, without_others
from te_models.saving.folder import MANIFEST, save_folder
from te_models.saving.load_model import WRAPPED
from te_models.saving.loadable import refuse_unloadable
from te_models.saving.pretrained import model_content, read_tokenizer

# Prefixes of the names of a text model inside a multimodal one.
MULTIMODAL = "model.language_model."
OTHER_ROOTS = ("language_model.model.", "language_model.")
HEAD = f"{WRAPPED}lm_head"
# The files of weights that transformers looks for in a folder, and their index.
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def save_model(
    model: CausalLM,
    config: ModelConfig,
    generation: Fields,
    folder: Path,
    state: Fields | None,
    max_shard_bytes: int,
) -> None:
    """Write a model into `folder`, in our format, and leave other files in it unchanged.

    model.safetensors includes the FP8 state, as a state_dict does, since a Trainer that resumes reads only that
    file. A crash during the save leaves a folder without a manifest, which loading refuses.

    Args:
        model: the model.
        config: its config, in which the caller may have changed token ids.
        generation: the content of generation_config.json.
        folder: the folder to write; its parents are created.
        state: weights to write instead of the model's, from a state_dict.
        max_shard_bytes: weights larger than this are split into shards.

    Raises:
        SaveError: writing failed.
    """
    tensors, documents = model_content(
        model, dataclasses.replace(model.origin, generation=generation)
    )
    documents["config"] |= config.document()
    weights = tensors["model"]
    # A Trainer under FSDP gives gathered weights, under transformers' names.
    for name, value in (state or {}).items():
        bare = name.removeprefix(MULTIMODAL).removeprefix(WRAPPED)
        if bare in weights:
            weights[bare] = plain(value)
    # A state_dict has a tied table only once, and a folder under both of its names.
    if state and model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    refuse_unloadable(model, weights)
    weights |= extra_states(tensors.get("fp8_state", {}))
    tensors["model"] = {WRAPPED + name: tensor for name, tensor in weights.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = read_tokenizer(model.origin)
        with staging_folder(folder) as temp:
            save_folder(temp / "new", tensors, documents, max_shard_bytes=max_shard_bytes)
            _move_in(temp / "new", folder)
        for name, content in tokenizer.items():
            # A tokenizer that the caller saved there is newer than the one the model came with.
            if not (folder / name).exists():
                (folder / name).parent.mkdir(exist_ok=True)
                write_file(folder / name, content)
    except OSError as error:
        raise SaveError(f"could not save {folder}: {reason(error)}") from None


def _move_in(new: Path, folder: Path) -> None:
    """Move the files of a saved folder into `folder`, the manifest last, and delete files of an earlier save there."""
    try:
        old = set(read_json(folder / MANIFEST)["files"]) if (folder / MANIFEST).exists() else set()
    # A damaged manifest does not say which files are its own.
    except (CheckpointError, LookupError, TypeError):
        old = set()
    # Weights without a manifest as well: transformers would load them together with the new ones.
    old |= {path.name for path in folder.iterdir() if WEIGHTS.fullmatch(path.name)}
    (folder / MANIFEST).unlink(missing_ok=True)
    # Complete only with its manifest, which therefore comes last.
    names = sorted(os.listdir(new), key=lambda name: name == MANIFEST)
    for name in names:
        os.replace(new / name, folder / name)
    for name in old - set(names):
        # The bare name: whatever a manifest says, nothing outside the folder is deleted.
        (folder / Path(name).name).unlink(missing_ok=True)


def add_prefix(model: nn.Module, state: Fields, prefix: str, *others: object) -> None:
    """Rename tensors of a state_dict, in place, as load_state_dict of a TEModelsForCausalLM expects them.

    A hook before load_state_dict. Names may be a CausalLM's, or a text model's inside a multimodal one. Tensors
    of other models, such as a vision tower, are left out with a warning.

    Raises:
        CheckpointError: there are adapters that the model has no parameters for; peft would drop them in silence.
    """
    for name in list(state):
        if not name.startswith(prefix):
            continue
        bare = name.removeprefix(prefix)
        # Names of the text model inside a multimodal one, and of older versions of transformers.
        for root in (MULTIMODAL, *OTHER_ROOTS):
            if bare.startswith(root):
                bare = WRAPPED + bare.removeprefix(root)
                state[prefix + bare] = state.pop(name)
                break
        if not bare.startswith(WRAPPED):
            state[prefix + WRAPPED + bare] = state.pop(name)
    other_models = tuple(prefix + other for other in beside_text())
    if left_out := [name for name in state if name.startswith(other_models)]:
        warnings.warn(without_others(name.removeprefix(prefix) for name in left_out), stacklevel=2)
        for name in left_out:
            del state[name]
    _refuse_unknown_adapters(model, state, prefix)


def _refuse_unknown_adapters(model: nn.Module, state: Fields, prefix: str) -> None:
    """Raise a CheckpointError if a state_dict has tensors of LoRA for which the model has no parameters."""
    adapters = []
    for name in state:
        if name.startswith(prefix) and ".lora_" in name:
            adapters.append(name.removeprefix(prefix))
    # Most models have none, and listing the parameters takes time.
    if not adapters:
        return
    model_names = {WRAPPED + name for name, _ in model.get_submodule("model").named_parameters()}
    if unknown := [name for name in adapters if name not in model_names]:
        raise CheckpointError(
            f"peft cannot place the adapter's {list_some(unknown)} here: give load_lora of te_models.training.lora "
            "the CausalLM inside (`.model`)"
        )


def multimodal_name(name: str, prefix: str = "") -> str:
    """Return the name that a module or tensor has in a multimodal model of transformers; the head keeps its name.

    `prefix` is the name of the TEModelsForCausalLM, without a dot at the end; "" if it is the model itself.
    """
    start = f"{prefix}.{WRAPPED}" if prefix else WRAPPED
    if not name.startswith(start) or name.startswith(f"{start}lm_head"):
        return name
    return start.removesuffix(WRAPPED) + MULTIMODAL + name.removeprefix(start)


def inside_multimodal(model: nn.Module, state: Fields, prefix: str, metadata: object) -> None:
    """Rename the tensors of a state_dict by `multimodal_name`, in place; `add_prefix` reads such names.

    A hook after state_dict.
    """
    for name in list(state):
        if name.startswith(prefix):
            state[prefix + multimodal_name(name.removeprefix(prefix))] = state.pop(name)


def text_names(multimodal: bool) -> dict[str, str]:
    """Return patterns of module names in adapters of other classes -> the beginning of those names in this model."""
    if multimodal:
        return {r"^model\.(?!language_model\.|lm_head)": MULTIMODAL}
    others = "|".join(re.escape(root) for root in (MULTIMODAL, *OTHER_ROOTS))
    return {f"^(?:{others})": WRAPPED}


def name_adapted_head(model: nn.Module, state: Fields, prefix: str, metadata: object) -> None:
    """Rename the tensors of an adapted head in a state_dict, in place: peft looks for the names of transformers.

    A hook after state_dict.
    """
    if not is_adapted(model.get_submodule(HEAD)):
        return
    for name in list(state):
        if name.startswith(f"{prefix}{HEAD}."):
            theirs = prefix + name.removeprefix(prefix).removeprefix(WRAPPED)
            state[theirs] = state.pop(name)


def leave_out_empty(model: nn.Module, state: Fields, prefix: str, metadata: object) -> None:
    """Delete the empty `_extra_state` of modules without FP8 state from a state_dict.

    A hook after state_dict. accelerate sets tensors by name and supports only parameters and buffers.
    """
    for name in list(state):
        if not name.startswith(prefix) or name.rpartition(".")[2] != EXTRA:
            continue
        if isinstance(state[name], Tensor) and not state[name].numel():
            del state[name]
