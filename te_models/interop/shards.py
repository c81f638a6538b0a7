"""The safetensors files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from te_models.errors import CheckpointError, UsageError
from te_models.files.formats import SafetensorsFile, list_some, parse_index, read_json
from te_models.interop.hf_families import Family
from te_models.interop.origin import Origin

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def shard_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, all of which are present."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = [
            folder / name for name in sorted(set(parse_index(read_json(folder / INDEX), folder / INDEX).values()))
        ]
        if absent := [shard.name for shard in shards if not shard.is_file()]:
            raise CheckpointError(f"{folder} lacks {list_some(absent)} of its {len(shards)} shards: download it again")
        return shards
    if pickles := sorted(path.name for path in folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights as a pickle ({list_some(pickles)}), which can run code and is not read: load "
            "it with transformers and save it again with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX} is there")


def shard_tensors(folder: Path, shards: Iterable[Path]) -> dict[str, Tensor]:
    """Return name -> tensor on the meta device of all tensors in the weight files."""
    found: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for shard in shards:
        with SafetensorsFile(shard) as file:
            for name, tensor in file.tensors.items():
                if name in places:
                    raise CheckpointError(f"{folder}: tensor {name} is both in {places[name]} and in {shard.name}")
                found[name], places[name] = tensor, shard.name
    return found


def tensors_beside(origin: Origin, family: Family) -> dict[str, Tensor]:
    """Return the tensors of other models in the folder of the origin, or in its `beside`; none where there are none.

    Raises:
        UsageError: `beside` was given and has none.
    """
    folder, found = origin.beside or origin.folder, dict[str, Tensor]()
    if family.aside and folder is not None and any(folder.glob("*.safetensors")):
        for shard in shard_files(folder):
            with SafetensorsFile(shard) as file:
                found |= {name: file.read(name) for name in file.tensors if name.startswith(family.aside)}
    if origin.beside is not None and not found:
        raise UsageError(f"{origin.beside} has no tensors that belong beside this model: leave out beside")
    return found
