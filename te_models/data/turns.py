"""Turns of a conversation, in any of the formats of te_models.data.formats, to messages in OpenAI's form."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from te_models.data.marks import (
    MARKS,
    MEDIA,
    is_set,
    refuse_media,
    turn_counts,
)
from te_models.data.row_values import ROLES, encodable, kind_name, of_kind, parsed, text_of
from te_models.errors import DataError

_CALLING_ROLES = ("function_call", "tool_call")  # of turns whose content is the call
# Names by which templates know the reasoning of a turn.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TURN_FIELDS = ("tool_calls", "tool_call_id", "name", *THOUGHTS)
_ANSWER_FIELDS = ("content", "tool_calls", *THOUGHTS)


@dataclass
class TurnFindings:
    """Findings on the way through the turns of a record.

    Attributes:
        unread: names of fields that nothing reads, in order, as keys.
        arguments: of tool calls, as they were written: "" for an object.
    """

    unread: dict[str, None] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


def alpaca_messages(row: Mapping[str, object], place: str) -> list[dict[str, object]]:
    """Return the messages of an Alpaca row: system, history, the instruction with its input, and the output."""
    texts = {
        "instruction": text_of(row, "instruction", place),
        "output": text_of(row, "output", place, answer=True),
    }
    extra = {}
    for name in ("input", "system"):
        if row.get(name) is not None:
            extra[name] = text_of(row, name, place)
    messages: list[dict[str, object]] = []
    if extra.get("system"):
        messages.append({"role": "system", "content": extra["system"]})
    # CSV and Parquet have lists as JSON in a string.
    history = parsed(row.get("history")) or []
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
    # Alpaca's own prompt has the input below the instruction, and no line for an empty one.
    prompt = "\n".join(
        part for part in (texts["instruction"], extra.get("input", "")) if part.strip()
    )
    return [
        *messages,
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": texts["output"]},
    ]


def messages_of(
    row: Mapping[str, object],
    name: str,
    columns: Mapping[str, str],
    place: str,
    reading: TurnFindings,
) -> list[dict[str, object]]:
    """Return the turns in the field `name`, each in OpenAI's form; `reading` collects the fields beside them."""
    turns = of_kind(parsed(row[name]), list, f"{place}: {name!r}", "a list of messages: write one")
    return [
        _message(turn, columns, f"{place}: message {number} of {name!r}", reading)
        for number, turn in enumerate(turns, 1)
    ]


def _message(
    turn: object, columns: Mapping[str, str], place: str, reading: TurnFindings
) -> dict[str, object]:
    """Return one turn as {"role", "content", ...}, without empty fields, and with "weight" 0 if it is not learned."""
    if not isinstance(turn, dict):
        raise DataError(f"{place} is {kind_name(turn)}, not an object with role and content")
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
    # ShareGPT writes a call as a turn of its own, with the call as its text.
    if said_role.lower() in _CALLING_ROLES:
        calls = calls or _tool_calls(content, place, reading)
        content = ""
    if content is None and not calls and role_and_content[1] not in turn:
        raise DataError(f"{place} has no {role_and_content[1]!r}: fill it in")
    # Nothing is dropped silently: the run prints the names of fields that it does not read.
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


def unlearned_if_empty(message: dict[str, object]) -> dict[str, object]:
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
            # A plain string, None, or something that is refused below.
            text = part.get("text")
        else:
            text = part
        if not isinstance(text, str) and (text is not None or isinstance(part, dict)):
            wrong = f"{kind_name(text)} as content, not a string: write it as text"
            if isinstance(part, dict):
                wrong = (
                    f"a part of the type {str(part.get('type'))[:60]!r}: only text can be learned"
                )
            raise DataError(f"{place} has {wrong}")
        texts.append(text or "")
    return encodable("".join(texts), place)


def _tool_calls(calls: object, place: str, reading: TurnFindings) -> list[dict[str, object]]:
    """Return OpenAI's tool calls with their arguments as objects, which chat templates expect, rather than as JSON."""
    # A list of calls, or one call alone, either perhaps written as JSON.
    calls = parsed(calls) or []
    tool_calls = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{place} has a tool call without the name of a function: give OpenAI's form"
            )
        text = function.get("arguments")
        arguments = parsed(text)
        # Templates need an object; export needs the text as it was, of which JSON keeps neither order nor spaces.
        reading.arguments.append(text if isinstance(text, str) else "")
        if arguments is None or arguments == "":
            arguments = {}
        outer = call if "function" in call else {}
        tool_calls.append(
            {"type": "function", **outer, "function": {**function, "arguments": arguments}}
        )
    return tool_calls
