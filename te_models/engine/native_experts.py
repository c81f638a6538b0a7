"""Transformer Engine's te.GroupedLinear through kernels that compute all experts at once.

A part of te_models.engine.native, for `handover` in native_handover.py. Sections are in
docs/internals/transformer_engine.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from transformer_engine.common import recipe
from transformer_engine.pytorch import DType, Float8Tensor, GroupedLinear
from transformer_engine.pytorch.quantization import (
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    get_fp8_te_dtype,
)

from te_models.distributed.sharded_call import call_inside, only_fsdp_hooks
from te_models.engine.native_observers import experts_observer
from te_models.errors import UsageError
from te_models.kernels.expert_blocks_triton import WeightBlocks, blocks_fit
from te_models.kernels.expert_cast_triton import FP8Matrices
from te_models.kernels.expert_hidden_triton import Activation
from te_models.kernels.expert_rows import Route, dispatch
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.grouped_blocks_triton import (
    BlockExperts,
    BlockProjection,
    cast_weights,
    experts_in_blocks,
    in_blocks,
)
from te_models.kernels.grouped_linear_triton import (
    Casts,
    Locations,
    Stored,
    Weights,
    in_bf16,
    in_fp8,
)
from te_models.kernels.groups import Groups
from te_models.kernels.joint_experts_triton import JointExperts, Projection, experts_in_fp8
from te_models.kernels.stored_experts_triton import (
    StoredExperts,
    stored_in_bf16,
    stored_in_fp8,
)
from te_models.numerics.stored import StoredWeight

T = TypeVar("T")
STORED_RECIPES = (
    "experts whose weights stay as they are stored run on a GPU in BF16 and under recipes with one scale per expert: "
    "choose recipe='current', 'delayed' or 'bf16', or base_weights='dequantized'"
)


class StoredGroupedLinear(GroupedLinear):
    """A te.GroupedLinear whose weights stay as a release stores them, of which some are dequantized at a time."""

    @property
    def stored(self) -> StoredExperts | None:
        """The experts' weights; None if adapters were merged into them."""
        rows = []
        for expert in range(self.num_gemms):
            weight = self.get_parameter(f"weight{expert}")
            if not isinstance(weight, StoredWeight):
                return None
            rows.append(weight.rows)
        return StoredExperts(rows, self.get_parameter("weight0").dtype)

    def forward(
        self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **options: Any
    ) -> Any:
        """Return the experts' rows [R, out] of `inp` [R, in], whose numbers `m_splits` are; see te.GroupedLinear."""
        stored = self.stored
        if stored is None:
            return super().forward(inp, m_splits, is_first_microbatch, **options)
        rows = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        groups = rows if isinstance(rows, Groups) else Groups.of(list(rows), inp.device)
        return _stored(self, stored, inp, groups, route=None, te_recipe=_present_recipe())


def _present_recipe() -> recipe.Recipe | None:
    """Return the recipe of the autocast around the caller; None: BF16."""
    if not FP8GlobalStateManager.is_fp8_enabled():
        return None
    return FP8GlobalStateManager.get_fp8_recipe()


def runs_stored_experts(te_recipe: recipe.Recipe | None) -> bool:
    """Return whether a recipe (None: BF16) runs experts whose weights stay as a release stores them."""
    return te_recipe is None or _joint_casts(te_recipe) is not None


def counts_on_device(module: Module, te_recipe: recipe.Recipe | None) -> bool:
    """See te_models.kernels.handover.counts_on_device."""
    # With adapters the module is a layer of peft around the te.GroupedLinear.
    adapted = not isinstance(module, GroupedLinear)
    experts = module._modules.get("base_layer") if adapted else module
    if not isinstance(experts, GroupedLinear) or not _is_plain(experts):
        return False
    if adapted and isinstance(experts, FSDPModule):
        return False
    if adapted and (experts.in_features % 8 or experts.out_features % 8):
        return False  # adapters' products in one launch need rows of 16 bytes
    # All experts of a module have weights of one kind.
    weight = experts.get_parameter("weight0")
    if isinstance(weight, StoredWeight):
        return weight.is_cuda and runs_stored_experts(te_recipe)
    sharded = isinstance(weight, DTensor)  # FSDP2 will have gathered it when kernels read it
    whole = type(weight) in (Tensor, Parameter)
    in_bf16 = (sharded or whole) and weight.dtype == torch.bfloat16
    frozen_fp8 = isinstance(weight, Float8Tensor) and not weight.requires_grad
    if not (in_bf16 or frozen_fp8) or not weight.is_cuda:
        return False
    if not sharded and _expert_weights(experts) is None:
        return False
    if te_recipe is None:
        return in_bf16
    if _in_blocks(te_recipe):
        return in_bf16 and blocks_fit(weight.device, experts.in_features, experts.out_features)
    return _joint_casts(te_recipe) is not None


