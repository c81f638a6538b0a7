"""Requests of OpenAI's API for completions and chat completions: what they ask of a model, and the answers.

A field that would change an answer and is not supported is refused; others, such as `user`, are ignored.
"""

from __future__ import annotations

import difflib
import itertools
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_models.data.row_values import encodable
from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import UsageError, mistyped
from te_models.files.formats import Fields
from te_models.generation.options import GenerationOptions, complete
from te_models.generation.text import Outcome, stream_text
from te_models.model.decoder_of import decoder_of

# The default of OpenAI's API; a chat answer has all of the model's context.
COMPLETION_TOKENS = 16
MOST_CHOICES = 16
# Seconds to wait for a token; a client that reads nothing holds an answer up as well.
LONGEST_STEP = 30.0
# Similarity of a misspelled field; OpenAI's `store` and others, which are ignored, are less like the ones read here.
CLOSE = 0.8
# Fields that change an answer, with the values that leave it as it is: OpenAI's, and those that clients send vLLM.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    # False of chats; a completion's 0 asks for the chosen tokens' own.
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# Fields that are read.
SUPPORTED = (
    "model",
    "messages",
    "chat_template_kwargs",
    "prompt",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
)


class UnknownModel(UsageError):
    """The request names a model that is not served here."""


class Ended(RuntimeError):
    """The server ends, and the answer with it."""

    def __init__(self) -> None:
        super().__init__("the server has been stopped: start it again, and repeat the request")


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        chat: whether it is a chat completion.
        prompts: the ids to continue, one list per prompt.
        choices: answers per prompt.
        max_tokens: limit of each; None: the model's context.
        stream: whether the answer is sent in pieces.
        usage: whether a stream ends with the numbers of tokens.
        options: of generation.
    """

    chat: bool
    prompts: Sequence[Sequence[int]]
    choices: int
    max_tokens: int | None
    stream: bool
    usage: bool
    options: GenerationOptions


class Completions:
    """Answers requests with a model, one at a time.

    Args:
        model: a CausalLM, or a TEModelsForCausalLM.
        tokenizer: for chat completions it needs a chat template.
        name: the name by which requests call the model.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, name: str) -> None:
        self.model = decoder_of(model)
        self.tokenizer = tokenizer
        self.name = name
        self.created = int(time.time())
        # One answer at a time: a model has one cache of FP8 weights, and a CPU or GPU serves one text as fast as it
        # can.
        self._busy = threading.Lock()
        self._ending = threading.Event()

    def end(self) -> None:
        """End the answer that is being made at its next piece of text, and refuse the requests that wait.

        Waits until the model is at rest: a thread inside PyTorch aborts the process when the interpreter goes.
        """
        self._ending.set()
        if self._busy.acquire(timeout=LONGEST_STEP):
            self._busy.release()

    def models(self) -> Fields:
        """Return the list of models."""
        return {"object": "list", "data": [self.about()]}

    def about(self) -> Fields:
        """Return the entry of the model in that list."""
        longest = self.model.config.longest_sequence
        about = dict(id=self.name, object="model", created=self.created, owned_by="te-models")
        return {**about, "max_model_len": longest}

    def read(self, fields: Mapping[str, Any], chat: bool) -> Request:
        """Return what the fields of a request ask for.

        Raises:
            UsageError: a field is missing, of a wrong type, out of range, or not supported.
        """
        named = _take(fields, "model", str, self.name)
        if named != self.name:
            raise UnknownModel(f"the model {named!r} is not served here: give {self.name!r}")
        # Clients send some of these with the value that asks for nothing: those are taken.
        for name, neutral in UNSUPPORTED.items():
            if fields.get(name) is not None and not _asks_nothing(fields[name], neutral):
                raise UsageError(f"{name} is not supported here: leave it out")
        for name in fields:
            if name not in SUPPORTED and name not in UNSUPPORTED:
                _check_spelling(name)
        prompts = [self._chat_prompt(fields)] if chat else self._prompts(fields)
        choices = _take(fields, "n", int, 1)
        if not 1 <= choices <= MOST_CHOICES:
            raise UsageError(f"n={choices} is out of range: give 1 to {MOST_CHOICES}")
        limit = _take(fields, "max_tokens", int, None if chat else COMPLETION_TOKENS)
        # OpenAI's newer name comes first where a client sends both.
        limit = _take(fields, "max_completion_tokens", int, limit)
        if limit is not None and limit < 1:
            raise UsageError(f"max_tokens={limit} is out of range: give 1 or more")
        extra = _take(fields, "stream_options", dict, {})
        return Request(
            chat=chat,
            prompts=prompts,
            choices=choices,
            max_tokens=limit,
            stream=_take(fields, "stream", bool, False),
            usage=_take(extra, "include_usage", bool, False),
            options=_options(fields),
        )

    def _chat_prompt(self, fields: Mapping[str, Any]) -> list[int]:
        """Return the ids of the messages in the chat template, up to where the assistant speaks."""
        messages = _take(fields, "messages", list, None)
        if not messages:
            raise UsageError("messages is missing: give a list of objects with role and content")
        variables = _take(fields, "chat_template_kwargs", dict, {})
        turns = [_message(message, number) for number, message in enumerate(messages)]
        return self.tokenizer.apply_chat_template(turns, **variables)

    def _prompts(self, fields: Mapping[str, Any]) -> list[list[int]]:
        """Return the ids of a prompt or several, each a text or a list of ids."""
        prompt_field = fields.get("prompt")
        is_list = isinstance(prompt_field, list)
        # By type, since JSON's true and false are ints to Python. An empty list is one prompt without tokens.
        is_ids = is_list and all(type(token) is int for token in prompt_field)
        prompts = []
        for prompt in prompt_field if is_list and not is_ids else [prompt_field]:
            if isinstance(prompt, str):
                encodable(prompt, "prompt")
                prompt = self.tokenizer.encode_prompt(prompt)
            if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
                raise UsageError(
                    "prompt is missing or of a wrong type: give a text, a list of token ids, or a list of these"
                )
            if not prompt:
                raise UsageError("prompt is empty: give at least one token")
            prompts.append(prompt)
        return prompts

    def pieces(self, request: Request) -> Generator[Fields, None, None]:
        """Yield the answer as OpenAI's objects for streams: a piece of text each, then how each choice finished.

        Other requests wait until this one is done, or its iterator is closed. Raises `Ended` after `end`.
        """
        with self._busy:
            # One id for all pieces of an answer.
            base = self._base(request, stream=True)
            prompt_tokens = sum(map(len, request.prompts))
            completion_tokens = 0
            self._check_open()
            for index, prompt, seed in self._answers(request):
                outcome = Outcome()
                options = request.options if seed is None else {**request.options, "seed": seed}
                limit = request.max_tokens
                if limit is None:
                    # At least one, so that a prompt that is too long is refused in the model's words.
                    limit = max(1, self.model.config.longest_sequence - len(prompt))
                texts = stream_text(self.model, self.tokenizer, prompt, limit, outcome, **options)
                first = next(texts, "")  # a mistake in the prompt is found here
                if request.chat:
                    # OpenAI's streams name the role in a piece of its own, before any text.
                    opening = {"role": "assistant", "content": ""}
                    yield {**base, "choices": [_choice(index, None, delta=opening)]}
                for text in itertools.chain([first], texts):
                    self._check_open()
                    if text:
                        yield {**base, "choices": [_piece(request, index, text)]}
                reason = "stop" if outcome.ended else "length"
                yield {**base, "choices": [_piece(request, index, "", reason)]}
                completion_tokens += outcome.tokens
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            }
            # Always made: the whole answer needs it, and the server leaves it out of a stream that did not ask for it.
            yield {**base, "choices": [], "usage": usage}

    def _check_open(self) -> None:
        """Raise `Ended` once `end` was called."""
        if self._ending.is_set():
            raise Ended

    def whole(self, request: Request) -> Fields:
        """Return the answer as one of OpenAI's objects."""
        count = len(request.prompts) * request.choices
        texts = [""] * count
        reasons = [""] * count
        usage = {}
        for piece in self.pieces(request):
            usage = piece.get("usage", {})
            for choice in piece["choices"]:
                index = choice["index"]
                texts[index] += (
                    choice["delta"].get("content", "") if request.chat else choice["text"]
                )
                reasons[index] = choice["finish_reason"]
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            if request.chat:
                message = {"role": "assistant", "content": text}
                choices.append(_choice(index, reason, message=message))
            else:
                choices.append(_choice(index, reason, text=text))
        return {**self._base(request, stream=False), "choices": choices, "usage": usage}

    def _answers(self, request: Request) -> Iterator[tuple[int, Sequence[int], int | None]]:
        """Yield the index of each choice, its prompt, and its seed, which differs among the choices of a prompt."""
        seed = request.options.get("seed")
        index = 0
        for prompt in request.prompts:
            for number in range(request.choices):
                yield index, prompt, None if seed is None else seed + number
                index += 1

    def _base(self, request: Request, stream: bool) -> Fields:
        """Return the fields that the objects of an answer have in common."""
        kind = "text_completion"
        if request.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        prefix = "chatcmpl" if request.chat else "cmpl"
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }


