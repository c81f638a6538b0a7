"""The settings of a run: options of the user before run.toml, and run.toml before the command's defaults. No torch."""

import os
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_models.config.base_weights import STORED
from te_models.config.data import DataConfig, split_weight
from te_models.config.model import config_fields
from te_models.config.presets import PRESETS
from te_models.config.recipe import (
    FP8_WEIGHTS,
    Recipe,
    get_recipe,
    recipe_from_dict,
)
from te_models.config.settings import (
    as_fields,
    by_name,
)
from te_models.config.shipped import no_weights
from te_models.config.toml import read_toml
from te_models.config.training import DIVISIONS, TrainConfig
from te_models.config.yaml_file import SUFFIXES, read_yaml
from te_models.errors import ConfigError, UsageError, check_known, unknown
from te_models.files.atomic import reraising
from te_models.training.settings import (
    LEARNING_RATE,
    PROVENANCE,
    RUN_FILE,
    SETTINGS,
    TABLES,
    BuildSettings,
    LoraSettings,
    RunSettings,
)


def run_settings(
    command: str,
    user_options: Mapping[str, object],
    file: Path | None = None,
    command_line: str = "",
) -> RunSettings:
    """Return the settings of a run: from `user_options`, else from `file`, else the defaults of `command`."""
    saved = read_run_file(file) if file is not None else {}
    # A resumed run is what it was, whichever of the two commands resumes it.
    command = saved.get("command", command)
    flat = {**_with_user_options(saved, user_options), "command": command}
    SETTINGS["command"].check(command)
    # In `user_options` alone: a file may have both, and the command line then decides.
    if "steps" in user_options and user_options.get("epochs"):
        raise UsageError("--steps and --epochs say the same in two ways: give one of them")
    _check_start(command, flat)
    recipe = flat.pop("recipe", "auto")
    lora = _lora(flat)
    learning_rate = LEARNING_RATE["lora" if lora else command]
    defaults = {"learning_rate": learning_rate, "parallel": "auto"}
    build = by_name(BuildSettings(**as_fields(BuildSettings, flat)))
    for name in (*TABLES["recipe"], *TABLES["shape"]):
        if name in flat:
            build[name] = flat[name]
    if isinstance(recipe, Mapping):
        recipe = _recipe(recipe)
    settings = RunSettings(
        **as_fields(RunSettings, flat),
        recipe=recipe,
        build={name: value for name, value in build.items() if value is not None},
        data=DataConfig(**as_fields(DataConfig, flat)),
        train=TrainConfig(**defaults | as_fields(TrainConfig, flat)),
        lora=lora,
        set_by_user=frozenset(user_options),
        file=file,
        command_line=command_line,
    )
    _refuse_without_effect(settings)
    return settings


def _refuse_without_effect(settings: RunSettings) -> None:
    """Raise UsageError for an option of the user that another setting leaves without effect.

    In a file it is no mistake, since run.toml has every setting of a run.
    """
    set_by_user = settings.set_by_user
    train = settings.train
    if "decay_steps" in set_by_user and train.schedule != "warmup-stable-decay":
        raise UsageError(
            f"--decay-steps is for --schedule warmup-stable-decay, not {train.schedule}: give both, or leave it out"
        )
    if "final_learning_rate" in set_by_user and train.schedule == "constant":
        raise UsageError(
            "--final-learning-rate has no part in --schedule constant: leave out one of them"
        )
    if "spike_window" in set_by_user and not train.spike_deviations:
        raise UsageError(
            "--spike-window is about spikes, which this run does not look for: add --spike-bound, or leave it out"
        )
    if settings.data.eval_split == 0 and not settings.data.eval_data:
        for name in ("eval_every", "eval_batches", "patience"):
            if name in set_by_user:
                raise UsageError(
                    f"{SETTINGS[name].flag} is about evaluation, which --eval-split 0 turns off: leave out one of them"
                )
        # 0 asks for no samples.
        if "sample_tokens" in set_by_user and settings.sample_tokens:
            raise UsageError(
                f"--sample-tokens {settings.sample_tokens} samples from prompts of the evaluation data, which "
                "--eval-split 0 turns off: leave out one of them"
            )


def _refuse_weights_of_a_model(flat: Mapping[str, Any]) -> None:
    """Raise UsageError where an option needs a model that has weights: `pretrain` takes none of adapters'."""
    for adapter_option in TABLES["lora"].values():
        if flat.get(adapter_option.name):
            raise UsageError(
                f"{adapter_option.flag} adapts a model that has weights: use finetune --model"
            )
    if flat.get("base_weights") is not None:
        raise UsageError(
            "--base-weights is for a model that has weights: use finetune --model, or leave it out"
        )


