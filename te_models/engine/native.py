"""Transformer Engine itself, under the names that the layers use. Only this file and native_experts.py import it.

Beyond its public names this file adds the operations that write FP8 for a te.Linear (te_models.kernels.handover) and
`reset_fp8_state`, so that the recipe of a live model can change. Sections are in
docs/internals/transformer_engine.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import transformer_engine.pytorch as _te
import transformer_engine_torch as tex
from torch import Tensor
from torch.nn import Module
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    GroupedLinear,
    LayerNorm,
    Linear,
    MXFP8Quantizer,
    QuantizedTensor,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    checkpoint,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.quantization import (
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    get_align_size_for_quantization,
)

import te_models.kernels.handover_triton as handover_triton
from te_models.device.autograd import Context
from te_models.engine import native_experts
from te_models.engine.native_observers import (
    give_observer,
    observe,
    observe_quantizer,
    observer_of,
    set_observers,
)
from te_models.engine.remade_weight import linear_with_remade_weight
from te_models.engine.torch_linear import TorchLinear, padded_product
from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.early_save import save_early, save_input, saved_input
from te_models.kernels.handover import CastScale
from te_models.kernels.handover_triton import FP8Data
from te_models.numerics.stored import StoredWeight

__version__ = version("transformer-engine")
autocast = _te.autocast
fp8_autocast = _te.fp8_autocast
quantized_model_init = _te.quantized_model_init


class LinearOfTorch(Linear, TorchLinear):
    """A te.Linear that is a torch.nn.Linear too, and takes sequences [B, S, in] under FP8."""

    def forward(self, inp: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the output [..., out] for inp [..., in]; options as in te.Linear."""
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        return padded_product(super().forward, inp, enabled, *args, **options)


