"""`te-models data preview` marks what the batches of a run count, and counts what a run leaves out."""

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
from chat_model import write_chat_model

from te_models.cli.commands import main
from te_models.config.data import DataConfig
from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.tokenizer import load_tokenizer
from te_models.data.tokenizer_base import Tokenizer
from te_models.data.training_data import open_data
from te_models.errors import DataError, UsageError
from te_models.inspect.data_preview import CUT, LEARNED, Preview, preview
from te_models.inspect.data_preview_html import preview_html
from te_models.model.targets import IGNORED

ASK = {"role": "user", "content": "q\u00e9\U0001f600?"}
REPLY = {"role": "assistant", "content": "\U0001f600 yes <b>&"}
KINDS: dict[str, list[dict[str, Any]]] = {
    "pairs": [{"prompt": f"{n}\u00e9", "completion": f" \U0001f600{n}"} for n in range(12)],
    "chats": [
        {"messages": [ASK, {**REPLY, "train": n % 2 == 0}, ASK, {**REPLY, "content": f"{n}"}]} for n in range(12)
    ],
    "long": [{"prompt": "p" * 20 * n, "completion": "c"} for n in range(1, 13)],
    "empty": [{"prompt": f"{n}", "completion": "a" if n % 3 else ""} for n in range(12)],
}  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(folder / "a.jsonl")


def tokenizers(folder: Path) -> list[Tokenizer]:
    return [ByteTokenizer(), load_tokenizer(write_chat_model(folder / "model"))]


