"""The linears of transformers inside a TEModelsForCausalLM, so that peft finds q_proj where it looks for it.

peft puts a layer of its own around each nn.Linear that an adapter targets, and names the adapter's tensors after it.
Here q, k, v and the gate are rows of one te.Linear, as are gate and up. Such rows are therefore an nn.Linear without
parameters beside it (`NamedRows`), and a te.Linear that is one linear of transformers is an nn.Linear too. Nothing runs
through them until peft has adapted one. Layers of peft get sequences [B, S, in], as in transformers.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from te_models.adapters.parameters import AdaptedWeight, Shown, Stack
from te_models.adapters.rows import AdaptedRows, NamedRows, base_of, without_layers
from te_models.causal_lm import CausalLM
from te_models.errors import ConfigError, UsageError
from te_models.files.formats import Document, list_some
from te_models.interop.hf_expert_families import dropped_by_peft
from te_models.interop.hf_families import Family, family_for, family_of
from te_models.interop.tensor_places import (
    Place,
    expert_places,
    module_places,
    names_taken,
)
from te_models.kernels.elementwise import ScaledEmbedding

LINEARS_OF_MLP = re.compile(r"(gate|up|down)_proj|\bw[123]\b")  # as files of transformers name them


class HiddenNames:
    """Names of te modules in a TEModelsForCausalLM that no target of peft ends like: "mlp.te_1" for "mlp.down_proj".

    These are te.GroupedLinears, and te.Linears that transformers has elsewhere by the same last name.

    Args:
        names: their names in the model.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        self.pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})(?=\.|$)")

    @classmethod
    def of(cls, model: CausalLM) -> HiddenNames:
        """Return the names for a model."""
        names = [name for name, linear in model.config.linears.items() if linear.experts]
        for theirs, place in _places(model)[0].items():
            name = theirs.removesuffix(".weight").removeprefix("model.")
            ours = place.name.removesuffix(".weight")
            # A name of ours whose end is a target, at another place than in transformers.
            elsewhere = name != ours and name.rpartition(".")[2] == ours.rpartition(".")[2]
            if elsewhere and ours in model.config.linears and ours not in names:
                names.append(ours)
        return cls(names)

    def renamed(self, name: str) -> str:
        """Return the name of a module here."""

        def new(match: re.Match[str]) -> str:
            parent, _, leaf = match[0].rpartition(".")
            return f"{parent}.te_{self.leaves.index(leaf)}"

        return self.pattern.sub(new, name, 1) if self.leaves else name

    def original(self, name: str) -> str:
        """Return the name that `renamed` had changed."""
        if not self.leaves:
            return name
        return re.sub(r"\bte_(\d+)\b", lambda match: self.leaves[int(match[1])], name)


class StandIn(NamedTuple):
    """The stand-in for a te module that peft may adapt."""

    # Makes the adapter of a te module; the second argument is the module below which its transformers names are.
    make: Callable[..., nn.Module]
    holder: str  # the name of that module


Placed = dict[str, StandIn]  # by the name of the te module


def show_linears(model: CausalLM) -> Placed:
    """Give a model the linears of transformers, and the parameters of its experts and routers.

    A model of no family of transformers has the names of te-models.
    """
    shown: dict[str, tuple[str, ...]] = {}
    holders: dict[str, str] = {}
    order: dict[str, list[str]] = {}  # module -> its linears in the order of transformers
    places, family = _places(model)
    linears = model.config.linears
    taken = names_taken("model.", model.config, places)
    for theirs, place in places.items():
        ours = place.name.removesuffix(".weight")
        name = theirs.removesuffix(".weight").removeprefix("model.")
        if ours not in linears or linears[ours].name == "router":
            continue  # an expert, or no linear in transformers
        if name in taken:
            continue  # place_adapters warns
        linear = model.get_submodule(ours)
        parent = ours.rpartition(".")[0]
        if name == ours:
            _show_whole(model, ours)
            order.setdefault(parent, []).append(ours.rpartition(".")[2])
            continue
        # Below our module, or beside it in the block where theirs has another name.
        holder = parent if name.startswith(f"{parent}.") else parent.rpartition(".")[0]
        below = name.removeprefix(f"{holder}.")
        shown[ours] = (*shown.get(ours, ()), below)
        holders[ours] = holder
        order.setdefault(holder, []).append(below.partition(".")[0])
        _add(model.get_submodule(holder), below, functools.partial(NamedRows, linear, place))
    for parent, names in order.items():
        _sort(model.get_submodule(parent), names)
    _show_whole(model, "lm_head")
    placed: Placed = {
        ours: StandIn(functools.partial(AdaptedRows, names=names), holders[ours])
        for ours, names in shown.items()
    }
    return placed | _show_parameters(model, places, family)


