"""The arguments of one GEMM of te.Linear or te.GroupedLinear: quantizers, dtype, and what its backward updates."""

import contextvars
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.delayed_scaling import ScaleRegistry
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.parallel import Parallelism
from te_models.engine.emulated.quantizer_choice import SLOTS
from te_models.engine.emulated.recipe import Recipe
from te_models.numerics.quantizers import Quantizer


class Quantizers(NamedTuple):
    """The quantizers of one GEMM in FP8, of its gradients, and of results that are to be quantized."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    output: Quantizer | None = None
    grad_input: Quantizer | None = None


@dataclass
class Call:
    """The arguments of one GEMM's forward and backward, beside the differentiable tensors.

    Attributes:
        module: the te.Linear or te.GroupedLinear.
        parallel: the split of its rows or columns over ranks, with the communication.
        dtype: of activations, and so of the results that are not quantized.
        grad: whether autograd was enabled in the forward.
        first_microbatch: is_first_microbatch of te.Linear.
        override: the recipe's backward_override: "high_precision" and "dequantized" run backward without FP8.
        weight_name: of this GEMM's weight in `module`.
        fp8: its quantizers; None: it runs in `dtype`.
        updates: the scales that the backward of this module updates, if it is the first module of its region; else
            None.
        splits: whether fprop, dgrad and wgrad add their FP8 products in several runs, whose sums are added in full
            FP32.
        context: of the forward, in which an FP8 backward runs.
        weight_cast: the cast of a stored weight, which backward repeats with the scale of the forward pass.
    """

    module: TransformerEngineBaseModule
    parallel: Parallelism
    dtype: torch.dtype
    grad: bool
    first_microbatch: bool | None
    override: str | None
    weight_name: str = "weight"
    fp8: Quantizers | None = None
    updates: ScaleRegistry | None = None
    splits: tuple[bool, bool, bool] = (False, True, True)
    context: contextvars.Context | None = None
    weight_cast: Quantizer | None = None


def new_calls(
    module: TransformerEngineBaseModule,
    parallel: Parallelism,
    first_microbatch: bool | None,
    tracked: bool,
    quantize_output: bool = False,
    quantize_grad_input: bool = False,
) -> list[Call]:
    """Return the arguments of the pass of each GEMM.

    The first module that runs in an autocast takes its "first module" flag: the backward of that module runs last, and
    updates the scales of all gradients.

    Args:
        module: the te.Linear or te.GroupedLinear.
        parallel: how its GEMMs are divided over ranks.
        first_microbatch: is_first_microbatch of te.Linear.
        tracked: whether autograd records the pass.
        quantize_output: whether the next module takes FP8.
        quantize_grad_input: whether the module before takes its gradient in FP8.
    """
    if not module.fp8:
        return _calls_without_fp8(module, parallel, first_microbatch)
    dtype = module.activation_dtype
    assert dtype is not None
    recipe: Recipe = module.fp8_meta["recipe"]
    override = recipe.backward_override
    # Backward may run in a thread of autograd, which does not see the context variables of this one.
    context = contextvars.copy_context() if tracked else None
    updates = registry_to_update() if tracked and override is None else None
    # GEMM by GEMM, in the order of SLOTS: three quantizers forward, two backward.
    forward, backward = (module.quantizers[direction] for direction in SLOTS)
    calls = []
    for i, name in enumerate(module.weight_names):
        x, weight, y = forward[3 * i : 3 * i + 3]
        dy, dx = backward[2 * i : 2 * i + 2]
        _prepare_quantizers(module, i, x, weight, dy)
        call = Call(
            module=module,
            parallel=parallel,
            dtype=dtype,
            grad=torch.is_grad_enabled(),
            first_microbatch=first_microbatch,
            override=override,
            weight_name=name,
            fp8=Quantizers(
                input=x,
                weight=weight,
                grad_output=dy,
                output=y if quantize_output else None,
                grad_input=dx if quantize_grad_input else None,
            ),
            updates=updates,
            splits=recipe.split_accumulators,
            context=context,
        )
        calls.append(call)
    return calls


def _prepare_quantizers(
    module: TransformerEngineBaseModule, gemm: int, x: Quantizer, weight: Quantizer, dy: Quantizer
) -> None:
    """Have the quantizers of a GEMM return what its pass needs, and tell the observers of a recorded run."""
    for quantizer in (x, weight, dy):
        # A bare storage is enough within a layer; autograd needs a tensor subclass only for results.
        quantizer.internal = True
    if module.observers is not None:
        x.observer, weight.observer, dy.observer = module.observers[gemm]


def _calls_without_fp8(
    module: TransformerEngineBaseModule, parallel: Parallelism, first_microbatch: bool | None
) -> list[Call]:
    """Return the arguments of the pass of each GEMM in the module's own dtype."""
    dtype = module.activation_dtype
    assert dtype is not None
    calls = []
    for name in module.weight_names:
        call = Call(
            module=module,
            parallel=parallel,
            dtype=dtype,
            grad=torch.is_grad_enabled(),
            first_microbatch=first_microbatch,
            override=None,
            weight_name=name,
        )
        calls.append(call)
    return calls


def registry_to_update() -> ScaleRegistry | None:
    """Return the scales that the first module's backward updates; a recompute leaves the flag as it was."""
    state = FP8GlobalStateManager.quantization_state
    before = state.is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    # In a recompute the flag stays for the module that took it in the first pass.
    if state.recompute_phase:
        state.is_first_fp8_module = before
    return state.scales if first else None
