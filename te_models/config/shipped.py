"""The pretrained models that ship in the package, as folders te_models/pretrained/<name>. No torch."""

import json
from pathlib import Path

from te_models.config.model import ModelConfig, config_fields
from te_models.config.presets import PRESETS
from te_models.errors import UsageError

FOLDER = Path(__file__).parent.parent / "pretrained"


def list_shipped() -> list[str]:
    """Return the names of the models that ship with te-models."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def shipped_folder(name: str) -> Path | None:
    """Return the folder of the shipped model of this name; None if there is none."""
    if name in list_shipped():
        return FOLDER / name
    if name in PRESETS:
        raise UsageError(no_weights(name))
    return None


def file_is_no_model(path: Path) -> UsageError:
    """Return the error of a model that is named by a file, which is one of the files of a model at most."""
    if (path.parent / "config.json").is_file():
        advice = f"give the folder that it lies in, {path.parent}"
    elif path.suffix in (".pt", ".pth", ".safetensors"):
        advice = (
            "give the folder with its config.json; weights of Transformer Engine's modules without one are read by "
            "`te-models convert --te-checkpoint`"
        )
    else:
        advice = "give a folder with config.json and weights, or the folder of a run"
    return UsageError(f"{path} is a file, and a model is a folder: {advice}")


def shipped_config(name: str) -> ModelConfig:
    """Return the shape of the shipped model of this name."""
    values = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    return ModelConfig.from_dict(
        {field: values[field] for field in config_fields() if field in values}
    )


def no_weights(preset: str) -> str:
    """Return the line that explains why a preset cannot be loaded or fine-tuned."""
    shipped = list_shipped()
    return (
        f"{preset} is a preset, a shape without weights: `te-models pretrain --preset {preset}` trains it from random "
        "weights; a model to load or fine-tune is a folder, a name on the Hugging Face hub"
        + (f", or one that ships with te-models ({', '.join(shipped)})" if shipped else "")
    )
