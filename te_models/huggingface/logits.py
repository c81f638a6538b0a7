"""The logits that transformers asks for, and the loss of its labels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.model.targets import IGNORED, nan_if, shifted, valid_targets


def kept_logits(logits: Tensor, keep: int | Tensor) -> Tensor:
    """Return the logits of the newest `keep` positions (0: of all), or of the positions `keep`."""
    if not isinstance(keep, int):
        return logits[:, keep]
    if keep and logits.shape[1] > keep:  # with routing there are logits of all positions
        return logits[:, -keep:]
    return logits


class Targets(NamedTuple):
    """The targets of a pass: int64 [B * S], and whether one is invalid, a bool scalar; None: they were checked."""

    ids: Tensor
    invalid: Tensor | None


def checked_targets(
    config: ModelConfig,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    attention_mask: Tensor | None,
) -> Targets | None:
    """Return the target of each position, of `shift_labels` or else of labels that are not shifted; None without both.

    Args:
        config: of the model.
        labels: int64 [B, S].
        shift_labels: int64 [B, S].
        attention_mask: as in the forward pass.

    Raises:
        UsageError: on a CPU, a label is neither -100 nor in the vocabulary.
    """
    if shift_labels is None:
        if labels is None:
            return None
        mask = None
        # A mask of four dimensions says who sees whom, and not which tokens are padding.
        if attention_mask is not None and attention_mask.dim() == 2:
            mask = attention_mask[:, -labels.shape[1] :].to(labels.device)
        shift_labels = shifted(labels, mask)
    return Targets(*valid_targets(shift_labels.flatten(), config.vocab_size))


def label_loss(
    model: CausalLM, logits: Tensor, targets: Targets, count: Tensor | int | None
) -> Tensor:
    """Return the cross-entropy of logits [B, S, V] for their targets, an FP32 scalar.

    The mean over the targets that count; with `count`, their sum divided by it.
    """
    ids = targets.ids.to(logits.device)
    invalid = None if targets.invalid is None else targets.invalid.to(logits.device)
    loss = nan_if(model.kernels.cross_entropy(logits.flatten(0, 1), ids), invalid)
    # The mean over this batch's labels becomes their sum, divided by the labels of all micro-batches.
    return loss if count is None else loss * (ids != IGNORED).sum() / count
