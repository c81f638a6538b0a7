"""Every setting of a training run as one tree, its defaults per command, and reading run.toml. No torch.

A setting is a flag of `te-models pretrain` and `te-models finetune`, and a line of run.toml, which groups settings in
tables (TABLES). Names are unique over all tables, so given settings travel as one flat mapping until `run_settings`
makes the tree of them; there `recipe` is a name, a path or a table of a recipe's fields.
"""

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from te_models.config.base_weights import STORED
from te_models.config.data import DataConfig, split_names, split_weight
from te_models.config.model import ModelConfig, config_fields
from te_models.config.presets import PRESETS
from te_models.config.recipe import (
    FP8_WEIGHTS,
    RECIPE_FIELDS,
    Recipe,
    get_recipe,
    list_recipes,
    recipe_from_dict,
)
from te_models.config.settings import (
    EVERYDAY,
    Setting,
    Settings,
    as_fields,
    by_name,
    setting,
    settings_of,
)
from te_models.config.shipped import no_weights
from te_models.config.toml import read_toml
from te_models.config.training import DIVISIONS, EVALUATION, TRAINING, TrainConfig
from te_models.config.yaml_file import SUFFIXES, read_yaml
from te_models.errors import ConfigError, UsageError, check_known, unknown
from te_models.files.atomic import reraising

