"""open_data: sources of any format, the same in memory and streamed, with lines that describe them."""

import dataclasses
import gzip
import itertools
import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer, open_data
from te_models.cli.commands import main
from te_models.data import rows as rows_module
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.data.training_data import steps_of
from te_models.errors import DataError, UsageError
from te_models.model.targets import IGNORED

CONFIG = TrainConfig(seq_len=128, batch_size=2, eval_batches=2)
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": f"answer {n} " * (1 + n % 4)},
        ]
    }
    for n in range(24)
]
PAIRS = [{"prompt": f"p{n} ", "completion": f"c{n}"} for n in range(24)]
ALPACA = [{"instruction": f"do {n}", "input": "", "output": f"done {n}"} for n in range(24)]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"{n}"}, {"from": "gpt", "value": "yes"}]}
    for n in range(24)
]
TEXTS = [{"text": f"text {n} " * 20} for n in range(24)]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder: Path, name: str, rows: list[dict] | bytes) -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(rows, bytes):
        file.write_bytes(rows)
    elif name.endswith(".parquet"):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=5)
    elif name.endswith(".csv"):
        cells = [
            [json.dumps(v) if isinstance(v, list) else v for v in row.values()] for row in rows
        ]
        quoted = [
            ",".join('"' + cell.replace('"', '""') + '"' for cell in row)
            for row in [list(rows[0]), *cells]
        ]
        file.write_bytes(("\ufeff" + "\r\n".join(quoted)).encode())
    elif name.endswith(".json"):
        file.write_text(json.dumps(rows, indent=1))
    else:
        file.write_bytes(gzip.compress(jsonl(rows)) if name.endswith(".gz") else jsonl(rows))
    return str(file)


def documents(batch: dict) -> list[tuple[bytes, bytes]]:
    """The text and the counted text of each document of a batch, in bytes."""
    found = []
    for ids, labels, owners in zip(
        *(batch[n].tolist() for n in ("input_ids", "labels", "document_ids")), strict=True
    ):
        for owner in dict.fromkeys(owners):
            at = [i for i, other in enumerate(owners) if other == owner]
            text = bytes(ids[i] for i in at if ids[i] < 256)
            found.append((text, bytes(ids[i] for i in at if labels[i] != IGNORED and ids[i] < 256)))
    return [document for document in found if document[0]]


