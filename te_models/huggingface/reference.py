"""Refuses models of transformers that a program loads by the path of a TEModelsForCausalLM.

DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer of TRL load a reference by `config._name_or_path` with the attention
of the policy, `config._attn_implementation`. From a checkpoint of Hugging Face that is transformers' own class in
high precision, whose losses differ from the policy's. The name of our attention is registered with transformers, so
such a model ends in one line at its first forward pass instead of giving other losses.
"""

from __future__ import annotations

from typing import NoReturn

from transformers import AttentionInterface
from transformers.configuration_utils import PreTrainedConfig

from te_models.errors import UsageError
from te_models.interop.hub import OUR_ATTENTION


def refuse_other_class(module: object, *tensors: object, **options: object) -> NoReturn:
    """Raise a UsageError; called by the attention of a model of transformers, `module`, instead of a kernel."""
    raise UsageError(
        f"{type(module).__name__} of transformers was loaded by the path of a TEModelsForCausalLM, as TRL does for a "
        "reference, and would compute without its recipe: give DPOTrainer ref_model=TEModelsForCausalLM."
        "from_pretrained(path, recipe=...), any trainer a peft_config, or a policy loaded from a folder that "
        "TEModelsForCausalLM.save_pretrained wrote"
    )


def name_attention(config: PreTrainedConfig) -> None:
    """Let `config`, of a TEModelsForCausalLM, name our attention, which other classes refuse."""
    config._attn_implementation = OUR_ATTENTION


AttentionInterface.register(OUR_ATTENTION, refuse_other_class)
