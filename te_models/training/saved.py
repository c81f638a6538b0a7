"""The part of a model that a run trains and saves: all of it, or adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_models.causal_lm import CausalLM
from te_models.errors import UsageError
from te_models.model.decoder_of import refuse_compiled
from te_models.numerics.stored import StoredWeight
from te_models.saving.pretrained import refuse_adapters

if TYPE_CHECKING:
    from te_models.training.lora_run import SavedAdapters


def refuse_stored(model: CausalLM) -> None:
    """Raise a UsageError if a model has weights as its release stores them, quantized, which only adapters can train.

    Call it where the whole model is to be trained.
    """
    if any(isinstance(parameter, StoredWeight) for parameter in model.parameters()):
        raise UsageError(
            "the model's weights are as their release stores them: train adapters (add_lora), or load it with "
            "base_weights='dequantized'"
        )


def saved_part(model: object, saved: SavedAdapters | None) -> tuple[CausalLM, SavedAdapters | None]:
    """Return the CausalLM inside `model`, and the part of it that checkpoints contain: its adapters; None: all of it.

    Args:
        model: a CausalLM, or a model of peft around one.
        saved: the adapters, if the caller has added them to a CausalLM itself.

    Raises:
        UsageError: the model is something else, is compiled as a whole, or cannot be trained in full.
    """
    if isinstance(model, CausalLM):
        if saved is None:
            refuse_adapters(model)
            refuse_stored(model)
        return model, saved
    if hasattr(model, "peft_config"):
        from te_models.training.lora import AdaptedModel  # noqa: PLC0415  needs peft
        from te_models.training.lora_run import SavedAdapters  # noqa: PLC0415

        if isinstance(model, AdaptedModel):
            return model.get_base_model(), SavedAdapters(model)
    refuse_compiled(model)
    raise UsageError(
        f"the model is a {type(model).__name__}: give a CausalLM, or what add_lora makes of one"
    )
