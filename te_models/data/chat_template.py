"""Conversations as text: a tokenizer's chat template, rendered as transformers does, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_models.data.json_files import read_file, read_json_object
from te_models.errors import DataError, UsageError

SECONDS = 10
BESIDE = "chat_template.jinja"

Message = Mapping[str, str]


class ChatTemplate:
    """A tokenizer's chat template, which turns messages such as {"role": "user", "content": "..."} into a prompt.

    The template runs in a process with bounded time and memory and without this process's environment variables.

    Args:
        source: the Jinja template.
        tokens: its variables, such as bos_token and eos_token.

    Raises:
        DataError: the source is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.tokens = dict(tokens)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "te_models.data.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._end = weakref.finalize(self, _end, self._process)
        answer = self._ask({"source": source})
        if "error" in answer:
            raise DataError(f"the chat template is not valid Jinja: {answer['error']}")

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate:
        """Read the template of a tokenizer's folder: chat_template.jinja, else the one in tokenizer_config.json.

        Raises:
            DataError: there is none, or it is damaged.
        """
        config = read_json_object(Path(folder) / "tokenizer_config.json") or {}
        beside = read_file(Path(folder) / BESIDE)
        source = config.get("chat_template") if beside is None else beside.decode(errors="replace")
        if isinstance(source, list):  # several by name, of which "default" is the one without tools
            named = [entry for entry in source if isinstance(entry, dict)]
            source = {str(entry.get("name")): entry.get("template") for entry in named}.get("default")
        if not source or not isinstance(source, str):
            raise DataError(f"{folder} has no chat template, so it is no chat model: leave out --chat")
        values = {name: value for name, value in config.items() if name.endswith("_token")}
        values = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
        return cls(source, {name: value for name, value in values.items() if value and isinstance(value, str)})

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the prompt after which the assistant speaks; `variables` are the template's, such as enable_thinking.

        Raises:
            UsageError: messages or variables are not plain JSON values.
            DataError: the template refuses the messages, fails, or takes too much time or memory.
        """
        context = dict(messages=list(messages), tools=None, documents=None, add_generation_prompt=True)
        answer = self._ask({"context": {**self.tokens, **context, **variables}})
        if "error" in answer:
            raise DataError(f"the chat template refuses these messages: {answer['error']}")
        return answer["text"]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the template's process, which ends if it takes too long."""
        try:
            line = json.dumps({**request, "seconds": SECONDS}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"messages and variables of a chat template must be plain JSON values: {error}") from None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with self._lock:
            timer = threading.Timer(SECONDS, self._process.kill)
            timer.start()
            try:
                stdin.write(line)
                stdin.flush()
                answer = stdout.readline()
            except OSError:
                answer = b""
            finally:
                timer.cancel()
        if not answer.endswith(b"\n"):
            raise DataError(f"the chat template takes more than {SECONDS} s, or its process died")
        return json.loads(answer)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()