def show_embedding(model: CausalLM) -> None:
    """Let a model's embedding scale its rows where transformers' does: vectors in their place are scaled too then."""
    family = _places(model)[1]
    embedding = model.embed_tokens
    if family is not None and family.scaled_vectors and type(embedding) is nn.Embedding:
        factor = model.config.embedding_multiplier
        model.embed_tokens = ScaledEmbedding.of(embedding, factor)
        # The embedding itself scales from here on, and nothing may do it a second time.
        model.embedding_multiplier = 1.0


def _show_whole(model: CausalLM, name: str) -> None:
    """Put an nn.Linear in the place of a te.Linear that is one linear of transformers, unless there is one already."""
    linear = model.get_submodule(name)
    if type(linear) is model.te.Linear:
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = model.te.LinearOfTorch.of(linear)


def _sort(part: nn.Module, names: list[str]) -> None:
    """Put the linears `names` of a module behind its other modules, in this order.

    Methods of peft that share parameters over layers, or draw random numbers, go by the order of the modules.
    """
    for name in dict.fromkeys(names):
        module = part._modules.pop(name)
        part._modules[name] = module


def _add(part: nn.Module, name: str, make: Callable[[], nn.Module]) -> None:
    """Add a module below `part` unless it is there, and those between."""
    *above, leaf = name.split(".")
    owner = part
    for step in above:
        if not hasattr(owner, step):
            owner.add_module(step, nn.Module())
        owner = owner.get_submodule(step)
    if not hasattr(owner, leaf):
        owner.add_module(leaf, make())


def _show_parameters(model: CausalLM, places: Mapping[str, Place], family: Family | None) -> Placed:
    """Show the parameters of experts and routers."""
    linears = model.config.linears
    mlp = "mlp" if family is None else family.mlp
    experts = "mlp.experts" if family is None else family.expert_module
    transposed = family is not None and family.inputs_first
    swapped = family is not None and family.swapped_by_peft
    # te module -> its parameter: of which module below the block, its name, its values
    shown: dict[str, tuple[str, str, Stack]] = {}
    for name, place in expert_places("", model.config, _shapes(model), places, experts).items():
        ours = place.name.removesuffix(".weight")
        leaf = name.rpartition(".")[2]
        shown[ours] = (
            experts,
            leaf,
            Stack(model.get_submodule(ours), place, linears[ours].experts, transposed, swapped),
        )
    for theirs, place in places.items():
        ours = place.name.removesuffix(".weight")
        if not ours.endswith(".router"):
            continue
        for router in (f"{mlp}.gate", f"{mlp}.router"):
            if theirs.endswith(f".{router}.weight") and router != "mlp.router":
                shown[ours] = (router, "weight", Stack(model.get_submodule(ours), place))
    stand_ins: Placed = {}
    for ours, (below, name, stack) in shown.items():
        # Below our MLP, or beside it in the block where theirs has another name.
        parent = ours.rpartition(".")[0]
        if not below.startswith("mlp."):
            parent = parent.rpartition(".")[0]
        holder = below.removeprefix("mlp.")
        owner = model.get_submodule(parent)
        _add(owner, holder, Shown)
        module = owner.get_submodule(holder)
        if isinstance(module, Shown):  # not one that peft has adapted
            module.show(name, stack)
        make = functools.partial(AdaptedWeight, holder=holder, name=name)
        stand_ins[ours] = StandIn(make, parent)
    return stand_ins


