"""The products of te.Linear: y = x W^T in the forward pass, dx = dy W and dW = dy^T x in the backward pass.

The forward saves for the backward what Transformer Engine saves (section 7.9 of docs/internals/transformer_engine.md):
the columnwise FP8 copy of the input and both FP8 copies of the weight, or the high-precision input and weight without
FP8.

In shapes: T rows (the product of all leading dimensions), I input features, O output features.
"""

import torch
from torch import Tensor

from te_models.device.autograd import Context, no_autocast
from te_models.device.cpu_matmul import PACKED_ROWS, matmul, packed_matmul
from te_models.engine.emulated import few_rows
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.gemm import gemm
from te_models.engine.emulated.linear_call import Call, Quantizers
from te_models.engine.emulated.short_rows import are_short, multiply
from te_models.numerics.matrices import as_matrix, pad_to
from te_models.numerics.quantizers import Float8Quantizer, Quantizer
from te_models.numerics.stored import StoredWeight, values_of
from te_models.numerics.tensors import MaybeQuantized, QuantizedTensorStorage


def product(
    weight: Tensor, inp: Tensor, bias: Tensor | None, call: Call, wgrad: bool, dgrad: bool
) -> tuple[Tensor, MaybeQuantized, MaybeQuantized]:
    """Return x W^T + b of this rank's weight [O, I] and input [..., I], and both operands as they were multiplied.

    The product is [T, O]; under sequence parallelism it has the rows of all ranks. `wgrad` and `dgrad` say which
    gradients will follow, and so which FP8 copies the operands need.
    """
    parallel = call.parallel
    # A caller's torch.autocast must not cast the operands of a product that is FP32 on purpose.
    with no_autocast(inp):
        if call.fp8 is not None:
            bias = fp8_bias(bias, call.dtype)
            short = are_short()
            # A row or two of a generation step: quantized and multiplied in NumPy, without the cost of tensor
            # operations.
            scale = few_rows.scale(inp, call.fp8.input) if short else None
            if scale is not None:
                w = fp8_weight(weight, call, call.fp8, dgrad)
                out = few_rows.product(
                    inp,
                    scale,
                    quantizer=call.fp8.input,
                    weight=w,
                    bias=bias,
                    dtype=call.dtype,
                    split_accumulator=call.splits[0],
                )
                return out, inp, w
            x, w = _fp8_operands(inp, weight, call, call.fp8, wgrad, dgrad)
            all_rows = parallel.gather_input(x, call.fp8.input)  # [T, I]
            # Without the rows that `_fp8_operands` adds.
            rows = inp.shape[:-1].numel() if short else None
            out = gemm(
                all_rows,
                w,
                columnwise=(False, False),
                bias=bias,
                dtype=call.dtype,
                split_accumulator=call.splits[0],
                rows=rows,
            )
            return out, x, w
        x = _high_precision(inp, call.dtype)
        w = _high_precision(weight, call.dtype)
        x = as_matrix(x)  # [T, I]
        all_rows = parallel.gather_input(x)  # the rows of all ranks under sequence parallelism
        # Few rows are bound by reading the weight; oneDNN reads it faster in its own layout.
        if w is weight and bias is None and not call.grad and all_rows.shape[0] <= PACKED_ROWS:
            packed = call.module.packed_weight(call.weight_name, w, call.first_microbatch)
            if packed is not None:
                return packed_matmul(all_rows, packed), x, w
        return multiply(all_rows, w.t(), None if bias is None else bias.to(call.dtype)), x, w


def fp8_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias as a GEMM in FP8 with results in `dtype` adds it."""
    # Transformer Engine rounds the bias to the dtype of the activations, but to BF16 where they are FP32.
    return None if bias is None else bias.to(torch.bfloat16 if dtype == torch.float32 else dtype)


def _high_precision(value: MaybeQuantized, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype`, dequantized if it is FP8."""
    value = values_of(value)
    if isinstance(value, QuantizedTensorStorage):
        return value.dequantize(dtype=dtype)
    return value if value.dtype == dtype else value.to(dtype)


def _fp8_operands(
    inp: Tensor, weight: Tensor, call: Call, quantizers: Quantizers, wgrad: bool, dgrad: bool
) -> tuple[QuantizedTensorStorage, QuantizedTensorStorage]:
    """Quantize the input, then the weight."""
    if isinstance(inp, QuantizedTensorStorage):
        # Quantized by the module before, which may have left a columnwise copy alone.
        inp.update_usage(rowwise_usage=True)
        return inp, fp8_weight(weight, call, quantizers, dgrad)
    # Only a weight gradient reads the columnwise copy. Under sequence parallelism block scaling makes it from the
    # gathered rows.
    columnwise = (
        wgrad and call.override is None and not call.parallel.rowwise_only(quantizers.input)
    )
    quantizers.input.set_usage(rowwise=True, columnwise=columnwise)
    x = as_matrix(inp)
    if are_short() and not quantizers.input.is_quantizable(x):
        x = pad_to(x, quantizers.input._multiple, 1)
    return quantizers.input(x), fp8_weight(weight, call, quantizers, dgrad)


