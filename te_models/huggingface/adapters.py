"""The linears of transformers inside a TEModelsForCausalLM, so that peft finds q_proj where it looks for it.

peft puts a layer of its own around each nn.Linear that an adapter targets, and names the adapter's tensors after it.
Here q, k, v and the gate are rows of one te.Linear, as are gate and up. Rows of a te.Linear are therefore an nn.Linear
without parameters beside it (`Rows`), and a te.Linear that is one linear of transformers is an nn.Linear by its class.
Nothing runs through them until peft has adapted one.
"""

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.errors import ConfigError, refuse
from te_models.files.formats import Document, list_some
from te_models.fp8.primary_weights import plain
from te_models.huggingface.expert_adapters import AdaptedWeight, Alias, Shown, Stack, write_rows
from te_models.interop.hf import Place, expert_places, module_places
from te_models.interop.hf_expert_families import dropped_by_peft
from te_models.interop.hf_families import Family, family_for, family_of
from te_models.kernels.elementwise import ScaledEmbedding

LINEARS_OF_MLP = re.compile(r"(gate|up|down)_proj|\bw[123]\b")  # as files of transformers name them


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
        values = self.place.save(plain(owner.get_parameter("weight"))).clone()
        return Alias(
            values, lambda: values, functools.partial(write_rows, owner, "weight", self.place)
        )

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


class DividedLinear(nn.Module):
    """A te.Linear of which peft has adapted some rows, or may do so: the Rows of `names` below the module `part`."""

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


def _blank(
    dressed: Callable[[type[nn.Module]], type[nn.Module]], kind: type[nn.Module]
) -> nn.Module:
    """Return a module of the class that `dressed` makes of an engine's, for a pickle or a copy to fill."""
    made = dressed(kind)
    return made.__new__(made)


def _dressed(
    kind: type[nn.Module],
    base: type[nn.Module],
    how: Callable[..., type[nn.Module]],
    **more: object,
) -> type:
    """Return an engine's class as a subclass of `base` too, whose modules can be pickled: no name leads to it."""

    def reduce(module: nn.Module, protocol: object) -> tuple[object, ...]:
        return _blank, (how, kind), object.__reduce_ex__(module, 2)[2]

    about = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce_ex__": reduce}
    return type(kind.__name__, (kind, base), about | more)


@functools.cache
def _grouped(kind: type[nn.Module]) -> type[nn.Module]:
    """Return an engine's te.GroupedLinear as a module that peft adapts, though no linear that "all-linear" names.

    peft takes the target "down_proj" of an expert of all tokens for the te.GroupedLinear of that name too, and refuses
    modules that it does not know. `OwnExperts` drops the layer that it makes for an embedding of one element.
    """
    return _dressed(kind, nn.Embedding, _grouped, num_embeddings=1, embedding_dim=1)


class OwnExperts(nn.Module):
    """A module whose te.GroupedLinears no layer of peft replaces, whichever adapter names them."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, unless it is peft's layer around what `_grouped` returns."""
        grouped = isinstance(getattr(value, "base_layer", None), nn.Embedding)
        if not (grouped and type(value).__module__.startswith("peft.")):
            super().__setattr__(name, cast(nn.Module, value))


@functools.cache
def _own_experts(kind: type[nn.Module]) -> type[nn.Module]:
    return _dressed(kind, OwnExperts, _own_experts)


@functools.cache
def _linear(kind: type[nn.Module]) -> type[nn.Module]:
    """Return an engine's te.Linear as a subclass of nn.Linear too, whose missing bias is None as there.

    It is an empty tensor in Transformer Engine, which peft would subtract from the output under DoRA.
    """
    return _dressed(
        kind, nn.Linear, _linear, bias=property(lambda linear: linear._parameters.get("bias"))
    )


Placed = dict[
    str, Callable[..., nn.Module]
]  # te module -> what stands in its place once peft may adapt it


