"""The model of a run: its source, known before any weight is read, and the way it is built."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig, config_fields
from te_models.config.presets import get_preset
from te_models.config.recipe import AUTO, RECIPE_FIELDS, Recipe, get_recipe
from te_models.distributed.environment import number
from te_models.errors import UsageError, plural
from te_models.files.formats import Document, Fields
from te_models.files.lock import refuse_in_use
from te_models.model.dtypes import given_dtype
from te_models.model.recipe_fit import auto_recipe
from te_models.saving.checkpoint_choice import describe_content
from te_models.saving.pretrained import read_shape, refuse_adapters
from te_models.saving.run_folder import Checkpoints, step_of
from te_models.training.launch import restarts
from te_models.training.parallel import Parallel
from te_models.training.resume import (
    resumed_options,
    run_folder,
    saved_choices,
    scheduled_recipes,
)
from te_models.training.run_settings import resolved_path
from te_models.training.settings import RunSettings

if TYPE_CHECKING:
    from te_models.training.lora_run import LoraRun

FROM_FP16 = (
    "the model is in float16 and trained in bfloat16, since most FP16 gradients underflow without loss scaling; "
    "--dtype float32 keeps every bit of its weights"
)


@dataclass(frozen=True)
class ModelSource:
    """The model that a run trains, before it is built.

    Attributes:
        settings: the settings of the run. In a new run the dtype is resolved, and the recipe if it was "auto".
        shape: the model's config.
        dtype: the dtype of its parameters.
        recipe: the recipe that the model is built with; a schedule may change it during the run.
        options: keywords of CausalLM.
        checkpoint: the checkpoint from which the run continues; None: the run is new.
        notes: lines that tell the user what was chosen automatically.
    """

    settings: RunSettings
    shape: ModelConfig
    dtype: torch.dtype
    recipe: Recipe
    options: Fields
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def steps_taken(self) -> int:
        """The number of steps before this run."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def with_steps(self, steps: int) -> ModelSource:
        """Return the source with the number of steps that the run's epochs amount to."""
        train = dataclasses.replace(self.settings.train, steps=steps)
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, train=train))

    def with_rows_for(self, tokens: int, new: int) -> ModelSource:
        """Return the source with a vocabulary of `tokens` tokens, `new` of which the run adds (--special-tokens)."""
        added = self.settings.data.special_tokens
        if not new or self.checkpoint is not None:
            return self
        # A tokenizer of another model, whose own tokens get no rows: check_fit refuses it.
        if tokens - new > self.shape.vocab_size:
            return self
        grows = tokens > self.shape.vocab_size
        if self.settings.lora is not None:
            # Rows beyond the vocabulary are new; others may be free rows that a release has reserved.
            state = "at the mean of the others" if grows else "as the model has them"
            warnings.warn(
                f"--lora does not train the embedding: the rows of --special-tokens {added} stay {state}",
                stacklevel=2,
            )
        if not grows:
            return self
        size: Fields = {"vocab_size": tokens}
        build = {**self.settings.build, **size}
        return dataclasses.replace(
            self,
            settings=dataclasses.replace(self.settings, build=build),
            shape=dataclasses.replace(self.shape, vocab_size=tokens),
            options={**self.options, **size},
        )

    def build(self, processes: Parallel) -> CausalLM:
        """Return the model, split over the processes: a new one, a loaded one, or the one in the checkpoint.

        The weights of a preset are random, also where the run continues: the Trainer restores them.
        """
        settings = self.settings
        options = dict(self.options)
        if settings.preset is not None:
            return CausalLM.from_preset(settings.preset, build=processes.build, **options)
        if self.checkpoint is not None and settings.lora is None:
            for name in config_fields():
                options.pop(name, None)  # the checkpoint has them
            return CausalLM.from_pretrained(self.checkpoint, build=processes.build, **options)
        assert settings.model is not None
        model = CausalLM.from_pretrained(settings.model, build=processes.build, **options)
        refuse_adapters(model)
        return model

    def first_recipe(self, model: CausalLM) -> Recipe:
        """Return the recipe of the run's first step; a schedule may have changed it before the checkpoint was saved."""
        if self.settings.train.recipe_schedule and self.settings.recipe != AUTO:
            return scheduled_recipes(self.settings)[0]
        return model.recipe


def find_model(
    settings: RunSettings, processes: Parallel, resume: bool
) -> tuple[ModelSource, Path]:
    """Return the model of a run, and the run's folder, which the first process chooses for all processes.

    With `resume` the run continues from the newest checkpoint in its folder; so does one that torchrun has restarted.

    Raises:
        UsageError: a new run would take the place of another, or there is nothing to resume.
        OutputInUse: another run writes to the folder.
    """
    restarted = restarts() > 0
    if resume:
        folder = _agreed_folder(settings, processes, restarted)
        checkpoint = Checkpoints(folder / "checkpoints").to_resume()
        return resumed_model(settings, checkpoint), folder
    source = new_model(settings)
    folder = _agreed_folder(source.settings, processes, restarted)
    # torchrun starts the same command again after a crash: a checkpoint in the folder is then its own.
    latest = Checkpoints(folder / "checkpoints").latest()
    if latest is None:
        if content := describe_content(folder):
            raise UsageError(f"{folder} already holds {content}: give another --out")
        return source, folder
    if not restarted:
        raise UsageError(
            f"{folder} already holds a run of {plural(step_of(latest), 'step')}: add --resume or give another --out"
        )
    resumed = resumed_model(source.settings, latest)
    return dataclasses.replace(resumed, notes=source.notes), folder


