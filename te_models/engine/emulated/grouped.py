"""te.GroupedLinear: one linear layer per group of consecutive rows, such as the experts of a mixture.

It is te.Linear expert by expert, with quantizers for each, in one module with one FP8 state: slots 3i, 3i+1 and 3i+2
forward and 2i, 2i+1 backward belong to expert i. An expert without rows records no amax of its input, so delayed
scaling keeps its scale; its weight is quantized like all others, and its gradients are zeros, not None.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from te_models.device.autograd import Context
from te_models.distributed.planned_ranks import world_size
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.linear_call import Call, new_calls
from te_models.engine.emulated.linear_products import fp8_weight, gradients, product, save
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.parallel import MODES, Parallelism
from te_models.engine.emulated.recipe import Recipe, refuse_options
from te_models.engine.emulated.short_rows import full_rows
from te_models.errors import require
from te_models.numerics.matrices import as_matrix
from te_models.numerics.tensors import QuantizedTensorStorage


class _Expert(Context):
    """The state that one expert's forward saves for its backward, in place of autograd's context."""

    def __init__(self, call: Call, bias: bool, wgrad: bool, dgrad: bool) -> None:
        self.call = call
        self.bias = bias
        self.needs_input_grad = (wgrad, dgrad)
        self.saved: list[tuple[object, int]] | None = []


class _Grouped(torch.autograd.Function):
    """`y_i = x_i W_i^T + b_i` for the rows x_i of each expert."""

    @staticmethod
    def forward(
        ctx: Context, inp: Tensor, calls: list[Call], rows: list[int], *parameters: Tensor
    ) -> Tensor:
        """Return [M, O] from inp [..., I], whose M rows are divided by `rows`; weights come before biases."""
        # Autograd tracks positional tensors only, so weights and biases of all experts come one after the other.
        weights = parameters[: len(rows)]
        biases = parameters[len(rows) :] or [None] * len(rows)
        grad = calls[0].grad
        wgrad = grad and weights[0].requires_grad
        dgrad = grad and inp.requires_grad
        outputs = []
        ctx.experts = []
        tensors = []
        for x, weight, bias, call in zip(
            as_matrix(inp).split(rows), weights, biases, calls, strict=True
        ):
            expert = _Expert(call, bias is not None, wgrad, dgrad)
            if len(x):
                out, qx, qw = product(weight, x, bias, call, wgrad, dgrad)
                save(expert, x, qx, weight, qw, wgrad, dgrad)
                outputs.append(out)
                del qx, qw  # before the next expert's, which may be dequantized
            # An idle expert still quantizes its weight: its amax counts, and a cached copy must exist.
            elif call.fp8 is not None:
                fp8_weight(weight, call, call.fp8, dgrad)
            ctx.experts.append((expert, len(expert.saved_tensors)))
            tensors += expert.saved_tensors
            expert.saved_tensors = ()
        ctx.save_for_backward(*tensors)
        ctx.rows = rows
        ctx.shape = inp.shape
        ctx.weight_shape = weights[0].shape
        if outputs:
            return torch.cat(outputs)
        return inp.new_empty(0, len(weights[0]), dtype=calls[0].dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, the weights and the biases."""
        (grad,) = grads
        once = "te.GroupedLinear allows one backward: run the forward again without retain_graph"
        require(ctx.experts is not None, once, RuntimeError)
        experts = ctx.experts
        ctx.experts = None
        call: Call = experts[0][0].call
        if call.context is not None:
            return call.context.run(_backward, ctx, experts, grad)
        return _backward(ctx, experts, grad)


def _backward(
    ctx: Context, experts: list[tuple[_Expert, int]], grad: Tensor
) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    inputs: list[Any] = []
    weights = []
    biases = []
    # dy is [rows, O].
    for (expert, count), dy in zip(experts, as_matrix(grad).split(ctx.rows), strict=True):
        # The slice that `save` of this expert put into the common list.
        expert.saved_tensors = tensors[:count]
        tensors = tensors[count:]
        call = expert.call
        if len(dy):
            dw, dx, db = gradients(expert, call, dy)
        else:
            wgrad, dgrad = expert.needs_input_grad
            dw = grad.new_zeros(ctx.weight_shape, dtype=call.dtype) if wgrad else None
            dx = grad.new_empty(0, ctx.weight_shape[1], dtype=call.dtype) if dgrad else None
            # As for experts with rows: without FP8 the bias gradient comes with the weight gradient (section 7.5).
            summed = expert.bias and (wgrad or (call.fp8 is not None and call.override is None))
            db = grad.new_zeros(ctx.weight_shape[0]) if summed else None
        expert.saved_tensors = ()
        inputs.append(dx)
        weights.append(dw)
        biases.append(db)
    # All experts share the call that took the "first module" flag.
    updates = experts[0][0].call.updates
    if updates is not None:
        FP8GlobalStateManager.update_backward(updates)
    # [..., I]
    dx = torch.cat(inputs).view(ctx.shape) if experts[0][0].needs_input_grad[1] else None
    return dx, None, None, *weights, *(biases if experts[0][0].bias else [])


