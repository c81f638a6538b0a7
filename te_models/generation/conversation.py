"""A conversation with a chat model: its messages so far, and answers streamed through the tokenizer's chat template."""

from collections.abc import Generator, Mapping
from typing import Any

from torch import nn
from typing_extensions import Unpack

from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import UsageError
from te_models.generation.options import GenerationOptions
from te_models.generation.text import stream_text
from te_models.model.decoder_of import decoder_of

LEAST_ROOM = 4  # an answer may always use 1/4 of the longest sequence; old turns are dropped to make room for it


def check_variables(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
    """Raise a UsageError for a variable that the tokenizer's chat template does not have.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    template = tokenizer.chat_template()
    for name in variables:
        if not template.names(name):
            raise UsageError(f"the chat template has no variable {name!r}: leave it out")


class Conversation:
    """Messages of user and assistant in turn, after an optional system message.

    Args:
        model: the CausalLM that answers, or a TEModelsForCausalLM.
        tokenizer: must have a chat template.
        system: the system message.
        variables: variables of the chat template, such as enable_thinking.

    Attributes:
        messages: dicts with "role" and "content", in order; a program may change the list between answers.
        forgotten: number of messages left out of the last prompt because the whole history was too long for the model.

    Raises:
        DataError: the tokenizer has no chat template.
        UsageError: the template has no such variable.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        check_variables(tokenizer, variables or {})
        self.model = decoder_of(model)
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        self.messages: list[dict[str, str]] = []
        self.forgotten = 0
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, None if there is none; setting it keeps the rest of the conversation."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        turns = self.turns()
        # An empty text is no system message: many templates would write an empty block for it.
        self.messages = [{"role": "system", "content": text}, *turns] if text else turns

    def turns(self) -> list[dict[str, str]]:
        """Return the messages after the system message."""
        return [message for message in self.messages if message["role"] != "system"]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = self.messages[: len(self.messages) - len(self.turns())]

    def undo(self) -> str | None:
        """Forget the last question and its answer; return the question, None if there is none."""
        questions = []
        for number, message in enumerate(self.messages):
            if message["role"] == "user":
                questions.append(number)
        if not questions:
            return None
        question = self.messages[questions[-1]]["content"]
        del self.messages[questions[-1] :]
        return question

    def answer(
        self, text: str, max_new_tokens: int = 512, **options: Unpack[GenerationOptions]
    ) -> Generator[str]:
        """Ask `text` and yield the answer in pieces; question and answer join the messages.

        An answer that the caller stops (by closing the iterator, or by an exception such as KeyboardInterrupt) joins as
        far as it was yielded. If it fails before the first piece, the messages are left unchanged.

        Args:
            text: the user's message.
            max_new_tokens: limit on the tokens of the answer, which the model's longest sequence may lower.
            options: as for `te_models.generation.text.stream_text`, and so are the errors.
        """
        # Before the prompt is made, which contains it; taken back below if nothing is answered.
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        complete = False
        try:
            ids, room = self._prompt(max_new_tokens)
            for piece in stream_text(
                self.model, self.tokenizer, ids, min(max_new_tokens, room), **options
            ):
                pieces.append(piece)
                yield piece
            complete = True
        finally:
            if pieces or complete:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _prompt(self, max_new_tokens: int) -> tuple[list[int], int]:
        """Return the ids of the conversation, without the oldest turns if needed, and the room for its answer."""
        limit = self.model.config.longest_sequence
        # The system message is never forgotten.
        before = self.messages[: len(self.messages) - len(self.turns())]
        turns = self.turns()
        # Without a bound a long max_new_tokens would push out the whole history.
        reserved = min(max_new_tokens, limit // LEAST_ROOM)
        first = 0
        while True:
            ids = self.tokenizer.apply_chat_template([*before, *turns[first:]], **self.variables)
            room = limit - len(ids)
            later = []
            for number in range(first + 1, len(turns)):
                if turns[number]["role"] == "user":
                    later.append(number)
            if room >= reserved or not later:
                self.forgotten = first
                return ids, max(room, 1)  # if one message is too long, the model says so
            # A whole turn at a time: an answer without its question would confuse the model, and most templates refuse
            # it.
            first = later[0]
