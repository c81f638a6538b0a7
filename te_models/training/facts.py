"""The facts of a run that its checkpoints keep for a model card: what was trained, how, on what, and the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from te_models.data.files import HUB, is_hub_name
from te_models.data.own_batches import OwnBatches
from te_models.files.formats import Document, Fields
from te_models.interop.model_card import base_on_hub, license_in

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

# Facts that a resumed run takes from its checkpoint.
INHERITED = ("base", "base_model", "license", "data", "datasets", "before")
LOSSES = ("loss", "first_eval_loss", "eval_loss", "best_eval_loss")


def facts_at_start(trainer: Trainer, about: Document) -> Fields:
    """Return the facts that are known before the first step: `about`, and what the model's origin says."""
    origin = trainer.model.origin
    facts: Fields = dict(about)
    base_model = base_on_hub(origin)
    if base_model is not None:
        facts["base_model"] = base_model
    if origin.folder is not None:
        facts.setdefault("base", base_model or origin.folder.name)
        license = license_in(origin.folder)
        if license is not None:
            facts["license"] = license
    # The model was tuned before: the card tells of both runs.
    if origin.trained is not None:
        facts["before"] = dict(origin.trained)
        license = origin.trained.get("license")
        if license is not None:
            facts.setdefault("license", license)
    return facts


def resumed_facts(facts: Fields, saved: Document | None) -> Fields:
    """Return the facts of a run that goes on from a checkpoint with the facts `saved`."""
    if saved is None:
        return facts
    inherited = {name: saved[name] for name in INHERITED if name in saved}
    new_facts = {name: value for name, value in facts.items() if name not in INHERITED}
    return {**new_facts, **inherited}


def facts_now(trainer: Trainer) -> Fields:
    """Return all facts of a run as of its last finished step."""
    result = trainer.result
    facts: Fields = {
        **trainer.facts,
        "step": result.step,
        "recipes": _recipes(trainer),
        "engine": trainer.model.engine,
    }
    if not isinstance(trainer.data, OwnBatches):  # whose size the config does not set
        facts["tokens"] = result.step * trainer.config.tokens_per_step
    for name in LOSSES:
        value = getattr(result, name)
        if math.isfinite(value):
            facts[name] = value
    if result.best_step:
        facts["best_step"] = result.best_step
    return facts


def _recipes(trainer: Trainer) -> list[list[object]]:
    """Return [first step, recipe's name] of each recipe that was in force so far."""
    recipes = trainer.schedule.recipes
    if len(recipes) == 1:
        return [[1, trainer.model.recipe.name]]
    last = max(1, trainer.result.step)
    return [[done + 1, recipe.name] for done, recipe in recipes if done < last]


def dataset_names(data: Sequence[str]) -> list[str]:
    """Return the names of those data sources that are datasets of the Hugging Face hub, as its metadata has them."""
    names = []
    for source in data:
        if source.startswith(HUB) or is_hub_name(source):
            names.append(source.removeprefix(HUB).partition("#")[0].partition(":")[0])
        elif source.startswith("hf://datasets/"):
            names.append("/".join(source.removeprefix("hf://datasets/").split("/")[:2]))
    return list(dict.fromkeys(names))