class StoredLinear(Linear):
    """A te.Linear whose weight stays as a release stores it (te_models.engine.remade_weight)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_fsdp2 = True

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        """Return the output [..., out] for inp [..., in]; options are those of te.Linear."""
        if not isinstance(self._parameters["weight"], StoredWeight):  # merged
            return super().forward(inp, is_first_microbatch=is_first_microbatch, **options)
        return linear_with_remade_weight(super().forward, self, inp, **options)


class _LayerNorm(torch.autograd.Function):
    """te.LayerNorm's kernels with a bias of zeros, which is no parameter."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Return the norm of x [T, H] with a weight [H] of the same dtype."""
        y, mean, inverse = _layernorm(x, weight, eps, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, weight, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        (dy,) = grads
        x, weight, mean, inverse = ctx.saved_tensors
        # Positional, as Transformer Engine itself calls it: the last two are multiprocessors to leave free, and whether
        # the weight is zero-centred.
        dx, dweight, _ = tex.layernorm_bwd(
            dy.contiguous(), x, mean, inverse, weight, 0, ctx.zero_centered
        )
        return dx, dweight, None, None


def _layernorm(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return te.LayerNorm of x [T, H] without a bias, and mean and 1 / standard deviation, FP32 [T]."""
    # Positional, as in _Norm below; the kernels need a bias.
    zeros = torch.zeros_like(weight)
    y, mean, inverse = tex.layernorm_fwd(
        x, weight, zeros, eps, None, None, TE_DType[x.dtype], 0, zero_centered
    )
    return y, mean, inverse


class LayerNormWithoutBias(LayerNorm):
    """te.LayerNorm whose only parameter is its weight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_parameter("bias", None)

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Set gamma to 1, in a new parameter, on the default CUDA device if it was on meta."""
        if self._parameters.get("bias") is not None:  # in the constructor, which makes both
            super().reset_parameters()
            return
        old = self.weight
        device = torch.device("cuda") if old.is_meta else old.device
        fill = torch.zeros_like if self.zero_centered_gamma else torch.ones_like
        self.weight = torch.nn.Parameter(fill(old, device=device))

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize a tensor [..., H], in the weight's dtype or torch.autocast's."""
        dtype = self.weight.dtype
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        weight = self.weight.to(dtype)
        x = input_.to(dtype).contiguous().view(-1, weight.numel())
        options = (self.eps, self.zero_centered_gamma)
        if torch.is_grad_enabled():
            y = _LayerNorm.apply(x, weight, *options)
        else:
            y, _, _ = _layernorm(x, weight, *options)
        return y.view(input_.shape)


StoredGroupedLinear = native_experts.StoredGroupedLinear
runs_stored_experts = native_experts.runs_stored_experts
STORED_RECIPES = native_experts.STORED_RECIPES
# The layers that quantize: each has `fp8_meta` and quantizers.
LINEARS = (Linear, GroupedLinear)
# The emulated engine refuses recomputes whose caller does not restore its state.
restored_recompute = contextlib.nullcontext

__all__ = [
    "DType",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "GroupedLinear",
    "LINEARS",
    "LayerNormWithoutBias",
    "Linear",
    "LinearOfTorch",
    "MXFP8Quantizer",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "StoredGroupedLinear",
    "StoredLinear",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "handover",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "observe_quantizer",
    "outside_autocast",
    "quantized_model_init",
    "recipe",
    "region_lock",
    "reset_fp8_state",
    "restored_recompute",
    "row_padding",
    "runs_stored_experts",
    "separate_copy",
    "set_observers",
    "drop_cached_weights",
]


@contextlib.contextmanager
def outside_autocast() -> Iterator[recipe.Recipe | None]:
    """Leave all autocasts around the caller, and yield the recipe of the enabled one, if there is one.

    An autocast inside behaves as if nested in a disabled one: its exit updates no scale (section 2.5).
    """
    state = FP8GlobalStateManager.quantization_state
    saved = FP8GlobalStateManager.get_autocast_state()
    depth = state.autocast_depth
    left = state.fp8_recipe if state.fp8_enabled else None
    state.fp8_enabled = state.fp8_calibration = state.is_first_fp8_module = False
    state.fp8_recipe = state.fp8_distributed_group = None
    # Depth 1: an autocast inside is never the outermost one, whose exit updates scales.
    state.autocast_depth = 1
    try:
        yield left
    finally:
        FP8GlobalStateManager.set_autocast_state(saved)
        state.autocast_depth = depth


@contextlib.contextmanager
def row_padding(model: torch.nn.Module, tokens: Tensor, multiple: int) -> Iterator[int]:
    """Surround a forward pass; yield the multiple to pad its rows to, which on a GPU is always the recipe's."""
    yield multiple


# The quantizers with one scale per tensor, for which one module hands FP8 to the next.
PerTensorQuantizer = Float8Quantizer | Float8CurrentScalingQuantizer
_LOCK = threading.RLock()  # Transformer Engine's FP8 state belongs to the process


def region_lock(model: torch.nn.Module, quantized: bool) -> threading.RLock:
    """Return the lock that lets one forward pass run at a time, over all models in the process, also in BF16."""
    return _LOCK


def reset_fp8_state(module: Linear) -> None:
    """Drop a te.Linear's FP8 state, so that its next forward starts afresh under any recipe.

    Otherwise Transformer Engine keeps the old quantizers within one recipe class, and after a change of class and back
    the scales stay 1 forever, since a module registers for updates only once (sections 2.8 and 7.12).
    """
    registry = FP8GlobalStateManager.quantization_state
    for direction in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta.pop(direction, None)
        if not isinstance(state, DelayedScalingRecipeState):
            continue
        history = state.amax_history
        for key, histories in registry.global_amax_history_buffer.items():
            # The three buffers of the registry are parallel lists: the same entries leave all of them.
            keep = [i for i, other in enumerate(histories) if other is not history]
            for buffers in (
                registry.global_amax_buffer,
                registry.global_amax_history_buffer,
                registry.global_scale_buffer,
            ):
                buffers[key] = [buffers[key][i] for i in keep]
    for name in (
        "recipe",
        FP8GlobalStateManager.get_buffer_info(),
        "global_fp8_buffer_pos_fwd_recompute",
    ):
        module.fp8_meta.pop(name, None)
    module.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
    module.fp8_initialized = False
    module.fp8_meta_tensors_initialized = False
    module._fp8_workspaces.clear()


def separate_copy(module: Linear) -> None:
    """Give a copied te.Linear scales of its own to update.

    A copy looks registered to Transformer Engine, which then never updates its scales (section 2.8).
    """
    set_observers(module, None)  # else the observers of the original would count its casts
    for name in (FP8GlobalStateManager.get_buffer_info(), "global_fp8_buffer_pos_fwd_recompute"):
        module.fp8_meta.pop(name, None)
    for direction in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta.get(direction)
        if isinstance(state, DelayedScalingRecipeState):
            module.quantizers[direction] = state.make_quantizers()


def drop_cached_weights(module: Linear) -> None:
    """Drop the FP8 weight that a te.Linear caches for is_first_microbatch=False."""
    module._fp8_workspaces.clear()


class QuantizerTarget(NamedTuple):
    """Where a kernel writes FP8 for a te.Linear, as its own quantizer would (te_models.kernels.handover.CastTarget)."""

    quantizer: Float8Quantizer

    @property
    def counts(self) -> Counts | None:
        """Where the kernel counts what it casts; None where nothing is recorded."""
        observer = observer_of(self.quantizer)
        return None if observer is None else observer.counts

    @property
    def cast_scale(self) -> CastScale:
        """The quantizer's own scale and amax."""
        return CastScale(
            scale=self.quantizer.scale,
            amax=self.quantizer.amax,
            e5m2=self.quantizer.dtype == DType.kFloat8E5M2,
        )

    def tensor(self, fp8: FP8Data, dtype: torch.dtype, counted: bool = False) -> Float8Tensor:
        """Return Transformer Engine's tensor of FP8 data [N, K], with the nominal `dtype`.

        Unless the kernel has `counted` what it cast, an observer counts the data, without the values before.
        """
        made = Float8Tensor(
            shape=fp8.transposed.shape[::-1],
            dtype=dtype,
            data=fp8.data,
            data_transpose=fp8.transposed,
            fp8_scale_inv=fp8.scale_inv,
            fp8_dtype=self.quantizer.dtype,
            quantizer=self.quantizer,
            device=fp8.transposed.device,
        )
        if not counted:
            observe(self.quantizer, made)
        return made


def _quantizer(
    linear: Module | None, direction: str, operand: int = 0
) -> PerTensorQuantizer | None:
    """Return a te.Linear's quantizer of the input ("scaling_fwd"; operand 1: the weight) or of dy ("scaling_bwd").

    It shares the module's scale and amax. None where the module takes BF16, and for block scaling, which gains nothing.
    """
    if not (isinstance(linear, Linear) and FP8GlobalStateManager.is_fp8_enabled()):
        return None
    # Without it there is no quantizer before the module's first forward.
    linear.init_fp8_metadata(num_gemms=1)
    own = linear.quantizers[direction][operand]
    if not isinstance(own, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        return None
    # The module sets the usage of its own one anew at each call; this copy shares scale and amax.
    quantizer = own.copy()
    # Autograd can pass on tensors, not Transformer Engine's bare storages.
    quantizer.internal = False
    quantizer.set_usage(rowwise=True, columnwise=linear.weight.requires_grad)
    give_observer(quantizer, linear, direction, operand)
    return quantizer


def _target(quantizer: PerTensorQuantizer | None) -> QuantizerTarget | None:
    """Return the target of our own kernels: only for delayed scaling, whose scale is known before the values."""
    if isinstance(quantizer, Float8Quantizer) and quantizer.columnwise_usage:
        return QuantizerTarget(quantizer)
    return None


def _targets(
    producer: Module | None, consumer: Module | None
) -> tuple[QuantizerTarget | None, QuantizerTarget | None]:
    """See te_models.kernels.handover.targets."""
    if not torch.is_grad_enabled():
        return None, None
    gradient = _target(_quantizer(producer, "scaling_bwd"))
    if isinstance(producer, Linear) and producer.use_bias:  # the bias gradient is summed from BF16
        gradient = None
    return gradient, _target(_quantizer(consumer, "scaling_fwd"))


class _Norm(torch.autograd.Function):
    """RMSNorm that writes FP8; its backward adds the gradient of the residual stream in the same kernel."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        module: RMSNorm,
        quantizer: PerTensorQuantizer | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (y [N, D], x + delta), from x and delta [N, D]."""
        ctx.zero_centered = module.zero_centered_gamma
        ctx.both = delta is not None
        if (target := _target(quantizer)) is not None:
            cast_scale = target.cast_scale
            fp8, total, inverse = handover_triton.norm(
                x,
                delta,
                weight=weight,
                eps=module.eps,
                zero_centered=ctx.zero_centered,
                scale=cast_scale.scale,
                amax=cast_scale.amax,
                e5m2=cast_scale.e5m2,
                counts=target.counts,
            )
            y = target.tensor(fp8, x.dtype, counted=True)
        else:
            # Without a scale that is known before, or under BF16: the sum in PyTorch, the norm by Transformer Engine.
            total = (x if delta is None else x + delta).contiguous()  # rmsnorm_fwd reads no strides
            # Positional, as Transformer Engine itself calls it: out (None: a new tensor), quantizer, dtype of the
            # output, multiprocessors to leave free, zero-centred weight.
            y, _, inverse = tex.rmsnorm_fwd(
                total,
                weight,
                module.eps,
                None,
                quantizer,
                TE_DType[x.dtype],
                0,
                ctx.zero_centered,
            )
            observe(quantizer, y)
        ctx.save_for_backward(total, weight, inverse)
        # Autograd must not see an input returned as an output: a view is another tensor.
        return y, total.view_as(total) if delta is None else total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and delta, which are one tensor, and of the weight."""
        dy, dtotal = grads
        total, weight, inverse = ctx.saved_tensors
        dy = dy.contiguous()
        dtotal = dtotal.contiguous()
        # The residual gradient is added in the same kernel, which saves reading and writing [N, D] once.
        dx, dweight = tex.rmsnorm_bwd_add(dy, total, dtotal, inverse, weight, 0, ctx.zero_centered)
        return dx, dx if ctx.both else None, dweight, None, None


# (activation, gated) -> Transformer Engine's kernel and its gradient.
ACTIVATIONS: dict[tuple[str, bool], tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    ("silu", True): (tex.swiglu, tex.dswiglu),
    ("silu", False): (tex.silu, tex.dsilu),
    ("gelu_pytorch_tanh", True): (tex.geglu, tex.dgeglu),
    ("gelu_pytorch_tanh", False): (tex.gelu, tex.dgelu),
    ("relu2", True): (tex.sreglu, tex.dsreglu),
    ("relu2", False): (tex.srelu, tex.dsrelu),
}


class _Activation(torch.autograd.Function):
    """The activation of an MLP that writes FP8, and whose backward does."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gradient: QuantizerTarget | None,
        quantizer: PerTensorQuantizer | None,
        kind: tuple[str, bool],
    ) -> Tensor:
        """Return [N, F], from gate_up [N, 2F] or [N, F]."""
        ctx.gradient = gradient
        ctx.kind = kind
        save_input(ctx, gate_up, recompute=lambda: _activation_for_backward(quantizer, kind))
        if (target := _target(quantizer)) is not None:
            cast_scale = target.cast_scale
            activation, gated = kind
            fp8 = handover_triton.activate(
                gate_up,
                scale=cast_scale.scale,
                amax=cast_scale.amax,
                e5m2=cast_scale.e5m2,
                activation=activation,
                gated=gated,
                counts=target.counts,
            )
            return target.tensor(fp8, gate_up.dtype, counted=True)
        y = ACTIVATIONS[kind][0](gate_up, quantizer)
        observe(quantizer, y)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of gate_up."""
        (dy,) = grads
        gate_up = saved_input(ctx)
        dy = dy.contiguous()
        if ctx.gradient is not None:
            cast_scale = ctx.gradient.cast_scale
            activation, gated = ctx.kind
            fp8 = handover_triton.activate_backward(
                dy,
                gate_up,
                scale=cast_scale.scale,
                amax=cast_scale.amax,
                e5m2=cast_scale.e5m2,
                activation=activation,
                gated=gated,
                counts=ctx.gradient.counts,
            )
            return ctx.gradient.tensor(fp8, gate_up.dtype, counted=True), None, None, None
        return ACTIVATIONS[ctx.kind][1](dy, gate_up, None), None, None, None


def _activation_for_backward(
    quantizer: PerTensorQuantizer | None, kind: tuple[str, bool]
) -> Callable[[Tensor], Tensor]:
    """Return a function that recomputes the activation for te.Linear's backward: the present scale, no amax."""
    target = _target(quantizer)
    if target is None:
        return lambda gate_up: ACTIVATIONS[kind][0](gate_up, quantizer)
    activation, gated = kind
    present = target.cast_scale
    # A copy: the update after the forward pass changes the scale in place, and backward needs the one of the pass.
    scale = present.scale.clone()
    unread_amax = torch.empty_like(present.amax)

    def again(gate_up: Tensor) -> Tensor:
        fp8 = handover_triton.activate(
            gate_up,
            scale=scale,
            amax=unread_amax,
            e5m2=present.e5m2,
            activation=activation,
            gated=gated,
            # The weight gradient reads the transposed copy only.
            rowwise=False,
        )
        # The recorder counted this cast in the forward pass.
        return target.tensor(fp8, gate_up.dtype, counted=True)

    return again


def _norm(
    module: RMSNorm | LayerNormWithoutBias,
    x: Tensor,
    delta: Tensor | None,
    consumer: Module | None,
) -> tuple[Tensor, Tensor]:
    """See te_models.kernels.handover.norm."""
    # LayerNorm runs its own forward: no kernel of it adds the residual stream or writes FP8.
    if torch.is_grad_enabled() and isinstance(module, RMSNorm):
        return _Norm.apply(x, delta, module.weight, module, _quantizer(consumer, "scaling_fwd"))
    total = x if delta is None else x + delta
    return module(total), total


def _activate(
    gate_up: Tensor,
    producer: Module | None,
    consumer: Module | None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """See te_models.kernels.handover.activate."""
    kind = (activation, gated)
    if not torch.is_grad_enabled():
        return ACTIVATIONS[kind][0](gate_up, None)
    gate_up = save_early(gate_up)
    gradient, _ = _targets(producer, consumer)
    return _Activation.apply(gate_up, gradient, _quantizer(consumer, "scaling_fwd"), kind)


def _linear(module: Linear, x: Tensor, **options: bool | None) -> Tensor:
    """See te_models.kernels.handover.linear."""
    weight = _cast_weight(module) if options.get("is_first_microbatch") is None else None
    if weight is None:
        y = module(x, **options)
    else:
        # is_first_microbatch=False reads the weight from the cache: for one call it holds the copy made by our kernel.
        cache = module._fp8_workspaces
        module._fp8_workspaces = {"weight": weight}
        try:
            # It takes the weight from the cache.
            y = module(x, **options | {"is_first_microbatch": False})
        finally:
            module._fp8_workspaces = cache
        # Backward reads only the transposed copy.
        weight.update_usage(rowwise_usage=False, columnwise_usage=True)
    if isinstance(x, QuantizedTensor) and module.weight.requires_grad:
        # te.Linear does so with an input that it quantized itself.
        x.update_usage(rowwise_usage=False, columnwise_usage=True)
    return y


def _cast_weight(module: Linear) -> Float8Tensor | None:
    """Return a te.Linear's weight in FP8; None where the module casts it, or where it is FP8 already."""
    if not (torch.is_grad_enabled() and isinstance(module, Linear)) or isinstance(
        module.weight, (QuantizedTensor, StoredWeight)
    ):
        return None
    target = _target(_quantizer(module, "scaling_fwd", 1))
    if target is None or module.is_fsdp2:  # FSDP2 gathers and casts again in backward
        return None
    cast_scale = target.cast_scale
    fp8 = handover_triton.cast(
        module.weight.detach(),
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        e5m2=cast_scale.e5m2,
        counts=target.counts,
    )
    return target.tensor(fp8, module.weight.dtype, counted=True)


handover = {
    "norm": _norm,
    "activate": _activate,
    "linear": _linear,
    "targets": _targets,
    "grouped": native_experts.grouped,
    "experts": native_experts.experts,
    "experts_join": native_experts.experts_join,
    "counts_on_device": native_experts.counts_on_device,
}
