"""The state_dict of a CausalLM: a tied table once, and its FP8 state, for programs that save nothing else."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from te_models.distributed.dtensor import local
from te_models.fp8.extra_state import EXTRA, extra_states, read_extra_tensor
from te_models.fp8.primary_weights import is_quantized, plain
from te_models.model.decoder import Decoder


def save_tie_once(model: Decoder) -> None:
    """Have a tied table in the model's state_dict once, as in Hugging Face's files: safetensors, and with it
    transformers.Trainer, saves no tensor under two names."""
    model.register_state_dict_post_hook(_leave_out_tie)
    model.register_load_state_dict_pre_hook(_restore_tie)
    model.register_load_state_dict_post_hook(_tie_again)


def _leave_out_tie(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[f"{prefix}lm_head.weight"]


def _restore_tie(model: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    if f"{prefix}embed_tokens.weight" in state:
        state[f"{prefix}lm_head.weight"] = state[f"{prefix}embed_tokens.weight"]


def _tie_again(model: Decoder, incompatible: Any) -> None:
    """Undo what accelerate's init_empty_weights and `load_state_dict(assign=True)` do: a parameter for each name."""
    model.lm_head.weight = model.embed_tokens.weight


def keep_fp8_state(model: Decoder) -> None:
    """Have the model's state_dict carry its scales and amax histories, and take them back.

    FP8 weights are plain ones there, since safetensors, and so accelerate, saves no others. Loading quantizes them to
    the same FP8 values, but under delayed scaling with the present scale, which may be a later one than theirs. Shards
    of FSDP2 stay as they are.
    """
    model.register_state_dict_post_hook(_write)
    model.register_load_state_dict_pre_hook(_read)


def _write(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.update({prefix + name: value for name, value in extra_states(model).items()})
    for name, value in state.items():
        if name.startswith(prefix) and local(value) is value and is_quantized(value):
            state[name] = plain(value)


def _read(model: Decoder, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Take the FP8 state out of a state_dict; an `_extra_state` that is absent is an empty one.

    safetensors, and so accelerate, saves no two tensors of the same memory, which all empty ones are, and
    torch.distributed.checkpoint has an object of its own in the place of an absent one.
    """
    found: dict[str, Tensor] = {}
    for owner, module in model.named_modules():
        key = f"{prefix}{owner}.{EXTRA}"
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        value = state.get(key)
        if isinstance(value, Tensor) and value.is_floating_point():
            found |= read_extra_tensor(owner, value)
        elif isinstance(value, (Tensor, io.BytesIO)):  # Transformer Engine's own
            continue
        state[key] = torch.empty(0, dtype=torch.uint8)
    taken = model.take_fp8_state(found, model.recipe)
    if taken < len(found):
        warnings.warn(
            f"recipe {model.recipe.name!r} has no use for {len(found) - taken} of the {len(found)} scales and amax "
            "histories in the state_dict, which are left out",
            stacklevel=2,
        )
