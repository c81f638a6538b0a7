"""LoRA (Hu et al. 2021, arXiv 2106.09685) on te.Linear through `peft`, on either engine, with merge and unmerge.

peft has adapters for Transformer Engine's layers, but cannot merge them and does not know the emulated engine's.
`LoraLinear` does both; it is registered with peft as a custom module. The frozen te.Linear runs under the model's recipe,
FP8 included; the two low-rank products run in high precision, since a rank such as 8 is no multiple of the alignment that
FP8 GEMMs need.

Our projections are fused, so an adapter on `qkvg_proj` is one low-rank update of q, k, v and the gate together.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.errors import UsageError, needs
from te_models.fp8.primary_weights import plain, restore_weight, saved_weight, write_weight

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge

PROJECTIONS = ("qkvg_proj", "o_proj", "gate_up_proj", "down_proj")


def add_lora(model: CausalLM, config: LoraConfig | None = None, **fields: Any) -> PeftModel:
    """Freeze `model` and add adapters to it, which start at zero and change no output.

    Args:
        model: changed in place.
        config: peft's LoraConfig; None: made of `fields`.
        fields: fields of LoraConfig, such as r=8, lora_alpha=16, target_modules=["o_proj"]. Without target_modules, all
            four projections of every block get adapters.
    """
    if config is None:
        fields.setdefault("target_modules", list(PROJECTIONS))
        config = LoraConfig(**fields)
    return get_peft_model(model, _registered(model, config))  # type: ignore[arg-type]


def load_lora(model: CausalLM, folder: str | Path, trainable: bool = False) -> PeftModel:
    """Add the adapters to `model` that `PeftModel.save_pretrained` wrote into `folder`."""
    config = _registered(model, LoraConfig.from_pretrained(str(folder)))
    return PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=trainable)  # type: ignore[arg-type]


def _registered(model: CausalLM, config: Any) -> Any:
    """Return peft's config with LoraLinear registered for the model's te.Linear."""
    if model.tp.size > 1:
        raise UsageError("LoRA on a tensor-parallel model is not supported: load it without tp_mesh")
    # A task type would wrap the model in a class that passes it arguments that only models of transformers take.
    config.task_type = None
    config._register_custom_module({model.te.Linear: LoraLinear})
    return config


class LoraLinear(nn.Module, LoraLayer):
    """A frozen te.Linear with low-rank updates: base(x) + B(A(dropout(x))) * scaling."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1,
                 **options: Any) -> None:  # fmt: skip
        """Called by peft; raise a ValueError for DoRA."""
        if config.use_dora:
            raise UsageError("use_dora=True is not supported on te.Linear: leave it out")
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # the emulated engine's, which has both sizes
            LoraLayer.__init__(self, base_layer, **options)
        self._active_adapter = adapter_name
        self._before_merge: dict[str, Tensor] | None = None
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [N, in] to [N, out], in the dtype of the base layer's output."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for name in self._active():
            a: Any = self.lora_A[name]
            b: Any = self.lora_B[name]
            update = b(a(self.lora_dropout[name](x.to(a.weight.dtype)))) * self.scaling[name]
            result = result + update.to(result.dtype)
        return result

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the adapter's update of the weight, FP32 [out, in]."""
        a: Any = self.lora_A[adapter]
        b: Any = self.lora_B[adapter]
        return self.scaling[adapter] * (b.weight.float() @ a.weight.float())

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight, rounding once; the old weight is stored for `unmerge`.

        Args:
            safe_merge: check that the sum is finite.
            adapter_names: the adapters to merge; None: all active ones.

        Raises:
            ValueError: with `safe_merge`, the sum is not finite; the weight is then unchanged.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) or () if name in self.lora_A]
        if not names:
            return
        weight: Any = self.base_layer.weight
        merged: Any = plain(weight).float() + sum(self.get_delta_weight(name) for name in names)
        if safe_merge and not bool(merged.isfinite().all()):
            raise UsageError(f"merging {', '.join(names)} gives values that are not finite: the adapter is broken")
        if self._before_merge is None:
            self._before_merge = saved_weight(weight)
        write_weight(weight, merged, for_master=False)
        self.merged_adapters += names

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weight from before the first merge, bit for bit."""
        if self._before_merge is None:
            return
        weight: Any = self.base_layer.weight
        restore_weight(weight, self._before_merge)
        self._before_merge = None
        self.merged_adapters.clear()
