"""Targets of the next-token loss from labels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.errors import UsageError

# The label of tokens that the loss does not count, in Hugging Face and PyTorch.
IGNORED = -100
PAD_DOCUMENT = -1  # document id of padding, as is any below 0


def next_token_targets(
    labels: Tensor,
    attention_mask: Tensor | None,
    vocab_size: int,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the target of each position, and on a GPU, or in a traced graph, whether a label is invalid.

    Shifting the labels saves a copy of the logits. A position of padding predicts nothing, nor does the last one of a
    document. On a GPU invalid labels are ignored and flagged, since reading their values would synchronize and kernels
    must not use them as indices.

    Args:
        labels: int64 [B, S], not shifted; -100 is not counted.
        attention_mask: [B, S], 0 at padding; None: no padding.
        vocab_size: labels must be below it.
        document_ids: int [B, S], the document that each token belongs to, below 0 at padding; None: a row is one.

    Returns:
        int64 [B * S] with -100 where there is no target; a bool scalar on the device, None if labels were checked.

    Raises:
        UsageError: on a CPU, a label is neither -100 nor in the vocabulary.
    """
    return valid_targets(shifted(labels, attention_mask, document_ids).flatten(), vocab_size)


def shifted(
    labels: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None = None
) -> Tensor:
    """Return the target of each position, int64 [B, S], -100 where there is none; arguments as above."""
    targets = labels[:, 1:]  # [B, S - 1]
    if document_ids is not None:
        before = document_ids[:, :-1]
        after = document_ids[:, 1:]
        targets = targets.masked_fill((before != after) | (before < 0), IGNORED)
    if attention_mask is not None:
        targets = targets.masked_fill(attention_mask[:, :-1] == 0, IGNORED)
    return F.pad(targets, (0, 1), value=IGNORED)  # the last token has no next one


def valid_targets(targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor | None]:
    """Return targets int64 [N] that a kernel may index with, and whether one is invalid, as `next_token_targets`."""
    invalid = (targets != IGNORED) & ((targets < 0) | (targets >= vocab_size))
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool(invalid.any()):
            raise UsageError(describe_invalid(int(targets[invalid][0]), vocab_size))
        return targets, None
    return targets.masked_fill(invalid, IGNORED), invalid.any()


def describe_invalid(label: int, vocab_size: int) -> str:
    """Return one line about a label outside the vocabulary."""
    return f"a label is {label}: give 0 to {vocab_size - 1} (vocab_size={vocab_size}), or {IGNORED} where none counts"


def invalid_label(labels: Tensor, vocab_size: int) -> str | None:
    """Return one line about the first label outside the vocabulary, None if there is none. Waits for the device."""
    invalid = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))]
    return describe_invalid(int(invalid[0]), vocab_size) if len(invalid) else None


def nan_if(loss: Tensor, invalid: Tensor | None) -> Tensor:
    """Return NaN in place of a loss whose labels are invalid, without waiting for the device."""
    if invalid is None:
        return loss
    return torch.where(invalid, torch.full_like(loss, float("nan")), loss)
