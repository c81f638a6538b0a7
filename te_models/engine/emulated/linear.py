"""te.Linear: quantize the operands, multiply, round once.

The forward saves for the backward what Transformer Engine saves (section 7.9 of docs/internals/transformer_engine.md):
the columnwise FP8 copy of the input and both FP8 copies of the weight, or the high-precision input and weight without
FP8.
"""

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_models.device.autograd import Context, no_autocast
from te_models.device.cpu_matmul import PACKED_ROWS, matmul, packed_matmul
from te_models.engine.emulated import few_rows
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.delayed_scaling import ScaleRegistry
from te_models.engine.emulated.gemm import gemm
from te_models.engine.emulated.module import SLOTS, TransformerEngineBaseModule
from te_models.engine.emulated.parallel import MODES, Parallelism
from te_models.engine.emulated.recipe import Recipe, refuse_options
from te_models.engine.emulated.short_rows import are_short, full_rows, multiply
from te_models.engine.torch_linear import TorchLinear, padded_product
from te_models.errors import require
from te_models.numerics.quantizers import Float8Quantizer, Quantizer
from te_models.numerics.stored import StoredWeight, values_of
from te_models.numerics.tensors import (
    MaybeQuantized,
    QuantizedTensor,
    QuantizedTensorStorage,
    as_matrix,
    pad_to,
)


class Quantizers(NamedTuple):
    """The quantizers of one GEMM in FP8, of its gradients, and of results that are to be quantized."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    output: Quantizer | None = None
    grad_input: Quantizer | None = None


@dataclass
class Call:
    """The arguments of one forward pass, beside the differentiable tensors."""

    module: TransformerEngineBaseModule
    parallel: Parallelism
    dtype: torch.dtype
    grad: bool
    first_microbatch: bool | None
    override: str | None
    weight_name: str = "weight"
    fp8: Quantizers | None = None
    updates: ScaleRegistry | None = None  # whose backward scales this module's backward updates
    # Split accumulation in fprop, dgrad, wgrad.
    splits: tuple[bool, bool, bool] = (False, True, True)
    context: contextvars.Context | None = None  # of the forward, in which an FP8 backward runs
    # The cast of a stored weight, which backward repeats: its scale is the one of the forward pass.
    weight_cast: Quantizer | None = None


class _Linear(torch.autograd.Function):
    """`y = x W^T + b` with quantized operands."""

    @staticmethod
    def forward(
        ctx: Context, weight: Tensor, inp: Tensor, bias: Tensor | None, call: Call
    ) -> Tensor:
        """Return `[..., O]` in the activation dtype, from inp `[..., I]` and weight `[O, I]`."""
        wgrad = call.grad and weight.requires_grad
        dgrad = call.grad and inp.requires_grad
        out, x, w = product(weight, inp, bias, call, wgrad, dgrad)
        ctx.call = call
        ctx.shape = inp.shape
        ctx.bias = bias is not None
        save(ctx, inp, x, weight, w, wgrad, dgrad)
        return _result(out, weight, inp, call)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of weight, input and bias."""
        (grad,) = grads
        once = "te.Linear allows one backward: run the forward again instead of using retain_graph"
        require(ctx.call is not None, once, RuntimeError)
        call = ctx.call
        # Drops the reference to quantizers and weights, and marks that this backward has run.
        ctx.call = None
        # exact_gemm and fused also apply to the backward of a forward inside them, in whatever thread it runs.
        if call.context is None:
            return _backward(ctx, call, grad)
        return call.context.run(_backward, ctx, call, grad)


def product(
    weight: Tensor, inp: Tensor, bias: Tensor | None, call: Call, wgrad: bool, dgrad: bool
) -> tuple[Tensor, MaybeQuantized, MaybeQuantized]:
    """Return this rank's product [T, O], and the input and the weight as they were multiplied."""
    parallel = call.parallel
    with no_autocast(inp):
        if call.fp8 is not None:
            bias = _fp8_bias(bias, call.dtype)
            short = are_short()
            # A row or two of a generation step: quantized and multiplied in NumPy, without the cost of tensor
            # operations.
            scale = few_rows.scale(inp, call.fp8.input) if short else None
            if scale is not None:
                w = fp8_weight(weight, call, call.fp8, dgrad)
                out = few_rows.product(
                    inp, scale, call.fp8.input, w, bias, call.dtype, call.splits[0]
                )
                return out, inp, w
            x, w = _fp8_operands(inp, weight, call, call.fp8, wgrad, dgrad)
            total = parallel.gather_input(x, call.fp8.input)
            # Without the rows that `_fp8_operands` adds.
            rows = inp.shape[:-1].numel() if short else None
            return gemm(total, w, (False, False), bias, call.dtype, call.splits[0], rows), x, w
        x = _high_precision(inp, call.dtype)
        w = _high_precision(weight, call.dtype)
        x = as_matrix(x)  # [T, I]
        total = parallel.gather_input(x)  # the rows of all ranks under sequence parallelism
        # Few rows are bound by reading the weight; oneDNN reads it faster in its own layout.
        if w is weight and bias is None and not call.grad and total.shape[0] <= PACKED_ROWS:
            kept = call.module.packed_weight(call.weight_name, w, call.first_microbatch)
            if kept is not None:
                return packed_matmul(total, kept), x, w
        return multiply(total, w.t(), None if bias is None else bias.to(call.dtype)), x, w


