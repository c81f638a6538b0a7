"""`te-models list`: the presets and recipes by name."""

from __future__ import annotations

from collections.abc import Mapping

import click
from rich.table import Column, Table

from te_models.cli.options import Command, console
from te_models.config.model import ModelConfig
from te_models.config.presets import PRESETS, get_preset
from te_models.config.recipe import get_recipe, list_recipes
from te_models.config.shipped import list_shipped, shipped_config


@click.command("list", cls=Command)
def list_command() -> None:
    """Show presets, the models that ship with te-models, and recipes."""
    presets = _shapes("presets: shapes, without weights", {name: get_preset(name) for name in PRESETS})
    models = _shapes(
        "models that ship with te-models: weights and a tokenizer", {n: shipped_config(n) for n in list_shipped()}
    )
    columns = ("name", "Transformer Engine class", "native hardware", "description")
    recipes = Table(*columns, title="recipes", title_justify="left", box=None)
    for name in list_recipes():
        r = get_recipe(name)
        recipes.add_row(name, r.scheme, r.hardware, r.description)
    out = console()
    for table in (presets, models):
        out.print(table)
        out.print()
    out.print(recipes)


def _shapes(title: str, configs: Mapping[str, ModelConfig]) -> Table:
    """Return a table with a row per shape."""
    names = ("parameters", "vocabulary", "hidden", "layers", "heads (kv)", "intermediate")
    numbers = (Column(name, justify="right") for name in names)
    table = Table("name", *numbers, "gate", title=title, title_justify="left", box=None)
    for name, c in configs.items():
        sizes = (f"{c.num_parameters:,}", f"{c.vocab_size:,}", f"{c.hidden_size}", f"{c.num_hidden_layers}")
        heads = f"{c.num_attention_heads} ({c.num_key_value_heads})"
        table.add_row(name, *sizes, heads, f"{c.intermediate_size}", c.attention_gate)
    return table
