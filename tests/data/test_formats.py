"""Formats of records: recognized by content, brought to one form, and refused with a line that helps."""

import json
from typing import Any

import pytest

from te_models.config.data import parse_columns
from te_models.data.formats import ALPACA, MESSAGES, PAIRS, SHAREGPT, TEXT, recognize, row_document
from te_models.errors import DataError, UsageError

SYSTEM = {"role": "system", "content": "s"}
USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TALK = [USER, REPLY]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
AS_JSON = {"name": "f", "arguments": '{"x": 1}'}
EMPTY = {**REPLY, "content": "", "weight": 0}
Row = dict[str, Any]


def read(row: Row, columns: str = "") -> Any:
    """The text, the prompt and text, or the chat template's variables that a row becomes."""
    found = row_document(row, parse_columns(columns), "a.jsonl:1", "a.jsonl")
    assert (found.name, found.source) == ("a.jsonl:1", "a.jsonl")
    if found.conversation is not None:
        variables = json.loads(found.conversation)
        return variables if len(variables) > 1 else variables["messages"]
    return found.text if found.prompt is None else (found.prompt, found.text)


def sharegpt(*turns: tuple[str, str]) -> list[Row]:
    return [{"from": who, "value": said} for who, said in turns]


ROWS: dict[str, tuple[Row, str, Any]] = {
    "messages": ({"messages": TALK}, MESSAGES, TALK),
    "messages as JSON in a cell": ({"messages": json.dumps(TALK), "id": "1"}, MESSAGES, TALK),
    "messages beside a prompt": ({"prompt": "q", "prompt_id": "1", "messages": TALK}, MESSAGES, TALK),
    "messages under ShareGPT's name": ({"conversations": TALK}, MESSAGES, TALK),
    "ShareGPT": (
        {"conversations": sharegpt(("system", "s"), ("human", "q"), ("gpt", "a"))}, SHAREGPT, [SYSTEM, *TALK]
    ),
    "ShareGPT under OpenAI's name, with a system prompt": (
        {"messages": sharegpt(("human", "q"), ("gpt", "a")), "system": "s"}, SHAREGPT, [SYSTEM, *TALK]
    ),
    "ShareGPT with tools": (
        {"conversations": sharegpt(("human", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
                                   ("observation", "2"), ("gpt", "a")),
         "tools": '[{"name": "f"}]'},
        SHAREGPT,
        {"messages": [USER, CALLING, {"role": "tool", "content": "2"}, REPLY], "tools": [{"name": "f"}]},
    ),
    "Alpaca, with the text made of it": (
        {"instruction": "q", "input": "", "output": "a", "text": "### q a"}, ALPACA, TALK,
    ),
    "Alpaca with all": (
        {"instruction": "do", "input": "this", "output": "a", "system": "s", "history": [["x", "y"]]},
        ALPACA,
        [SYSTEM, {**USER, "content": "x"}, {**REPLY, "content": "y"}, {**USER, "content": "do\nthis"}, REPLY],
    ),
    "Alpaca without input": ({"instruction": "q", "output": "a", "input": None}, ALPACA, TALK),
    "prompt and completion": ({"prompt": "q", "completion": "a", "text": "q a"}, PAIRS, ("q", "a")),
    "prompt and completion as messages": (
        {"prompt": [USER, REPLY, USER], "completion": [REPLY]}, PAIRS, [USER, {**REPLY, "weight": 0}, USER, REPLY],
    ),
    "text": ({"text": "t", "n": 1}, TEXT, "t"),
    "text that looks like JSON": ({"text": "[1]"}, TEXT, "[1]"),
    "content as parts": (
        {"messages": [{**USER, "content": [{"type": "text", "text": text} for text in "q!"]}, REPLY]},
        MESSAGES,
        [{**USER, "content": "q!"}, REPLY],
    ),
    "a tool call with its arguments as JSON and no content": (
        {"messages": [
            USER,
            {**REPLY, "content": None, "tool_calls": [{"id": "1", "type": "function", "function": AS_JSON}]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
        ]},
        MESSAGES,
        [USER, {**CALLING, "tool_calls": [{"id": "1", **CALL}]},
         {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}],
    ),
    "OpenAI's older calls": (
        {"messages": [USER, {**REPLY, "content": None, "function_call": AS_JSON},
                      {"role": "function", "name": "f", "content": "2"}, REPLY],
         "functions": [{"name": "f"}]},
        MESSAGES,
        {"messages": [USER, CALLING, {"role": "tool", "content": "2", "name": "f"}, REPLY],
         "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    "a prompt that looks like JSON": ({"prompt": "[3, 1]", "completion": "[1, 3]"}, PAIRS, ("[3, 1]", "[1, 3]")),
    "a prompt that looks like JSON of objects": (
        {"prompt": '[{"id": 1}]', "completion": '{"id": 2}'}, PAIRS, ('[{"id": 1}]', '{"id": 2}')
    ),
    "messages in cells": ({"prompt": json.dumps([USER]), "completion": json.dumps([REPLY])}, PAIRS, TALK),
    "fields that an Arrow schema fills": (
        {"messages": [{**USER, "tool_calls": None, "name": None}, {**REPLY, "weight": 0}]},
        MESSAGES,
        [USER, {**REPLY, "weight": 0}],
    ),
    "empty answers": (
        {"messages": [USER, {**REPLY, "content": ""}, USER, {**REPLY, "content": None, "weight": 1}, USER,
                      {**REPLY, "content": [{"type": "text", "text": "\u00a0\n"}]}, REPLY]},
        MESSAGES,
        [USER, EMPTY, USER, EMPTY, USER, {**EMPTY, "content": "\u00a0\n"}, REPLY],
    ),
    "a thought alone": (
        {"messages": [USER, {**REPLY, "content": "", "reasoning_content": "r"}]},
        MESSAGES,
        [USER, {**REPLY, "content": "", "reasoning_content": "r"}],
    ),
    "empty answers of Alpaca": (
        {"instruction": "q", "output": None, "history": [["x", " "]]},
        ALPACA,
        [{**USER, "content": "x"}, {**EMPTY, "content": " "}, USER, EMPTY],
    ),
    "a completion that is null": ({"prompt": "q", "completion": None}, PAIRS, ("q", "")),
    "no answer": ({"messages": [USER]}, MESSAGES, [USER]),
    "letters": ({"messages": [{"role": "USER", "content": "\u00e9\u2028\r\n\U0001f600"}]}, MESSAGES,
                [{**USER, "content": "\u00e9\u2028\r\n\U0001f600"}]),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_recognized_and_read(case: str) -> None:
    row, kind, expected = ROWS[case]
    assert recognize(row) == kind
    assert read(row) == expected


COLUMNS: dict[str, tuple[str, Row, Any]] = {
    "a pair": ("prompt=question, completion=answer", {"question": "q", "answer": "a"}, ("q", "a")),
    "a pair beside a text": (
        "prompt=question,completion=answer", {"question": "q", "answer": "a", "text": "t"}, ("q", "a"),
    ),
    "half a pair": ("prompt=question", {"question": "q", "completion": "a"}, ("q", "a")),
    "text beside messages": ("text=body", {"body": "t", "messages": TALK}, "t"),
    "a column in place of another": ("text=body", {"body": "t", "text": "other"}, "t"),
    "messages": ("messages=dialog", {"dialog": TALK}, TALK),
    "turns": (
        "messages=dialog,role=speaker,content=words",
        {"dialog": [{"speaker": "human", "words": "q"}, {"speaker": "gpt", "words": "a"}]},
        TALK,
    ),
    "Alpaca": (
        "instruction=question,input=context,output=response", {"question": "q", "context": "", "response": "a"}, TALK,
    ),
    "system": ("system=persona", {"persona": "s", "messages": TALK}, [SYSTEM, *TALK]),
    "a row without the column": ("text=body", {"messages": TALK}, TALK),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_are_renamed(case: str) -> None:
    columns, row, expected = COLUMNS[case]
    assert read(row, columns) == expected


REFUSED: list[tuple[Row, str]] = [
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "better answers give --columns completion=chosen$"),
    ({"question": "q", "chosen": "a", "rejected": "b"}, "give --columns prompt=question,completion=chosen$"),
    ({"chosen": "q a", "rejected": "q b"}, "give --columns text=chosen$"),
    ({"chosen": TALK, "rejected": TALK}, "give --columns messages=chosen$"),
    ({"prompt": "q", "chosen": TALK, "rejected": TALK}, "give --columns messages=chosen$"),
    ({"prompt": [USER], "chosen": [REPLY], "rejected": [REPLY]}, "give --columns completion=chosen$"),
    (
        {"question": [USER], "chosen": sharegpt(("gpt", "a")), "rejected": sharegpt(("gpt", "b"))},
        "give --columns prompt=question,completion=chosen$",
    ),
    (
        {"prompt": "q", "chosen": [REPLY], "rejected": [REPLY]},
        "'prompt' is a text and 'chosen' a list of messages: write 'prompt' as messages too",
    ),
    (
        {"prompt": "q", "response": "a", "score": "b"},
        r"^a.jsonl:1: has 'prompt', 'response', 'score', but needs one of the formats messages \[{role, content}\], "
        r"conversations \[{from, value}\], instruction and output, prompt and completion, or text: rename fields, as "
        "in --columns completion=response$",
    ),
    (
        {"prompt": "q", "complection": "a"},
        "has 'prompt', 'complection': rename 'complection' to 'completion', in all records with "
        "--columns completion=complection$",
    ),
    ({}, "has no fields, but needs one of the formats"),
    ({"messages": "hello"}, "'messages' is a text, not a list of messages: write one, leave the record out"),
    ({"messages": None, "id": 1}, "'messages' is null, not a list of messages"),
    ({"messages": ["hello"]}, "'messages' is a list of other things, not a list of messages"),
    ({"messages": "[{'role': 'user'}]"}, "'messages' is a string that is not JSON, not a list of messages"),
    ({"Question": "q", "Response": "a"}, "rename fields, as in --columns prompt=Question,completion=Response$"),
    ({"messages": []}, "'messages' is an empty list, not a list of messages"),
    ({"messages": [{"content": "q"}]}, "message 1 of 'messages' has 'content', but needs role and content, or from"),
    ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "2 of 'messages' has the role 'narrator': use"),
    ({"messages": [{"role": None, "content": "x"}]}, "has the role 'None'"),
    ({"messages": [{"role": "user"}]}, "message 1 of 'messages' has no 'content': fill it in"),
    ({"messages": [{"role": "user", "content": 3}]}, "has a number as content, not a string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "has a part of the type 'image_url': only"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "message 1 of 'messages' holds half of a surrogate pair"),
    ({"messages": [{**REPLY, "tool_calls": [{"id": "1"}]}]}, "has a tool call without the name of a function"),
    ({"messages": TALK, "tools": "f"}, "'tools' is not a list of JSON schemas"),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, "has a tool call without the name of a function"),
    ({"instruction": None, "output": "a"}, "'instruction' is null, not a string"),
    ({"instruction": "q", "output": "a", "history": "x"}, "'history' is not a list of .question, answer. pairs"),
    ({"prompt": [USER], "completion": "a"}, "'completion' is a string, not a list of messages"),
    ({"prompt": "q", "completion": 1}, "'completion' is a number, not a string"),
    ({"text": ["a"]}, "'text' is a list, not a string"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_rows_that_are_no_records_are_refused(row: Row, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(row)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("a.jsonl:1: ")


PREFERENCES: list[tuple[Row, str, Any]] = [
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "completion=chosen", ("q", "a")),
    ({"prompt": [USER], "chosen": [REPLY], "rejected": []}, "completion=chosen", TALK),
    ({"chosen": TALK, "rejected": TALK}, "messages=chosen", TALK),
    ({"prompt": "q", "chosen": TALK, "rejected": TALK}, "messages=chosen", TALK),
    ({"chosen": "q a", "rejected": "b"}, "text=chosen", "q a"),
]


@pytest.mark.parametrize(("row", "columns", "expected"), PREFERENCES)
def test_the_advice_for_preferences_keeps_the_prompt(
    row: Row, columns: str, expected: object
) -> None:
    with pytest.raises(DataError, match=f"give --columns {columns}$"):
        read({"rejected": "b", **row} if row["rejected"] else {**row, "rejected": [REPLY]})
    assert read(row, columns) == expected


def test_messages_that_begin_with_an_answer_keep_their_prompt() -> None:
    row = {"prompt": [USER, REPLY, USER], "chosen": [REPLY], "rejected": [REPLY]}
    expected = [USER, {**REPLY, "weight": 0}, USER, REPLY]
    assert read(row, "messages=chosen") == read(row, "completion=chosen") == expected
    turns = [{"speaker": "gpt", "words": "a"}]
    renamed = {"prompt": [{"speaker": "human", "words": "q"}], "chosen": turns}
    assert read(renamed, "messages=chosen,role=speaker,content=words") == TALK


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("prompt", "'prompt' has no value or no name: write name=yours"),
        ("prompt=", "'prompt=' has no value or no name: write name=yours"),
        ("promt=q", "unknown column 'promt': did you mean 'prompt'"),
        ("prompt=q,completion=q", "'completion=q' names a column a second time"),
        ("prompt=q,prompt=r", "'prompt=r' names a column a second time"),
    ],
)
def test_bad_columns(columns: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_columns(columns)
