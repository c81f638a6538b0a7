"""LoRA (Hu et al. 2021, arXiv 2106.09685) on one te.Linear or on the experts of a te.GroupedLinear: peft's layer, with
merge and unmerge, on either engine.

peft has adapters for Transformer Engine's layers, but cannot merge them and does not know the emulated engine's. The
frozen layer runs under the model's recipe, FP8 included; the two low-rank products run in high precision, since a
rank such as 8 is not a multiple of the alignment that FP8 GEMMs need.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.errors import UsageError, needs
from te_models.fp8.primary_weights import (
    E4M3_MAX,
    is_quantized,
    plain,
    restore_weight,
    saved_weight,
    write_weight,
)
from te_models.fp8.scaling_state import weight_scale
from te_models.kernels.grouped_product import low_rank_product
from te_models.kernels.groups import Groups
from te_models.kernels.handover import grouped
from te_models.numerics.scale_rules import scale_from_amax
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

    Under DoRA (Liu et al. 2024, arXiv 2402.09353) the rows of the updated weight have lengths that are trained too.
    """

    adapter_layer_names = (*LoraLayer.adapter_layer_names, "lora_magnitude")
    other_param_names = (*LoraLayer.other_param_names, "fused", "factors", "rows")

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
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Unsupported layer type"
            )  # the emulated engine's, which has both sizes
            LoraLayer.__init__(self, base_layer, **options)
        self.fused: dict[str, Fused] = {}
        self.factors = BufferDict(
            {}, persistent=False
        )  # FP32 [out, rank], of adapters that have parts
        self.lora_magnitude = nn.ParameterDict()  # [out] of each adapter with DoRA
        # Bool [out]: the rows that an adapter with DoRA and parts updates.
        self.rows = BufferDict({}, persistent=False)
        self._active_adapter = adapter_name
        self._before_merge: list[
            tuple[dict[str, Tensor], Tensor | None]
        ] = []  # weight and scale of each GEMM
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def resolve_lora_variant(self, **options: object) -> None:
        """Return None: this layer computes DoRA itself; peft calls it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [N, in] to [N, out], in the dtype of the base layer's output.

        The low-rank products are computed in that dtype, whatever dtype the adapters are stored in: a run, whose
        adapters have FP32 masters beside them, and a model that loads them in FP32 compute the same bits.
        """
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self._base(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            dropped = self.lora_dropout[name](x.to(result.dtype))
            updated = self._updated(result, dropped, name, *args)
            if name in self.lora_magnitude:
                unscaled = result
                if self.training and isinstance(self.lora_dropout[name], nn.Dropout):
                    unscaled = self._base(
                        dropped, *args, **kwargs
                    )  # the whole sum is of what is left
                factors = self._length_factors(name).to(result.dtype)
                updated = updated + (factors - 1) * (
                    unscaled - self._bias(result) + updated - result
                )
            result = updated
        return result

    def _bias(self, result: Tensor) -> Tensor:
        """Return the bias of the base layer [out], or zero."""
        bias = self.base_layer._parameters.get("bias")
        return result.new_zeros(()) if bias is None else bias.to(result.dtype)

    def _length_factors(self, adapter: str, weight: Tensor | None = None) -> Tensor:
        """Return by what DoRA multiplies each row of the updated weight, FP32 [out].

        Only its magnitude gets a gradient, as in peft: the present length of a row counts as a constant. `weight` is
        the weight without adapters; None: the base layer's.
        """
        with torch.no_grad():
            base = plain(self.base_layer.get_parameter("weight")) if weight is None else weight
            lengths = torch.linalg.norm(base.float() + self.get_delta_weight(adapter), dim=1)
            lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))  # rows of padding
        factors = self.lora_magnitude[adapter].float() / lengths
        if adapter not in self.rows:
            return factors
        rows: Any = self.rows[adapter]
        return torch.where(rows, factors, torch.ones_like(factors))

    @torch.no_grad()
    def add_magnitude(self, adapter: str) -> None:
        """Train the lengths of the rows under an adapter, whose parts and values it has already.

        Raises:
            UsageError: the layer is of experts.
        """
        fused = self.fused[adapter]
        weight = self.base_layer.get_parameter("weight")
        lengths = torch.linalg.norm(plain(weight).float() + self.get_delta_weight(adapter), dim=1)
        a: Any = self.lora_A[adapter]
        trained = adapter in self.active_adapters and a.weight.requires_grad
        if fused.parts:
            rows = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
            for part in fused.parts:
                part.place.load(rows, torch.ones(part.place.shape[0], dtype=torch.bool))
            self.rows[adapter] = rows
            lengths = lengths * rows
        # In FP32: BF16 would round each row's length, and so the untrained model.
        self.lora_magnitude[adapter] = nn.Parameter(lengths, requires_grad=trained)

    def _base(
        self, x: Tensor, *args: Any, run: Callable[..., Tensor] | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the frozen layer's output; `run` computes it in place of the layer's own forward."""
        return (
            self.base_layer(x, *args, **kwargs)
            if run is None
            else run(self.base_layer, x, *args, **kwargs)
        )

    def _updated(self, result: Tensor, x: Tensor, adapter: str) -> Tensor:
        """Return the base layer's output with an adapter's update, of an x in its dtype."""
        a: Any = self.lora_A[adapter]
        low = F.linear(x, a.weight.to(x.dtype))
        return torch.addmm(result, low, self._b(adapter, x.dtype).t(), alpha=self.scaling[adapter])

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
        # peft's standard deviations depend on the rank, which differs between parts.
        for part, ranks in fused.divided():
            if init == "gaussian":
                a.weight[ranks] *= fused.rank / part.rank
            elif init is False:
                b.weight[:, ranks] *= math.sqrt(fused.rank / part.rank)

    def get_delta_weight(self, adapter: str, gemm: int = 0) -> Tensor:
        """Return the adapter's update of the weight, or of an expert's, FP32 [out, in]."""
        a: Any = self.lora_A[adapter]
        return self.scaling[adapter] * (self._b(adapter, torch.float32) @ a.weight.float())

    @property
    def weights(self) -> list[Any]:
        """The weight of each GEMM of the base layer [out, in]."""
        return [self.base_layer.weight]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters (None: all active ones) to the weight, rounding once; the old weight is stored for `unmerge`.

        Raises:
            ValueError: with `safe_merge`, the sum is not finite; the weight is then unchanged.
        """
        names = [
            name
            for name in check_adapters_to_merge(self, adapter_names) or ()
            if name in self.lora_A
        ]
        if not names:
            return
        if self.merged_adapters and any(name in self.lora_magnitude for name in names):
            raise UsageError(
                "DoRA is merged into the original weight: merge all adapters at once, or unmerge first"
            )
        if safe_merge and not all(
            bool(self._sum(gemm, names).isfinite().all()) for gemm in range(len(self.weights))
        ):
            raise UsageError(
                f"merging {', '.join(names)} gives values that are not finite: the adapter is broken"
            )
        first = not self._before_merge
        for gemm, weight in enumerate(self.weights):
            merged = self._sum(gemm, names)
            scale = None if is_quantized(weight) else weight_scale(self.base_layer, gemm)
            if first:
                self._before_merge.append(
                    (saved_weight(weight), None if scale is None else scale.clone())
                )
            write_weight(weight, merged, for_master=False)
            if scale is not None and (amax := merged.abs().amax().float()) > 0:
                # The sum may exceed what the scale of the last training step allows.
                scale.copy_(scale_from_amax(amax, E4M3_MAX))
        self.merged_adapters += names

    def _sum(self, gemm: int, adapters: list[str]) -> Tensor:
        """Return the weight of a GEMM with the updates of adapters, FP32 [out, in]."""
        weight = plain(self.weights[gemm]).float()
        merged = weight
        for name in adapters:
            merged = merged + self.get_delta_weight(name, gemm)
            if name in self.lora_magnitude:
                merged = merged * self._length_factors(name, weight)[:, None]
        return merged

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weight from before the first merge, bit for bit."""
        for gemm, (saved, before) in enumerate(self._before_merge):
            restore_weight(self.weights[gemm], saved)
            if before is not None and (scale := weight_scale(self.base_layer, gemm)) is not None:
                scale.copy_(before)
        self._before_merge.clear()
        self.merged_adapters.clear()


class LoraExperts(LoraLinear):
    """A frozen te.GroupedLinear of E experts, each with an update of its own.

    An adapter's A and B are one tensor each, as in peft's files: A [E * r, in] has those of the experts one after the
    other, and in B [out, r * E] column j * E + e is column j of expert e.
    """

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **options: Any
    ) -> None:
        """Make an adapter of rank r; peft calls this."""
        experts = len(self.weights)
        super().update_layer(adapter_name, r * experts, lora_alpha, config, **options)
        self.r[adapter_name] = r
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        for part in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            part.to(self.weights[0].device)  # peft looks for a parameter called weight
        if (
            config.init_lora_weights == "gaussian"
        ):  # of which peft has divided the standard deviation by r * experts
            with torch.no_grad():
                self.lora_A[adapter_name].get_parameter("weight").mul_(experts)

    def __getattr__(self, name: str) -> Any:
        """Return the weight of an expert by its name, as peft's layers do for `weight`."""
        if name.removeprefix("weight").isdigit():
            return self.base_layer.get_parameter(name)
        return super().__getattr__(name)

    @property
    def weights(self) -> list[Any]:
        """The weight of each expert [out, in]."""
        base: Any = self.base_layer
        return [base.get_parameter(f"weight{expert}") for expert in range(base.num_gemms)]

    def _base(
        self, x: Tensor, *args: Any, run: Callable[..., Tensor] | None = grouped, **kwargs: Any
    ) -> Tensor:
        return super()._base(x, *args, run=run, **kwargs)

    def _updated(
        self, result: Tensor, x: Tensor, adapter: str, *rows: list[int] | Groups
    ) -> Tensor:
        a, b = self._factors(adapter, x.dtype)
        return result + low_rank_product(x, a, b, self.scaling[adapter], *rows)

    def _factors(self, adapter: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [E, r, in] and B [E, out, r] of an adapter."""
        a, b = (
            part[adapter].get_parameter("weight").to(dtype) for part in (self.lora_A, self.lora_B)
        )
        rank = self.r[adapter]
        return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)

    def add_magnitude(self, adapter: str) -> None:
        raise UsageError("DoRA on experts is not supported: leave experts out of the targets")

    def get_delta_weight(self, adapter: str, gemm: int = 0) -> Tensor:
        """Return the adapter's update of an expert's weight, FP32 [out, in]."""
        a, b = self._factors(adapter, torch.float32)
        return self.scaling[adapter] * (b[gemm] @ a[gemm])
