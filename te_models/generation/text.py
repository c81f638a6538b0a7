"""Text from a model, streamed in pieces that no later token can change."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from typing_extensions import Unpack

from te_models.data.tokenizer import TokenizerLike, as_tokenizer
from te_models.data.tokenizer_base import text_after
from te_models.errors import UsageError
from te_models.generation.generate import stop_ids, stream
from te_models.generation.options import GenerationOptions, complete
from te_models.model.decoder_of import decoder_of


@dataclass
class Outcome:
    """Notes of `stream_text` on a continuation while it yields it.

    Attributes:
        tokens: number of tokens that the model has made, a stop token among them.
        ended: whether a stop token or a stop string has ended the text, rather than the limit.
    """

    tokens: int = 0
    ended: bool = False


def stream_text(
    model: nn.Module,
    tokenizer: TokenizerLike,
    prompt: str | Sequence[int],
    max_new_tokens: int = 64,
    outcome: Outcome | None = None,
    **options: Unpack[GenerationOptions],
) -> Generator[str, None, None]:
    """Yield the continuation of one prompt, text or token ids, in pieces as soon as each is certain.

    `model` is a CausalLM, or a TEModelsForCausalLM. `tokenizer` is what `load_tokenizer` returns or takes, or a
    tokenizer of transformers. `outcome` is filled in meanwhile.

    It ends before the end-of-text token of tokenizer or model and before a stop string. Options and errors are as for
    `te_models.generation.generate.stream`.
    """
    model = decoder_of(model)
    tokenizer = as_tokenizer(tokenizer)
    if outcome is None:
        outcome = Outcome()
    if not isinstance(prompt, Iterable):
        raise UsageError(f"the prompt is a {type(prompt).__name__}: give a text or token ids")
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
    text_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # A tokenizer's end of text may be missing from the model's config, and the other way around.
    options.setdefault("eos_token_id", sorted({*stop_ids(model, "config"), *text_end}))
    settings = complete(options)
    stops = set(stop_ids(model, settings.eos_token_id))
    endings = settings.endings
    new_ids: list[int] = []
    text = ""
    sent = 0
    for tokens in stream(model, [ids], max_new_tokens, tokenizer=tokenizer, **options):
        outcome.tokens += 1
        if int(tokens[0]) in stops:
            outcome.ended = True
        else:
            # A stop token has no text.
            new_ids.append(int(tokens[0]))
        text = text_after(tokenizer, ids, new_ids)
        cuts = [text.find(end) for end in endings if end in text]
        cut = min(cuts, default=None)
        certain = _certain(text, endings) if cut is None else cut
        if certain > sent:
            yield text[sent:certain]
            sent = certain
        if cut is not None:
            outcome.ended = True
            return
    if text[sent:]:
        yield text[sent:]


def _certain(text: str, endings: Sequence[str]) -> int:
    """Return the length of `text` that is final: without an incomplete character or stop string at its end."""
    begun = 0  # characters of a stop string that may go on
    for end in endings:
        for length in range(len(end)):
            if text.endswith(end[:length]):
                begun = max(begun, length)
    return len(text.rstrip("\ufffd")) - begun