def _choice(index: int, reason: str | None, **content: object) -> Fields:
    """Return a choice with its text or message, or a part of one with its piece."""
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _piece(request: Request, index: int, text: str, reason: str | None = None) -> Fields:
    """Return a part of a choice: a piece of its text."""
    # Completions have their text beside the index, chats in a message.
    if not request.chat:
        return _choice(index, reason, text=text)
    return _choice(index, reason, delta={"content": text} if text else {})


def _asks_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is one of the neutral ones; to Python 0 is False, and in a request it is not."""
    is_bool = isinstance(value, bool)
    return any(value == one and is_bool == isinstance(one, bool) for one in neutral)


def _check_spelling(name: str) -> None:
    """Refuse a field whose name is nearly one of those that are read, and would be ignored."""
    near = difflib.get_close_matches(name, SUPPORTED, n=1, cutoff=CLOSE)
    if near:
        raise UsageError(f"unknown field {name!r} of a request: did you mean {near[0]!r}?")


def _take(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of a request, `default` if it is missing or null; a UsageError if it is of another type."""
    value = fields.get(name)
    if value is None:
        return default
    # JSON has one kind of number: a client may send 1 for 1.0.
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or mistyped(value, kind):
        expected = {list: "a list", dict: "an object"}.get(kind) or mistyped(None, kind)
        raise UsageError(f"{name} is of a wrong type: give {expected}")
    return value


