"""Conversations to texts, by a tokenizer's chat template, and where the assistant's answers are in them.

The answers are the text inside {% generation %} blocks where the template has them; otherwise what the template adds to
the turns before an answer, with the generation prompt, when the answer comes after them. The latter needs a template
that renders the first turns of a conversation as it renders them when more turns follow, which is checked for each
answer.
"""

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_models.data.chat_template import ChatTemplate, Rendered
from te_models.data.formats import Document
from te_models.data.tokenizer_base import Tokenizer
from te_models.data.turns import THOUGHTS
from te_models.errors import DataError
from te_models.files.formats import Fields

_BATCH = 32  # conversations rendered at once
_BATCH_CHARACTERS = 2**20
# Templates disagree about a turn that only calls a tool: some join the arguments to text, as DeepSeek's, and some tell
# such a turn by its content being null, or not there.
_CONTENTS_OF_CALLS = ("", None, "absent")


class _Refused(DataError):
    """The template raised an error of its own."""


@dataclass
class _Record:
    """A conversation that is being rendered.

    Attributes:
        document: where it comes from.
        variables: of the chat template, "messages" among them.
        weights: whether each message of the assistant is learned.
    """

    document: Document
    variables: Fields
    weights: list[object]

    @property
    def messages(self) -> list[Fields]:
        """The turns."""
        return self.variables["messages"]


