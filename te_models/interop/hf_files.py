"""The files of weights in a Hugging Face folder: one file, or shards with an index."""

from pathlib import Path

from te_models.errors import CheckpointError
from te_models.files.formats import list_some, parse_index, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, in the order of their names.

    Raises:
        CheckpointError: one is missing, there are none, or the weights are a pickle.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(parse_index(read_json(folder / INDEX), folder / INDEX).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if not absent:
            return [folder / name for name in names]
        problem = f"lacks {list_some(absent)} of its {len(names)} shards: download it again"
    elif pickles := sorted(path.name for path in folder.glob("*.bin")):
        problem = (
            f"holds its weights as a pickle ({list_some(pickles)}), which can run code and is not read: load it with "
            "transformers and save it again with save_pretrained(..., safe_serialization=True)"
        )
    else:
        problem = f"holds no weights: neither {WEIGHTS} nor {INDEX} is there"
    raise CheckpointError(f"{folder} {problem}")
