"""Rows of five common formats, recognized by their content, to documents to train on.

* messages (OpenAI): `messages`, a list of {"role", "content"}; perhaps `tools`, or `functions`, their older form
* ShareGPT: `conversations`, a list of {"from", "value"}; perhaps `system` and `tools`
* Alpaca: `instruction` and `output`; perhaps `input`, `system` and `history`
* prompt/completion: `prompt` and `completion`, two texts or two lists of messages
* text: `text`

A list of turns is of the first or second format depending on the keys of its turns, whatever the column's name.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from te_models.data.marks import (
    RECORD_FIELDS,
    TEMPLATE_VARIABLES,
    is_set,
    record_counts,
    refuse_media,
    template_variables,
)
from te_models.data.row_values import (
    LISTS_OF_TURNS,
    ROLES,
    encodable,
    is_turns,
    parsed,
    text_of,
    written_role,
)
from te_models.data.turns import TurnFindings, alpaca_messages, messages_of, unlearned_if_empty
from te_models.data.unrecognized_rows import unrecognized
from te_models.errors import DataError

MESSAGES = "messages (OpenAI)"
SHAREGPT = "ShareGPT"
ALPACA = "Alpaca"
PAIRS = "prompt/completion"
TEXT = "text"
ROW_COLUMNS = (
    "messages",
    "conversations",
    "conversation",
    "tools",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "prompt",
    "completion",
    "text",
    "functions",
    *RECORD_FIELDS,
)


@dataclass(frozen=True)
class Document:
    """One text or conversation to train on. With a `prompt`, the loss counts only `text`, which continues it.

    `name` is the document's file, or file and row; `source` is the corpus. `conversation` is JSON of the chat
    template's variables, `messages` and perhaps `tools` among them, in place of a text; the loss counts what the
    assistant says in it, other than in messages whose "weight" is 0. A text of white space after a prompt is no answer,
    and with `learned` False it is not learned. `ignored` names the fields of the record in `file` that nothing reads;
    `arguments` belong to its tool calls, in order, as they were written: "" for an object.
    """

    text: str
    prompt: str | None = None
    name: str = ""
    source: str = ""
    conversation: str | None = None
    learned: bool = True
    file: str = field(default="", compare=False, repr=False)
    arguments: tuple[str, ...] = field(default=(), compare=False, repr=False)
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_record(self) -> bool:
        """True if it has an answer, which must not be cut, rather than text of any length."""
        return self.prompt is not None or self.conversation is not None


def recognize(row: Mapping[str, object]) -> str | None:
    """Return the format of a row, or None."""
    for name in LISTS_OF_TURNS:
        turns = parsed(row.get(name))
        if is_turns(turns):
            sharegpt = turns and "from" in turns[0] and "role" not in turns[0]
            return SHAREGPT if sharegpt or (not turns and name != "messages") else MESSAGES
    if "instruction" in row and "output" in row:
        return ALPACA
    if "prompt" in row and "completion" in row:
        return PAIRS
    return TEXT if "text" in row else None


def _list_of_turns(row: Mapping[str, object]) -> str:
    """Return the name of the field with the list of turns, which `recognize` has found in the row."""
    return next(name for name in LISTS_OF_TURNS if is_turns(row.get(name)))


def may_be_recognized(names: Collection[str]) -> bool:
    """Return whether rows with these columns may be of a known format."""
    groups = [{name} for name in (*LISTS_OF_TURNS, "text")] + [
        {"instruction", "output"},
        {"prompt", "completion"},
    ]
    return any(group <= set(names) for group in groups)


def row_document(
    row: Mapping[str, object],
    columns: Mapping[str, str],
    place: str,
    source: str,
    file: str = "",
) -> Document:
    """Return the document of one row, whose `columns` come from te_models.config.data.parse_columns.

    `place` names the row in messages, `source` the corpus, and `file` the file.
    """
    renamed = rename(row, columns)
    kind = recognize(renamed)
    if kind is None:
        raise DataError(unrecognized(row, place))
    if _lacks_its_prompt(renamed, row, columns):
        kind = PAIRS
        renamed = {**renamed, "prompt": row["prompt"], "completion": renamed.pop("messages")}
    fields = {**row, **renamed}  # also what renaming leaves out
    # Names of the fields that the document is made of, or that are empty; a line names all others.
    used = set(columns) & row.keys()
    used |= {name for name, value in fields.items() if not is_set(value)}
    about = {"name": place, "source": source, "file": file or source}
    if kind == TEXT:
        used.add("text")
        text = text_of(renamed, "text", place)
        return Document(text, **about, ignored=_unread(fields, used))
    refuse_media(fields, place)
    learned = record_counts(fields, used)
    if kind == PAIRS and not _has_turns(renamed["prompt"], columns):
        used |= {"prompt", "completion"}
        return Document(
            text_of(renamed, "completion", place, answer=True),
            text_of(renamed, "prompt", place),
            **about,
            learned=learned,
            ignored=_unread(fields, used),
        )
    used |= _fields_of_conversation(renamed, kind)
    reading = TurnFindings()
    messages = []
    # An answer that must not be learned stays in the conversation, as context for later turns.
    for message in _conversation(renamed, kind, columns, place, reading):
        if not learned and message["role"] == "assistant":
            message["weight"] = 0
        messages.append(unlearned_if_empty(message))
    return Document(
        "",
        None,
        **about,
        conversation=_template_json(fields, renamed, messages, place),
        arguments=tuple(reading.arguments),
        ignored=(*_unread(fields, used), *reading.unread),
    )


def _fields_of_conversation(renamed: Mapping[str, object], kind: str) -> set[str]:
    """Return the names of the fields that a conversation of this format is made of."""
    names = {"tools", "functions", TEMPLATE_VARIABLES}
    if kind == ALPACA:
        return names | {"instruction", "output", "input", "system", "history"}
    if kind == PAIRS:
        return names | {"prompt", "completion"}
    return names | {_list_of_turns(renamed), "system"}


def _template_json(
    fields: Mapping[str, object],
    renamed: Mapping[str, object],
    messages: list[dict[str, object]],
    place: str,
) -> str:
    """Return the variables of the chat template as JSON: the record's own, its messages, and its tools if any."""
    variables: dict[str, object] = {}
    if is_set(value := parsed(fields.get(TEMPLATE_VARIABLES))):
        variables |= template_variables(value, place)
    variables["messages"] = messages
    if tools := _tools(renamed, place):
        variables["tools"] = tools
    return _rendered(variables, place)