def _is_plain(module: GroupedLinear) -> bool:
    """Return whether a call of the module is te.GroupedLinear's own, over its own parameters, but for FSDP2's hooks."""
    forward = type(module).forward  # FSDP2 makes a subclass, with the same forward
    if forward is not GroupedLinear.forward and forward is not StoredGroupedLinear.forward:
        return False
    # Such as the hooks of calibration, which note amaxes.
    if "forward" in vars(module) or not only_fsdp_hooks(module):
        return False
    # PyTorch's parametrizations compute the weights when they are read.
    return "parametrizations" not in module._modules


def _plans(
    te_recipe: recipe.Float8CurrentScaling | recipe.Float8BlockScaling,
) -> list[recipe.QParams]:
    """Return how a recipe makes the scales of inputs, weights and gradients of outputs."""
    return [
        te_recipe.fp8_quant_fwd_inp,
        te_recipe.fp8_quant_fwd_weight,
        te_recipe.fp8_quant_bwd_grad,
    ]


def _in_blocks(te_recipe: recipe.Recipe) -> bool:
    """Return whether all experts at once run under this block scaling: in E4M3, with powers of two as scales."""
    if not isinstance(te_recipe, recipe.Float8BlockScaling) or te_recipe.backward_override:
        return False
    plans = _plans(te_recipe)
    # The kernels compute scales as powers of two and know no epsilon.
    powers = all(plan.power_2_scale and not plan.amax_epsilon for plan in plans)
    dims = (
        te_recipe.x_block_scaling_dim,
        te_recipe.w_block_scaling_dim,
        te_recipe.grad_block_scaling_dim,
    )
    e4m3 = get_fp8_te_dtype(te_recipe, fprop_tensor=False) == DType.kFloat8E4M3
    return powers and dims == (1, 2, 1) and e4m3


def _joint_casts(te_recipe: recipe.Recipe) -> Casts | None:
    """Return how a recipe casts the operands of all experts; None if Transformer Engine does it, one by one."""
    if not isinstance(te_recipe, (recipe.Float8CurrentScaling, recipe.DelayedScaling)):
        return None
    # Backward then computes with values that the kernels do not keep.
    if te_recipe.backward_override:
        return None
    # HYBRID: E4M3 forward, E5M2 for gradients.
    wide = get_fp8_te_dtype(te_recipe, fprop_tensor=False) == DType.kFloat8E5M2
    gradient = torch.float8_e5m2 if wide else torch.float8_e4m3fn
    if isinstance(te_recipe, recipe.DelayedScaling):
        # Section 7.6.
        return Casts(
            gradient,
            precise_output=False,
            precise_input_gradient=True,
            precise_weight_gradient=True,
        )
    plans = _plans(te_recipe)
    if any(plan.power_2_scale or plan.amax_epsilon for plan in plans):
        return None
    return Casts(
        gradient,
        precise_output=te_recipe.fp8_gemm_fprop.use_split_accumulator,
        precise_input_gradient=te_recipe.fp8_gemm_dgrad.use_split_accumulator,
        precise_weight_gradient=te_recipe.fp8_gemm_wgrad.use_split_accumulator,
    )


def _with_scales(module: GroupedLinear, casts: Casts, x: Tensor) -> Casts:
    """Return `casts` of x with the observers of a te.GroupedLinear, and its delayed scales and amaxes if it has any."""
    casts = casts._replace(
        observer_x=experts_observer(module, 0),
        observer_weights=experts_observer(module, 1),
        observer_dy=experts_observer(module, 2),
    )
    forward = module.fp8_meta["scaling_fwd"]
    backward = module.fp8_meta["scaling_bwd"]
    if not isinstance(forward, DelayedScalingRecipeState):
        return casts
    trained = any(tensor.requires_grad for tensor in (x, *module.parameters()))
    after_backward = None
    # The joint kernels stand in for a module, so they take its duty to update the backward scales.
    if torch.is_grad_enabled() and trained and FP8GlobalStateManager.is_first_fp8_module():
        after_backward = partial(FP8GlobalStateManager.reduce_and_update_fp8_tensors, forward=False)
    # Of each expert the state has a slot for input, weight and output forward, and for dy and dx backward.
    return casts._replace(
        delayed_x=_delayed_scales(forward, slot=0, slots=3),
        delayed_weights=_delayed_scales(forward, slot=1, slots=3),
        delayed_dy=_delayed_scales(backward, slot=0, slots=2),
        after_backward=after_backward,
    )


def _delayed_scales(state: DelayedScalingRecipeState, slot: int, slots: int) -> Delayed:
    """Return scale and amax of one operand of all experts, FP32 [E] each: views of a state with `slots` per expert."""
    return Delayed(state.scale[slot::slots], state.amax_history[0, slot::slots])


