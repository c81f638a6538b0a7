"""FP32 master weights: updates that BF16 cannot hold are not lost.

A BF16 parameter has eight significant bits, so a step smaller than 1/256 of it rounds away; the optimizer therefore
works on FP32 copies, which are rounded into the parameters after each step (Micikevicius et al. 2018, arXiv 1710.03740).

Gradients become FP32 a few parameters at a time, so that a step needs 1 GiB beside the state, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from te_models.distributed.dtensor import local, pieces
from te_models.fp8.primary_weights import is_quantized, new_master, take_master
from te_models.optim.groups import Part
from te_models.optim.parameter_owners import Owners, placeholder
from te_models.optim.state_tensors import pack, unpack

CHUNK = 2**28  # parameters updated at a time


class MasterWeights:
    """Torch optimizers over FP32 copies of the parameters; FP32 parameters are their own masters.

    An FP8 weight is quantized again from its master after each step, so that no update is lost to its few bits.

    Memory beyond the optimizers' own state: 4 bytes a parameter that is not FP32, and one chunk of FP32 gradients.

    Args:
        kind: what the saved state is of: the optimizer's name and options; another kind's is refused.
        groups: groups of parts, as te_models.optim.groups makes them.
        build: makes the optimizers from the same groups with masters, or rows of them, as "params". Between them they
            update every one of those tensors.
        keep: False lets the optimizers work on the parameters themselves, whatever their dtype.
        owners: makes, of the parameters, who updates which where they lie in pieces on several ranks; None: each rank
            updates its pieces, which optimizers that work element by element can.
        offload: masters and state live in the CPU's memory, where the step then happens. (torchao's
            CPUOffloadOptimizer steps on gradients as backward leaves them, so it cannot clip by their common norm.)
    """

    def __init__(
        self,
        kind: dict[str, Any],
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], list[torch.optim.Optimizer]],
        *,
        keep: bool = True,
        offload: bool = False,
        owners: Callable[[list[nn.Parameter]], Owners] | None = None,
    ) -> None:
        parts: list[Part] = [part for group in groups for part in group["params"]]
        self.kind = kind
        self.parameters: list[nn.Parameter] = list({id(p.parameter): p.parameter for p in parts}.values())
        self.owners = owners(self.parameters) if owners is not None else None
        if self.owners is None:
            self.masters = [_master(p, keep, offload) for p in self.parameters]
        else:
            self.masters = [_owned_master(p, keep, self.owners) for p in self.parameters]
        self._copied = [_is_copy(p, m, self.owners) for p, m in zip(self.parameters, self.masters, strict=True)]
        masters = dict(zip(map(id, self.parameters), self.masters, strict=True))
        views = {part: part.of(masters[id(part.parameter)]) for part in parts}
        self._views: dict[int, list[tuple[Part, Tensor]]] = {id(p): [] for p in self.parameters}
        for part, view in views.items():
            self._views[id(part.parameter)].append((part, view))
        self.optimizers = build([{**group, "params": [views[part] for part in group["params"]]} for group in groups])
        # te_models.training.parallel puts another one here where gradients lie in pieces on several ranks.
        self.gradient_norm: Callable[[list[nn.Parameter]], Tensor] = gradient_norm
        self._shrink: Tensor | None = None  # what the next step multiplies gradients with
        fused = all(isinstance(o, torch.optim.AdamW) and o.defaults["fused"] for o in self.optimizers)
        self.can_skip = fused and owners is None and not offload  # whether `skip_if` works

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' groups."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_learning_rate(self, rate: float) -> None:
        """For the next steps; a group with "lr_scale" takes that multiple of it."""
        for group in self.param_groups:
            set_group_rate(group, rate)

    @torch.no_grad()
    def take_gradients(self, max_norm: float) -> Tensor:
        """Have the next step scale the gradients down to `max_norm` (0: not clipped).

        Returns their norm before clipping, FP32 scalar. In BF16 the norm itself would be off by up to 1/256.
        """
        norm = self.gradient_norm(self.parameters)
        self._shrink = clip_factor(norm, max_norm)
        return norm

    def skip_if(self, bad: Tensor) -> None:
        """Have the next step change nothing if `bad` (bool scalar on the device), which the host need not know."""
        self._tell_optimizers(bad.float())

    def _tell_optimizers(self, bad: Tensor | None) -> None:
        for optimizer in self.optimizers:
            optimizer.found_inf = bad  # type: ignore[attr-defined]  # where torch.amp.GradScaler says the same

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' gradients, which are then gone; parameters without one stay."""
        for chunk in self._chunks():
            self._hand_over(chunk)
            for optimizer in self.optimizers:
                optimizer.step()
            for parameter, _ in chunk:
                parameter.grad = None
                for _, view in self._views[id(parameter)]:
                    view.grad = None
            values = self._values(chunk)
            copies = [(p, v) for p, v in values if v is not p and not is_quantized(p)]
            if copies:
                torch._foreach_copy_([local(p) for p, _ in copies], [local(v) for _, v in copies])
            for parameter, value in values:
                if is_quantized(parameter):
                    take_master(parameter, value)
        self._shrink = None
        if self.can_skip:
            self._tell_optimizers(None)

    def _chunks(self) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
        """The parameters that have a gradient with their masters, about CHUNK elements at a time."""
        chunk: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                continue
            if chunk and sum(p.numel() for p, _ in chunk) + parameter.numel() > CHUNK:
                yield chunk
                chunk = []
            chunk.append((parameter, master))
        if chunk:
            yield chunk

    def _hand_over(self, chunk: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give the masters, or their rows, the gradients of their parameters in the masters' dtype, clipped."""
        gradients = []
        for (parameter, master), found in zip(chunk, self._gradients(chunk), strict=True):
            parameter.grad = None
            if found is None:  # another rank's to update
                continue
            gradient = found.to(master)
            for part, view in self._views[id(parameter)]:
                view.grad = part.of(gradient)
            gradients.append(gradient)
        if self._shrink is not None and gradients:
            own = [local(gradient) for gradient in gradients]
            torch._foreach_mul_(own, self._shrink.to(own[0].device))

    def _gradients(self, chunk: list[tuple[nn.Parameter, Tensor]]) -> Iterable[Tensor | None]:
        """Each parameter's gradient, or whole where this rank owns it."""
        if self.owners is None:
            return (p.grad for p, _ in chunk)
        return self.owners.collect([p for p, _ in chunk], [local(p.grad) for p, _ in chunk])  # type: ignore[arg-type]

    def _values(self, chunk: list[tuple[nn.Parameter, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with what it is now to be: its master, or this rank's piece of it."""
        if self.owners is None:
            return chunk
        parameters = [p for p, _ in chunk]
        dtypes = [torch.float32 if is_quantized(p) else p.dtype for p in parameters]
        return list(zip(parameters, self.owners.distribute(parameters, [m for _, m in chunk], dtypes), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' state as plain tensors, and the masters that are copies, in the order of the groups.

        Tensors that another rank owns have no values here: `fetch` brings them.
        """
        state = [
            {name: pack(value) for name, value in optimizer.state.get(view, {}).items()}
            for optimizer, _, view in self._stateful()
        ]
        if self.owners is not None:
            state = self.owners.completed(state, self._owners_of("state"))
        return {
            "kind": self.kind,
            "state": state,
            "masters": [m.detach() for m in compress(self.masters, self._copied)],
        }

    def fetch(self, kind: str, index: int, tensor: Tensor) -> Tensor:
        """On every rank, the values of a tensor of `state_dict()[kind][index]`, kind "state" or "masters"."""
        return tensor if self.owners is None else self.owners.fetch(tensor, self._owners_of(kind)[index])

    def _owners_of(self, kind: str) -> list[int]:
        """The owner of each entry of `state_dict()[kind]`."""
        assert self.owners is not None
        if kind == "masters":
            return [self.owners.of(parameter) for parameter in compress(self.parameters, self._copied)]
        found = {id(view): p for p in self.parameters for _, view in self._views[id(p)]}
        return [self.owners.of(found[id(view)]) for _, _, view in self._stateful()]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; a ValueError if it is of another optimizer or of other parameters."""
        check_kind(self.kind, state.get("kind"))
        copies = list(compress(self.masters, self._copied))
        stateful = list(self._stateful())
        if [m.shape for m in state["masters"]] != [m.shape for m in copies] or len(state["state"]) != len(stateful):
            raise ValueError("the optimizer's state is of another model")
        if self.owners is None:
            mine = [True] * len(stateful), [True] * len(copies)
        else:
            mine = tuple([o == self.owners.rank for o in self._owners_of(kind)] for kind in ("state", "masters"))
            self._take_parameters(self.owners)
        for (optimizer, group, view), saved in compress(zip(stateful, state["state"], strict=True), mine[0]):
            optimizer.state[view] = {name: unpack(value, name, view, group) for name, value in saved.items()}
        for master, saved in compress(zip(copies, state["masters"], strict=True), mine[1]):
            master.copy_(saved)

    def _take_parameters(self, owners: Owners) -> None:
        """Give owners the values that parameters have now, where these are all that is saved of them."""
        for parameter, master, copied in zip(self.parameters, self.masters, self._copied, strict=True):
            if not copied:
                (found,) = owners.collect([parameter], [local(parameter)])
                master.copy_(found) if found is not None else None

    def masters_by_id(self) -> dict[int, Tensor]:
        """The FP32 values of each parameter, by its id; of those that owners keep, FP8 weights' alone, in pieces of
        their nominal dtype."""
        if self.owners is None:
            return dict(zip(map(id, self.parameters), self.masters, strict=True))
        fp8 = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if is_quantized(p)]
        parameters = [p for p, _ in fp8]
        own = self.owners.distribute(parameters, [m for _, m in fp8], [p.dtype for p in parameters])
        return {id(p): pieces(values, p) for p, values in zip(parameters, own, strict=True)}

    def _stateful(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor]]:
        """Every tensor that an optimizer updates, with the optimizer and its group."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from ((optimizer, group, view) for view in group["params"])


def _master(parameter: nn.Parameter, keep: bool, offload: bool) -> Tensor:
    """The tensor that the optimizer works on."""
    dtype = torch.float32 if keep else parameter.dtype
    if is_quantized(parameter):
        if not keep:
            raise ValueError(
                "this optimizer keeps its own masters, which FP8 primary weights cannot use: choose another"
            )
        master = new_master(parameter)
        return master.to("cpu") if offload else master
    if offload:
        master = parameter.detach().to("cpu", dtype, copy=True)
        return master.pin_memory() if parameter.is_cuda else master
    return parameter if parameter.dtype == dtype else parameter.detach().to(dtype)


def _is_copy(parameter: nn.Parameter, master: Tensor, owners: Owners | None) -> bool:
    """Whether the master knows what its parameter does not, so that both are saved."""
    return master is not parameter if owners is None else is_quantized(parameter) or master.dtype != parameter.dtype


def _owned_master(parameter: nn.Parameter, keep: bool, owners: Owners) -> Tensor:
    """The whole tensor that the optimizer of the parameter's owner works on; a placeholder on other ranks."""
    dtype = torch.float32 if keep else parameter.dtype
    own = local(_master(parameter, keep, offload=False)).detach()
    (found,) = owners.collect([parameter], [own])
    return placeholder(parameter.shape, dtype, own.device) if found is None else found


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, FP32 scalar, summed in FP32 whatever their dtype."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | None:
    """What gradients of this norm are multiplied with, at most 1; None where `max_norm` is 0: as they are."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else None


def set_group_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate, in place where it is a tensor, as torchao's compiled step needs it."""
    rate *= group.get("lr_scale", 1.0)
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def check_kind(now: dict[str, Any], then: Any) -> None:
    """Raise a ValueError if saved state is of an optimizer with another name or other options."""
    if not isinstance(then, dict):
        raise ValueError("the optimizer's state was saved by an older version: start a new run from it with --model")
    for name in now:
        if then.get(name) != now[name]:
            raise ValueError(
                f"the optimizer's state was saved with {name}={then.get(name)!r}, not {now[name]!r}: resume with the same, "
                "or start a new run from the checkpoint with --model"
            )
