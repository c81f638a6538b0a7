"""The lines that a run prints around its training: notes, settings in force, outcome, samples and next commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.errors import ConfigError
from te_models.saving.checkpoint_choice import describe_choice
from te_models.serving.export import default_format
from te_models.serving.unchanged_base import UNCHANGED
from te_models.training.next_commands import print_next
from te_models.training.report import draw_run, print_outcome, print_table, run_console
from te_models.training.resume import saved_choices
from te_models.training.run_data import RunData
from te_models.training.run_model import ModelSource
from te_models.training.run_settings import changed_settings, read_run_file
from te_models.training.samples import Sampler, held_out_prompts
from te_models.training.settings import RUN_FILE, RunSettings
from te_models.training.trainer import Trainer


class Report:
    """The lines that a run prints on its first process, and its loss curve.

    Args:
        settings: the settings of the run.
        folder: the folder of the run.
        quiet: print nothing.
    """

    def __init__(self, settings: RunSettings, folder: Path, quiet: bool) -> None:
        self.settings = settings
        self.folder = folder
        self.console = run_console(quiet=quiet)

    def begin(self, notes: Iterable[str], summary: Table) -> None:
        """Print what was chosen for the user or changed, and the settings in force."""
        for note in notes:
            self.console.print(note, soft_wrap=True)  # paths stay whole
        print_table(self.console, summary)

    def draw_losses(self, trainer: Trainer) -> str:
        """Draw the loss curve; return its path, or why there is none."""
        settings = self.settings
        return draw_run(
            trainer.result,
            self.folder,
            model=settings.label,
            recipe=trainer.model.recipe.name,
            data=settings.data.data,
            note=f"{trainer.config.tokens_per_step:,} tokens; {settings.command}",
        )

    def end(self, trainer: Trainer, written: Mapping[str, str]) -> None:
        """Print the outcome, and the files that were written, by what they are."""
        print_outcome(
            self.console,
            trainer.result,
            trainer.config,
            command=self.settings.command,
            folder=self.folder,
            written=written,
        )

    def suggest(self, trainer: Trainer, data: RunData, sampler: Sampler | None) -> None:
        """Print the commands to run next, with a prompt of the evaluation data."""
        model = trainer.model
        if sampler is None:
            prompts = held_out_prompts(
                data.eval_batches, data.tokenizer, model.config.longest_sequence
            )
        else:
            prompts = sampler.prompts
        if model.stored_linears:
            format = UNCHANGED
        else:
            try:
                format = default_format(model, model.origin)
            except ConfigError:  # no server has this architecture
                format = ""
        print_next(
            self.console,
            self.folder,
            data.tokenizer,
            prompts,
            format=format,
            result=trainer.result,
            settings=self.settings,
        )


def model_notes(source: ModelSource, folder: Path, model: CausalLM) -> list[str]:
    """Return lines about the model that a run starts from: random weights, which checkpoint, or what a resume changes.

    The checkpoint's loader warns of another recipe (te_models.saving.pretrained).
    """
    settings = source.settings
    if source.checkpoint is not None:
        return _changes(settings, folder, source.checkpoint, model)
    if settings.preset is not None:
        return [f"{settings.preset} starts from random weights"]
    choice = describe_choice(settings.model or "")
    return [] if choice is None else [choice]


def _changes(settings: RunSettings, folder: Path, checkpoint: Path, model: CausalLM) -> list[str]:
    """Return a line for each setting that a resumed run changes."""
    lines = []
    engine = saved_choices(checkpoint).get("engine", model.engine)
    if engine != model.engine:
        lines.append(f"changed: the engine is {model.engine} ({model.engine_reason}), was {engine}")
    run_file = folder / RUN_FILE
    if not run_file.is_file():
        return lines
    now: dict[str, object] = {}
    for table in settings.tables().values():
        now |= table
    # Only settings that the command names: defaults of another version are no change of the user's.
    given_now = {name: now[name] for name in settings.set_by_user & now.keys()}
    saved = read_run_file(run_file)
    changed = changed_settings(saved, given_now)
    for name, (before, after) in sorted(changed.items()):
        lines.append(f"changed: {name} = {after!r}, was {before!r}")
    if saved.get("recipe_schedule") == settings.train.recipe_schedule:
        lines += _moved_changes(settings.train, saved.get("steps", settings.train.steps))
    return lines


def _moved_changes(config: TrainConfig, steps: int) -> list[str]:
    """Return a line for each change of the recipe at a share of the steps, of which there were `steps` before."""
    lines = []
    before = dataclasses.replace(config, steps=steps).recipe_changes
    for (old, name), (new, _) in zip(before, config.recipe_changes, strict=True):
        if old != new:
            lines.append(
                f"changed: recipe {name!r} follows after step {new}, was {old}: a share of the steps"
            )
    return lines
