"""A model's forward pass under its own recipe, regardless of autocasts around it and of other threads.

`forward_pass` surrounds the whole pass in high precision; inside it, `Autocasts` surround the layers that run in FP8.
The forward scales of delayed scaling are updated only when a training pass, including its loss, has succeeded.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from te_models.config.recipe import EngineRecipe, Recipe
from te_models.device.autograd import no_autocast
from te_models.errors import EngineError
from te_models.fp8.kept_weights import forget_kept_weights
from te_models.fp8.primary_weights import is_quantized
from te_models.fp8.scaling_state import (
    WIDTHS,
    delayed_states,
    fp8_state,
    frozen_fp8_state,
    overwrite,
)
from te_models.numerics.quantizers import records_amax


@contextlib.contextmanager
def forward_pass(
    model: nn.Module,
    te: ModuleType,
    recipe: Recipe,
    te_recipe: EngineRecipe | None,
    weight: Tensor,
) -> Iterator[None]:
    """Run a forward pass of `model` in high precision, except inside `Autocasts`.

    Threads that run the same model take turns; on the native engine, whose FP8 state belongs to the process, threads
    that run any model do. In evaluation mode, or without grad, all scales and amax histories stay as they are. A
    training pass updates the forward scales when it succeeds; one that raises changes no scale and leaves no amax.
    A model in 16 bits runs without torch.autocast, which could only narrow what it computes in FP32.

    Args:
        te: the engine.
        te_recipe: the engine's recipe object; None for BF16.
        weight: a weight of the model, which has its dtype and device.

    Raises:
        EngineError: the pass has gradients and would train, but something evaluates or saves the model meanwhile.

    Warns:
        UserWarning: if the pass is inside an enabled autocast with another recipe, which has no effect on it.
    """
    autocast = no_autocast(weight) if weight.dtype.itemsize == 2 else contextlib.nullcontext()
    # The order matters: the lock first, since the two others read and change state that threads share.
    with te.region_lock(model, recipe.quantized), te.outside_autocast() as outer, autocast:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if model.training:
                _note_training(model)
            else:
                _refuse_training_in_evaluation(model)
        if outer is not None and outer != te_recipe:
            warnings.warn(
                f"the model runs under its own recipe {recipe.name!r}, not under the {type(outer).__name__} of the "
                "autocast around it: leave that out, or call model.set_recipe",
                stacklevel=4,
            )
        if not recipe.stateful or not records_amax():
            yield
        elif not (model.training and torch.is_grad_enabled()):
            # Another thread's backward may change the others.
            with frozen_fp8_state(model, ("scaling_fwd",)):
                yield
        else:
            with _discarding_amaxes_of_a_failure(model):
                yield
            # By hand: an autocast inside a disabled one updates nothing on exit (section 2.5), and a pass that raised
            # never gets here.
            te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


@contextlib.contextmanager
def evaluating(model: nn.Module, te: ModuleType, recipe: Recipe) -> Iterator[None]:
    """Put the model into evaluation mode until the last concurrent evaluation of it has finished.

    The mode changes between forward passes; meanwhile a pass that would train is an error.
    """
    with te.region_lock(model, recipe.quantized), _LOCK:
        users, was_training = _EVALUATING.get(model, (0, model.training))
        # The first user notes the mode, the last one restores it.
        _EVALUATING[model] = (users + 1, was_training)
        if any(module.training for module in model.modules()):
            _set_training(model, False)
    try:
        yield
    finally:
        with te.region_lock(model, recipe.quantized), _LOCK:
            users, was_training = _EVALUATING[model]
            if users > 1:
                _EVALUATING[model] = (users - 1, was_training)
            else:
                del _EVALUATING[model]
                if was_training:
                    _set_training(model, True)


def _set_training(model: nn.Module, mode: bool) -> None:
    """Do what model.train(mode) does, in less time: it is a millisecond or two of each prompt."""
    modules = list(model.modules())
    if {type(module).train for module in modules} != {nn.Module.train}:
        model.train(mode)
        return
    for module in modules:
        # As nn.Module.train, without nn.Module's assignment, which looks for parameters and buffers first.
        vars(module)["training"] = mode


_LOCK = threading.Lock()
# Model -> number of users, and whether it was training before.
_EVALUATING: weakref.WeakKeyDictionary[nn.Module, tuple[int, bool]] = weakref.WeakKeyDictionary()


def _refuse_training_in_evaluation(model: nn.Module) -> None:
    _, was_training = _EVALUATING.get(model, (0, False))
    if was_training:
        raise EngineError(
            "the model is in evaluation mode while generate() or an evaluation runs with it: train afterwards, or "
            "generate with a copy.deepcopy of it"
        )


@contextlib.contextmanager
def saving(model: nn.Module) -> Iterator[None]:
    """Keep other threads from training the model while its weights are read.

    A step has many parts, of which a model's passes are only one, so no lock could tell where it ends.

    Raises:
        EngineError: the model is in training mode, and a thread that still runs was the last to train it.
    """
    this_thread = threading.current_thread()
    with _LOCK:
        trainer = _TRAINERS.get(model)
        training = model.training or _EVALUATING.get(model, (0, False))[1]
        # A thread that has ended cannot be in the middle of a step.
        if training and trainer is not None and trainer is not this_thread and trainer.is_alive():
            raise EngineError(
                f"thread {trainer.name!r} trains the model, and a save beside it would mix two steps: save in that "
                "thread, or after it has called model.eval()"
            )
        _SAVERS.setdefault(model, []).append(this_thread)
    try:
        yield
    finally:
        with _LOCK:
            _SAVERS[model].remove(this_thread)


# Model -> the thread of its last training pass, and those that save it now.
_TRAINERS: weakref.WeakKeyDictionary[nn.Module, threading.Thread] = weakref.WeakKeyDictionary()
_SAVERS: weakref.WeakKeyDictionary[nn.Module, list[threading.Thread]] = weakref.WeakKeyDictionary()


def is_trained(model: nn.Module) -> bool:
    """Return whether a model has been trained and is in training mode, or was before the present evaluation of it."""
    with _LOCK:
        _, was_training = _EVALUATING.get(model, (0, model.training))
        return was_training and model in _TRAINERS


def _note_training(model: nn.Module) -> None:
    """Note that this thread trains the model; raise if another one saves it."""
    this_thread = threading.current_thread()
    forget_kept_weights(model)
    with _LOCK:
        if any(thread is not this_thread for thread in _SAVERS.get(model, ())):
            raise EngineError(
                "the model is being saved in another thread: train it once that is done"
            )
        _TRAINERS[model] = this_thread


Others = Mapping[nn.Module, tuple[EngineRecipe | None, ProcessGroup | None]]


class Autocasts:
    """The autocasts of one pass: one around the layers that run under the model's recipe, and one around each te.Linear
    that runs in something else than its surroundings.

    The first module of the pass that trains in FP8, in whichever of them, takes Transformer Engine's flag, and its
    backward updates all backward scales. An autocast restores the flag on exit, so it is set here, from what the pass
    has seen.

    Args:
        te: the engine.
        te_recipe: the engine's object of the model's recipe; None for BF16.
        group: the processes that share their amaxes; None: all.
        others: te.Linear, or a module in its place -> the engine's object of its recipe, None for BF16, and its group.
    """

    def __init__(
        self,
        te: ModuleType,
        te_recipe: EngineRecipe | None,
        group: ProcessGroup | None,
        others: Others,
    ) -> None:
        self.te = te
        self.te_recipe = te_recipe
        self.group = group
        self.others = others
        self.first = True  # whether the flag is still to be taken

    @contextlib.contextmanager
    def layers(self) -> Iterator[None]:
        """Surround the layers that run under the model's recipe."""
        with self._autocast(self.te_recipe, self.group):
            yield

    @contextlib.contextmanager
    def linear(self, module: nn.Module) -> Iterator[None]:
        """Surround a call of a te.Linear, which may be one of `others`."""
        if module not in self.others:
            yield
            return
        te_recipe, group = self.others[module]
        with self._autocast(te_recipe, group):
            yield

    def in_fp8(self, module: nn.Module) -> bool:
        """Return whether a te.Linear runs below BF16 where the pass is now."""
        return self.te_recipe_of(module) is not None

    def te_recipe_of(self, module: nn.Module) -> EngineRecipe | None:
        """Return the engine's object of the recipe that a te.Linear runs under where the pass is now; None: BF16."""
        if module in self.others:
            return self.others[module][0]
        return self.te_recipe if self.te.FP8GlobalStateManager.is_fp8_enabled() else None

    @contextlib.contextmanager
    def _autocast(
        self, te_recipe: EngineRecipe | None, group: ProcessGroup | None
    ) -> Iterator[None]:
        """Open an autocast, disabled where `te_recipe` is None, and hand the flag of the pass through it."""
        state = self.te.FP8GlobalStateManager.quantization_state
        if state.fp8_enabled:
            self.first = state.is_first_fp8_module
        enabled = te_recipe is not None
        recipe = te_recipe if enabled else self.te_recipe
        with self.te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group):
            # Entering an autocast sets the flag again (section 2.5): only the first FP8 module of the whole pass may
            # have it.
            state.is_first_fp8_module = enabled and self.first
            yield
            if enabled:
                self.first = state.is_first_fp8_module
        # Leaving one restores the flag from before, which a module inside may have taken.
        state.is_first_fp8_module = state.fp8_enabled and self.first


