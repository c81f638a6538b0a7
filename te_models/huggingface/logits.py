"""The logits that transformers asks for, and the loss of its labels."""

from __future__ import annotations

from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.model.targets import IGNORED, nan_if, shifted, valid_targets


def kept_logits(logits: Tensor, keep: int | Tensor) -> Tensor:
    """Return the logits of the newest `keep` positions (0: of all), or of the positions `keep`."""
    if not isinstance(keep, int):
        return logits[:, keep]
    if keep and logits.shape[1] > keep:  # with routing there are logits of all positions
        return logits[:, -keep:]
    return logits


def shifted_labels(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the target of each position, int64 [B, S], of labels that are not shifted."""
    mask = None
    # A mask of four dimensions says who sees whom, and not which tokens are padding.
    if attention_mask is not None and attention_mask.dim() == 2:
        mask = attention_mask[:, -labels.shape[1] :].to(labels.device)
    return shifted(labels, mask)


def label_loss(
    model: CausalLM, logits: Tensor, targets: Tensor, count: Tensor | int | None
) -> Tensor:
    """Return the cross-entropy of logits [B, S, V] for targets [B, S], an FP32 scalar.

    The mean over the targets that count; with `count`, their sum divided by it.
    """
    targets, invalid = valid_targets(targets.flatten().to(logits.device), model.config.vocab_size)
    loss = nan_if(model.kernels.cross_entropy(logits.flatten(0, 1), targets), invalid)
    # The mean over this batch's labels becomes their sum, divided by the labels of all micro-batches.
    return loss if count is None else loss * (targets != IGNORED).sum() / count
