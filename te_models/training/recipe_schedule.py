"""The recipe of each step of a run that changes it, such as `current` until 90 % of the steps, then `bf16`."""

import warnings
from collections.abc import Iterable
from pathlib import Path

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.config.training import TrainConfig
from te_models.errors import UsageError
from te_models.files.atomic import reraising
from te_models.model.recipe_fit import quantizes
from te_models.training.resume import saved_choices


class RecipeSchedule:
    """The recipes of a run: `first`, and from certain steps on the recipes of `config.recipe_schedule`."""

    def __init__(self, model: CausalLM, first: Recipe, config: TrainConfig) -> None:
        self.model = model
        self.recipes = [
            (0, first),
            *((done, first.followed_by(name)) for done, name in config.recipe_changes),
        ]
        for done, recipe in self.recipes[1:]:
            if done >= config.steps:
                warnings.warn(
                    f"recipe_schedule={config.recipe_schedule!r}: the run ends after step {config.steps}, before "
                    f"{recipe.name!r} follows",
                    stacklevel=5,  # the caller of Trainer
                )
            # Every change is tried before the first step: a run must not fail on one after hours.
            with reraising(
                f"recipe_schedule={config.recipe_schedule!r}", UsageError, error=UsageError
            ):
                model.check_change(recipe)

    @property
    def first(self) -> Recipe:
        """The recipe of the run's first step."""
        return self.recipes[0][1]

    def demote(self, pattern: str, step: int) -> None:
        """Let the te.Linears that a pattern names run in BF16 from `step` on, under every recipe of the run.

        Where these are all that ran below BF16, the recipe becomes `bf16`.

        Raises:
            UsageError: the model cannot change to that.
        """
        recipes = [(done, self._demoted(recipe, [pattern])) for done, recipe in self.recipes]
        # Every recipe is tried before one is set, so that an error leaves model and schedule as they were.
        for _, recipe in recipes:
            if recipe.quantized:
                self.model.check_change(recipe)
        demoted = self._demoted(self.model.recipe, [pattern])
        self.model.check_change(demoted)
        self.recipes = recipes
        self._give(demoted)

    def at(self, step: int) -> Recipe:
        """Return the recipe of `step`, counted from 1."""
        # The last change that lies before the step; the first recipe, at 0, holds for step 0 too.
        return next(recipe for done, recipe in reversed(self.recipes) if step > done or not done)

    def row(self, step: int) -> dict[str, str]:
        """Return what the metrics of `step` say of its recipe, which also a resumed run may change."""
        return {"recipe": self.at(step).name}

    def follow(self, step: int) -> None:
        """Give the model the recipe of `step`, if there is a schedule and the model has another."""
        if len(self.recipes) > 1:
            self._give(self.at(step))

    def take(self, checkpoint: Path) -> None:
        """Give the model the recipe that a checkpoint was saved under, if there is a schedule with it.

        Layers that a guard has moved to BF16 (`demote`) stay so.
        """
        if len(self.recipes) > 1:
            saved: Recipe = saved_choices(checkpoint)["recipe"]
            for _, recipe in self.recipes:
                demoted = [name for name in saved.precision if name not in recipe.precision]
                if saved.to_dict() == self._demoted(recipe, demoted).to_dict():
                    self.recipes = [
                        (done, self._demoted(one, demoted)) for done, one in self.recipes
                    ]
                    self._give(saved)
                    return

    def _demoted(self, recipe: Recipe, patterns: list[str]) -> Recipe:
        """Return a recipe with these te.Linears in BF16: `bf16` if it then has nothing below BF16 in this model."""
        demoted = in_bf16(recipe, patterns)
        if recipe.quantized and not quantizes(self.model.config, demoted):
            return in_bf16(recipe.followed_by("bf16"), patterns)
        return demoted

    def _give(self, recipe: Recipe) -> None:
        if self.model.recipe.to_dict() != recipe.to_dict():
            self.model.set_recipe(recipe)


def in_bf16(recipe: Recipe, patterns: Iterable[str]) -> Recipe:
    """Return a recipe with the te.Linears that these patterns name in BF16."""
    table = {**recipe.precision, **dict.fromkeys(patterns, "bf16")}
    return recipe.replace(precision=table)