# Graphs read them where they are.
_LOCATIONS: WeakKeyDictionary[Module, Locations] = WeakKeyDictionary()


def _expert_weights(module: GroupedLinear) -> Weights | None:
    """Return the weights of a te.GroupedLinear, those in FP8 as bytes; None if the kernels cannot read them."""
    weights = [module.get_parameter(f"weight{expert}") for expert in range(module.num_gemms)]
    data = []
    for weight in weights:
        data.append(weight._data if isinstance(weight, Float8Tensor) else weight)
    # Kept per module: finding the addresses anew in each pass would copy them to the device each time.
    at = Locations.of(data, _LOCATIONS.get(module))
    if at is None:
        return None
    _LOCATIONS[module] = at
    return Weights(data, at)


def grouped(
    module: GroupedLinear,
    x: Tensor,
    rows: list[int] | Groups,
    is_first_microbatch: bool | None = None,
    route: Route | None = None,
) -> Tensor:
    """See te_models.kernels.handover.grouped."""
    te_recipe = _present_recipe()
    adapted = not isinstance(module, GroupedLinear)
    joint = not adapted and counts_on_device(module, te_recipe)
    # Only the joint kernels in FP8 read the rows of tokens from where they are; others need a tensor of them.
    if route is not None and (not joint or te_recipe is None):
        x = dispatch(x, route.token, route.row, route.kernels)
        route = None
    if adapted and "base_layer" in module._modules:
        return module(x, rows, is_first_microbatch=is_first_microbatch, run=grouped)
    if not joint:
        return module(x, rows, is_first_microbatch=is_first_microbatch)
    groups = rows if isinstance(rows, Groups) else Groups.of(rows, x.device)
    stored = module.stored if isinstance(module, StoredGroupedLinear) else None

    def run(x: Tensor) -> Tensor:
        if stored is not None:
            return _stored(module, stored, x, groups, route=route, te_recipe=te_recipe)
        weights = _read_weights(module)
        bias = _biases(module)
        if te_recipe is None:
            return in_bf16(x, groups, weights, bias)
        with module.prepare_forward_ctx(x, num_gemms=groups.experts):
            if _in_blocks(te_recipe):
                projection = _block_projection(module, weights, is_first_microbatch)
                return in_blocks(x, groups, projection, route)
            casts = _with_scales(module, _required_casts(te_recipe), x)
            fp8_weights = _cast_experts(module, weights, casts, is_first_microbatch)
            trained = None if isinstance(fp8_weights, Stored) else weights
            return in_fp8(
                x,
                groups,
                casts,
                fp8_weights,
                weights=trained,
                bias=bias,
                route=route,
            )

    # Under FSDP2 the hooks of the module gather the weights around `run`.
    return call_inside([module], run, x)


def _stored(
    module: GroupedLinear,
    stored: StoredExperts,
    x: Tensor,
    groups: Groups,
    route: Route | None,
    te_recipe: recipe.Recipe | None,
) -> Tensor:
    """Return the experts' rows of x, whose weights stay as they are stored; see te_models.kernels.handover.grouped.

    Raises:
        UsageError: the recipe casts in another way than one scale per expert.
    """
    if not runs_stored_experts(te_recipe):
        raise UsageError(STORED_RECIPES)
    bias = _biases(module)
    if te_recipe is None:
        return stored_in_bf16(x, groups, stored, bias)
    with module.prepare_forward_ctx(x, num_gemms=groups.experts):
        casts = _with_scales(module, _required_casts(te_recipe), x)
        return stored_in_fp8(x, groups, casts, stored, bias=bias, route=route)


def _read_weights(module: GroupedLinear) -> Weights:
    """Return the weights of a te.GroupedLinear whose kernels can read them (`counts_on_device`)."""
    weights = _expert_weights(module)
    assert weights is not None  # memory that PyTorch allocates begins at multiples of 16 bytes
    return weights


def _required_casts(te_recipe: recipe.Recipe) -> Casts:
    """Return `_joint_casts` of a recipe that has them: one with a scale per expert."""
    casts = _joint_casts(te_recipe)
    assert casts is not None
    return casts


def _cast_experts(
    module: GroupedLinear, weights: Weights, casts: Casts, is_first_microbatch: bool | None
) -> FP8Matrices | Stored:
    """Return the FP8 weights of a te.GroupedLinear: those it has, those that it caches, or its own cast."""
    data = weights.tensors
    if data[0].dtype == torch.uint8:
        inverses = []
        for expert in range(len(data)):
            weight: Any = module.get_parameter(f"weight{expert}")
            inverses.append(weight._scale_inv)
        return Stored(data, weights.at, torch.cat(inverses))

    def cast(transpose: bool) -> FP8Matrices:
        return weights.cast(
            casts.delayed_weights, transpose=transpose, observer=casts.observer_weights
        )

    return _cached(module, is_first_microbatch, cast)


