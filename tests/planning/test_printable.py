"""Printed text obeys no character of a name, of data or of generated text."""

import importlib
import io
from pathlib import Path

import click
import pytest
from fewer import every
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from te_models import CausalLM
from te_models.cli import options as options_module
from te_models.cli.commands import main
from te_models.cli.sampling import show_piece
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import LONGEST, for_terminal
from te_models.inspect.bench_report import bench_table
from te_models.inspect.evaluate import Evaluation, RecipeLoss
from te_models.inspect.verify import verify
from te_models.planning.printable import Terminal
from te_models.training.next_commands import print_next
from te_models.training.result import Result
from te_models.training.run_settings import run_settings
from te_models.training.samples import Prompt

HOSTILE = "a\x1b[2Jb\u202ec\x9bd\x07e\u2066f"


def is_safe(text: str) -> bool:
    return not set(text) & set("\x1b\x9b\x07\u202e\u2066\r")


@pytest.mark.parametrize(
    "character", [*map(chr, range(32)), "\x7f", "\x85", "\x9b", "\u202e", "\u2028", "\u200f"]
)
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


def test_tables_fit_80_columns() -> None:
    """No line is longer, and no word is broken to achieve that."""
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2)
    model = CausalLM.from_preset(
        "gated-nano", recipe="delayed", device="cpu", num_key_value_heads=2, **shape
    )
    table = {"*.down_proj": "bf16", "layers.1.self_attn.*": "current"}
    mixed = CausalLM.from_preset("gated-nano", recipe="delayed", precision=table, device="meta")
    wide = CausalLM.from_preset("llama-3.1-8b", recipe="mxfp8", device="meta")
    losses = (
        RecipeLoss("blockwise", 4.2, 1_234_567, 10**7),
        RecipeLoss("delayed", 4.1, 1_234_567, 10**7, note="a note"),
    )
    row = dict(
        name="te-models delayed+no_edges+graph",
        ms=1234.5,
        ms_quartiles=[1233.44, 1240.44],
        speed=1.5,
    )
    row |= dict(
        tokens_per_second=262_427.0,
        model_tflops=712.3,
        of_roofline=0.61,
        peak_gib=25.44,
        loss=10.377,
    )
    bench = dict(
        settings=dict(batch_size=8, seq_len=2048),
        environment={},
        reference="te-models bf16",
        rows=[row],
    )
    bench["roofline"] = dict(total=100.0, gemms=60.0, attention=40.0)
    for shown in (model.plan(), mixed.plan(), wide.plan(), verify(model, 1, 32), Evaluation("m", "d", losses),
                  bench_table(bench)):  # fmt: skip
        lines = {}
        for width in (80, 400):
            out = io.StringIO()
            Terminal(file=out, width=width).print(shown)
            lines[width] = out.getvalue().splitlines()
        assert max(map(len, lines[80])) <= 80
        words = [sorted(" ".join(text).split()) for text in lines.values()]
        assert words[0] == words[1]


def test_the_next_commands_of_a_run_are_safe_to_print(tmp_path: Path) -> None:
    out = io.StringIO()
    prompt = Prompt(tuple(ByteTokenizer().encode(HOSTILE)))
    print_next(
        Terminal(file=out, width=200),
        tmp_path / HOSTILE,
        ByteTokenizer(),
        [prompt],
        format="fp8-block",
        result=Result(),
        settings=run_settings("finetune", {"model": "gated-nano"}),
    )
    assert "--prompt" in out.getvalue() and is_safe(out.getvalue())


def test_generated_text_is_raw_in_a_pipe_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_piece(HOSTILE)
    assert {"\u202e", "\x07"} <= set(capsys.readouterr().out), (
        "click itself takes escape sequences out"
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    said: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text, **options: said.append(text))
    show_piece(HOSTILE)
    assert len(said) == 1 and is_safe(said[0])


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--seed", HOSTILE],
        ["generate", "--seed", "9" * 10**5 + "x"],
        ["--" + HOSTILE],
        [HOSTILE * 1000],
    ],
)
def test_a_line_of_click_is_short_and_safe(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("te-models: ") and said.count("\n") == 1
    assert is_safe(said) and len(said) < LONGEST + 50


def test_no_line_of_a_file_ends_in_spaces() -> None:
    table = Table("name", "value", box=None)
    table.add_row("a", "first line\nsecond")
    table.add_row("longer name", "x " * 60)
    for width, padded in ((60, False), (60, True)):
        out = io.StringIO()
        Terminal(file=out, width=width, force_terminal=padded or None, no_color=True).print(table)
        lines = out.getvalue().splitlines()
        assert len(lines) == 6
        assert any(line.endswith(" ") for line in lines) == padded
    out = io.StringIO()
    console = Terminal(file=out, width=60)
    console.print("asked: ", end="")
    console.print("said")
    console.print(Text("words that are broken between them " * 4))
    assert out.getvalue().startswith("asked: said\n")
    assert not any(line.endswith(" ") for line in out.getvalue().splitlines())


def presets() -> Table:
    table = Table(title="shapes", title_justify="left", box=None)
    for heading in ("name", "size", "note"):
        table.add_column(heading, no_wrap=heading == "name")
    table.add_row("gated-hybrid-nano", "3.6 M", "checkpointing selective")
    table.add_row("gated-moe-nano", "", "none")
    return table


@pytest.mark.parametrize(("width", "as_list"), [(60, False), (44, False), (30, True), (20, True)])
def test_a_table_that_would_be_cut_is_a_list(width: int, as_list: bool) -> None:
    out = io.StringIO()
    Terminal(file=out, width=width).print(Group(presets(), Text("below")))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    assert lines[0].split() == ["shapes"] and lines[-1] == "below"
    said = " ".join(out.getvalue().split())
    rows = "gated-hybrid-nano: size 3.6 M, note checkpointing selective gated-moe-nano: note none below"
    assert (rows in said) == as_list
    assert ("name size note" in said) != as_list


@pytest.mark.parametrize(
    ("command", "width"),
    every(
        2,
        ["list", "list --runs", "plan --preset gated-nano --memory", "plan --preset gated-nano"],
        [40, 60, 80],
    ),
)
def test_no_word_is_cut_on_a_narrow_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The name te_models.cli.list is also in the package, as any other command.
    list_module = importlib.import_module("te_models.cli.list")
    for module in (list_module, options_module):
        monkeypatch.setattr(module, "console", lambda: Terminal(width=width))
    assert main(command.split()) == 0
    said = capsys.readouterr().out
    assert "…" not in said and max(map(len, said.splitlines())) <= max(
        width, 66
    )  # of the lines outside tables