def _fp8_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias as a GEMM in FP8 with results in `dtype` adds it."""
    # Transformer Engine rounds the bias to the dtype of the activations, but to BF16 where they are FP32.
    return None if bias is None else bias.to(torch.bfloat16 if dtype == torch.float32 else dtype)


def _result(out: Tensor, weight: Tensor, inp: Tensor, call: Call) -> Tensor:
    """Return the layer's output, of the shape that follows from the input's."""
    out = call.parallel.reduce_output(out)
    if inp.ndim != 2:
        out = out.view(-1, *inp.shape[1:-1], weight.shape[0])
    return out if call.fp8 is None or call.fp8.output is None else call.fp8.output(out)


def _backward(ctx: Context, call: Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    dw, dx, db = gradients(ctx, call, grad)
    if dx is not None:
        if len(ctx.shape) != 2:
            dx = dx.view(ctx.shape)
        # fp8_grad=True: the module below takes its gradient in FP8.
        if call.fp8 is not None and call.fp8.grad_input is not None:
            dx = call.fp8.grad_input(dx)
    if call.updates is not None:
        FP8GlobalStateManager.update_backward(call.updates)
    return dw, dx, db, None


def gradients(ctx: Context, call: Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of weight, input [T, I] and bias from the output's, as `ctx` asks for them."""
    with no_autocast(grad):
        if call.fp8 is not None and call.override is None:
            return _fp8_backward(ctx, call, call.fp8, grad)
        return _plain_backward(ctx, call, grad)


def _high_precision(value: MaybeQuantized, dtype: torch.dtype) -> Tensor:
    value = values_of(value)
    if isinstance(value, QuantizedTensorStorage):
        return value.dequantize(dtype=dtype)
    return value if value.dtype == dtype else value.to(dtype)


def _fp8_operands(
    inp: Tensor, weight: Tensor, call: Call, how: Quantizers, wgrad: bool, dgrad: bool
) -> tuple[QuantizedTensorStorage, QuantizedTensorStorage]:
    """Quantize the input, then the weight."""
    if isinstance(inp, QuantizedTensorStorage):
        # Quantized by the module before, which wrote the copies that this product needs.
        inp.update_usage(rowwise_usage=True)
        return inp, fp8_weight(weight, call, how, dgrad)
    # Only a weight gradient reads the columnwise copy. Under sequence parallelism block scaling makes it from the
    # gathered rows.
    columnwise = wgrad and call.override is None and not call.parallel.rowwise_only(how.input)
    how.input.set_usage(rowwise=True, columnwise=columnwise)
    x = as_matrix(inp)
    if are_short() and not how.input.is_quantizable(x):
        x = pad_to(x, how.input._multiple, 1)
    return how.input(x), fp8_weight(weight, call, how, dgrad)


def fp8_weight(weight: Tensor, call: Call, how: Quantizers, dgrad: bool) -> QuantizedTensorStorage:
    """Return the weight in FP8, with the copy for an input gradient if one follows.

    Of a stored weight nothing is cached, and backward casts it again: its values are no longer there by then.
    """
    if isinstance(weight, StoredWeight):
        how.weight.set_usage(rowwise=True, columnwise=False)
        if dgrad:
            call.weight_cast = repeated_cast(how.weight)
        return how.weight(weight.dequantize())
    state = FP8GlobalStateManager.quantization_state
    # The first pass of a checkpoint runs without grad, but its cached weight serves the recompute too.
    columnwise = (dgrad and call.override is None) or (
        state.recompute_frame is not None and not state.recompute_phase
    )
    return call.module.quantized_weight(
        call.weight_name, weight, how.weight, call.first_microbatch, call.grad, columnwise
    )


