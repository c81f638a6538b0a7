"""The FP8 state of a model (scales and amax histories) as plain named tensors: read, write, freeze.

Only stateful recipes (DelayedScaling) have any. Names are `<module>.scaling_fwd.scale` and so on; the tensors are those
in `module.fp8_meta` (sections 2.1 and 7.11 of docs/internals/transformer_engine.md): `scale` FP32 [3] forward (input,
weight, output) and [2] backward, of a te.GroupedLinear as many for each expert; `amax_history` FP32 [length, same]; row
0 belongs to the step in progress, the last row to the newest finished one. They are written in place, never rebound:
the engine's registry holds the same tensors.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from te_models.config.recipe import EngineRecipe, Recipe
from te_models.errors import CheckpointError, refuse
from te_models.numerics.formats import FLT_MAX

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
# Scales per GEMM: of input, weight, output; of the gradients of output and input.
WIDTHS = {"scaling_fwd": 3, "scaling_bwd": 2}


class DelayedState(Protocol):
    """The scales of one direction of a te module, as either engine keeps them."""

    scale: Tensor
    amax_history: Tensor


class DelayedRecipe(EngineRecipe, Protocol):
    """The fields of either engine's DelayedScaling that make scales of amaxes."""

    margin: int
    amax_compute_algo: str
    reduce_amax: bool


def delayed_states(
    model: nn.Module, directions: tuple[str, ...] = DIRECTIONS
) -> dict[str, DelayedState]:
    """Return "<module>.<direction>" -> the engine's state object, with `scale` and `amax_history`.

    Modules without FP8 state, and those under recipes without scales to store, are left out.
    """
    states = {}
    for name, module in model.named_modules():
        meta = vars(module).get("fp8_meta", {})  # only the te modules of either engine have one
        for direction in directions:
            state = meta.get(direction)
            # Transformer Engine's other states have no history.
            if getattr(state, "amax_history", None) is not None:
                states[f"{name}.{direction}"] = state
    return states


def fp8_state(model: nn.Module, directions: tuple[str, ...] = DIRECTIONS) -> dict[str, Tensor]:
    """Return name -> live tensor of every scale and amax history; empty before the first FP8 forward."""
    tensors = {}
    for name, state in delayed_states(model, directions).items():
        tensors[f"{name}.scale"] = state.scale
        tensors[f"{name}.amax_history"] = state.amax_history
    return tensors


@torch.no_grad()
def weight_scale(module: nn.Module, gemm: int = 0) -> Tensor | None:
    """Return the live scale of a weight of a te module under DelayedScaling, FP32 []; None without one."""
    for state in delayed_states(module, ("scaling_fwd",)).values():
        return state.scale[WIDTHS["scaling_fwd"] * gemm + 1]
    return None


def check_fp8_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless `tensors` (as from `fp8_state`) are state that this model can use.

    Every tensor must be of an FP8 module of the model, FP32, of its width, and finite; scales are positive, amaxes are
    not negative. Nothing is written.
    """
    refuse(_mistakes(dict(model.named_modules()), tensors), CheckpointError)


def _mistakes(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        yield "the FP8 state is no dict of names and tensors: give what fp8_state returned"
    for name, value in tensors.items():
        owner, direction, part = (name.rsplit(".", 2) + ["", ""])[:3]
        if not hasattr(modules.get(owner), "fp8_meta"):
            yield f"the FP8 state is of another model: this one has no FP8 module {owner[:80]!r}"
        width = WIDTHS.get(direction)
        dims = {"scale": 1, "amax_history": 2}.get(part)
        partner = f"{owner}.{direction}.{'scale' if dims == 2 else 'amax_history'}"
        if width is None or dims is None or partner not in tensors:
            yield f"the FP8 state does not fit the model at {name!r}: it is no scale with its history"
        elif (
            value.dtype != torch.float32
            or value.dim() != dims
            or value.shape[-1] % width
            or not value.numel()
        ):
            yield f"the FP8 state does not fit the model at {name!r} ({value.dtype} {list(value.shape)})"
        if not bool((value.isfinite() & ((value > 0) if dims == 1 else (value >= 0))).all()):
            yield f"the FP8 state at {name!r} has a value that no scale or amax can have"


@torch.no_grad()
def load_fp8_state(
    model: nn.Module, tensors: Mapping[str, Tensor], built: Callable[[str], EngineRecipe | None]
) -> None:
    """Copy `tensors` (as from `fp8_state`) into the model, which need not have run yet.

    `built` returns the engine's DelayedScaling object that a module, given its name, will run under. A history of
    another length keeps its newest entries.

    Raises:
        CheckpointError: a tensor does not fit the model; nothing was written.
    """
    check_fp8_state(model, tensors)
    modules = dict(model.named_modules())
    for owner in sorted({name.rsplit(".", 2)[0] for name in tensors}):
        make_state(modules[owner], built(owner))
    live = fp8_state(model)
    odd = []
    for name, value in tensors.items():
        if live[name].shape[-1] != value.shape[-1]:
            odd.append((name, list(value.shape)))
    refuse(
        (f"the FP8 state does not fit the model at {name!r} ({shape})" for name, shape in odd),
        CheckpointError,
    )
    for name, value in tensors.items():
        live[name].copy_(
            _resized(value, len(live[name])) if name.endswith("amax_history") else value
        )


def gemms_of(module: nn.Module) -> int:
    """Return the GEMMs of a te module: of a te.GroupedLinear as many as it has experts."""
    return vars(module).get("num_gemms", 1)


def make_state(module: Any, built: EngineRecipe | None) -> None:
    """Give a te module the state for the engine's recipe `built`, if it has none (section 7.11)."""
    # Where it has state, the engine's registry holds those tensors: new ones would never be updated.
    if "scaling_fwd" not in module.fp8_meta:
        module.fp8_meta.update(recipe=built, num_gemms=gemms_of(module))
        module.init_fp8_meta_tensors(built)


