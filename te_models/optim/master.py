"""FP32 master weights, so that updates too small for BF16 are not lost.

A BF16 parameter has eight significant bits, so a step smaller than 1/256 of it rounds away. The optimizer therefore
works on FP32 copies, which are rounded into the parameters after each step (Micikevicius et al. 2018, arXiv
1710.03740).

Gradients are converted to FP32 a few parameters at a time, so that a step needs 1 GiB beyond the state for any model.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import TypeVar

import torch
from torch import Tensor, nn

from te_models.config.chunk_sizes import UPDATE_CHUNK
from te_models.device.choice import runs_triton
from te_models.distributed.dtensor import from_shard, local
from te_models.errors import CheckpointError, UsageError
from te_models.fp8.primary_weights import is_quantized, new_master, take_master
from te_models.optim.adamw import AdamW, Update
from te_models.optim.gradients import Gradients, Norm, chunks, clip_factor, gradient_norm, scale
from te_models.optim.groups import ParameterRows
from te_models.optim.host_copies import pinned_room, to_device, to_host
from te_models.optim.parameter_owners import Owners, placeholder
from te_models.optim.projected import ProjectedGradients
from te_models.optim.state_tensors import (
    Group,
    Options,
    State,
    Stateful,
    bytes_in,
    check_values,
    pack,
    state_after_step,
    unpack,
)

Live = TypeVar("Live")
Saved = TypeVar("Saved")
Pairs = list[tuple[nn.Parameter, Tensor]]  # parameters with their masters, or with new values


class MasterWeights:
    """Torch optimizers over FP32 copies of the parameters; FP32 parameters are their own masters.

    FP8 weights are quantized from their masters after each step, so that no update is lost to their few bits.

    Memory beyond the optimizers' own state: 4 bytes per parameter that is not FP32, and one chunk of FP32 gradients.

    Args:
        kind: the optimizer's name and options; state saved with others is refused.
        groups: groups of parts, as te_models.optim.groups makes them.
        build: makes the optimizers from the same groups, whose "params" are masters or rows of them. Together they
            update every one of those tensors.
        keep: False lets the optimizers update the parameters directly, whatever their dtype.
        owners: for parameters sharded over ranks, decides from the parameters which rank updates which; None: each rank
            updates its shards, which is right for elementwise optimizers.
        offload: store masters and state in CPU memory and step there. (torchao's CPUOffloadOptimizer steps on gradients
            as backward produces them, so it cannot clip by their common norm.)
        gradients: where the gradients of a step are.
        norm: computes the norm of all gradients; replace the default if they are sharded over ranks.
    """

    def __init__(
        self,
        kind: Options,
        groups: list[Group],
        build: Callable[[list[Group]], list[torch.optim.Optimizer]],
        *,
        keep: bool = True,
        offload: bool = False,
        owners: Callable[[list[nn.Parameter]], Owners] | None = None,
        gradients: Gradients | None = None,
        norm: Norm = gradient_norm,
    ) -> None:
        parts: list[ParameterRows] = []
        for group in groups:
            parts += group["params"]
        self.kind = kind
        self.gradients = gradients or Gradients()
        self.norm = norm
        # Several parts may be rows of one parameter, which has one master.
        by_id = {id(part.parameter): part.parameter for part in parts}
        self.parameters = list(by_id.values())
        self.owners = owners(self.parameters) if owners is not None else None
        if self.owners is None:
            self.masters = [_master(p, keep, offload) for p in self.parameters]
        else:
            # The whole master on one rank, and on the others nothing: Muon and GaLore need whole matrices.
            self.masters = [_owned_master(p, keep, self.owners) for p in self.parameters]
        self._offloaded = offload
        # Masters with bits that their parameters lack, so that both are saved. The copy of an FP32 parameter in CPU
        # memory, or on its owner, has no others.
        pairs = list(zip(self.parameters, self.masters, strict=True))
        self._copied = [is_quantized(p) or m.dtype != p.dtype for p, m in pairs]
        masters = dict(zip(map(id, self.parameters), self.masters, strict=True))
        views = {part: part.of(masters[id(part.parameter)]) for part in parts}
        self._views: dict[int, list[tuple[ParameterRows, Tensor]]] = {
            id(p): [] for p in self.parameters
        }
        for part, view in views.items():
            self._views[id(part.parameter)].append((part, view))
        view_groups = []
        for group in groups:
            # The optimizer updates the masters, not the parameters.
            view_groups.append({**group, "params": [views[part] for part in group["params"]]})
        self.optimizers = build(view_groups)
        if isinstance(self.gradients, ProjectedGradients):
            self.gradients.attach(self.optimizers, self._views)
        self._clip: Tensor | None = None  # factor of the gradients in the next step
        fused = all(
            isinstance(o, torch.optim.AdamW) and o.defaults["fused"] for o in self.optimizers
        )
        self.can_skip = fused and owners is None and not offload  # whether `skip_if` works
        whole_adamw = (
            owners is None
            and all(isinstance(o, AdamW) for o in self.optimizers)
            and all(part.stop is None for part in parts)
            and all(local(m).is_contiguous() for m in self.masters)
        )
        # Whether one kernel does all that a step does.
        self._at_once = (
            whole_adamw and self.can_skip and all(runs_triton(m.device) for m in self.masters)
        )
        # Whether a step clips, updates and rounds block by block. Where all parameters are FP32 and their own masters,
        # nothing is converted or rounded, and blocks took 3 % longer on one core.
        self._on_cpu = (
            whole_adamw
            and any(m is not p for p, m in pairs)
            and all(m.device.type == "cpu" for m in self.masters)
            and all(is_quantized(p) or local(p).is_contiguous() for p in self.parameters)
        )

    @property
    def param_groups(self) -> list[Group]:
        """The groups of all optimizers."""
        groups: list[Group] = []
        for optimizer in self.optimizers:
            groups += optimizer.param_groups
        return groups

    @property
    def saved_masters(self) -> Pairs:
        """The masters of `state_dict`, with their parameters: an FP32 one, which needs none, is not among them."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return list(compress(pairs, self._copied))

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps; a group with "lr_scale" gets that multiple of it."""
        for group in self.param_groups:
            set_group_rate(group, rate)

    @torch.no_grad()
    def take_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients of the next step to the norm `max_norm` (0: do not clip).

        Returns their norm before clipping, an FP32 scalar. Computed in BF16 it would be off by up to 1/256.
        """
        used = self._with_gradients()
        # Over all parameters before any is updated: clipping scales all of them by one factor.
        norm = self.norm(list(used), list(used.values()))
        self._clip = clip_factor(norm, max_norm)
        return norm

    def _with_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return parameter -> gradient; parameters that the step did not use have none, and are not updated."""
        used = {}
        for parameter in self.parameters:
            gradient = self.gradients.of(parameter)
            if gradient is not None:
                used[parameter] = gradient
        return used

    def skip_if(self, bad: Tensor) -> None:
        """Make the next step change nothing if `bad` (a bool scalar on the device), without waiting for its value."""
        self._set_found_inf(bad.float())

    def _set_found_inf(self, bad: Tensor | None) -> None:
        for optimizer in self.optimizers:
            optimizer.found_inf = bad  # type: ignore[attr-defined]  # read by fused AdamW; set so by torch's GradScaler

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient, and drop the gradients."""
        used = self._with_gradients()
        # A parameter may be its own master: an optimizer updates all that have a gradient.
        for parameter in used:
            self.gradients.drop(parameter)
        masters = dict(zip(self.parameters, self.masters, strict=True))
        if self._at_once:
            self._update_at_once([(p, masters[p], gradient) for p, gradient in used.items()])
            used.clear()
        # A chunk at a time: gradients in FP32 of all parameters at once would take as much memory as the masters.
        for parameters in chunks(list(used), UPDATE_CHUNK):
            chunk = [(parameter, masters[parameter]) for parameter in parameters]
            # Taken out one by one, so that a gradient is freed once its copy for the master exists.
            gradients = (used.pop(parameter) for parameter in parameters)
            if self._on_cpu:
                self._update_on_cpu(chunk, gradients)
            else:
                self._update_by_passes(chunk, gradients)
        self._clip = None
        if self.can_skip:
            self._set_found_inf(None)

    def _update_by_passes(self, chunk: Pairs, used: Iterable[Tensor]) -> None:
        """Update parameters, given with their masters, from their gradients `used`, one operation after the other."""
        self._hand_over(chunk, used)
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter, _ in chunk:
            for _, view in self._views[id(parameter)]:
                # Dropped before the values are spread, which needs memory of its own; also an optimizer updates all
                # that have one.
                view.grad = None
        values = self._values(chunk)
        copies = []
        for p, v in values:
            # A parameter that is its own master has its value; FP8 weights are cast below, with their scales.
            if v is not p and not is_quantized(p):
                copies.append((p, v))
        targets = [local(p) for p, _ in copies]
        new = [local(v) for _, v in copies]
        if self._offloaded:
            to_device(targets, new)
        elif copies:
            torch._foreach_copy_(targets, new)
        for parameter, value in values:
            if is_quantized(parameter):
                take_master(parameter, value)

    def _update_on_cpu(self, chunk: Pairs, used: Iterable[Tensor]) -> None:
        """Update parameters, given with their masters in CPU memory, from their gradients `used`, block by block."""
        gradients = list(used)
        if self._offloaded:
            gradients = to_host(gradients)
        updates = []
        rounded = []  # values in CPU memory of parameters on a GPU
        for (parameter, master), gradient in zip(chunk, gradients, strict=True):
            target = None
            if master is not parameter and not is_quantized(parameter):
                target = parameter
                if self._offloaded:
                    target = pinned_room(parameter)
                    rounded.append((parameter, target))
            updates.append(Update(master, gradient, target))
        for optimizer in self.optimizers:
            assert isinstance(optimizer, AdamW)
            optimizer.update_on_cpu(updates, self._clip)
        for parameter, value in rounded:
            # The pinned memory is not used again before the copy has ended.
            parameter.copy_(value, non_blocking=True)
        for parameter, master in chunk:
            if is_quantized(parameter):
                take_master(parameter, master)

    def _update_at_once(self, used: list[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
        """Update parameters, given with their masters and gradients, in one kernel per group and kind of tensors."""
        updates = []
        for parameter, master, gradient in used:
            # The kernel rounds the master into a BF16 parameter in the same pass; FP8 needs a scale first.
            copied = master is not parameter and not is_quantized(parameter)
            updates.append(Update(master, gradient, parameter if copied else None))
        for optimizer in self.optimizers:
            assert isinstance(optimizer, AdamW)
            optimizer.update(updates, self._clip)
        for parameter, master, _ in used:
            if is_quantized(parameter):
                take_master(parameter, master)

    def _hand_over(self, chunk: Pairs, used: Iterable[Tensor]) -> None:
        """Give the masters, or their rows, the gradients `used` of their parameters in the masters' dtype, clipped."""
        gradients = []
        for (parameter, master), summed in zip(chunk, self._gradients(chunk, used), strict=True):
            if summed is None:  # another rank updates it
                continue
            gradient = summed.to(master)
            for part, view in self._views[id(parameter)]:
                self.gradients.hand_over(part, view, gradient)
            gradients.append(gradient)
        if self._clip is not None and gradients:
            scale([local(gradient) for gradient in gradients], self._clip)

    def _gradients(self, chunk: Pairs, used: Iterable[Tensor]) -> Iterable[Tensor | None]:
        """Return each parameter's gradient, where its master is; with owners the whole one on the owner, else None."""
        dtypes = [master.dtype for _, master in chunk]
        if self._offloaded:
            return to_host(used, dtypes)
        if self.owners is None:
            return used
        return self.owners.collect(
            [p for p, _ in chunk], [local(gradient) for gradient in used], dtypes
        )

    def _values(self, chunk: Pairs) -> Pairs:
        """Return each parameter with its new value: its master, or this rank's shard of it."""
        if self.owners is None:
            return chunk
        parameters = [p for p, _ in chunk]
        dtypes = []
        for parameter in parameters:
            dtypes.append(torch.float32 if is_quantized(parameter) else parameter.dtype)
        shards = self.owners.distribute(parameters, [m for _, m in chunk], dtypes)
        return list(zip(parameters, shards, strict=True))

    def state_dict(self) -> State:
        """Return the optimizers' state as plain tensors and `saved_masters`, in the order of the groups.

        Tensors that another rank owns are placeholders: `fetch` brings their values.
        """
        state = []
        for optimizer, _, view in self._stateful():
            values = optimizer.state.get(view, {})
            state.append({name: pack(value) for name, value in values.items()})
        if self.owners is not None:
            state = self.owners.completed(state, self._owners_of("state"))
        return {
            "kind": self.kind,
            "state": state,
            "masters": [m.detach() for m in compress(self.masters, self._copied)],
        }

    def state_bytes(self) -> int:
        """Return the size of `state_dict` once every parameter has been updated."""
        size = sum(bytes_in(master) for master in compress(self.masters, self._copied))
        for optimizer, group, view in self._stateful():
            size += bytes_in(state_after_step(optimizer, view, group))
        return size

    def fetch(self, kind: str, index: int, tensor: Tensor) -> Tensor:
        """Return a tensor of `state_dict()[kind][index]` with its values; `kind` is "state" or "masters"."""
        if self.owners is None:
            return tensor
        return self.owners.fetch(tensor, self._owners_of(kind)[index])

    def _owners_of(self, kind: str) -> list[int]:
        """Return the owner of each entry of `state_dict()[kind]`."""
        assert self.owners is not None
        if kind == "masters":
            return [
                self.owners.of(parameter) for parameter in compress(self.parameters, self._copied)
            ]
        parameter_of = {}
        for parameter in self.parameters:
            for _, view in self._views[id(parameter)]:
                parameter_of[id(view)] = parameter
        return [self.owners.of(parameter_of[id(view)]) for _, _, view in self._stateful()]

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Load what `state_dict` returned, into an optimizer of parameters that have their saved values again.

        Raises:
            ValueError: it is of another optimizer or of other parameters.
        """
        self.check_state_dict(state)
        for parameter, master, copied in zip(
            self.parameters, self.masters, self._copied, strict=True
        ):
            # Masters of the parameters' dtype are not saved themselves.
            if copied or master is parameter:
                continue
            whole: Tensor | None = parameter
            if self.owners is not None:
                (whole,) = self.owners.collect([parameter], [local(parameter)])
            if whole is not None:  # None: another process owns it
                master.copy_(whole)
        for (optimizer, group, view), saved in self._own(self._stateful(), state["state"], "state"):
            optimizer.state[view] = {
                name: unpack(value, name, view, group) for name, value in saved.items()
            }
        self.gradients.state_loaded()
        for master, saved in self._own(
            compress(self.masters, self._copied), state["masters"], "masters"
        ):
            master.copy_(saved)

    def without_equal_masters(self, state: State) -> State:
        """Return saved state without the masters that only repeat their parameters.

        Earlier versions saved all masters of an optimizer in CPU memory, also of FP32 parameters.
        """
        masters = state.get("masters") if isinstance(state, dict) else None
        if not isinstance(masters, list) or len(masters) != len(self.parameters):
            return state
        return {**state, "masters": list(compress(masters, self._copied))}

    def check_state_dict(self, state: State) -> None:
        """Raise ValueError unless `load_state_dict` can load `state`; nothing is written.

        Names, shapes and dtypes of all tensors are compared, and all values are finite.
        """
        copies = list(compress(self.masters, self._copied))
        stateful = list(self._stateful())
        check_kind(self.kind, state, masters=len(copies), state=len(stateful))
        for number, (master, saved) in enumerate(self._own(copies, state["masters"], "masters")):
            check_values(saved, master, f"masters.{number}")
        for number, ((optimizer, group, view), saved) in enumerate(
            self._own(stateful, state["state"], "state")
        ):
            # An empty state belongs to a parameter that never had a gradient.
            if not isinstance(saved, dict) or saved:
                assert isinstance(optimizer, Stateful), (
                    f"{type(optimizer).__name__} has no expected_state"
                )
                check_values(saved, optimizer.expected_state(view, group), f"state.{number}")

    def _own(
        self, live: Iterable[Live], saved: Iterable[Saved], kind: str
    ) -> Iterator[tuple[Live, Saved]]:
        """Pair live with saved entries of `state_dict()[kind]`; only those that this rank updates."""
        pairs = zip(live, saved, strict=True)
        if self.owners is None:
            return pairs
        rank = self.owners.rank
        return compress(pairs, [owner == rank for owner in self._owners_of(kind)])

    def masters_by_id(self) -> dict[int, Tensor]:
        """Return the FP32 values of each parameter by its id.

        With owners, only the masters of FP8 weights, as shards in their nominal dtype.
        """
        if self.owners is None:
            return dict(zip(map(id, self.parameters), self.masters, strict=True))
        fp8 = []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if is_quantized(parameter):
                fp8.append((parameter, master))
        parameters = [p for p, _ in fp8]
        shards = self.owners.distribute(
            parameters, [m for _, m in fp8], [p.dtype for p in parameters]
        )
        return {id(p): from_shard(values, p) for p, values in zip(parameters, shards, strict=True)}

    def _stateful(self) -> Iterator[tuple[torch.optim.Optimizer, Group, Tensor]]:
        """Yield every tensor that an optimizer updates, with the optimizer and its group."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from ((optimizer, group, view) for view in group["params"])


def _master(parameter: nn.Parameter, keep: bool, offload: bool) -> Tensor:
    """Return the tensor that the optimizer updates."""
    dtype = torch.float32 if keep else parameter.dtype
    if is_quantized(parameter):
        if not keep:
            raise UsageError(
                "this optimizer updates weights without FP32 masters, which FP8 primary weights need: choose another"
            )
        master = new_master(parameter)
        return master.to("cpu") if offload else master
    if offload:
        # Pinned, so that copies to and from the device do not wait.
        master = parameter.detach().to("cpu", dtype, copy=True)
        return master.pin_memory() if parameter.is_cuda else master
    return parameter if parameter.dtype == dtype else parameter.detach().to(dtype)


def _owned_master(parameter: nn.Parameter, keep: bool, owners: Owners) -> Tensor:
    """Return the whole master on the rank that owns the parameter, a placeholder on the others."""
    dtype = torch.float32 if keep else parameter.dtype
    shard = local(_master(parameter, keep, offload=False)).detach()
    (whole,) = owners.collect([parameter], [shard])
    return placeholder(parameter.shape, dtype, shard.device) if whole is None else whole


def set_group_rate(group: Group, rate: float) -> None:
    """Set a group's learning rate, in place if it is a tensor, as torchao's compiled step needs."""
    rate *= group.get("lr_scale", 1.0)
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def check_kind(kind: Options, saved: object, /, **counts: int) -> None:
    """Raise a ValueError if saved state is of an optimizer with another name or other options, or of another model.

    `counts` are the numbers of entries of its lists.
    """
    then = saved.get("kind") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not isinstance(then, dict):
        raise UsageError(
            "the optimizer's state was saved by an older version: start a new run from it with --model"
        )
    for name in kind:
        if then.get(name) == kind[name]:
            continue
        raise UsageError(
            f"the optimizer's state was saved with {name}={then.get(name)!r}, not {kind[name]!r}: resume with the "
            "same, or start a new run from the checkpoint with --model"
        )
    for name, count in counts.items():
        if not isinstance(saved.get(name), list) or len(saved[name]) != count:
            raise CheckpointError(
                f"the optimizer's state is of another model: {name} does not have {count} entries"
            )
