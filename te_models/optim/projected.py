"""Gradients that GaLore projects as backward makes them, so that no full gradient of a hidden matrix is kept.

GaLore's update needs P^T G [r, n] of a gradient G [m, n] alone. A hook on each parameter computes it as soon as
backward has the gradient, adds it to the sum of the step's micro-batches, and frees the gradient. What remains of a
matrix is r n elements instead of m n.

Three things differ from GaLore on full gradients: the norm by which a step is clipped is of the projected gradients,
which is at most the full one; a new projector is computed from the gradient of the step's first micro-batch; and sums
of micro-batches are of projections. Without clipping, and with one micro-batch per step, every bit is the same.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.layer import Role
from te_models.device.cuda_capture import without_ownership
from te_models.errors import UsageError
from te_models.optim.galore import GaLore, Projected, as_wide, leading_directions
from te_models.optim.gradients import Gradients, GradientSums
from te_models.optim.groups import ParameterRows
from te_models.optim.state_tensors import State


@dataclass(eq=False)
class _Part:
    """The rows of a parameter that an optimizer updates at a time, with the sum of their gradients.

    Attributes:
        rows: which they are.
        place: of their sum among the parameter's sums.
        shape: of their sum: of the rows, or projected [r, n].
        projector: FP32 [m, r] at an address that stays, since a CUDA graph reads it; None: the rows are not projected.
        optimizer: updates them.
        view: what it updates: a master, or rows of one.
        refresh: its steps between two projectors.
    """

    rows: ParameterRows
    place: slice
    shape: torch.Size
    projector: Tensor | None
    refresh: int
    optimizer: GaLore | None = None
    view: Tensor | None = None

    @property
    def state(self) -> State:
        """The optimizer's state of these rows; empty before the first step."""
        if self.optimizer is None or self.view is None:
            return {}
        return self.optimizer.state.get(self.view, {})

    @property
    def due(self) -> bool:
        """True if the next step needs a new projector."""
        return self.projector is not None and self.state.get("step", 0) % self.refresh == 0

    def take_saved_projector(self) -> None:
        """Use the projector of state that was loaded since, at the own address."""
        saved = self.state.get("projector")
        if self.projector is not None and saved is not None and saved is not self.projector:
            self.projector.copy_(saved)
            self.state["projector"] = self.projector

    def of(self, sums: Tensor) -> Tensor:
        """Return the sum of these rows, a view into the parameter's sums."""
        return sums[self.place].view(self.shape)

    def add(self, gradient: Tensor, sums: Tensor, first: bool) -> None:
        """Add the gradient of a micro-batch, of the parameter's shape, to its sums; of the first, replace them."""
        projected = self.rows.of(gradient).float()
        if self.projector is not None:
            wide = as_wide(projected)
            if first and self.due:
                # A gradient that is not finite ends or repeats the step; it has no directions.
                finite = wide.isfinite().all()
                if wide.is_meta or bool(finite):
                    rank = self.projector.shape[1]
                    seed = self.state.get("step", 0)
                    self.projector.copy_(leading_directions(wide, rank, seed))
            projected = self.projector.mT @ wide
        if first:
            self.of(sums).copy_(projected)
        else:
            self.of(sums).add_(projected)


