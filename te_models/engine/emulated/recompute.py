"""te.checkpoint: recompute activations in backward, without disturbing the state of delayed scaling.

Both modes of Transformer Engine (section 9 of docs/internals/transformer_engine.md): reentrant, whose first pass runs
without grad and whose backward runs forward and backward; and non-reentrant, whose first pass drops its saved tensors
and recomputes all of them when the first is needed. PyTorch's checkpoint does both, under the random state and the
torch.autocast of the first pass; this file adds te.autocast.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn, set_checkpoint_early_stop

from te_models.device.checkpoint import checkpoint as checkpoint_without_reentrance
from te_models.engine.emulated.autocast import FP8GlobalStateManager, autocast
from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.engine.emulated.norm import NormModule
from te_models.engine.emulated.recipe import refuse_options

T = TypeVar("T")
# The contexts of a first pass and of its recompute.
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


class Frame:
    """A checkpointed function, called once for the first pass and once to recompute it, in the context of the first.

    Its identity ties delayed scaling's stash to the call.
    """

    def __init__(
        self, function: Callable[..., object], contexts: Contexts, reentrant: bool
    ) -> None:
        self.function = function
        self.contexts = iter(contexts)
        self.reentrant = reentrant
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.recipe = FP8GlobalStateManager.get_fp8_recipe() if self.fp8 else None
        state = FP8GlobalStateManager.quantization_state
        self.first_module = state.is_first_fp8_module
        self.scales = state.scales
        self.ran = False

    def __call__(self, *args: object, **kwargs: object) -> object:
        state = FP8GlobalStateManager.quantization_state
        recompute = self.ran
        self.ran = True
        with ExitStack() as stack:
            # Restored on the way out in any case, since checkpoints nest and functions raise.
            for name in ("scales", "recompute_frame", "recompute_phase"):
                stack.callback(setattr, state, name, getattr(state, name))
            stack.enter_context(next(self.contexts))
            state.recompute_frame = self
            state.recompute_phase = recompute
            if recompute:
                # Backward may run in a thread of its own.
                state.is_first_fp8_module = self.first_module
                state.scales = self.scales
                stack.enter_context(autocast(enabled=self.fp8, recipe=self.recipe))
            return self.function(*args, **kwargs)


def _has_te_modules(function: Callable[..., object]) -> bool:
    """Return True if there may be te modules inside; a plain callable may hold any."""
    if not isinstance(function, nn.Module):
        return True
    return any(isinstance(m, (TransformerEngineBaseModule, NormModule)) for m in function.modules())


def checkpoint(
    function: Callable[..., T],
    *args: object,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: ProcessGroup | None = None,
    get_rng_state_tracker: Callable[[], object] | None = None,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> T:
    """Call `function(*args, **kwargs)` now and recompute its activations in the backward pass.

    Open te.autocast outside. Under DelayedScaling every checkpointed forward needs its backward, in the same order.
    `use_reentrant=True` needs a positional tensor that requires grad.
    """
    refuse_options(
        "te.checkpoint",
        distribute_saved_activations=distribute_saved_activations,
        tp_group=tp_group,
        get_rng_state_tracker=get_rng_state_tracker,
    )
    options: dict[str, Any] = dict(determinism_check=determinism_check, debug=debug)
    # Nothing inside has FP8 state to restore.
    if not _has_te_modules(function):
        options["context_fn"] = context_fn
        if use_reentrant:
            return torch_checkpoint(function, *args, use_reentrant=True, **options, **kwargs)
        return checkpoint_without_reentrance(function, *args, **options, **kwargs)
    # A reentrant checkpoint follows its positional tensors only, a non-reentrant one parameters too.
    tracked = any(isinstance(a, Tensor) and a.requires_grad for a in args) or not use_reentrant
    if not (tracked and torch.is_grad_enabled()):
        with torch.no_grad(), context_fn()[0]:
            return function(*args, **kwargs)
    frame = Frame(function, context_fn(), use_reentrant)
    if use_reentrant:
        return torch_checkpoint(lambda *inputs: frame(*inputs, **kwargs), *args, use_reentrant=True)
    # The recompute must leave its autocasts as a whole pass does.
    with set_checkpoint_early_stop(False):
        result: Any = checkpoint_without_reentrance(frame, *args, **options, **kwargs)
    return result