def _lacks_its_prompt(
    renamed: Mapping[str, object], row: Mapping[str, object], columns: Mapping[str, str]
) -> bool:
    """Return whether --columns chose messages that begin with an answer, while the turns before are in `prompt`.

    That is so for preferences with a prompt of their own, of which somebody gives --columns messages=chosen.
    """
    if "messages" not in columns.values() or "prompt" in renamed:
        return False
    messages = parsed(renamed.get("messages"))
    if not is_turns(row.get("prompt")) or not is_turns(messages) or not messages:
        return False
    roles = [yours for yours, name in columns.items() if name == "role"]
    return ROLES.get(written_role(messages[0], roles)) == "assistant"


def _unread(row: Mapping[str, object], used: Collection[str]) -> tuple[str, ...]:
    """Return the names of the fields of a row that are not used, as a line shows them."""
    return tuple(repr(name)[:60] for name in row if name not in used)


def _tools(row: Mapping[str, object], place: str) -> Sequence[object]:
    """Return the tools of a row as JSON schemas."""
    tools = parsed(row.get("tools"))
    older = parsed(row.get("functions"))
    if not tools and isinstance(older, list):
        tools = [{"type": "function", "function": function} for function in older]
    if not tools:
        return []
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(
            f"{place}: 'tools' is not a list of JSON schemas: give OpenAI's form, or leave it out"
        )
    return tools


def rename(row: Mapping[str, object], columns: Mapping[str, str]) -> dict[str, object]:
    """Return a row under the formats' names; a column of yours takes the place of one that has its new name.

    Where one is renamed to the main column of a format, columns of other formats do not count.
    """
    renamed = {name: row[yours] for yours, name in columns.items() if yours in row}
    if not renamed:
        return dict(row)
    taken = {"tools", "system", "input", "history"}
    for group in (("messages",), ("instruction", "output"), ("prompt", "completion"), ("text",)):
        if renamed.keys() & set(group):
            return {**{name: row[name] for name in (*group, *taken) if name in row}, **renamed}
    return {**row, **renamed}


def _conversation(
    row: Mapping[str, object],
    kind: str,
    columns: Mapping[str, str],
    place: str,
    reading: TurnFindings,
) -> list[dict[str, object]]:
    """Return the messages of a row, checked and in OpenAI's form; `reading` collects the rest."""
    if kind == ALPACA:
        return alpaca_messages(row, place)
    if kind == PAIRS:
        before = messages_of(row, "prompt", columns, place, reading)
        for message in before:
            if message["role"] == "assistant":
                message["weight"] = 0
        return before + messages_of(row, "completion", columns, place, reading)
    messages = messages_of(row, _list_of_turns(row), columns, place, reading)
    system = row.get("system")
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _has_turns(prompt: object, columns: Mapping[str, str]) -> bool:
    """Return whether a prompt is a list of messages, perhaps written as JSON, rather than a text."""
    turns = parsed(prompt)
    roles = {"role", "from", *(yours for yours, name in columns.items() if name == "role")}
    written = isinstance(turns, list) and all(
        isinstance(turn, dict) and roles & turn.keys() for turn in turns
    )
    return written if isinstance(prompt, str) else isinstance(turns, list)


def _rendered(variables: Mapping[str, object], place: str) -> str:
    """Return the variables of a chat template as JSON."""
    try:
        return encodable(json.dumps(variables, ensure_ascii=False, allow_nan=False), place)
    except (TypeError, ValueError, RecursionError):
        raise DataError(
            f"{place}: tools or tool calls are no plain JSON: use strings, numbers, lists, objects"
        ) from None
