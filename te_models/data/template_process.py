"""The process that renders a chat template. A template is a program from elsewhere, so its time and memory are bounded.

It reads one JSON object per line from standard input and answers each with one: first {"source"}, answered by {} or
{"error"}, then {"context", "seconds"}, answered by {"text"} or {"error"}. te_models.data.chat_template starts it.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from te_models.files.atomic import first_line

MEMORY_BYTES = 2**30
TEXT_BYTES = 2**24


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Template:
    """Compile a chat template with the filters, functions and extensions that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment.from_string(source)


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    template = None
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(request["seconds"] + 1)  # ends this process even if its parent is gone
        try:
            if template is None:
                template, answer = compile_template(request["source"]), {}
            else:
                answer = {"text": template.render(request["context"])}
                if len(answer["text"]) > TEXT_BYTES:
                    answer = {"error": f"its text is longer than {TEXT_BYTES >> 20} MiB"}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
        except RecursionError:
            answer = {"error": "it is nested too deeply"}
        except Exception as error:  # a template may raise anything
            answer = {"error": first_line(error)}
        signal.alarm(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
