"""Recompute and FP8 state for any module made of te layers, Transformer Engine's own or the emulated engine's.

Transformer Engine's te.checkpoint keeps the scales of its first passes in one global queue, and its FP8 state is saved
as a pickle. These three functions are for other modules: te.LayerNormMLP, te.TransformerLayer, a user's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import MethodType, ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from te_models.config.recipe import RecipeLike, get_recipe
from te_models.engine import engine_of
from te_models.errors import UsageError, check_known
from te_models.fp8 import scaling_state
from te_models.model.recompute import Recompute

T = TypeVar("T")


def checkpoint(
    function: Callable[..., T],
    *args: object,
    mode: Literal["none", "full"] = "full",
    recipe: RecipeLike | None = None,
    modules: Iterable[nn.Module] = (),
    **kwargs: Any,
) -> T:
    """Return function(*args, **kwargs) and recompute it in backward, under any FP8 recipe.

    The recompute runs under the recipe, the scales and the random state of the first pass, and records no amax. Calls
    may be nested, abandoned, and run backward in any order. Call it inside the autocast that the rest of the model runs
    in::

        with te.autocast(enabled=True, recipe=recipe):
            y = te_models.checkpoint(layer, x)

    Args:
        function: a module, a method of one, or any function of tensors.
        args: its arguments.
        mode: "full" saves the arguments only, "none" calls the function.
        recipe: run the function in its own autocast, as `CausalLM`'s `recipe`; None: in the one around the call.
        modules: the modules with te layers that the function uses, if it is not one of them or a method of one.
        kwargs: its keyword arguments.

    Raises:
        UsageError: an unknown mode, an argument of another type, or a function under delayed scaling that uses te
            layers which are not known.
    """
    check_known("mode", mode, ("none", "full"))
    if not callable(function):
        raise UsageError(
            f"the function is a {type(function).__name__}: give a module, a method of one, or a function of tensors"
        )
    if not isinstance(modules, Iterable):
        raise UsageError(f"modules is a {type(modules).__name__}: give a list of modules")
    modules = list(modules)
    for module in modules:
        _check_module(module)
    bound = function.__self__ if isinstance(function, MethodType) else function
    # One module for all of them: their scales are restored together.
    owner = nn.ModuleList([*modules, *([bound] if isinstance(bound, nn.Module) else [])])
    te = engine_of(owner)
    if recipe is not None:
        built = get_recipe(recipe).build(te)
        with te.autocast(enabled=built is not None, recipe=built):
            return checkpoint(function, *args, mode=mode, modules=[owner], **kwargs)
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    state = te.FP8GlobalStateManager
    te_recipe = state.get_fp8_recipe() if state.is_fp8_enabled() else None
    # The list itself counts as one.
    if te_recipe is not None and te_recipe.delayed() and not len(list(owner.modules())) > 1:
        raise UsageError(
            "checkpoint under delayed scaling must know whose scales to restore: pass modules=[...], the modules with "
            "te layers that the function uses"
        )
    if te_recipe is not None and te_recipe.delayed():
        function = _refusing_others(function, owner, te)
    return Recompute("full", te, te_recipe, layers=1).recomputed(
        owner, function, *args, restore_random=True, **kwargs
    )


def fp8_state(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all scales and amax histories in `module`, to be saved with its state_dict.

    Names are `<submodule>.scaling_fwd.scale`, FP32 [n], and `<submodule>.scaling_fwd.amax_history`, FP32 [length, n],
    and the same with scaling_bwd, for the n tensors that a module quantizes in that direction (sections 2.1 and 7.11
    of docs/internals/transformer_engine.md). Empty before the first FP8 forward and under recipes without state.

    Raises:
        UsageError: `module` is no nn.Module.
    """
    _check_module(module)
    return {name: tensor.clone() for name, tensor in scaling_state.fp8_state(module).items()}


def load_fp8_state(
    module: nn.Module, tensors: Mapping[str, Tensor], recipe: RecipeLike = "delayed"
) -> None:
    """Write scales and amax histories, as from `fp8_state`, into `module`, which need not have run yet.

    Args:
        module: made of te layers of the same names and number of GEMMs. State of another recipe under which it has run
            is dropped; layers that `tensors` leave out, as those that had not run in FP8, keep theirs.
        tensors: as from `fp8_state`. A history of another length keeps its newest entries.
        recipe: the recipe of delayed scaling that the module will run under.

    Raises:
        ValueError: a name or a shape does not fit, the recipe has no such state, or an argument is of another type;
            nothing has been written.
    """
    _check_module(module)
    chosen = get_recipe(recipe)
    te = engine_of(module)
    if tensors and not chosen.stateful:
        raise UsageError(
            f"recipe {chosen.name!r} keeps no scales: load them under one of delayed scaling"
        )
    scaling_state.check_fp8_state(module, tensors)
    layers = dict(module.named_modules())
    for name in {name.rsplit(".", 2)[0] for name in tensors}:
        # It may have run under a recipe without such state, whose quantizers would stay.
        if not scaling_state.fp8_state(layers[name]):
            te.reset_fp8_state(layers[name])
    built = chosen.build(te)
    scaling_state.load_fp8_state(module, tensors, lambda name: built)


def _check_module(module: object) -> None:
    """Raise a UsageError for something that is no module, such as its state_dict."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"the module is a {type(module).__name__}: give an nn.Module that has te layers"
        )


def _refusing_others(
    function: Callable[..., T], owner: nn.Module, te: ModuleType
) -> Callable[..., T]:
    """Return `function` with an error if an FP8 layer outside `owner` runs in it: nothing would restore its scales."""
    known = {id(module) for module in owner.modules()}

    def watched(*args: object, **kwargs: object) -> T:
        thread = threading.get_ident()  # hooks see the modules of all threads

        def check(module: nn.Module, args: object) -> None:
            mine = threading.get_ident() == thread and hasattr(module, "fp8_meta")
            if mine and id(module) not in known and te.FP8GlobalStateManager.is_fp8_enabled():
                raise UsageError(
                    f"checkpoint under delayed scaling would not restore the scales of a te.{type(module).__name__}, "
                    "which is in none of the modules that it knows: pass modules=[...] with all that the function "
                    "uses, and hold layers in nn.ModuleList rather than in a list"
                )

        with nn.modules.module.register_module_forward_pre_hook(check):
            return function(*args, **kwargs)

    return watched