def repeated_cast(quantizer: Quantizer) -> Quantizer:
    """Return a quantizer that makes the same cast again: with the scale of now, and nobody who counts it."""
    again = quantizer.copy()
    again.observer = None
    if isinstance(again, Float8Quantizer):
        again.scale = again.scale.clone()
        again.amax = torch.empty_like(again.amax)
    return again


def again(weight: StoredWeight, call: Call) -> QuantizedTensorStorage:
    """Return a stored weight in FP8 as the forward pass had it, with the copy for an input gradient."""
    assert call.weight_cast is not None
    call.weight_cast.set_usage(rowwise=True, columnwise=True)
    return call.weight_cast(weight.dequantize())


def save(
    ctx: Context,
    inp: Tensor,
    x: MaybeQuantized,
    weight: Tensor,
    w: MaybeQuantized,
    wgrad: bool,
    dgrad: bool,
) -> None:
    """Save the operands for backward: FP8 data and scales where they are quantized."""
    call: Call = ctx.call
    if call.fp8 is not None and call.override == "high_precision":
        x = inp
        w = weight
    elif call.fp8 is not None and call.override is None and call.module._is_fsdp2:
        w = weight  # FSDP2 gathers it again in backward, which quantizes it again
    if isinstance(weight, StoredWeight):
        w = weight  # its values are made again in backward
    # The caller may still need a copy of an input that it quantized; of our own one backward reads one copy only.
    if wgrad and x is not inp and isinstance(x, QuantizedTensorStorage):
        rowwise = call.override is not None or call.parallel.rowwise_only(
            None if call.fp8 is None else call.fp8.input
        )
        x.update_usage(rowwise_usage=rowwise, columnwise_usage=not rowwise)
    ctx.saved = []
    tensors = []
    for value in (x if wgrad else None, w if dgrad else None):
        if isinstance(value, StoredWeight):
            ctx.saved.append((value, 0))  # which never changes
            continue
        quantized = isinstance(value, QuantizedTensorStorage)
        # Autograd saves tensors: the storage is kept empty beside them, so that offload and recompute hooks see the
        # data.
        parts = value.get_data_tensors() if quantized else (value,)
        ctx.saved.append(
            (value.with_data_tensors((None,) * len(parts)) if quantized else None, len(parts))
        )
        tensors += parts
    ctx.save_for_backward(*tensors)


def _restore(ctx: Context) -> list[MaybeQuantized]:
    """Return the input and the weight that `_save` saved."""
    tensors = ctx.saved_tensors
    found = []
    for storage, count in ctx.saved:
        if count == 0:
            found.append(storage)
            continue
        parts = tensors[:count]
        tensors = tensors[count:]
        if storage is not None:
            storage.set_data_tensors(parts)
        found.append(parts[0] if storage is None else storage)
    ctx.saved = None  # must not retain what autograd frees
    return found


