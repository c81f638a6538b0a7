"""An export that changes nothing: the files of a base as its release has them, byte for byte, and adapters beside them.

Servers load the base as they would the release, and the adapters as they would any of peft.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import replacing_folder, write_file
from te_models.files.formats import list_some, read_json, render_json
from te_models.interop.hf import hugging_face_documents
from te_models.interop.hub import local_folder
from te_models.saving.checkpoint_choice import ADAPTER_CONFIG, ADAPTER_FOLDER

UNCHANGED = "stored"  # the name of the format
WEIGHTS = "adapter_model.safetensors"


def export_unchanged(adapters: Path | None, folder: str | Path) -> list[str]:
    """Write the base of `adapters` into `folder`, atomically and unchanged, and the adapters into its folder adapter/.

    Args:
        adapters: the folder of adapters, whose adapter_config.json names the base; None: there are none.
        folder: the folder to write.

    Returns:
        the names of the base's files.

    Raises:
        UsageError: there are no adapters, their base is no release of Hugging Face, or `folder` is not empty.
        CheckpointError: the adapters name no base.
    """
    if adapters is None:
        raise UsageError(
            "format 'stored' writes a base as its release has it, with adapters beside it: give the folder of a run "
            "with --lora, or choose another format"
        )
    config = read_json(adapters / ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not name:
        raise CheckpointError(
            f"{adapters / ADAPTER_CONFIG} does not name the model that the adapters are for"
        )
    base = local_folder(name)
    if hugging_face_documents(base) is None:
        raise UsageError(
            f"{name} is not a release in Hugging Face's format: export it in another format than 'stored'"
        )
    folder = Path(os.path.realpath(folder))
    present = sorted(os.listdir(folder)) if folder.is_dir() else []
    if present:
        raise UsageError(f"{folder} holds {list_some(present)}: give a folder that is new or empty")
    files = sorted(path.name for path in base.iterdir() if path.is_file())
    with replacing_folder(folder) as temp:
        for file in files:
            _copy(base / file, temp / file)
        (temp / ADAPTER_FOLDER).mkdir()
        _copy(adapters / WEIGHTS, temp / ADAPTER_FOLDER / WEIGHTS)
        adapter_config = {**config, "base_model_name_or_path": str(folder)}
        write_file(
            temp / ADAPTER_FOLDER / ADAPTER_CONFIG, render_json(adapter_config, ADAPTER_CONFIG)
        )
    return files


def _copy(source: Path, target: Path) -> None:
    """Copy a file, durably."""
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
