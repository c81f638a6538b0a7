"""Rows of five common formats, recognized by their content, to documents to train on.

* messages (OpenAI): `messages`, a list of {"role", "content"}; perhaps `tools`, or `functions`, their older form
* ShareGPT: `conversations`, a list of {"from", "value"}; perhaps `system` and `tools`
* Alpaca: `instruction` and `output`; perhaps `input`, `system` and `history`
* prompt/completion: `prompt` and `completion`, two texts or two lists of messages
* text: `text`

A list of turns is of the first or second format depending on the keys of its turns, whatever the column's name.
"""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from te_models.data.marks import (
    MARKS,
    MEDIA,
    RECORD_FIELDS,
    TEMPLATE_VARIABLES,
    is_set,
    record_counts,
    refuse_media,
    template_variables,
    turn_counts,
)
from te_models.errors import DataError

Kind = TypeVar("Kind")

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
ROLES = {  # of a turn, in any of the formats -> OpenAI's
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALLING_ROLES = ("function_call", "tool_call")  # of turns whose content is the call
_LISTS = ("messages", "conversations", "conversation")
# Usual names of a list of all records.
_AROUND = ("data", "records", "rows", "examples", "instances", "train")
_ASKED = ("prompt", "instruction", "question", "query", "input")
_ANSWERED = ("completion", "answer", "response", "output", "reply")
# Names by which templates know the reasoning of a turn.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TURN_FIELDS = ("tool_calls", "tool_call_id", "name", *THOUGHTS)
_ANSWER_FIELDS = ("content", "tool_calls", *THOUGHTS)
_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_FIELDS = ("messages", "instruction", "output", "prompt", "completion", "text")
_KNOWN = (
    "messages [{role, content}], conversations [{from, value}], instruction and output, "
    "prompt and completion, or text"
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


@dataclass
class _Reading:
    """Findings on the way through the turns of a record.

    Attributes:
        unread: names of fields that nothing reads, in order, as keys.
        arguments: of tool calls, as they were written: "" for an object.
    """

    unread: dict[str, None] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


def recognize(row: Mapping[str, object]) -> str | None:
    """Return the format of a row, or None."""
    for name in _LISTS:
        turns = _parsed(row.get(name))
        if _is_turns(turns):
            sharegpt = turns and "from" in turns[0] and "role" not in turns[0]
            return SHAREGPT if sharegpt or (not turns and name != "messages") else MESSAGES
    if "instruction" in row and "output" in row:
        return ALPACA
    if "prompt" in row and "completion" in row:
        return PAIRS
    return TEXT if "text" in row else None


def _is_turns(value: object) -> TypeGuard[list[dict]]:
    """Return whether a value, perhaps written as JSON, is a list of objects."""
    turns = _parsed(value)
    return isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)


def may_be_recognized(names: Collection[str]) -> bool:
    """Return whether rows with these columns may be of a known format."""
    groups = [{name} for name in (*_LISTS, "text")] + [
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
    used = set(columns) & row.keys()
    used |= {name for name, value in fields.items() if not is_set(value)}
    about = {"name": place, "source": source, "file": file or source}
    if kind == TEXT:
        used.add("text")
        text = _text(renamed, "text", place)
        return Document(text, **about, ignored=_unread(fields, used))
    refuse_media(fields, place)
    learned = record_counts(fields, used)
    if kind == PAIRS and not _has_turns(renamed["prompt"], columns):
        used |= {"prompt", "completion"}
        return Document(
            _text(renamed, "completion", place, answer=True),
            _text(renamed, "prompt", place),
            **about,
            learned=learned,
            ignored=_unread(fields, used),
        )
    main = next((name for name in _LISTS if _is_turns(renamed.get(name))), "")
    used |= {
        MESSAGES: {main, "system"},
        SHAREGPT: {main, "system"},
        ALPACA: {"instruction", "output", "input", "system", "history"},
        PAIRS: {"prompt", "completion"},
    }[kind]
    reading = _Reading()
    messages = []
    for message in _conversation(renamed, kind, columns, place, reading):
        if not learned and message["role"] == "assistant":
            message["weight"] = 0
        messages.append(_unlearned_if_empty(message))
    variables: dict[str, object] = {}
    if is_set(value := _parsed(fields.get(TEMPLATE_VARIABLES))):
        variables |= template_variables(value, place)
    variables["messages"] = messages
    if tools := _tools(renamed, place):
        variables["tools"] = tools
    used |= {"tools", "functions", TEMPLATE_VARIABLES}
    return Document(
        "",
        None,
        **about,
        conversation=_rendered(variables, place),
        arguments=tuple(reading.arguments),
        ignored=(*_unread(fields, used), *reading.unread),
    )


def _lacks_its_prompt(
    renamed: Mapping[str, object], row: Mapping[str, object], columns: Mapping[str, str]
) -> bool:
    """Return whether --columns chose messages that begin with an answer, while the turns before are in `prompt`.

    That is so for preferences with a prompt of their own, of which somebody gives --columns messages=chosen.
    """
    if "messages" not in columns.values() or "prompt" in renamed:
        return False
    messages = _parsed(renamed.get("messages"))
    if not _is_turns(row.get("prompt")) or not _is_turns(messages) or not messages:
        return False
    roles = [yours for yours, name in columns.items() if name == "role"]
    return ROLES.get(_role(messages[0], roles)) == "assistant"


def _role(turn: Mapping[str, object], names: Sequence[str] = ()) -> str:
    """Return the role of a turn as it is written, in lower case."""
    role = next((turn[name] for name in (*names, "role", "from") if name in turn), "")
    return str(role).lower()


def _unread(row: Mapping[str, object], used: Collection[str]) -> tuple[str, ...]:
    """Return the names of the fields of a row that are not used, as a line shows them."""
    return tuple(repr(name)[:60] for name in row if name not in used)


def _tools(row: Mapping[str, object], place: str) -> Sequence[object]:
    """Return the tools of a row as JSON schemas."""
    tools = _parsed(row.get("tools"))
    older = _parsed(row.get("functions"))
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


def unrecognized(row: Mapping[str, object], place: str) -> str:
    """Return one line that says which columns a row has and which formats there are."""
    if {"chosen", "rejected"} <= row.keys():
        return f"{place}: a preference (chosen, rejected): {_preference_advice(row)}"
    for name, value in row.items():
        alone = len(row) == 1 or name in _AROUND
        if alone and isinstance(value, list) and value and isinstance(value[0], dict):
            return f"{place}: one object around the records: write the list {name!r} alone, as a JSON array or as JSONL"
    for name in _LISTS:
        if name in row:
            line = f"{place}: {name!r} is {_not_turns(row[name])}, not a list of messages"
            return f"{line}: write one, leave the record out, or name other columns with --columns"
    shown = ", ".join(repr(name)[:60] for name in list(row)[:8]) + (", ..." if len(row) > 8 else "")
    for name in row:
        if near := difflib.get_close_matches(
            name.lower(), [one for one in _FIELDS if one not in row], n=1, cutoff=0.8
        ):
            renamed = f"rename {name[:60]!r} to {near[0]!r}, in all records with --columns {near[0]}={name[:60]}"
            return f"{place}: has {shown}: {renamed}"
    names = [name for name in row if name.isidentifier()]
    asked = next((name for name in names if name.lower() in _ASKED), next(iter(names), "question"))
    answered = next((name for name in names if name.lower() in _ANSWERED), "answer")
    pairs = {"prompt": asked, "completion": answered}.items()
    columns = ",".join(f"{ours}={theirs}" for ours, theirs in pairs if ours != theirs)
    return (
        f"{place}: has {shown or 'no fields'}, but needs one of the formats {_KNOWN}: "
        f"rename fields, as in --columns {columns}"
    )


def _preference_advice(row: Mapping[str, object]) -> str:
    """Return how to train on the better answer of a preference, with its prompt, wherever that stands."""
    train = "to train on the better answers give --columns"
    chosen = _parsed(row["chosen"])
    asked = next((name for name in row if name.lower() in _ASKED), None)
    if _is_turns(chosen) and chosen:
        if asked is None or ROLES.get(_role(chosen[0])) != "assistant":
            return f"{train} messages=chosen"  # the prompt is among the messages
        if not _is_turns(row[asked]):
            return (
                f"{asked!r} is a text and 'chosen' a list of messages: write {asked!r} as messages too, and give "
                "--columns completion=chosen"
            )
    if asked is None:
        return f"{train} text=chosen"
    prompt = "" if asked == "prompt" else f"prompt={asked},"
    return f"{train} {prompt}completion=chosen"


def _not_turns(value: object) -> str:
    """Return what a value is that should be a list of messages."""
    value = _parsed(value)
    if isinstance(value, str):
        return "a string that is not JSON" if value.lstrip()[:1] in ("[", "{") else "a text"
    return "a list of other things" if isinstance(value, list) else _kind(value)


def misspelled(columns: Mapping[str, str], row: Collection[str], place: str) -> str | None:
    """Return a line about the first of your columns that a row has only under a similar name; None without one."""
    for name, meant in columns.items():
        near = difflib.get_close_matches(
            name, [other for other in row if other not in columns], n=1
        )
        if near and name not in row and meant not in row:
            return f"{place}: --columns {meant}={name}: there is no {name!r}: did you mean {near[0]!r}?"
    return None


def _conversation(
    row: Mapping[str, object],
    kind: str,
    columns: Mapping[str, str],
    place: str,
    reading: _Reading,
) -> list[dict[str, object]]:
    """Return the messages of a row, checked and in OpenAI's form; `reading` collects the rest."""
    if kind == ALPACA:
        return _alpaca(row, place)
    if kind == PAIRS:
        before = _turns(row, "prompt", columns, place, reading)
        for message in before:
            if message["role"] == "assistant":
                message["weight"] = 0
        return before + _turns(row, "completion", columns, place, reading)
    name = next(name for name in _LISTS if _is_turns(row.get(name)))
    messages = _turns(row, name, columns, place, reading)
    system = row.get("system")
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _alpaca(row: Mapping[str, object], place: str) -> list[dict[str, object]]:
    texts = {
        "instruction": _text(row, "instruction", place),
        "output": _text(row, "output", place, answer=True),
    }
    extra = {
        name: _text(row, name, place) for name in ("input", "system") if row.get(name) is not None
    }
    messages: list[dict[str, object]] = []
    if extra.get("system"):
        messages.append({"role": "system", "content": extra["system"]})
    history = _parsed(row.get("history")) or []
    for turn in history if isinstance(history, list) else [None]:
        if not (
            isinstance(turn, list)
            and len(turn) == 2
            and all(isinstance(text, str) for text in turn)
        ):
            raise DataError(
                f"{place}: 'history' is not a list of [question, answer] pairs: fix it or leave it out"
            )
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    asked = "\n".join(
        part for part in (texts["instruction"], extra.get("input", "")) if part.strip()
    )
    return [
        *messages,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": texts["output"]},
    ]


def _turns(
    row: Mapping[str, object],
    name: str,
    columns: Mapping[str, str],
    place: str,
    reading: _Reading,
) -> list[dict[str, object]]:
    turns = _of_kind(
        _parsed(row[name]), list, f"{place}: {name!r}", "a list of messages: write one"
    )
    return [
        _message(turn, columns, f"{place}: message {number} of {name!r}", reading)
        for number, turn in enumerate(turns, 1)
    ]


def _message(
    turn: object, columns: Mapping[str, str], place: str, reading: _Reading
) -> dict[str, object]:
    """Return one turn as {"role", "content", ...}, without empty fields, and with "weight" 0 if it is not learned."""
    if not isinstance(turn, dict):
        raise DataError(f"{place} is {_kind(turn)}, not an object with role and content")
    yours = {name: key for key, name in columns.items()}
    keys = [
        (yours.get("role", "role"), yours.get("content", "content")),
        ("role", "content"),
        ("from", "value"),
    ]
    role_and_content = next(((role, content) for role, content in keys if role in turn), None)
    if role_and_content is None:
        shown = ", ".join(repr(key)[:60] for key in list(turn)[:8])
        raise DataError(
            f"{place} has {shown or 'no keys'}, but needs role and content, or from and value: "
            "rename them, as in --columns role=speaker,content=words"
        )
    said_role = turn[role_and_content[0]]
    if not isinstance(said_role, str) or said_role.lower() not in ROLES:
        raise DataError(
            f"{place} has the role {str(said_role)[:60]!r}: use one of {', '.join(ROLES)}"
        )
    role = ROLES[said_role.lower()]
    refuse_media(turn, place)
    counts = turn_counts(turn, role, place)
    beside = {name: turn[name] for name in _TURN_FIELDS if turn.get(name) is not None}
    written = beside.pop("tool_calls", None) or turn.get("function_call")
    calls = _tool_calls(written, place, reading)
    content = turn.get(role_and_content[1])
    if said_role.lower() in _CALLING_ROLES:
        calls = calls or _tool_calls(content, place, reading)
        content = ""
    if content is None and not calls and role_and_content[1] not in turn:
        raise DataError(f"{place} has no {role_and_content[1]!r}: fill it in")
    for name, value in turn.items():
        known = (*role_and_content, *_TURN_FIELDS, *MARKS, *MEDIA, "function_call")
        if name not in known and is_set(value):
            reading.unread[f"{str(name)[:60]!r} of turns"] = None
    message: dict[str, object] = {"role": role, "content": _joined(content, place)}
    if calls:
        message["tool_calls"] = calls
    message |= beside
    if counts is False and role == "assistant":
        message["weight"] = 0
    return message


def _unlearned_if_empty(message: dict[str, object]) -> dict[str, object]:
    """Return a message, with weight 0 if it is an empty answer, which would teach the model to stop at once."""
    if message["role"] != "assistant" or any(
        not _is_blank(message.get(name)) for name in _ANSWER_FIELDS
    ):
        return message
    return {**message, "weight": 0}


def _is_blank(value: object) -> bool:
    """Return whether a value is missing, empty or white space."""
    return not (value.strip() if isinstance(value, str) else value)


def _joined(content: object, place: str) -> str:
    """Return the content of a message, which may be a list of parts, as one text."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type", "text") == "text":
            text = part.get("text")
        else:
            text = part
        if not isinstance(text, str) and (text is not None or isinstance(part, dict)):
            wrong = f"{_kind(text)} as content, not a string: write it as text"
            if isinstance(part, dict):
                wrong = (
                    f"a part of the type {str(part.get('type'))[:60]!r}: only text can be learned"
                )
            raise DataError(f"{place} has {wrong}")
        texts.append(text or "")
    return _encodable("".join(texts), place)


def _tool_calls(calls: object, place: str, reading: _Reading) -> list[dict[str, object]]:
    """Return OpenAI's tool calls with their arguments as objects, which chat templates expect, rather than as JSON."""
    calls = _parsed(calls) or []
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{place} has a tool call without the name of a function: give OpenAI's form"
            )
        text = function.get("arguments")
        arguments = _parsed(text)
        reading.arguments.append(text if isinstance(text, str) else "")
        if arguments is None or arguments == "":
            arguments = {}
        outer = call if "function" in call else {}
        found.append(
            {"type": "function", **outer, "function": {**function, "arguments": arguments}}
        )
    return found


def _parsed(value: object) -> object:
    """Return a list or object that is written as JSON, as in a cell of a table; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _has_turns(prompt: object, columns: Mapping[str, str]) -> bool:
    """Return whether a prompt is a list of messages, perhaps written as JSON, rather than a text."""
    turns = _parsed(prompt)
    roles = {"role", "from", *(yours for yours, name in columns.items() if name == "role")}
    written = isinstance(turns, list) and all(
        isinstance(turn, dict) and roles & turn.keys() for turn in turns
    )
    return written if isinstance(prompt, str) else isinstance(turns, list)


def _text(row: Mapping[str, object], name: str, place: str, answer: bool = False) -> str:
    """Return the text of a column; an `answer` that is null is empty, as in a message."""
    value = "" if answer and row[name] is None else row[name]
    return _encodable(
        _of_kind(value, str, f"{place}: {name!r}", "a string: write it as one"),
        f"{place}: {name!r}",
    )


def _of_kind(value: object, kind: type[Kind], name: str, expected: str) -> Kind:
    if not isinstance(value, kind) or value == []:
        raise DataError(f"{name} is {_kind(value)}, not {expected}, or leave the record out")
    return value


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a surrogate pair at character {error.start}: write the pair or leave it out"
        ) from None
    return text


def _rendered(variables: Mapping[str, object], place: str) -> str:
    """Return the variables of a chat template as JSON."""
    try:
        return _encodable(json.dumps(variables, ensure_ascii=False, allow_nan=False), place)
    except (TypeError, ValueError, RecursionError):
        raise DataError(
            f"{place}: tools or tool calls are no plain JSON: use strings, numbers, lists, objects"
        ) from None


def _kind(value: object) -> str:
    return "an empty list" if value == [] else _KINDS.get(type(value), type(value).__name__)


def without_nulls(value: object) -> object:
    """Return a value of an Arrow table without the empty fields that its schema gave to objects inside it.

    Those with the text of a turn stay: there null is an empty answer.
    """
    if isinstance(value, dict):
        cleaned = {}
        for name, inner in value.items():
            if inner is not None or name in ("content", "value"):
                cleaned[name] = inner
        return {name: without_nulls(inner) for name, inner in cleaned.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_nulls(inner) for inner in value]
    return value
