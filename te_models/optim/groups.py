"""Which part of a model is updated how: by the structure of its modules, never by a parameter's name.

A part is some rows of a parameter, since our projections are fused: `qkvg_proj` holds q, k, v and the gate, `gate_up_proj`
the two halves of SwiGLU. An optimizer that works on whole matrices (Muon, GaLore) must see each logical matrix by itself:
the orthogonal factor of a stack is not the stack of the orthogonal factors. Orthogonalised together, q, k, v and the gate
would have to share one set of orthogonal columns, and the largest of their gradients would decide the direction of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from te_models.config.layout import gate_up_sections, qkvg_sections
from te_models.errors import UsageError
from te_models.model.attention import GatedAttention
from te_models.model.mlp import SwiGLU

# What the parts are; the first is what Muon and GaLore work on, all others are AdamW's.
ROLES = (
    "hidden",  # a projection from one hidden space to another: q, k, v, o, the elementwise gate, SwiGLU's three
    "gate",  # the headwise gate: a logit a head (and rows of padding), each row a vector of its own
    "head",  # any other matrix: the language-model head, adapters
    "embedding",  # a table, tied to the head or not: a step sees few of its rows
    "vector",  # norms and biases
)
DECAYING = ("hidden", "gate", "head")


@dataclass(frozen=True, eq=False)
class Part:
    """The rows [start, stop) of a parameter; stop None: all of it."""

    parameter: nn.Parameter
    role: str
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The same rows of a tensor of the parameter's shape: a view, or the tensor itself where that is all rows."""
        return tensor if self.stop is None else tensor.detach()[self.start : self.stop]


def parts(model: nn.Module) -> list[Part]:
    """Every trainable parameter of the model, each row in one part, tied parameters once; in the model's order."""
    roles: dict[int, list[tuple[str, int]]] = {}
    for module in model.modules():
        for parameter, rows in _structure(module):
            roles.setdefault(id(parameter), rows)
    found: list[Part] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            rows = roles.get(id(parameter), [("head" if parameter.dim() > 1 else "vector", len(parameter))])
            found += _split(parameter, rows)
    return found


def groups(model: nn.Module, weight_decay: float, matrices: bool) -> list[dict[str, Any]]:
    """Parameter groups with parts as "params"; only matrices decay, and of them not the tables, which are sparse in use.

    With `matrices`, the hidden matrices are a group of their own, marked so, a part each; without, a parameter is one part.
    """
    found = parts(model)
    if not matrices:
        whole = {id(part.parameter): Part(part.parameter, part.role) for part in found}
        found = list(whole.values())
    hidden = [part for part in found if matrices and part.role == "hidden"]
    rest = [part for part in found if not matrices or part.role != "hidden"]
    made = [
        {"params": hidden, "weight_decay": weight_decay, "matrices": True},
        {"params": [p for p in rest if p.role in DECAYING], "weight_decay": weight_decay, "matrices": False},
        {"params": [p for p in rest if p.role not in DECAYING], "weight_decay": 0.0, "matrices": False},
    ]
    return [group for group in made if group["params"]]


def _structure(module: nn.Module) -> Iterator[tuple[Any, list[tuple[str, int]]]]:
    """The weights whose meaning this module knows: (weight, (role, rows) from its first row to its last)."""
    if isinstance(module, nn.Embedding):
        yield module.weight, [("embedding", module.num_embeddings)]
    elif isinstance(module, GatedAttention):
        gate = "gate" if module.config.attention_gate == "headwise" else "hidden"
        sections = [section for section in qkvg_sections(module.config) if section.stored]
        yield module.qkvg_proj.weight, [(gate if s.name == "g" else "hidden", s.stored) for s in sections]
        yield module.o_proj.weight, [("hidden", module.config.hidden_size)]
    elif isinstance(module, SwiGLU):
        yield module.gate_up_proj.weight, [("hidden", s.stored) for s in gate_up_sections(module.config)]
        yield module.down_proj.weight, [("hidden", len(module.down_proj.weight))]


def _split(parameter: nn.Parameter, rows: list[tuple[str, int]]) -> list[Part]:
    if len(rows) == 1:
        return [Part(parameter, rows[0][0])]
    ends = list(accumulate(size for _, size in rows))
    if ends[-1] != len(parameter):
        raise UsageError(f"a fused weight has {len(parameter)} rows, not the {ends[-1]} of its parts")
    return [Part(parameter, role, end - size, end) for (role, size), end in zip(rows, ends, strict=True)]