def fp8_weight(
    weight: Tensor, call: Call, quantizers: Quantizers, dgrad: bool
) -> QuantizedTensorStorage:
    """Return the weight in FP8, with the copy for an input gradient if one follows.

    Of a stored weight nothing is cached, and backward casts it again: its values are no longer there by then.
    """
    if isinstance(weight, StoredWeight):
        quantizers.weight.set_usage(rowwise=True, columnwise=False)
        if dgrad:
            call.weight_cast = repeated_cast(quantizers.weight)
        return quantizers.weight(weight.dequantize())
    state = FP8GlobalStateManager.quantization_state
    # The first pass of a checkpoint runs without grad, but its cached weight serves the recompute too.
    columnwise = (dgrad and call.override is None) or (
        state.recompute_frame is not None and not state.recompute_phase
    )
    return call.module.quantized_weight(
        call.weight_name, weight, quantizers.weight, call.first_microbatch, call.grad, columnwise
    )


def repeated_cast(quantizer: Quantizer) -> Quantizer:
    """Return a quantizer that makes the same cast again: with the present scale, and without its observer."""
    repeated = quantizer.copy()
    repeated.observer = None
    if isinstance(repeated, Float8Quantizer):
        repeated.scale = repeated.scale.clone()
        repeated.amax = torch.empty_like(repeated.amax)
    return repeated


def cast_again(weight: StoredWeight, call: Call) -> QuantizedTensorStorage:
    """Return a stored weight in FP8 as the forward pass cast it, with the copy for an input gradient."""
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
        if quantized:
            data_tensors = value.get_data_tensors()
            empty_storage = value.with_data_tensors((None,) * len(data_tensors))
        else:
            data_tensors = (value,)
            empty_storage = None
        ctx.saved.append((empty_storage, len(data_tensors)))
        tensors += data_tensors
    ctx.save_for_backward(*tensors)


def _restore(ctx: Context) -> list[MaybeQuantized]:
    """Return the input and the weight that `save` saved."""
    tensors = ctx.saved_tensors
    operands = []
    for storage, count in ctx.saved:
        if count == 0:
            operands.append(storage)
            continue
        parts = tensors[:count]
        tensors = tensors[count:]
        if storage is not None:
            storage.set_data_tensors(parts)
        operands.append(parts[0] if storage is None else storage)
    ctx.saved = None  # must not retain what autograd frees
    return operands


def gradients(ctx: Context, call: Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of weight, input [T, I] and bias from the output's, as `ctx` asks for them."""
    with no_autocast(grad):
        if call.fp8 is not None and call.override is None:
            return _fp8_backward(ctx, call, call.fp8, grad)
        return _plain_backward(ctx, call, grad)


def _fp8_backward(
    ctx: Context, call: Call, quantizers: Quantizers, grad: Tensor
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
    quantizers.grad_output.set_usage(rowwise=True, columnwise=ctx.bias or wgrad)
    flat = grad if isinstance(grad, QuantizedTensorStorage) else as_matrix(grad)  # [T, O]
    dy = parallel.gather_gradient(flat, quantizers.grad_output)
    if dgrad:
        if isinstance(w, StoredWeight):
            w = cast_again(w, call)
        elif not isinstance(w, QuantizedTensorStorage):
            quantizers.weight.set_usage(rowwise=True, columnwise=True)
            w = quantizers.weight(w)
        w.update_usage(columnwise_usage=True)
        dx = parallel.reduce_input_gradient(
            gemm(
                dy,
                w,
                columnwise=(False, True),
                bias=None,
                dtype=call.dtype,
                split_accumulator=call.splits[1],
            )
        )
    if wgrad:
        x = parallel.gather_input(x, quantizers.input, columnwise=True)
        assert isinstance(x, QuantizedTensorStorage)
        for storage in (x, dy):
            storage.update_usage(columnwise_usage=True)
        # [O, I]
        dw = gemm(
            dy,
            x,
            columnwise=(True, True),
            bias=None,
            dtype=call.dtype,
            split_accumulator=call.splits[2],
        )
    return dw, dx, db


def _plain_backward(ctx: Context, call: Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients in the activation dtype. A frozen weight's bias gets none (section 7.5)."""
    x, w = _restore(ctx)
    if isinstance(w, StoredWeight) and call.override == "dequantized":
        w = cast_again(w, call)
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
