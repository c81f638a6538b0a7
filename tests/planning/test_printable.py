"""Printed text obeys no character of a name, of data or of generated text."""

import io
from pathlib import Path

import click
import pytest
from rich.table import Column, Table
from rich.text import Text

from te_models.cli.commands import main
from te_models.cli.sampling import show_piece
from te_models.data.tokenizer import ByteTokenizer
from te_models.errors import LONGEST, for_terminal
from te_models.planning.printable import Terminal
from te_models.training.report import print_next
from te_models.training.samples import Prompt

HOSTILE = "a\x1b[2Jb\u202ec\x9bd\x07e\u2066f"


def is_safe(text: str) -> bool:
    return not set(text) & set("\x1b\x9b\x07\u202e\u2066\r")


@pytest.mark.parametrize("character", [*map(chr, range(32)), "\x7f", "\x85", "\x9b", "\u202e", "\u2028", "\u200f"])
def test_a_terminal_gets_no_character_that_it_obeys(character: str) -> None:
    kept = {"\n": "\n", "\t": "\t", "\r": ""}
    assert for_terminal(f"a{character}é日") == f"a{kept.get(character, chr(0xFFFD))}é日"


def test_a_console_prints_names_as_text() -> None:
    table = Table(HOSTILE, Column(Text(HOSTILE, "bold")))
    table.add_row(HOSTILE, "[red]x[/]")
    out = io.StringIO()
    console = Terminal(file=out, width=200, force_terminal=True, color_system="standard")
    for part in (HOSTILE, Text(HOSTILE, "bold"), table):
        console.print(part, soft_wrap=True)
    assert "\x1b[1m" in out.getvalue(), "styles of our own stay"
    assert "\x1b[2J" not in out.getvalue() and not set(out.getvalue()) & set("\u202e\x9b\x07")
    assert "[red]x[/]" in out.getvalue()


def test_the_next_commands_of_a_run_are_safe_to_print(tmp_path: Path) -> None:
    out = io.StringIO()
    prompt = Prompt(tuple(ByteTokenizer().encode(HOSTILE)))
    print_next(Terminal(file=out, width=200), tmp_path / HOSTILE, ByteTokenizer(), [prompt])
    assert "--prompt" in out.getvalue() and is_safe(out.getvalue())


def test_the_suggested_prompt_ends_as_in_training(tmp_path: Path) -> None:
    out, prompt = io.StringIO(), Prompt(tuple(ByteTokenizer().encode("7 times 2 is ")))
    print_next(Terminal(file=out, width=200), tmp_path, ByteTokenizer(), [prompt])
    assert "--prompt '7 times 2 is '" in out.getvalue()


def test_generated_text_is_raw_in_a_pipe_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_piece(HOSTILE)
    assert {"\u202e", "\x07"} <= set(capsys.readouterr().out), "click itself takes escape sequences out"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    said: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text, **options: said.append(text))
    show_piece(HOSTILE)
    assert len(said) == 1 and is_safe(said[0])


@pytest.mark.parametrize(
    "words",
    [["generate", "--seed", HOSTILE], ["generate", "--seed", "9" * 10**5 + "x"], ["--" + HOSTILE], [HOSTILE * 1000]],
)
def test_a_line_of_click_is_short_and_safe(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("te-models: ") and said.count("\n") == 1
    assert is_safe(said) and len(said) < LONGEST + 50