def show_linears(model: CausalLM) -> Placed:
    """Give a model the linears of transformers, and the parameters of its experts and routers.

    A model of no family of transformers has the names of te-models.
    """
    found: dict[str, tuple[str, ...]] = {}
    places, family = _places(model)
    linears = model.config.linears
    for theirs, place in places.items():
        ours, name = (
            place.name.removesuffix(".weight"),
            theirs.removesuffix(".weight").removeprefix("model."),
        )
        if ours not in linears or linears[ours].name == "router":
            continue  # an expert, or no linear in transformers
        linear, parent = model.get_submodule(ours), ours.rpartition(".")[0]
        if name == ours:
            if not isinstance(linear, nn.Linear) and type(linear) is model.te.Linear:
                object.__setattr__(linear, "__class__", _linear(type(linear)))
            continue
        below = name.removeprefix(f"{parent}.")
        found[ours] = (*found.get(ours, ()), below)
        _add(model.get_submodule(parent), below, functools.partial(Rows, linear, place))
    placed: Placed = {
        ours: functools.partial(DividedLinear, names=names) for ours, names in found.items()
    }
    return placed | _show_parameters(model, places, family is not None and family.stacked)


def show_embedding(model: CausalLM) -> None:
    """Let a model's embedding scale its rows where transformers' does: vectors in their place are scaled too then."""
    family, embedding = _places(model)[1], model.embed_tokens
    if family is not None and family.scaled_vectors and type(embedding) is nn.Embedding:
        object.__setattr__(embedding, "__class__", ScaledEmbedding)
        assert isinstance(embedding, ScaledEmbedding)
        embedding.factor, model.embedding_multiplier = model.config.embedding_multiplier, 1.0


def _add(part: nn.Module, name: str, make: Callable[[], nn.Module]) -> None:
    """Add a module below `part` unless it is there, and those between."""
    above, _, leaf = name.rpartition(".")
    if above and not hasattr(part, above):
        part.add_module(above, nn.Module())
    owner = part.get_submodule(above)
    if not hasattr(owner, leaf):
        owner.add_module(leaf, make())


def _show_parameters(model: CausalLM, places: Mapping[str, Place], transposed: bool) -> Placed:
    """Show the parameters of experts and routers, which have the same names in every family."""
    linears = model.config.linears
    shown: dict[
        str, tuple[str, str, Stack]
    ] = {}  # te module -> its parameter: of which module, its name, its values
    for name, place in expert_places("", model.config, _shapes(model), places).items():
        ours, leaf = place.name.removesuffix(".weight"), name.rpartition(".")[2]
        shown[ours] = (
            "experts",
            leaf,
            Stack(model.get_submodule(ours), place, linears[ours].experts, transposed),
        )
    for theirs, place in places.items():
        ours = place.name.removesuffix(".weight")
        if ours.endswith(".router") and theirs.endswith(".mlp.gate.weight"):
            shown[ours] = ("gate", "weight", Stack(model.get_submodule(ours), place))
    for ours, (holder, name, stack) in shown.items():
        part = model.get_submodule(ours.rpartition(".")[0])
        _add(part, holder, Shown)
        if type(stack.owner) is model.te.GroupedLinear:
            object.__setattr__(stack.owner, "__class__", _grouped(type(stack.owner)))
        if stack.experts and not isinstance(part, OwnExperts):
            object.__setattr__(part, "__class__", _own_experts(type(part)))
        module = part.get_submodule(holder)
        if isinstance(module, Shown):  # not one that peft has adapted
            module.show(name, stack)
    return {
        ours: functools.partial(
            _adapted_experts if stack.experts else AdaptedWeight, holder=holder, name=name
        )
        for ours, (holder, name, stack) in shown.items()
    }


def _adapted_experts(base_layer: nn.Module, part: nn.Module, holder: str, name: str) -> nn.Module:
    """Return an AdaptedWeight of experts, which peft may meet as it meets their te.GroupedLinear."""
    return _grouped(AdaptedWeight)(base_layer, part, holder, name)


def _shapes(model: CausalLM) -> dict[str, torch.Size]:
    """Return the shapes of the parameters by their names without adapters."""
    names = (
        (name.replace(".base_layer.", "."), parameter)
        for name, parameter in model.named_parameters()
    )
    return {name.replace(".original_module.", "."): parameter.shape for name, parameter in names}


