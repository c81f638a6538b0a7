"""Losses per recipe: against torch's cross-entropy document by document, in bytes, and as one table."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_model import write_chat_model

from te_models import CausalLM, load_tokenizer
from te_models.cli import main
from te_models.data.documents import load_documents
from te_models.data.formats import Document
from te_models.errors import DataError, UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.inspect import evaluate as evaluate_module
from te_models.inspect.evaluate import (
    Evaluation,
    RecipeLoss,
    Score,
    calibrate,
    evaluate_recipes,
    make_batches,
)
from te_models.planning.printable import Terminal

PAIRS = [("2 + 2", " = 4"), ("a", "ü"), ("Say nothing", ""), ("", "No prompt at all.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    file.write_text("".join(json.dumps(dict(prompt=p, completion=c)) + "\n" for p, c in PAIRS))
    return file


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.jsonl"
    lines = [
        f"{number} green bottles, hanging on the wall.".ljust(40 + number) for number in range(9)
    ]
    file.write_text("".join(json.dumps(dict(text=line)) + "\n" for line in lines))
    return file


def load(folder: Path, recipe: str | None = None) -> CausalLM:
    return CausalLM.from_pretrained(
        folder, device="cpu", engine="emulated", **({"recipe": recipe} if recipe else {})
    )


@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_the_loss_is_that_of_each_document_by_itself(
    kind: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, words, model = request.getfixturevalue(kind), load_tokenizer(folder), load(folder).eval()
    if kind == "text":  # all in one window, so that no document is cut
        path = tmp_path / "few.jsonl"
        path.write_text(
            "".join(request.getfixturevalue("text").read_text().splitlines(keepends=True)[:2])
        )
    total, tokens, size = 0.0, 0, 0
    answered = [
        document for document in load_documents(path) if document.prompt is None or document.text
    ]
    for document in answered:
        prompt, end = words.encode(document.prompt or ""), words.eos_token_id
        ids = torch.tensor([[*prompt, *words.encode(document.text), end]])
        start = max(1, len(prompt))
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
        tokens += ids.shape[1] - start
        size += len(document.text.encode()) - (not prompt)
    found = evaluate_recipes(
        lambda name: load(folder), [None], words, model="m", data=str(path), seq_len=96
    )
    (row,) = found.losses
    assert (row.recipe, row.tokens, row.text_bytes) == ("bf16", tokens, size)
    assert row.loss == pytest.approx(total / tokens, rel=1e-5)
    assert row.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert row.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_every_recipe_sees_the_same_tokens(folder: Path, text: Path) -> None:
    recipes, words = ["bf16", "delayed", "nvfp4"], load_tokenizer(folder)
    found = evaluate_recipes(
        lambda name: load(folder, name), recipes, words, model="m", data=str(text)
    )
    assert len({(row.tokens, row.text_bytes) for row in found.losses}) == 1
    assert len({row.loss for row in found.losses}) == 3
    assert [row.note for row in found.losses] == ["", "scales from 2 forward passes", ""]
    base, delayed, nvfp4 = (row.loss for row in found.losses)
    assert abs(delayed / base - 1) < 0.01
    assert f"{100 * (nvfp4 / base - 1):+.2f} %" in str(found) and "against bf16" in str(found)


def test_saved_scales_are_used_as_they_are(folder: Path, text: Path, tmp_path: Path) -> None:
    model = load(folder, "delayed")
    batches, _ = make_batches(load_documents(text), load_tokenizer(folder), model)
    assert calibrate(model, batches) and not calibrate(model, batches)
    scales = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    assert any((tensor != 1).any() for name, tensor in scales.items() if name.endswith(".scale"))
    model.save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert calibrate(loaded, batches) == ""
    assert all(torch.equal(tensor, fp8_state(loaded)[name]) for name, tensor in scales.items())


def test_a_recipe_that_cannot_run_is_a_row_among_others(
    folder: Path, text: Path, capsys: pytest.CaptureFixture
) -> None:
    options = [
        "--model",
        str(folder),
        "--data",
        str(text),
        "--device",
        "cpu",
        "--fp8-params",
        "--max-batches",
        "1",
    ]
    assert main(["evaluate", *options, "--recipes", "bf16,current"]) == 2
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert rows["bf16"].split()[1:5] == ["-"] * 4 and float(rows["current"].split()[1]) > 0
    assert "recipe bf16 was not run: " in err and len(err.splitlines()) == 1
    assert main(["evaluate", *options, "--recipes", "bf16"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_table_as_json(folder: Path, pairs: Path, capsys: pytest.CaptureFixture) -> None:
    options = [
        "--data",
        str(pairs),
        "--device",
        "cpu",
        "--batch-size",
        "2",
        "--seq-len",
        "16",
        "--json",
    ]
    assert main(["evaluate", "--model", str(folder), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == str(folder) and found["data"] == str(pairs) and found["scores"] == []
    assert set(found["losses"][0]) == {
        "recipe", "loss", "perplexity", "bits_per_byte", "tokens", "text_bytes", "seconds", "note"
    }  # fmt: skip


def test_scores_stand_side_by_side() -> None:
    scores = (Score("bf16", "piqa", "acc", 0.7, 0.01), Score("current", "piqa", "acc", 0.69))
    lines = [line.split() for line in str(Evaluation("m", "", (), scores)).splitlines()]
    assert lines == [
        ["m", "on", "tasks"],
        ["task", "bf16", "current"],
        ["piqa,", "acc", "0.7000", "±", "0.0100", "0.6900"],
    ]
    refused = Evaluation("m", "d", (RecipeLoss("bf16", note="why"),))
    losses: Any = refused.to_dict()["losses"]
    assert losses[0]["loss"] is None and refused.refused


@pytest.mark.parametrize(("recipe", "finds_scales"), [("current", False), ("delayed", True)])
def test_tasks_alone_read_records_only_to_find_scales(
    recipe: str, finds_scales: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read(path: str, *rest: Any) -> list[Document]:
        reads.append(path)
        too_long = Document("x" * 5000, prompt="?", name="long")
        return [Document("green bottles", prompt="?", name="short"), too_long]

    monkeypatch.setattr(evaluate_module, "read_documents", read)
    score = Score(recipe, "piqa", "acc", 0.7)
    found = evaluate_recipes(
        lambda name: load(folder, name),
        [recipe],
        load_tokenizer(folder),
        model="m",
        score=lambda model: [score],
    )
    assert bool(reads) == finds_scales
    # Nobody gave these records, so no line is about them.
    assert found.scores == (score,) and not found.losses and not found.remarks


def test_records_that_are_all_too_long_are_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(dict(prompt="x" * 30, completion="y")) + "\n")
    options = ["--data", str(one), "--device", "cpu", "--seq-len", "2", "--max-batches", "0"]
    assert main(["evaluate", "--model", str(folder), *options]) == 2
    assert "1 of 1 record is longer than seq_len=2" in capsys.readouterr().err


def test_advice_can_be_followed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """At the model's maximum, 96 tokens, no longer sequence is possible."""
    file = tmp_path / "long.jsonl"
    rows = (dict(prompt="x" * 500, completion="y"), dict(prompt="x", completion="y"))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for length, advice in (([], ""), (["--seq-len", "32"], "raise --seq-len, or ")):
        assert (
            main(
                [
                    "evaluate",
                    "--model",
                    str(folder),
                    "--device",
                    "cpu",
                    "--data",
                    str(file),
                    *length,
                ]
            )
            == 0
        )
        said = " ".join(capsys.readouterr().out.split())
        assert f"is left out: {advice}cut prompts with --truncate prompt" in said