def _shapes(model: CausalLM) -> dict[str, torch.Size]:
    """Return the shapes of the parameters by their names without adapters."""
    names = ((without_layers(name), parameter) for name, parameter in model.named_parameters())
    return {name.replace(".original_module.", "."): parameter.shape for name, parameter in names}


def _places(model: CausalLM) -> tuple[dict[str, Place], Family | None]:
    """Return the family of transformers, if there is one, and its name of each tensor -> its rows."""
    shapes = _shapes(model)
    config = model.origin.config
    try:
        family = family_for(model.config, family_of(config) if config else None)
    except ConfigError:
        # No architecture has this model: its linears have our names.
        linears = [f"{name}.weight" for name in model.config.linears]
        return {name: Place.whole(name, shapes[name]) for name in linears if name in shapes}, None
    return module_places(family, model.config, shapes), family


def _named_otherwise(model: CausalLM, targets: list[str]) -> list[str]:
    """Return the modules with names that end so, in transformers or here, that are not the same in both."""
    places, family = _places(model)
    if family is None:
        return []
    theirs = {
        n.removeprefix("model.").removesuffix(".weight"): p.name.removesuffix(".weight")
        for n, p in places.items()
    }
    names = dict.fromkeys([*theirs, *(name for name, _ in model.named_modules())])
    named_alike = {"lm_head"}  # also where it is tied, and has no tensor in transformers' files
    other_modules = []
    for name in names:
        if name.endswith(tuple(targets)) and theirs.get(name) != name and name not in named_alike:
            other_modules.append(name)
    return other_modules


def is_multimodal(model: CausalLM) -> bool:
    """Return whether the model is the text model of a multimodal one in transformers."""
    family = _places(model)[1]
    return family is not None and bool(family.inner)


def place_adapters(model: CausalLM, placed: Placed, configs: Document) -> None:
    """Replace te modules by the modules in `placed`, from `show_linears`, also where adapters may come later."""
    biases = any(name.endswith(".bias") for name, p in model.named_parameters() if p.numel())
    trained = biases and any(
        getattr(config, "bias", "none") != "none" for config in configs.values()
    )
    moved = _named_otherwise(
        model, [w for c in configs.values() for w in getattr(c, "modules_to_save", None) or ()]
    )
    names = (
        f"peft cannot train copies of {list_some(moved)} here, which transformers names otherwise"
    )
    if trained:
        raise UsageError("peft cannot train the biases of fused linears: leave out bias=")
    if moved:
        raise UsageError(f"{names}: change modules_to_save")
    # Now that peft has its layers on the named rows, the te.Linear is replaced by the module that adds their updates.
    for ours, stand_in in placed.items():
        parent, _, leaf = ours.rpartition(".")
        part = model.get_submodule(parent)
        module = part.get_submodule(leaf)
        if not isinstance(module, (AdaptedRows, AdaptedWeight)):
            holder = model.get_submodule(stand_in.holder)
            part.add_module(leaf, stand_in.make(module, holder))
    mark_adapters(model)
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    _warn_of_experts_left_out(model, configs, adapted)
    _warn_of_names_taken(model, configs)
    _warn_of_names_read_twice(model, configs, adapted)
    family = _places(model)[1]
    as_modules = []
    for name in adapted:
        if type(model.get_submodule(name)).__name__ != "ParamWrapper":
            as_modules.append(name)
    if dropped := dropped_by_peft(family.model_type if family else "", as_modules):
        warnings.warn(
            f"{dropped}: for transformers merge them, leave them out of target_modules, or name their weights, such as "
            "up_proj.weight, in target_parameters",
            stacklevel=2,
        )


