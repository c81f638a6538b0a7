"""Tokens from a model: greedy or sampled, step by step, for batches of unequal prompts.

A key/value cache stores earlier positions, and on a GPU the steps are replayed from a CUDA graph
(te_models.generation.decode_loop). Under an FP8 recipe the model pads each step's rows to the alignment and leaves
every scale and amax history as it was.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from te_models.config.settings import Setting
from te_models.data.tokenizer_base import Tokenizer, text_after
from te_models.errors import UsageError
from te_models.fp8.region import evaluating
from te_models.generation.decode_loop import cached_tokens, recomputed_tokens
from te_models.generation.options import GenerationOptions, GenerationSettings, complete
from te_models.generation.sampling import Sampling
from te_models.model.decoder import Decoder
from te_models.model.decoder_of import decoder_of
from te_models.model.graph_obstacle import graph_obstacle

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]]
MAX_NEW_TOKENS = Setting(
    name="max_new_tokens", help="Maximum number of tokens to add.", kinds=(int,), least=1
)


def generate(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int = 64,
    attention_mask: Tensor | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Unpack[GenerationOptions],
) -> Tensor:
    """Continue each prompt by up to `max_new_tokens`; return int64 [B, S + new], prompts included.

    Arguments and errors are the same as for `stream`. Finished rows are padded with the pad token (without one, the
    stop token), and the loop ends when every row has finished.
    """
    model = decoder_of(model)
    ids, mask = batch_of(model, input_ids, attention_mask)
    new = list(stream(model, ids, max_new_tokens, mask, tokenizer, **options))
    return torch.cat((ids, torch.stack(new, dim=1).to(ids.device)), dim=1)


@torch.no_grad()
def stream(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int = 64,
    attention_mask: Tensor | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Unpack[GenerationOptions],
) -> Iterator[Tensor]:
    """Yield the new tokens of all rows, int64 [B] in host memory, as soon as they are known.

    Args:
        model: a CausalLM, or a TEModelsForCausalLM.
        input_ids: int64 [B, S], or [S] for one prompt; or one prompt or several of any length as lists of ids.
        max_new_tokens: maximum number of tokens to add.
        attention_mask: [B, S], 0 at padding, which must be on the left.
        tokenizer: decodes new tokens for `stop_strings`.
        options: see GenerationOptions.

    Raises:
        ValueError: an empty prompt, padding on the right, an id outside the vocabulary, a prompt that with
            `max_new_tokens` exceeds max_position_embeddings, an unknown option or one out of range, a cache that does
            not fit into memory.
    """
    model = decoder_of(model)
    settings = complete(options)
    if settings.endings and tokenizer is None:
        raise UsageError("stop_strings needs tokenizer=, to read the new tokens as text")
    ids, mask = batch_of(model, input_ids, attention_mask)
    _check_room(model, ids.shape[1], max_new_tokens)
    graph = _with_graph(model, settings)
    # On the host, as the new tokens are: comparing there does not make the device wait.
    stops = torch.tensor(stop_ids(model, settings.eos_token_id), dtype=torch.long)
    filler = pad_id(model, stops)
    sampling = Sampling(
        do_sample=settings.do_sample,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )
    seed = settings.seed
    if seed is None and settings.do_sample:
        seed = _drawn_seed()
    ended = torch.zeros(len(ids), dtype=torch.bool)
    # Without padding, for stop strings, which are searched in text.
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    rows = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
    with evaluating(model, model.te, model.recipe):
        if settings.use_cache:
            steps = cached_tokens(model, ids, mask, max_new_tokens, sampling, seed, graph)
        else:
            steps = recomputed_tokens(model, ids, mask, max_new_tokens, sampling, seed)
        # Closed also where the caller stops reading: the loop then takes the FP8 weights out of the modules.
        with contextlib.closing(steps):
            for new_tokens, new in enumerate(steps, start=1):
                # Rows go on together: one that has ended is computed further, and what it gives is not shown.
                new = new.masked_fill(ended, filler)
                ended = ended | torch.isin(new, stops)
                if tokenizer is not None and settings.endings:
                    for row, token in zip(rows, new.tolist(), strict=True):
                        row.append(token)
                    stopped = [
                        _has_ended(row, new_tokens, settings.endings, tokenizer) for row in rows
                    ]
                    ended |= torch.tensor(stopped)
                yield new
                if (len(stops) or settings.endings) and bool(ended.all()):
                    return


def _drawn_seed() -> int:
    """Return a seed from PyTorch's random numbers."""
    return int(torch.randint(2**63 - 1, ()))


