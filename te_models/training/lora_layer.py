"""LoRA (Hu et al. 2021, arXiv 2106.09685) on one te.Linear: peft's layer, with merge and unmerge, on either engine.

peft has adapters for Transformer Engine's layers, but cannot merge them and does not know the emulated engine's. The
frozen te.Linear runs under the model's recipe, FP8 included; the two low-rank products run in high precision, since a
rank such as 8 is not a multiple of the alignment that FP8 GEMMs need.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.engine.emulated.numerics import scale_from_amax
from te_models.errors import UsageError, needs
from te_models.fp8.primary_weights import E4M3_MAX, is_quantized, plain, restore_weight, saved_weight, write_weight
from te_models.fp8.scaling_state import weight_scale
from te_models.training.lora_targets import Fused

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    from peft import LoraConfig
    from peft.tuners._buffer_dict import BufferDict
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge


class LoraLinear(nn.Module, LoraLayer):
    """A frozen te.Linear with low-rank updates: base(x) + B(A(dropout(x))) * scaling.

    An adapter of parts of the rows (`fuse`) has a B with zeros outside its parts' rows and ranks. Its factors keep them
    zero in training, and scale each part by its own alpha and rank.
    """

    other_param_names = (*LoraLayer.other_param_names, "fused", "factors")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1,
                 **options: Any) -> None:  # fmt: skip
        """Wrap `base_layer`; peft calls this."""
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # the emulated engine's, which has both sizes
            LoraLayer.__init__(self, base_layer, **options)
        self.fused: dict[str, Fused] = {}
        self.factors = BufferDict({}, persistent=False)  # FP32 [out, rank], of adapters that have parts
        self._active_adapter = adapter_name
        self._before_merge: dict[str, Tensor] | None = None
        self._scale_before_merge: Tensor | None = None
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [N, in] to [N, out], in the dtype of the base layer's output.

        The low-rank products are computed in that dtype, whatever dtype the adapters are stored in: a run, whose
        adapters have FP32 masters beside them, and a model that loads them in FP32 compute the same bits.
        """
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        for name in self._active():
            a: Any = self.lora_A[name]
            low = F.linear(self.lora_dropout[name](x.to(dtype)), a.weight.to(dtype))
            result = torch.addmm(result, low, self._b(name, dtype).t(), alpha=self.scaling[name])
        return result

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    def _b(self, adapter: str, dtype: torch.dtype) -> Tensor:
        """Return B [out, rank] of an adapter, its parts scaled relative to `scaling`."""
        b: Any = self.lora_B[adapter]
        if adapter not in self.factors:
            return b.weight.to(dtype)
        factors: Any = self.factors[adapter]
        return b.weight.to(dtype) * factors.to(dtype)

    @torch.no_grad()
    def fuse(self, adapter: str, fused: Fused, init: bool | str) -> None:
        """Divide a new adapter into the parts of `fused`; peft has just given it values by `init`, its
        init_lora_weights."""
        self.fused[adapter] = fused
        if not fused.parts:
            return
        a: Any = self.lora_A[adapter]
        b: Any = self.lora_B[adapter]
        self.scaling[adapter] = fused.scaling
        factors = fused.factors(len(b.weight)).to(b.weight.device)
        self.factors[adapter] = factors
        b.weight.mul_(factors != 0)
        for part in fused.parts:  # peft's standard deviations depend on the rank, which differs between parts
            if init == "gaussian":
                a.weight[part.ranks] *= fused.rank / part.rank
            elif init is False:
                b.weight[:, part.ranks] *= math.sqrt(fused.rank / part.rank)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the adapter's update of the weight, FP32 [out, in]."""
        a: Any = self.lora_A[adapter]
        return self.scaling[adapter] * (self._b(adapter, torch.float32) @ a.weight.float())

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters (None: all active ones) to the weight, rounding once; the old weight is stored for `unmerge`.

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
        scale = None if is_quantized(weight) else weight_scale(self.base_layer)
        if self._before_merge is None:
            self._before_merge = saved_weight(weight)
            self._scale_before_merge = None if scale is None else scale.clone()
        write_weight(weight, merged, for_master=False)
        if scale is not None and (amax := merged.abs().amax().float()) > 0:
            scale.copy_(
                scale_from_amax(amax, E4M3_MAX)
            )  # the sum may exceed what the scale of the last training step allows
        self.merged_adapters += names

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weight from before the first merge, bit for bit."""
        if self._before_merge is None:
            return
        weight: Any = self.base_layer.weight
        restore_weight(weight, self._before_merge)
        if self._scale_before_merge is not None and (scale := weight_scale(self.base_layer)) is not None:
            scale.copy_(self._scale_before_merge)
        self._before_merge = None
        self.merged_adapters.clear()
