"""The outputs of forward that a config.json of Hugging Face asks for, read and written back."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from te_models.causal_lm import CausalLM
from te_models.files.formats import Fields
from te_models.huggingface.config import TEModelsConfig
from te_models.interop.hf_families import family_of

# Fields of the config that say what forward returns.
STATED = ("use_cache", "output_hidden_states", "output_router_logits")  # followed in a config.json
OUTPUTS = (*STATED, "return_dict")


def stated_outputs(model: CausalLM) -> Fields:
    """Return what the config.json of a model of Hugging Face says about the outputs of `forward`."""
    document = model.origin.config
    if not document:
        return {}
    family = family_of(document)
    stated = {**document, **family.text(document)}
    outputs = {name: bool(stated[name]) for name in STATED if stated.get(name) is not None}
    if "router_aux_loss_coef" not in family.known():  # its class in transformers has no such loss
        outputs.pop("output_router_logits", None)
    return outputs


def note_outputs(model: CausalLM, config: PreTrainedConfig) -> None:
    """Note the outputs that `config` asks for in the config.json that came with the model, for a save."""
    document = model.origin.config
    if not document:
        return
    family = family_of(document)
    stated = stated_outputs(model)
    default = TEModelsConfig.of(model.config)
    changed = {}
    for name in STATED:
        value = getattr(config, name)
        if value != stated.get(name, getattr(default, name)):
            changed[name] = value
    # Nothing is added unasked: an unchanged model is saved with the bytes of its own config.json.
    if not changed:
        return
    document = {**document, **changed}
    if family.inner:
        document[family.inner] = {**document[family.inner], **changed}
    model.origin = replace(model.origin, config=document)
