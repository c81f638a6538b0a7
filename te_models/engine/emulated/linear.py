"""te.Linear: quantize the operands, multiply, round once.

What the forward saves for the backward is what Transformer Engine saves: the columnwise FP8 copy of the input and both
FP8 copies of the weight, or the high-precision input and weight without FP8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_models.device.cpu_matmul import matmul
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.gemm import gemm
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.numerics import device_type
from te_models.engine.emulated.parallel import MODES, Parallelism, divide, split_sizes
from te_models.engine.emulated.quantizers import Float8Quantizer
from te_models.engine.emulated.tensors import QuantizedTensor, QuantizedTensorStorage, as_matrix


@dataclass
class _Call:
    """One forward pass: what `_Linear` needs beside the differentiable tensors."""

    module: Linear
    parallel: Parallelism
    dtype: torch.dtype
    fp8: bool
    grad: bool
    first_microbatch: bool | None
    override: str | None
    input_quantizer: Any = None
    weight_quantizer: Any = None
    output_quantizer: Any = None
    grad_output_quantizer: Any = None
    grad_input_quantizer: Any = None
    update_backward: bool = False
    splits: tuple[bool, bool, bool] = (False, True, True)  # split accumulation in fprop, dgrad, wgrad


class _Linear(torch.autograd.Function):
    """`y = x W^T + b` with quantized operands."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        """inp `[..., I]`, weight `[O, I]`; the output is `[..., O]` in the activation dtype."""
        wgrad, dgrad = call.grad and weight.requires_grad, call.grad and inp.requires_grad
        parallel = call.parallel
        with _no_autocast(inp):
            if call.fp8:
                x, w = _fp8_operands(inp, weight, call, wgrad, dgrad)
                if bias is not None:
                    bias = bias.to(torch.bfloat16 if call.dtype == torch.float32 else call.dtype)
                total = parallel.gather_input(x, call.input_quantizer)
                out = gemm(total, w, (False, False), bias, call.dtype, call.splits[0])
            else:
                x, w = _high_precision(inp, call.dtype), _high_precision(weight, call.dtype)
                x = as_matrix(x)
                out = matmul(parallel.gather_input(x), w.t(), None if bias is None else bias.to(call.dtype))
        if call.grad:
            ctx.call, ctx.shape, ctx.bias = call, inp.shape, bias is not None
            _save(ctx, inp, x, weight, w, wgrad, dgrad)
        out = parallel.reduce_output(out)
        out = out if inp.ndim == 2 else out.view(-1, *inp.shape[1:-1], weight.shape[0])
        return out if call.output_quantizer is None else call.output_quantizer(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of weight, input and bias."""
        if ctx.call is None:
            raise RuntimeError("te.Linear allows one backward: run the forward again instead of using retain_graph")
        call, ctx.call = ctx.call, None
        with _no_autocast(grad):
            backward = _fp8_backward if call.fp8 and call.override is None else _plain_backward
            dw, dx, db = backward(ctx, call, grad)
        if dx is not None:
            dx = dx if len(ctx.shape) == 2 else dx.view(ctx.shape)
            dx = dx if call.grad_input_quantizer is None else call.grad_input_quantizer(dx)
        if call.update_backward:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dw, dx, db, None


def _no_autocast(tensor: Tensor) -> Any:
    """torch.autocast off for the device of `tensor`, so that it does not narrow FP32 GEMMs."""
    device = device_type(tensor)
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _splits(recipe: Any) -> tuple[bool, bool, bool]:
    """The recipe's split accumulation; recipes without the setting take Transformer Engine's defaults (section 7.6)."""
    if not hasattr(recipe, "fp8_gemm_fprop"):
        return False, True, True
    settings = recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad
    return tuple(setting.use_split_accumulator for setting in settings)  # type: ignore[return-value]


def _high_precision(value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, QuantizedTensorStorage):
        return value.dequantize(dtype=dtype)
    return value if value.dtype == dtype else value.to(dtype)


