"""The Decoder of a model that a caller gives: the model itself, or the one inside a wrapper with another interface."""

from __future__ import annotations

from typing import cast

from torch import nn

from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.model.decoder import Decoder


def decoder_of(model: object) -> Decoder:
    """Return a model that is a Decoder, or the Decoder that a TEModelsForCausalLM holds.

    Raises:
        UsageError: the model is something else.
    """
    inside = model
    if isinstance(model, nn.Module) and isinstance(model._modules.get("model"), Decoder):
        inside = model._modules["model"]
    # Not by type: the wrappers of add_lora and torch.compile have all attributes of the model inside.
    if not isinstance(getattr(inside, "config", None), ModelConfig):
        raise UsageError(
            f"the model is a {type(model).__name__}: give a CausalLM, or a TEModelsForCausalLM, which holds one"
        )
    return cast(Decoder, inside)


def refuse_compiled(model: object) -> None:
    """Raise a UsageError if torch.compile wraps the whole model, so that its weights have other names.

    Call it where the weights are read or written by name.
    """
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            "the model is compiled by torch.compile: give the model itself, which compiles its own operations"
        )
