"""The process that renders a chat template. A template is a program from elsewhere, so its time and memory are bounded.

It reads one JSON object per line from standard input and answers each with one: first {"source"}, answered by {} or
{"error"}, then {"contexts": [...], "seconds"}, answered by a list with {"text", "answers"} or {"error"} per context.
"answers" are the [start, stop] of the text between {% generation %} and {% endgeneration %}, in characters.
te_models.data.chat_template starts it.
"""

import datetime
import json
import re
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from te_models.files.atomic import first_line

MEMORY_BYTES = 2**30
TEXT_BYTES = 2**24

# Around each answer in the rendered text, unless a template cuts them apart; no text can contain them by chance.
_KEY = secrets.token_hex(8)
_START = f"\ue000{_KEY}<"
_STOP = f"\ue000{_KEY}>"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks the assistant's words for training.

    As in transformers, its body is a scope of its own.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return _START + caller() + _STOP


def compile_template(source: str) -> Template:
    """Compile a chat template with the filters, functions and extensions that transformers gives it."""
    # White space around blocks as in transformers: templates are written for it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment.from_string(source)


def render(template: Template, context: dict[str, object]) -> dict[str, object]:
    """Return the text of a template and where its answers are, or the error."""
    try:
        text = template.render(context)
        if len(text) > TEXT_BYTES:
            return {"error": f"its text is longer than {TEXT_BYTES >> 20} MiB"}
        return unmark(text)
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_AS)[
            0
        ]  # MEMORY_BYTES, or a lower one of the system's
        return {"error": f"it takes more than {limit >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # a template may raise anything
        return {"error": first_line(error)}


def unmark(text: str) -> dict[str, object]:
    """Return a rendered text without the marks of its answers, and where these are."""
    parts = []
    answers = []
    at = 0  # the position in the text without marks
    start = -1
    for part in re.split(f"({_START}|{_STOP})", text):
        if part == _START:
            start = at
        elif part == _STOP:
            answers.append([start, at])
        else:
            parts.append(part)
            at += len(part)
    return {"text": "".join(parts), "answers": answers}


def limit_memory() -> None:
    """Bound the memory of this process, to less where it has a lower limit already, as by `ulimit -v`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Answer requests until standard input ends."""
    limit_memory()
    template = None
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(request["seconds"] + 1)  # ends this process even if its parent is gone
        answer: object
        if template is None:
            try:
                template = compile_template(request["source"])
                answer = {}
            except Exception as error:  # also RecursionError, of a source nested too deeply
                answer = {"error": first_line(error)}
        else:
            answer = [render(template, context) for context in request["contexts"]]
        signal.alarm(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON as transformers' filter does; Jinja's own would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    """Raise the error that a template asks for by `raise_exception`."""
    raise TemplateError(message)


def _now(form: str) -> str:
    """Return the present time in a format of strftime, for templates that write the date."""
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
