"""te.Linear: quantize the operands, multiply, round once.

The module and its autograd Function; its three products are in linear_products.py, the arguments of a pass in
linear_call.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_models.device.autograd import Context
from te_models.engine.emulated import few_rows
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.linear_call import Call, new_calls
from te_models.engine.emulated.linear_products import fp8_bias, gradients, product, save
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.parallel import MODES, Parallelism
from te_models.engine.emulated.recipe import refuse_options
from te_models.engine.emulated.short_rows import are_short, full_rows
from te_models.engine.torch_linear import TorchLinear, padded_product
from te_models.errors import require
from te_models.numerics.tensors import QuantizedTensor


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
        # A second backward would record the amax of the gradient twice.
        call = ctx.call
        # Drops the reference to quantizers and weights, and marks that this backward has run.
        ctx.call = None
        # exact_gemm and fused also apply to the backward of a forward inside them, in whatever thread it runs.
        if call.context is None:
            return _backward(ctx, call, grad)
        return call.context.run(_backward, ctx, call, grad)


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
            in_features,
            out_features,
            mode=parallel_mode,
            tp_size=tp_size,
            group=tp_group,
            sequence=sequence_parallel,
        )
        self.tp_group = tp_group
        self.tp_group_initialized = tp_group is not None or tp_size == 1
        self.use_bias = bias
        self.return_bias = return_bias
        self.make_parameters(init_method, params_dtype or torch.get_default_dtype(), device)

    def waits_for_memory(self, device: torch.device | str | None) -> bool:
        """Return whether new weights are left on meta: for "meta" they are, but not for torch.device("meta")."""
        # Transformer Engine compares the device with that text, so that it takes the other for a device with memory.
        return super().waits_for_memory(device) and not isinstance(device, torch.device)

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
            # None: not such a step after all, so everything is prepared.
            step = self._step(inp)
            if step is not None:
                return step
        parallel = self.parallelism
        self.prepare_forward(inp)
        bias: Tensor | None = self.bias if self.use_bias else None
        # A row-parallel bias is added once, after the sum over the ranks.
        fused = not self.return_bias and self.parallel_mode != "row"
        try:
            actual = inp.shape[-1]
            features = self.in_features
            require(
                actual == features,
                f"GEMM not possible: the input has {actual} features, not {features}",
                AssertionError,
            )
            weight = self.weight
            added = bias if fused else None
            call = self._call(
                parallel,
                inp,
                weight,
                added,
                is_first_microbatch,
                quantize_output=fp8_output,
                quantize_grad_input=fp8_grad,
            )
            if call.grad:
                out = _Linear.apply(weight, inp, added, call)
            else:  # autograd.Function.apply would take a tenth of a small layer's time
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
        # torch's autocast would change the dtype on the way, which only `prepare_forward` takes into account.
        if inp.dtype != self.activation_dtype or torch.is_autocast_enabled("cpu"):
            return None
        quantizer = self.quantizers["scaling_fwd"][0]
        scale = few_rows.scale(inp, quantizer)
        if scale is None:
            return None
        bias = fp8_bias(self.bias if self.use_bias else None, inp.dtype)
        # [rows, O], by NumPy.
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
        first_microbatch: bool | None,
        quantize_output: bool,
        quantize_grad_input: bool,
    ) -> Call:
        """Check and collect the arguments of one pass."""
        tracked = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (inp, weight, bias)
        )
        parallel.check(self.tp_group_initialized, self.fp8_meta["recipe"] if self.fp8 else None)
        if self.fp8:
            parallel.check_quantized_results(quantize_output, quantize_grad_input)
            # In each pass, since quantizers are made anew whenever the recipe changes.
            parallel.configure(self.quantizers["scaling_fwd"][0], self.quantizers["scaling_bwd"][0])
            _check_dims(inp.shape, weight.shape, tracked)
        (call,) = new_calls(
            self,
            parallel,
            first_microbatch,
            tracked,
            quantize_output=quantize_output,
            quantize_grad_input=quantize_grad_input,
        )
        return call

    def extra_repr(self) -> str:
        """Return the sizes and the split."""
        split = ""
        if self.tp_size > 1:
            split = f", parallel_mode={self.parallel_mode!r}, tp_size={self.tp_size}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{split}"


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


class LinearOfTorch(Linear, TorchLinear):
    """A te.Linear that is a torch.nn.Linear too, and takes sequences [B, S, in] under FP8."""

    def forward(self, inp: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the output [..., out] for inp [..., in]; options as in te.Linear."""
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        return padded_product(super().forward, inp, enabled, *args, **options)