class ProjectedGradients(Gradients):
    """The projected gradients of hidden matrices, and the gradients of all other parameters as `rest` has them.

    The sums of a parameter are one FP32 tensor without its shape: the parts of a fused projection follow each other,
    and those that are not projected, such as the rows of a headwise gate, are whole. They exist from backward to the
    update, and all the time in a run of several micro-batches, whose CUDA graphs share them.

    Args:
        rows: the parts of all parameters (te_models.optim.groups.parts).
        rank: the rank of GaLore.
        refresh: steps between two projectors.
        rest: the gradients of the parameters without a projected part (`projected_parameters`).
    """

    def __init__(
        self, rows: Sequence[ParameterRows], rank: int, refresh: int, rest: Gradients
    ) -> None:
        self.rest = rest
        self.parameters = projected_parameters(rows, rank)
        member_ids = set(map(id, self.parameters))
        of_parameter: dict[int, list[ParameterRows]] = {}
        for part in rows:
            if id(part.parameter) in member_ids:
                of_parameter.setdefault(id(part.parameter), []).append(part)
        self._parts: dict[int, list[_Part]] = {}
        self._sums: dict[int, Tensor] = {}
        self.keeps_sums = isinstance(rest, GradientSums)
        for key, members in of_parameter.items():
            shapes = [_sum_shape(part, rank) for part in members]
            device = members[0].parameter.device
            self._parts[key] = []
            start = 0
            for part, shape in zip(members, shapes, strict=True):
                place = slice(start, start + shape.numel())
                start = place.stop
                projector = None
                if is_projected(part.role, _shape(part), rank):
                    projector = torch.zeros(min(_shape(part)), rank, device=device)
                self._parts[key].append(_Part(part, place, shape, projector, refresh))
            if self.keeps_sums:
                self._new_sums(key)
        self._used: set[int] = set()  # the parameters with a gradient in this step
        self._begun: set[int] = set()  # those whose sums belong to this step

    @property
    def changes_projectors(self) -> bool:
        """True if the next step computes new projectors, which no CUDA graph can."""
        return any(part.due for part in itertools.chain(*self._parts.values()))

    def attach(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        views: dict[int, list[tuple[ParameterRows, Tensor]]],
    ) -> None:
        """Take note of the optimizer and of the views of masters by the id of their parameter."""
        owner: dict[int, GaLore] = {}
        for optimizer in optimizers:
            if isinstance(optimizer, GaLore):
                for group in optimizer.param_groups:
                    owner.update((id(view), optimizer) for view in group["params"])
        for key, parts in self._parts.items():
            view_at = {rows.start: view for rows, view in views[key]}
            for part in parts:
                part.view = view_at[part.rows.start]
                part.optimizer = owner.get(id(part.view))

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's sums, without its shape; None if the step did not use the parameter."""
        if id(parameter) not in self._parts:
            return self.rest.of(parameter)
        if parameter.grad is not None:
            raise UsageError(
                "a gradient that GaLore is to project in backward was made outside: call backward inside "
                "`optimizer.gradients.collecting()`"
            )
        return self._sums[id(parameter)] if id(parameter) in self._used else None

    def hand_over(self, part: ParameterRows, view: Tensor, gradient: Tensor) -> None:
        """Give the optimizer the projected gradient of `view`, from what `of` returned for its parameter."""
        parts = self._parts.get(id(part.parameter))
        if parts is None:
            self.rest.hand_over(part, view, gradient)
            return
        candidate = next(candidate for candidate in parts if candidate.rows.start == part.start)
        values = candidate.of(gradient)
        if candidate.projector is None:
            view.grad = values
        else:
            assert candidate.optimizer is not None
            candidate.optimizer.projected[view] = Projected(values, candidate.projector)

    def drop(self, parameter: nn.Parameter) -> None:
        """Free the parameter's gradient, or its sums unless the next step reuses them."""
        if id(parameter) not in self._parts:
            self.rest.drop(parameter)
        elif not self.keeps_sums:
            self._sums.pop(id(parameter), None)
            self._used.discard(id(parameter))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Project the gradients of all backward passes inside; the first of a parameter replaces its last sum."""
        self._begin()
        with self.rest.collecting(), ExitStack() as hooks:
            for parameter in self.parameters:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._add))
            yield

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Surround forward and backward of a micro-batch; see `Gradients.micro_batch`."""
        if first:
            self._begin()
        with self.rest.micro_batch(first, last):
            yield
        if first and self.keeps_sums:
            # Further micro-batches add to all sums, whichever parameters they use.
            unused = [total for key, total in self._sums.items() if key not in self._begun]
            if unused:
                torch._foreach_zero_(unused)
            self._begun.update(self._sums)

    def state_loaded(self) -> None:
        """Use the projectors of the optimizer's state, which has been loaded."""
        for parts in self._parts.values():
            for part in parts:
                part.take_saved_projector()

    def last_micro_batch(self) -> None:
        """Announce that the next backward pass is the last of the step."""
        self.rest.last_micro_batch()

    def snapshot(self, parameters: Sequence[nn.Parameter]) -> object:
        """Return which gradients the step has left, for `restore`."""
        return frozenset(self._used), dict(self._sums), self.rest.snapshot(parameters)

    def without_ownership(self, snapshot: Any) -> object:
        """Return what `snapshot` returned for a captured step, without keeping the memory that its graph writes to."""
        used, sums, rest = snapshot
        if not self.keeps_sums:  # which no graph makes
            sums = {key: without_ownership(total) for key, total in sums.items()}
        return used, sums, self.rest.without_ownership(rest)

    def restore(self, parameters: Sequence[nn.Parameter], snapshot: Any) -> None:
        """Note what a replayed step has written again."""
        used, sums, rest = snapshot
        self._used = set(used)
        self._sums = dict(sums)
        self.rest.restore(parameters, rest)

    def _begin(self) -> None:
        self._used.clear()
        self._begun.clear()
        if not self.keeps_sums:  # left by a step whose backward was abandoned
            self._sums.clear()

    def _new_sums(self, key: int) -> None:
        parts = self._parts[key]
        device = parts[0].rows.parameter.device
        # Zeros for a graph of further micro-batches, which adds to sums that the first one may not have used.
        make = torch.zeros if self.keeps_sums else torch.empty
        self._sums[key] = make(parts[-1].place.stop, device=device)

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Project the gradient that backward has just completed, and free it."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        key = id(parameter)
        if key not in self._sums:
            self._new_sums(key)
        for part in self._parts[key]:
            part.add(gradient, self._sums[key], first=key not in self._begun)
        self._used.add(key)
        self._begun.add(key)


def is_projected(role: Role, shape: Sequence[int], rank: int) -> bool:
    """Return whether GaLore projects the gradient of a matrix of this role and shape."""
    return role == "hidden" and len(shape) == 2 and min(shape) > rank


def projected_parameters(rows: Sequence[ParameterRows], rank: int) -> list[nn.Parameter]:
    """Return the parameters of which at least one part is projected, in the order of their parts."""
    parameters = {}
    for part in rows:
        if is_projected(part.role, _shape(part), rank):
            parameters[id(part.parameter)] = part.parameter
    return list(parameters.values())


def sum_elements(shape: Sequence[int], rank: int) -> int:
    """Return the elements of the projected gradient of a matrix."""
    return rank * max(shape)


def _shape(part: ParameterRows) -> torch.Size:
    shape = part.parameter.shape
    if part.stop is None:
        return shape
    return torch.Size([part.stop - part.start, *shape[1:]])


def _sum_shape(part: ParameterRows, rank: int) -> torch.Size:
    shape = _shape(part)
    if is_projected(part.role, shape, rank):
        return torch.Size([rank, max(shape)])
    return shape
