"""`te-models chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from te_models.cli.options import Command, build_model, model_options, option, setting_option
from te_models.cli.sampling import (
    chat_template_option,
    input_line,
    sampling_options,
    show_piece,
    take_sampling,
    utf8_text,
)
from te_models.config.data import split_pair
from te_models.errors import TeModelsError, UsageError, for_terminal, plural

if TYPE_CHECKING:
    from te_models.generation.conversation import Conversation

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation, except for the system message",
    "/undo": "forget the last question and its answer",
    "/retry": "answer the last question again",
    "/system [TEXT]": "show the system message, or replace it and start again",
    "/history": "show the conversation",
    "/save FILE": "append the conversation to FILE, as a line of JSONL that --data reads",
    "/exit": "leave, as Ctrl-D does",
}
KEYS = "Ctrl-C stops an answer, Ctrl-D leaves. End a line with \\ to continue it; put a space before a / to send it."


@click.command(cls=Command)
@model_options
@option("--system", metavar="TEXT", callback=utf8_text, help="System message.")
@chat_template_option
@option(
    "--template-option",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable of the template, such as enable_thinking=false; may be repeated.",
)
@setting_option("tokenizer")
@sampling_options
def chat(
    preset: str | None,
    model: str | None,
    system: str | None,
    chat_template: str | None,
    template_option: tuple[str, ...],
    tokenizer: str | None,
    **options: object,
) -> None:
    """Talk to a chat model.

    Answers are streamed, and the history is sent along. /help lists commands such as /reset.
    """
    from te_models.data.dataset import check_fit  # noqa: PLC0415  imports torch
    from te_models.data.named_templates import use_template  # noqa: PLC0415
    from te_models.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from te_models.generation.conversation import Conversation, check_variables  # noqa: PLC0415

    sampling = take_sampling(options)
    variables = dict(_variable(text) for text in template_option)
    text_tokenizer = load_tokenizer(tokenizer or model)
    if chat_template is not None:
        use_template(text_tokenizer, chat_template)
    check_variables(text_tokenizer, variables)  # fail before the model is loaded
    network = build_model(preset, model, options)
    check_fit(text_tokenizer, network.config)
    talk = Conversation(network, text_tokenizer, system, variables)
    if sys.stdin.isatty():
        _note(
            f"{model}: {network.num_parameters():,} parameters, recipe {network.recipe.name}, {network.device}"
        )
        _note(f"{KEYS} /help lists commands.")
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # line editing and history for input()
    Session(talk, sampling).run()


class Session:
    """The loop of a chat: read a line, run a command or print an answer, until the input ends."""

    def __init__(self, talk: Conversation, sampling: dict[str, Any]) -> None:
        self.talk = talk
        self.sampling = sampling

    def run(self) -> None:
        """Answer lines of standard input until its end or /exit; a second Ctrl-C in a row leaves too."""
        interrupted = False
        while True:
            try:
                line = _read_line()
                interrupted = False
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                click.echo()
                _note("Ctrl-C again, Ctrl-D or /exit to leave")
                continue
            try:
                if line.startswith("/"):
                    command, _, argument = line.strip().partition(" ")
                    if not self.obey(command, argument):
                        return
                elif line.strip():
                    self.answer(line.strip())
            except (TeModelsError, OSError) as error:  # this line's; the conversation goes on
                # From a pipe nobody reads notes: the command ends with the error.
                if not sys.stdin.isatty():
                    raise
                reason = str(error)
                if isinstance(error, OSError):
                    reason = f"{error.filename}: {error.strerror}"
                _note(reason)

    def answer(self, text: str) -> None:
        """Print the answer to `text` as it is generated; Ctrl-C stops it, and what was printed stays in the history."""
        # Closed on Ctrl-C too, which puts the part that was printed into the history.
        with contextlib.closing(self.talk.answer(text, **self.sampling)) as pieces:
            try:
                for piece in pieces:
                    show_piece(piece)
                click.echo()
            except KeyboardInterrupt:
                click.echo()
                _note("stopped")
        if self.talk.forgotten:
            _note(
                f"the first {self.talk.forgotten} messages no longer fit into the model's context: /reset starts again"
            )

    def obey(self, command: str, argument: str) -> bool:
        """Run a command; return False for one that ends the chat."""
        talk = self.talk
        argument = argument.strip()
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/help":
            for name, text in COMMANDS.items():
                click.echo(_wrapped(text, f"  {name:<15} "))
            click.echo(_wrapped(KEYS, "  "))
        elif command == "/reset":
            talk.reset()
            _note("a new conversation")
        elif command in ("/undo", "/retry"):
            question = talk.undo()
            if question is None:
                raise UsageError(f"{command}: nothing has been asked yet")
            if command == "/undo":
                _note(f"forgot: {question}")
            else:
                self.answer(question)
        # Answers given under another system message would contradict the new one.
        elif command == "/system" and argument:
            talk.reset()
            talk.system = argument
            _note("a new conversation with this system message")
        elif command == "/system":
            _note(talk.system or "no system message")
        elif command == "/history":
            lines = [f"{message['role']}: {message['content']}" for message in talk.messages]
            show_piece("\n".join(lines) or "nothing yet")
            click.echo()
        elif command == "/save" and argument and talk.messages:
            # Appended in the format of training data, so that conversations worth learning can be collected.
            with Path(argument).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": talk.messages}, ensure_ascii=False) + "\n")
            _note(f"{plural(len(talk.messages), 'message')} appended to {argument}")
        elif command == "/save" and argument:
            raise UsageError("/save: there is no message yet; /help lists the commands")
        elif command == "/save":
            raise UsageError("/save: give it a file; /help lists the commands")
        else:
            raise UsageError(f"unknown command {command}; /help lists the commands")
        return True


def _read_line() -> str:
    """Return the next message; a line that ends with a backslash continues on the next."""
    terminal = sys.stdin.isatty()
    lines = []
    while True:
        # input() edits the line in a terminal; a pipe may hold bytes that are no UTF-8.
        line = input("... " if lines else "> ") if terminal else input_line()
        if line is None:
            raise EOFError
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _variable(text: str) -> tuple[str, object]:
    """Return name and value of NAME=VALUE; a value that is JSON, such as false or 3, is read as such."""
    name, value = split_pair("--template-option", text, "NAME=VALUE")
    with contextlib.suppress(ValueError, RecursionError):
        return name, json.loads(value)
    return name, value


def _note(text: str) -> None:
    """Print a note that is not part of the conversation, dimmed, on standard error, so that answers can be piped."""
    visible = for_terminal(text)
    if sys.stderr.isatty():
        visible = _wrapped(visible)
    click.secho(visible, dim=True, err=True)


def _wrapped(text: str, before: str = "") -> str:
    """Return `before` and `text` in lines of the terminal's width, broken between words, below each other."""
    indent = " " * len(before)
    width = shutil.get_terminal_size().columns - 1
    lines = []
    for number, line in enumerate(text.splitlines()):
        filled = textwrap.fill(
            line,
            max(width, len(before) + 20),
            initial_indent=indent if number else before,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(filled)
    return "\n".join(lines)
