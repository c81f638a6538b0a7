"""Scores of a model on tasks of lm-evaluation-harness, which is optional."""

from __future__ import annotations

import difflib
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from te_models.causal_lm import CausalLM
from te_models.data.dataset import check_fit
from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import DataError, TeModelsError, UsageError, needs
from te_models.files.atomic import first_line
from te_models.huggingface.modeling import TEModelsForCausalLM
from te_models.inspect.evaluate import Score
from te_models.model.decoder_of import decoder_of

with needs("--tasks", "lm-eval", "0.4.12", "eval"):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast


def find_tasks(names: Sequence[str]) -> tuple[TaskManager, list[str]]:
    """Return the tasks that the harness knows, and the names of those asked for.

    Args:
        names: tasks, groups of tasks, YAML files that describe one, or folders of such files, for all tasks in them.

    Raises:
        UsageError: there is no name, or no such task.
    """
    if not names:
        raise UsageError("--tasks names no task: give a name, a YAML file or a folder of them")
    folders: list[str | Path] = [name for name in names if Path(name).is_dir()]
    files = [name for name in names if name.endswith((".yaml", ".yml")) and Path(name).is_file()]
    manager = TaskManager(
        include_path=folders, include_defaults=len(folders) + len(files) < len(names)
    )
    tasks: list[str] = []
    for name in names:
        if name in folders:
            known = TaskManager(include_path=name, include_defaults=False).all_subtasks
        else:
            known = []
        if not known and (name in folders or name not in (*files, *manager.all_tasks)):
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            problem = (
                f"unknown task {name!r}: {hint}`lm-eval ls tasks` lists all; "
                "a YAML file or a folder of them is one"
            )
            if name in folders:
                problem = f"--tasks {name}: no YAML file in this folder describes a task: write `task: NAME` in one"
            raise UsageError(problem)
        tasks += known or [name]
    return manager, tasks


def score_tasks(
    model: CausalLM | TEModelsForCausalLM,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    manager: TaskManager,
    batch_size: int = 8,
    limit: int | None = None,
    few_shot: int | None = None,
) -> list[Score]:
    """Run tasks on a model, as `lm_eval` does for transformers; return every metric that is a number.

    The model is evaluated under its recipe, with its scales unchanged. `limit` is the number of examples per task
    (None: all) and `few_shot` the number of solved examples before each (None: the task's own).

    Raises:
        UsageError: the model is something else, or the tokenizer is of another model.
        DataError: a task or its examples cannot be read.
    """
    decoder = decoder_of(model)
    check_fit(tokenizer, decoder.config)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        # lm_eval takes a tokenizer of transformers, which reads ours from a file.
        tokenizer.save(folder)
        hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    sizes = dict(batch_size=batch_size, max_length=decoder.config.max_position_embeddings)
    hf_model = model if isinstance(model, TEModelsForCausalLM) else TEModelsForCausalLM.wrap(model)
    wrapped = HFLM(pretrained=hf_model.eval(), tokenizer=hf_tokenizer, **sizes)
    examples = dict(tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=few_shot)
    try:
        results = lm_eval.simple_evaluate(
            wrapped, **examples, bootstrap_iters=0, log_samples=False, verbosity=None
        )
    except (TeModelsError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # the libraries that read a task have no common base but this one
        reason = f"{type(error).__name__}: {first_line(error)}"
        # A task may have fewer solved examples than are asked for.
        check = "check file or network" if not few_shot else "check file, network or --few-shot"
        raise DataError(
            f"--tasks {','.join(tasks)}: a task or its examples cannot be read ({reason}): {check}"
        ) from error
    return list(_scores(decoder.recipe.name, results["results"]))


def _scores(recipe: str, results: dict[str, dict[str, object]]) -> Iterable[Score]:
    """Yield the numbers in the harness's results, whose keys are "metric,filter" and "metric_stderr,filter"."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            # Without a comma it is the name of the task.
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            yield Score(
                recipe,
                task,
                name,
                float(value),
                float(error) if isinstance(error, int | float) else None,
            )