def names_in_files(model: CausalLM) -> dict[str, str]:
    """Return patterns of names in files of transformers -> those in its models, for peft to rename what it reads."""
    config = model.origin.config
    renamed = family_of(config).renamed if config else {}
    return {re.escape(stored): there for stored, there in renamed.items()}


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of peft, or one of LoRA here."""
    return type(module).__module__.startswith(("peft.", "te_models.adapters.layers"))


def mark_adapters(model: CausalLM) -> None:
    """Let LoRA be the layer of te-models, and others of peft get sequences [B, S, in], which some treat differently."""
    if not any(is_adapted(module) for module in model.modules()):
        return
    from te_models.adapters.layers import LoraLinear, adopt  # noqa: PLC0415  needs peft

    adopt(model)
    for module in model.modules():
        if isinstance(module, LoraLinear) or not is_adapted(module):
            continue
        if isinstance(base_of(module), nn.Linear):
            module.by_sequence = True  # type: ignore[bad-assignment]


def take_away(model: CausalLM) -> None:
    """Put the te modules back in the place of what adapts them, once peft has unloaded its layers.

    peft itself does so for te.Linears that it finds by their names here, and not for the ones in HiddenNames.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, (AdaptedRows, AdaptedWeight)):
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = module.base_layer


def _warn_of_experts_left_out(model: CausalLM, configs: Document, adapted: list[str]) -> None:
    """Warn of experts without new adapters where a config names linears of MLPs, or there are adapters on all linears.

    peft takes these names for experts too in some architectures of transformers, since they are linears in files.
    """
    experts = any(linear.experts for linear in model.config.linears.values())
    new = any(not config.inference_mode for config in configs.values())
    if (
        new
        and experts
        and not any(".experts" in name for name in adapted)
        and (_all_adapted(model) or LINEARS_OF_MLP.search(_new_targets(configs)))
    ):
        places, family = _places(model)
        module = "mlp.experts" if family is None else family.expert_module
        names = expert_places("", model.config, _shapes(model), places, module)
        # Names as in target_parameters: the last two parts, once for all layers.
        parameters = list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))
        warnings.warn(
            f"no expert has an adapter: for that, give target_parameters={parameters}", stacklevel=3
        )


def _all_adapted(model: CausalLM) -> bool:
    """Return whether all linears that peft finds in blocks have adapters."""
    for name, module in model.layers.named_modules():
        base = name.endswith(".base_layer")
        if isinstance(module, nn.Linear) and ".lora_" not in name and not base:
            return False
    return True


def _new_targets(configs: Document) -> str:
    """Return the target_modules of the configs of adapters in training, in one string."""
    new = [config for config in configs.values() if not config.inference_mode]
    targets = [getattr(config, "target_modules", None) or () for config in new]
    return " ".join(group if isinstance(group, str) else " ".join(group) for group in targets)


def _warn_of_names_taken(model: CausalLM, configs: Document) -> None:
    """Warn of linears of MLPs that new adapters leave out since their names are taken here (`names_taken`)."""
    targets = _new_targets(configs)
    taken = names_taken("model.", model.config, _places(model)[0])
    leaves = {name.rpartition(".")[2] for name in taken}
    named = any(leaf in targets for leaf in leaves)
    if taken and targets and (named or _all_adapted(model)):
        warnings.warn(
            f"peft adapts no {list_some(taken)} in place: for these, give te_models.add_lora the CausalLM inside "
            "(`.model`)",
            stacklevel=4,
        )


def _warn_of_names_read_twice(model: CausalLM, configs: Document, adapted: list[str]) -> None:
    """Warn of new adapters whose names in peft's file the reading of transformers would rename once more.

    Its patterns have dots that match any character, so it turns Laguna's "shared_experts" into "shared_expertss".
    """
    config = model.origin.config
    family = family_of(config) if config else None
    if family is None or all(config.inference_mode for config in configs.values()):
        return
    for stored, there in family.renamed.items():
        if re.search(stored, there) and any(there in f".{name}." for name in adapted):
            warnings.warn(
                f"transformers misreads peft's file of adapters on {there.strip('.')} of {family.model_type}: for it, "
                "read the file with te_models.load_lora and write it with te_models.save_lora",
                stacklevel=4,
            )
