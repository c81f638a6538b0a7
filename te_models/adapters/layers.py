"""LoRA's layers as peft's tuner builds them: on a te.Linear, on rows of one, and on the experts of a te.GroupedLinear.

peft has layers for Transformer Engine's linears, but cannot merge them, refuses DoRA on them and does not know the
emulated engine's. Here parameters, names, scaling and initial values come from peft's own layer for nn.Linear; the
forward (te_models.adapters.low_rank) and the merges (te_models.adapters.merged) are this package's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from te_models.adapters.low_rank import Part, add_expert_updates, add_updates, expert_factors
from te_models.adapters.merged import MergedWeight, forget_merges, merged_weight
from te_models.adapters.parameters import Shown, Stack
from te_models.adapters.rows import NamedRows
from te_models.errors import needs
from te_models.kernels.groups import Groups
from te_models.kernels.handover import grouped

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    from peft import LoraConfig
    from peft.tuners.lora import layer as peft_layer
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.te import TeLinear
    from peft.tuners.lora.variants import DoraLinearVariant
    from peft.tuners.tuners_utils import check_adapters_to_merge


class ExactMerges:
    """The merges of a layer of peft, each made from the weight before, rounded once and undone to the bit."""

    merged_adapters: list[str]
    lora_A: Any
    active_adapters: list[str]

    def merged_weight(self) -> MergedWeight:
        """Return the MergedWeight of the te module, which all layers on that module share."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters (None: all active ones) to the weight, rounding once; `unmerge` restores the weight.

        Raises:
            UsageError: with `safe_merge`, the sum is not finite; the weight is then unchanged.
        """
        layer: Any = self
        known = check_adapters_to_merge(layer, adapter_names) or ()
        names = [name for name in known if name in self.lora_A]
        if names:
            merged = [*self.merged_adapters, *names]
            self.merged_weight().merge(layer, merged, safe_merge)
            self.merged_adapters = merged

    def unmerge(self) -> None:
        """Take the adapters out of the weight; without any it is the one from before, bit for bit."""
        layer: Any = self
        self.merged_weight().unmerge(layer)
        self.merged_adapters = []


class LoraLinear(ExactMerges, peft_layer.Linear):
    """A frozen te.Linear, or rows of one, with low-rank updates: base(x) + B(A(dropout(x))) * scaling.

    Under DoRA (Liu et al. 2024, arXiv 2402.09353) the rows of the updated weight have lengths that are trained too.
    Variants of peft that compute something else run peft's own forward.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **options: Any,
    ) -> None:
        """Wrap `base_layer`; peft calls this."""
        with warnings.catch_warnings():
            # peft reads the sizes of a layer by its class, and warns of classes that it does not know, such as the
            # emulated engine's te.Linear. `_get_in_out_features` below reads them.
            warnings.filterwarnings("ignore", "Unsupported layer type")
            super().__init__(base_layer, adapter_name, config, r, lora_alpha, **options)

    def resolve_lora_variant(self, *, config: LoraConfig, **options: Any) -> Any:
        """Return peft's variant of LoRA that `config` asks for, with the lengths of DoRA in FP32; peft calls it."""
        variant = super().resolve_lora_variant(config=config, **options)
        return _Dora() if isinstance(variant, DoraLinearVariant) else variant

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """Return the sizes of the base layer, whatever the sharding of its weight; peft calls it."""
        base: Any = module
        return base.in_features, base.out_features

    @property
    def low_rank(self) -> bool:
        """True if the active adapters are plain LoRA or DoRA, for all rows alike."""
        for adapter in self.active_adapters:
            variant = self.lora_variant.get(adapter)
            if variant is not None and not isinstance(variant, DoraLinearVariant):
                return False
            if self.lora_bias.get(adapter):
                return False
        # peft chooses an adapter for each row by a hook that adds a keyword, and X-LoRA gives a layer another forward.
        # A hook without keywords, as an observer has, leaves the products as they are.
        return not self._forward_pre_hooks_with_kwargs and "forward" not in self.__dict__

    @property
    def by_sequence(self) -> bool:
        """True if the layer takes sequences [B, S, in] rather than their tokens."""
        return not self.low_rank

    def forward(
        self, x: Tensor, *args: Any, run: Callable[..., Tensor] | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the output [..., out] for x [..., in], in the dtype of the base layer's.

        `run` computes the base layer's output in place of its own forward.
        """
        if not self.low_rank or kwargs.get("adapter_names") is not None:
            return super().forward(x, *args, **kwargs)

        def base(x: Tensor) -> Tensor:
            if run is None:
                return self.base_layer(x, *args, **kwargs)
            return run(self.base_layer, x, *args, **kwargs)

        # As peft's layers do: without adapters the weight has to be the base's.
        if self.disable_adapters and self.merged:
            self.unmerge()
        return add_updates(base(x), x, [Part(self)], base, self._base_bias())

    def _base_bias(self) -> Tensor | None:
        base = self.get_base_layer()
        return base.bias if isinstance(base, NamedRows) else base._parameters.get("bias")

    def get_delta_weight(self, adapter: str, gemm: int = 0) -> Tensor:
        """Return the adapter's update of the weight, or of an expert's, FP32 [out, in]."""
        a = self.lora_A[adapter].get_parameter("weight").float()
        b = self.lora_B[adapter].get_parameter("weight").float()
        # In FP32 and scaled once: a product in BF16 would be rounded before the sum.
        return self.scaling[adapter] * (b @ a)

    def length_factors(self, adapter: str, weight: Tensor | None = None) -> Tensor:
        """Return the factor of each row of the updated weight under DoRA, FP32 [out]: its magnitude by its length.

        Only its magnitude gets a gradient, as in peft: the present length of a row counts as a constant. `weight` is
        the weight without adapters, FP32 [out, in]; None: the base layer's.
        """
        magnitude = self.lora_magnitude_vector[adapter].get_parameter("weight")
        lengths = self.lengths(adapter, weight)
        # Rows of padding are zeros: they have no direction, and a division by their length would be NaN.
        lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        return magnitude.float() / lengths

    @torch.no_grad()
    def lengths(self, adapter: str, weight: Tensor | None = None) -> Tensor:
        """Return the lengths of the rows of the weight with an adapter's update, FP32 [out]."""
        base = self.original_weight() if weight is None else weight
        return torch.linalg.norm(base + self.get_delta_weight(adapter), dim=1)

    def original_weight(self) -> Tensor:
        """Return the weight without adapters, FP32 [out, in]."""
        fused = self.merged_weight().original()
        base = self.get_base_layer()
        # A layer on some rows of a fused weight, such as q of qkvg_proj, has those rows alone.
        return base.place.save(fused) if isinstance(base, NamedRows) else fused

    def merged_weight(self) -> MergedWeight:
        """Return the MergedWeight of the te.Linear, which the layers of all its rows share."""
        base = self.get_base_layer()
        return merged_weight(base.linear if isinstance(base, NamedRows) else base)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters (None: all active ones) to the weight; see ExactMerges."""
        if self.low_rank:
            super().merge(safe_merge, adapter_names)
        else:
            peft_layer.Linear.merge(self, safe_merge, adapter_names)

    def unmerge(self) -> None:
        """Take the adapters out of the weight; see ExactMerges."""
        if self.low_rank:
            super().unmerge()
        else:
            peft_layer.Linear.unmerge(self)

    def add_to(self, values: Tensor, gemm: int, adapters: Sequence[str]) -> None:
        """Add the updates of `adapters` to the FP32 weight [out, in] of a GEMM; see MergedWeight."""
        base = self.get_base_layer()
        place = base.place if isinstance(base, NamedRows) else None
        weight = values.clone() if place is None else place.save(values).clone()
        merged = weight
        for name in adapters:
            merged = merged + self.get_delta_weight(name, gemm)
            if name in self.lora_magnitude_vector:
                merged = merged * self.length_factors(name, weight)[:, None]
        if place is None:
            values.copy_(merged)
        else:
            place.load(values, merged)  # into its rows of the fused weight

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base layer, with the adapters in it if they are to be merged; peft calls it."""
        if merge:
            self.merge(safe_merge, adapter_names)
        base = self.get_base_layer()
        if not isinstance(base, NamedRows):
            forget_merges(base)
        return base


class LoraWeight(LoraLinear):
    """The layer of an adapter on the weight of a linear, which `target_parameters` names: it computes the same."""


# The name by which peft knows layers of parameters when a second adapter is added.
LoraWeight.__name__ = "ParamWrapper"


class _Dora(DoraLinearVariant):
    """peft's DoRA with the lengths of the rows in FP32: BF16 would round them, and so the untrained model."""

    @staticmethod
    def init(module: Any, adapter_name: str, **options: object) -> None:
        """Give `module` the trained lengths of an adapter; peft calls it in place of its own."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        magnitude = DoraLinearLayer(fan_in_fan_out=False)
        magnitude.weight = nn.Parameter(module.lengths(adapter_name))
        module.lora_magnitude_vector[adapter_name] = magnitude


class LoraExperts(LoraLinear):
    """A frozen te.GroupedLinear of E experts, each with an update of its own.

    An adapter's A and B are one tensor each, as in peft's files: A [E * r, in] has the experts' matrices one after the
    other, and in B [out, r * E] column j * E + e is column j of expert e.
    """

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **options: Any
    ) -> None:
        """Make an adapter of rank r; peft calls this."""
        experts = self._experts
        # peft makes one A and one B of r times the experts, as its files have them; r and scaling are one expert's
        # again below.
        super().update_layer(adapter_name, r * experts, lora_alpha, config, **options)
        self.r[adapter_name] = r
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        device = self.get_base_layer().get_parameter("weight0").device
        for part in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            part.to(device)  # peft looks for a parameter called weight
        if config.init_lora_weights == "gaussian":
            # peft has divided the standard deviation by r * experts.
            with torch.no_grad():
                self.lora_A[adapter_name].get_parameter("weight").mul_(experts)

    @property
    def _experts(self) -> int:
        return cast(int, self.get_base_layer().num_gemms)

    def forward(  # type: ignore[bad-override]  # more arguments
        self,
        x: Tensor,
        *rows: list[int] | Groups,
        run: Callable[..., Tensor] = grouped,
        **options: Any,
    ) -> Tensor:
        """Map x [R, in] to [R, out]; `rows` counts the rows of each expert, and `run` computes base_layer's forward."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = run(self.base_layer, x, *rows, **options)
        return add_expert_updates(result, x, [Part(self)], self._experts, rows[0])

    def __getattr__(self, name: str) -> Any:
        """Return the weight of an expert by its name, as peft's layers do for `weight`."""
        if name.removeprefix("weight").isdigit():
            return self.base_layer.get_parameter(name)
        return super().__getattr__(name)

    def get_delta_weight(self, adapter: str, gemm: int = 0) -> Tensor:
        """Return the adapter's update of an expert's weight, FP32 [out, in]."""
        a, b = expert_factors(self, adapter, self._experts, torch.float32)
        return self.scaling[adapter] * (b[gemm] @ a[gemm])


class ParamWrapper(ExactMerges, peft_layer.ParamWrapper):
    """peft's layer around a parameter of experts or of a router, with exact merges. peft knows the class by its name.

    AdaptedWeight adds its updates where the te module computes.
    """

    @property
    def stack(self) -> Stack:
        """The rows of our weights that the parameter is."""
        return cast(Shown, self.get_base_layer()).stacks[self.parameter_name]

    def merged_weight(self) -> MergedWeight:
        """Return the MergedWeight of the te module."""
        return merged_weight(self.stack.owner)

    def add_to(self, values: Tensor, gemm: int, adapters: Sequence[str]) -> None:
        """Add the updates of `adapters` to the FP32 weight [out, in] of a GEMM; see MergedWeight."""
        rows = self.stack.place.save(values).clone()
        swapped = self.stack.swapped
        for adapter in adapters:
            a, b = expert_factors(self, adapter, self.num_experts, torch.float32, swapped)
            rows += self.scaling[adapter] * (b[gemm] @ a[gemm])
        self.stack.place.load(values, rows)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the module of the parameter, with the adapters in its values if they are to be merged."""
        base = super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        for stack in cast(Shown, self.get_base_layer()).stacks.values():
            forget_merges(stack.owner)
        return base


def adopt(model: nn.Module) -> None:
    """Put layers of this module in the place of peft's own on te.Linears, on rows of them, and on parameters.

    peft makes those where a user's LoraConfig does not say otherwise. The parameters stay the same objects.
    """
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in modules:
        if type(module) not in (peft_layer.Linear, TeLinear, peft_layer.ParamWrapper):
            continue
        base = module.get_base_layer()
        parameter = getattr(module, "parameter_name", None)
        kind: type[nn.Module]
        if isinstance(base, Shown):
            kind = ParamWrapper
        elif not isinstance(base, NamedRows) and not hasattr(base, "fp8_meta"):
            continue
        elif parameter is None:
            kind = LoraLinear
        elif parameter == "weight":
            kind = LoraWeight
        else:
            continue
        # peft has merged it already: its merge rounds otherwise than ours, and only peft's layer can undo it.
        if module.merged:
            continue
        # Another class for the same attributes: optimizers and wrappers hold the parameters, which must stay these
        # objects.
        adopted: Any = object.__new__(kind)
        adopted.__dict__.update(module.__dict__)
        if issubclass(kind, LoraLinear):
            adopted.fan_in_fan_out = adopted.is_target_conv_1d_layer = False
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = adopted
