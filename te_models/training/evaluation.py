"""Forward passes outside the training step: the evaluation loss, and the search for the layer that broke a run."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.distributed.control import Ranks
from te_models.fp8.region import evaluating
from te_models.model.context_parallel import ContextParallel
from te_models.model.decoder_of import decoder_of
from te_models.model.inputs import invalid_token
from te_models.model.targets import IGNORED, invalid_label, shifted

KEPT = "The weights are as before this step"  # in the line about a run that diverged
ALONE = ContextParallel(None)
Batch = dict[str, Tensor]  # "input_ids" and "labels", int64 [B, S], perhaps "document_ids"


def count_targets(batch: Batch, cp: ContextParallel = ALONE) -> int:
    """Return the number of this rank's tokens whose loss counts.

    Those that padding or another document would predict do not.
    """
    targets = shifted(batch["labels"], batch.get("attention_mask"), batch.get("document_ids"))
    share = cp.share(targets.shape[1])
    if share is not None:
        # Each rank counts its own part of a row, so that the sum over the ranks is the count of the row.
        targets = share.own_filled(targets, IGNORED)
    return int((targets != IGNORED).sum())


def count_tokens(batch: Batch, cp: ContextParallel = ALONE) -> int:
    """Return the number of this rank's tokens that reach experts: all but padding."""
    documents = batch.get("document_ids")
    mask = batch.get("attention_mask")
    real = torch.ones_like(batch["labels"], dtype=torch.bool)
    # Packed rows mark padding by a document below 0.
    if documents is not None:
        real = documents >= 0
    elif mask is not None:
        real = mask != 0
    share = cp.share(real.shape[1])
    if share is not None:
        real = share.own_filled(real, False)
    return int(real.sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to the device, through pinned memory: a copy from pageable memory waits for all queued work."""
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


@torch.no_grad()
def evaluate(
    model: CausalLM,
    batches: list[Batch],
    reduce: Callable[[Tensor], Tensor] = lambda totals: totals,
) -> float:
    """Return the mean cross-entropy over `batches` (on the CPU), in nats per counted token; nan if no token counts.

    FP8 scales and the model's mode do not change. `reduce` sums a tensor over the processes, each of which evaluates
    equally many batches of its own. A TEModelsForCausalLM is taken too.
    """
    decoder = decoder_of(model)
    totals = torch.zeros(2, dtype=torch.float64, device=decoder.device)  # loss, tokens
    with evaluating(decoder, decoder.te, decoder.recipe):
        for batch in batches:
            counted = count_targets(batch, decoder.cp)
            loss = (
                decoder(**to_device(batch, decoder.device), return_logits=False).loss.double()
                * counted
            )
            # Added up on the device: the host waits once, after the last batch.
            totals += torch.stack([loss, torch.full_like(loss, counted)])
    total, count = reduce(totals).tolist()
    return total / count if count else math.nan


@torch.no_grad()
def first_bad_module(model: CausalLM, batch: Batch, ranks: Ranks) -> str | None:
    """Return the name of the first module, in order of execution, with a NaN or infinite output or weight.

    None where every value is finite. All ranks call it together and return the first module of any rank: the experts of
    one rank may have made the values of the others NaN.
    """
    calls = 0  # of modules so far: a module has the same number on all ranks, which run the same modules
    first_bad: list[Any] = []  # the number of the call and the module's name; empty: none yet

    def check(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            nonlocal calls
            calls += 1
            if not first_bad and not _all_finite([output, *module.parameters(recurse=False)]):
                first_bad.extend((calls, name))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            # Modules without children: the output of one around them would name the layer less exactly.
            if not list(module.children()):
                stack.enter_context(module.register_forward_hook(check(name)))
        stack.callback(model.train, model.training)
        model.eval()(**to_device(batch, model.device))
    bad_modules = [entry for entry in ranks.gather(first_bad) if entry]
    # The smallest number of a call is the first in order of execution.
    return min(bad_modules)[1] if bad_modules else None


def _all_finite(values: Sequence[object]) -> bool:
    """Return whether all tensors among some values are finite."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def diagnosis(
    model: CausalLM,
    ranks: Ranks,
    step: int,
    loss: float,
    norm: float,
    micro_batches: Sequence[Batch],
) -> tuple[str, str]:
    """Return why a step's loss or gradient norm is not finite, and ": " with advice, or ""; all ranks call it together.

    The reason is a mistake in the batch, or it names the first layer whose output is not finite.
    """
    size = model.config.vocab_size
    own_mistakes = []
    for batch in micro_batches:
        mistake = invalid_label(batch["labels"], size) or invalid_token(batch["input_ids"], size)
        if mistake:
            own_mistakes.append(mistake)
    for mistakes in ranks.gather(own_mistakes):
        if mistakes:
            return f"step {step}: {mistakes[0]}", ""
    value = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    bad_modules = []
    for batch in micro_batches:
        # No break at the first one: the ranks run all micro-batches together.
        module = first_bad_module(model, batch, ranks)
        if module is not None:
            bad_modules.append(module)
    place = "every forward value is finite"
    if bad_modules:
        place = f"the first layer with such values is {bad_modules[0]}"
    advice = ": try a lower --learning-rate"
    if model.recipe.quantized:
        other = "bf16" if model.recipe.name == "current" else "current"
        advice += f", --recipe {other}, or more BF16 layers"
    return f"step {step}: {value}; {place}", advice
