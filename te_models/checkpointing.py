"""Activation checkpointing: which activations are kept for backward and which are recomputed, under any recipe.

A mode is a property of a forward pass, never a wrapper module, so parameter names and state_dict keys do not change:

    "none"       every activation is kept
    "selective"  each block recomputes its MLP up to the input of down_proj, which te.Linear keeps in FP8 anyway
    "full"       every block keeps its input alone
    N            every N-th block keeps its input alone, the others everything

The recompute is PyTorch's (torch.utils.checkpoint without reentrance: it restores random numbers, works with
torch.autograd.grad, and checks that the second pass saves what the first one did). Around it this file gives each
recompute what Transformer Engine needs and torch does not know of: the autocast, the scales of the first pass, and that
nothing it records stays. Those belong to the pass, not to a queue, so passes may be abandoned or run backward in any
order; te.checkpoint keeps them in one global queue, where an abandoned forward makes every later recompute use stale
scales (section 2.7 of Transformer Engine's behaviour).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_models.errors import unknown
from te_models.offload import Offload

MODES = ("none", "selective", "full")


def check_mode(mode: str | int) -> str | int:
    """The mode, if it is one; a string of digits becomes an int (from the command line)."""
    if isinstance(mode, str) and mode.isdigit():
        mode = int(mode)
    if mode in MODES or (isinstance(mode, int) and not isinstance(mode, bool) and mode > 0):
        return mode
    raise unknown("activation_checkpointing", mode, [*MODES, "a number N of blocks"])


class Recompute:
    """The activation checkpointing of one forward pass.

    Made at the start of the pass, before any scale can change; `te_recipe` is the recipe of the FP8 blocks (None: BF16).
    """

    def __init__(
        self,
        mode: str | int,
        te: ModuleType,
        te_recipe: Any,
        first_microbatch: bool | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`first_microbatch` is what te.Linear is told of its weight's FP8 copy: True makes and keeps it, False uses the
        one kept, None makes it and keeps nothing. `offload` takes what blocks keep to the host (te_models.offload)."""
        self.mode, self.te, self.te_recipe = mode if torch.is_grad_enabled() else "none", te, te_recipe
        self.first_microbatch = first_microbatch
        self.offload = offload if torch.is_grad_enabled() else None

    def block(self, block: nn.Module, layer: int, x: Tensor, *args: Any) -> Tensor:
        """block(x, *args), recomputed in backward if the mode says so of block number `layer`."""
        if self.offload is None:
            return self._block(block, layer, x, *args)
        with self.offload.block(layer, block, args):
            return self._block(block, layer, x, *args)

    def _block(self, block: nn.Module, layer: int, x: Tensor, *args: Any) -> Tensor:
        if self.mode == "full" or (isinstance(self.mode, int) and layer % self.mode == 0):
            return self._recomputed(block, block, x, *args)
        return block(x, *args)

    def part(self, owner: nn.Module, function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """function(x, *args), part of a block with the linears of `owner`, recomputed in backward under "selective"."""
        return self._recomputed(owner, function, x, *args) if self.mode == "selective" else function(x, *args)

    def _recomputed(self, owner: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        def contexts() -> tuple[Any, Any]:
            if not self.te.FP8GlobalStateManager.is_fp8_enabled():
                return contextlib.nullcontext(), contextlib.nullcontext()
            caches: list[tuple[Any, dict[str, Any]]] = []
            return self._noting_caches(owner, caches), self._as_in_first_pass(owner, forward_scales(owner), caches)

        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    @contextlib.contextmanager
    def _noting_caches(self, owner: nn.Module, caches: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
        """Note the FP8 weights that the first pass used, if they are kept between micro-batches."""
        yield
        if self.first_microbatch is not None:
            modules = [m for m in owner.modules() if hasattr(m, "_fp8_workspaces")]
            caches += [(module, dict(module._fp8_workspaces)) for module in modules]  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _as_in_first_pass(
        self, owner: nn.Module, scales: dict[str, Tensor], caches: list[tuple[Any, dict[str, Any]]]
    ) -> Iterator[None]:
        """Run a recompute under the recipe, the scales and the kept FP8 weights of the first pass; leave no trace of it.

        The enabled autocast lies in a disabled one, so that its exit updates no scale (section 1.4).
        """
        states = forward_states(owner)
        first, kept = self.first_microbatch, [(module, module._fp8_workspaces) for module, _ in caches]
        self.first_microbatch = None if first is None else False
        for module, cache in caches:
            module._fp8_workspaces = cache
        with torch.no_grad():
            before = {name: (state.scale.clone(), state.amax_history[0].clone()) for name, state in states.items()}
            for name, state in states.items():
                state.scale.copy_(scales[name]) if name in scales else state.scale.fill_(1.0)
        try:
            with (
                self.te.restored_recompute(),
                self.te.autocast(enabled=False, recipe=self.te_recipe),
                self.te.autocast(enabled=True, recipe=self.te_recipe),
            ):
                yield
        finally:
            self.first_microbatch = first
            for module, cache in kept:
                module._fp8_workspaces = cache
            with torch.no_grad():
                for name, state in states.items():
                    state.scale.copy_(before[name][0])
                    state.amax_history[0].copy_(before[name][1])


def forward_states(owner: nn.Module) -> dict[str, Any]:
    """Name -> forward scaling state of each module in `owner` that has scales and amax histories."""
    found = {}
    for name, module in owner.named_modules():
        meta: dict[str, Any] = getattr(module, "fp8_meta", {})
        if getattr(meta.get("scaling_fwd"), "amax_history", None) is not None:
            found[name] = meta["scaling_fwd"]
    return found


def forward_scales(owner: nn.Module) -> dict[str, Tensor]:
    """A copy of the forward scales in `owner`; a module that has not run yet has none (they are 1)."""
    return {name: state.scale.clone() for name, state in forward_states(owner).items()}


def refuse_foreign_recompute(stateful: bool) -> None:
    """Raise if a whole model with scales to update is being recomputed in backward by somebody else's checkpoint."""
    if stateful and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "the model is being recomputed by a checkpoint around it, which would record every amax twice: "
            "use activation_checkpointing='full' instead"
        )
