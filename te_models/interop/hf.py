"""Hugging Face checkpoints in and out: safetensors folders streamed into te.Linear and te.RMSNorm, and given back.

Reading opens one shard at a time, memory-mapped, and copies each tensor straight into its rows of the parameter on the
target device: host memory holds one shard's pages and nothing else. te_models.interop.hf_families says which rows those are.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.layout import row_ranges
from te_models.config.model import ModelConfig
from te_models.distributed.dtensor import local, put
from te_models.errors import CheckpointError, UsageError, needs
from te_models.files.atomic import first_line, readable, replacing_folder, write_file
from te_models.files.formats import list_some, open_safetensors, read_json, render_json, render_safetensors
from te_models.fp8.primary_weights import plain, write_weight
from te_models.interop.hf_families import TOP, Family, Rows, family_for, family_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9  # as in transformers
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
# What saving may replace in a folder; anything else there is somebody's work.
REPLACEABLE = (
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    "manifest.json",
    "recipe.json",
)


@dataclass(frozen=True)
class Origin:
    """Where a model came from: its folder, and config.json and generation_config.json if they were Hugging Face's."""

    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None

    def documents(self) -> dict[str, Any]:
        """What has to be saved with the model to give it back as it came."""
        found = {"hf_config": self.config, "generation_config": self.generation}
        return {name: document for name, document in found.items() if document is not None}

    def tokenizer(self) -> dict[str, Any]:
        """The tokenizer's JSON files in the folder, by name without suffix."""
        names = ("tokenizer", "tokenizer_config")
        files = {name: self.folder / f"{name}.json" for name in names} if self.folder is not None else {}
        found = {name: read_json(file) for name, file in files.items() if file.is_file()}
        if "tokenizer_config" in found and (template := files["tokenizer"].with_name("chat_template.jinja")).is_file():
            found["tokenizer_config"]["chat_template"] = template.read_text(encoding="utf-8")
        return found