def _check_start(command: str, flat: Mapping[str, Any]) -> None:
    """Raise UsageError unless `pretrain` starts from a preset, and `finetune` from a model."""
    preset = flat.get("preset")
    model = flat.get("model")
    if command == "pretrain" and (model is not None or preset is None):
        raise UsageError(
            "pretrain starts from random weights: give --preset NAME (to start from a model: finetune --model)"
        )
    if command == "pretrain":
        _refuse_weights_of_a_model(flat)
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
    command: str,
    user_options: Mapping[str, Any],
    folder: Path | None = None,
    command_line: str = "",
) -> RunSettings:
    """Return the settings of a run that is resumed: its run.toml with the changes `user_options`.

    The command is that in run.toml. `folder` None means `out` in `user_options`, else the only run of their model.
    """
    # In order: the folder of the call, --out, and the only run that there is of the model.
    named = folder or (Path(user_options["out"]) if "out" in user_options else None)
    folder = named or _only_run(user_options)
    # run.toml itself stands for its folder.
    if folder.name == RUN_FILE:
        folder = folder.parent
    user_options = {**user_options, "out": str(folder)}
    if (folder / RUN_FILE).is_file():
        changed_settings(read_run_file(folder / RUN_FILE), user_options)
        return run_settings(command, user_options, folder / RUN_FILE, command_line)
    nameless = not {"preset", "model"} & user_options.keys()
    # A path inside a run, such as checkpoints/step-100, was meant as the run.
    run = next((outer for outer in folder.parents if (outer / RUN_FILE).is_file()), None)
    if not folder.exists():
        raise UsageError(f"nothing to resume: {folder} does not exist; give the folder of a run")
    if run is not None:
        raise UsageError(
            f"{folder} is part of a run: give --resume {shlex.quote(str(run))}, which continues from its newest "
            "checkpoint"
        )
    if not (folder / "checkpoints").is_dir():
        from te_models.saving.checkpoint_choice import runs_in  # noqa: PLC0415  imports torch

        if runs := runs_in(folder):
            raise UsageError(
                f"{folder} holds runs: give one of them to --resume ({', '.join(runs)})"
            )
        raise UsageError(f"nothing to resume: {folder} has no checkpoint; start without --resume")
    if nameless:
        raise UsageError(
            f"{folder} has no {RUN_FILE}: give the settings of the run again, --preset or --model among them"
        )
    return run_settings(command, user_options, command_line=command_line)


def _only_run(user_options: Mapping[str, Any]) -> Path:
    """Return the folder to resume where the user names none: runs/<model>-<recipe>, or the only one there is."""
    name = user_options.get("preset") or user_options.get("model")
    label = Path(name).name if name else ""
    # Model and recipe give the folder's name, as for a new run.
    if label and user_options.get("recipe", "auto") != "auto":
        return Path("runs", f"{label}-{get_recipe(user_options['recipe']).name}")
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


def run_file_above(folder: Path) -> Path | None:
    """Return the run.toml of the run that a checkpoint or a folder of adapters is in; None if there is none."""
    for parent in folder.resolve().parents[:4]:
        if (parent / RUN_FILE).is_file():
            return parent / RUN_FILE
    return None


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the settings in a run.toml, or the same in YAML, name -> value; the table [record] is left out."""
    flat: dict[str, object] = {}
    in_yaml = path.suffix.lower() in SUFFIXES
    for title, values in (read_yaml(path) if in_yaml else read_toml(path)).items():
        if title == PROVENANCE:
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
                continue  # as older files write a setting without a value
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
    """Return the table in which a setting belongs; "" for a name that is no setting.

    A recipe has a table of its own, in which its name is `name`.
    """
    titles = (title for title, settings in TABLES.items() if name in settings and name != "recipe")
    return next(titles, "")


def changed_settings(
    saved: Mapping[str, object], user_options: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return name -> (value then, value now) of the settings that a resumed run changes."""
    saved = {**saved, **_recipe_values(saved)}
    changed: dict[str, tuple[object, object]] = {}
    for name in user_options.keys() - {"out"}:
        setting = SETTINGS[name]
        before = saved.get(name, setting.default)
        now = resolved_path(user_options[name]) if setting.path else user_options[name]
        if before == now:
            continue
        reason = ""
        if setting.fixed:
            reason = f"keeps its {name}"
            if name in saved:
                reason += f", which is {before!r}"
        elif name in TABLES["lora"] and not saved.get("lora"):
            reason = "keeps its adapters, and this one has none"
        if reason:
            raise UsageError(
                f"a resumed run {reason}: leave out {setting.flag}, or start a new run"
            )
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


def _with_user_options(saved: Mapping[str, Any], user_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` with the changes `user_options`, without the saved settings that these make meaningless.

    A new recipe or model replaces all fields of the old one. The shape in a file that names no model changes the model
    named beside it.
    """
    dropped: set[str] = set()
    if "steps" in user_options:
        dropped.add("epochs")  # which say the same in another way
    if "parallel" in user_options and user_options["parallel"] != saved.get("parallel"):
        dropped |= set(DIVISIONS)
    if "recipe" in user_options:
        dropped.add("recipe")
        had_fp8_weights = saved.get("fp8_params") and not user_options.get("fp8_params")
        if had_fp8_weights and not _keeps_fp8_weights(user_options["recipe"]):
            dropped.add("fp8_params")
            warnings.warn(
                f"recipe {user_options['recipe']!r} has no FP8 weights: the run goes on without",
                stacklevel=2,
            )
    if {"preset", "model"} & user_options.keys() and {"preset", "model"} & saved.keys():
        dropped |= {"preset", "model", *config_fields()}
    adds_adapters = user_options.get("lora") and not saved.get("lora")
    if adds_adapters and saved.get("learning_rate") == LEARNING_RATE["finetune"]:
        dropped.add("learning_rate")  # the default for all weights; adapters have another
    remaining = {name: value for name, value in saved.items() if name not in dropped}
    return remaining | dict(user_options)


def _keeps_fp8_weights(recipe: Any) -> bool:
    """Return whether weights can be in FP8 alone under a recipe."""
    # For "auto" the engine decides.
    return recipe == "auto" or get_recipe(recipe).scheme in FP8_WEIGHTS


def _lora(flat: Mapping[str, object]) -> LoraSettings | None:
    """Return the adapters that the settings ask for."""
    fields = as_fields(LoraSettings, flat)
    if fields.get("rank") is None:
        if others := [one for one in TABLES["lora"].values() if fields.get(one.field)]:
            raise UsageError(
                f"{others[0].flag} is for adapters: give --lora RANK too, such as --lora 16"
            )
        return None
    return LoraSettings(**fields)


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