def _options(fields: Mapping[str, Any]) -> GenerationOptions:
    """Return the options of generation that a request asks for; a temperature of 0 takes the likeliest tokens."""
    options: GenerationOptions = {"do_sample": True}
    temperature = _take(fields, "temperature", float, 1.0)
    if temperature == 0:
        # The other options choose among tokens to draw from.
        options["do_sample"] = False
    else:
        options["temperature"] = float(temperature)
        for name, kind, off in (("top_p", float, 1), ("top_k", int, -1), ("min_p", float, 0)):
            value = _take(fields, name, kind, off)
            if value != off and not (name == "top_k" and value == 0):
                options[name] = value  # type: ignore[literal-required]
    seed = _take(fields, "seed", int, None)
    # Clients send a seed with a temperature of 0 too, where nothing is drawn.
    if seed is not None and options["do_sample"]:
        # OpenAI's seeds may be negative, torch's may not.
        options["seed"] = seed % 2**63
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else _take(fields, "stop", list, [])
    if not all(isinstance(text, str) for text in stops):
        raise UsageError("stop is of a wrong type: give a text, or a list of texts")
    if stops:
        options["stop_strings"] = stops
    # Refuses values out of range now, before the model is asked.
    complete(options)
    return options


def _message(message: object, number: int) -> dict[str, str]:
    """Return a message as chat templates take it: role and text."""
    if not isinstance(message, Mapping):
        raise UsageError(f"messages[{number}] is no object: give one with role and content")
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str):
        raise UsageError(f"messages[{number}] has no role: give system, user or assistant")
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                raise UsageError(f"messages[{number}] has a part that is no text: give text only")
            parts.append(text)
        content = "".join(parts)
    if not isinstance(content, str):
        raise UsageError(f"messages[{number}] has no text: give content")
    encodable(content, f"messages[{number}]")
    # OpenAI's newer name for the system's role, which templates do not know.
    return {"role": "system" if role == "developer" else role, "content": content}
