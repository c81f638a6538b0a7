"""Text from a model: greedy or sampled, token by token, for batches of unequal prompts.

A key/value cache holds what was seen, and on a GPU the steps are replayed from a CUDA graph (te_models.generation.decode_loop). Under an
FP8 recipe the model itself pads each step's rows to the alignment and leaves every scale and amax history as it was.
Nothing of the training state is touched.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.errors import unknown
from te_models.generation.decode_loop import cached_tokens, recomputed_tokens

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]]


def generate(model: Any, input_ids: Prompts, max_new_tokens: int = 64, **options: Any) -> Tensor:
    """Continue each prompt by up to `max_new_tokens`; returns int64 [B, S + new], prompts included.

    Options, prompts and errors as in `stream`. A row that has ended is filled up with the pad token (the stop token
    without one), and the loop ends when every row has.
    """
    ids, mask = batch_of(model, input_ids, options.pop("attention_mask", None))
    new = list(stream(model, ids, max_new_tokens, attention_mask=mask, **options))
    return torch.cat((ids, torch.stack(new, dim=1).to(ids.device)), dim=1)


@torch.no_grad()
def stream(
    model: Any,
    input_ids: Prompts,
    max_new_tokens: int = 64,
    *,
    attention_mask: Tensor | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_token_id: int | Iterable[int] | str | None = "config",
    stop_strings: str | Sequence[str] = (),
    tokenizer: Any = None,
    use_cache: bool = True,
    cuda_graph: bool | str = "auto",
) -> Iterator[Tensor]:
    """The new tokens of all rows, int64 [B] in the host's memory, as soon as each is known.

    Args:
        model: a CausalLM.
        input_ids: int64 [B, S], or one prompt or several of any length as lists of ids.
        max_new_tokens: the most tokens to add.
        attention_mask: [B, S], 0 at padding, which must be on the left.
        do_sample: sample instead of taking the likeliest token; the five options after it say how (`sample`).
        eos_token_id: a row ends with any of these; "config" for those of the model, None for none.
        stop_strings: a row ends once one of these is in its new text, as `tokenizer` decodes it.
        use_cache: False computes the whole sequence anew for each token.
        cuda_graph: replay the steps from a CUDA graph; "auto" does so on a CUDA device. The tokens are the same.

    Raises:
        ValueError: an empty prompt, padding on the right, an id outside the vocabulary, a prompt that with
            `max_new_tokens` is longer than max_position_embeddings, an option out of range, a cache that does not fit.
    """
    ids, mask = batch_of(model, input_ids, attention_mask)
    _check_room(model, ids.shape[1], max_new_tokens)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check_sampling(**sampling)
    graph = _with_graph(model, cuda_graph, use_cache)
    endings = _endings(stop_strings, tokenizer)
    stops = torch.tensor(stop_ids(model, eos_token_id), dtype=torch.long)
    filler = pad_id(model, stops)
    generator = torch.Generator(device=model.device)
    generator.seed() if seed is None else generator.manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        return sample(logits, generator, **sampling) if do_sample else logits.argmax(-1)

    ended = torch.zeros(len(ids), dtype=torch.bool)
    made: list[Tensor] = []
    with evaluating(model):
        if use_cache:
            steps = cached_tokens(model, ids, mask, max_new_tokens, pick, generator, graph)
        else:
            steps = recomputed_tokens(model, ids, mask, max_new_tokens, pick)
        with contextlib.closing(steps):
            for new in steps:
                new = new.masked_fill(ended, filler)
                ended = ended | torch.isin(new, stops)
                if endings:
                    made.append(new)
                    ended |= _ended_with(torch.stack(made, dim=1), endings, tokenizer)
                yield new
                if (len(stops) or endings) and bool(ended.all()):
                    return


def batch_of(model: Any, prompts: Prompts, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(ids int64 [B, S], mask [B, S] or None) on the model's device; lists of unequal length are padded on the left."""
    if not isinstance(prompts, Tensor):
        rows = [list(row) for row in ([prompts] if prompts and isinstance(prompts[0], int) else prompts)]  # type: ignore[list-item]
        if not rows or not all(rows):
            raise ValueError("the prompt is empty: give at least one token")
        width = max(map(len, rows))
        padding = pad_id(model, None)
        attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        prompts = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    ids = prompts.to(model.device)
    if not ids.numel() or (attention_mask is not None and not bool(attention_mask.any(-1).all())):
        raise ValueError("the prompt is empty: give at least one token")
    if int(ids.max()) >= model.config.vocab_size or int(ids.min()) < 0:
        raise ValueError(
            f"the prompt has token {int(ids.max())}, the model {model.config.vocab_size} tokens: use the model's own tokenizer"
        )
    if attention_mask is None:
        return ids, None
    if not bool(attention_mask[:, -1].all()):
        raise ValueError("attention_mask has padding on the right: to generate, pad the prompts on the left")
    return ids, attention_mask.to(model.device)


def stop_ids(model: Any, eos_token_id: int | Iterable[int] | str | None) -> list[int]:
    """The ids that end a row; "config": those of the model's generation_config.json, else of its config."""
    if eos_token_id == "config":
        generation = model.origin.generation or {}
        eos_token_id = generation.get("eos_token_id", model.config.eos_token_id)
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [int(i) for i in eos_token_id]


