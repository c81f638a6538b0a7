"""Tables of the recipes that run on each generation of GPUs, from the conditions that `plan --gpu` reads."""

from __future__ import annotations

from benchmarks.tables.text import markdown, table
from te_models.config.gpus import GPUS, how_it_runs, suited, why_not
from te_models.config.recipe import get_recipe, list_recipes


def _generation(name: str) -> str:
    """Return the cards of a generation, then its table of recipes."""
    cards = [gpu for gpu in GPUS if gpu.generation == name]
    about = []
    for gpu in cards:
        major, minor = gpu.capability
        version = f"{major}.{minor}"
        about.append([gpu.name, version, f"{gpu.memory} GB", gpu.evidence])
    first = cards[0]
    rows = []
    for recipe_name in list_recipes():
        recipe = get_recipe(recipe_name)
        reason = why_not(suited(recipe, first), first.capability)
        runs = "no" if reason else "yes"
        rows.append([f"`{recipe_name}`", runs, reason or how_it_runs(recipe, first.capability)])
    cards_table = markdown("card | compute capability | memory | evidence", about)
    return f"{cards_table}\n\n{markdown('recipe | runs | how, or why not', rows)}"


@table
def gpus_ada() -> str:
    """Ada."""
    return _generation("Ada")


@table
def gpus_hopper() -> str:
    """Hopper."""
    return _generation("Hopper")


@table
def gpus_blackwell() -> str:
    """Data-centre Blackwell."""
    return _generation("data-centre Blackwell")


@table
def gpus_consumer_blackwell() -> str:
    """Consumer Blackwell."""
    return _generation("consumer Blackwell")
