"""The linears of transformers inside a TEModelsForCausalLM, so that peft finds q_proj where it looks for it.

peft puts a layer of its own around each nn.Linear that an adapter targets, and names the adapter's tensors after it.
Here q, k, v and the gate are rows of one te.Linear, as are gate and up. Rows of a te.Linear are therefore an nn.Linear
without parameters beside it (`Rows`), and a te.Linear that is one linear of transformers is an nn.Linear by its class.
Nothing runs through them until peft has adapted one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.errors import ConfigError, UsageError, refuse
from te_models.files.formats import Document
from te_models.fp8.primary_weights import plain, write_weight
from te_models.interop.hf import Place, tensor_places
from te_models.interop.hf_families import family_for, family_of


class Rows(nn.Linear):
    """Rows of a te.Linear under their name in transformers.

    Args:
        owner: the te.Linear; no submodule of this one, so that its parameters are not listed twice.
        place: the rows.
    """

    def __init__(self, owner: nn.Module, place: Place) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = place.shape
        self.owner, self.place = (owner,), place
        self.output: Tensor | None = None  # [N, rows], of the pass under way

    @property
    def weight(self) -> Tensor:  # type: ignore[bad-override]  # a parameter of nn.Linear
        """The rows of the weight [rows, in]; assigning to its `data` writes them."""
        (owner,) = self.owner
        whole = plain(owner.get_parameter("weight"))
        return _Alias(self.place.save(whole).clone(), functools.partial(_write, owner, self.place))

    @property
    def bias(self) -> Tensor | None:  # type: ignore[bad-override]  # a parameter of nn.Linear
        """The rows of the bias [rows], None without one."""
        (owner,) = self.owner
        bias = dict(owner.named_parameters(recurse=False)).get("bias")
        return None if bias is None else self.place.save(bias.detach())

    def columns(self) -> Tensor:
        """Return which of the te.Linear's outputs the rows make, int64 [rows]."""
        (owner,) = self.owner
        weight = owner.get_parameter("weight")
        return self.place.save(torch.arange(len(weight), device=weight.device))

    def forward(self, input: Tensor, *args: object, **options: object) -> Tensor:
        """Return the rows' output in the pass under way; outside of one, the input [N, in] times the weight."""
        return F.linear(input, self.weight, self.bias) if self.output is None else self.output


class Head(nn.Linear):
    """The head of a model as an nn.Linear: the bias of a te.Linear without one is an empty tensor, not None."""

    def __init__(self, model: CausalLM) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = model.config.hidden_size, model.config.vocab_size
        self.bias = None  # type: ignore[bad-override-mutable-attribute]  # as nn.Linear's own without a bias
        self.model = (model,)

    @property
    def weight(self) -> Tensor:  # type: ignore[bad-override]  # a parameter of nn.Linear
        """The parameter of the model [V, D]."""
        return self.model[0].lm_head.get_parameter("weight")


class _Alias(Tensor):
    """Values of rows that another tensor has; assigning to `data`, as peft's merges do, writes them there."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[bad-override]  # as nn.Parameter's

    def __new__(cls, values: Tensor, write: Callable[[Tensor], None]) -> _Alias:
        return torch.Tensor._make_subclass(cls, values)

    def __init__(self, values: Tensor, write: Callable[[Tensor], None]) -> None:
        self.rows, self.write = values, write

    @property
    def data(self) -> Tensor:  # type: ignore[bad-override]  # an attribute of Tensor
        return self.rows

    @data.setter
    def data(self, values: Tensor) -> None:
        self.write(values)


@torch.no_grad()
def _write(owner: nn.Module, place: Place, values: Tensor) -> None:
    weight = owner.get_parameter("weight")
    whole = plain(weight).clone()
    place.load(whole, values)
    write_weight(weight, whole, for_master=False)


class DividedLinear(nn.Module):
    """A te.Linear of which peft has adapted some rows, or may do so.

    Args:
        base_layer: the te.Linear.
        part: the module that has its Rows, adapted ones among them, as children.
        names: of those.
    """

    def __init__(self, base_layer: nn.Module, part: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer, self.part, self.names = base_layer, (part,), names

    def forward(self, x: Tensor, **options: object) -> Tensor:
        """Map x [N, in] to [N, out], through peft's layers where they are."""
        out = self.base_layer(x, **options)
        for name in self.names:
            layer = self.part[0].get_submodule(name)
            if isinstance(layer, Rows):
                continue
            rows = layer.get_submodule("base_layer")
            assert isinstance(rows, Rows)
            columns = rows.columns()
            rows.output = out.index_select(-1, columns)
            try:
                out = out.index_copy(-1, columns, layer(x))
            finally:
                rows.output = None
        return out

    def unload_and_optionally_merge_module(self, **options: object) -> nn.Module:
        """Return the te.Linear, into which peft merges the adapters of its rows; peft calls it."""
        return self.base_layer


