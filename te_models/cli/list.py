"""`te-models list`: the presets and recipes by name."""

from __future__ import annotations

import click
from rich.table import Table

from te_models.cli.options import Command, console
from te_models.config.presets import PRESETS, get_preset
from te_models.config.recipe import get_recipe, list_recipes


@click.command("list", cls=Command)
def list_command() -> None:
    """Show presets and recipes."""
    presets = Table(title="presets", title_justify="left", box=None)
    for column in ("name", "parameters", "hidden", "layers", "heads (kv)", "intermediate", "gate"):
        presets.add_column(column, justify="left" if column in ("name", "gate") else "right")
    for name in PRESETS:
        c = get_preset(name)
        heads = f"{c.num_attention_heads} ({c.num_key_value_heads})"
        shape = (f"{c.num_parameters:,}", f"{c.hidden_size}", f"{c.num_hidden_layers}", heads, f"{c.intermediate_size}")
        presets.add_row(name, *shape, c.attention_gate)
    recipes = Table(title="recipes", title_justify="left", box=None)
    for column in ("name", "Transformer Engine class", "native hardware", "description"):
        recipes.add_column(column)
    for name in list_recipes():
        r = get_recipe(name)
        recipes.add_row(name, r.scheme, r.hardware, r.description)
    out = console()
    out.print(presets)
    out.print()
    out.print(recipes)