def pad_id(model: Any, stops: Tensor | None) -> int:
    """What rows are filled up with: the model's pad token, else the first stop token, else 0."""
    generation = model.origin.generation or {}
    own = generation.get("pad_token_id", model.config.pad_token_id)
    if own is not None and own < model.config.vocab_size:
        return own
    return int(stops[0]) if stops is not None and len(stops) else 0


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode, and back when the last of the threads that generate with it has finished."""
    with _LOCK:
        users, was_training = _EVALUATING.get(model, (0, model.training))
        _EVALUATING[model] = users + 1, was_training
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            users, was_training = _EVALUATING[model]
            if users > 1:
                _EVALUATING[model] = users - 1, was_training
            else:
                del _EVALUATING[model]
                model.train(was_training)


_LOCK = threading.Lock()
_EVALUATING: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()  # users, training before


def sample(
    logits: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """One token a row of logits FP32 [B, V]; int64 [B].

    After division by `temperature`, only those remain that are among the `top_k` likeliest, in the smallest set of mass
    `top_p`, and at least `min_p` times as likely as the likeliest.
    """
    logits = logits / temperature
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if top_p is not None:
        ordered, index = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.scatter(1, index, ordered.masked_fill(mass_before >= top_p, float("-inf")))
    if min_p is not None:
        mass = logits.softmax(-1)
        logits = logits.masked_fill(mass < min_p * mass.amax(-1, keepdim=True), float("-inf"))
    # The least of exponential variables with these rates: the draw of torch.multinomial, which waits for the device.
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=generator)).argmax(-1)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """Raises ValueError for an option of `sample` that is out of range."""
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} is not positive: for the likeliest token use do_sample=False (--greedy)"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no token: give 1 or more")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name}={value} is not a probability above 0: give at most 1")


def stream_text(
    model: Any, tokenizer: Any, prompt: str | Sequence[int], max_new_tokens: int, **options: Any
) -> Iterator[str]:
    """The continuation of one prompt in pieces of text, as soon as each is certain.

    It ends before the tokenizer's or the model's end-of-text and before a stop string. Options as in `stream`.
    """
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    options.setdefault("eos_token_id", sorted({*stop_ids(model, "config"), *own}))
    endings = _endings(options.get("stop_strings", ()), tokenizer)
    stops = set(stop_ids(model, options["eos_token_id"]))
    made: list[int] = []
    told = 0
    for tokens in stream(model, [ids], max_new_tokens, tokenizer=tokenizer, **options):
        if int(tokens[0]) not in stops:
            made.append(int(tokens[0]))
        text = tokenizer.decode(made)
        cut = min((text.find(end) for end in endings if end in text), default=None)
        # What may still change is held back: half a character, and half a stop string.
        certain = len(text.rstrip("\ufffd")) if cut is None else cut
        if cut is None:
            certain -= max((n for end in endings for n in range(len(end)) if text.endswith(end[:n])), default=0)
        if certain > told:
            yield text[told:certain]
            told = certain
        if cut is not None:
            return
    rest = tokenizer.decode(made)[told:]
    if rest:
        yield rest


def continue_text(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, **options: Any) -> str:
    """`prompt` and its continuation as text; options as in `stream_text`."""
    return prompt + "".join(stream_text(model, tokenizer, prompt, max_new_tokens, **options))


def _check_room(model: Any, length: int, max_new_tokens: int) -> None:
    limit = model.config.longest_sequence
    name = "max_position_embeddings" if limit == model.config.max_position_embeddings else "what RoPE stretches to"
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} adds nothing: give 1 or more")
    if length + max_new_tokens > limit:
        raise ValueError(
            f"{length} prompt tokens and max_new_tokens={max_new_tokens} are more than {name}={limit}: "
            "shorten one of them"
        )


def _with_graph(model: Any, choice: bool | str, use_cache: bool) -> bool:
    """Whether to capture the steps in a CUDA graph."""
    if choice not in ("auto", True, False):
        raise unknown("cuda_graph", choice, ("auto", "True", "False"))
    if choice is True and not use_cache:
        raise ValueError("cuda_graph=True needs the cache: leave out use_cache=False")
    if choice is True and model.device.type != "cuda":
        raise ValueError(f"cuda_graph=True needs a CUDA device and the model is on {model.device}: leave it at 'auto'")
    return use_cache and model.device.type == "cuda" if choice == "auto" else bool(choice)


def _endings(stop_strings: str | Sequence[str], tokenizer: Any) -> list[str]:
    endings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if endings and tokenizer is None:
        raise ValueError("stop_strings needs tokenizer=, to read the new tokens as text")
    if not all(endings):
        raise ValueError("a stop string is empty: it would end every row at once")
    return endings


def _ended_with(new: Tensor, endings: list[str], tokenizer: Any) -> Tensor:
    """Which rows of `new` [B, n] have a stop string among their newest tokens; each is at least a byte of text."""
    newest = max(len(end.encode()) for end in endings) + 4
    texts = [tokenizer.decode(row[-newest:].tolist()) for row in new]
    return torch.tensor([any(end in text for end in endings) for text in texts], device=new.device)
