"""Refuse models of transformers that a program loads by the path of a TEModelsForCausalLM.

DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer of TRL load a reference model by the policy's
`config._name_or_path`, with the policy's attention, `config._attn_implementation`. If that path is a checkpoint of
Hugging Face, they get transformers' own class in high precision, whose losses differ from the policy's. So we register
the name of our attention with transformers as a function that raises: such a reference fails in its first forward pass,
with one line, and does not change the losses in silence.
"""

from __future__ import annotations

from typing import NoReturn

from transformers import AttentionInterface
from transformers.configuration_utils import PreTrainedConfig

from te_models.errors import UsageError
from te_models.interop.hub import OUR_ATTENTION


def refuse_other_class(module: object, *tensors: object, **options: object) -> NoReturn:
    """Raise a UsageError when `module`, an attention layer of transformers, calls this in place of a kernel."""
    raise UsageError(
        f"{type(module).__name__} of transformers was loaded by the path of a TEModelsForCausalLM, as TRL does for a "
        "reference, and would compute without its recipe: give DPOTrainer ref_model=TEModelsForCausalLM."
        "from_pretrained(path, recipe=...), any trainer a peft_config, or a policy loaded from a folder that "
        "TEModelsForCausalLM.save_pretrained wrote"
    )


def name_attention(config: PreTrainedConfig) -> None:
    """Name our attention in the config of a TEModelsForCausalLM; other classes that use this config then raise."""
    config._attn_implementation = OUR_ATTENTION


AttentionInterface.register(OUR_ATTENTION, refuse_other_class)