@dataclass(frozen=True)
class Place:
    """The rows of the parameter `name` that hold one tensor of theirs: (start, rows a group) of each block."""

    name: str
    blocks: tuple[tuple[int, int], ...]
    groups: int
    shape: tuple[int, ...]  # of their tensor

    def pieces(self, parameter: Tensor) -> list[Tensor]:
        """Views [groups, rows, ...] of each block of the parameter."""
        return [
            parameter[start : start + self.groups * rows].unflatten(0, (self.groups, rows))
            for start, rows in self.blocks
            if rows
        ]

    def load(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy their tensor into its rows; the device converts the dtype."""
        sizes = [rows for _, rows in self.blocks if rows]
        tensor = tensor.to(parameter.device).unflatten(0, (self.groups, sum(sizes)))
        for piece, values in zip(self.pieces(parameter), tensor.split(sizes, dim=1), strict=True):
            piece.copy_(values)

    def save(self, parameter: Tensor) -> Tensor:
        """Their tensor: a view where it is one block."""
        pieces = self.pieces(parameter)
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).flatten(0, 1)


def local_folder(name: str | Path) -> Path:
    """`name` if it is a folder here, else where the Hugging Face hub's model of that name was downloaded to.

    Raises:
        ValueError: it is neither; one line that says why.
    """
    path = readable(Path(name))
    if path.exists() or not _is_hub_name(str(name)):
        return path
    with needs(f"{name} is no folder here, and the Hugging Face hub", "huggingface_hub", "0.26", "hf"):
        from huggingface_hub import snapshot_download  # noqa: PLC0415
    try:
        return Path(
            snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        )
    except Exception as error:  # the library's errors have no common base but this one
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{name} is no folder here, and the Hugging Face hub did not give it ({reason})") from None


def _is_hub_name(name: str) -> bool:
    """Whether it reads as "owner/model"."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def is_hugging_face(folder: Path, own_type: str) -> bool:
    """Whether the folder's config.json is of a model type other than ours."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    config = read_json(file)
    return isinstance(config, dict) and config.get("model_type") != own_type


def read_hugging_face(build: Any, folder: Path, overrides: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """The model in `folder`, built by `build(config, **options)` (CausalLM) and filled shard by shard.

    Names and shapes of all tensors are checked before the model is built.

    Raises:
        CheckpointError: something of the folder is missing, damaged, of a wrong shape or not supported; one line.
    """
    document = read_json(folder / "config.json")
    try:
        family = family_of(document)
        config = family.read(document)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json: {first_line(error)}") from None
    wanted = gated(config, overrides)
    sketch = build(config, device="meta", engine="emulated")
    places = tensor_places(family, config, {name: p.shape for name, p in sketch.named_parameters()})
    shards = check_shards(folder, places, optional={"lm_head.weight"} if config.tie_word_embeddings else set())
    dtype = _dtype(folder, document)
    model = build(wanted, **{"dtype": dtype, **options, "initialize": False})
    model.origin = Origin(folder, document, _optional_json(folder / "generation_config.json"))
    fill(model, places, shards)
    if wanted.attention_gate != config.attention_gate:
        double_output_projections(model)
    return model


def gated(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """`config` with `overrides`, among which a gate may be added to an ungated model but not changed or removed."""
    wanted = dataclasses.replace(config, **overrides)
    if config.attention_gate not in ("none", wanted.attention_gate):
        raise UsageError(
            f"the model has attention_gate={config.attention_gate!r}, which cannot become {wanted.attention_gate!r}: "
            "only an ungated model can be given a gate"
        )
    return wanted


@torch.no_grad()
def double_output_projections(model: nn.Module) -> None:
    """The other half of adding a gate: sigmoid(0) = 1/2 of the attention's output, times twice the projection.

    Both factors are powers of two, so the outputs of the ungated model come back in every bit.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.o_proj.weight"):
            write_weight(parameter, plain(parameter) * 2)


def tensor_places(family: Family, config: ModelConfig, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
    """Their tensor's name -> its place in ours, in their order; `shapes` are those of our parameters."""
    blocks = row_ranges(config)
    tables = {name: Rows(module) for name, module in TOP.items()}
    for layer in range(config.num_hidden_layers):
        for name, rows in family.layer.items():
            table = dataclasses.replace(rows, module=f"layers.{layer}.{rows.module}")
            tables[f"model.layers.{layer}.{name}"] = table
    found = {}
    for theirs, rows in tables.items():
        for kind in ("weight", "bias"):
            ours = f"{rows.module}.{kind}"
            if ours not in shapes or (theirs == "lm_head" and config.tie_word_embeddings):
                continue
            ranges = [blocks[block] for block in rows.blocks] or [(0, shapes[ours][0])]
            groups = getattr(config, rows.per) if rows.per else 1
            shape = (sum(count for _, count in ranges), *shapes[ours][1:])
            found[f"{theirs}.{kind}"] = Place(ours, tuple((start, n // groups) for start, n in ranges), groups, shape)
    return found


def check_shards(folder: Path, places: Mapping[str, Place], optional: set[str]) -> list[Path]:
    """The weight files of `folder`, once they are known to hold exactly the tensors of `places`, each of its shape.

    Tensors in `optional` may be there and are not read.
    """
    shards = _shard_files(folder)
    seen: dict[str, str] = {}
    wrong = []
    for shard in shards:
        for name, tensor in open_safetensors(shard).items():
            if name in seen:
                raise CheckpointError(f"{folder}: tensor {name} is both in {seen[name]} and in {shard.name}")
            seen[name] = shard.name
            if name in places and tuple(tensor.shape) != places[name].shape:
                wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(places[name].shape)}")
            if not tensor.is_floating_point():
                wrong.append(f"{name} is {tensor.dtype}")
    unexpected = {n for n in seen if n not in places and n not in optional and not n.endswith("rotary_emb.inv_freq")}
    missing = places.keys() - seen
    for what, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected)), ("different", wrong)):
        if names:
            raise CheckpointError(f"{folder}: the tensors do not fit config.json; {what}: {list_some(names, limit=2)}")
    return shards


def _shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all of them there."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} is damaged: it has no map of tensor names to files")
        shards = [folder / name for name in sorted(set(weight_map.values()))]
        if absent := [shard.name for shard in shards if not shard.is_file()]:
            raise CheckpointError(f"{folder} lacks {list_some(absent)} of its {len(shards)} shards: download it again")
        return shards
    if pickles := sorted(path.name for path in folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights as a pickle ({list_some(pickles)}), which can run code and is not read: load it "
            "with transformers and save it again with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX} is there")


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name.endswith(".safetensors")


