"""Folders of a TEModelsForCausalLM: our format, beside the files of a Trainer and its tokenizer in the same folder."""

import dataclasses
import os
import re
import tempfile
import warnings
from pathlib import Path

from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.errors import CheckpointError, SaveError
from te_models.files.atomic import first_line, write_file
from te_models.files.formats import Fields, list_some, read_json
from te_models.fp8.extra_state import EXTRA, extra_states
from te_models.fp8.primary_weights import plain
from te_models.huggingface.adapters import is_adapted
from te_models.interop.hf_families import beside_text, without_others
from te_models.saving.folder import MANIFEST, save_folder
from te_models.saving.load_model import WRAPPED
from te_models.saving.pretrained import model_content, read_tokenizer

# Prefixes of the names of a text model inside a multimodal one.
MULTIMODAL = "model.language_model."
OTHER_ROOTS = ("language_model.model.", "language_model.")
HEAD = f"{WRAPPED}lm_head"


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
    file. A crash in between leaves a folder without its manifest, which is refused.

    Args:
        model: the model.
        config: its shape, with token ids that may have changed.
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
    weights |= extra_states(tensors.get("fp8_state", {}))
    tensors["model"] = {WRAPPED + name: tensor for name, tensor in weights.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = read_tokenizer(model.origin)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temp:
            save_folder(Path(temp) / "new", tensors, documents, max_shard_bytes=max_shard_bytes)
            _move_in(Path(temp) / "new", folder)
        for name, content in tokenizer.items():
            # A tokenizer that the caller saved there is newer than the one the model came with.
            if not (folder / name).exists():
                (folder / name).parent.mkdir(exist_ok=True)
                write_file(folder / name, content)
    except OSError as error:
        raise SaveError(f"{folder} could not be written: {first_line(error)}") from None


def _move_in(new: Path, folder: Path) -> None:
    """Move the files of a saved folder into another one, the manifest last, and drop files of an earlier save there."""
    try:
        old = set(read_json(folder / MANIFEST)["files"]) if (folder / MANIFEST).exists() else set()
    # A damaged manifest does not say which files are its own.
    except (CheckpointError, LookupError, TypeError):
        old = set()
    # Also files without a manifest: an older save under other names would be loaded together with this one.
    old |= {path.name for path in folder.glob("model*.safetensors*")}
    (folder / MANIFEST).unlink(missing_ok=True)
    # Complete only with its manifest, which therefore comes last.
    names = sorted(os.listdir(new), key=lambda name: name == MANIFEST)
    for name in names:
        os.replace(new / name, folder / name)
    for name in old - set(names):
        # The bare name: whatever a manifest says, nothing outside the folder is deleted.
        (folder / Path(name).name).unlink(missing_ok=True)


def add_prefix(model: nn.Module, state: Fields, prefix: str, *others: object) -> None:
    """Accept a state_dict with the names of CausalLM too; refuse tensors of adapters, which peft would drop.

    A text model inside a multimodal one may have its names too.
    """
    for name in [name for name in state if name.startswith(prefix)]:
        bare = name.removeprefix(prefix)
        # Names of the text model inside a multimodal one, and of older versions of transformers.
        for root in (MULTIMODAL, *OTHER_ROOTS):
            if bare.startswith(root):
                bare = WRAPPED + bare.removeprefix(root)
                state[prefix + bare] = state.pop(name)
                break
        if not bare.startswith(WRAPPED):
            state[prefix + WRAPPED + bare] = state.pop(name)
    beside = tuple(prefix + other for other in beside_text())
    if left_out := [name for name in state if name.startswith(beside)]:
        warnings.warn(without_others(name.removeprefix(prefix) for name in left_out), stacklevel=2)
        for name in left_out:
            del state[name]
    if adapters := [
        name.removeprefix(prefix) for name in state if name.startswith(prefix) and ".lora_" in name
    ]:
        model_names = {
            WRAPPED + name for name, _ in model.get_submodule("model").named_parameters()
        }
        if unknown := [name for name in adapters if name not in model_names]:
            raise CheckpointError(
                f"peft cannot place the adapter's {list_some(unknown)} here: give load_lora of te_models.training.lora "
                "the CausalLM inside (`.model`)"
            )


def inside(name: str, prefix: str = "") -> str:
    """Return the name of a module or tensor as in a multimodal model of transformers; its head has no other name.

    `prefix` is the name of the TEModelsForCausalLM: "", or one that ends without a dot.
    """
    start = f"{prefix}.{WRAPPED}" if prefix else WRAPPED
    if not name.startswith(start) or name.startswith(f"{start}lm_head"):
        return name
    return start.removesuffix(WRAPPED) + MULTIMODAL + name.removeprefix(start)


def inside_multimodal(model: nn.Module, state: Fields, prefix: str, metadata: object) -> None:
    """Give the tensors of a state_dict the names of `inside`; `add_prefix` reads them again."""
    for name in list(state):
        if name.startswith(prefix):
            state[prefix + inside(name.removeprefix(prefix))] = state.pop(name)


def text_names(multimodal: bool) -> dict[str, str]:
    """Return the names of modules in adapters of other classes, as patterns, and those in the model itself."""
    if multimodal:
        return {r"^model\.(?!language_model\.|lm_head)": MULTIMODAL}
    others = "|".join(re.escape(root) for root in (MULTIMODAL, *OTHER_ROOTS))
    return {f"^(?:{others})": WRAPPED}


def name_adapted_head(model: nn.Module, state: Fields, prefix: str, metadata: object) -> None:
    """Give the tensors of a head that peft has adapted the names of transformers, as its modules have."""
    if is_adapted(model.get_submodule(HEAD)):
        for name in [name for name in state if name.startswith(f"{prefix}{HEAD}.")]:
            theirs = prefix + name.removeprefix(prefix).removeprefix(WRAPPED)
            state[theirs] = state.pop(name)


def leave_out_empty(model: nn.Module, state: Fields, prefix: str, metadata: object) -> None:
    """Leave the `_extra_state` of modules without FP8 state out of a state_dict.

    accelerate sets tensors by name and supports only parameters and buffers.
    """
    for name in [
        name for name in state if name.startswith(prefix) and name.rpartition(".")[2] == EXTRA
    ]:
        if isinstance(state[name], Tensor) and not state[name].numel():
            del state[name]
