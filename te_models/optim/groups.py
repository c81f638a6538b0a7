"""Parameter groups by the structure of a model's modules, never by a parameter's name.

A part is a range of rows of a parameter, since projections are fused: `qkvg_proj` is q, k, v and the gate,
`gate_up_proj` the two halves of SwiGLU. An optimizer of whole matrices (Muon, GaLore) must see each logical matrix by
itself: the orthogonal factor of a stack is not the stack of the orthogonal factors. Orthogonalized together, q, k, v
and the gate would have to share one set of orthogonal columns, and the largest of their gradients would decide the
direction of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from te_models.config.layer import Role
from te_models.kernels.elementwise import ScaledEmbedding
from te_models.model.part import BlockPart
from te_models.optim.state_tensors import Group

DECAYING: tuple[Role, ...] = ("hidden", "gate", "head")


@dataclass(frozen=True, eq=False)
class ParameterRows:
    """The rows [start, stop) of a parameter, all of them if `stop` is None."""

    parameter: nn.Parameter
    role: Role
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor of the parameter's shape: a view, or the tensor itself for all rows."""
        return tensor if self.stop is None else tensor.detach()[self.start : self.stop]


def parts(model: nn.Module, trainable_only: bool = True) -> list[ParameterRows]:
    """Return the trainable parameters, or all, in the model's order, each row in one part, tied parameters once."""
    roles: dict[int, list[tuple[Role, int]]] = {}
    for module in model.modules():
        for parameter, rows in _structure(module):
            roles.setdefault(id(parameter), rows)
    all_parts: list[ParameterRows] = []
    for parameter in model.parameters():
        if parameter.requires_grad or not trainable_only:
            rows = roles.get(
                id(parameter), [("head" if parameter.dim() > 1 else "vector", len(parameter))]
            )
            all_parts += _split(parameter, rows)
    return all_parts


def groups(model: nn.Module, weight_decay: float, matrices: bool) -> list[Group]:
    """Return parameter groups with parts as "params". Only matrices decay, except tables, whose use is sparse.

    With `matrices`, the hidden matrices are a separate group with one part per logical matrix; without, each
    parameter is one part.
    """
    all_parts = parts(model)
    if not matrices:
        whole = {id(part.parameter): ParameterRows(part.parameter, part.role) for part in all_parts}
        all_parts = list(whole.values())
    hidden = []
    decaying = []
    undecayed = []
    for part in all_parts:
        if matrices and part.role == "hidden":
            hidden.append(part)
        elif part.role in DECAYING:
            decaying.append(part)
        else:
            undecayed.append(part)
    made_groups = [
        {"params": hidden, "weight_decay": weight_decay, "matrices": True},
        {"params": decaying, "weight_decay": weight_decay, "matrices": False},
        {"params": undecayed, "weight_decay": 0.0, "matrices": False},
    ]
    return [group for group in made_groups if group["params"]]


def _structure(module: nn.Module) -> Iterator[tuple[Tensor, list[tuple[Role, int]]]]:
    """Yield the weights of this module as (weight, [(role, rows), ...] from its first row to its last)."""
    if type(module) is nn.Embedding or isinstance(module, ScaledEmbedding):
        yield module.weight, [("embedding", module.num_embeddings)]
    elif isinstance(module, BlockPart) and not module.holds_parts:
        for linear in module.spec.linears:
            owner: Any = module.get_submodule(linear.name)
            owner = getattr(owner, "base_layer", owner)  # of one with adapters
            # A section without rows, such as the gate of attention without one, has no parameters.
            rows = [(section.role, section.stored) for section in linear.sections if section.stored]
            for name in linear.weights:
                yield owner.get_parameter(name), rows
        for name, parameter in module.named_parameters():
            if name.partition(".")[0] in module.spec.vectors:
                yield parameter, [("vector", len(parameter))]


def _split(parameter: nn.Parameter, rows: list[tuple[Role, int]]) -> list[ParameterRows]:
    if len(rows) == 1:
        return [ParameterRows(parameter, rows[0][0])]
    ends = list(accumulate(size for _, size in rows))
    parts = []
    for (role, size), end in zip(rows, ends, strict=True):
        parts.append(ParameterRows(parameter, role, end - size, end))
    return parts
