"""Marks of what is not to be learned: honoured, refused, or named as ignored, in every format and kind of file."""

import json
from pathlib import Path
from typing import Any

import pytest

from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.formats import row_document
from te_models.data.training_data import open_data
from te_models.errors import DataError
from te_models.model.targets import IGNORED

BAD = {"role": "assistant", "content": "BAD"}
GOOD = {"role": "assistant", "content": "good"}
ASK = {"role": "user", "content": "q"}


def learned(record: dict[str, Any], **options: Any) -> str:
    """What the loss counts of a record."""
    config = TrainConfig(steps=1, seq_len=256, batch_size=1)
    dataset, _ = open_data([record], ByteTokenizer(), config, eval_data=[record], **options)
    labels = next(dataset)["labels"][0].tolist()
    return bytes(token for token in labels if token != IGNORED and token < 256).decode()


@pytest.mark.parametrize(
    ("mark", "value"),
    [
        ("weight", 0),
        ("weight", 0.0),
        ("loss_weight", 0),
        ("loss_scale", 0.0),
        ("loss", False),
        ("train", False),
        ("training", 0),
        ("trainable", False),
        ("masked", True),
    ],
)
def test_a_turn_that_is_marked_is_not_learned(mark: str, value: object) -> None:
    turns = [ASK, {**BAD, mark: value}, ASK, GOOD]
    assert learned({"messages": turns}) == "good"
    sharegpt = [{"from": t["role"], "value": t["content"], **t} for t in turns]
    for turn in sharegpt:
        del turn["role"], turn["content"]
    assert learned({"conversations": sharegpt}) == "good"
    assert learned({"prompt": [ASK], "completion": turns[1:]}) == "good"


@pytest.mark.parametrize("mark", ["weight", "loss", "train", "trainable"])
def test_a_mark_that_says_yes_changes_nothing(mark: str) -> None:
    assert learned({"messages": [ASK, {**GOOD, mark: True, "masked": False}]}) == "good"
    assert learned({"messages": [{**ASK, "masked": False, "weight": 1}, GOOD]}) == "good"


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({**GOOD, "loss": 0.5}, "has '0.5' as 'loss': give true or false"),
        ({**GOOD, "masked": "yes"}, "has 'yes' as 'masked': give true or false"),
        ({**GOOD, "weight": 0.5}, r"has the weight '0.5': an answer counts in full \(1\) or not \(0\)"),
        ({**GOOD, "train": True, "masked": True}, "marks that contradict each other: 'train' and 'masked'"),
        ({**ASK, "train": True}, "has 'train': true, but is of the user: only what the assistant says is learned"),
        ({**GOOD, "train_detail": [{"train": True}]}, "has 'train_detail', marks of parts of an answer"),
        ({**ASK, "images": ["a.png"]}, "has 'images': only text can be learned"),
    ],
)  # fmt: skip
def test_marks_that_cannot_be_are_refused(turn: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        row_document({"messages": [ASK, turn]}, {}, "a.jsonl:1", "a.jsonl")
    assert str(caught.value).startswith("a.jsonl:1: message 2 of 'messages' ")


RECORDS: list[dict[str, Any]] = [
    {"prompt": "q", "completion": "BAD"},
    {"prompt": [ASK], "completion": [BAD]},
    {"messages": [ASK, BAD]},
    {"instruction": "q", "output": "BAD"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "BAD"}]},
]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    "mark", [{"label": False}, {"label": 0}, {"label": "False"}, {"train": False}, {"weight": 0}]
)
def test_a_bad_answer_is_left_out_and_counted(record: dict[str, Any], mark: dict[str, Any]) -> None:
    config = TrainConfig(steps=1, seq_len=256, batch_size=1)
    rows = [{**record, **mark}, record | dict.fromkeys(mark, True)]
    dataset, _ = open_data(rows, ByteTokenizer(), config, eval_data=[record])
    assert "1 of 2 records has no answer to learn and is left out" in dataset.describe()
    assert "ignored" not in dataset.describe()
    assert learned(record) == "BAD"


def test_a_class_of_a_text_is_no_mark() -> None:
    found = row_document({"text": "word", "label": 0}, {}, "a:1", "a")
    assert found.learned and found.ignored == ("'label'",)


@pytest.mark.parametrize("record", RECORDS)
def test_records_with_images_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a:1 has 'images': only text can be learned"):
        row_document({**record, "images": ["a.png"]}, {}, "a:1", "a")
    row_document({**record, "images": [], "videos": None}, {}, "a:1", "a")


TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}"
    "{% if m.role == 'user' and enable_thinking is false %}{{ '(no thoughts)' }}{% endif %}{% endfor %}"
)


def test_variables_of_the_template_are_given_to_it(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    record = {"messages": [ASK, GOOD], "chat_template_kwargs": {"enable_thinking": False}}
    config = TrainConfig(steps=1, seq_len=64, batch_size=1)
    for row, said in ((record, True), ({"messages": [ASK, GOOD]}, False)):
        dataset, _ = open_data(
            [row], ByteTokenizer(), config, eval_data=[row], chat_template=str(tmp_path / "t.jinja")
        )
        text = bytes(token for token in next(dataset)["input_ids"][0].tolist() if token < 256)
        assert (b"(no thoughts)" in text) == said
        assert "ignored" not in dataset.describe()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "'chat_template_kwargs' is no object"),
        ({"messages": []}, "'chat_template_kwargs' has 'messages', which is no variable"),
        ({"add_generation_prompt": True}, "has 'add_generation_prompt', which is no variable"),
    ],
)
def test_variables_that_are_none_are_refused(value: object, message: str) -> None:
    row = {"messages": [ASK, GOOD], "chat_template_kwargs": value}
    with pytest.raises(DataError, match=message):
        row_document(row, {}, "a:1", "a")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_ignored_fields_are_named_once_per_file(
    suffix: str, streaming: bool, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        rows = [{"prompt": f"{n}{name}", "completion": "c", "score": str(n), "rejected_response": "r"}
                for n in range(1, 30)]  # fmt: skip
        file = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(
                pyarrow.Table.from_pylist(rows), file
            )
        elif suffix == "csv":
            lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
            file.write_text("\n".join(lines))
        elif suffix == "json":
            file.write_text(json.dumps(rows))
        else:
            file.write_text("\n".join(map(json.dumps, rows)))
    config = TrainConfig(steps=1, seq_len=64, batch_size=1)
    dataset, _ = open_data(
        str(tmp_path), ByteTokenizer(), config, streaming=streaming, num_workers=0
    )
    lines = [line for line in dataset.describe().splitlines() if "ignored fields" in line]
    expected = [
        f"{tmp_path / name}.{suffix}: ignored fields: 'score', 'rejected_response'"
        for name in ("a", "b")
    ]
    # Streamed, what is said is of the first chunk, which may hold one of the files or both.
    assert lines == expected or (streaming and lines and set(lines) <= set(expected))


def test_ignored_fields_of_turns_are_named() -> None:
    turns = [{**ASK, "timestamp": 3}, {**GOOD, "annotations": None, "author": "x"}]
    found = row_document({"messages": turns, "id": 1, "note": ""}, {}, "a:1", "a")
    assert found.ignored == ("'id'", "'timestamp' of turns", "'author' of turns")
    assert "timestamp" not in str(found.conversation)
