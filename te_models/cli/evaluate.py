"""`te-models evaluate`: the loss of a model on your data, under one or several recipes, and its scores on tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click
from rich.text import Text

from te_models.cli.options import (
    Command,
    build_model,
    console,
    json_option,
    model_options,
    one_source_option,
    option,
    refuse_without,
    setting_option,
    setting_options,
    show,
    show_choice,
    show_line,
)
from te_models.config.data import DataConfig, split_names
from te_models.config.recipe import AUTO, get_recipe
from te_models.errors import check_least

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM
    from te_models.data.tokenizer_base import Tokenizer
    from te_models.inspect.evaluate import Evaluation
    from te_models.inspect.harness import Score

OF_DATA = ("seq_len", "max_batches", "columns", "truncate", "chat_template", "on_bad_record")
OF_TASKS = ("limit", "few_shot")
harness_option = functools.partial(option, group="With --tasks")


@click.command(cls=Command)
@one_source_option("Text or records to measure the loss on, as for finetune --data.")
@option(
    "--tasks",
    metavar="NAMES",
    help="Tasks of lm-evaluation-harness, separated by commas: names, YAML files, or folders of your own YAML files.",
)
@option(
    "--recipes",
    metavar="NAMES",
    help="Recipes to compare, separated by commas; default: the model's own.",
)
@model_options
@setting_option("tokenizer")
@option(
    "--seq-len",
    type=int,
    help="Tokens per sequence; default: 1024, or the model's maximum if that is less.",
)
@option("--batch-size", default=8, help="Sequences per forward pass.")
@setting_options("columns", "truncate", "chat_template", "on_bad_record")
@option(
    "--max-batches",
    default=0,
    help="Maximum number of batches, spread evenly over the data; 0: all.",
)
@harness_option("--limit", type=int, help="Examples per task; default: all.")
@harness_option(
    "--few-shot", type=int, help="Solved examples before each; default: the task's own number."
)
@json_option
def evaluate(
    preset: str | None,
    model: str | None,
    data: str | None,
    tasks: str | None,
    recipes: str | None,
    recipe: str | None,
    tokenizer: str | None,
    as_json: bool,
    seq_len: int | None,
    batch_size: int,
    max_batches: int,
    columns: str,
    truncate: str,
    chat_template: str | None,
    on_bad_record: str,
    limit: int | None,
    few_shot: int | None,
    **options: object,
) -> int:
    """Measure a model's loss on your data, or its scores on tasks.

    The loss is printed per token, as perplexity, and in bits per byte. With --recipes there is a row per recipe, all
    on the same tokens. The loss does not count the prompts of records.
    """
    if data is None and tasks is None:
        raise click.UsageError("give --data PATH, --tasks NAMES, or both")
    refuse_without("--data PATH", data, OF_DATA)
    refuse_without("--tasks NAMES", tasks, OF_TASKS)
    names = _recipe_names(recipe, recipes)
    DataConfig(columns=columns, truncate=truncate, on_bad_record=on_bad_record)  # checks them
    from te_models.data.tokenizer import load_tokenizer  # noqa: PLC0415  imports torch
    from te_models.inspect.evaluate import evaluate_recipes  # noqa: PLC0415

    text_tokenizer = load_tokenizer(tokenizer or model)
    score = None
    if tasks is not None:
        score = _scorer(tasks, text_tokenizer, batch_size, limit, few_shot)

    def load(name: str | None) -> CausalLM:
        return build_model(preset, model, {**options, "recipe": name})

    if model is not None:
        show_choice(model)  # before the spinner, into whose line it would be written
    terminal = console()
    with terminal.status("") as status:
        evaluation = evaluate_recipes(
            load,
            names,
            text_tokenizer,
            model=model or str(preset),
            data=data,
            score=score,
            progress=lambda line: status.update(Text(line)),
            seq_len=seq_len,
            batch_size=batch_size,
            max_batches=max_batches,
            columns=columns,
            on_bad_record=on_bad_record,
            truncate=truncate,
            chat_template=chat_template,
        )
    show(evaluation, as_json)
    return _exit_code(evaluation)


def _exit_code(evaluation: Evaluation) -> int:
    """Return the exit code of an evaluation, 2 where a recipe was refused; say on stderr which, and why."""
    for row in evaluation.refused:
        show_line(f"te-models: recipe {row.recipe} was not run: {row.note}", err=True)
    return 2 if evaluation.refused else 0


def _recipe_names(recipe: str | None, recipes: str | None) -> Sequence[str | None]:
    """Return the names of the recipes to compare; None stands for the model's own."""
    if recipes is not None and recipe is not None:
        raise click.UsageError("give --recipe NAME, or several as --recipes NAMES, not both")
    names = [recipe] if recipes is None else [*split_names(recipes)]
    for name in names:
        if name not in (None, AUTO):
            get_recipe(name)  # an unknown name is an error before anything is loaded
    return names


def _scorer(
    tasks: str, tokenizer: Tokenizer, batch_size: int, limit: int | None, few_shot: int | None
) -> Callable[[CausalLM], list[Score]]:
    """Return the function that scores a model on these tasks of lm-evaluation-harness."""
    from te_models.inspect.harness import find_tasks, score_tasks  # noqa: PLC0415  optional, and slow to import

    check_least(1, batch_size=batch_size)
    if limit is not None:
        check_least(1, limit=limit)
    if few_shot is not None:
        check_least(0, few_shot=few_shot)
    manager, found_tasks = find_tasks(split_names(tasks))
    return functools.partial(
        score_tasks,
        tokenizer=tokenizer,
        tasks=found_tasks,
        manager=manager,
        batch_size=batch_size,
        limit=limit,
        few_shot=few_shot,
    )