@torch.no_grad()
def fill(model: nn.Module, places: Mapping[str, Place], shards: Iterable[Path]) -> None:
    """Copy every tensor of `shards` into its place; rows that none of theirs fills become zero."""
    with model.tp.filling_all(model) as parameters:  # type: ignore[operator,union-attr]
        _fill(parameters, places, shards)


def _fill(parameters: dict[str, torch.Tensor], places: Mapping[str, Place], shards: Iterable[Path]) -> None:
    filled: dict[str, int] = {}
    for place in places.values():
        filled[place.name] = filled.get(place.name, 0) + place.shape[0]
    for name, rows in filled.items():
        if rows < len(parameters[name]):
            parameters[name].zero_()
    left = Counter(place.name for place in places.values())
    wholes: dict[str, Tensor] = {}  # of parameters that lie in pieces on several ranks, until all their rows are there
    for shard in shards:
        for name, tensor in open_safetensors(shard).items():
            if name not in places:
                continue
            target = places[name].name
            parameter = parameters[target]
            if local(parameter) is not parameter:
                parameter = wholes.setdefault(target, torch.zeros(parameter.shape, dtype=parameter.dtype))
            places[name].load(parameter, tensor)
            left[target] -= 1
            if not left[target] and target in wholes:
                put(parameters[target], wholes.pop(target))


def write_hugging_face(
    model: Any,
    folder: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Save `model` (its whole `parameters`, where it holds but a part of them) as the folder that transformers loads, atomically, with the tokenizer it came with.

    A model that came from Hugging Face and has kept its shape gets its own config.json back.

    Raises:
        ValueError: no architecture there computes what this model does, or `folder` holds something else.
        SaveError: writing failed; what was there is intact.
    """
    folder = Path(os.path.realpath(folder))
    if strangers := [path.name for path in _entries(folder) if not _replaceable(path.name)]:
        raise UsageError(f"{folder} holds {list_some(strangers)}, which saving would delete; choose another folder")
    origin = model.origin
    family = family_for(model.config, family_of(origin.config) if origin.config else None)
    if parameters is None:
        parameters = {name: plain(p) for name, p in model.named_parameters(remove_duplicate=False)}
    shapes = {name: p.shape for name, p in parameters.items()}
    places = tensor_places(family, model.config, shapes)
    tensors = {name: place.save(parameters[place.name]) for name, place in places.items()}
    files: dict[str, Iterable[bytes | memoryview]] = {
        "config.json": [render_json(_config_document(model, family), "config.json")],
        "generation_config.json": [render_json(_generation_document(model), "generation_config.json")],
    }
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, members in shards.items() for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files[INDEX] = [render_json(index, INDEX)]
    files |= {file: render_safetensors(members) for file, members in shards.items()}
    if origin.folder is not None:
        kept = [origin.folder / name for name in TOKENIZER_FILES]
        files |= {path.name: [path.read_bytes()] for path in kept if path.is_file()}
    with replacing_folder(folder) as temp:
        for name, chunks in files.items():
            write_file(temp / name, chunks)


def _config_document(model: Any, family: Family) -> dict[str, Any]:
    """config.json: the model's own if it still holds, else the family's over what the model's own says beside it."""
    dtype = str(model.dtype).removeprefix("torch.")
    own = dict(model.origin.config or {})
    if not own or family_of(own) is not family:
        return {**family.write(model.config), "torch_dtype": dtype}
    if family.read(own) != model.config:
        own = {key: value for key, value in own.items() if key not in family.known()} | family.write(model.config)
    return {**own, "dtype" if "dtype" in own else "torch_dtype": dtype}


def _generation_document(model: Any) -> dict[str, Any]:
    config = model.config.to_dict()
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    return dict(model.origin.generation) if model.origin.generation is not None else {"_from_model_config": True, **ids}


def _shards(tensors: Mapping[str, Tensor], limit: int) -> dict[str, dict[str, Tensor]]:
    """File name -> tensors, files of at most `limit` bytes in the order given."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _entries(folder: Path) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        return [folder]
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _replaceable(name: str) -> bool:
    return name in REPLACEABLE or (name.startswith("model-") and name.endswith(".safetensors"))


def _dtype(folder: Path, document: Mapping[str, Any]) -> torch.dtype:
    name = document.get("dtype") or document.get("torch_dtype") or "float32"
    if name not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{folder}/config.json: dtype {name!r} is not bfloat16, float16 or float32")
    return getattr(torch, name)


def _optional_json(file: Path) -> Any:
    return read_json(file) if file.is_file() else None
