"""`te-models list`: the presets and recipes by name."""

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.table import Column, Table

from te_models.cli.options import Command, console, json_option
from te_models.config.model import ModelConfig
from te_models.config.presets import PRESETS, get_preset
from te_models.config.recipe import get_recipe, list_recipes
from te_models.config.shipped import list_shipped, shipped_config


@click.command("list", cls=Command)
@json_option
def list_command(as_json: bool) -> None:
    """Show presets, the models that ship with te-models, and recipes."""
    if as_json:
        click.echo(json.dumps(_documents(), indent=1))
        return
    presets = _shapes(
        "presets: shapes, without weights; in brackets, heads of keys and values",
        {name: get_preset(name) for name in PRESETS},
    )
    models = _shapes(
        "models that ship with te-models: weights and a tokenizer",
        {n: shipped_config(n) for n in list_shipped()},
    )
    whole = (Column(name, no_wrap=True) for name in ("name", "scheme"))
    recipes = Table(
        *whole, "native hardware", "description", title="recipes", title_justify="left", box=None
    )
    for name in list_recipes():
        r = get_recipe(name)
        recipes.add_row(name, r.scheme, r.hardware, r.description)
    out = console()
    for table in (presets, models):
        out.print(table)
        out.print()
    out.print(recipes)


def _documents() -> dict[str, Any]:
    """Return what the tables show as JSON values: config of each shape by name, fields of each recipe by name."""
    shapes = {name: get_preset(name) for name in PRESETS}
    models = {name: shipped_config(name) for name in list_shipped()}
    recipes = {}
    for name in list_recipes():
        recipe = get_recipe(name)
        about = {"hardware": recipe.hardware, "description": recipe.description}
        recipes[name] = {**recipe.to_dict(), **about}
    return {
        "presets": {name: _document(config) for name, config in shapes.items()},
        "models": {name: _document(config) for name, config in models.items()},
        "recipes": recipes,
    }


def _document(config: ModelConfig) -> dict[str, Any]:
    return {"num_parameters": config.num_parameters, **config.document()}


def _shapes(title: str, configs: Mapping[str, ModelConfig]) -> Table:
    """Return a table with a row per shape, of at most 80 columns, so that no terminal cuts a name.

    Beside the number of heads, in brackets, is that of keys and values.
    """
    names = ("size", "vocab", "hidden", "layers", "heads", "MLP")
    numbers = (Column(name, justify="right", no_wrap=True) for name in names)
    name, gate = (Column(name, no_wrap=True) for name in ("name", "gate"))
    table = Table(name, *numbers, gate, title=title, title_justify="left", box=None, pad_edge=False)
    table.collapse_padding = True
    for name, c in configs.items():
        count = c.num_parameters
        size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
        sizes = (size, f"{c.vocab_size}", f"{c.hidden_size}", f"{c.num_hidden_layers}")
        heads = f"{c.num_attention_heads} ({c.num_key_value_heads})"
        table.add_row(name, *sizes, heads, f"{c.intermediate_size}", c.attention_gate)
    return table
