"""One token from logits: the likeliest, or one drawn with temperature, top-k, top-p and min-p."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """How a token is chosen. See te_models.generation.options for the fields."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def pick(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return one token per row of logits FP32 [B, V], int64 [B]; random numbers come from `generator`."""
        if not self.do_sample:
            return torch.argmax(logits, dim=-1)
        return sample(
            logits,
            generator,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


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
