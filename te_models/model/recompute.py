"""Activation checkpointing: which activations backward recomputes, under any recipe.

A mode (te_models/config/recompute_modes.py) is a property of a forward pass, never a wrapper module, so parameter names
and state_dict keys do not change. Under "selective", backward recomputes the output of an RMSNorm and, from it, the
output of gate_up_proj. The activation's backward needs nothing else, and reads it where kernels.activate saved it
before it computed anything (te_models/kernels/early_save.py).

The recompute is PyTorch's: torch.utils.checkpoint without reentrance restores random numbers, works with
torch.autograd.grad, and checks that the second pass saves what the first one did. This file adds what Transformer
Engine needs and torch does not know of: the autocast and the scales of the first pass, and that the second one records
nothing. Those belong to the pass, not to a queue, so passes may be abandoned or run backward in any order;
te.checkpoint keeps them in one global queue, where an abandoned forward makes every later recompute use stale scales
(section 2.7 of docs/internals/transformer_engine.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from te_models.config.recipe import EngineRecipe
from te_models.config.recompute_modes import recomputes_block, recomputes_mlp, recomputes_product
from te_models.device.allocations import counted_as
from te_models.device.checkpoint import checkpoint
from te_models.errors import EngineError
from te_models.fp8.scaling_state import DelayedState, delayed_states, overwrite
from te_models.kernels.early_save import discarding
from te_models.model.offload import Offload

# Libraries whose modules and hooks draw no random numbers except in dropout; the last has an adapter's buffers.
DRAW_NOTHING = ("torch.", "transformer_engine.", "te_models.", "peft.tuners._buffer_dict")


T = TypeVar("T")
# (the attributes of a te module, its quantized weights in the attribute "_fp8_workspaces")
Caches = list[tuple[dict[str, Any], dict[str, object]]]


class Recompute:
    """The activation checkpointing of one forward pass.

    Create it at the start of the pass, before any scale can change.

    Args:
        mode: as CausalLM's `activation_checkpointing`.
        te: the engine.
        te_recipe: the engine's recipe object of the FP8 blocks; None for BF16.
        layers: the number of blocks.
        first_microbatch: `is_first_microbatch` of every te.Linear: True quantizes its weight and caches the result,
            False uses the cached one, None quantizes and caches nothing.
        offload: moves saved activations to the host's memory (te_models.model.offload).
        fp8_weights: whether the weights of FP8 blocks are FP8 (te_models.fp8.primary_weights).
        lock: the lock that a thread holds while it runs blocks of the model (None: none).
        mixed: whether te.Linears have autocasts of their own (te_models.fp8.region.Autocasts), also in BF16 blocks.
    """

    def __init__(
        self,
        mode: str | int,
        te: ModuleType,
        te_recipe: EngineRecipe | None,
        layers: int,
        first_microbatch: bool | None = None,
        offload: Offload | None = None,
        fp8_weights: bool = False,
        lock: AbstractContextManager[object] | None = None,
        mixed: bool = False,
    ) -> None:
        # Nothing is saved without grad, so there is nothing to recompute.
        self.mode = mode if torch.is_grad_enabled() else "none"
        self.te = te
        self.te_recipe = te_recipe
        self.first_microbatch = first_microbatch
        self.fp8_weights = fp8_weights
        self.lock = lock or contextlib.nullcontext()
        self.mixed = mixed
        self.restored = False  # whether a recompute of this pass runs, with its scales
        self.offload = offload if torch.is_grad_enabled() else None
        self.layer = 0  # the block that runs
        self.layers = layers  # how many there are
        self.recomputing = False
        self.decisions: dict[int, Any] = {}  # torch.compile cannot trace dict[int, object]()

    def run_block(self, block: nn.Module, layer: int, x: Tensor, *args: object) -> Tensor:
        """Return block(x, *args), which backward recomputes if the mode asks for it in block number `layer`."""
        self.layer = layer
        offloaded: AbstractContextManager[None] = contextlib.nullcontext()
        if self.offload is not None:
            offloaded = self.offload.block(layer, block, args)
        with offloaded:
            if recomputes_block(self.mode, layer):
                # Random numbers are restored only where some may be drawn: it costs the host a copy of the generator's
                # state.
                return self.recomputed(block, block, x, *args, restore_random=may_draw(block))
            return block(x, *args)

    def run_mlp(
        self,
        block: nn.Module,
        mlp: nn.Module,
        function: Callable[..., T],
        x: Tensor,
        delta: Tensor | None,
        *args: object,
    ) -> T:
        """Return function(x, delta, *args): the MLP of the current block, up to the output of SwiGLU.

        If the mode asks for it, backward recomputes it from the sum x + delta, as function(x + delta, None, *args).
        """
        # The last block's MLP, for one, would be recomputed at once: nothing runs between its forward and its backward.
        if recomputes_mlp(self.mode, self.layer, self.layers, self._fp8, self.fp8_weights):
            # A norm of the block is part of the function, and may be another library's.
            if delta is not None:
                x = x + delta
            return self.recomputed(mlp, function, x, None, *args, restore_random=may_draw(block))
        return function(x, delta, *args)

    def discarding(self, hidden: Tensor, fp8: bool) -> AbstractContextManager[None]:
        """Inside, the te.Linear whose input is `hidden` from kernels.activate does not save it, if the mode says so.

        `fp8` says whether that te.Linear runs in FP8.
        """
        if torch.is_grad_enabled() and recomputes_product(self.mode, fp8, self.fp8_weights):
            return discarding(hidden)
        return contextlib.nullcontext()

    def decided_once(self, layer: int, decide: Callable[[], T]) -> tuple[T, bool]:
        """Return the decision of block number `layer`, and whether this is its first pass: a recompute repeats it.

        A router's choice would otherwise be made again, from logits that may differ in the last bit.
        """
        if self.recomputing:
            return self.decisions[layer], False
        decision = decide()
        # Kept until backward, which comes back with `recomputing` set.
        if self.mode != "none":
            self.decisions[layer] = decision
        return decision, True

    @property
    def saves_block(self) -> bool:
        """Return whether what the block that runs computes waits for backward, on the device."""
        # A recompute in backward runs the block again, and saves for a moment only.
        recomputed = recomputes_block(self.mode, self.layer)
        return torch.is_grad_enabled() and self.offload is None and not recomputed

    @contextlib.contextmanager
    def _recompute(self) -> Iterator[None]:
        """Inside, `recomputing` is True, and allocations are counted as recomputed."""
        before = self.recomputing
        self.recomputing = True
        try:
            with counted_as("recomputed"):
                yield
        finally:
            self.recomputing = before

    @contextlib.contextmanager
    def by_a_third_party(self) -> Iterator[None]:
        """Inside, an FP8 block runs that torch.utils.checkpoint, or a wrapper built on it, recomputes in backward.

        The model's autocast has ended by then. Recipes without state only need it again; the scales of a stateful one
        have changed since, and its amaxes would be recorded twice.
        """
        # -1: no backward runs, so that this is no recompute but a block called by itself.
        if torch._C._current_graph_task_id() == -1:
            raise EngineError(
                "an FP8 block ran outside the model's autocast: call the model, not its blocks"
            )
        # Delayed scaling first: its scales of the first pass are gone, and no autocast brings them back.
        self.check_restored(self.te_recipe)
        with self.te.restored_recompute(), self.te.autocast(enabled=True, recipe=self.te_recipe):
            yield

    def check_restored(self, te_recipe: EngineRecipe | None) -> None:
        """Raise an EngineError if a third party recomputes, in backward, what runs under a recipe with state."""
        if (
            te_recipe is None
            or not te_recipe.delayed()
            or self.restored
            or torch._C._current_graph_task_id() == -1
        ):
            return
        raise EngineError(
            "a third-party checkpoint recomputes FP8 blocks under delayed scaling, whose scales it does not "
            "restore: use activation_checkpointing='full' or te_models.checkpoint instead, or a recipe without "
            "state"
        )

    @property
    def _fp8(self) -> bool:
        """True inside an enabled autocast."""
        return self.te.FP8GlobalStateManager.is_fp8_enabled()

    def recomputed(
        self,
        owner: nn.Module,
        function: Callable[..., T],
        *args: object,
        restore_random: bool,
        **kwargs: Any,
    ) -> T:
        """Return function(*args, **kwargs), which backward recomputes; `owner` contains the te modules it runs."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            """Return the contexts of the first pass and of the recompute."""
            if not (self._fp8 or self.mixed):
                return contextlib.nullcontext(), self._in_high_precision()
            # Filled when the first pass ends, and read by the recompute; context_fn makes both contexts beforehand.
            caches: Caches = []
            scales = forward_scales(owner)
            return (
                self._noting_caches(owner, caches),
                self._as_in_first_pass(owner, scales, caches, fp8=self._fp8),
            )

        return checkpoint(
            function,
            *args,
            context_fn=contexts,
            preserve_rng_state=restore_random,
            **kwargs,
        )

    @contextlib.contextmanager
    def _noting_caches(self, owner: nn.Module, caches: Caches) -> Iterator[None]:
        """Note the quantized weights that the first pass used, if micro-batches share them."""
        yield
        if self.first_microbatch is not None:
            for module in owner.modules():
                attributes = vars(module)
                if "_fp8_workspaces" in attributes:
                    caches.append((attributes, dict(attributes["_fp8_workspaces"])))

    @contextlib.contextmanager
    def _in_high_precision(self) -> Iterator[None]:
        """Run a recompute without FP8, even inside an autocast around the backward."""
        with self.lock, self.te.outside_autocast(), self._recompute():
            yield

    @contextlib.contextmanager
    def _as_in_first_pass(
        self, owner: nn.Module, scales: dict[str, Tensor], caches: Caches, fp8: bool
    ) -> Iterator[None]:
        """Recompute under the recipe, scales and cached quantized weights of the first pass, and leave no trace.

        The autocast, enabled if `fp8`, is nested in a disabled one, so that its exit updates no scale.

        Args:
            owner: contains the te modules that run inside.
            scales: the scales of the first pass, by the names of `forward_states`.
            caches: the quantized weights that the first pass used.
            fp8: whether it ran in FP8.
        """
        with self.lock:
            states = forward_states(owner)
            first_microbatch = self.first_microbatch
            present_caches: Caches = []
            for attributes, weights in caches:
                present_caches.append((attributes, attributes["_fp8_workspaces"]))
                attributes["_fp8_workspaces"] = weights
            if first_microbatch is not None:
                # Read the cached weights that were just put back: True would quantize them once more.
                self.first_microbatch = False
            # What the pass reads and writes: scales, and the row of the histories in which amaxes are noted.
            present_state: list[Tensor] = []
            for state in states.values():
                present_state += [state.scale, state.amax_history[0]]
            with torch.no_grad():
                copied_state = copies(present_state)
                names = [name for name in states if name in scales]
                overwrite([states[name].scale for name in names], [scales[name] for name in names])
                for name in states.keys() - scales.keys():
                    states[name].scale.fill_(
                        1.0
                    )  # of a module that had not run before the first pass
            self.restored = True
            try:
                with (
                    self._recompute(),
                    self.te.restored_recompute(),
                    self.te.autocast(enabled=False, recipe=self.te_recipe),
                    self.te.autocast(enabled=fp8, recipe=self.te_recipe),
                ):
                    yield
            finally:
                self.restored = False
                self.first_microbatch = first_microbatch
                for attributes, weights in present_caches:
                    attributes["_fp8_workspaces"] = weights
                overwrite(present_state, copied_state)


def may_draw(owner: nn.Module) -> bool:
    """Return whether random numbers could be drawn in `owner`: by dropout, or by a third-party hook or module.

    Restoring their state takes the host longer than the recompute's launches, so it is left out where nothing can need
    it.
    """
    return any(_module_may_draw(module) for module in owner.modules())


def _module_may_draw(module: nn.Module) -> bool:
    """Return whether random numbers could be drawn in the forward of one module or in its hooks."""
    if isinstance(module, nn.Dropout) and module.p > 0:
        return True
    if vars(module).get("jitters"):  # of a router (te_models.model.moe)
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(_draws_nothing(source) for source in (type(module), *hooks))


def _draws_nothing(source: object) -> bool:
    """Return whether a class or a hook comes from a library known to draw no random numbers, such as FSDP2's hooks."""
    # Callables of C extensions may have no module.
    return str(getattr(source, "__module__", "")).startswith(DRAW_NOTHING)


def forward_states(owner: nn.Module) -> dict[str, DelayedState]:
    """Return module name -> forward scaling state, of the modules in `owner` that have scales and amax histories."""
    return delayed_states(owner, ("scaling_fwd",))


def forward_scales(owner: nn.Module) -> dict[str, Tensor]:
    """Return copies of the forward scales in `owner`; a module that has not run yet has none (they are 1)."""
    states = forward_states(owner)
    return dict(zip(states, copies([state.scale for state in states.values()]), strict=True))


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor."""
    new = [torch.empty_like(tensor) for tensor in tensors]
    overwrite(new, tensors)
    return new


def refuse_foreign_recompute(stateful: bool) -> None:
    """Raise if a third-party checkpoint recomputes, in backward, a whole model with scales to update."""
    if stateful and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "the model is being recomputed by a checkpoint around it, which would record every amax twice: "
            "use activation_checkpointing='full' instead"
        )