def _check_division(ranks: int, bias: bool, parallel_mode: str | None, overlaps: bool) -> None:
    """Raise a ValueError in Transformer Engine's words, which programs may look for."""
    require(not overlaps, "GroupedLinear doesn't support Userbuffer overlap.")
    require(
        ranks == 1 or not bias,
        "GroupedLinear doesn't support bias when TP > 1. Because the TP communication is handled outside of this "
        "module.",
    )
    require(
        parallel_mode in MODES,
        f"parallel_mode {parallel_mode!r} not supported. Supported modes: {MODES}",
    )


class GroupedLinear(TransformerEngineBaseModule):
    """A linear layer per group of rows, whose groups run in low precision inside an enabled `autocast`."""

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        """Make a layer with Transformer Engine's signature: `weight{i}` [O, I] and `bias{i}` [O] for each expert.

        Raises:
            NotImplementedError: for an option that is not emulated.
            ValueError: for overlapped communication, and for a bias under tensor parallelism.
        """
        super().__init__(name)
        refuse_options(
            "te.GroupedLinear",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            use_grouped_tensor=use_grouped_tensor,
        )
        ranks = tp_size if tp_group is None else world_size(tp_group)
        _check_division(ranks, bias, parallel_mode, overlaps=ub_overlap_rs or ub_overlap_ag)
        self.num_gemms = num_gemms
        self.weight_names = tuple(f"weight{expert}" for expert in range(num_gemms))
        self.take_share(
            in_features,
            out_features,
            mode=parallel_mode,
            tp_size=tp_size,
            group=tp_group,
            sequence=sequence_parallel,
        )
        self.use_bias = bias
        self.return_bias = return_bias
        self.make_parameters(init_method, params_dtype or torch.get_default_dtype(), device)

    @property
    def biases(self) -> list[nn.Parameter]:
        """The bias [O] of each expert; none without bias."""
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """Apply expert i to the next m_splits[i] rows of `[..., in_features]`.

        Raises:
            ValueError: m_splits or the last dimension do not fit, or an FP8 product needs other sizes.
        """
        refuse_options("te.GroupedLinear", out=out is not None, dgrad_out=dgrad_out is not None)
        quantized = isinstance(inp, QuantizedTensorStorage)
        require(not quantized, "GroupedLinear doesn't support input tensor in FP8.", TypeError)
        rows = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        if len(rows) != self.num_gemms:
            raise ValueError(
                f"Shape of splits tensor ({(len(rows),)}) does not match number of GEMMs ({self.num_gemms})."
            )
        self.prepare_forward(inp)
        biases = [] if self.return_bias else self.biases
        try:
            if inp.shape[-1] != self.in_features:
                raise ValueError(
                    f"Input tensor (shape={tuple(inp.shape)}) is not compatible with weight tensor "
                    f"(shape={(self.out_features, self.in_features)})"
                )
            tracked = torch.is_grad_enabled() and any(
                t.requires_grad for t in (inp, self.weights[0], *biases[:1])
            )
            if self.fp8:
                self._check_fp8(rows, tracked)
            calls = new_calls(self, Parallelism(), is_first_microbatch, tracked)
            result = _Grouped.apply(inp, calls, rows, *self.weights, *biases)
        finally:
            self.end_forward()
        if inp.ndim != 2:
            result = result.view(-1, *inp.shape[1:-1], self.out_features)
        if self.return_bias:
            return (result, [bias.to(self.activation_dtype) for bias in self.biases])
        return result

    def _check_fp8(self, rows: list[int], tracked: bool) -> None:
        """Check what the FP8 products need, before any of them runs.

        Transformer Engine finds out in backward: "Caller must pad.".
        """
        recipe: Recipe = self.fp8_meta["recipe"]
        current = recipe.float8_current_scaling()
        require(
            self.tp_size == 1 or not current,
            "GroupedLinear doesn't support TP > 1 with Float8 current scaling.",
        )
        sizes = self.in_features, self.out_features
        if any(size % 16 for size in sizes):
            raise ValueError(
                f"FP8 execution requires in_features and out_features in 16s, not {sizes[0]} and {sizes[1]}"
            )
        step = 16 if tracked else 8 * recipe.float8_block_scaling()  # 0: any number of rows will do
        wrong = []
        for i, count in enumerate(rows):
            if step and full_rows(count) % step:
                wrong.append(f"{i} has {count}")
        if wrong:
            raise ValueError(
                f"FP8 execution requires m_splits in {step}s: expert {wrong[0]} rows; pad each expert's rows"
            )

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_gemms={self.num_gemms}, {sizes}, bias={self.use_bias}"