def _fp8_backward(
    ctx: Context, call: Call, how: Quantizers, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute both gradient GEMMs in FP8; the bias gradient comes from the unquantized dy."""
    x, w = _restore(ctx)
    parallel = call.parallel
    wgrad, dgrad = ctx.needs_input_grad[:2]
    dx = dw = db = None
    if ctx.bias:
        values = as_matrix(_high_precision(grad, grad.dtype))
        db = values.sum(0, dtype=torch.float32).to(grad.dtype)  # [O]
    # As Transformer Engine does: it leaves the columnwise copy out only where there is neither a bias nor a wgrad.
    how.grad_output.set_usage(rowwise=True, columnwise=ctx.bias or wgrad)
    flat = grad if isinstance(grad, QuantizedTensorStorage) else as_matrix(grad)  # [T, O]
    dy = parallel.gather_gradient(flat, how.grad_output)
    if dgrad:
        if isinstance(w, StoredWeight):
            w = again(w, call)
        elif not isinstance(w, QuantizedTensorStorage):
            how.weight.set_usage(rowwise=True, columnwise=True)
            w = how.weight(w)
        w.update_usage(columnwise_usage=True)
        dx = parallel.reduce_input_gradient(
            gemm(dy, w, (False, True), None, call.dtype, call.splits[1])
        )
    if wgrad:
        x = parallel.gather_input(x, how.input, columnwise=True)
        assert isinstance(x, QuantizedTensorStorage)
        for storage in (x, dy):
            storage.update_usage(columnwise_usage=True)
        dw = gemm(dy, x, (True, True), None, call.dtype, call.splits[2])  # [O, I]
    return dw, dx, db


def _plain_backward(ctx: Context, call: Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients in the activation dtype. A frozen weight's bias gets none (section 7.5)."""
    x, w = _restore(ctx)
    if isinstance(w, StoredWeight) and call.override == "dequantized":
        w = again(w, call)
    parallel = call.parallel
    dy = parallel.gather_gradient(as_matrix(_high_precision(grad, call.dtype)))
    dx = dw = db = None
    if ctx.needs_input_grad[1]:
        dx = parallel.reduce_input_gradient(matmul(dy, _high_precision(w, call.dtype)))  # [T, I]
    if ctx.needs_input_grad[0]:
        # As in Transformer Engine, where the bias gradient is the epilogue of the weight gradient GEMM.
        db = dy.sum(0, dtype=torch.float32).to(call.dtype) if ctx.bias else None
        x = parallel.gather_input(as_matrix(_high_precision(x, call.dtype)))
        dw = matmul(dy.t(), x, dtype=call.dtype)  # [O, I]
    return dw, dx, db


class Linear(TransformerEngineBaseModule):
    """A linear layer that runs in low precision inside an enabled `autocast`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], object] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], object] | None = None,
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
        """Make a layer with Transformer Engine's signature, in which the third positional argument is not the bias.

        `in_features` and `out_features` are the whole layer's; the attributes of these names and the parameters are
        this rank's share (parallel.py). The `ub_*` and `symmetric_ar_type` options, which change only the speed of
        communication, have no effect.

        Raises:
            NotImplementedError: for an option that is not emulated.
        """
        super().__init__(name)
        refuse_options(
            "te.Linear",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            parameters_split=parameters_split,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        require(
            parallel_mode in MODES, f"parallel_mode {parallel_mode} not supported", AssertionError
        )
        self.take_share(
            in_features, out_features, parallel_mode, tp_size, tp_group, sequence_parallel
        )
        self.tp_group = tp_group
        self.tp_group_initialized = tp_group is not None or tp_size == 1
        self.use_bias = bias
        self.return_bias = return_bias
        self.make_parameters(init_method, params_dtype or torch.get_default_dtype(), device)

    @property
    def parallelism(self) -> Parallelism:
        """The way the layer is split, and its communication."""
        return Parallelism(self.parallel_mode, self.tp_size, self.tp_group, self.sequence_parallel)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup) -> None:
        """Set the process group over which the layer is split; call it before the first forward."""
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the layer to `[..., in_features]`.

        `is_first_microbatch` True quantizes the weight and caches the result, False uses the cached one, None quantizes
        and caches nothing. `fp8_output` and `fp8_grad` quantize the output and the input gradient.
        """
        # The state of a generation step is unchanged since the prefill: skip what prepares a pass.
        if is_first_microbatch is False and are_short():
            step = self._step(inp)
            if step is not None:
                return step
        parallel = self.parallelism
        self.prepare_forward(inp)
        bias: Tensor | None = self.bias if self.use_bias else None
        # A row-parallel bias is added once, after the sum over the ranks.
        fused = not self.return_bias and self.parallel_mode != "row"
        try:
            given = inp.shape[-1]
            wanted = self.in_features
            require(
                given == wanted,
                f"GEMM not possible: the input has {given} features, not {wanted}",
                AssertionError,
            )
            weight = self.weight
            added = bias if fused else None
            call = self._call(
                parallel, inp, weight, added, is_first_microbatch, (fp8_output, fp8_grad)
            )
            if call.grad:
                out = _Linear.apply(weight, inp, added, call)
            else:  # without autograd's share, a tenth of a small layer's time
                values, _, _ = product(weight, inp, added, call, False, False)
                out = _result(values, weight, inp, call)
        finally:
            self.end_forward()
        if self.return_bias:
            return out, None if bias is None else bias.to(self.activation_dtype)
        return out if bias is None or fused else out + bias.to(self.activation_dtype)

    def _step(self, inp: Tensor) -> Tensor | None:
        """Return the output of a step of generation whose weight and recipe are the same as in the pass before it.

        To prepare one anew takes longer than a small product. None: something may have changed.
        """
        weight = self._fp8_workspaces.get("weight")
        recipe = self.fp8_meta.get("recipe")
        state = FP8GlobalStateManager.quantization_state
        if weight is None or not weight.is_caching or recipe is None:
            return None
        if not state.fp8_enabled or state.fp8_recipe is not recipe:
            return None
        if (
            self.parallel_mode is not None
            or self.return_bias
            or isinstance(self._parameters["weight"], QuantizedTensor)
        ):
            return None
        if inp.dtype != self.activation_dtype or torch.is_autocast_enabled("cpu"):
            return None
        quantizer = self.quantizers["scaling_fwd"][0]
        scale = few_rows.scale(inp, quantizer)
        if scale is None:
            return None
        bias = _fp8_bias(self.bias if self.use_bias else None, inp.dtype)
        out = few_rows.product(
            inp, scale, quantizer, weight, bias, inp.dtype, recipe.split_accumulators[0]
        )
        return out if inp.ndim == 2 else out.view(*inp.shape[:-1], -1)

    def _call(
        self,
        parallel: Parallelism,
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: bool | None,
        results: tuple[bool, bool],
    ) -> Call:
        """Check and collect the arguments of one pass."""
        tracked = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (inp, weight, bias)
        )
        parallel.check(self.tp_group_initialized, self.fp8_meta["recipe"] if self.fp8 else None)
        if self.fp8:
            parallel.check_quantized_results(*results)
            parallel.configure(self.quantizers["scaling_fwd"][0], self.quantizers["scaling_bwd"][0])
            _check_dims(inp.shape, weight.shape, tracked)
        (call,) = new_calls(self, parallel, first, tracked, results)
        return call

    def extra_repr(self) -> str:
        """Return the sizes and the split."""
        split = ""
        if self.tp_size > 1:
            split = f", parallel_mode={self.parallel_mode!r}, tp_size={self.tp_size}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{split}"


