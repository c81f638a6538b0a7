"""Every setting of a training run by name, its default per command, and the file run.toml that records them. No torch.

A setting is a flag of `te-models pretrain` and `te-models finetune`, and a line of run.toml, which groups settings in
tables: [run], [model], [recipe], [shape], [data], [training]. Names are unique over all tables, so settings travel as
one flat mapping; `recipe` is a name, a path or a table of a recipe's fields.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from te_models.config.data import split_names, split_weight
from te_models.config.model import config_fields
from te_models.config.presets import PRESETS
from te_models.config.recipe import FP8_WEIGHTS, Recipe, get_recipe, recipe_fields, recipe_from_dict
from te_models.config.shipped import no_weights
from te_models.config.toml import read_toml
from te_models.config.training import TrainConfig
from te_models.errors import ConfigError, NamedFields, UsageError, mistyped, unknown

RUN_FILE = "run.toml"
COMMANDS = ("pretrain", "finetune")
RECORD = "record"  # table of run.toml with facts of the run rather than settings
TRAINING = {f.name: type(f.default) for f in fields(TrainConfig)}
RUN = dict(command=str, preset=str, model=str, out=str, sample_tokens=int, log=str)
MODEL = dict(
    engine=str, device=str, fp8_params=bool, compile=bool, activation_checkpointing=object, activation_offload=bool
)
# Settings of the data: keywords of te_models.data.training_data.open_data, and the tokenizer; object: of several types.
DATA = dict(
    data=object, eval_data=object, eval_split=float, columns=str, truncate=str, packing=str, chat_template=str,
    streaming=bool, data_workers=int, tokenizer=str,
)  # fmt: skip
DATA_DEFAULTS = dict(data_workers=2)
LORA = dict(lora=int, lora_targets=str, lora_alpha=float, lora_dropout=float, merge=bool, merge_dtype=str)
MERGE_DTYPES = ("bfloat16", "float16", "float32")
TABLES: dict[str, Mapping[str, Any]] = {
    "run": RUN,
    "model": MODEL,
    "recipe": dict.fromkeys(("recipe", *recipe_fields()), object),  # which Recipe and ModelConfig check
    "shape": dict.fromkeys(config_fields(), object),
    "data": DATA,
    "training": TRAINING,
    "lora": LORA,
}
SETTINGS = {name: kind for table in TABLES.values() for name, kind in table.items()}
LEARNING_RATE = {"pretrain": 1e-3, "finetune": 2e-5, "lora": 2e-4}
# A resumed run keeps these: with others it would be another run.
FIXED = (
    "command", "preset", "model", *config_fields(), "seed", "batch_size", "seq_len", "gradient_accumulation",
    "streaming", "packing", "truncate", "columns", "chat_template", "eval_split", "optimizer", "lora", "lora_targets",
    "lora_alpha", "lora_dropout",
)  # fmt: skip
PATHS = ("model", "data", "eval_data", "chat_template", "tokenizer")  # settings that may be paths
SOURCES = ("data", "eval_data")  # settings that are one path or several


@dataclass(frozen=True, kw_only=True)
class LoraSettings(NamedFields):
    """Low-rank adapters of a fine-tuning run.

    Raises:
        ConfigError: a value is out of range.
    """

    rank: int  # of every adapter
    targets: tuple[str, ...] = ()  # names of modules, as in add_lora; empty: all linears of every block
    alpha: float = 16.0  # updates are multiplied by alpha / rank
    dropout: float = 0.0  # probability with which an adapter's input is dropped
    merge: bool = False  # at the end, save the model with the adapters in its weights in the folder merged/
    merge_dtype: str = ""  # of these weights, one of MERGE_DTYPES; "": the model's own

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"--lora {self.rank}: a rank is 1 or more, such as 16")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--lora-dropout {self.dropout}: give a probability from 0 to below 1")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"--lora-alpha {self.alpha}: give a positive number, such as {2 * self.rank}")
        if self.merge_dtype and self.merge_dtype not in MERGE_DTYPES:
            raise unknown("merge_dtype", self.merge_dtype, MERGE_DTYPES)
        if self.merge_dtype and not self.merge:
            raise ConfigError(f"--merge-dtype {self.merge_dtype} is for the merged model: give --merge too")


@dataclass(frozen=True, kw_only=True)
class RunSettings(NamedFields):
    """Every setting of a run; exactly one of `preset` and `model` is not None."""

    command: str = "finetune"  # or "pretrain"
    preset: str | None = None  # the shape of a new model with random weights
    model: str | None = None  # the saved model, run, Hugging Face folder, Hub name or shipped model to start from
    recipe: str | Recipe = "auto"  # or the name of a recipe, the path of its file, or a Recipe
    build: Mapping[str, Any] = field(default_factory=dict)  # other keywords of CausalLM, recipe and config
    data: Mapping[str, Any] = field(default_factory=dict)  # keywords of open_data, and `tokenizer`
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraSettings | None = None  # adapters to train in place of the model's weights
    sample_tokens: int = 200  # length of the samples printed at the end; 0: none
    log: str = ""  # names of loggers beside metrics.jsonl (te_models.training.loggers), separated by commas
    out: str | None = None  # the run's folder; None: runs/<model>-<recipe>
    given: frozenset[str] = frozenset()  # names of the settings given on the command line, over those of `file`
    file: Path | None = None  # the run.toml that the others come from
    called: str = ""  # the command line, for the record

    @property
    def label(self) -> str:
        """The model's part of the default folder's name."""
        return self.preset or Path(self.model or "model").name


def run_settings(command: str, given: Mapping[str, Any], file: Path | None = None) -> RunSettings:
    """Return the settings of a run: those `given`, over those of `file`, over the defaults of `command`.

    Raises:
        UsageError: an unknown setting, a value of a wrong type or range, or a model that the command does not support.
    """
    saved = read_run_file(file) if file is not None else {}
    command = saved.get("command", command)
    flat = _over(saved, given)
    preset, model = flat.get("preset"), flat.get("model")
    if "steps" in given and given.get("epochs"):
        raise UsageError("--steps and --epochs say the same in two ways: give one of them")
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    if command == "pretrain" and (model is not None or preset is None):
        raise UsageError(
            "pretrain starts from random weights: give --preset NAME (to start from a model: finetune --model)"
        )
    if command == "finetune" and preset is not None:
        raise (
            UsageError(no_weights(preset))
            if preset in PRESETS
            else unknown("preset", preset, PRESETS, "`te-models list`")
        )
    if command == "finetune" and model is None:
        raise UsageError("give --model: a folder, a name on the Hugging Face hub, or a model that ships with te-models")
    lora = _lora(command, flat)
    training = {"learning_rate": LEARNING_RATE["lora" if lora else command], "parallel": "auto"}
    training |= {name: flat[name] for name in TRAINING if name in flat}
    build = {n: v for table in ("model", "recipe", "shape") for n, v in flat.items() if n in TABLES[table]}
    recipe = build.pop("recipe", "auto")
    run = {name: flat[name] for name in RUN if name in flat}
    own = DATA_DEFAULTS | {name: flat[name] for name in DATA if name in flat}
    return RunSettings(
        **{**run, "command": command},
        recipe=_recipe(recipe) if isinstance(recipe, Mapping) else recipe,
        build=build,
        data=own,
        train=TrainConfig(**training),
        lora=lora,
        given=frozenset(given),
        file=file,
    )


def resumed_settings(command: str, given: Mapping[str, Any], folder: Path | None = None) -> RunSettings:
    """Return the settings of a run that is resumed: those of its run.toml with the changes `given`.

    The command is that in run.toml. `folder` None means `out` in `given`, else the only run of the given model.

    Raises:
        UsageError: there is no run, or a setting is given that a resumed run cannot change.
    """
    named = folder or (Path(given["out"]) if "out" in given else None)
    folder = named or _only_run(given)
    if folder.name == RUN_FILE:
        folder = folder.parent
    given = {**given, "out": str(folder)}
    if (folder / RUN_FILE).is_file():
        changed_settings(read_run_file(folder / RUN_FILE), given)
        return run_settings(command, given, folder / RUN_FILE)
    if not (folder / "checkpoints").is_dir():
        raise UsageError(f"nothing to resume: {folder} has no checkpoint; start without --resume")
    if not {"preset", "model"} & given.keys():
        raise UsageError(
            f"{folder} has no {RUN_FILE}: give the settings of the run again, --preset or --model among them"
        )
    return run_settings(command, given)


def _only_run(given: Mapping[str, Any]) -> Path:
    """Return the folder to resume where none is given: runs/<model>-<recipe>, or the only one there is."""
    name = given.get("preset") or given.get("model")
    label = Path(name).name if name else ""
    if label and given.get("recipe", "auto") != "auto":
        return Path("runs", f"{label}-{get_recipe(given['recipe']).name}")
    runs = [
        folder.parent for folder in sorted(Path("runs").glob(f"{label}-*/checkpoints" if label else "*/checkpoints"))
    ]
    if len(runs) > 1:
        raise UsageError(f"several runs could be resumed ({', '.join(map(str, runs))}): give one of them to --resume")
    if not runs:
        raise UsageError(
            f"nothing to resume: there is no run {f'of {label} ' if label else ''}in runs/; give its folder"
        )
    return runs[0]


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the settings in a run.toml, name -> value; the table [record] is left out.

    Raises:
        ConfigError: the file cannot be read, or has an unknown table or setting, or a value of a wrong type.
    """
    flat: dict[str, Any] = {}
    for title, values in read_toml(path).items():
        if title == RECORD:
            continue
        if title not in TABLES:
            raise unknown(f"table of {path}", title, TABLES)
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path}: {title} is a table: write [{title}] and its settings below")
        if title == "recipe":
            flat["recipe"] = dict(values)
            continue
        for name, value in values.items():
            if name not in TABLES[title]:
                raise unknown(f"setting of [{title}] in {path}", name, TABLES[title], "`te-models finetune --help-all`")
            flat[name] = _checked(path, name, value)
    return flat


