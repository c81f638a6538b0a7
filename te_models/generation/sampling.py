"""One token from logits: temperature, top-k, top-p and min-p."""

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Draw one token per row of logits FP32 [B, V]; return int64 [B].

    After division by `temperature`, only those tokens remain that are among the `top_k` likeliest, in the smallest set
    of probability `top_p`, and at least `min_p` times as likely as the likeliest.
    """
    logits = logits / temperature
    if top_k is not None:
        # [B, 1]: the least of the logits that remain; equal ones remain too.
        floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if top_p is not None:
        ordered, index = logits.sort(descending=True)
        # [B, V], of the tokens that are likelier: the likeliest always remains, since its own is 0.
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.scatter(1, index, ordered.masked_fill(mass_before >= top_p, float("-inf")))
    if min_p is not None:
        mass = logits.softmax(-1)
        logits = logits.masked_fill(mass < min_p * mass.amax(-1, keepdim=True), float("-inf"))
    # The smallest of exponential variables with these rates: what torch.multinomial draws, without a synchronization.
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=generator)).argmax(
        -1
    )