@pytest.mark.parametrize("truncate", ["drop", "prompt"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_marked_is_what_the_batches_count(kind: str, truncate: str, tmp_path: Path) -> None:
    path = write(tmp_path, KINDS[kind])
    seq_len = 160 if kind == "chats" else 64
    for number, (mine, theirs) in enumerate(
        zip(tokenizers(tmp_path), tokenizers(tmp_path), strict=True)
    ):
        settings = DataConfig(data=path, truncate=truncate)
        found = preview(settings, mine, seq_len, records=12)
        config = TrainConfig(steps=1, seq_len=seq_len, batch_size=1, eval_batches=99)
        _, batches = open_data(
            path, theirs, config, eval_data=path, packing="none", truncate=truncate
        )
        expected = []
        for batch in batches:
            ids = batch["input_ids"][0].tolist()
            labels = batch["labels"][0].tolist()
            kept = [
                token
                for token, document in zip(ids, batch["document_ids"][0].tolist(), strict=True)
                if document >= 0
            ]
            expected.append(
                (theirs.spell(kept), theirs.spell([label for label in labels if label != IGNORED]))
            )
        shown = []
        for record in found.records:
            if not record.left_out:
                text = "".join(part.text for part in record.parts if part.kind != CUT)
                learned = "".join(part.text for part in record.parts if part.kind == LEARNED)
                shown.append((text, learned))
        if (
            truncate == "prompt" and number
        ):  # the token that begins texts is kept where a prompt is cut
            shown = [(text, learned) for text, learned in shown if len(text) < 50]
            expected = [(text, learned) for text, learned in expected if len(text) < 50]
        assert sorted(shown) == sorted(expected)
        counted = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        assert found.learned == counted


def run(tmp_path: Path, **options: Any) -> Preview:
    seq_len = options.pop("seq_len", 64)
    shown = {name: options.pop(name) for name in ("records", "limit", "context") if name in options}
    return preview(
        DataConfig(data=str(tmp_path / "a.jsonl"), **options), ByteTokenizer(), seq_len, **shown
    )


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    rows = [*KINDS["long"], {"prompt": "q", "completion": ""}, {"question": "q"}]
    write(tmp_path, rows)
    with pytest.raises(DataError, match=r"a.jsonl:14: has 'question'"):
        run(tmp_path)
    found = run(tmp_path, on_bad_record="skip", records=20)
    reasons = [record.left_out for record in found.records]
    assert reasons[:3] == ["", "", ""]
    assert set(reasons[3:12]) == {"it is longer than --seq-len 64"}
    assert reasons[12:] == ["it has no answer to learn"]
    text = " ".join(str(found).split())
    for line in (
        "9 of 13 records are longer than seq_len=64",
        "1 of 13 records has no answer to learn",
        "1 bad record is skipped",
        "left out: it is longer than --seq-len 64",
    ):
        assert line in text
    assert "(longer than --seq-len)" in text
    assert "\u27e6c<eos>\u27e7" in text
    assert found.quantiles["longest"] == 242 and found.quantiles["shortest"] == 2
    assert sum(found.lengths.values()) == 13


@pytest.mark.parametrize("truncate", ["drop", "prompt"])
@pytest.mark.parametrize(("seq_len", "context"), [(64, None), (64, 96), (160, 96), (160, None)])
def test_records_longer_than_the_context_are_told_as_a_run_tells_them(
    seq_len: int, context: int | None, truncate: str, tmp_path: Path
) -> None:
    path = write(tmp_path, KINDS["long"])
    found = run(tmp_path, seq_len=seq_len, truncate=truncate, context=context, records=12)
    config = TrainConfig(steps=1, seq_len=seq_len, batch_size=1)
    dataset, _ = open_data(
        path, ByteTokenizer(), config, limit=context, truncate=truncate, eval_split=0
    )
    told = [
        line
        for line in dataset.describe().split("\n")
        if "longer than" in line or "are cut" in line
    ]
    assert told and set(told) <= set(found.lines)
    assert f"{found.tokens:,} tokens" in dataset.describe()
    longest = min(seq_len, context or seq_len)
    left_out = [record for record in found.records if record.left_out]
    assert len(left_out) == (
        0 if truncate == "prompt" else sum(20 * n + 2 > longest for n in range(1, 13))
    )
    bound = f"--seq-len {seq_len}" if longest == seq_len else "the 96 tokens that the model allows"
    assert {record.left_out for record in left_out} <= {f"it is longer than {bound}"}
    # Bars mark whole powers of two: 129 to 256 are not all longer than 160.
    if longest <= 128:
        mark = f"longer than {bound.removesuffix(f' {seq_len}')}"
        assert mark in preview_html(found) and mark in " ".join(str(found).split())


def test_the_command_knows_the_context_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = write_chat_model(tmp_path / "model")  # of 96 positions
    arguments = ["data", "preview", "--model", str(model), "--seq-len", "160", "--data"]
    assert main([*arguments, write(tmp_path, KINDS["long"])]) == 0
    assert "longer than the 96 tokens that the model allows" in capsys.readouterr().out
    assert main([*arguments, write(tmp_path, [{"text": "t" * 300}])]) == 0
    refusal = "a run refuses windows of --seq-len 160: the model allows 96 tokens"
    assert refusal in capsys.readouterr().out
    # A folder with a tokenizer alone shows what it can.
    (model / "config.json").unlink()
    assert main([*arguments, write(tmp_path, KINDS["pairs"])]) == 0
    assert f"the context of {model} is not known" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused_as_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = write_chat_model(tmp_path / "model")  # of 288 rows
    data = write(tmp_path, KINDS["pairs"])
    command = ["data", "preview", "--model", str(model), "--data", data]
    assert main([*command, "--tokenizer", "gated-nano"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "te-models: the tokenizer has 4096 ids but the model's vocab_size is 288"
    )
    assert error.count("\n") == 1
    # A run gives the model rows for tokens that it adds.
    tokens = ",".join(f"<t{number}>" for number in range(40))
    assert main([*command, "--special-tokens", tokens]) == 0


def test_a_part_of_much_data_is_read(tmp_path: Path) -> None:
    write(tmp_path, KINDS["pairs"])
    found = run(tmp_path, limit=5, records=2)
    assert (found.count, len(found.records)) == (5, 2)
    assert found.lines[0].startswith("the first 5 records, ")
    assert run(tmp_path, limit=12).lines[0].startswith("12 records, ")


def test_texts_are_learned_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, [{"text": "t" * n} for n in (3, 100)])
    found = run(tmp_path)
    assert [part.kind for record in found.records for part in record.parts] == [LEARNED, LEARNED]
    assert found.learned == found.tokens == 105


class Reader(html.parser.HTMLParser):
    """Collects the text of each class of span, and checks that tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.open: list[tuple[str, str]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img")
        if tag != "meta":
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][1]:
            self.texts[self.open[-1][1]] = self.texts.get(self.open[-1][1], "") + data


def test_the_page_marks_the_same(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [*KINDS["chats"], {"messages": [{**ASK, "content": "</pre><script>x</script>"}, REPLY]}]
    path = write(tmp_path, rows)
    found = run(tmp_path, seq_len=256, records=20)
    texts = Reader(preview_html(found)).texts
    learned = "".join(p.text for record in found.records for p in record.parts if p.kind == LEARNED)
    assert texts["learned"] == "learned" + learned  # the legend comes first
    assert "</pre><script>x</script>" in texts["read"]
    page = tmp_path / "page.html"
    assert main(["data", "preview", "--data", path, "--seq-len", "256", "--html", str(page)]) == 0
    assert "\u27e6" in capsys.readouterr().out
    assert Reader(page.read_text()).texts["learned"].startswith("learned")


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path, KINDS["pairs"])
    assert main(["data", "preview", "--data", path, "--json", "--records", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["count"] == 12 and len(found["records"]) == 1
    assert found["records"][0]["parts"][1] == {"text": " \U0001f6000<eos>", "kind": "learned"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --data PATH: a file, folder, glob, URL or Hub dataset"),
        (["--data", "none.jsonl"], "none.jsonl: no such file or folder"),
        (["--data", "a.jsonl", "--limit", "0"], "give a --limit of 1 or more"),
        (
            ["--data", "a.jsonl", "--html", "no/such/folder.html"],
            "could not write no/such/folder.html: No such file or directory",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:  # fmt: skip
    write(tmp_path, KINDS["pairs"])
    monkeypatch.chdir(tmp_path)
    assert main(["data", "preview", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"te-models: {message}") and error.count("\n") == 1


def test_the_shipped_data_can_be_looked_at() -> None:
    found = preview(DataConfig(data="python-docstrings"), ByteTokenizer(), 512, limit=50)
    assert found.count == 50 and found.records[0].learned
    with pytest.raises(UsageError, match="give --data PATH"):
        preview(DataConfig(), ByteTokenizer(), 512)
