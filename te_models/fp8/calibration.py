"""First scales for delayed scaling: the amaxes of every te.Linear's operands, measured on a batch in high precision.

Transformer Engine begins with scales of 1 and takes each scale from the amaxes of earlier steps (section 2.5 of
docs/internals/transformer_engine.md). Until then gradients below 2^-16, E5M2's smallest number, are zero. How many are
depends on the factor of the loss, and so on the number of processes and of micro-batches.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.config.recipe import Recipe
from te_models.distributed.collectives import largest
from te_models.fp8.primary_weights import is_quantized
from te_models.fp8.scaling_state import (
    WIDTHS,
    DelayedRecipe,
    DelayedState,
    delayed_states,
    fp8_max,
    gemms_of,
    make_state,
)
from te_models.numerics.scale_rules import delayed_update

# Of the amaxes of a module, forward and then backward, those that are measured; results of its GEMMs are not quantized.
INPUT = 0
WEIGHT = 1
GRADIENT = WIDTHS["scaling_fwd"]


Inputs = tuple[Any, ...]  # x, and the rows of each GEMM where there are several


class Probe:
    """Hooks on a te.Linear or te.GroupedLinear that note the amaxes of its operands in `amaxes`, FP32 [GEMMs, 5].

    The amax of an FP8 primary weight has been in its history since the weight was written. The probes of a model share
    `starts`, which gets the inputs of a pass to which gradients have to reach; None: other modules' inputs suffice.
    """

    def __init__(self, module: nn.Module, amaxes: Tensor, starts: list[Tensor] | None) -> None:
        self.amaxes = amaxes
        self.starts = starts
        self.rows: list[int] | None = None  # of each GEMM; None: there is one, for all rows
        self.hooks = [
            # Hooks and not a second forward: whatever wraps the module, such as an adapter, runs as in training.
            module.register_forward_pre_hook(self.before),
            module.register_forward_hook(self.after),
        ]

    def note(self, operand: int, tensors: Iterable[Tensor]) -> None:
        """Raise an amax of each GEMM to its tensor's."""
        for amaxes, tensor in zip(self.amaxes, tensors, strict=True):
            # An expert without tokens has no amax, and the norm of nothing raises.
            if tensor.numel():
                amaxes[operand].clamp_(min=torch.linalg.vector_norm(tensor.detach(), torch.inf))

    def before(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Note input and weight; return the arguments, of which the input then requires a gradient."""
        x, *others = inputs
        self.rows = others[0] if others else None
        self.note(INPUT, _by_gemm(x, self.rows))
        weights = []
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("weight"):
                weights.append(parameter)
        # An FP8 primary weight noted its amax when the optimizer wrote it.
        if not is_quantized(weights[0]):
            self.note(WEIGHT, weights)
        if not torch.is_grad_enabled():  # another thread evaluates the model
            return inputs
        x = x if x.requires_grad else x.detach().requires_grad_()  # nothing before it is trained
        # In backward the forward pass is a recompute, of other tensors.
        if self.starts is not None and torch._C._current_graph_task_id() == -1:
            self.starts.append(x)
        return (x, *others)

    def after(self, module: nn.Module, inputs: Inputs, output: Tensor) -> None:
        """Note the gradient of the output, once there is one."""
        # A frozen chain has no gradient to measure, and register_hook would raise.
        if output.requires_grad:
            # Bound now: a recompute or the next pass changes self.rows before the gradient arrives.
            rows = self.rows
            output.register_hook(lambda gradient: self.note(GRADIENT, _by_gemm(gradient, rows)))


def _by_gemm(tensor: Tensor, rows: list[int] | None) -> Sequence[Tensor]:
    """Return the rows of each GEMM. Under sequence parallelism an output has other rows than its input."""
    return (tensor,) if rows is None else tensor.split(rows)


class ModuleScaling(NamedTuple):
    """The scaling of a module: its recipe, the engine's object of it, and the processes that share its amaxes."""

    recipe: Recipe
    built: DelayedRecipe
    group: dist.ProcessGroup | None


class Measurement:
    """The amaxes of te.Linear and te.GroupedLinear modules, FP32 [GEMMs, 5] each.

    Args:
        modules: the te modules whose scales are measured.
        device: of the amaxes.
        first: those among them whose inputs depend on no other's: gradients have to reach these, and pass all others.
            None: all of them, whose inputs then stay in memory for the backward pass.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        first: Collection[nn.Module] | None = None,
    ) -> None:
        self.modules = modules
        self.first = set(modules if first is None else first)
        self.starts: list[Tensor] = []
        width = sum(WIDTHS.values())
        self.amaxes = [torch.zeros(gemms_of(module), width, device=device) for module in modules]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure what runs inside, in high precision."""
        with contextlib.ExitStack() as hooks:
            for module, amaxes in zip(self.modules, self.amaxes, strict=True):
                starts = self.starts if module in self.first else None
                for hook in Probe(module, amaxes, starts).hooks:
                    hooks.enter_context(hook)
            yield

    def backward(self, loss: Tensor) -> None:
        """Propagate gradients from `loss` to the inputs of the first modules.

        No parameter gets a gradient, nor do the hooks run by which DDP, FSDP2 and accumulation sum gradients.
        """
        # Not loss.backward: that would leave gradients on parameters, and call the hooks of DDP and FSDP2.
        # Experts without tokens, say, have no part in the loss.
        torch.autograd.grad(loss, self.starts, allow_unused=True)
        self.starts.clear()

    @torch.no_grad()
    def set_scales(self, scalings: Sequence[ModuleScaling]) -> None:
        """Give the modules the scales and histories that they would have after a step with these amaxes.

        `scalings` has one per module. All processes that share amaxes call this.
        """
        # Group -> (state of one direction of a module, its direction, how the module is scaled, its own amaxes).
        rows: dict[
            dist.ProcessGroup | None, list[tuple[DelayedState, str, ModuleScaling, Tensor]]
        ] = {}
        for module, amaxes, scaling in zip(self.modules, self.amaxes, scalings, strict=True):
            make_state(module, scaling.built)
            states = delayed_states(module)
            # Transformer Engine's amax ignores NaN too.
            finite = amaxes.nan_to_num(nan=0.0, posinf=torch.inf)
            parts = finite.split(list(WIDTHS.values()), dim=1)  # [GEMMs, 3] and [GEMMs, 2]
            for direction, part in zip(WIDTHS, parts, strict=True):
                state = states[f".{direction}"]
                # Row 0 may hold the amax of an FP8 primary weight already.
                amax = torch.maximum(part.flatten(), state.amax_history[0])
                rows.setdefault(scaling.group, []).append((state, direction, scaling, amax))
        for group, members in rows.items():
            # One collective for all modules of a group, in the order of the modules, which is the same on every rank.
            reduced = largest([amax for *_, amax in members], group)
            for (state, direction, scaling, amax), reduced_amax in zip(
                members, reduced, strict=True
            ):
                history, scale = delayed_update(
                    state.amax_history,
                    state.scale,
                    reduced_amax if scaling.built.reduce_amax else amax,
                    algorithm=scaling.built.amax_compute_algo,
                    margin=scaling.built.margin,
                    fp8_max=fp8_max(scaling.recipe, direction),
                )
                state.amax_history.copy_(history)
                state.scale.copy_(scale)


def _any_gradient(modules: Sequence[nn.Module], group: dist.ProcessGroup | None) -> bool:
    """Return whether a module, on any process, has had an amax of a gradient, or a scale from one."""
    states = [vars(module)["fp8_meta"].get("scaling_bwd") for module in modules]
    # Columns of a history repeat per GEMM: [dy, dx, dy, dx, ...].
    gradients = slice(0, None, WIDTHS["scaling_bwd"])
    recorded = []
    for state in states:
        if state is not None:
            recorded.append(
                (state.amax_history[:, gradients] != 0).any() | (state.scale[gradients] != 1).any()
            )
    device = next(modules[0].parameters()).device if modules else "cpu"
    flag = (
        torch.stack(recorded).any()
        if recorded
        else torch.zeros((), dtype=torch.bool, device=device)
    )
    return bool(largest([flag.byte()[None]], group)[0].item())


def unmeasured(
    modules: Sequence[nn.Module], group: dist.ProcessGroup | None, training: bool = False
) -> list[nn.Module]:
    """Return the te modules, under DelayedScaling, whose input has had no amax so far, with any expert on any process.

    With `training` they are all modules if no gradient of any has had one: the scales are then for inference alone.
    The processes of `group` call this together.
    """
    if training and not _any_gradient(modules, group):
        return list(modules)
    states = [vars(module)["fp8_meta"].get("scaling_fwd") for module in modules]
    inputs = slice(INPUT, None, WIDTHS["scaling_fwd"])
    recorded = []
    for state in states:
        if state is not None:
            recorded.append(
                (state.amax_history[:, inputs] != 0).any() | (state.scale[inputs] != 1).any()
            )
    # One copy to the host for all modules.
    flags = iter(largest([torch.stack(recorded).byte()], group)[0].tolist() if recorded else [])
    fresh = []
    for module, state in zip(modules, states, strict=True):
        if state is None or not next(flags):
            fresh.append(module)
    return fresh
