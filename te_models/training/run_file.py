"""The content of run.toml: every resolved setting of a run, and its provenance (data, versions, commands).

The provenance is the table [record] of the file. It has nothing to do with --record, the flight recorder of
te_models.recorder.
"""

import contextlib
import hashlib
import importlib.metadata
import platform
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import te_models
from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.config.toml import read_toml, render_toml
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.files.atomic import replace_text
from te_models.model.targets import IGNORED
from te_models.training.evaluation import Batch
from te_models.training.parallel import Parallel
from te_models.training.resume import run_choices
from te_models.training.run_settings import resolved_path
from te_models.training.settings import PROVENANCE, RUN_FILE, SETTINGS, TABLES, RunSettings

COMMENT = (
    "Every setting of this run. `te-models {command} run.toml --steps N` runs it again with a change, in a folder of\n"
    "its own; `te-models {command} --resume FOLDER` continues it. Paths are from the machine that ran it."
)
MAX_COMMAND = 4000  # characters of the command that are recorded


def run_document(
    settings: RunSettings,
    model: CausalLM,
    dataset: TokenDataset | StreamingDataset,
    eval_batches: list[Batch],
    processes: Parallel,
    before: Mapping[str, Any] = MappingProxyType({}),
    recipe: Recipe | None = None,
) -> str:
    """Return run.toml of a run that is about to start; all processes call it.

    Args:
        settings: the settings, resolved.
        model: the model, whose config and recipe are written.
        dataset: the training data.
        eval_batches: this process's batches to evaluate on.
        processes: how processes share the run.
        before: the provenance of the run that this one resumes.
        recipe: the recipe of the first step; None: the model's.
    """
    config = model.config.to_dict()
    shape = {}
    for name, value in config.items():
        if settings.preset or name in settings.build:
            shape[name] = value
    tables = settings.tables()
    tables["run"] |= {"out": None}  # a second run by this file needs a folder of its own
    tables["model"] |= run_choices(model)
    # As requested: "auto" is native on a GPU.
    tables["model"]["engine"] = settings.build.get("engine", "auto")
    tables["data"] |= {
        "streaming": isinstance(dataset, StreamingDataset),
        "packing": dataset.packing,
    }
    tables |= {"recipe": (recipe or model.recipe).to_dict(), "shape": shape}
    for table in (tables["run"], tables["data"]):
        for name, value in table.items():
            if SETTINGS[name].path:
                table[name] = resolved_path(value)
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    else:
        device = platform.processor() or platform.machine()
    earlier_commands = [str(command) for command in before.get("commands", [])]
    sections = {title: tables[title] for title in TABLES}
    sections[PROVENANCE] = {
        "id": run_id(before),
        "commands": [*earlier_commands, settings.command_line[:MAX_COMMAND]],
        "device": device,
        "engine": model.engine,
        "processes": processes.describe() or "one",
        "training_data": fingerprint(dataset),
        "evaluation_data": eval_fingerprint(eval_batches, processes),
        "data": dataset.describe(),
        "versions": versions(),
    }
    return render_toml(sections, COMMENT.format(command=settings.command))


def rewrite_recipe(path: Path, recipe: Recipe) -> None:
    """Replace the recipe in a run.toml by another one; everything else stays."""
    text = path.read_text(encoding="utf-8")
    comment = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    sections = {**read_toml(path), "recipe": recipe.to_dict()}
    replace_text(path, render_toml(sections, "\n".join(comment)))


def read_provenance(folder: Path) -> Mapping[str, object]:
    """Return the provenance in the run.toml of a run's folder, {"commands": []} without one."""
    path = folder / RUN_FILE
    provenance = read_toml(path).get(PROVENANCE, {}) if path.is_file() else {}
    # A user may have edited the file.
    if not isinstance(provenance, Mapping):
        provenance = {}
    commands = provenance.get("commands")
    return {**provenance, "commands": commands if isinstance(commands, list) else []}


def run_id(provenance: Mapping[str, object]) -> str:
    """Return the id of a run, or a new one of 8 hexadecimal digits if its provenance has none."""
    return str(provenance.get("id") or secrets.token_hex(4))[:100]


def fingerprint(dataset: TokenDataset | StreamingDataset) -> str:
    """Return the hash of all that determines the content and order of the training batches, except the seed."""
    return f"{dataset.state_dict()['fingerprint']}"


def eval_fingerprint(batches: Iterable[Batch], processes: Parallel) -> str:
    """Return a hash of the evaluated sequences, the same for any number of processes: 16 hexadecimal digits.

    All processes call it. It is the sum of a hash per sequence that counts, so that their order does not matter.
    """
    total = 0
    for batch in batches:
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if bool((labels != IGNORED).any()):
                digest = hashlib.blake2b(
                    ids.numpy().tobytes() + labels.numpy().tobytes(), digest_size=8
                )
                total += int.from_bytes(digest.digest(), "big")
    by_rank = processes.ranks.gather([str(total), processes.data_rank])
    # Ranks that share a batch have the same one.
    by_share = {share: int(number) for number, share in by_rank}
    return f"{sum(by_share.values()) % 2**64:016x}"


def versions() -> Mapping[str, str]:
    """Return the versions of Python, te-models and the packages that numbers depend on."""
    packages = {
        "python": platform.python_version(),
        "te-models": te_models.__version__,
        "torch": torch.__version__,
    }
    for package in (
        "transformer-engine",
        "triton",
        "flash-attn-4",
        "flash-linear-attention",
        "flash-qla",
        "torchao",
        "tokenizers",
        "safetensors",
        "numpy",
    ):
        # A package that is not installed is left out.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return packages