def batch_of(
    model: Decoder, prompts: Prompts, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (ids int64 [B, S], mask [B, S] or None) on the model's device; lists are padded on the left.

    The mask is None where there is no padding.
    """
    if isinstance(prompts, Tensor) and prompts.dim() == 1:
        prompts = prompts[None]  # one prompt, as a list of ids is
    if not isinstance(prompts, Tensor):
        rows = _rows(prompts)
        # Padded on the left, so that the newest token of every row is in the last column.
        width = max(map(len, rows), default=0)
        padding = pad_id(model, None)
        attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        prompts = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    ids = prompts.to(model.device)
    if not ids.numel() or (attention_mask is not None and not bool(attention_mask.any(-1).all())):
        raise UsageError("the prompt is empty: give at least one token")
    size = model.config.vocab_size
    # One synchronization for both ends of the range.
    low, high = map(int, ids.aminmax())
    wrong = low if low < 0 else high
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    if low < 0 or high >= size:
        raise UsageError(
            f"the prompt has token {wrong}, the model {size} tokens: use the model's own tokenizer"
        )
    if mask.shape != ids.shape:
        raise UsageError(
            f"attention_mask has shape {list(mask.shape)}, the prompts {list(ids.shape)}"
        )
    if not bool(mask[:, -1].all()):
        raise UsageError(
            "attention_mask has padding on the right: to generate, pad the prompts on the left"
        )
    # Most masks of single prompts hide nothing, and a prompt without one may be replayed from a CUDA graph.
    return ids, None if attention_mask is None or bool(mask.all()) else mask.to(model.device)


def stop_ids(model: Decoder, eos_token_id: int | Iterable[int] | str | None) -> list[int]:
    """Return the ids that end a row; "config" stands for the model's own."""
    if eos_token_id == "config":
        eos_token_id = model.stop_token_ids
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [int(i) for i in eos_token_id]


def pad_id(model: Decoder, stops: Tensor | None) -> int:
    """Return the id that pads rows: the model's pad token, else the first stop token, else 0."""
    # Some configs name a pad token that the model has no row for.
    pad = model.pad_token_id
    if pad is not None and 0 <= pad < model.config.vocab_size:
        return pad
    return int(stops[0]) if stops is not None and len(stops) else 0


def _rows(prompts: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Return one or several prompts as lists of ids."""
    try:
        rows = list(prompts)
        one = bool(rows) and isinstance(rows[0], int)
        nested = cast("list[Sequence[int]]", [rows] if one else rows)
        return [list(map(index, row)) for row in nested]
    except TypeError:  # of a text, in place of its tokens
        raise UsageError(
            "the prompts must be lists of token ids: give tokenizer.encode_prompt(text), or a text to stream_text"
        ) from None


def _check_room(model: Decoder, length: int, max_new_tokens: int) -> None:
    config = model.config
    MAX_NEW_TOKENS.check(max_new_tokens)
    if length + max_new_tokens > config.longest_sequence:
        raise UsageError(
            f"{length} prompt tokens and max_new_tokens={max_new_tokens} are more than {config.length_limit}: "
            "shorten one of them"
        )


def _with_graph(model: Decoder, settings: GenerationSettings) -> bool:
    """Return whether the steps are to be captured in a CUDA graph."""
    on_cuda = model.device.type == "cuda"
    reason = graph_obstacle(model)
    if settings.cuda_graph == "auto":
        return settings.use_cache and on_cuda and not reason
    if settings.cuda_graph is True and not on_cuda:
        raise UsageError(
            f"cuda_graph=True needs a CUDA device and the model is on {model.device}: leave it at 'auto'"
        )
    if settings.cuda_graph is True and reason:
        raise UsageError(f"cuda_graph=True is not possible: {reason}; leave it at 'auto'")
    return bool(settings.cuda_graph)


def _has_ended(
    row: list[int], new_tokens: int, endings: Sequence[str], tokenizer: Tokenizer
) -> bool:
    """Return whether a stop string is among the last `new_tokens` tokens; each is at least one byte of text."""
    # One byte per token at least, and up to four more for a character that the tail begins inside.
    tail = min(new_tokens, max(len(end.encode()) for end in endings) + 4)
    text = text_after(tokenizer, row[:-tail], row[-tail:])
    return any(end in text for end in endings)
