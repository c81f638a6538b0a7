"""Experts of the planned engine: functions that allocate and save what native_experts.py and its kernels do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_models.device.allocations import counted_as
from te_models.device.autograd import Context
from te_models.device.operations import count_flops
from te_models.engine.emulated import (
    FP8GlobalStateManager,
    recipe,
)
from te_models.engine.emulated.recipe import Recipe
from te_models.engine.planned_modules import (
    WEIGHT_COPIES,
    GroupedLinear,
    StoredGroupedLinear,
    expert_gradients,
    stored_experts,
)
from te_models.kernels.expert_rows import Route, dispatch
from te_models.kernels.groups import Groups
from te_models.numerics.tensors import (
    QuantizedTensor,
)


def _present_recipe() -> Recipe | None:
    """Return the recipe of the autocast around the caller; None: BF16."""
    if not FP8GlobalStateManager.is_fp8_enabled():
        return None
    return FP8GlobalStateManager.get_fp8_recipe()


def counts_on_device(module: nn.Module, te_recipe: Recipe | None) -> bool:
    """Return True: without data nothing waits for the numbers of rows."""
    return True


def _runs_jointly(module: nn.Module, te_recipe: Recipe | None) -> bool:
    """Return whether kernels cast and multiply all experts at once: native_experts.counts_on_device."""
    if not isinstance(module, GroupedLinear) or module.weights[0].dtype != torch.bfloat16:
        return False
    if isinstance(module, StoredGroupedLinear):
        return False
    if te_recipe is None:
        return True
    # Backward then computes with values that the kernels do not keep.
    if te_recipe.backward_override:
        return False
    if te_recipe.delayed():
        return True
    if te_recipe.mxfp8() or te_recipe.nvfp4():
        return False
    plans = [te_recipe.options(name) for name in ("fwd_inp", "fwd_weight", "bwd_grad")]
    if any(plan.amax_epsilon for plan in plans):
        return False
    if te_recipe.float8_block_scaling():
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        # The kernels know rows of 128 for inputs and gradients, and squares for weights.
        usual = [getattr(te_recipe, name) for name in dims] == [1, 2, 1]
        e4m3 = te_recipe.fp8_format == recipe.Format.E4M3
        in_bf16 = not isinstance(module.weights[0], QuantizedTensor)
        return usual and e4m3 and in_bf16 and all(plan.power_2_scale for plan in plans)
    return te_recipe.float8_current_scaling() and not any(plan.power_2_scale for plan in plans)


def grouped(
    module: nn.Module,
    x: Tensor,
    rows: Groups | list[int],
    is_first_microbatch: bool | None = None,
    route: Route | None = None,
) -> Tensor:
    """Do what native_experts.grouped does, without data."""
    te_recipe = _present_recipe()
    if isinstance(module, StoredGroupedLinear):
        if route is not None and te_recipe is None:
            x = dispatch(x, route.token, route.row, route.kernels)
            route = None
        return stored_experts(module, x, _most(rows), route)
    joint = te_recipe is not None and _runs_jointly(module, te_recipe)
    if route is not None and not joint:
        # Only the joint kernels read the rows of tokens from where they are; others need a tensor of them.
        x = dispatch(x, route.token, route.row, route.kernels)
        route = None
    if not isinstance(module, GroupedLinear):
        return module(x, rows, is_first_microbatch=is_first_microbatch, run=grouped)
    if not joint:
        return module(x, rows, is_first_microbatch=is_first_microbatch)
    copies = _ExpertCopies(module, is_first_microbatch)
    return _JointLinear.apply(x, copies, _most(rows), route, *module.weights, *module.biases)


def _most(rows: Groups | list[int]) -> int:
    """Return the rows of all experts; a list of their numbers is what other ranks have sent."""
    return sum(rows) if isinstance(rows, list) else rows.most


class _ExpertCopies:
    """The experts' weights in FP8, of a byte each: a rowwise copy, and a transposed one where they are kept.

    Attributes:
        module: the experts.
        size: elements of all their weights.
        stored: whether the weights themselves are in FP8, so that the forward makes no copy.
        rowwise, transposed: the copies [size]; None: there is none, or none any longer.
    """

    def __init__(self, module: GroupedLinear, is_first_microbatch: bool | None) -> None:
        self.module = module
        self.size = module.num_gemms * module.out_features * module.in_features
        self.stored = isinstance(module.weights[0], QuantizedTensor)
        # Kept for the other micro-batches of the step, unless FSDP frees the weight that they belong to.
        keeps = is_first_microbatch is not None and not module._is_fsdp2
        self.rowwise: Tensor | None = None
        self.transposed: Tensor | None = None
        if self.stored:
            return
        with counted_as(WEIGHT_COPIES):
            self.rowwise = _bytes(self.size)
            self.transposed = _bytes(self.size) if keeps else None
        if keeps:
            module._fp8_workspaces["experts"] = self  # type: ignore[assignment]

    @property
    def trained(self) -> bool:
        """True if the weights get gradients."""
        return self.module.weights[0].requires_grad

    def drop_rowwise(self) -> None:
        """Free the rowwise copy after the forward pass, unless the copies are kept for other micro-batches."""
        if self.transposed is None:
            self.rowwise = None

    def in_backward(self) -> Tensor:
        """Return the transposed copy, made where there is none."""
        return _bytes(self.size) if self.transposed is None else self.transposed


def _bytes(size: int) -> Tensor:
    """Return uint8 [size], such as FP8 data."""
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _matrix(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return [rows, columns] in the dtype of `like`."""
    return torch.empty(rows, columns, dtype=like.dtype, device="meta")