def changed_settings(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (value then, value now) of the settings that a resumed run changes.

    Raises:
        UsageError: one of them would make it another run; the message names it.
    """
    then = {**saved, **_recipe_values(saved)}
    given = {name: resolved_path(value) if name in PATHS else value for name, value in given.items()}
    changed = {name: (then.get(name), now) for name, now in given.items() if then.get(name) != now and name != "out"}
    for name in FIXED:
        if name in changed:
            flag, before = f"--{name.replace('_', '-')}", repr(then[name]) if name in then else "not set"
            raise UsageError(
                f"a resumed run keeps its {name}: it is {before}, not {given[name]!r}: leave out {flag}, or start "
                "a new run"
            )
    return changed


def resolved_path(name: Any) -> Any:
    """Return a path that exists as an absolute one, several as a list; anything else as it is, such as a Hub name."""
    if isinstance(name, (list, tuple)):
        return [resolved_path(member) for member in name]
    if not isinstance(name, str) or os.path.exists(name):
        return os.path.abspath(name) if isinstance(name, str) else name
    path, weight = split_weight(name)
    return os.path.abspath(path) + name[len(path) :] if weight is not None and os.path.exists(path) else name


def _over(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` with the changes `given`; a new recipe or model replaces all fields of the old one."""
    flat = dict(saved)
    gone: set[str] = {"epochs"} if "steps" in given else set()
    if "recipe" in given:
        gone.add("recipe")
        if flat.get("fp8_params") and not given.get("fp8_params") and not _keeps_fp8_weights(given["recipe"]):
            gone.add("fp8_params")
            warnings.warn(f"recipe {given['recipe']!r} has no FP8 weights: the run goes on without", stacklevel=2)
    if {"preset", "model"} & given.keys():
        gone |= {"preset", "model", *config_fields()}
    if given.get("lora") and not flat.get("lora") and flat.get("learning_rate") == LEARNING_RATE["finetune"]:
        gone.add("learning_rate")  # the default for all weights; adapters have another
    return {name: value for name, value in flat.items() if name not in gone} | dict(given)


def _keeps_fp8_weights(recipe: Any) -> bool:
    """Return whether weights can be in FP8 alone under a recipe."""
    return recipe == "auto" or get_recipe(recipe).scheme in FP8_WEIGHTS  # of auto, the engine says so


def _lora(command: str, flat: Mapping[str, Any]) -> LoraSettings | None:
    """Return the adapters that the settings ask for; alpha is twice the rank by default."""
    rank, others = flat.get("lora"), [name for name in LORA if name != "lora" and flat.get(name)]
    if rank is None:
        if others:
            raise UsageError(
                f"--{others[0].replace('_', '-')} is for adapters: give --lora RANK too, such as --lora 16"
            )
        return None
    if command == "pretrain":
        raise UsageError("--lora adapts a model that has weights: use finetune --model")
    targets = tuple(split_names(flat.get("lora_targets", "")))
    alpha, dropout = flat.get("lora_alpha", 2.0 * rank), flat.get("lora_dropout", 0.0)
    merge = dict(merge=flat.get("merge", False), merge_dtype=flat.get("merge_dtype", ""))
    return LoraSettings(rank=rank, targets=targets, alpha=alpha, dropout=dropout, **merge)


def _recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe in a table: of a scheme, or of a named recipe with changes."""
    if "scheme" in values or "name" not in values:
        return recipe_from_dict(values)
    return get_recipe(values["name"], **{name: value for name, value in values.items() if name != "name"})


def _recipe_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's name and fields in a run.toml as settings."""
    table = saved.get("recipe")
    if not isinstance(table, Mapping):
        return {}
    return {"recipe" if name == "name" else name: value for name, value in table.items()}


def _checked(path: Path, name: str, value: Any) -> Any:
    """Return the value of a setting; a ConfigError if it is of a wrong type."""
    kind = SETTINGS[name]
    if name in SOURCES and not all(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
        raise ConfigError(f"{path}: {name} = {value!r}: give a path, or a list of paths")
    options = name == "optimizer_options" and isinstance(value, Mapping)
    if not options and (wanted := mistyped(value, kind)):
        raise ConfigError(f"{path}: {name} = {value!r}: give {wanted}")
    return value