def _fp8_operands(inp: Tensor, weight: Tensor, call: _Call, wgrad: bool, dgrad: bool) -> tuple[Any, Any]:
    """Quantized input and weight; the input comes first."""
    x: Any = inp
    if isinstance(inp, QuantizedTensorStorage):
        inp.update_usage(rowwise_usage=True)
    else:
        keep = wgrad and call.override is None and not call.module.save_original_input
        keep = keep and not call.parallel.rowwise_only(call.input_quantizer)
        call.input_quantizer.set_usage(rowwise=True, columnwise=keep)
        x = call.input_quantizer(as_matrix(inp))
    state = FP8GlobalStateManager.quantization_state
    first_pass = state.recompute_frame is not None and not state.recompute_phase
    return x, call.module.quantized_weight(weight, call, (dgrad and call.override is None) or first_pass)


def _save(ctx: Any, inp: Tensor, x: Any, weight: Tensor, w: Any, wgrad: bool, dgrad: bool) -> None:
    """Save what the backward needs: codes and scales where it is quantized."""
    call: _Call = ctx.call
    if call.fp8 and (call.override == "high_precision" or (call.override is None and call.module.save_original_input)):
        x = inp
    requantized = call.override is None and call.module._is_fsdp2  # in backward, from the weight that is gathered again
    if call.fp8 and (call.override == "high_precision" or requantized):
        w = weight
    if wgrad and x is not inp and isinstance(x, QuantizedTensorStorage):
        rowwise = call.override is not None or call.parallel.rowwise_only(call.input_quantizer)
        x.update_usage(rowwise_usage=rowwise, columnwise_usage=not rowwise)
    ctx.saved, tensors = [], []
    for value in (x if wgrad else None, w if dgrad else None):
        quantized = isinstance(value, QuantizedTensorStorage)
        parts = value.get_data_tensors() if quantized else (value,)
        ctx.saved.append((value.with_data_tensors((None,) * len(parts)) if quantized else None, len(parts)))
        tensors += parts
    ctx.save_for_backward(*tensors)


def _restore(ctx: Any) -> list[Any]:
    """The input and the weight that `_save` kept."""
    tensors, found = ctx.saved_tensors, []
    for storage, count in ctx.saved:
        parts, tensors = tensors[:count], tensors[count:]
        if storage is not None:
            storage.set_data_tensors(parts)
        found.append(parts[0] if storage is None else storage)
    ctx.saved = None  # which must not keep what autograd frees
    return found