RUN_FILE = "run.toml"
COMMANDS = ("pretrain", "finetune")
RECORD = "record"  # table of run.toml with facts of the run rather than settings
MERGE_DTYPES = ("bfloat16", "float16", "float32")
# FP16 is missing: most of its gradients underflow without loss scaling.
TRAINING_DTYPES = ("bfloat16", "float32")
LEARNING_RATE = {"pretrain": 1e-3, "finetune": 2e-5, "lora": 2e-4}
# Headings of the help.
MODEL = "Model"
LORA = "LoRA"
SHAPE = "Model shape"
RECIPE_HELP = (
    f"{', '.join(list_recipes())}, or a TOML file. Default, auto: the recipe of a saved model; for a new one FP8 where "
    "that saves time (mxfp8 on Blackwell, current on Hopper and Ada, from a hidden size of 2048), else bf16."
)


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Settings):
    """Keywords of CausalLM; None: its default, or what the saved model or the checkpoint has."""

    heading = MODEL
    engine: str | None = setting(
        None,
        "auto, native (Transformer Engine) or emulated (the same numbers, without it).",
        metavar="NAME",
        shown="auto",
    )
    device: str | None = setting(
        None, "Device, such as cpu or cuda:1; default: the first GPU, else the CPU."
    )
    dtype: str | None = setting(
        None,
        "Dtype of weights, activations and gradients: bfloat16 or float32; default: the model's, or bfloat16 in place "
        "of float16.",
        fixed=True,
        metavar="DTYPE",
    )
    fp8_params: bool | None = setting(
        None, "Store the weights of FP8 layers in FP8 only, without a BF16 copy."
    )
    base_weights: str | None = setting(
        None,
        "Weights of a quantized release: stored (left as they are, with --lora), or dequantized.",
        metavar="FORM",
        shown="dequantized",
    )
    compile: bool | str | None = setting(
        None,
        "Fuse elementwise operations with torch.compile (on a GPU); max-autotune also times variants of each kernel.",
        metavar="MODE",
        choices=(True, False, "default", "max-autotune"),
        shown="compile",
    )
    activation_checkpointing: str | int | None = setting(
        None,
        "Recompute activations: none, selective (most of each MLP), full, or N for every N-th block.",
        group=TRAINING,
        metavar="MODE",
        shown="none",
    )
    activation_offload: bool | None = setting(
        None,
        "Store the activations that backward needs in host memory.",
        group=TRAINING,
        shown="no-activation-offload",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "float16":
            raise ConfigError(
                "--dtype float16: most FP16 gradients underflow without loss scaling, which te-models does not have: "
                "give bfloat16 or float32"
            )
        if self.dtype is not None:
            check_known("dtype", self.dtype, TRAINING_DTYPES)


def names_experts(target: str) -> bool:
    """Return whether a target of adapters is a name of experts, such as "experts" or "mlp.experts.down_proj"."""
    return "experts" in target.split(".")


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """Low-rank adapters of a fine-tuning run.

    Raises:
        ConfigError: a value is out of range.
    """

    heading = LORA
    rank: int = setting(
        None,
        "Train low-rank adapters of this rank, such as 16, and freeze the model's weights.",
        name="lora",
        group=EVERYDAY,
        least=1,
        fixed=True,
        metavar="RANK",
    )
    targets: str | tuple[str, ...] = setting(
        (),
        "Modules with adapters, such as q_proj,v_proj or all-linear,experts; default: all linears of every block but "
        "routers and experts.",
        name="lora_targets",
        fixed=True,
        metavar="NAMES",
    )
    alpha: float | None = setting(
        None,
        "Updates are multiplied by alpha / rank; default: twice the rank.",
        name="lora_alpha",
        above=True,
        below=math.inf,
        fixed=True,
    )
    dropout: float = setting(
        0.0,
        "Probability with which an adapter's input is dropped.",
        name="lora_dropout",
        below=1,
        fixed=True,
    )
    dora: bool = setting(
        False,
        "Also train the length of each row of the adapted weights (DoRA); not on experts.",
        fixed=True,
    )
    rslora: bool = setting(
        False,
        "Multiply updates by alpha / sqrt(rank) instead (rsLoRA), which suits large ranks.",
        fixed=True,
    )
    merge: bool = setting(
        False,
        "At the end, also save the model with the adapters in its weights, in the folder merged/.",
    )
    merge_dtype: str | None = setting(
        None,
        "Dtype of these weights: bfloat16, float16 or float32, in which no small update vanishes; default: the "
        "model's.",
        choices=MERGE_DTYPES,
        metavar="DTYPE",
    )

    def __post_init__(self) -> None:
        if self.rank is None:
            raise ConfigError("adapters need a rank: give one, such as 16")
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(split_names(self.targets)))
        super().__post_init__()
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2.0 * self.rank)
        if self.merge_dtype and not self.merge:
            raise ConfigError(
                f"--merge-dtype {self.merge_dtype} is for the merged model: give --merge too"
            )


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Every setting of a run, each part's in a tree of its own; exactly one of `preset` and `model` is not None.

    Attributes:
        build: keywords of CausalLM, recipe and config that are given.
        lora: adapters to train in place of the model's weights; None: none.
        given: names of the settings given on the command line, which override `file`.
        file: the run.toml that the others come from.
        called: the command line, for the record.
    """

    command: str = setting(
        "finetune", "The command: pretrain or finetune.", choices=COMMANDS, fixed=True
    )
    preset: str | None = setting(
        None,
        "Model shape with random weights: `te-models list` has the names.",
        fixed=True,
        metavar="NAME",
    )
    model: str | None = setting(
        None,
        "Saved model, run folder (its newest checkpoint), Hugging Face folder or name, or a shipped model.",
        fixed=True,
        path=True,
        metavar="NAME",
    )
    out: str | None = setting(
        None, "Folder of the run; default: runs/<model>-<recipe>.", metavar="DIR"
    )
    tokenizer: str | None = setting(
        None,
        "Hugging Face tokenizer.json; default: the model's own, else bytes.",
        path=True,
        metavar="PATH",
    )
    sample_tokens: int = setting(
        200,
        "Length of the samples printed at the end; 0: none. By default they also take at most a tenth of the run's "
        "time.",
        group="Data",
    )
    log: str = setting(
        "",
        "Send metrics also to tensorboard, wandb or trackio: one or more names, separated by commas.",
        group=EVALUATION,
        metavar="NAMES",
    )
    recipe: str | Recipe = setting("auto", RECIPE_HELP, metavar="NAME|FILE")
    build: Mapping[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraSettings | None = None
    given: frozenset[str] = frozenset()
    file: Path | None = None
    called: str = ""

    @property
    def label(self) -> str:
        """The model's part of the default folder's name."""
        return self.preset or Path(self.model or "model").name

    def tables(self) -> dict[str, dict[str, object]]:
        """Return table of run.toml -> name -> value, of all settings but recipe and shape."""
        flat = dict(self.build)
        for part in (self, self.data, self.train, self.lora):
            flat |= {} if part is None else by_name(part)
        tables = {}
        for title in TABLES.keys() - {"recipe", "shape"}:
            tables[title] = {name: flat[name] for name in TABLES[title] if name in flat}
        return tables


def _named(settings: Iterable[Setting]) -> dict[str, Setting]:
    return {one.name: one for one in settings}


_OWN = _named(settings_of(RunSettings))
# Table of run.toml -> its settings by name.
TABLES: dict[str, dict[str, Setting]] = {
    "run": {
        name: _OWN[name] for name in ("command", "preset", "model", "out", "sample_tokens", "log")
    },
    "model": _named(settings_of(BuildSettings)),
    "recipe": _named([_OWN["recipe"], *RECIPE_FIELDS.values()]),
    # Without a default: the preset or the model has one.
    "shape": _named(
        replace(one, default=None, group=SHAPE, fixed=True) for one in settings_of(ModelConfig)
    ),
    "data": _named([*settings_of(DataConfig), _OWN["tokenizer"]]),
    "training": _named(settings_of(TrainConfig)),
    "lora": _named(settings_of(LoraSettings)),
}
SETTINGS: dict[str, Setting] = {}
for _table in TABLES.values():
    SETTINGS |= _table


def run_settings(
    command: str, given: Mapping[str, object], file: Path | None = None, called: str = ""
) -> RunSettings:
    """Return the settings of a run: what is `given`, else what `file` has, else the defaults of `command`."""
    saved = read_run_file(file) if file is not None else {}
    command = saved.get("command", command)
    flat = {**_over(saved, given), "command": command}
    SETTINGS["command"].check(command)
    if "steps" in given and given.get("epochs"):
        raise UsageError("--steps and --epochs say the same in two ways: give one of them")
    _check_start(command, flat)
    recipe = flat.pop("recipe", "auto")
    lora = _lora(flat)
    defaults = {"learning_rate": LEARNING_RATE["lora" if lora else command], "parallel": "auto"}
    build = by_name(BuildSettings(**as_fields(BuildSettings, flat)))
    for name in (*TABLES["recipe"], *TABLES["shape"]):
        if name in flat:
            build[name] = flat[name]
    return RunSettings(
        **as_fields(RunSettings, flat),
        recipe=_recipe(recipe) if isinstance(recipe, Mapping) else recipe,
        build={name: value for name, value in build.items() if value is not None},
        data=DataConfig(**as_fields(DataConfig, flat)),
        train=TrainConfig(**defaults | as_fields(TrainConfig, flat)),
        lora=lora,
        given=frozenset(given),
        file=file,
        called=called,
    )


def _check_start(command: str, flat: Mapping[str, Any]) -> None:
    """Raise UsageError unless `pretrain` starts from a preset, and `finetune` from a model."""
    preset = flat.get("preset")
    model = flat.get("model")
    if command == "pretrain" and (model is not None or preset is None):
        raise UsageError(
            "pretrain starts from random weights: give --preset NAME (to start from a model: finetune --model)"
        )
    if command == "pretrain" and flat.get("lora") is not None:
        raise UsageError("--lora adapts a model that has weights: use finetune --model")
    if flat.get("base_weights") == STORED and flat.get("lora") is None:
        raise UsageError(
            "--base-weights stored leaves the model's weights as they are: give --lora RANK, such as --lora 16, to "
            "train adapters beside them"
        )
    if command == "finetune" and preset is not None:
        if preset in PRESETS:
            raise UsageError(no_weights(preset))
        raise unknown("preset", preset, PRESETS, "`te-models list`")
    if command == "finetune" and model is None:
        raise UsageError(
            "give --model: a folder, a name on the Hugging Face hub, or a model that ships with te-models"
        )


def resumed_settings(
    command: str, given: Mapping[str, Any], folder: Path | None = None, called: str = ""
) -> RunSettings:
    """Return the settings of a run that is resumed: its run.toml with the changes `given`.

    The command is that in run.toml. `folder` None means `out` in `given`, else the only run of the given model.
    """
    named = folder or (Path(given["out"]) if "out" in given else None)
    folder = named or _only_run(given)
    if folder.name == RUN_FILE:
        folder = folder.parent
    given = {**given, "out": str(folder)}
    if (folder / RUN_FILE).is_file():
        changed_settings(read_run_file(folder / RUN_FILE), given)
        return run_settings(command, given, folder / RUN_FILE, called)
    nameless = not {"preset", "model"} & given.keys()
    run = next((outer for outer in folder.parents if (outer / RUN_FILE).is_file()), None)
    if not folder.exists():
        raise UsageError(f"nothing to resume: {folder} does not exist; give the folder of a run")
    if run is not None:
        raise UsageError(
            f"{folder} is part of a run: give --resume {run}, which continues from its newest checkpoint"
        )
    if not (folder / "checkpoints").is_dir():
        raise UsageError(f"nothing to resume: {folder} has no checkpoint; start without --resume")
    if nameless:
        raise UsageError(
            f"{folder} has no {RUN_FILE}: give the settings of the run again, --preset or --model among them"
        )
    return run_settings(command, given, called=called)


def _only_run(given: Mapping[str, Any]) -> Path:
    """Return the folder to resume where none is given: runs/<model>-<recipe>, or the only one there is."""
    name = given.get("preset") or given.get("model")
    label = Path(name).name if name else ""
    if label and given.get("recipe", "auto") != "auto":
        return Path("runs", f"{label}-{get_recipe(given['recipe']).name}")
    pattern = f"{label}-*/checkpoints" if label else "*/checkpoints"
    runs = [folder.parent for folder in sorted(Path("runs").glob(pattern))]
    of = f"of {label} " if label else ""
    if len(runs) > 1:
        raise UsageError(
            f"several runs could be resumed ({', '.join(map(str, runs))}): give one of them to --resume"
        )
    if not runs:
        raise UsageError(f"nothing to resume: there is no run {of}in runs/; give its folder")
    return runs[0]


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the settings in a run.toml, or the same in YAML, name -> value; the table [record] is left out."""
    flat: dict[str, object] = {}
    in_yaml = path.suffix.lower() in SUFFIXES
    for title, values in (read_yaml(path) if in_yaml else read_toml(path)).items():
        if title == RECORD:
            continue
        if not isinstance(values, Mapping):
            raise _outside(path, title, in_yaml)
        check_known(f"table of {path}", title, TABLES)
        if title == "recipe":
            flat["recipe"] = dict(values)
            continue
        for name, value in values.items():
            home = _table_of(name)
            if home and name not in TABLES[title]:
                raise ConfigError(f"{path}: {name} belongs in [{home}], not in [{title}]")
            check_known(
                f"setting of [{title}] in {path}",
                name,
                TABLES[title],
                "`te-models finetune --help-all`",
            )
            if value is None:
                continue  # in YAML, a name without a value
            if value == "" and TABLES[title][name].default is None:
                continue  # as older files have what was not given
            with reraising(path, UsageError, error=ConfigError):
                TABLES[title][name].check(value)
            flat[name] = value
    return flat