def epoch_of(dataset: TokenDataset) -> list[tuple[bytes, bytes]]:
    windows = dataset.windows_in(1)
    assert windows % dataset.batch_size == 0, "the test counts whole batches"
    return [
        found for _ in range(windows // dataset.batch_size) for found in documents(next(dataset))
    ]


SOURCES: dict[str, tuple[str, list[dict], str]] = {
    "messages": ("a.jsonl", TALKS, "messages (OpenAI) in JSONL"),
    "messages in an array": ("a.json", TALKS, "messages (OpenAI) in JSON"),
    "messages in Parquet": ("a.parquet", TALKS, "messages (OpenAI) in Parquet"),
    "messages in a table": ("a.csv", TALKS, "messages (OpenAI) in CSV"),
    "messages, compressed": ("a.jsonl.gz", TALKS, "messages (OpenAI) in JSONL"),
    "messages by another name": ("a.txt", TALKS, "messages (OpenAI) in text"),
    "ShareGPT": ("a.jsonl", SHAREGPT, "ShareGPT in JSONL"),
    "Alpaca": ("a.csv", ALPACA, "Alpaca in CSV"),
    "pairs": ("a.parquet", PAIRS, "prompt/completion in Parquet"),
    "text": ("a.json", TEXTS, "text in JSON"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_in_memory_and_streamed_records_are_the_same(case: str, tmp_path: Path) -> None:
    name, rows, described = SOURCES[case]
    path = write(tmp_path, name, rows)
    seen = []
    for streaming in (False, True):
        config = TrainConfig(seq_len=128, batch_size=1, eval_batches=1000, seed=3)
        dataset, evaluation = open_data(
            path, ByteTokenizer(), config, streaming=streaming, num_workers=0, eval_split=0.2
        )
        assert isinstance(dataset, StreamingDataset) == streaming
        assert f"\n{path}: {described}\n" in dataset.describe() + "\n"
        assert f"{path}: " in dataset.describe()
        assert all(bool((batch["labels"][:, 1:] != IGNORED).any()) for batch in evaluation)
        if case == "text":
            assert "document_ids" not in evaluation[0] and "document_ids" not in next(dataset)
            continue
        trained = {found for _ in range(60) for found in documents(next(dataset))}
        held = {found for batch in evaluation for found in documents(batch)}
        assert trained and held and not trained & held
        assert all(counted for _, counted in trained | held)
        seen.append(trained | held)
    assert case == "text" or (seen[0] == seen[1] and len(seen[0]) == len(rows))


def test_the_loss_counts_only_answers(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", TALKS)
    tokenizer = ByteTokenizer()
    dataset, _ = open_data(path, tokenizer, CONFIG)
    found = dict(document for _ in range(30) for document in documents(next(dataset)))
    assert (
        found[b"### User:\n5?\n\n### Assistant:\nanswer 5 answer 5 \n\n"] == b"answer 5 answer 5 "
    )
    assert (
        "the tokenizer has no chat template: a plain one is used, and saved with the model"
        in dataset.describe()
    )
    assert "chat_template.jinja" in tokenizer.documents()
    assert "no chat template" not in open_data(path, tokenizer, CONFIG)[0].describe()


def test_pairs_need_no_chat_template(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    dataset, _ = open_data(write(tmp_path, "a.jsonl", PAIRS), tokenizer, CONFIG)
    assert (b"p7 c7", b"c7") in {found for _ in range(9) for found in documents(next(dataset))}
    assert tokenizer.template_source() is None


NO_CUT = "--truncate prompt has no effect: the data is text, and only records are cut"
NO_TALK = (
    "--chat-template has no effect on this data, which has no conversations: the template is only "
    "saved with the model"
)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("rows", "lines"),
    [(TEXTS, {NO_CUT, NO_TALK}), (b"a text " * 900, {NO_CUT, NO_TALK}), (PAIRS, {NO_TALK}), (TALKS, set())],
)  # fmt: skip
def test_what_the_data_leaves_without_effect_is_told(
    rows: list[dict] | bytes, lines: set[str], streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path, "a.txt" if isinstance(rows, bytes) else "a.jsonl", rows)
    fixed: dict[str, Any] = dict(streaming=streaming, num_workers=0, eval_split=0)
    tokenizer = ByteTokenizer()
    dataset, _ = open_data(
        path, tokenizer, CONFIG, truncate="prompt", chat_template="chatml", **fixed
    )
    told = [line for line in dataset.describe().splitlines() if "has no effect" in line]
    assert len(told) == len(lines) and set(told) == lines
    assert "im_start" in str(tokenizer.template_source()), "which is saved"
    default, _ = open_data(path, ByteTokenizer(), CONFIG, **fixed)
    assert "no effect" not in default.describe(), "a default asks for nothing"


def test_built_in_records_have_their_own_evaluation() -> None:
    def told(**options: Any) -> str:
        return open_data("python-docstrings", ByteTokenizer(), CONFIG, **options)[0].describe()

    line = "--eval-split has no effect: python-docstrings has modules of its own to evaluate on"
    assert line in told(eval_split=0.2)
    assert line not in told(eval_split=0)
    assert line not in told()


def test_sources_with_weights_occur_as_often_as_they_say(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.jsonl", PAIRS), write(tmp_path, "b/c.jsonl", ALPACA)
    config = TrainConfig(seq_len=64, batch_size=1)
    evaluation = write(tmp_path, "e.jsonl", TALKS)
    dataset, _ = open_data(
        [f"{a}:3", str(Path(b).parent)],
        ByteTokenizer(),
        config,
        packing="documents",
        eval_data=[evaluation],
    )
    assert isinstance(dataset, TokenDataset)
    counts = Counter(text for text, _ in epoch_of(dataset))
    assert len(counts) == 48 and {counts[f"p{n} c{n}".encode()] for n in range(24)} == {3}
    assert sum(counts.values()) == 24 * 4
    assert f"{a}: prompt/completion in JSONL, 3 times per epoch" in dataset.describe()
    line = dataset.describe().splitlines()[
        0
    ]  # its records and tokens are those of the files, its windows not
    size = f"48 records, {dataset.num_tokens:,} tokens; with the weights, an epoch is {dataset.windows_in(1)} windows"
    assert line.startswith(size)
    streamed, _ = open_data(
        [f"{a}:3", b], ByteTokenizer(), config, eval_data=evaluation, streaming=True, num_workers=0
    )
    assert isinstance(streamed, StreamingDataset)
    order = Counter(streamed.order(0).tolist())
    assert order == {0: 1, 1: 1, 2: 1, 4: 1}, "the chunk of a, three times, and that of b"


def test_eval_data_is_what_is_evaluated(tmp_path: Path) -> None:
    path, held = write(tmp_path, "a.jsonl", PAIRS), write(tmp_path, "e.jsonl", PAIRS[:3])
    for streaming in (False, True):
        dataset, batches = open_data(
            path, ByteTokenizer(), CONFIG, eval_data=held, streaming=streaming, num_workers=0
        )
        assert {text for batch in batches for text, _ in documents(batch)} == {
            b"p0 c0",
            b"p1 c1",
            b"p2 c2",
        }
        assert f"evaluation on 3 records, 18 tokens, from {held}" in dataset.describe()


@pytest.mark.parametrize(("share", "count"), [(None, 1), (0.25, 6), (0.5, 12)])
def test_eval_split_is_a_share_of_the_records_that_fit(
    share: float | None, count: int, tmp_path: Path
) -> None:
    path = write(tmp_path, "a.jsonl", [*PAIRS, {"prompt": "p", "completion": "c" * 500}])
    dataset, _ = open_data(path, ByteTokenizer(), CONFIG, eval_split=share)
    assert f"evaluation on {count} record" in dataset.describe()
    assert dataset.describe().startswith(f"{24 - count} records")
    assert (
        "1 of 25 records is longer than seq_len=128 (the longest has 502 tokens)"
        in dataset.describe()
    )


def test_too_little_data_for_a_batch_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", PAIRS[:4])
    config = TrainConfig(seq_len=128, batch_size=4, gradient_accumulation=2)
    said = open_data(path, ByteTokenizer(), config)[0].describe()
    assert "too little data for a batch: a step takes 8 windows and an epoch has 1" in said
    assert (
        "too little"
        not in open_data(path, ByteTokenizer(), TrainConfig(seq_len=128, batch_size=1))[
            0
        ].describe()
    )


@pytest.mark.parametrize(("epochs", "steps"), [(0.0, 300), (1.0, 3), (2.5, 8), (0.01, 1)])
def test_epochs_as_steps(epochs: float, steps: int, tmp_path: Path) -> None:
    config = TrainConfig(seq_len=8, batch_size=4, gradient_accumulation=2, epochs=epochs)
    path = write(tmp_path, "a.jsonl", PAIRS)
    dataset, _ = open_data(path, ByteTokenizer(), config, packing="none")
    assert dataset.windows_in(1) == 23 and steps_of(dataset, config) == steps
    if epochs:
        streamed, _ = open_data(path, ByteTokenizer(), config, streaming=True, num_workers=0)
        with pytest.raises(UsageError, match="--epochs needs data in memory"):
            steps_of(streamed, config)


def test_a_part_of_an_epoch_is_the_decimal_number_that_was_written(tmp_path: Path) -> None:
    path, other = write(tmp_path, "a.txt", b"x" * 799), write(tmp_path, "b.txt", b"y" * 9)
    dataset, _ = open_data(
        path, ByteTokenizer(), TrainConfig(seq_len=8, batch_size=1), eval_data=other
    )
    assert isinstance(dataset, TokenDataset) and dataset.num_windows == 100
    for hundredths in range(1, 1000):
        assert dataset.windows_in(float(f"{hundredths / 100:.2f}")) == hundredths


def test_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", [{"question": f"q{n} ", "answer": f"a{n}"} for n in range(9)])
    columns = "prompt=question,completion=answer"
    for streaming in (False, True):
        dataset, _ = open_data(
            path, ByteTokenizer(), CONFIG, columns=columns, streaming=streaming, num_workers=0
        )
        assert (b"q4 a4", b"a4") in {found for _ in range(9) for found in documents(next(dataset))}
    other = write(tmp_path, "b.jsonl", PAIRS)
    _, batches = open_data([path, other], ByteTokenizer(), CONFIG, columns=columns, eval_data=path)
    assert (b"q4 a4", b"a4") in documents(batches[0])
    with pytest.raises(UsageError, match="--columns: the first records of .* have no 'body'"):
        open_data(other, ByteTokenizer(), CONFIG, columns="text=body")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """The calls of a `datasets` package that has one dataset."""
    datasets = pytest.importorskip("datasets")
    calls: list[tuple] = []
    talks = datasets.Dataset.from_list(TALKS)

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        calls.append((name, config, split))
        if name != "owner/talks":
            raise FileNotFoundError(f"Couldn't find any\ndata in {name}")
        return talks

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows_module._hub_dataset.cache_clear()
    yield calls
    rows_module._hub_dataset.cache_clear()


def test_hub_datasets(hub: list[tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for streaming in (False, True):
        dataset, _ = open_data(
            ["owner/talks:2", "owner/talks#train_sft", "owner/talks#en/test"], ByteTokenizer(), CONFIG,
            streaming=streaming, num_workers=0,
        )  # fmt: skip
        assert (
            "owner/talks: messages (OpenAI) in Hub dataset, 2 times per epoch" in dataset.describe()
        )
        assert documents(next(dataset))
    assert set(hub) == {
        ("owner/talks", None, "train"), ("owner/talks", None, "train_sft"), ("owner/talks", "en", "test"),
    }  # fmt: skip
    with pytest.raises(
        DataError,
        match="owner/none: no such file or folder, and no dataset of the Hub that can be read",
    ):
        open_data("owner/none", ByteTokenizer(), CONFIG)


RESUMED: dict[str, dict[str, Any]] = {
    "in memory": dict(weight=":2.5"),
    "streamed": dict(streaming=True, num_workers=0, weight=":2.5"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_same_bits(case: str, tmp_path: Path) -> None:
    options = dict(RESUMED[case])
    weight = options.pop("weight", "")
    paths = [write(tmp_path, "a.jsonl", TALKS) + weight, write(tmp_path, "b.csv", ALPACA)]
    shape = dict(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        max_position_embeddings=128,
    )
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)

    def train(
        out: str, steps: int, resume: bool = False
    ) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        config = TrainConfig(
            seq_len=96,
            batch_size=2,
            eval_batches=1,
            steps=steps,
            warmup_steps=0,
            schedule="constant",
        )
        newest = tmp_path / out / "checkpoints" / "step-00000003"
        tokenizer = load_tokenizer(newest) if resume else ByteTokenizer()
        dataset, evaluation = open_data(paths, tokenizer, config, **options)
        torch.manual_seed(0)
        model = CausalLM.from_preset(
            "gated-nano", device="cpu", engine="emulated", recipe="bf16", **shape
        )
        rows: list[dict] = []
        trainer = Trainer(
            model, dataset, evaluation, config, tmp_path / out, documents=tokenizer.documents()
        )
        trainer.on_step = rows.append
        trainer.run(resume=resume)
        return [row["loss"] for row in rows], model.state_dict(), dataset.state_dict()

    straight, weights, position = train("straight", 6)
    first, *_ = train("parted", 3)
    second, again, same = train("parted", 6, resume=True)
    assert first + second == straight and all(loss > 0 for loss in straight)
    assert position == same
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (tmp_path / "straight/checkpoints/step-00000006/chat_template.jinja").is_file()


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no file": ({}, ["--data", "none.jsonl"], "none.jsonl: no such file or folder"),
    "an unknown format later": (
        {"a.jsonl": [*PAIRS, {"q": "x"}]}, [], "a.jsonl:25: has 'q', but needs one of the formats",
    ),
    "a record among texts": (
        {"a.jsonl": [*TEXTS, PAIRS[0]]}, [], "a.jsonl:25: a record with an answer, where the first record",
    ),
    "a text among records": (
        {"a.jsonl": [*PAIRS, TEXTS[0]]}, [], "a.jsonl:25: a text, where the first record of the data has an answer",
    ),
    "a text among records of another file": (
        {"a.jsonl": PAIRS, "b.jsonl": TEXTS}, ["--data", "."], "b.jsonl:1: a text, where the first record",
    ),
    "text files among records": (
        {"a.jsonl": PAIRS, "notes.txt": b"notes"}, ["--data", "."],
        "notes.txt: a text file among records of the format",
    ),
    "answers in a stream": ({"a.jsonl": PAIRS}, ["--packing", "stream"], "packing stream would cut answers"),
    "an unknown packing": ({"a.jsonl": PAIRS}, ["--packing", "dense"], "unknown packing 'dense'"),
    "an unknown way to truncate": ({"a.jsonl": PAIRS}, ["--truncate", "answer"], "unknown truncate 'answer'"),
    "nothing fits": ({"a.jsonl": TALKS}, ["--seq-len", "8"], "24 of 24 records are longer than seq_len=8"),
    "answers that are too long": (
        {"a.jsonl": [{"prompt": f"{n}?", "completion": "long" * 9} for n in range(24)]}, ["--truncate", "prompt"],
        "longer than seq_len=32 (even without what comes before the first answer, the longest has 40 tokens) and are "
        "left out: raise --seq-len\n",
    ),
    "half an answer": (
        {"a.jsonl": [{"messages": [*TALKS[0]["messages"][:1], {"role": "assistant", "content": "x", "weight": 0.5}]}]},
        [], "a.jsonl:1: message 2 of 'messages' has the weight '0.5': an answer counts in full (1) or not (0)",
    ),
    "no answers": (
        {"a.jsonl": [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(9)]}, [],
        "no record is left: 9 of 9 records have no answer to learn and are left out: give each an assistant's message",
    ),
    "one record": ({"a.jsonl": PAIRS[:1]}, [], "1 record cannot be split"),
    "one record that fits": (
        {"a.jsonl": [*PAIRS[:1], *({"prompt": f"{n} " * 20, "completion": "c"} for n in range(24))]}, [],
        "1 record cannot be split into training and evaluation: give at least two different ones, or --eval-data; "
        "24 of 25 records are longer than seq_len=32 (the longest has 62 tokens) and are left out: raise --seq-len",
    ),
    **{
        f"a weight of {weight}": (
            {"a.jsonl": PAIRS}, ["--data", f"a.jsonl:{weight}"], f"the weight {shown} is out of range: give above 0",
        )
        for weight, shown in {"0": "0", "-1": "-1", "1e9": "1e+09", "nan": "nan", "inf": "inf", "1001": "1001"}.items()
    },
    "a share of all": ({"a.jsonl": PAIRS}, ["--eval-split", "1"], "eval_split=1.0 is out of range"),
    "a share beside evaluation data": (
        {"a.jsonl": PAIRS}, ["--eval-split", "0.1", "--eval-data", "a.jsonl"], "eval_data replaces it: give one",
    ),
    "no evaluation data": ({"a.jsonl": PAIRS}, ["--eval-data", "e.jsonl"], "e.jsonl: no such file"),
    "evaluation data that does not fit": (
        {"a.jsonl": PAIRS, "e.jsonl": [{"prompt": "p" * 99, "completion": "c"}]}, ["--eval-data", "e.jsonl"],
        "evaluation data: no record is left: 1 of 1 record is longer than seq_len=32",
    ),
    "semicolons": (
        {"a.csv": b"prompt;completion\n1;2\n"}, ["--data", "a.csv"],
        "a.csv:1: the columns are separated by semicolons: save the table with commas",
    ),
    "a column twice": (
        {"a.csv": b"prompt,completion,completion\n1,2,3\n"}, ["--data", "a.csv"],
        "a.csv:1: 'completion' is the name of more than one column: rename all but one",
    ),
    "an object around the records, on lines": (
        {"a.json": json.dumps({"data": PAIRS}, indent=1).encode()}, ["--data", "a.json"],
        "a .json file is an array of objects, [{...}, ...], with nothing around it",
    ),
    "preferences": (
        {"a.jsonl": [{"prompt": "p", "chosen": "c", "rejected": "r"}]}, [],
        "a preference (chosen, rejected): to train on the better answers give --columns completion=chosen",
    ),
    "preferences of conversations": (
        {"a.jsonl": [{"chosen": TALKS[0]["messages"], "rejected": TALKS[1]["messages"]}]}, [],
        "give --columns messages=chosen",
    ),
    "a misspelled column": (
        {"a.jsonl": [{"question": "q", "answer": "a"}]}, ["--columns", "prompt=question,completion=answr"],
        "--columns completion=answr: there is no 'answr': did you mean 'answer'?",
    ),
    "a misspelled column that may be left out": (
        {"a.jsonl": [{"instruction": "q", "output": "a", "context": "c"}]}, ["--columns", "input=contxt"],
        "--columns input=contxt: there is no 'contxt': did you mean 'context'?",
    ),
    "a misspelled field of turns": (
        {"a.jsonl": [{"messages": [{"speaker": "user", "words": "w"}]}]}, ["--columns", "role=speeker,content=words"],
        "did you mean 'speaker'?",
    ),
    "no columns": (
        {"a.jsonl": PAIRS}, ["--columns", "text=body"], "--columns: the first records of a.jsonl have no 'body'",
    ),
    "no template": ({"a.jsonl": TALKS}, ["--chat-template", "none.jinja"], "none.jinja: no such file"),
    "no Jinja": (
        {"a.jsonl": TALKS, "bad.jinja": b"{% if %}"}, ["--chat-template", "bad.jinja"],
        "the chat template is not valid Jinja",
    ),
    "a chat to evaluate on, of texts": (
        {"a.jsonl": TEXTS, "e.jsonl": TALKS}, ["--eval-data", "e.jsonl"],
        "e.jsonl:1: a record with an answer, where the first record of the data is text",
    ),
    "a seed beyond all": ({"a.jsonl": PAIRS}, ["--seed", str(2**70)], "is out of range: give less than 2**63"),
    "an object around the records, and its version": (
        {"a.json": json.dumps({"version": 1, "data": PAIRS}).encode()}, ["--data", "a.json"],
        "one object around the records: write the list 'data' alone",
    ),
    "half of a pair of processes": (
        {"a.jsonl": PAIRS}, ["--sequence-parallel"], "is only for --parallel tp and fsdp+tp: leave it out",
    ),
    "epochs and steps": ({"a.jsonl": PAIRS}, ["--steps", "3", "--epochs", "1"], "give one of them"),
}  # fmt: skip


STREAMED_MESSAGES = {  # where the data is not read as a whole before the run
    "nothing fits": "a.jsonl: no record is left: 23 of 23 records are longer than seq_len=8",
    "no answers": "a.jsonl: no record is left: 8 of 8 records have no answer to learn and are left out: give",
    "answers that are too long": "a.jsonl: no record is left: 23 of 23 records are longer than seq_len=32 (even",
    "one record": "a.jsonl: none of its documents is reserved for evaluation",
    "one record that fits": "evaluation data: no record is left: 1 of 1 record is longer than seq_len=32",
}


@pytest.mark.parametrize(("case", "streaming"), every(2, REFUSED, [False, True]))
def test_bad_input_is_one_line_with_exit_code_2(
    case: str,
    streaming: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    files, arguments, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    for name, rows in files.items():
        write(tmp_path, name, rows)
    given = arguments if "--data" in arguments else ["--data", "a.jsonl", *arguments]
    command = [
        "pretrain",
        "--preset",
        "gated-nano",
        "--device",
        "cpu",
        "--seq-len",
        "32",
        *given,
        "--out",
        "run",
    ]
    command += ["--streaming", "--data-workers", "0", "--eval-batches", "1000"] if streaming else []
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("te-models: ") and error.count("\n") == 1
    expected = STREAMED_MESSAGES.get(case, message) if streaming else message
    assert expected in error
    assert not (tmp_path / "run").exists(), "nothing was written"


EMPTY: dict[str, Any] = {
    "pairs": [{"prompt": f"{n}?", "completion": ("", " ", None, f"<{n}>")[n % 4]} for n in range(40)],
    "messages in Parquet": [
        {"messages": [
            {"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": (None, None, None, f"<{n}>")[n % 4]},
        ]}
        for n in range(40)
    ],
}  # fmt: skip


@pytest.mark.parametrize("packing", ["documents", "none"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", EMPTY)
def test_empty_answers_are_not_learned(
    case: str, streaming: bool, packing: str, tmp_path: Path
) -> None:
    """30 of 40 records have none; the tokens that the loss counts are 10 answers and their ends."""
    path, config, tokenizer = (
        write(tmp_path, "a.parquet" if "Parquet" in case else "a.jsonl", EMPTY[case]),
        TrainConfig(seq_len=96, batch_size=1),
        ByteTokenizer(),
    )
    options: dict[str, Any] = dict(
        streaming=streaming, packing=packing, num_workers=0, eval_data=(str(path),)
    )
    dataset, evaluation = open_data(path, tokenizer, config, **options)
    assert "30 of 40 records have no answer to learn and are left out" in dataset.describe()
    for batch in [*evaluation, *(next(dataset) for _ in range(20))]:
        learned = batch["labels"][batch["labels"] != IGNORED].tolist()
        assert learned.count(tokenizer.eos_token_id) == tokenizer.decode(learned).count(">") > 0


def test_the_first_token_of_a_record_is_not_counted(tmp_path: Path) -> None:
    """Of four tokens with no prompt before them, three are predicted."""
    path = write(tmp_path, "a.jsonl", [{"prompt": "", "completion": f"a{n}c"} for n in range(10)])
    for packing in ("documents", "none"):
        config = TrainConfig(seq_len=8, batch_size=1)
        dataset, _ = open_data(path, ByteTokenizer(), config, packing=packing, eval_split=0.1)
        assert isinstance(dataset, TokenDataset)
        windows = [next(dataset)["labels"][:, 1:] for _ in range(dataset.windows_in(1))]
        assert sum(int((labels != IGNORED).sum()) for labels in windows) == 27
        assert "the loss counts 27 tokens, 75% of all" in dataset.describe()


def test_many_epochs_are_counted_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", PAIRS)
    dataset, _ = open_data(path, ByteTokenizer(), TrainConfig(seq_len=32, batch_size=1))
    assert isinstance(dataset, TokenDataset)
    sixteen = dataset.windows_in(16)
    assert sixteen == sum(dataset._shuffled(epoch).num_windows for epoch in range(16))
    assert dataset.windows_in(1e12) == sixteen * 10**12 // 16


def test_an_empty_list_of_paths_is_not_the_default() -> None:
    """As of a glob that finds nothing: None means Python's own documentation."""
    with pytest.raises(UsageError, match="no data in the list: give a path, or None"):
        open_data([], load_tokenizer(None), TrainConfig())


OWN = {"messages": TALKS, "pairs": PAIRS, "alpaca": ALPACA, "sharegpt": SHAREGPT, "text": TEXTS}


def same_data(one: tuple, other: tuple) -> bool:
    """Return whether two datasets give the same batches, and are evaluated on the same ones."""
    found = []
    for data, evaluated in (one, other):
        start = data.state_dict()
        found.append([*itertools.islice(data, 5), *evaluated])
        data.load_state_dict(start)
    first, second = found
    return len(first) == len(second) and all(
        torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a
    )


@pytest.mark.parametrize("kind", OWN)
def test_records_in_memory_are_those_of_a_file(kind: str, tmp_path: Path) -> None:
    rows, words = OWN[kind], ByteTokenizer()
    wanted = open_data(write(tmp_path, "a.jsonl", rows), words, CONFIG)
    for data in (rows, tuple(rows), iter(rows), (row for row in rows)):
        assert same_data(open_data(data, ByteTokenizer(), CONFIG), wanted)
    dataset = open_data(rows, ByteTokenizer(), CONFIG)[0]
    assert dataset.describe().splitlines()[1].startswith("the data in memory: "), dataset.describe()
    held = write(tmp_path, "held.jsonl", rows[:4])
    by_file = open_data(rows, ByteTokenizer(), CONFIG, eval_data=held)
    assert same_data(open_data(rows, ByteTokenizer(), CONFIG, eval_data=rows[:4]), by_file)
    assert same_data(
        open_data(write(tmp_path, "b.jsonl", rows), words, CONFIG, eval_data=rows[:4]), by_file
    )


def test_a_dataset_of_the_datasets_library_is_records(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for rows in (TALKS, PAIRS, TEXTS):
        wanted = open_data(write(tmp_path, "a.jsonl", rows), ByteTokenizer(), CONFIG)
        assert same_data(
            open_data(datasets.Dataset.from_list(rows), ByteTokenizer(), CONFIG), wanted
        )
    with pytest.raises(UsageError, match="one split of a DatasetDict"):
        open_data(
            datasets.DatasetDict(train=datasets.Dataset.from_list(TEXTS)), ByteTokenizer(), CONFIG
        )


ROWS = [{"q": f"p{n} ", "a": f"c{n}"} for n in range(24)]
FORMATTED: dict[str, tuple] = {
    "pairs": (lambda row: {"prompt": row["q"], "completion": row["a"]}, PAIRS),
    "text": (lambda row: row["q"] + row["a"], [{"text": row["q"] + row["a"]} for row in ROWS]),
    "messages": (
        lambda row: [
            {"role": "user", "content": row["q"]},
            {"role": "assistant", "content": row["a"]},
        ],
        [
            {
                "messages": [
                    dict(role="user", content=r["q"]),
                    dict(role="assistant", content=r["a"]),
                ]
            }
            for r in ROWS
        ],
    ),
}


@pytest.mark.parametrize("kind", FORMATTED)
def test_a_function_makes_records(kind: str) -> None:
    formatting, rows = FORMATTED[kind]
    config = dataclasses.replace(CONFIG, seq_len=48)
    wanted = open_data(rows, ByteTokenizer(), config, eval_data=rows[:3])
    found = open_data(ROWS, ByteTokenizer(), config, formatting=formatting, eval_data=ROWS[:3])
    assert same_data(found, wanted)
    assert same_data(open_data(ROWS, ByteTokenizer(), config, columns="prompt=q,completion=a", eval_data=PAIRS[:3]),
                     open_data(PAIRS, ByteTokenizer(), config, eval_data=PAIRS[:3]))  # fmt: skip


def test_a_tokenizer_may_be_a_name(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    for name in (tmp_path, str(tmp_path)):
        assert same_data(open_data(PAIRS, name, CONFIG), open_data(PAIRS, ByteTokenizer(), CONFIG))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([3, 4], {}, "record 1 is a int: give a dict"),
        (iter(["text"]), {}, "record 1 is a str: give a dict"),
        (iter([]), {}, "the data in memory has no record"),
        ([{"question": "a"}], {}, "record 1: has 'question', but needs one of the formats"),
        ([*PAIRS, {"prompt": 3, "completion": "x"}], {}, "record 25: 'prompt' is a number"),
        (PAIRS[0], {}, "the data in memory is a dict: give a list of records"),
        (
            ROWS,
            dict(formatting=lambda row: 3),
            "record 1: formatting returned a int: return a text",
        ),
        ("a.jsonl", dict(formatting=str), "formatting is for records in memory"),
        (ROWS, dict(columns="prompt=qq,completion=a"), "did you mean .q."),
        (PAIRS, dict(streaming=True), "--streaming needs --data PATH"),
        ("python-docstrings", dict(streaming=True), "--streaming needs --data PATH"),
        ([PAIRS[0], TEXTS[0]], {}, "text"),
    ],
)
def test_a_mistake_in_records_is_one_line(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, UsageError), match=message) as caught:
        open_data(data, ByteTokenizer(), CONFIG, **options)
    assert "\n" not in str(caught.value)


def test_pythons_documentation_has_a_name() -> None:
    config = TrainConfig(steps=1, seq_len=64, batch_size=1, eval_batches=1)
    named, _ = open_data("python-docs", ByteTokenizer(), config)
    default, _ = open_data(None, ByteTokenizer(), config)
    assert named.describe() == default.describe() and named.fingerprint == default.fingerprint


@pytest.mark.parametrize(
    ("streaming", "source"), every(2, [False, True], ["texts", "pairs", "one", "built-in"])
)
def test_eval_split_0_turns_evaluation_off(streaming: bool, source: str, tmp_path: Path) -> None:
    """All of the data is trained on; of built-in data the part for evaluation is left out."""
    if source == "built-in" and streaming:
        pytest.skip("it is there as a whole")
    pairs = [dict(prompt=f"number {n} is ", completion=f"{n}.") for n in range(30)]
    path = tmp_path / ("records.jsonl" if source == "pairs" else "text.txt")
    lines = [json.dumps(pair) for pair in pairs] if source == "pairs" else ["a text, " * 60]
    path.write_text("\n".join(lines) + "\n")
    if source == "texts":
        (tmp_path / "other.txt").write_text("another text, " * 60)
    data = {"built-in": "python-docstrings", "texts": tmp_path}.get(source, path)
    options: dict[str, Any] = dict(streaming=streaming, num_workers=0)
    dataset, batches = open_data(data, ByteTokenizer(), CONFIG, eval_split=0, **options)
    assert batches == [] and "no evaluation" in dataset.describe()
    if not streaming and source != "built-in":
        assert dataset.num_documents == (len(pairs) if source == "pairs" else 1 + (source == "texts"))  # fmt: skip
    assert next(iter(dataset))["input_ids"].shape == (CONFIG.batch_size, CONFIG.seq_len)
    held_out = tmp_path / "held.txt"
    held_out.write_text("held out " * 100)
    if source in ("texts", "one"):
        _, batches = open_data(path, ByteTokenizer(), CONFIG, eval_split=0, eval_data=held_out, **options)  # fmt: skip
        assert batches