def render_conversations(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[Rendered | DataError]:
    """Yield the text of each conversation and where its answers are, or why it cannot be rendered.

    Conversations with tools use the tokenizer's template "tool_use", if it has one.
    """
    for batch in _batches(documents):
        records = [_record(document) for document in batch]
        with_tools = [record for record in records if record.variables.get("tools")]
        without = [record for record in records if not record.variables.get("tools")]
        results: dict[int, Rendered | DataError] = {}
        for group, tools in ((with_tools, True), (without, False)):
            if group:
                rendered = _render(tokenizer.chat_template(tools), group)
                results.update(zip(map(id, group), rendered, strict=True))
        yield from (results[id(record)] for record in records)


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Yield conversations in batches that the template's process renders in much less than its time."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.conversation or "")
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _record(document: Document) -> _Record:
    """Return a conversation with the variables of its template, and the weights of its answers beside them."""
    variables = json.loads(document.conversation or "{}")
    # Templates do not know "weight": it is taken out, and applied to the answers once they are found.
    weights = []
    for message in variables["messages"]:
        weight = message.pop("weight", 1)
        if message["role"] == "assistant":
            weights.append(weight)
    return _Record(document, variables, weights)


def _render(template: ChatTemplate, records: Sequence[_Record]) -> list[Rendered | DataError]:
    """Render conversations, each in the first of its forms that the template takes and writes in full."""
    results: list[Rendered | DataError | None] = [None] * len(records)
    imperfect: dict[int, Rendered] = {}  # with the arguments of calls as Python writes them
    forms = [_forms(record) for record in records]
    waiting = list(range(len(records)))
    # In rounds, since one call of the template's process renders a batch: round n tries form n of those that are left.
    while waiting:
        attempts = [(index, form) for index in waiting if (form := next(forms[index], None))]
        waiting = []
        outcomes = _render_forms(template, [form for _, form in attempts])
        for (index, form), outcome in zip(attempts, outcomes, strict=True):
            if isinstance(outcome, Rendered) and _writes_python(outcome.text, form):
                imperfect.setdefault(index, outcome)
            elif isinstance(outcome, Rendered):
                results[index] = outcome
                continue
            elif results[index] is None or isinstance(results[index], _Refused):
                results[index] = outcome  # a reason from a form that could be rendered says more
            waiting.append(index)
    return [_chosen(results[index], imperfect.get(index)) for index in range(len(records))]


def _chosen(
    perfect: Rendered | DataError | None, imperfect: Rendered | None
) -> Rendered | DataError:
    """Return the rendered text, one with arguments in Python's form if there is no other, else the error."""
    if isinstance(perfect, Rendered) or imperfect is None:
        assert perfect is not None
        return perfect
    return imperfect


def _forms(record: _Record) -> Iterator[_Record]:
    """Yield a conversation in each of the forms that templates expect of tool calls; only one without any."""
    yield record
    calling = [message for message in record.messages if message.get("tool_calls")]
    if not calling:
        return
    blank = any(not message["content"].strip() for message in calling)
    contents = _CONTENTS_OF_CALLS if blank else _CONTENTS_OF_CALLS[:1]
    for content, as_text in itertools.product(contents, (False, True)):
        if content == "" and not as_text:
            continue  # the form above
        form = copy.deepcopy(record.variables)
        texts = iter(record.document.arguments)
        for message in form["messages"]:
            calls = message.get("tool_calls") or ()
            for call in calls:
                text = next(texts, "")
                arguments = call["function"]["arguments"]
                if as_text and not isinstance(arguments, str):
                    call["function"]["arguments"] = text or json.dumps(
                        arguments, ensure_ascii=False
                    )
            if calls and not message["content"].strip():
                if content == "absent":
                    del message["content"]
                else:
                    message["content"] = content
        yield _Record(record.document, form, record.weights)


def _writes_python(text: str, record: _Record) -> bool:
    """Return whether a text has the arguments of a call as Python writes a dict, in place of JSON."""
    for message in record.messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            # Python writes single quotes, which a server that parses calls as JSON cannot read.
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return True
    return False


def _render_forms(
    template: ChatTemplate, records: Sequence[_Record]
) -> Iterator[Rendered | DataError]:
    """Yield each conversation rendered in one form, checked, or the reason why it cannot be."""
    requests = [list(_requests(record, template.marks_answers)) for record in records]
    answers = iter(template.render_all(itertools.chain.from_iterable(requests)))
    for record, own_requests in zip(records, requests, strict=True):
        own_answers = [next(answers) for _ in own_requests]
        try:
            yield _checked(record, template, own_answers)
        except DataError as error:
            yield error


def _requests(record: _Record, marks_answers: bool) -> Iterator[Fields]:
    """Yield a conversation, its prefixes that show where answers are, and those that show whether calls are written.

    For each answer these are the turns before it with the generation prompt, and those up to it; they are not needed
    if the template `marks_answers`.
    """
    yield record.variables
    messages = record.messages
    answers = [number for number, m in enumerate(messages) if m["role"] == "assistant"]
    if not marks_answers:
        # The answer is what the second rendered prefix has beyond the first.
        for number in answers:
            before = {**record.variables, "messages": messages[:number]}
            yield {**before, "add_generation_prompt": True}
            yield {**record.variables, "messages": messages[: number + 1]}
    # Calls under names that nothing else in the text can have: found again, they were written.
    calling = [number for number in answers if messages[number].get("tool_calls")]
    if calling and marks_answers:
        yield {**record.variables, "messages": _renamed(messages, calling)}
    elif calling:
        for number in calling:
            yield {**record.variables, "messages": _renamed(messages[: number + 1], [number])}


def _renamed(messages: Sequence[Fields], calling: Sequence[int]) -> list[Fields]:
    """Return messages in which the calls of some have names that no text contains by chance."""
    renamed = list(messages)
    for number in calling:
        message = copy.deepcopy(messages[number])
        for place, call in enumerate(message["tool_calls"]):
            call["function"]["name"] = _probe(number, place)
        renamed[number] = message
    return renamed


def _probe(number: int, place: int) -> str:
    """Return the name of call number `place` of message `number` in `_renamed`."""
    return f"te0models0call{number}x{place}x"


def _checked(
    record: _Record, template: ChatTemplate, answers: Sequence[Rendered | str]
) -> Rendered:
    """Return a conversation from the answers to its `_requests`; a DataError if it is not written in full."""
    document = record.document
    messages = record.messages
    turns = [number for number, m in enumerate(messages) if m["role"] == "assistant"]
    remaining = iter(answers)  # in the order of `_requests`
    rendered = _rendered(next(remaining), document)
    if not template.marks_answers:
        places = []
        for turn in turns:
            before = _rendered(next(remaining), document).text
            after = _rendered(next(remaining), document).text
            places.append(_answer(rendered.text, before, after, turn, document))
        rendered = Rendered(rendered.text, places)
    _check_calls(rendered, record, turns, list(remaining))
    _check_thoughts(rendered, messages, template, document)
    return _weighted(rendered, record.weights, document)


def _rendered(rendered: Rendered | str, document: Document) -> Rendered:
    """Return the rendered text; a template's own error, as a text, is raised as a DataError."""
    if isinstance(rendered, str):
        raise _Refused(f"{document.name}: the chat template refuses this record: {rendered}")
    return rendered


def _answer(whole: str, before: str, after: str, turn: int, document: Document) -> tuple[int, int]:
    """Return where an answer is in the whole conversation, from the turns before it and those up to it."""
    if not (after.startswith(before) and whole.startswith(after)):
        when = "when more turns follow"
        if not after.startswith(before):
            when = "when it is asked for an answer"
        raise DataError(
            f"{document.name}: the chat template renders the turns up to message {turn + 1} otherwise {when}, so it "
            "does not show where that answer is: give --chat-template a file that marks answers with {% generation %}"
        )
    return len(before), len(after)


def _check_calls(
    rendered: Rendered,
    record: _Record,
    turns: Sequence[int],
    probes: Sequence[Rendered | str],
) -> None:
    """Raise DataError if a template leaves out tool calls: an answer of nothing else would teach to end at once.

    `probes` are the conversation, or for each message with calls the turns up to it, with other names of the calls: if
    the text has them, the template writes calls. Where the template refuses those names, the calls' own are looked for.
    """
    calling = [number for number in turns if record.messages[number].get("tool_calls")]
    for position, number in enumerate(calling):
        probe = probes[position if len(probes) > 1 else 0]
        for place, call in enumerate(record.messages[number]["tool_calls"]):
            if isinstance(probe, Rendered):
                written = _probe(number, place) in _said(probe, len(turns))
            else:
                written = _has_name(_said(rendered, len(turns)), call["function"]["name"])
            if not written:
                raise DataError(
                    f"{record.document.name}: the chat template does not write the tool calls of message {number + 1}: "
                    "give --chat-template a file that does, or leave such records out"
                )


def _said(rendered: Rendered, turns: int) -> str:
    """Return the answers in a rendered conversation; all of it, if they are not marked one by one."""
    if len(rendered.answers) != turns:
        return rendered.text
    return "\n".join(rendered.text[start:stop] for start, stop in rendered.answers)


def _has_name(text: str, name: str) -> bool:
    """Return whether a name is in a text as a whole word, perhaps as JSON writes it."""
    written = (name, json.dumps(name)[1:-1])
    return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text) for one in written)