def _outside(path: Path, name: str, in_yaml: bool) -> UsageError:
    """Return the error for a value that a run.toml, or the same in YAML, has outside its tables."""

    def header(table: str) -> str:
        return f"{table}:" if in_yaml else f"[{table}]"

    if home := _table_of(name):
        return ConfigError(f"{path}: {name} belongs in a table: write {header(home)} above it")
    if name == "recipe":
        example = "name: NAME" if in_yaml else "name = NAME"
        return ConfigError(f"{path}: recipe is a table: write {header(name)}, and {example} below")
    if name in TABLES:
        return ConfigError(
            f"{path}: {name} is a table: write {header(name)} and its settings below"
        )
    return unknown(f"setting of {path}", name, SETTINGS, "`te-models finetune --help-all`")


def _table_of(name: str) -> str:
    """Return the table in which a setting belongs; "" for a name of none. The name of a recipe is a table's `name`."""
    titles = (title for title, settings in TABLES.items() if name in settings and name != "recipe")
    return next(titles, "")


def changed_settings(
    saved: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return name -> (value then, value now) of the settings that a resumed run changes."""
    then = {**saved, **_recipe_values(saved)}
    changed: dict[str, tuple[object, object]] = {}
    for name in given.keys() - {"out"}:
        one = SETTINGS[name]
        before = then.get(name, one.default)
        now = resolved_path(given[name]) if one.path else given[name]
        if before == now:
            continue
        without = name in TABLES["lora"] and not then.get("lora")
        if one.fixed or without:
            fixed_line = f"keeps its {name}" + (f", which is {before!r}" if name in then else "")
            reason = fixed_line if one.fixed else "keeps its adapters, and this one has none"
            raise UsageError(f"a resumed run {reason}: leave out {one.flag}, or start a new run")
        changed[name] = (before, now)
    return changed


def resolved_path(name: Any) -> Any:
    """Return a path that exists as an absolute one, several as a list; anything else as it is, such as a Hub name."""
    if isinstance(name, (list, tuple)):
        return [resolved_path(member) for member in name]
    if not isinstance(name, str) or os.path.exists(name):
        return os.path.abspath(name) if isinstance(name, str) else name
    path, weight = split_weight(name)
    if weight is not None and os.path.exists(path):
        return os.path.abspath(path) + name[len(path) :]
    return name


def _over(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` with the changes `given`; a new recipe or model replaces all fields of the old one.

    The shape in a file that names no model changes the model given beside it.
    """
    flat = dict(saved)
    gone: set[str] = {"epochs"} if "steps" in given else set()
    if "parallel" in given and given["parallel"] != saved.get("parallel"):
        gone |= set(DIVISIONS)
    if "recipe" in given:
        gone.add("recipe")
        if (
            flat.get("fp8_params")
            and not given.get("fp8_params")
            and not _keeps_fp8_weights(given["recipe"])
        ):
            gone.add("fp8_params")
            warnings.warn(
                f"recipe {given['recipe']!r} has no FP8 weights: the run goes on without",
                stacklevel=2,
            )
    if {"preset", "model"} & given.keys() and {"preset", "model"} & saved.keys():
        gone |= {"preset", "model", *config_fields()}
    if (
        given.get("lora")
        and not flat.get("lora")
        and flat.get("learning_rate") == LEARNING_RATE["finetune"]
    ):
        gone.add("learning_rate")  # the default for all weights; adapters have another
    return {name: value for name, value in flat.items() if name not in gone} | dict(given)


def _keeps_fp8_weights(recipe: Any) -> bool:
    """Return whether weights can be in FP8 alone under a recipe."""
    # For "auto" the engine decides.
    return recipe == "auto" or get_recipe(recipe).scheme in FP8_WEIGHTS


def _lora(flat: Mapping[str, object]) -> LoraSettings | None:
    """Return the adapters that the settings ask for."""
    given = as_fields(LoraSettings, flat)
    if given.get("rank") is None:
        if others := [one for one in TABLES["lora"].values() if given.get(one.field)]:
            raise UsageError(
                f"{others[0].flag} is for adapters: give --lora RANK too, such as --lora 16"
            )
        return None
    return LoraSettings(**given)


def _recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe in a table: of a scheme, or of a named recipe with changes."""
    if "scheme" in values or "name" not in values:
        return recipe_from_dict(values)
    return get_recipe(
        values["name"], **{name: value for name, value in values.items() if name != "name"}
    )


def _recipe_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's name and fields in a run.toml as settings."""
    table = saved.get("recipe")
    if not isinstance(table, Mapping):
        return {}
    values = dict(table)
    if "name" in values:
        values["recipe"] = values.pop("name")
    return values