def new_calls(
    module: TransformerEngineBaseModule,
    parallel: Parallelism,
    first: bool | None,
    tracked: bool,
    results: tuple[bool, bool] = (False, False),
) -> list[Call]:
    """Return the arguments of the pass of each GEMM; takes the "first module" flag.

    `tracked`: autograd records the pass. `results`: whether the output and the gradient of the input are quantized.
    """
    dtype = module.activation_dtype
    grad = torch.is_grad_enabled()
    assert dtype is not None
    if not module.fp8:
        return [
            Call(module, parallel, dtype, grad, first, None, name) for name in module.weight_names
        ]
    recipe: Recipe = module.fp8_meta["recipe"]
    override = recipe.backward_override
    # Backward may run in a thread of autograd, which does not see the context variables of this one.
    context = contextvars.copy_context() if tracked else None
    updates = registry_to_update() if tracked and override is None else None
    forward, backward = (module.quantizers[direction] for direction in SLOTS)
    found = []
    for i, name in enumerate(module.weight_names):
        x, weight, y = forward[3 * i : 3 * i + 3]
        dy, dx = backward[2 * i : 2 * i + 2]
        for quantizer in (x, weight, dy):
            # A bare storage is enough within a layer; autograd needs a tensor subclass only for results.
            quantizer.internal = True
        if module.observers is not None:
            x.observer, weight.observer, dy.observer = module.observers[i]
        quantize_output, quantize_gradient = results
        call = Call(
            module,
            parallel,
            dtype,
            grad,
            first_microbatch=first,
            override=override,
            weight_name=name,
            fp8=Quantizers(
                input=x,
                weight=weight,
                grad_output=dy,
                output=y if quantize_output else None,
                grad_input=dx if quantize_gradient else None,
            ),
            updates=updates,
            splits=recipe.split_accumulators,
            context=context,
        )
        found.append(call)
    return found


def _check_dims(inp: torch.Size, weight: torch.Size, grad: bool) -> None:
    """Check the alignment that the FP8 GEMMs of forward and backward need, before any of them runs."""
    # Backward contracts over the rows, for which cuBLAS asks for 16; forward for 8 (section 7.3).
    leading_step = 16 if grad else 8
    for shape, leading in ((inp, full_rows(inp[:-1].numel())), (weight, weight[0])):
        last = shape[-1]
        if leading % leading_step or last % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by "
                f"{leading_step} and the last dimension to be divisible by 16, but got tensor with dims={list(shape)} "
                f"(product of leading dims = {leading}, last dim = {last})"
            )


def registry_to_update() -> ScaleRegistry | None:
    """Return the scales that the first module's backward updates; a recompute leaves the flag as it was."""
    state = FP8GlobalStateManager.quantization_state
    before = state.is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    # In a recompute the flag stays for the module that took it in the first pass.
    if state.recompute_phase:
        state.is_first_fp8_module = before
    return state.scales if first else None


class LinearOfTorch(Linear, TorchLinear):
    """A te.Linear that is a torch.nn.Linear too, and takes sequences [B, S, in] under FP8."""

    def forward(self, inp: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the output [..., out] for inp [..., in]; options as in te.Linear."""
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        return padded_product(super().forward, inp, enabled, *args, **options)
