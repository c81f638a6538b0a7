"""Conversations as text: a tokenizer's chat template, rendered as in transformers, in a separate process."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from te_models.data.json_files import read_file, read_json_object
from te_models.errors import DataError, UsageError
from te_models.files.atomic import reraising
from te_models.files.formats import Document, Value

SECONDS = 10
BESIDE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a folder beside it, of further templates by name
DEFAULT = "default"
TOOL_USE = "tool_use"  # names of templates
PACKAGES = Path(__file__).resolve().parents[2]  # the folder of the package te_models

# For models without a chat template: readable by any tokenizer, since all but the end-of-text token is plain text.
PLAIN = """\
{%- if tools %}{{ '### Tools:\\n' + (tools | tojson) + '\\n\\n' }}{% endif %}
{%- for message in messages %}
{{- '### ' + message.role[:1] | upper + message.role[1:] + ':\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- set thoughts = message.reasoning_content or message.reasoning or message.thinking %}
{%- if thoughts %}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' + (call.function or call) | tojson }}{% endfor %}
{{- eos_token }}
{%- endgeneration %}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}
"""
PLAIN_WITH_BOS = "{{- bos_token }}\n" + PLAIN  # for tokenizers that begin each text with the token

Message = Mapping[str, object]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Rendered(NamedTuple):
    """A rendered conversation, and [start, stop] in characters of each {% generation %} block in it."""

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """A tokenizer's chat template, which turns messages such as {"role": "user", "content": "..."} into a prompt.

    The template runs in a process with bounded time and memory and without this process's environment variables.
    After a fork each side has one of its own.

    Args:
        source: the Jinja template.
        tokens: its variables, such as bos_token and eos_token.

    Raises:
        DataError: the source is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.tokens = dict(tokens)
        self.marks_answers = _GENERATION.search(source) is not None
        self._process = _Process(source)

    def names(self, variable: str) -> bool:
        """Return whether the template has a variable of this name: without the word in its source it reads none."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def render(self, messages: Sequence[Message], /, **variables: object) -> str:
        """Return the prompt after which the assistant speaks; `variables` are the template's."""
        if "messages" in variables:
            raise DataError(
                "messages is the conversation and no variable of the chat template: leave it out"
            )
        request = {"messages": list(messages), "add_generation_prompt": True, **variables}
        rendered = self.render_all([request])[0]
        if isinstance(rendered, str):
            raise DataError(f"the chat template refuses these messages: {rendered}")
        return rendered.text

    def render_all(self, requests: Iterable[Mapping[str, object]]) -> list[Rendered | str]:
        """Render several conversations at once, which is faster; together they have the time limit of one.

        `requests` are the template's variables of each, "messages" among them. Return for each the text, or the reason
        why the template refuses it; raise a DataError if it takes too much time.
        """
        default = {**self.tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        process = self._process
        if process.owner != os.getpid():
            # After a fork, both sides would write to it and read each other's texts.
            process = _Process(self.source)
            self._process = process
        results: list[Rendered | str] = []
        for answer in process.ask({"contexts": [{**default, **request} for request in requests]}):
            if "error" in answer:
                results.append(answer["error"])
            else:
                places = [(start, stop) for start, stop in answer["answers"]]
                results.append(Rendered(answer["text"], places))
        return results


class _Process:
    """The process of a template, and a lock for the threads of the process that started it, `owner`."""

    def __init__(self, source: str) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        # Not a pipe, which could fill up, since nobody reads it before the end.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  _end closes it
        here = Path.cwd().resolve()  # may hold anything
        others = []
        for entry in sys.path:
            if entry and Path(entry).resolve() not in (here, PACKAGES):
                others.append(entry)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "te_models.data.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=PACKAGES,  # which `-m` puts first on the path: a random.py beside the data must not run
            env={"PYTHONPATH": os.pathsep.join([str(PACKAGES), *others]), "PYTHONUTF8": "1"},
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._end = weakref.finalize(self, _end, self.popen, self.owner, self._errors)
        answer = self.ask({"source": source})
        if "error" in answer:
            raise DataError(f"the chat template is not valid Jinja: {answer['error']}")

    def ask(self, request: Document) -> Value:
        """Return the answer to a request; the process ends if it takes too long."""
        plain = "messages and variables of a chat template must be plain JSON values"
        with reraising(plain, TypeError, ValueError, RecursionError, error=UsageError):
            line = json.dumps({**request, "seconds": SECONDS}).encode() + b"\n"
        stdin = self.popen.stdin
        stdout = self.popen.stdout
        assert stdin is not None and stdout is not None
        late = threading.Event()
        popen = self.popen  # the timer's thread must not keep this object

        def stop() -> None:
            late.set()
            popen.kill()

        with self._lock:
            timer = threading.Timer(SECONDS, stop)
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
            if late.is_set():
                raise DataError(f"the chat template takes more than {SECONDS} s")
            raise DataError(
                f"the chat template cannot be rendered: its process died {self._why_ended()}"
            )
        return json.loads(answer)

    def _why_ended(self) -> str:
        """Return why the process ended by itself: its last words, or the signal, and what limits its memory."""
        # The process writes its error before it ends, so its output is complete then.
        code = self.popen.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        reason = f"with exit code {code}"
        if code < 0:
            reason = f"by signal {-code} ({signal.strsignal(-code)})"
        if lines:
            reason += f" ({lines[-1].strip()[:200]})"
        limit = memory_limit()
        if limit is not None:
            reason += f": memory is limited to {limit >> 20} MiB here (ulimit -v), raise that"
        return reason


def template_sources(folder: str | Path) -> dict[str, str]:
    """Return the chat templates in a tokenizer's folder by name, as transformers reads them.

    "default" is the one for conversations, and "tool_use" for those with tools, if there is one. Files of templates
    (chat_template.jinja, and others in a folder beside it) take the place of those in tokenizer_config.json.

    Raises:
        DataError: a file is damaged.
    """
    # In this order: a file named "default" among the others takes the place of the first.
    files = {DEFAULT: Path(folder) / BESIDE}
    for file in sorted(Path(folder, TEMPLATES).glob("*.jinja")):
        files[file.stem] = file
    sources = {}
    for name, file in files.items():
        content = read_file(file)
        if content:
            sources[name] = content.decode(errors="replace")
    if sources:
        return sources
    return config_templates(read_json_object(Path(folder) / "tokenizer_config.json") or {})


def template_source(folder: str | Path) -> str | None:
    """Return the default chat template in a tokenizer's folder; None without one. Errors as `template_sources`."""
    return template_sources(folder).get(DEFAULT)


def config_templates(config: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates in a tokenizer_config.json by name."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict)]
        source = {str(entry.get("name")): entry.get("template") for entry in named}
    named = source if isinstance(source, dict) else {DEFAULT: source}
    return {name: text for name, text in named.items() if text and isinstance(text, str)}


def template_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens in a tokenizer_config.json by the names that templates use."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and text and isinstance(text, str):
            tokens[name] = text
    return tokens


def memory_limit() -> int | None:
    """Return the bytes of address space that this process, and those that it starts, may have; None: any number."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _end(process: subprocess.Popen, owner: int, errors: IO[bytes]) -> None:
    """End a template's process, unless this is a fork of the one that uses it."""
    errors.close()
    if os.getpid() == owner:
        process.kill()
        process.communicate()
