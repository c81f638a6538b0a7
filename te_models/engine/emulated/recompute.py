"""te.checkpoint: recompute activations in backward, without disturbing the state of delayed scaling.

Both modes of Transformer Engine (section 9 of docs/internals/transformer_engine.md): reentrant, whose first pass runs
without grad and whose backward runs forward and backward; and non-reentrant, whose first pass drops its saved tensors
and recomputes all of them when the first is needed. The recompute runs under the autocasts and the random state of the
first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from te_models.engine.emulated.autocast import FP8GlobalStateManager, autocast
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.rmsnorm import RMSNorm


class _RandomState:
    """The random states of the CPU and of the CUDA device in use."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class _Frame:
    """The context of one checkpointed call, for its recompute. Its identity ties delayed scaling's stash to the
    call."""

    def __init__(self, function: Callable[..., Any], context_fn: Callable[[], Any], reentrant: bool) -> None:
        self.function = function
        self.reentrant = reentrant
        self.forward_context, self.recompute_context = context_fn()
        self.random = _RandomState()
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.recipe = FP8GlobalStateManager.get_fp8_recipe() if self.fp8 else None
        self.amp = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cuda", "cpu")
        ]
        self.cache_enabled = torch.is_autocast_cache_enabled()
        state = FP8GlobalStateManager.quantization_state
        self.first_module, self.scales = state.is_first_fp8_module, state.scales

    @contextmanager
    def _running(self, recompute: bool) -> Iterator[None]:
        state = FP8GlobalStateManager.quantization_state
        before = state.recompute_frame, state.recompute_phase
        state.recompute_frame, state.recompute_phase = self, recompute
        try:
            yield
        finally:
            state.recompute_frame, state.recompute_phase = before

    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.forward_context, self._running(recompute=False):
            return self.function(*args, **kwargs)

    def run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = _RandomState()
        self.random.restore()
        state = FP8GlobalStateManager.quantization_state
        state.is_first_fp8_module = self.first_module
        before, state.scales = state.scales, self.scales  # backward may run in a thread of its own
        with ExitStack() as stack:
            stack.callback(setattr, state, "scales", before)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.recompute_context)
            for device, enabled, dtype in self.amp:
                # Entering a disabled CUDA autocast warns where there is no CUDA.
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, self.cache_enabled))
            stack.enter_context(self._running(recompute=True))
            stack.enter_context(autocast(enabled=self.fp8, recipe=self.recipe))
            out = self.function(*args, **kwargs)
        now.restore()
        return out


class _Reentrant(torch.autograd.Function):
    """Run forward without grad; in backward, run the function with grad and backpropagate through it."""

    @staticmethod
    def forward(ctx: Any, frame: _Frame, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.frame, ctx.kwargs = frame, kwargs
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in args))
        if not any(ctx.needs_input_grad):
            with frame.forward_context:
                return frame.function(*args, **kwargs)
        return frame.run_first(args, kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad(), please use .backward() if possible")
        inputs = [
            other if saved is None else saved.detach().requires_grad_(saved.requires_grad)
            for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        outputs = ctx.frame.run_again(tuple(inputs), ctx.kwargs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if isinstance(o, Tensor) and o.requires_grad]
        if not pairs:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, *(i.grad if isinstance(i, Tensor) else None for i in inputs)


def _non_reentrant(frame: _Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function and save an index per saved tensor; the first use recomputes all of them."""
    saved = 0
    recomputed: list[Tensor | None] = []

    def pack(_: Tensor) -> int:
        nonlocal saved
        saved += 1
        return saved - 1

    def keep(tensor: Tensor) -> Tensor:
        recomputed.append(tensor.detach())
        return tensor.detach()

    def unpack(index: int) -> Tensor:
        if not recomputed:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                frame.run_again(args, kwargs)
        tensor, recomputed[index] = recomputed[index], None
        if tensor is None:
            raise RuntimeError("te.checkpoint(use_reentrant=False) allows one backward: call it again for another one")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return frame.run_first(args, kwargs)


def _has_te_modules(function: Callable[..., Any]) -> bool:
    """Return True if there may be te modules inside; a plain callable may hold any."""
    if not isinstance(function, nn.Module):
        return True
    return any(isinstance(m, (TransformerEngineBaseModule, RMSNorm)) for m in function.modules())


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)` now and recompute its activations in the backward pass.

    Open te.autocast outside. Under DelayedScaling every checkpointed forward needs its backward, in the same order.
    `use_reentrant=True` needs a positional tensor that requires grad.
    """
    if distribute_saved_activations or tp_group is not None or get_rng_state_tracker is not None:
        raise NotImplementedError(
            "te.checkpoint's distribute_saved_activations, tp_group and get_rng_state_tracker are not emulated: leave "
            "them out"
        )
    if not _has_te_modules(function):
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=use_reentrant,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            **kwargs,
        )
    if not torch.is_grad_enabled():
        forward_context, _ = context_fn()
        with forward_context or nullcontext():
            return function(*args, **kwargs)
    frame = _Frame(function, context_fn, use_reentrant)
    return _Reentrant.apply(frame, kwargs, *args) if use_reentrant else _non_reentrant(frame, args, kwargs)
