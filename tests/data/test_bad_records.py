"""Records that cannot be read end the run, or by choice are skipped and counted: in memory, streamed, in any file."""

import json
from pathlib import Path
from typing import Any

import pytest

from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.training_data import open_data
from te_models.errors import DataError, UsageError

GOOD = [{"prompt": f"{n}?", "completion": f"<{n}>"} for n in range(40)]
BAD = [
    '{"prompt": "q", "completion": ',  # broken JSON
    '["q", "a"]',
    '{"prompt": "q", "completion": 3}',
    '{"question": "q"}',
    '{"messages": [{"role": "narrator", "content": "x"}]}',
    '{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": 1}]}',
]
OTHER = '{"text": "of another kind than the first record"}'


def opened(path: object, **options: Any) -> Any:
    config = TrainConfig(steps=1, seq_len=64, batch_size=1)
    options = {"on_bad_record": "skip", "num_workers": 0, **options}
    return open_data(path, ByteTokenizer(), config, **options)[0]


def learned(dataset: Any, windows: int = 60) -> set[str]:
    """The answers in some windows."""
    found: set[str] = set()
    for _ in range(windows):
        row = next(dataset)["labels"][0]
        text = bytes(token if 0 <= token < 256 else 10 for token in row.tolist()).decode()
        found |= set(text.split())
    return found


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", [0, 20, 40])
def test_bad_lines_are_skipped_and_counted(place: int, streaming: bool, tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in GOOD]
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        "\n".join([*lines[:place], *BAD, *lines[place:], OTHER]).encode() + b"\n\xff\xfe\n"
    )
    with pytest.raises(DataError, match="--on-bad-record skip"):
        opened(str(file), on_bad_record="raise", streaming=streaming)
    dataset = opened(str(file), streaming=streaming)
    assert "8 bad records are skipped" in dataset.describe()
    assert f"skipped: {file}:{place + 1}: not JSON" in dataset.describe()
    assert dataset.describe().count("skipped: ") == 3
    answers = learned(dataset)
    assert len(answers) > 30
    assert answers <= {record["completion"] for record in GOOD}


def test_bad_rows_of_arrays_and_tables_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps([*GOOD, 3, {"prompt": "q", "completion": None, "images": ["x"]}])
    )
    assert "2 bad records are skipped" in opened(str(tmp_path / "a.json")).describe()
    rows = ["prompt,completion", *(f"{r['prompt']},{r['completion']}" for r in GOOD), "a,b,c"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    assert "1 bad record is skipped" in opened(str(tmp_path / "a.csv")).describe()


def test_bad_records_in_memory_are_skipped() -> None:
    rows: list[Any] = [3, {"x": 1}, *GOOD]
    dataset = opened(rows)
    assert "2 bad records are skipped" in dataset.describe()
    assert learned(dataset) <= {record["completion"] for record in GOOD}


@pytest.mark.parametrize("streaming", [False, True])
def test_records_that_the_template_refuses_are_skipped(streaming: bool, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role + ': ' + m.content + ' ' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"<{n}>"},
            ]
        }
        for n in range(40)
    ]
    for talk in talks[::4]:
        talk["messages"].insert(0, {"role": "system", "content": "s"})
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, talks)))
    options = {"streaming": streaming, "chat_template": str(template)}
    with pytest.raises(DataError, match="refuses this record: no system"):
        opened(str(file), on_bad_record="raise", eval_data=str(file), **options)
    dataset = opened(str(file), eval_data=str(file), **options)
    assert "bad records are skipped" in dataset.describe()
    assert "the chat template refuses this record: no system" in dataset.describe()
    expected = {f"<{n}>" for n in range(40) if n % 4}
    assert learned(dataset, 90) == expected


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(BAD[:4]))
    with pytest.raises(DataError, match=r"a.jsonl: no record is left: 4 bad records are skipped"):
        opened(str(file))
    with pytest.raises(UsageError, match="on_bad_record"):
        opened(str(file), on_bad_record="drop")
