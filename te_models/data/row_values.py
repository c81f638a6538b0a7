"""Values in a row of data: texts, and lists that may be written as JSON, with errors that say where they stand."""

import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard, TypeVar

from te_models.errors import DataError

Kind = TypeVar("Kind")
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
# Fields that may hold the turns of a conversation; the turns' keys, not this name, tell the format.
LISTS_OF_TURNS = ("messages", "conversations", "conversation")
_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def is_turns(value: object) -> TypeGuard[list[dict]]:
    """Return whether a value, perhaps written as JSON, is a list of objects."""
    turns = parsed(value)
    return isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)


def written_role(turn: Mapping[str, object], names: Sequence[str] = ()) -> str:
    """Return the role of a turn as it is written, in lower case."""
    role = next((turn[name] for name in (*names, "role", "from") if name in turn), "")
    return str(role).lower()


def parsed(value: object) -> object:
    """Return a list or object that is written as JSON, as in a cell of a table; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def text_of(row: Mapping[str, object], name: str, place: str, answer: bool = False) -> str:
    """Return the text of a column; an `answer` that is null is empty, as in a message."""
    value = "" if answer and row[name] is None else row[name]
    return encodable(
        of_kind(value, str, f"{place}: {name!r}", "a string: write it as one"),
        f"{place}: {name!r}",
    )


def of_kind(value: object, kind: type[Kind], name: str, expected: str) -> Kind:
    """Return a value of the given class that is no empty list; raise DataError about `name` for another."""
    if not isinstance(value, kind) or value == []:
        raise DataError(f"{name} is {kind_name(value)}, not {expected}, or leave the record out")
    return value


def encodable(text: str, place: str) -> str:
    """Return a text that UTF-8 can encode; raise DataError for half of a surrogate pair, which JSON may hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a surrogate pair at character {error.start}: write the pair or leave it out"
        ) from None
    return text


def kind_name(value: object) -> str:
    """Return how an error names the kind of a value, such as "a number"."""
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
