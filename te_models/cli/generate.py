"""`te-models generate` from a prompt, or a conversation, to printed text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from te_models.checkpoint.pretrained import tokenizer_of
from te_models.data.chat_template import ChatTemplate
from te_models.data.dataset import check_vocabulary
from te_models.data.tokenizer import Tokenizer, load_tokenizer
from te_models.errors import UsageError
from te_models.generation.generate import stream_text


def load_chat(tokenizer: str | None, model: str | None, chat: bool) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer at `tokenizer`, else the model's own, else bytes; and its chat template if `chat`."""
    place = tokenizer_of(tokenizer, model)
    words = load_tokenizer(place)
    if not chat:
        return words, None
    if place is None:
        raise UsageError("--chat needs a chat template: give --model or --tokenizer a folder that has one")
    return words, ChatTemplate.of(place if place.is_dir() else place.parent)


def tell(
    model: Any,
    words: Tokenizer,
    template: ChatTemplate | None,
    lines: Iterable[str],
    system: str | None,
    say: Callable[[str], None],
    *,
    max_new_tokens: int,
    **sampling: Any,
) -> None:
    """Answer each of `lines` through `say`, piece by piece; without a template, say the line and its continuation."""
    check_vocabulary(words, model.config.vocab_size)
    messages = [{"role": "system", "content": system}] if system else []
    for line in lines:
        prompt: str | list[int] = line
        if template is not None:
            messages.append({"role": "user", "content": line})
            prompt = words.encode(template.render(messages))
        pieces = stream_text(model, words, prompt, max_new_tokens, **sampling)
        answer = next(pieces, "")  # before the line is repeated, so that a refusal stands on a line of its own
        say(answer if template is not None else line + answer)
        for piece in pieces:
            say(piece)
            answer += piece
        say("\n")
        messages.append({"role": "assistant", "content": answer})
