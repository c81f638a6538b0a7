"""A TEModelsForCausalLM without its head, and what hooks see inside of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from te_models.errors import UsageError
from te_models.files.formats import Fields, list_some
from te_models.interop.remote_code.cache_name_te_models import cache_by_either_name

if TYPE_CHECKING:
    from te_models.huggingface.modeling import TEModelsForCausalLM

# Arguments in which collators of packed documents repeat their boundaries for FlashAttention's kernels.
PACKING = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Arguments that peft passes on where an adapter that reads them is switched off.
OF_PEFT = ("task_ids",)


def refuse_unknown(options: Fields) -> None:
    """Raise a UsageError for arguments that would have an effect."""
    if unknown := [
        name
        for name, value in options.items()
        if name not in (*PACKING, *OF_PEFT) and value is not None
    ]:
        raise UsageError(f"forward takes no {list_some(unknown)}: leave it out")


@contextlib.contextmanager
def hidden_states(
    before: list[nn.Module], after: list[nn.Module], shape: torch.Size
) -> Iterator[list[Tensor]]:
    """Collect, inside, the inputs of some modules and the outputs of others, [B, S, D], over tokens of `shape`."""
    states: list[Tensor] = []
    batch, seq = shape[:2]

    def keep(x: Tensor) -> None:
        # Inside a block tokens are rows, with padding behind them.
        states.append(x[: batch * seq].unflatten(0, (batch, seq)))

    def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        keep(args[0])

    def keep_output(module: nn.Module, args: object, output: Tensor) -> None:
        keep(output)

    with contextlib.ExitStack() as hooks:
        for module in before:
            hooks.enter_context(module.register_forward_pre_hook(keep_input))
        for module in after:
            hooks.enter_context(module.register_forward_hook(keep_output))
        yield states


class Backbone(nn.Module):
    """A TEModelsForCausalLM without its head, as transformers' models have it below them.

    `owner` is no submodule of this one, so that its parameters are not listed twice.
    """

    def __init__(self, owner: TEModelsForCausalLM) -> None:
        super().__init__()
        self.owner = (owner,)

    @cache_by_either_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        **others: object,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """Return the output of the last norm, and of a model with experts that it is asked of, `router_logits`: FP32
        [B * S, experts] of each layer that has a router. Arguments as in TEModelsForCausalLM.
        """
        refuse_unknown(others)
        (owner,) = self.owner
        tokens = owner.tokens(input_ids, inputs_embeds)
        passed: Fields = owner.attention(tokens, attention_mask, position_ids, cache)
        seen = []
        for name, module in owner.model.named_modules():
            if name.endswith(".router_logits"):
                seen.append(module)
        routers = seen if output_router_logits else []
        with hidden_states([], [*routers, owner.model.norm], tokens.shape) as collected:
            owner.model(input_ids, inputs_embeds=inputs_embeds, logits_to_keep=1, **passed)
        *logits, last = collected
        if not routers:
            return BaseModelOutputWithPast(last, cache)
        # transformers declares router_logits as a tuple.
        layers: Any = tuple(layer.flatten(0, 1) for layer in logits)
        return MoeModelOutputWithPast(last, cache, router_logits=layers)
