"""`te-models list`: the presets, recipes and runs by name."""

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.table import Column, Table

from te_models.cli.options import Command, console, json_option, option
from te_models.config.model import ModelConfig
from te_models.config.presets import PRESETS, get_preset
from te_models.config.recipe import get_recipe, list_recipes
from te_models.config.shipped import list_shipped, shipped_config
from te_models.config.shipped_runs import list_runs, run_file
from te_models.training.run_settings import run_settings
from te_models.training.settings import RunSettings


@click.command("list", cls=Command)
@option("--runs", is_flag=True, help="Show the runs for `te-models pretrain --run NAME` instead.")
@json_option
def list_command(runs: bool, as_json: bool) -> None:
    """Show presets, the models that ship with te-models, and recipes."""
    if as_json:
        documents = {"runs": _run_documents()} if runs else _documents()
        click.echo(json.dumps(documents, indent=1))
        return
    if runs:
        console().print(_runs())
        return
    presets = _shapes(
        "presets: shapes, without weights; in brackets, heads of keys and values",
        {name: get_preset(name) for name in PRESETS},
    )
    models = _shapes(
        "models that ship with te-models: weights and a tokenizer",
        {n: shipped_config(n) for n in list_shipped()},
    )
    recipes = Table(
        Column("name", no_wrap=True),
        Column("scheme", no_wrap=True),
        "native hardware",
        "description",
        title="recipes",
        title_justify="left",
        box=None,
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
        # Recipe.to_dict leaves out what changes no number.
        about = {"hardware": recipe.hardware, "description": recipe.description}
        recipes[name] = {**recipe.to_dict(), **about}
    return {
        "presets": {name: _document(config) for name, config in shapes.items()},
        "models": {name: _document(config) for name, config in models.items()},
        "recipes": recipes,
    }


def _run_documents() -> dict[str, Any]:
    """Return the settings of each run by name: table of its file -> name -> value."""
    return {name: _settings(name).tables() for name in list_runs()}


def _settings(name: str) -> RunSettings:
    return run_settings("pretrain", {}, run_file(name))


def _runs() -> Table:
    """Return a table with a row per run, of at most 80 columns."""
    table = Table(title="runs: te-models pretrain --run NAME", title_justify="left", box=None)
    table.add_column("name", no_wrap=True)
    for name in ("size", "tokens/step", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("optimizer", no_wrap=True)
    table.add_column("recipe", no_wrap=True)
    for name in list_runs():
        settings = _settings(name)
        train = settings.train
        tokens = train.batch_size * train.seq_len * train.gradient_accumulation
        recipe = settings.recipe
        table.add_row(
            name,
            _size(get_preset(str(settings.preset))),
            f"{tokens:,}",
            f"{train.steps:,}",
            train.optimizer,
            recipe if isinstance(recipe, str) else recipe.name,
        )
    return table


def _size(config: ModelConfig) -> str:
    count = config.num_parameters
    if count >= 100e9:
        return f"{count / 1e9:.1f} B"
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _document(config: ModelConfig) -> dict[str, Any]:
    return {"num_parameters": config.num_parameters, **config.document()}


def _shapes(title: str, configs: Mapping[str, ModelConfig]) -> Table:
    """Return a table with a row per shape, of at most 80 columns, so that no terminal cuts a name.

    Beside the number of heads, in brackets, is the number of heads of keys and values.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    # One space less between columns, so that the widest row fits.
    table.collapse_padding = True
    table.add_column("name", no_wrap=True)
    for name in ("size", "vocab", "hidden", "layers", "heads", "MLP"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gate", no_wrap=True)
    for name, config in configs.items():
        table.add_row(
            name,
            _size(config),
            f"{config.vocab_size}",
            f"{config.hidden_size}",
            f"{config.num_hidden_layers}",
            f"{config.num_attention_heads} ({config.num_key_value_heads})",
            f"{config.intermediate_size}",
            config.attention_gate,
        )
    return table