def _places(model: CausalLM) -> tuple[dict[str, Place], Family | None]:
    """Return the family of transformers, if there is one, and its name of each tensor -> its rows."""
    shapes, config = _shapes(model), model.origin.config
    try:
        family = family_for(model.config, family_of(config) if config else None)
    except ConfigError:
        linears = [f"{name}.weight" for name in model.config.linears]
        return {name: Place.whole(name, shapes[name]) for name in linears if name in shapes}, None
    return module_places(family, model.config, shapes), family


def _named_otherwise(model: CausalLM, wanted: list[str]) -> list[str]:
    """Return the modules with names that end so, in transformers or here, that are not the same in both."""
    places, family = _places(model)
    if family is None:
        return []
    theirs = {
        n.removeprefix("model.").removesuffix(".weight"): p.name.removesuffix(".weight")
        for n, p in places.items()
    }
    names = dict.fromkeys([*theirs, *(name for name, _ in model.named_modules())])
    return [name for name in names if name.endswith(tuple(wanted)) and theirs.get(name) != name]


def is_multimodal(model: CausalLM) -> bool:
    """Return whether the model is the text model of a multimodal one in transformers."""
    family = _places(model)[1]
    return family is not None and bool(family.inner)


def place_adapters(model: CausalLM, placed: Placed, configs: Document) -> None:
    """Replace te modules by what is `placed` there, from `show_linears`, also where adapters may come later."""
    biases = any(name.endswith(".bias") for name, p in model.named_parameters() if p.numel())
    trained = biases and any(
        getattr(config, "bias", "none") != "none" for config in configs.values()
    )
    moved = _named_otherwise(
        model, [w for c in configs.values() for w in getattr(c, "modules_to_save", None) or ()]
    )
    head = "peft cannot adapt the head here: give add_lora the CausalLM inside (`.model`)"
    names = (
        f"peft cannot train copies of {list_some(moved)} here, which transformers names otherwise"
    )
    mistakes = {
        head: not isinstance(model.lm_head, model.te.Linear),
        "peft cannot train the biases of fused linears: leave out bias=": trained,
        f"{names}: change modules_to_save": moved,
    }
    refuse(mistakes)
    for ours, stand_in in placed.items():
        parent, _, leaf = ours.rpartition(".")
        part = model.get_submodule(parent)
        module = part.get_submodule(leaf)
        if not isinstance(module, (DividedLinear, AdaptedWeight)):
            part.add_module(leaf, stand_in(module, part))
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    _warn_of_experts_left_out(model, configs, adapted)
    family = _places(model)[1]
    if dropped := dropped_by_peft(family.model_type if family else "", adapted):
        warnings.warn(
            f"{dropped}: for transformers merge them, or leave them out of target_modules",
            stacklevel=2,
        )


def _warn_of_experts_left_out(model: CausalLM, configs: Document, adapted: list[str]) -> None:
    """Warn of experts without new adapters where a config names linears of MLPs, or there are adapters on all linears.

    peft takes these names for experts too in some architectures of transformers, since they are linears in files.
    """
    experts = dict.fromkeys(
        linear.name for linear in model.config.linears.values() if linear.experts
    )
    new = [config for config in configs.values() if not config.inference_mode]
    targets = [getattr(config, "target_modules", None) or () for config in new]
    named = " ".join(group if isinstance(group, str) else " ".join(group) for group in targets)
    left = [
        name
        for name, module in model.layers.named_modules()
        if isinstance(module, nn.Linear)
        and ".lora_" not in name
        and not name.endswith(".base_layer")
    ]
    if (
        new
        and experts
        and not any(".experts" in name for name in adapted)
        and (not left or LINEARS_OF_MLP.search(named))
    ):
        parameters = [f"experts.{name}" for name in experts]
        warnings.warn(
            f"no expert has an adapter: for that, give target_parameters={parameters}", stacklevel=3
        )