class _JointLinear(torch.autograd.Function):
    """The twin of grouped_linear_triton._FP8, and of grouped_blocks_triton._Blocks, which saves as much."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, copies: _ExpertCopies, rows: int, route: Route | None, *_: Tensor
    ) -> Tensor:
        module = copies.module
        trained = ctx.needs_input_grad[4]
        # As the kernels allocate it, in this order: only then is the highest sum of bytes the one of a real run.
        fp8_x = _bytes(rows * module.in_features)
        transposed = _bytes(rows * module.in_features) if trained and route is None else None
        ctx.copies = copies
        ctx.rows = rows
        ctx.route = route
        ctx.biases = len(module.biases)
        # With a route the tokens are saved, T rows in place of one per expert and token; backward casts them anew.
        ctx.save_for_backward(x if trained and route is not None else transposed)
        ctx.shape = x.shape
        out = _matrix(rows, module.out_features, x)
        count_flops(out, 2.0 * out.numel() * module.in_features)
        copies.drop_rowwise()
        del fp8_x
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        module: GroupedLinear = ctx.copies.module
        (x,) = ctx.saved_tensors
        data = _bytes(dy.numel())
        transposed = None if x is None else _bytes(dy.numel())
        dx = None
        if ctx.needs_input_grad[0]:
            weights = ctx.copies.in_backward()
            dx = _matrix(ctx.rows, module.in_features, dy)
            if ctx.route is not None:
                dx = ctx.route.kernels.total(dx, ctx.route.row, None)
            del weights
        del data
        rows = None
        if x is not None and ctx.route is not None:
            rows = _bytes(ctx.rows * module.in_features)
        of_weights = expert_gradients(ctx, module, dy.dtype)
        del rows, transposed
        return dx, None, None, None, *of_weights


def experts_join(*modules: nn.Module) -> bool:
    """See native_experts.experts_join."""
    te_recipe = _present_recipe()
    return te_recipe is not None and all(_runs_jointly(module, te_recipe) for module in modules)


class _UpOfExperts(torch.autograd.Function):
    """The twin of joint_experts_triton._Up."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        copies: _ExpertCopies,
        rows: int,
        route: Route | None,
        passed: Any,
        *_: Tensor,
    ) -> Tensor:
        module = copies.module
        fp8_x = _bytes(rows * module.in_features)
        transposed = None
        if copies.trained and route is None:
            transposed = _bytes(rows * module.in_features)
        ctx.copies = copies
        ctx.rows = rows
        ctx.route = route
        ctx.passed = passed
        ctx.biases = len(module.biases)
        ctx.save_for_backward(x if copies.trained and route is not None else transposed)
        out = _matrix(rows, module.out_features, x)
        count_flops(out, 2.0 * out.numel() * module.in_features)
        copies.drop_rowwise()
        del fp8_x
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grads[0].dtype
        module: GroupedLinear = ctx.copies.module
        (x,) = ctx.saved_tensors
        slopes, transposed = ctx.passed.pop()
        dx = None
        if ctx.needs_input_grad[0]:
            weights = ctx.copies.in_backward()
            dx = torch.empty(ctx.rows, module.in_features, dtype=dtype, device="meta")
            if ctx.route is not None:
                dx = ctx.route.kernels.total(dx, ctx.route.row, None)
            del weights
        del slopes
        rows = None
        if x is not None and ctx.route is not None:
            rows = _bytes(ctx.rows * module.in_features)
        of_weights = expert_gradients(ctx, module, dtype)
        del rows, transposed
        return dx, None, None, None, None, *of_weights


