"""Conversations as text: the template that comes with a tokenizer, applied as transformers applies it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from te_models.checkpoint.folder import read_listed
from te_models.errors import DataError
from te_models.files.formats import parse_json

Message = Mapping[str, str]
BESIDE = "chat_template.jinja"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, with which templates mark the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A tokenizer's chat template: messages of the form {"role": "user", "content": "..."} -> the text of a prompt.

    Args:
        source: the template, in Jinja.
        tokens: its variables, such as bos_token and eos_token.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
        environment.globals.update(functions)
        try:
            self.template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from None
        self.tokens = dict(tokens)

    @classmethod
    def of(cls, folder: str | Path) -> ChatTemplate:
        """The template in a tokenizer's folder: chat_template.jinja, else the one in tokenizer_config.json.

        Raises:
            ValueError: there is none; one line that says what to do.
        """
        file = Path(folder) / "tokenizer_config.json"
        files = read_listed(file.parent, [file.name, BESIDE])
        config = parse_json(files[file.name], file, DataError) if file.name in files else {}
        if not isinstance(config, dict):
            raise DataError(f"{file} is not an object of names and values")
        try:
            source = files[BESIDE].decode() if BESIDE in files else config.get("chat_template")
            if isinstance(source, list):  # several by name, of which "default" is the one without tools
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            if source is not None and not isinstance(source, str):
                raise TypeError
        except (LookupError, TypeError, UnicodeDecodeError):
            raise DataError(f"{folder}: the chat template is not text") from None
        if not source:
            raise ValueError(f"{folder} has no chat template, so it is no chat model: leave out --chat")
        names = [name for name in config if name.endswith("_token") and config[name]]
        values = {
            name: config[name].get("content") if isinstance(config[name], dict) else config[name] for name in names
        }
        return cls(source, {name: value for name, value in values.items() if isinstance(value, str)})

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt after which the assistant speaks next; `variables` are the template's own, such as enable_thinking.

        Raises:
            ValueError: the template refuses the messages.
        """
        context = dict(messages=list(messages), tools=None, documents=None, add_generation_prompt=True)
        try:
            return self.template.render(**{**self.tokens, **context, **variables})
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
