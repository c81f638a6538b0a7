"""Every setting of a training run as one tree, with its table in run.toml. No torch.

A setting is a flag of `te-models pretrain` and `te-models finetune`, and a line of run.toml, which groups settings in
tables (TABLES). Names are unique over all tables, so given settings travel as one flat mapping until `run_settings`
(te_models.training.run_settings) makes the tree of them; there `recipe` is a name, a path or a table of a recipe's
fields.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from te_models.config.data import DataConfig, split_names
from te_models.config.model import ModelConfig
from te_models.config.recipe import (
    RECIPE_FIELDS,
    Recipe,
    list_recipes,
)
from te_models.config.settings import (
    EVERYDAY,
    Setting,
    Settings,
    by_name,
    setting,
    settings_of,
)
from te_models.config.training import EVALUATION, TRAINING, TrainConfig
from te_models.errors import ConfigError, check_known

RUN_FILE = "run.toml"
COMMANDS = ("pretrain", "finetune")
# The table of run.toml with facts of the run (data, versions, commands), not settings.
PROVENANCE = "record"
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
            # A factor of 2 on the update, whatever the rank.
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
        set_by_user: names of the settings given on the command line, which override `file`.
        file: the run.toml that the others come from.
        command_line: as the user wrote it, for the record.
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
    set_by_user: frozenset[str] = frozenset()
    file: Path | None = None
    command_line: str = ""

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
