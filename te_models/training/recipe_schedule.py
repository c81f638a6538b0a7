"""The recipe of each step of a run that changes it, such as `current` until 90 % of the steps, then `bf16`."""

import warnings
from pathlib import Path

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.config.training import TrainConfig
from te_models.errors import UsageError
from te_models.files.atomic import reraising
from te_models.training.resume import saved_choices


class RecipeSchedule:
    """The recipes of a run: `first`, and from certain steps on those of `config.recipe_schedule`."""

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
                    stacklevel=3,
                )
            with reraising(
                f"recipe_schedule={config.recipe_schedule!r}", UsageError, error=UsageError
            ):
                model.check_change(recipe)

    def at(self, step: int) -> Recipe:
        """Return the recipe of `step`, counted from 1."""
        return next(recipe for done, recipe in reversed(self.recipes) if step > done or not done)

    def row(self, step: int) -> dict[str, str]:
        """Return what the metrics of `step` say of its recipe; nothing without a schedule."""
        return {"recipe": self.at(step).name} if len(self.recipes) > 1 else {}

    def follow(self, step: int) -> None:
        """Give the model the recipe of `step`, if there is a schedule and the model has another."""
        if len(self.recipes) > 1:
            self._give(self.at(step))

    def take(self, checkpoint: Path) -> None:
        """Give the model the recipe that a checkpoint was saved under, if there is a schedule with it."""
        if len(self.recipes) > 1:
            saved: Recipe = saved_choices(checkpoint)["recipe"]
            if any(saved.to_dict() == recipe.to_dict() for _, recipe in self.recipes):
                self._give(saved)

    def _give(self, recipe: Recipe) -> None:
        if self.model.recipe.to_dict() != recipe.to_dict():
            self.model.set_recipe(recipe)