def _agreed_folder(settings: RunSettings, processes: Parallel, restarted: bool) -> Path:
    """Return the folder that the first process chooses; raise OutputInUse where another run writes to it."""

    def free_folder() -> str:
        folder = run_folder(settings, restarted)
        # The run takes the lock once data and model are there, which may be minutes later.
        refuse_in_use(folder)
        return str(folder)

    return Path(processes.ranks.from_first(free_folder, UsageError))


def new_model(settings: RunSettings) -> ModelSource:
    """Return the model of a new run.

    The recipe "auto" becomes the saved model's own, or one that suits the shape. A model in FP16 is trained in BF16.
    """
    notes = []
    saved_recipe = None
    if settings.preset is not None:
        shape = get_preset(settings.preset, **_config_options(settings.build))
        # Most FP16 gradients underflow without loss scaling, which no recipe has.
        dtype = torch.bfloat16
    else:
        saved = read_shape(settings.model or "", _config_options(settings.build))
        shape = saved.config
        saved_recipe = saved.recipe
        dtype = saved.dtype
        if "dtype" not in settings.build and dtype == torch.float16:
            dtype = torch.bfloat16
            notes.append(FROM_FP16)
    dtype = given_dtype(settings.build.get("dtype")) or dtype
    build: Fields = {**settings.build, "dtype": str(dtype).removeprefix("torch.")}
    recipe = settings.recipe
    if recipe == AUTO:
        if saved_recipe is None:
            recipe, reason = _suitable_recipe(settings, shape, dtype)
        else:
            recipe = saved_recipe
            reason = "the model's own"
        notes.append(f"recipe auto: {recipe.name} ({reason})")
    return ModelSource(
        settings=dataclasses.replace(settings, build=build, recipe=recipe),
        shape=shape,
        dtype=dtype,
        recipe=get_recipe(recipe, **_recipe_options(build)),
        options={**build, "recipe": recipe, "dtype": dtype},
        notes=tuple(notes),
    )


def _suitable_recipe(
    settings: RunSettings, shape: ModelConfig, dtype: torch.dtype
) -> tuple[Recipe, str]:
    """Return the recipe that suits a model of this shape on this machine, and the reason."""
    # Only what the choice depends on; fields of a recipe narrow the schemes that have them.
    names = ("engine", "device", "fp8_params", *RECIPE_FIELDS)
    options: Fields = {name: settings.build[name] for name in names if name in settings.build}
    # Whether FP8 saves time depends on the tokens of one GPU.
    processes = max(1, number("WORLD_SIZE", 1))
    tokens = settings.train.batch_size * settings.train.seq_len // processes
    return auto_recipe(shape, dtype=dtype, tokens=tokens, lora=settings.lora is not None, **options)


def resumed_model(settings: RunSettings, checkpoint: Path) -> ModelSource:
    """Return the model of a run that continues from a checkpoint: the saved choices, unless the user changes them."""
    options = resumed_options(settings, saved_choices(checkpoint))
    dtype = torch.bfloat16
    if settings.preset is not None:
        shape = get_preset(settings.preset, **_config_options(options))
    else:
        # A checkpoint of adapters has no model.
        if settings.lora is None:
            saved = read_shape(checkpoint)
        else:
            saved = read_shape(settings.model or "", _config_options(options))
        shape = saved.config
        dtype = saved.dtype
    dtype = given_dtype(options.get("dtype")) or dtype
    if "dtype" in options:
        options["dtype"] = dtype
    return ModelSource(
        settings=settings,
        shape=shape,
        dtype=dtype,
        recipe=get_recipe(options["recipe"], **_recipe_options(options)),
        options=options,
        checkpoint=checkpoint,
    )


def add_adapters(settings: RunSettings, model: CausalLM) -> LoraRun | None:
    """Freeze the model and add the adapters that the settings ask for, if any."""
    if settings.lora is None:
        return None
    from te_models.training.lora_run import LoraRun  # noqa: PLC0415  needs peft

    torch.manual_seed(settings.train.seed)
    return LoraRun(model, settings.lora, resolved_path(settings.model))


def _config_options(options: Document) -> Fields:
    """Return the fields of the config among keywords of CausalLM."""
    return {name: value for name, value in options.items() if name in config_fields()}


def _recipe_options(options: Document) -> Fields:
    """Return the fields of the recipe among keywords of CausalLM."""
    return {name: value for name, value in options.items() if name in RECIPE_FIELDS}