def _fp8_backward(ctx: Any, call: _Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Both gradient GEMMs in FP8; the bias gradient comes from the unquantized dy."""
    x, w = _restore(ctx)
    parallel = call.parallel
    wgrad, dgrad = ctx.needs_input_grad[:2]
    dx = dw = db = None
    if ctx.bias:
        values = as_matrix(_high_precision(grad, grad.dtype))
        db = values.sum(0, dtype=torch.float32).to(grad.dtype)
    call.grad_output_quantizer.set_usage(rowwise=True, columnwise=ctx.bias or wgrad)
    flat = grad if isinstance(grad, QuantizedTensorStorage) else as_matrix(grad)
    dy: Any = parallel.gather_gradient(flat, call.grad_output_quantizer)
    if dgrad:
        if not isinstance(w, QuantizedTensorStorage):
            call.weight_quantizer.set_usage(rowwise=True, columnwise=True)
            w = call.weight_quantizer(w)
        w.update_usage(columnwise_usage=True)
        dx = parallel.reduce_input_gradient(gemm(dy, w, (False, True), None, call.dtype, call.splits[1]))
    if wgrad:
        if not isinstance(x, QuantizedTensorStorage):
            call.input_quantizer.set_usage(rowwise=True, columnwise=True)
            x = call.input_quantizer(as_matrix(x))
        x = parallel.gather_input(x, call.input_quantizer, columnwise=True)
        for storage in (x, dy):
            storage.update_usage(columnwise_usage=True)
        dw = call.module.weight_gradient(
            call, lambda dtype: gemm(dy, x, (True, True), None, dtype, call.splits[2]), None
        )
    return dw, dx, db


def _plain_backward(ctx: Any, call: _Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients in the activation dtype. The bias gradient belongs to the weight GEMM: no weight gradient, none."""
    x, w = _restore(ctx)
    parallel = call.parallel
    dy = parallel.gather_gradient(as_matrix(_high_precision(grad, call.dtype)))
    dx = dw = db = None
    if ctx.needs_input_grad[1]:
        dx = parallel.reduce_input_gradient(matmul(dy, _high_precision(w, call.dtype)))
    if ctx.needs_input_grad[0]:
        db = dy.sum(0, dtype=torch.float32).to(call.dtype) if ctx.bias else None
        x = _high_precision(x, call.dtype)
        x = parallel.gather_input(as_matrix(x))
        dw = call.module.weight_gradient(call, lambda dtype: matmul(dy.t(), x, dtype=dtype), db)
        db = None if call.module.delay_wgrad_compute else db
    return dw, dx, db


class Linear(TransformerEngineBaseModule):
    """A linear layer that runs in low precision inside an enabled `autocast`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        """Transformer Engine's signature: mind that the third positional argument is not the bias.

        `in_features` and `out_features` are those of the whole layer; the attributes of these names and the parameters
        are this rank's share (parallel.py). `device` None is torch's default device. The `ub_*` and `symmetric_ar_type`
        options, which only concern the speed of communication, have no effect.
        """
        super().__init__(name)
        if parallel_mode not in MODES:
            raise AssertionError(f"parallel_mode {parallel_mode} not supported")
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.tp_group, self.tp_group_initialized = tp_group, tp_group is not None or tp_size == 1
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel and self.tp_size > 1
        self.in_features = divide(in_features, self.tp_size) if parallel_mode == "row" else in_features
        self.out_features = divide(out_features, self.tp_size) if parallel_mode == "column" else out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.init_method = init_method or _normal
        self._delayed_wgrads: deque[Callable[[], tuple[Any, Tensor | None]]] = deque()
        self._wgrad_hooks: list[Callable[[], Any]] = []
        on_meta = device is not None and torch.device(device).type == "meta"
        if on_meta and parameters_split is not None:
            raise AssertionError("Cannot split module parameters on 'meta' device.")
        sizes = split_sizes(parameters_split, out_features, self.tp_size if parallel_mode == "column" else 1)
        self._make_parameters(sizes, device, params_dtype or torch.get_default_dtype())
        if self.primary_weights_in_fp8:
            self.init_fp8_metadata()
        if not on_meta:
            self.reset_parameters()

    @property
    def parallelism(self) -> Parallelism:
        """How the layer is split, and its communication."""
        return Parallelism(self.parallel_mode, self.tp_size, self.tp_group, self.sequence_parallel)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the process group over which the layer is split; to be called before the first forward."""
        self.tp_group, self.tp_group_initialized = tp_group, True

    def _make_parameters(self, sizes: dict[str, int], device: Any, dtype: torch.dtype) -> None:
        """Register the parameters, uninitialised: views of one buffer, the weights before the biases."""
        if self.primary_weights_in_fp8 and len(sizes) > 1:
            raise RuntimeError("Splitting QuantizedTensor into multiple params is not supported")
        self.weight_names = [f"{part}weight" for part in sizes]
        self.bias_names = [f"{part}bias" for part in sizes]
        weight = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        for name, part in zip(self.weight_names, weight.split(list(sizes.values())), strict=True):
            self.register_parameter(name, nn.Parameter(part))
        bias = torch.empty(self.out_features if self.use_bias else 0, device=device, dtype=dtype)
        for name, part in zip(self.bias_names, bias.split(list(sizes.values())) if self.use_bias else [], strict=False):
            self.register_parameter(name, nn.Parameter(part))
        if not self.use_bias:
            for name in self.bias_names:
                setattr(self, name, bias)

    @torch.no_grad()
    def _initial_value(self, name: str, param: Tensor) -> Tensor:
        if param.device.type == "meta":
            param = torch.empty_like(param, device=torch.get_default_device())
        value = param.dequantize() if isinstance(param, QuantizedTensor) else param.detach()
        if name in self.bias_names:
            return value.zero_()
        if self.get_rng_state_tracker is None:
            self.init_method(value)
            return value
        arguments = (self.rng_tracker_name,) if self.rng_tracker_name else ()
        with self.get_rng_state_tracker().fork(*arguments):
            self.init_method(value)
        return value

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise: new Parameter objects, on the default device if they were on meta."""
        if defer_init:
            return
        for name, old in list(self.named_parameters(recurse=False)):
            value = self._initial_value(name, old)
            if self.primary_weights_in_fp8 and name in self.weight_names:
                param = self._quantized_parameter(value)
            else:
                param = nn.Parameter(value, requires_grad=old.requires_grad)
            self.register_parameter(name, param)
        biases = [getattr(self, name) for name in self.bias_names] if self.use_bias else []
        self.parallelism.mark([getattr(self, name) for name in self.weight_names], biases)

    def _quantized_parameter(self, value: Tensor) -> nn.Parameter:
        quantizer = self.quantizers["scaling_fwd"][1]
        quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
        quantizer.internal = False
        with torch.no_grad():
            param = nn.Parameter(quantizer(value))
        if self.preserve_high_precision_init_val:
            kept = param.__dict__
            kept["_high_precision_init_val"] = value.detach().cpu().clone()
            kept["get_high_precision_init_val"] = lambda: kept.get("_high_precision_init_val")
            kept["clear_high_precision_init_val"] = lambda: kept.pop("_high_precision_init_val", None)
        return param

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the layer to `[..., in_features]`.

        `is_first_microbatch` True quantizes the weight and keeps the result, False uses what was kept, None does
        neither. `fp8_output` and `fp8_grad` quantize the output and the input gradient.
        """
        parallel = self.parallelism
        parallel.check(self.tp_group_initialized, None)
        weights = [getattr(self, name) for name in self.weight_names]
        self.prepare_forward(inp, weights)
        # A row-parallel bias is added once, after the sum over the ranks.
        fused = not self.return_bias and self.parallel_mode != "row"
        try:
            weight, bias = weights[0] if len(weights) == 1 else torch.cat(weights), self._bias()
            if inp.shape[-1] != self.in_features:
                raise AssertionError(
                    f"GEMM not possible: the input has {inp.shape[-1]} features, not {self.in_features}"
                )
            call = self._call(parallel, inp, weight, bias if fused else None, is_first_microbatch, fp8_output, fp8_grad)
            out = _Linear.apply(weight, inp, bias if fused else None, call)
        finally:
            self.end_forward()
        if self.return_bias:
            return out, None if bias is None else bias.to(self.activation_dtype)
        return out if bias is None or fused else out + bias.to(self.activation_dtype)

    def _bias(self) -> Tensor | None:
        if not self.use_bias:
            return None
        biases = [getattr(self, name) for name in self.bias_names]
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def _call(
        self,
        parallel: Parallelism,
        inp: Any,
        weight: Tensor,
        bias: Tensor | None,
        first: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> _Call:
        """The arguments of one pass; takes the "first module" flag."""
        grad = torch.is_grad_enabled()
        assert self.activation_dtype is not None
        if not self.fp8:
            return _Call(self, parallel, self.activation_dtype, False, grad, first, None)
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        for quantizer in (forward[0], forward[1], backward[0]):
            quantizer.internal = True
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        parallel.check(True, self.fp8_meta["recipe"])
        parallel.check_quantized_results(fp8_output, fp8_grad)
        parallel.configure(forward[0], backward[0])
        override = recipe.backward_override
        tracked = grad and any(t is not None and t.requires_grad for t in (inp, weight, bias))
        _check_dims(inp.shape, weight.shape, tracked)
        if grad and weight.requires_grad and self.save_original_input and isinstance(forward[0], Float8Quantizer):
            raise ValueError("DelayedScaling recipe is not supported with save_original_input")
        return _Call(
            self, parallel, self.activation_dtype, True, grad, first, override, forward[0], forward[1],
            forward[2] if fp8_output else None, backward[0], backward[1] if fp8_grad else None,
            _takes_backward_update() and override is None if tracked else False, _splits(self.fp8_meta["recipe"]),
        )  # fmt: skip

    def quantized_weight(self, weight: Tensor, call: _Call, columnwise: bool) -> Any:
        """The weight's codes: itself if it is quantized, else made now or taken from the cache."""
        if isinstance(weight, QuantizedTensor):
            weight.update_usage(rowwise_usage=True)  # type: ignore[attr-defined]
            return weight
        call.weight_quantizer.set_usage(rowwise=True, columnwise=columnwise and not self._is_fsdp2)
        if call.first_microbatch is None or self._is_fsdp2:
            return call.weight_quantizer(weight)
        cached = self._fp8_workspaces.get("weight")
        usable = cached is not None and (cached.get_usages()["columnwise"] or not columnwise)
        if call.first_microbatch or not usable:
            cached = self._fp8_workspaces["weight"] = call.weight_quantizer(weight)
        return cached

    def weight_gradient(self, call: _Call, gemm: Callable[[torch.dtype], Tensor], db: Tensor | None) -> Tensor | None:
        """The weight gradient, or None where it goes to `main_grad` or is left to `backward_dw`."""
        if self.delay_wgrad_compute:
            self._delayed_wgrads.append(lambda: (self._compute_wgrad(call, gemm), db))
            return None
        return self._compute_wgrad(call, gemm)

    def _compute_wgrad(self, call: _Call, gemm: Callable[[torch.dtype], Tensor]) -> Tensor | None:
        if not self.fuse_wgrad_accumulation:
            return gemm(call.dtype)
        weight = getattr(self, self.weight_names[0])
        dw = gemm(weight.main_grad.dtype)
        if call.first_microbatch or getattr(weight, "overwrite_main_grad", False):
            weight.main_grad.copy_(dw)
        else:
            weight.main_grad.add_(dw)
        if getattr(weight, "grad_added_to_main_grad", None) is None:
            return None
        # Megatron-LM's flag: tell it that the gradient is in, and give autograd's hooks something to run on.
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has to be called."""
        return self.delay_wgrad_compute

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradient and assign it: it replaces, it does not accumulate."""
        if not self.delay_wgrad_compute:
            return
        if not self._delayed_wgrads:
            raise RuntimeError("Pop empty queue. backward_dw() needs a backward before it, once for each call")
        dw, db = self._delayed_wgrads.popleft()()
        weight = getattr(self, self.weight_names[0])
        if dw is not None:
            weight.grad = dw.to(weight.dtype)
        bias = getattr(self, self.bias_names[0])
        if db is not None and bias.grad is None:
            bias.grad = db.to(bias.dtype)
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call `hook` at the end of each `backward_dw`."""
        self._wgrad_hooks.append(hook)

    def extra_repr(self) -> str:
        """Sizes, and how they are split."""
        split = f", parallel_mode={self.parallel_mode!r}, tp_size={self.tp_size}" if self.tp_size > 1 else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{split}"


def _normal(weight: Tensor) -> Tensor:
    """Transformer Engine's initialisation of weights."""
    return nn.init.normal_(weight, 0.0, 0.023)


def _check_dims(inp: torch.Size, weight: torch.Size, grad: bool) -> None:
    """The alignment that FP8 GEMMs need; the backward's is checked here, before the forward has been paid for."""
    leading_step = 16 if grad else 8
    for shape in (inp, weight):
        leading, last = shape[:-1].numel(), shape[-1]
        if leading % leading_step or last % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by "
                f"{leading_step} and the last dimension to be divisible by 16, but got tensor with dims={list(shape)} "
                f"(product of leading dims = {leading}, last dim = {last})"
            )


def _takes_backward_update() -> bool:
    """Whether this module has to update the backward scales. A recomputation leaves the flag as it was."""
    state = FP8GlobalStateManager.quantization_state
    before = state.is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    if state.recompute_phase:
        state.is_first_fp8_module = before
    return first
