"""One line for a row of no known format: the columns it has, the formats there are, and what to rename."""

import difflib
import shlex
from collections.abc import Collection, Mapping

from te_models.data.row_values import (
    LISTS_OF_TURNS,
    ROLES,
    is_turns,
    kind_name,
    parsed,
    written_role,
)

# Usual names of a list of all records.
_AROUND = ("data", "records", "rows", "examples", "instances", "train")
# Usual names of a prompt, and of an answer, in lower case.
_ASKED = ("prompt", "instruction", "question", "query", "input")
_ANSWERED = ("completion", "answer", "response", "output", "reply")
_FIELDS = ("messages", "instruction", "output", "prompt", "completion", "text")
_KNOWN = (
    "messages [{role, content}], conversations [{from, value}], instruction and output, "
    "prompt and completion, or text"
)


def unrecognized(row: Mapping[str, object], place: str) -> str:
    """Return one line that says which columns a row has and which formats there are."""
    if {"chosen", "rejected"} <= row.keys():
        return f"{place}: a preference (chosen, rejected): {_preference_advice(row)}"
    # From the most certain guess to the least: the first that applies is the advice.
    for name, value in row.items():
        alone = len(row) == 1 or name in _AROUND
        if alone and isinstance(value, list) and value and isinstance(value[0], dict):
            return f"{place}: one object around the records: write the list {name!r} alone, as a JSON array or as JSONL"
    for name in LISTS_OF_TURNS:
        if name in row:
            line = f"{place}: {name!r} is {_not_turns(row[name])}, not a list of messages"
            return f"{line}: write one, leave the record out, or name other columns with --columns"
    shown = ", ".join(repr(name)[:60] for name in list(row)[:8]) + (", ..." if len(row) > 8 else "")
    for name in row:
        if near := difflib.get_close_matches(
            name.lower(), [one for one in _FIELDS if one not in row], n=1, cutoff=0.8
        ):
            columns = shlex.quote(f"{near[0]}={name[:60]}")
            renamed = (
                f"rename {name[:60]!r} to {near[0]!r}, in all records with --columns {columns}"
            )
            return f"{place}: has {shown}: {renamed}"
    # No field resembles one of a format: name the two that sound most like a question and its answer.
    names = [name for name in row if name.isidentifier()]
    prompt_column = next(
        (name for name in names if name.lower() in _ASKED), next(iter(names), "question")
    )
    answered = next((name for name in names if name.lower() in _ANSWERED), "answer")
    pairs = {"prompt": prompt_column, "completion": answered}.items()
    columns = ",".join(f"{ours}={theirs}" for ours, theirs in pairs if ours != theirs)
    return (
        f"{place}: has {shown or 'no fields'}, but needs one of the formats {_KNOWN}: "
        f"rename fields, as in --columns {columns}"
    )


def _preference_advice(row: Mapping[str, object]) -> str:
    """Return how to train on the better answer of a preference, with its prompt, wherever that stands."""
    train = "to train on the better answers give --columns"
    chosen = parsed(row["chosen"])
    prompt_column = next((name for name in row if name.lower() in _ASKED), None)
    if is_turns(chosen) and chosen:
        if prompt_column is None or ROLES.get(written_role(chosen[0])) != "assistant":
            return f"{train} messages=chosen"  # the prompt is among the messages
        if not is_turns(row[prompt_column]):
            return (
                f"{prompt_column!r} is a text and 'chosen' a list of messages: write {prompt_column!r} as messages "
                "too, and give --columns completion=chosen"
            )
    if prompt_column is None:
        return f"{train} text=chosen"
    prompt = "" if prompt_column == "prompt" else f"prompt={prompt_column},"
    return f"{train} {prompt}completion=chosen"


def _not_turns(value: object) -> str:
    """Return what a value is that should be a list of messages."""
    value = parsed(value)
    if isinstance(value, str):
        return "a string that is not JSON" if value.lstrip()[:1] in ("[", "{") else "a text"
    return "a list of other things" if isinstance(value, list) else kind_name(value)


def misspelled(columns: Mapping[str, str], row: Collection[str], place: str) -> str | None:
    """Return a line about the first of your columns that a row has only under a similar name; None without one."""
    for name, meant in columns.items():
        near = difflib.get_close_matches(
            name, [other for other in row if other not in columns], n=1
        )
        if near and name not in row and meant not in row:
            return f"{place}: --columns {meant}={name}: there is no {name!r}: did you mean {near[0]!r}?"
    return None
