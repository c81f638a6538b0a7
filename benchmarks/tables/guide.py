"""Excerpts of what the commands of the fine-tuning guide print (benchmarks/guide_runs.py)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from benchmarks.tables.text import load, table

WIDTH = 110  # characters of a line on the page
LONGEST = 125  # of a line that is not cut to WIDTH


def _output(name: str) -> list[str]:
    return load("guide_runs_cpu")[name]["output"]


def _about(lines: list[str], *labels: str) -> list[str]:
    """Return the rows of a summary with these labels, each with the lines that continue it."""
    found, taken = [], False
    for line in lines:
        if line.strip() and not line.startswith("   "):
            taken = line.strip().startswith(labels)
        if taken and line.strip():
            found.append(line)
    return found


def _shown(name: str, lines: Iterable[str]) -> str:
    """Return the command of a run, over several lines if it is long, and lines that it printed."""
    words, command = shlex.split(load("guide_runs_cpu")[name]["command"]), [""]
    for word in words:
        if len(command[-1]) + len(word) > WIDTH and word.startswith("--"):
            command[-1] += "\\"
            command.append("    ")
        command[-1] += word + " "
    short = (line if len(line) <= LONGEST else f"{line[:WIDTH]}..." for line in lines)
    return "\n".join(
        ["```bash", *(line.rstrip() for line in command), "```", "", "```text", *short, "```"]
    )


@table
def guide_full() -> str:
    """The first run: what it says before, during and at the end, with the last of its samples."""
    lines = _output("full")
    samples = [number for number, line in enumerate(lines) if line.startswith("sample ")]
    suggested = next(number for number, line in enumerate(lines) if line.startswith("next"))
    end = suggested
    for number, line in enumerate(lines):
        if line.startswith("samples take"):
            end = number
    steps = [line for line in lines if "  eval loss " in line]
    before, after = (
        _about(lines, "linears", "data ", "memory"),
        _about(lines, "eval loss before", "eval loss after"),
    )
    sample = [line for line in lines[samples[-1] : end] if line]
    return _shown(
        "full",
        [*before, "...", *steps, *after, "...", *sample, "...", *lines[suggested:]],
    )


@table
def guide_slow() -> str:
    """The losses of a run whose learning rate is too low."""
    return _shown(
        "slow", _about(_output("slow"), "optimizer", "eval loss before", "eval loss after")
    )


@table
def guide_lora() -> str:
    """What is trained, the losses, and where adapters and merged model are."""
    labels = (
        "parameters",
        "eval loss before",
        "eval loss after",
        "adapters",
        "merged",
        "eval loss merged",
    )
    return _shown("lora", _about(_output("lora"), *labels))


@table
def guide_evaluate() -> str:
    """The table of losses by recipe."""
    return _shown("evaluate", _output("evaluate"))
