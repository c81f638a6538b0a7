"""The modules of the planned engine (te_models.engine.planned): what each allocates and saves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from te_models.config.chunk_sizes import experts_at_a_time
from te_models.device.allocations import counted_as, fresh
from te_models.device.autograd import Context
from te_models.device.operations import count_flops
from te_models.engine import emulated
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.linear_call import Call, new_calls
from te_models.engine.emulated.linear_products import fp8_weight
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.parallel import Parallelism
from te_models.engine.emulated.recipe import Recipe
from te_models.kernels.expert_rows import Route
from te_models.numerics.matrices import as_matrix
from te_models.numerics.quantizers import Quantizer
from te_models.numerics.stored import StoredWeight
from te_models.numerics.tensors import MaybeQuantized, QuantizedTensor, QuantizedTensorStorage

WEIGHT_COPIES = "fp8_weight_copies"  # a part of te_models.planning.memory_estimate.Memory
GRADIENTS = "gradients"
EXPERT_GRADIENTS = "expert_gradients"  # which fewer ranks share under expert parallelism


# What casts return, on meta, which holds no memory: PyTorch takes milliseconds for the operations of one cast there.
_CASTS: dict[Hashable, dict[str, Any]] = {}


class _PlannedQuantizer(Quantizer):
    """A quantizer of the emulated engine whose casts allocate their results and nothing else.

    Both copies have memory of their own, as on a GPU.
    """

    def _fields(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        key = (type(self), self._settings(), tensor.shape, tensor.dtype, rowwise, columnwise)
        if key not in _CASTS:
            with counted_as(None):
                _CASTS[key] = super()._fields(tensor, rowwise, columnwise)
        return {name: fresh(value) for name, value in _CASTS[key].items()}

    def _settings(self) -> tuple[tuple[str, Hashable], ...]:
        """Return what the shapes of results depend on, without scales, amaxes and random states."""
        settings = []
        for name, value in vars(self).items():
            if not isinstance(value, Tensor | torch.Generator):
                settings.append((name, value))
        return tuple(settings)


@functools.cache
def _planned_class(kind: type[Quantizer]) -> type[Quantizer]:
    return type(kind.__name__, (_PlannedQuantizer, kind), {})


def _planned(quantizer: Quantizer) -> Quantizer:
    # One dictionary for both: what the engine sets on its quantizer, this one has too.
    # The quantizer's own class is the second base, so that what asks for its type finds it.
    planned = object.__new__(_planned_class(type(quantizer)))
    planned.__dict__ = quantizer.__dict__
    return planned


class _PlannedModule(TransformerEngineBaseModule):
    """The FP8 side of a module, on meta."""

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Make the state and the quantizers of one direction on meta; the plan counts the state by itself."""
        with counted_as(None), torch.device("meta"):
            super().set_meta_tensor(fwd, recipe)
        direction = "scaling_fwd" if fwd else "scaling_bwd"
        self.quantizers[direction] = list(map(_planned, self.quantizers[direction]))

    def make_parameters(
        self,
        init: Callable[[Tensor], object] | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        """Make the parameters, in FP8 inside `quantized_model_init`."""
        super().make_parameters(init, dtype, device)
        if self.primary_weights_in_fp8:
            # Those values are on the host, which a plan does not count.
            self.preserve_high_precision_init_val = False
            for gemm, name in enumerate(self.weight_names):
                value = self.get_parameter(name).detach()
                self.register_parameter(name, self._quantized_parameter(value, True, gemm))


def _cast(
    quantizer: Quantizer, value: Tensor, *, rowwise: bool, columnwise: bool
) -> QuantizedTensorStorage:
    """Return a matrix in FP8; one that another operation has written in FP8 is taken as it is."""
    if isinstance(value, QuantizedTensorStorage):
        return value
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    return quantizer(as_matrix(value))


def _save(ctx: Context, *values: MaybeQuantized | None) -> None:
    """Save operands for backward. Of a tensor in FP8, a copy that is dropped later is freed; see section 7.9."""
    ctx.forms = []
    tensors: list[Tensor | None] = []
    for value in values:
        if isinstance(value, QuantizedTensorStorage) and not isinstance(value, Tensor):
            parts = value.get_data_tensors()
            # The storage without its tensors: autograd saves these one by one, so that hooks of offload see them.
            ctx.forms.append((value.with_data_tensors((None,) * len(parts)), len(parts)))
            tensors += parts
        else:
            ctx.forms.append((None, 1))
            tensors.append(value)
    ctx.save_for_backward(*tensors)


def _restore(ctx: Context) -> list[Any]:
    """Return the operands that `_save` saved."""
    tensors = list(ctx.saved_tensors)
    operands = []
    for form, count in ctx.forms:
        parts = tensors[:count]
        del tensors[:count]
        operands.append(parts[0] if form is None else form.with_data_tensors(tuple(parts)))
    ctx.forms = None
    return operands


class _Linear(torch.autograd.Function):
    """The product of te.Linear, whose backward holds dy in FP8 until its end."""

    @staticmethod
    def forward(
        ctx: Context, weight: Tensor, inp: Tensor, bias: Tensor | None, call: Call
    ) -> Tensor:
        wgrad = call.grad and weight.requires_grad
        dgrad = call.grad and inp.requires_grad
        parallel = call.parallel
        x: MaybeQuantized = inp
        w: MaybeQuantized | None = weight
        ctx.stored = weight if isinstance(weight, StoredWeight) else None
        if ctx.stored is not None:
            with counted_as(WEIGHT_COPIES):
                w = weight.dequantize()
        if call.fp8 is not None:
            columnwise = wgrad and call.override is None
            columnwise = columnwise and not parallel.rowwise_only(call.fp8.input)
            x = _cast(call.fp8.input, inp, rowwise=True, columnwise=columnwise)
            with counted_as(WEIGHT_COPIES):
                w = fp8_weight(weight, call, call.fp8, dgrad)
        total = _all_rows(parallel, x, None if call.fp8 is None else call.fp8.input)
        # Sequence parallelism: the product has the rows of all ranks.
        rows = inp.shape[:-1].numel() * (parallel.size if parallel.gathers_input else 1)
        shape = inp.shape[:-1] if rows == inp.shape[:-1].numel() else (rows,)
        out = torch.empty(*shape, len(weight), dtype=call.dtype, device=weight.device)
        # A multiplication and an addition per term; torch.empty is no operation that PyTorch's counter knows.
        count_flops(out, 2.0 * out.numel() * weight.shape[1])
        del total
        out = parallel.reduce_output(out)
        ctx.call = call
        ctx.shape = inp.shape
        ctx.sizes = weight.shape
        ctx.bias = bias is not None
        if call.fp8 is not None and call.override == "high_precision":
            x = inp
            w = weight
        elif call.fp8 is not None and call.override is None and call.module._is_fsdp2:
            w = weight  # FSDP2 gathers it again in backward, which quantizes it again
        if wgrad and x is not inp and isinstance(x, QuantizedTensorStorage):
            keeps_rowwise = call.override is not None or (
                call.fp8 is not None and parallel.rowwise_only(call.fp8.input)
            )
            x.update_usage(rowwise_usage=keeps_rowwise, columnwise_usage=not keeps_rowwise)
        if ctx.stored is not None:
            w = None  # backward makes it again
        _save(ctx, x if wgrad else None, w if dgrad else None)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        call: Call = ctx.call
        x, w = _restore(ctx)
        if ctx.stored is not None:
            with counted_as(WEIGHT_COPIES):
                w = ctx.stored.dequantize()
        wgrad, dgrad = ctx.needs_input_grad[:2]
        dx = dw = db = None
        fp8 = call.fp8 if call.override is None else None
        held: MaybeQuantized | None = None  # dy in FP8
        if fp8 is not None:
            # Until the end of backward, to whose peak it belongs.
            held = _cast(fp8.grad_output, grad, rowwise=True, columnwise=ctx.bias or wgrad)
            if call.parallel.gathers_gradient:
                held = _all_rows(call.parallel, held, fp8.grad_output, gradient=True)
        elif call.parallel.gathers_gradient:
            held = _all_rows(call.parallel, grad, None, gradient=True)
        if call.fp8 is not None and fp8 is None:
            x = None if x is None else _high_precision(x, call.dtype)
            w = None if w is None else _high_precision(w, call.dtype)
        if dgrad:
            # Alive while dx is allocated, as in Transformer Engine, which decides the highest sum of bytes.
            turned = None if fp8 is None else _turned(w, fp8.weight)
            shape = list(ctx.shape)
            shape[0] *= call.parallel.size if call.parallel.gathers_input else 1
            dx = torch.empty(shape, dtype=call.dtype, device=grad.device)
            dx = call.parallel.reduce_input_gradient(dx)
            if isinstance(w, QuantizedTensor):  # a copy that FP8 weights have in backward only
                del turned
        if wgrad:
            total = _all_rows(call.parallel, x, None if fp8 is None else fp8.input, columnwise=True)
            with counted_as(GRADIENTS):
                dw = torch.empty(ctx.sizes, dtype=call.dtype, device=grad.device)
            del total
        if ctx.bias and (wgrad or fp8 is not None):
            with counted_as(GRADIENTS):
                db = torch.empty(ctx.sizes[0], dtype=call.dtype, device=grad.device)
        del held
        return dw, dx, db, None


def _all_rows(
    parallel: Parallelism,
    value: MaybeQuantized,
    quantizer: Quantizer | None,
    columnwise: bool = False,
    gradient: bool = False,
) -> Any:
    """Return the rows of all ranks of an input or a gradient, which sequence parallelism gathers for a product."""
    if gradient:
        return parallel.gather_gradient(value, quantizer)
    if not parallel.gathers_input:
        return None
    return parallel.gather_input(value, quantizer, columnwise)


def _turned(w: MaybeQuantized, quantizer: Quantizer) -> MaybeQuantized:
    """Return the columnwise copy of a weight, which is made where the forward saved none."""
    if not isinstance(w, QuantizedTensorStorage):  # FSDP2 has gathered it again
        return _cast(quantizer, w, rowwise=True, columnwise=True)
    if w.get_usages()["columnwise"]:
        return w
    return torch.empty(w._shape, dtype=torch.uint8, device="meta")


def _high_precision(value: MaybeQuantized, dtype: torch.dtype) -> Tensor:
    """Return a saved operand in high precision, which `backward_override` multiplies."""
    if not isinstance(value, QuantizedTensorStorage):
        return value
    return torch.empty(value._shape, dtype=dtype, device="meta")


class Linear(_PlannedModule, emulated.Linear):
    """te.Linear on meta."""

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor:
        """Return `[..., out_features]` of `[..., in_features]`."""
        self.prepare_forward(inp)
        bias: Tensor | None = self.bias if self.use_bias else None
        tracked = torch.is_grad_enabled()
        try:
            (call,) = new_calls(self, self.parallelism, is_first_microbatch, tracked)
            return _Linear.apply(self.weight, inp, bias, call)
        finally:
            self.end_forward()


class StoredLinear(Linear):
    """native_linear.StoredLinear on meta."""


class _Norm(torch.autograd.Function):
    """A norm of te: saves its input and `numbers` FP32 numbers per row."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, numbers: int) -> Tensor:
        rows = x.numel() // weight.numel()
        statistics = torch.empty(numbers, rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, statistics)
        return torch.empty(x.shape, dtype=weight.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, _ = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with counted_as(GRADIENTS):
            dw = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class RMSNorm(emulated.RMSNorm):
    """te.RMSNorm on meta, which saves 1 / RMS."""

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize a tensor whose trailing dimensions are the weight's."""
        width = self.weight.shape
        x = input_.reshape(-1, *width).contiguous()
        return _Norm.apply(x, self.weight, 1).view(input_.shape)


class LayerNormWithoutBias(emulated.LayerNormWithoutBias):
    """native_norm.LayerNormWithoutBias on meta, which saves mean and 1 / standard deviation."""

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize a tensor whose trailing dimensions are the weight's."""
        x = input_.reshape(-1, *self.weight.shape).contiguous()
        return _Norm.apply(x, self.weight, 2).view(input_.shape)


class GroupedLinear(_PlannedModule, emulated.GroupedLinear):
    """te.GroupedLinear on meta, which never needs the numbers of rows: its experts share them evenly."""

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """Return the experts' rows [R, out_features] of `inp` [R, in_features]."""
        self.prepare_forward(inp)
        biases = self.biases
        tracked = torch.is_grad_enabled()
        try:
            call = new_calls(self, Parallelism(), is_first_microbatch, tracked)[0]
            return _Grouped.apply(inp, self, call, *self.weights, *biases)
        finally:
            self.end_forward()


class StoredGroupedLinear(GroupedLinear):
    """native_experts.StoredGroupedLinear on meta."""

    def forward(  # type: ignore[bad-override]  # fewer options
        self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Return the experts' rows [R, out_features] of `inp` [R, in_features]."""
        return stored_experts(self, inp, len(inp), None)


def stored_experts(
    module: StoredGroupedLinear, x: Tensor, rows: int, route: Route | None
) -> Tensor:
    """Return the `rows` of experts whose weights stay as they are stored, [R, out_features]."""
    return _StoredExperts.apply(x, module, rows, route)


class _StoredExperts(torch.autograd.Function):
    """stored_experts_triton._BF16 and _FP8: some experts' values at a time, and FP8 of these."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, module: StoredGroupedLinear, rows: int, route: Route | None
    ) -> Tensor:
        fp8 = FP8GlobalStateManager.is_fp8_enabled()
        quantized_input = _bytes(rows * module.in_features) if fp8 else None
        out = torch.empty(rows, module.out_features, dtype=x.dtype, device=x.device)
        _some_values(module, x.dtype, fp8)
        ctx.module = module
        ctx.fp8 = fp8
        ctx.rows = rows
        ctx.route = route
        del quantized_input
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        module: StoredGroupedLinear = ctx.module
        data = _bytes(dy.numel()) if ctx.fp8 else None
        dx = torch.empty(ctx.rows, module.in_features, dtype=dy.dtype, device=dy.device)
        _some_values(module, dy.dtype, ctx.fp8)
        if ctx.route is not None:
            dx = ctx.route.kernels.total(dx, ctx.route.row, None)
        del data
        return dx, None, None, None


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _some_values(module: StoredGroupedLinear, dtype: torch.dtype, fp8: bool) -> None:
    """Allocate what there is of dequantized experts at one time, and free it."""
    sizes = (module.out_features, module.in_features)
    # All experts at once would be as large as the dequantized layer, which storing them so is to avoid.
    some = experts_at_a_time(module.num_gemms, *sizes, dtype.itemsize)
    with counted_as(WEIGHT_COPIES):
        values = torch.empty(some, *sizes, dtype=dtype, device="meta")
        cast = _bytes(values.numel()) if fp8 else None
    del values, cast


class _Grouped(torch.autograd.Function):
    """The products of all experts, each cast by itself."""

    @staticmethod
    def forward(
        ctx: Context, inp: Tensor, module: GroupedLinear, call: Call, *parameters: Tensor
    ) -> Tensor:
        experts = module.num_gemms
        wgrad = call.grad and parameters[0].requires_grad
        dgrad = call.grad and inp.requires_grad
        sizes = (module.out_features, module.in_features)
        saved: list[Tensor | None] = [inp if wgrad else None]
        if call.fp8 is not None and call.override != "high_precision":
            straight, turned = _copies(call.fp8.input, inp.shape, experts)
            columnwise = wgrad and call.override is None
            saved = [turned if columnwise else straight if wgrad else None]
            saved += _expert_weights(module, call, sizes, dgrad)
        out = torch.empty(len(inp), sizes[0], dtype=call.dtype, device=inp.device)
        count_flops(out, 2.0 * out.numel() * sizes[1])
        ctx.module = module
        ctx.call = call
        ctx.save_for_backward(*saved)
        ctx.shape = inp.shape
        ctx.biases = len(parameters) - experts
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        call: Call = ctx.call
        module: GroupedLinear = ctx.module
        held: list[Any] = [*ctx.saved_tensors]
        sizes = (module.out_features, module.in_features)
        if call.fp8 is not None and call.override is None:
            held += _copies(call.fp8.grad_output, dy.shape, module.num_gemms)
            if module._is_fsdp2 and not isinstance(module.weights[0], QuantizedTensor):
                shape = (module.num_gemms * sizes[0], sizes[1])
                held += _copies(call.fp8.weight, shape, module.num_gemms)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(ctx.shape, dtype=call.dtype, device=dy.device)
        return dx, None, None, *expert_gradients(ctx, module, call.dtype)


def _expert_weights(
    module: GroupedLinear, call: Call, sizes: tuple[int, int], dgrad: bool
) -> list[Tensor | None]:
    """Return the FP8 copies of the experts' weights that backward needs: both, unless they are FP8 or gathered."""
    quantized = isinstance(module.weights[0], QuantizedTensor)
    if quantized or module._is_fsdp2 or not dgrad or call.fp8 is None:
        return []
    shape = (module.num_gemms * sizes[0], sizes[1])
    with counted_as(WEIGHT_COPIES):
        copies = _copies(call.fp8.weight, shape, module.num_gemms)
    if call.first_microbatch is not None:
        module._fp8_workspaces["experts"] = copies  # type: ignore[assignment]
    return [*copies] if call.override is None else [copies[0]]


def expert_gradients(
    ctx: Context, module: GroupedLinear, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return the gradients of the experts' weights, in one buffer, and of their biases."""
    if not module.weights[0].requires_grad:
        return [None] * (module.num_gemms + ctx.biases)
    with counted_as(EXPERT_GRADIENTS):
        # One buffer, as the kernels of native_experts.py write it: unbind makes views.
        shape = (module.num_gemms, module.out_features, module.in_features)
        weights = torch.empty(shape, dtype=dtype, device="meta").unbind()
        # One small tensor per expert, where the weights share a buffer.
        biases = [torch.empty(shape[1], dtype=dtype, device="meta") for _ in range(ctx.biases)]
    return [*weights, *biases]


def _copies(quantizer: Quantizer, shape: tuple[int, ...], experts: int) -> tuple[Tensor, Tensor]:
    """Return memory for both copies of a matrix whose rows `experts` quantizers cast."""
    row_quantizer = quantizer.copy()
    row_quantizer.internal = True
    row_quantizer.set_usage(rowwise=True, columnwise=True)
    # One expert's rows, as its own quantizer pads them.
    rows = -(-shape[0] // experts // row_quantizer._multiple) * row_quantizer._multiple
    with counted_as(None):
        rows_copy = row_quantizer(torch.empty(rows, shape[1], dtype=torch.bfloat16, device="meta"))
    copies = []
    for names in rows_copy._copies:
        parts = [getattr(rows_copy, name) for name in names]
        size = sum(part.nbytes for part in parts if part is not None) * experts
        copies.append(torch.empty(size, dtype=torch.uint8, device="meta"))
    return copies[0], copies[1]