def _check_thoughts(
    rendered: Rendered,
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    document: Document,
) -> None:
    """Raise DataError if a template does not know the field of some reasoning, or leaves it out of the last turn.

    Many templates leave out the reasoning of earlier turns on purpose.
    """
    for number, message in enumerate(messages, 1):
        thoughts = {}
        for name in THOUGHTS:
            text = message.get(name)
            if isinstance(text, str) and text.strip():
                thoughts[name] = text.strip()
        if not thoughts:
            continue
        # A field that the template's source never names cannot reach the text.
        known = any(re.search(rf"\b{name}\b", template.source) for name in thoughts)
        # The last turn is the answer to learn, so its reasoning must be in the text.
        last = number == len(messages)
        written = any(text in rendered.text for text in thoughts.values())
        if not known or (last and not written):
            raise DataError(
                f"{document.name}: the chat template does not write the reasoning of message {number} "
                f"({', '.join(thoughts)}): give --chat-template a file that does, or leave it out"
            )


def _weighted(rendered: Rendered, weights: Sequence[object], document: Document) -> Rendered:
    """Leave out answers whose message is not to be learned (weight 0), or is empty."""
    if all(weights):
        return rendered
    if not any(weights):
        return Rendered(rendered.text, [])
    # A template may mark several pieces of a message, or none.
    if len(weights) != len(rendered.answers):
        raise DataError(
            f"{document.name}: the chat template marks {len(rendered.answers)} answers in {len(weights)} messages of "
            "the assistant, so those that are empty or of weight 0 cannot be told apart: leave them or the weights out"
        )
    counted = [place for place, weight in zip(rendered.answers, weights, strict=True) if weight]
    return Rendered(rendered.text, counted)
