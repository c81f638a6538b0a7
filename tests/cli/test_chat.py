"""`te-models chat`: lines in, answers out; commands; Ctrl-C stops an answer and not the program."""

import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_model import write_chat_model

from te_models.cli import main
from te_models.cli.chat import COMMANDS, KEYS, _wrapped
from te_models.generation import conversation

FIXED = ["--device", "cpu", "--engine", "emulated", "--max-new-tokens", "4", "--greedy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


class Terminal(io.StringIO):
    """Lines typed at a terminal; "^C" is the key, pressed at the prompt."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple]:
    """Run the command on lines; return exit code, standard output and standard error."""

    def call(
        *lines: str, options: tuple[str, ...] = (), terminal: bool = True
    ) -> tuple[int, str, str]:
        typed = iter(lines)

        def read(prompt: str) -> str:
            line = next(typed, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("builtins.input", read)
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", Terminal(text) if terminal else io.StringIO(text))
        code = main(["chat", "--model", str(folder), *FIXED, *options])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the model: each prompt is noted, the answer is "one two "."""
    prompts: list[str] = []

    def stream(
        model: object,
        tokenizer: conversation.Tokenizer,
        ids: list[int],
        *rest: object,
        **options: object,
    ):
        prompts.append(tokenizer.decode(ids))
        yield from ("one ", "two ")

    monkeypatch.setattr(conversation, "stream_text", stream)
    return prompts


def test_a_chat_answers_as_generate_does(
    chat: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    code, out, err = chat("hi", "again", options=("--system", "be brief"))
    assert code == 0 and "parameters, recipe bf16, cpu" in err and "/help" in err
    assert chat("hi", "again", options=("--system", "be brief"), terminal=False) == (0, out, "")
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nagain\n"))
    assert main(["generate", "--model", str(folder), *FIXED, "--chat", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == out


def test_generate_takes_a_template_as_chat_does(
    chat: Callable, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A model without one of its own is told the option, which each command has that answers conversations."""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in [bare / "chat_template.jinja", bare / "chat_template.json"]:
        file.unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    words = ["generate", "--model", str(bare), *FIXED, "--chat", "--prompt", "hi"]
    assert main(words) == 2
    assert "give --chat-template, a FILE or chatml" in capsys.readouterr().err
    assert main([*words, "--chat-template", "chatml"]) == 0
    said = capsys.readouterr().out
    _, expected, _ = chat("hi", options=("--model", str(bare), "--chat-template", "chatml"))
    assert said == expected
    for option in ("--chat-template", "--system"):
        alone = ["generate", "--model", str(bare), *FIXED, "--prompt", "hi", option, "chatml"]
        assert main(alone) == 2
        assert f"{option} is for a conversation: give --chat too" in capsys.readouterr().err


@pytest.mark.parametrize(
    "errors", ["strict", "surrogateescape"]
)  # Python's in UTF-8 locales, and in those without
@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat"]])
def test_bytes_that_are_not_utf_8_are_one_line(
    command: list[str],
    errors: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\nhi \xff\n"), "utf-8", errors)
    )
    assert main([*command, "--model", str(folder), *FIXED]) == 2
    wrong = "is not UTF-8 text (character 4): convert it to UTF-8\n"
    assert capsys.readouterr().err == f"te-models: a line of standard input {wrong}"
    for option in ("--system", "--prompt")[: len(command)]:
        assert main([*command, option, "hi \udcff", "--model", str(folder), *FIXED]) == 2
        assert capsys.readouterr().err == f"te-models: {option} {wrong}"


def test_ctrl_c_stops_an_answer(chat: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*arguments: object, **options: object) -> Iterator[str]:
        yield "one "
        os.kill(os.getpid(), signal.SIGINT)
        yield "two "

    monkeypatch.setattr(conversation, "stream_text", stream)
    code, out, err = chat("count", "/history", "count")
    assert (
        code == 0
        and out == "one \nuser: count\nassistant: one \none \n"
        and err.count("stopped") == 2
    )


def test_ctrl_c_at_the_prompt_leaves_at_the_second_time(chat: Callable, answers: list[str]) -> None:
    code, out, err = chat("^C", "hi", "^C", "^C", "never")
    assert code == 0 and len(answers) == 1 and err.count("Ctrl-D or /exit to leave") == 2


def test_commands(chat: Callable, answers: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "chat.jsonl"
    code, out, err = chat(
        "/help", "/retry", "a\\", "b", "/retry", "c", "/undo", f"/save {saved}", "/reset", f"/save {saved}", "/history",
        "/system be kind", "d", "/system", "/nothing", f"/save {tmp_path}/no/x", " /etc", "/exit", "never",
    )  # fmt: skip
    assert code == 0
    for part in ("/reset", "/save FILE", "nothing yet"):
        assert part in out
    for part in (
        "/retry: nothing has been asked yet",
        "/save: there is no message yet",
        "forgot: c",
        "be kind",
        "unknown command /nothing",
        "no/x: No such file",
    ):
        assert part in err
    record = {
        "messages": [dict(role="user", content="a\nb"), dict(role="assistant", content="one two ")]
    }
    assert json.loads(saved.read_text()) == record
    assert [prompt.count("a\nb") for prompt in answers] == [1, 1, 1, 0, 0] and "be kind" in answers[
        3
    ]
    assert "/etc" in answers[4]


def test_an_error_ends_the_line_and_not_the_chat(chat: Callable) -> None:
    code, out, err = chat("x" * 200, "hi")
    assert code == 0 and "max_position_embeddings=96" in err and out
    code, out, err = chat("x" * 200, "hi", terminal=False)
    assert code == 2 and "max_position_embeddings=96" in err and not out


def test_template_options_are_json_or_text(chat: Callable, answers: list[str]) -> None:
    chat("hi", options=("--template-option", "enable_thinking=false"))
    chat("hi", options=("--template-option", "enable_thinking=no"))
    assert [prompt.endswith("<think></think>") for prompt in answers] == [True, False]


def test_an_option_that_the_template_does_not_have_is_refused(chat: Callable) -> None:
    """A mistyped name changed nothing, and so the model went on thinking."""
    code, out, err = chat("hi", options=("--template-option", "enable_thinkin=false"))
    assert code == 2 and not out
    assert err == "te-models: the chat template has no variable 'enable_thinkin': leave it out\n"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_breaks_between_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, text in COMMANDS.items():
        lines = _wrapped(text, f"  {name:<15} ").splitlines()
        assert all(len(line) < columns for line in lines)
        assert " ".join(" ".join(lines).split()) == f"{name} {' '.join(text.split())}"
    assert all(len(line) < columns for line in _wrapped(KEYS, "  ").splitlines())
