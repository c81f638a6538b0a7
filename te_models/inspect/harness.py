"""Scores of a model on tasks of lm-evaluation-harness, which is optional."""

from __future__ import annotations

import difflib
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from te_models.causal_lm import CausalLM
from te_models.data.tokenizer import Tokenizer
from te_models.errors import DataError, UsageError, needs
from te_models.files.atomic import first_line
from te_models.huggingface.modeling import TEModelsForCausalLM
from te_models.inspect.evaluate import Score

with needs("--tasks", "lm-eval", "0.4.9", "eval"):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast


def find_tasks(names: Sequence[str]) -> TaskManager:
    """Return the tasks that the harness knows.

    Raises:
        UsageError: a name is neither a task, a group of tasks, nor the path of a YAML file that describes one.
    """
    manager = TaskManager()
    for name in names:
        known = manager.all_tasks
        if name not in known and not (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(
                f"unknown task {name!r}: {hint}`lm-eval ls tasks` lists all, and a path of a YAML file is one"
            )
    return manager


def score_tasks(
    model: CausalLM,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    manager: TaskManager,
    batch_size: int = 8,
    limit: int | None = None,
    few_shot: int | None = None,
) -> list[Score]:
    """Run tasks on a model, as `lm_eval` does on one of transformers; return every metric that is a number.

    Args:
        model: the model; evaluated under its recipe, with its scales unchanged.
        tokenizer: the model's.
        tasks: names or YAML files.
        manager: from `find_tasks`.
        batch_size: sequences per forward pass.
        limit: examples per task; None for all.
        few_shot: solved examples before each; None for the task's own number.

    Raises:
        DataError: the examples of a task cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        words = PreTrainedTokenizerFast.from_pretrained(folder)
    wrapped = HFLM(
        pretrained=TEModelsForCausalLM.wrap(model).eval(),
        tokenizer=words,
        batch_size=batch_size,
        max_length=model.config.max_position_embeddings,
    )
    try:
        found = lm_eval.simple_evaluate(
            wrapped,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=few_shot,
            bootstrap_iters=0,
            log_samples=False,
            verbosity=None,
        )
    except OSError as error:  # datasets and the hub raise kinds of it
        raise DataError(f"--tasks {','.join(tasks)}: the examples cannot be loaded ({first_line(error)})") from error
    return list(_scores(model.recipe.name, found["results"]))


def _scores(recipe: str, results: dict[str, dict[str, Any]]) -> Iterable[Score]:
    """Yield the numbers in the harness's results, whose keys are "metric,filter" and "metric_stderr,filter"."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            yield Score(recipe, task, name, float(value), float(error) if isinstance(error, int | float) else None)