def _cached(
    module: GroupedLinear, is_first_microbatch: bool | None, cast: Callable[[bool], T]
) -> T:
    """Return the FP8 weights that a te.GroupedLinear keeps for several micro-batches, or new ones.

    `cast` makes them, transposed too if its argument is True, which is worth the memory where they are kept.
    """
    cache = module._fp8_workspaces
    # FSDP2 gathers and casts again in backward.
    keeps = is_first_microbatch is not None and not module.is_fsdp2
    fp8_weights = cache.get("experts") if keeps and not is_first_microbatch else None
    if fp8_weights is None:
        fp8_weights = cast(keeps)
    if keeps:
        cache["experts"] = fp8_weights
    return fp8_weights


def _block_projection(
    module: GroupedLinear, weights: Weights, is_first_microbatch: bool | None
) -> BlockProjection:
    """Return a te.GroupedLinear under block scaling."""
    detached = [weight.detach() for weight in weights.tensors]
    observer = experts_observer(module, 1)

    def cast(transpose: bool) -> WeightBlocks:
        return cast_weights(detached, weights.at, transpose, observer)

    fp8_weights = _cached(module, is_first_microbatch, cast)
    return BlockProjection(
        fp8_weights,
        weights.at,
        weights.tensors,
        _biases(module),
        observer_x=experts_observer(module, 0),
        observer_dy=experts_observer(module, 2),
    )


def _projection(
    module: GroupedLinear, te_recipe: recipe.Recipe, x: Tensor, is_first_microbatch: bool | None
) -> Projection:
    """Return a te.GroupedLinear under a recipe with a scale per expert, for a pass over x."""
    weights = _read_weights(module)
    casts = _with_scales(module, _required_casts(te_recipe), x)
    fp8_weights = _cast_experts(module, weights, casts, is_first_microbatch)
    return Projection(
        casts,
        fp8_weights,
        at=weights.at,
        inputs=module.in_features,
        outputs=module.out_features,
        # Frozen FP8 weights get no gradients.
        weights=() if isinstance(fp8_weights, Stored) else weights.tensors,
        bias=_biases(module),
    )


def experts_join(*modules: Module) -> bool:
    """See te_models.kernels.handover.experts_join."""
    if not FP8GlobalStateManager.is_fp8_enabled():
        return False
    if any(isinstance(module, StoredGroupedLinear) for module in modules):
        return False
    te_recipe = FP8GlobalStateManager.get_fp8_recipe()
    return all(
        isinstance(module, GroupedLinear) and counts_on_device(module, te_recipe)
        for module in modules
    )


def experts(
    up: GroupedLinear,
    down: GroupedLinear,
    x: Tensor,
    gates: Tensor | None,
    rows: list[int] | Groups,
    route: Route | None,
    limit: float | None,
    alpha: float,
    padding: tuple[Tensor, int] | None,
    is_first_microbatch: bool | None,
) -> Tensor:
    """See te_models.model.forward_context.ForwardContext.experts, which describes the arguments."""
    groups = rows if isinstance(rows, Groups) else Groups.of(rows, x.device)
    te_recipe = FP8GlobalStateManager.get_fp8_recipe()
    activation = Activation(limit=limit, alpha=alpha)
    if padding is not None:
        token, tokens = padding
        activation = activation._replace(token=token, tokens=tokens)

    def run(x: Tensor, gates: Tensor | None) -> Tensor:
        with contextlib.ExitStack() as stack:
            for module in (up, down):
                stack.enter_context(module.prepare_forward_ctx(x, num_gemms=groups.experts))
            if _in_blocks(te_recipe):
                blocks = BlockExperts(
                    groups,
                    route,
                    activation,
                    up=_block_projection(up, _read_weights(up), is_first_microbatch),
                    down=_block_projection(down, _read_weights(down), is_first_microbatch),
                )
                return experts_in_blocks(x, gates, blocks)
            joint = JointExperts(
                groups,
                route,
                activation,
                up=_projection(up, te_recipe, x, is_first_microbatch),
                down=_projection(down, te_recipe, x, is_first_microbatch),
            )
            return experts_in_fp8(x, gates, joint)

    return call_inside([up, down], run, x, gates)


def _biases(module: GroupedLinear) -> Tensor | None:
    """Return the biases of a te.GroupedLinear, [E, O]; None if it has none."""
    if not module.use_bias:
        return None
    return torch.stack([module.get_parameter(f"bias{e}") for e in range(module.num_gemms)])