@functools.cache
def _linear(kind: type[nn.Module]) -> type[nn.Module]:
    """Return an engine's te.Linear as a subclass of nn.Linear too."""
    return type(kind.__name__, (kind, nn.Linear), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def show_linears(model: CausalLM) -> dict[str, tuple[str, ...]]:
    """Give a model the linears of transformers; return te.Linear -> names of the Rows beside it, if there are some.

    A model of no family of transformers has the names of te-models.
    """
    found: dict[str, tuple[str, ...]] = {}
    for theirs, place in _places(model).items():
        ours, name = place.name.removesuffix(".weight"), theirs.removesuffix(".weight").removeprefix("model.")
        linear, (parent, _, leaf) = model.get_submodule(ours), name.rpartition(".")
        if name == ours:
            if not isinstance(linear, nn.Linear) and type(linear) is model.te.Linear:
                object.__setattr__(linear, "__class__", _linear(type(linear)))
        elif parent == ours.rpartition(".")[0]:
            part = model.get_submodule(parent)
            found[ours] = (*found.get(ours, ()), leaf)
            if not hasattr(part, leaf):
                part.add_module(leaf, Rows(linear, place))
    return found


def _places(model: CausalLM) -> dict[str, Place]:
    """Return transformers' name of each weight of a linear in a block -> its rows."""
    shapes = {name.replace(".base_layer.", "."): parameter.shape for name, parameter in model.named_parameters()}
    config = model.origin.config
    # A router is no nn.Linear in transformers, and no adapter of "all-linear".
    linears = [f"{name}.weight" for name in model.config.linears if not name.endswith(".router")]
    try:
        family = family_for(model.config, family_of(config) if config else None)
    except ConfigError:
        own = {name: shapes[name] for name in linears if name in shapes}
        return {name: Place(name, ((0, shape[0]),), 1, tuple(shape)) for name, shape in own.items()}
    places = tensor_places(family, model.config, shapes)
    return {name: place for name, place in places.items() if place.name in linears}


def _not_shown(model: CausalLM) -> list[str]:
    """Return the linears of transformers that `show_linears` does not make: those of the expert of all tokens.

    Experts of a mixture are parameters of transformers too, which no target of linears names.
    """
    found = []
    for theirs, place in _places(model).items():
        ours, name = place.name.removesuffix(".weight"), theirs.removesuffix(".weight").removeprefix("model.")
        if name != ours and name.rpartition(".")[0] != ours.rpartition(".")[0] and ".experts." not in name:
            found.append(name)
    return found


def _names(targets: str | Iterable[str] | None, name: str) -> bool:
    """Return whether peft's `target_modules` name a module: by an expression, or by the end of its name."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def place_adapters(model: CausalLM, rows: Mapping[str, tuple[str, ...]], configs: Document) -> None:
    """Send each te.Linear that has `rows`, as from `show_linears`, through them, also where adapters may come later.

    Raises:
        UsageError: peft's `configs` ask for what its files would have under names that transformers does not know.
    """
    unable = [] if isinstance(model.lm_head, model.te.Linear) else ["the head"]
    unable += [n for n in _not_shown(model) if any(_names(config.target_modules, n) for config in configs.values())]
    refuse(f"peft cannot adapt {name} here: give add_lora the CausalLM inside (`.model`)" for name in unable)
    biases = any(name.endswith(".bias") for name, p in model.named_parameters() if p.numel())
    if biases and any(getattr(config, "bias", "none") != "none" for config in configs.values()):
        raise UsageError("peft cannot train the biases of fused linears: leave out bias=")
    for ours, names in rows.items():
        parent, _, leaf = ours.rpartition(".")
        part = model.get_submodule(parent)
        linear = part.get_submodule(leaf)
        if not isinstance(linear, DividedLinear):
            part.add_module(leaf, DividedLinear(linear, part, names))