@contextlib.contextmanager
def _discarding_amaxes_of_a_failure(model: nn.Module) -> Iterator[None]:
    """Clear the amaxes that the pass recorded, on an exception.

    Between passes row 0 of a forward history is zero, except for FP8 primary weights: the optimizer's step records
    theirs, and the pass does not.
    """
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for name, state in delayed_states(model, ("scaling_fwd",)).items():
                module = model.get_submodule(name.rpartition(".")[0])  # <module>.scaling_fwd
                step = state.amax_history[0]
                weights = slice(1, None, WIDTHS["scaling_fwd"])
                before = step[weights].clone()
                step.zero_()
                if _has_fp8_weight(module):
                    step[weights] = before
        raise


def _has_fp8_weight(module: nn.Module) -> bool:
    """Return whether a weight of a te module is an FP8 primary weight."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("weight") and is_quantized(parameter):
            return True
    return False


def preserve_scales_in_backward(model: nn.Module, outputs: Iterable[Tensor]) -> None:
    """Restore every scale and amax history of `model` after a backward from `outputs`, which were evaluated.

    A backward quantizes gradients, whose amaxes and scale update belong to training only.
    """
    saved: dict[str, Tensor] = {}

    def restore() -> None:
        live = fp8_state(model)
        overwrite([live[name] for name in saved], list(saved.values()))
        saved.clear()

    def save(gradient: Tensor) -> None:
        if saved:  # another output of this pass was first
            return
        live = fp8_state(model)
        saved.update({name: torch.empty_like(tensor) for name, tensor in live.items()})
        overwrite(list(saved.values()), list(live.values()))
        # Runs after the whole backward, so also after the scale update at its end.
        torch.autograd.Variable._execution_engine.queue_callback(restore)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(save)