class _DownOfExperts(torch.autograd.Function):
    """The twin of joint_experts_triton._Down."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gates: Tensor | None,
        copies: _ExpertCopies,
        route: Route | None,
        passed: Any,
        trained_up: bool,
        *_: Tensor,
    ) -> Tensor:
        module = copies.module
        hidden = _bytes(len(gate_up) * module.in_features)
        out = _matrix(len(gate_up), module.out_features, gate_up)
        count_flops(out, 2.0 * out.numel() * module.in_features)
        copies.drop_rowwise()
        del hidden
        ctx.copies = copies
        ctx.route = route
        ctx.passed = passed
        ctx.trained_up = trained_up
        ctx.biases = len(module.biases)
        ctx.save_for_backward(gate_up, gates, None if route is None else out)
        return out if route is None else route.kernels.total(out, route.row, gates)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        module: GroupedLinear = ctx.copies.module
        gate_up, gates, _ = ctx.saved_tensors
        dgates = None if gates is None else torch.empty_like(gates)
        size = len(gate_up) * module.out_features
        data = _bytes(size)
        transposed = _bytes(size) if ctx.copies.trained else None
        weights = ctx.copies.in_backward()
        dh = _matrix(len(gate_up), module.in_features, dy)
        del data, weights
        slopes = _bytes(gate_up.numel())
        slopes_transposed = _bytes(gate_up.numel()) if ctx.trained_up else None
        hidden = _bytes(dh.numel()) if ctx.copies.trained else None
        del dh
        of_weights = expert_gradients(ctx, module, dy.dtype)
        del hidden, transposed
        ctx.passed.append((slopes, slopes_transposed))
        # Autograd asks for a gradient of the shape of gate_up; the slopes in FP8 go past it, by `passed`.
        passed = gate_up.new_zeros(1).expand_as(gate_up)
        return passed, dgates, None, None, None, None, *of_weights


def experts(
    up: GroupedLinear,
    down: GroupedLinear,
    x: Tensor,
    gates: Tensor | None,
    rows: Groups | list[int],
    route: Route | None,
    limit: float | None,
    alpha: float,
    padding: tuple[Tensor, int] | None,
    is_first_microbatch: bool | None,
) -> Tensor:
    """Do what native_experts.experts does, without data."""
    # What the backward of `down` hands to the backward of `up` beside autograd: the gradient of gate_up in FP8.
    passed: list[Any] = []
    up_copies = _ExpertCopies(up, is_first_microbatch)
    down_copies = _ExpertCopies(down, is_first_microbatch)
    gate_up = _UpOfExperts.apply(x, up_copies, _most(rows), route, passed, *up.weights, *up.biases)
    return _DownOfExperts.apply(
        gate_up,
        gates,
        down_copies,
        route,
        passed,
        up_copies.trained,
        *down.weights,
        *down.biases,
    )
