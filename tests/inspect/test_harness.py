"""Tasks of lm-evaluation-harness from a user's folder: the scores of transformers on the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import CausalLM, TEModelsForCausalLM
from te_models.cli import main
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import UsageError
from te_models.inspect.evaluate import Score

lm_eval = pytest.importorskip("lm_eval")
from te_models.inspect.harness import find_tasks, score_tasks  # noqa: E402  needs lm_eval

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # those of the harness and of the libraries below it

ROWS = [
    dict(text=text, choices=[" a", " the cat", " 0"], label=number % 3)
    for number, text in enumerate(["Once", "The sky is", "2 + 2 =", "Nothing", "It rains and"])
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/rows.jsonl
  cache_dir: {folder}/cache
test_split: test
output_type: {kind}
doc_to_text: "{prompt}"
doc_to_target: {target}
metric_list:
"""
TASKS = {
    "which": (
        "multiple_choice",
        "{{text}}",
        "label",
        "doc_to_choice: '{{choices}}'\n",
        ("acc", "acc_norm"),
    ),
    "likely": ("loglikelihood_rolling", "", "'{{text}}'", "", ("byte_perplexity",)),
    "go_on": (
        "generate_until",
        "{{text}}",
        "'{{choices[0]}}'",
        "generation_kwargs: {until: [], max_gen_toks: 4, do_sample: false}\n",
        ("exact_match",),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3 in Hugging Face's format, and beside it the folder tasks/."""
    folder = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    shape = dict(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    shape |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    model = CausalLM.from_preset(
        "qwen3-0.6b", dtype=torch.float32, device="cpu", engine="emulated", **shape
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder / "model", format="hf")
    ByteTokenizer().save(folder / "model")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, (kind, prompt, target, more, metrics) in TASKS.items():
        task = TASK.format(
            name=name, folder=folder / "tasks", kind=kind, prompt=prompt, target=target
        )
        text = task + "".join(f"  - metric: {metric}\n" for metric in metrics) + more
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


def scores(capsys: pytest.CaptureFixture, *options: Any) -> dict[tuple[str, str], float]:
    assert main(["evaluate", *map(str, options), "--recipe", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scores"]
    return {(score["task"], score["metric"]): score["value"] for score in found}


def test_the_scores_of_a_folder_of_tasks_are_those_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    own = scores(
        capsys, "--model", folder / "model", "--tasks", folder / "tasks", "--batch-size", "2"
    )
    model = lm_eval.models.huggingface.HFLM(
        pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=2, max_length=64
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    theirs = lm_eval.simple_evaluate(
        model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )["results"]
    assert own.keys() == {
        (name, metric) for name, (*_, metrics) in TASKS.items() for metric in metrics
    }
    for (task, metric), value in own.items():
        assert value == pytest.approx(theirs[task][f"{metric},none"], rel=1e-4), (task, metric)
    assert own["likely", "byte_perplexity"] > 2
    one = scores(
        capsys,
        "--model",
        folder / "model",
        "--tasks",
        folder / "tasks" / "which.yaml",
        "--limit",
        "1",
    )
    assert one.keys() == {("which", "acc"), ("which", "acc_norm")} and one["which", "acc"] in (0, 1)


def test_a_wrapped_model_is_scored_and_another_refused_in_one_line(folder: Path) -> None:
    model = CausalLM.from_pretrained(folder / "model", device="cpu", recipe="bf16")
    manager, tasks = find_tasks([str(folder / "tasks" / "which.yaml")])

    def scored(model: Any) -> list[Score]:
        return score_tasks(model, ByteTokenizer(), tasks, manager, batch_size=2)

    assert scored(TEModelsForCausalLM.wrap(model)) == scored(model)
    with pytest.raises(UsageError, match="the model is a Linear: give a CausalLM, or a TEModels"):
        scored(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="the tokenizer has 259 ids but the model's vocab_size"):
        scored(CausalLM.from_preset("gated-nano", vocab_size=256, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("empty", None, "no YAML file in this folder describes a task"),
        (
            "broken.yaml",
            "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.jsonl}\n",
            "nowhere",
        ),
        ("nothing.yaml", None, "unknown task"),
        (",", None, "--tasks names no task"),
    ],
)
def test_mistakes_are_one_line(
    task: str,
    content: str | None,
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / task).write_text(content)
    assert (
        main(
            [
                "evaluate",
                "--model",
                str(folder / "model"),
                "--tasks",
                task if task == "," else str(tmp_path / task),
            ]
        )
        == 2
    )
    error = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("te-models: ")
    ]
    assert len(error) == 1 and message in error[0]


def test_more_solved_examples_than_a_task_has_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["evaluate", "--model", folder / "model", "--tasks", folder / "tasks" / "which.yaml"]
    assert main([*map(str, command), "--few-shot", "99"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("check file, network or --few-shot")
