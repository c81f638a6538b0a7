"""The state_dict of a CausalLM, with tied tables once and the FP8 state, for programs that save only state_dicts."""

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from te_models.distributed.dtensor import local
from te_models.fp8.extra_state import EXTRA, extra_states, read_extra_tensor
from te_models.fp8.primary_weights import is_quantized, plain
from te_models.fp8.scaling_state import gemms_of
from te_models.model.decoder import Decoder
from te_models.model.te_modules import own_weight

StateDict = dict[str, Any]  # of a module, by name: tensors, and what other programs put there


def save_tie_once(model: Decoder) -> None:
    """Put a tied table into the model's state_dict only once, as in Hugging Face's files.

    safetensors, and with it transformers.Trainer, saves no tensor under two names.
    """
    model.register_state_dict_post_hook(_leave_out_tie)
    model.register_load_state_dict_pre_hook(_restore_tie)
    model.register_load_state_dict_post_hook(_tie_again)


def _leave_out_tie(model: nn.Module, state: StateDict, prefix: str, metadata: object) -> None:
    for inside in ("", "base_layer.", "original_module."):  # of peft's layer around it
        state.pop(f"{prefix}lm_head.{inside}weight", None)


def _restore_tie(model: nn.Module, state: StateDict, prefix: str, *others: object) -> None:
    if f"{prefix}embed_tokens.weight" in state:
        state[f"{prefix}lm_head.weight"] = state[f"{prefix}embed_tokens.weight"]


def _tie_again(model: Decoder, incompatible: object) -> None:
    """Tie again after accelerate's init_empty_weights and `load_state_dict(assign=True)`, which separate parameters."""
    tie_head(model)


def tie_head(model: Decoder) -> None:
    """Tie the head to the embedding's table; to its own where peft trains a copy, as in transformers."""
    head = model.lm_head
    # Into peft's layers, which hold the module that they adapt or copy.
    while "weight" not in head._parameters:
        inside = getattr(head, "original_module", None)
        head = head.get_submodule("base_layer") if inside is None else inside
    head.weight = own_weight(model.embed_tokens)


def keep_fp8_state(model: Decoder) -> None:
    """Save the model's scales and amax histories in its state_dict, and load them from it.

    FP8 weights are plain tensors there: safetensors, and so accelerate, saves no others. Loading quantizes them to
    the same FP8 values, but under delayed scaling with the present scale, which may be newer than theirs. Shards
    of FSDP2 are left unchanged.
    """
    model.register_state_dict_post_hook(_write)
    model.register_load_state_dict_pre_hook(_read)


def _write(model: Decoder, state: StateDict, prefix: str, metadata: object) -> None:
    state.update(
        {prefix + name: value for name, value in extra_states(model.copied_fp8_state()).items()}
    )
    for name, value in state.items():
        if name.startswith(prefix) and local(value) is value and is_quantized(value):
            state[name] = plain(value)


def _read(model: Decoder, state: StateDict, prefix: str, *others: object) -> None:
    """Read the FP8 state from a state_dict; an absent `_extra_state` counts as an empty one.

    safetensors, and so accelerate, saves no two tensors that share memory, as all empty ones do, and
    torch.distributed.checkpoint puts its own object in place of an absent one.
    """
    tensors: dict[str, Tensor] = {}
    for owner, module in model.named_modules():
        key = f"{prefix}{owner}.{EXTRA}"
        # Such a module has no extra state: PyTorch's own method only raises.
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        value = state.get(key)
        if isinstance(value, Tensor) and value.is_floating_point():
            tensors |= read_extra_tensor(owner, value, gemms_of(module))
        elif isinstance(value, (Tensor, io.BytesIO)):  # Transformer Engine's own
            continue
        state[key] = torch.empty(0, dtype=torch.uint8)
    used = model.take_fp8_state(tensors, model.recipe)
    if used < len(tensors):
        warnings.warn(
            f"recipe {model.recipe.name!r} has no use for {len(tensors) - used} of the {len(tensors)} scales and amax "
            "histories in the state_dict, which are left out",
            stacklevel=2,
        )