def test_the_errors_are_the_projects_own(folder: Path) -> None:
    model, words = load(folder), load_tokenizer(folder)
    with pytest.raises(UsageError, match="batch_size"):
        make_batches(load_documents(None)[:1], words, model, batch_size=0)
    with pytest.raises(DataError, match="no such file"):
        evaluate_recipes(
            lambda name: model, [None], words, model="m", data=str(folder / "missing.jsonl")
        )


def test_bad_records_are_skipped_by_choice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [f'{{"prompt": "{n}", "completion": "{n}"}}' for n in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{", '{"x": 1}']))
    command = [
        "evaluate",
        "--model",
        "gated-nano",
        "--data",
        str(tmp_path / "a.jsonl"),
        "--seq-len",
        "16",
    ]
    command += ["--device", "cpu"]
    assert main(command) == 2
    assert "a.jsonl:5: not JSON" in capsys.readouterr().err
    assert main([*command, "--on-bad-record", "skip"]) == 0
    assert "2 bad records are skipped" in capsys.readouterr().out


@pytest.mark.filterwarnings("always")  # warnings are lines of the command
@pytest.mark.parametrize("command", ["evaluate", "parity", "export"])
def test_runs_in_the_folder_of_the_data_are_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and what is beside them is read."""
    monkeypatch.chdir(tmp_path)
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/run.toml").write_text("steps = 1\n")
    Path("runs/one/metrics.jsonl").write_text('{"step": 1}\n')
    Path("a.txt").write_text("Some text of a project.\n" * 9)
    options = {
        "evaluate": ["--max-batches", "1"],
        "parity": ["--export", "bf16", "--batches", "1"],
        "export": ["--format", "fp8-tensor", "--out", "out", "--batches", "1"],
    }
    model = ["--model", "gated-nano", "--device", "cpu", "--data", ".", "--seq-len", "16"]
    assert main([command, *model, *options[command]]) == 0
    printed = capsys.readouterr()
    line = ".: read without runs/one (runs or models)"
    assert (printed.out + printed.err).count(line) == 1


@pytest.mark.filterwarnings("always")  # warnings are lines of the command
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "evaluate --model gated-nano --device cpu --chat-template chatml",
        "data preview --chat-template chatml",
        "parity --model gated-nano --device cpu --export bf16 --batches 1",
        "export --model gated-nano --device cpu --format fp8-tensor --out out --batches 1",
    ],
)
def test_options_that_the_data_leaves_without_effect_are_named(
    command: str,
    records: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    Path("data").write_text(rows * 4 if records else "Some text of a project.\n" * 9)
    assert (
        main([*command.split(), "--data", "data", "--seq-len", "128", "--truncate", "prompt"]) == 0
    )
    printed = capsys.readouterr()
    said = printed.out + printed.err
    expected = 0 if records else 1
    assert said.count("--truncate prompt has no effect: the data is text") == expected
    template = "--chat-template has no effect on this data, which has no conversations\n"
    assert said.count(template) == (expected if "--chat-template" in command else 0)


def test_the_checkpoint_is_named_before_the_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def spinner(terminal: Terminal, line: str) -> None:
        said.append("spinner")
        raise UsageError("that is enough")

    monkeypatch.setattr(Terminal, "status", spinner)
    monkeypatch.setattr("te_models.cli.evaluate.show_choice", said.append)
    assert main(["evaluate", "--model", "gated-nano", "--data", "python-docstrings"]) == 2
    assert said == ["gated-nano", "spinner"]