@torch.no_grad()
def convert_scales(
    model: nn.Module, old: Callable[[str], Recipe | None], new: Callable[[str], Recipe | None]
) -> None:
    """Convert the model's scales from DelayedScaling recipes to others: `old` and `new` of a module, given its name.

    Histories hold amaxes of the tensors themselves and stay as they are. A scale is the format's largest number, less
    the margin, over an amax, so it changes by a power of two. A tensor without an amax so far keeps scale 1.
    """
    live = fp8_state(model)
    for name, scale in live.items():
        if not name.endswith(".scale"):
            continue
        owner, direction, _ = name.rsplit(".", 2)
        before = old(owner)
        now = new(owner)
        # BF16 has no scales, and equal recipes share theirs.
        if before is None or now is None or before == now:
            continue
        # A scale of 1 without any amax is the initial one: it says nothing about the tensor.
        seen = (scale != 1) | (live[name.removesuffix("scale") + "amax_history"].amax(0) > 0)
        scale.mul_(
            torch.where(seen, _largest(now, direction) / _largest(before, direction), 1.0)
        ).clamp_(max=FLT_MAX)


@torch.no_grad()
def divide_gradient_amaxes(model: nn.Module, divisor: float) -> None:
    """Convert the model's scales to gradients that are smaller by `divisor`. A tensor without an amax keeps scale 1."""
    for state in delayed_states(model, ("scaling_bwd",)).values():
        seen = (state.scale != 1) | (state.amax_history.amax(0) > 0)
        state.scale.mul_(torch.where(seen, divisor, 1.0)).clamp_(max=FLT_MAX)
        state.amax_history.div_(divisor)


def _largest(recipe: Recipe, direction: str) -> float:
    """Return the value that an amax is scaled to."""
    return fp8_max(recipe, direction) * 2.0 ** -recipe.fields.get("margin", 0)


def fp8_max(recipe: Recipe, direction: str) -> float:
    """Return the largest number of a direction's format: 448 in E4M3, 57344 in E5M2."""
    wide = direction == "scaling_bwd" and recipe.fields["fp8_format"] == "HYBRID"
    return 57344.0 if wide else 448.0


@contextlib.contextmanager
def frozen_fp8_state(model: nn.Module, directions: tuple[str, ...] = DIRECTIONS) -> Iterator[None]:
    """Restore every scale and amax history of these directions on exit, to the bit.

    Transformer Engine records the amax of any forward, evaluation included, and uses it in the next training update
    (section 2.5).
    """
    copies = Fp8StateCopies(model, directions)
    # Copied at once and put back in place: the registry of the engine and captured graphs hold these addresses.
    before = copies.take()
    try:
        yield
    finally:
        copies.put_back(before)


Copies = dict[tuple[int, str, str], Tensor]  # by place of the module, direction and part


class Fp8StateCopies:
    """Copies of every scale and amax history of a model, taken and put back with few kernel launches."""

    def __init__(self, model: nn.Module, directions: tuple[str, ...] = DIRECTIONS) -> None:
        # Searched once: a decoding step takes milliseconds.
        owners = {}
        for name, module in model.named_modules():
            if "fp8_meta" in vars(module):
                owners[name] = module
        self.names = list(owners)
        self.modules = list(owners.values())
        self.directions = directions

    def take(self, into: Copies | None = None) -> Copies:
        """Return a copy of the state as it is now; `into` is an older copy, whose memory it may use."""
        live = _tensors(self.modules, self.directions)
        copies: Copies = {}
        for name, tensor in live.items():
            old = None if into is None else into.get(name)
            if old is None or old.shape != tensor.shape:
                old = torch.empty_like(tensor)
            copies[name] = old
        overwrite(list(copies.values()), list(live.values()))
        return copies

    def named(self, copies: Copies) -> dict[str, Tensor]:
        """Return the copies of `take` under the names of `fp8_state`."""
        return {
            f"{self.names[place]}.{direction}.{part}": tensor
            for (place, direction, part), tensor in copies.items()
        }

    def put_back(self, copies: Copies) -> None:
        """Restore what `take` returned, to the bit."""
        live = _tensors(self.modules, self.directions)
        names = [name for name in copies if name in live]
        overwrite([live[name] for name in names], [copies[name] for name in names])
        for name in live.keys() - copies.keys():
            # A module that ran for the first time: its initial values.
            live[name].fill_(1.0 if name[-1] == "scale" else 0.0)


def _tensors(modules: list[nn.Module], directions: tuple[str, ...]) -> Copies:
    """Return the live tensor of every scale and amax history."""
    tensors = {}
    for place, module in enumerate(modules):
        for direction in directions:
            state = vars(module)["fp8_meta"].get(direction)
            if getattr(state, "amax_history", None) is not None:
                tensors[place, direction, "scale"] = state.scale
                tensors[place, direction, "amax_history"] = state.amax_history
    return tensors


@torch.no_grad()
def overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value to its tensor with few kernel launches, since a decoding step waits for them."""
    if tensors:
        torch._foreach_copy_(tensors, values)


def _resized(history: Tensor, length: int) -> Tensor:
    """Return `history` [n, width] as [length, width]: row 0 and the newest rows,
    without the oldest or with zeros for them."""
    rows = min(len(history), length) - 1
    out = history.new_zeros(length, history.shape[1])
    out[0] = history[0]
    if rows:
        out[-rows:] = history[-rows:]
    return out
