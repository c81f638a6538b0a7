"""The reader and the writer of files of adapters, which are peft's: with names and shapes of transformers' linears."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.adapters.layers import LoraLinear
from te_models.adapters.low_rank import swapped_factors
from te_models.adapters.rows import NamedRows, without_layers
from te_models.causal_lm import CausalLM
from te_models.errors import CheckpointError, UsageError, needs
from te_models.files.atomic import reraising
from te_models.files.formats import read_json
from te_models.files.tensors import check_finite, read_safetensors
from te_models.fp8.primary_weights import plain
from te_models.interop.hf_expert_families import dropped_by_peft
from te_models.interop.hf_families import beside_text, without_others
from te_models.interop.tensor_places import Place
from te_models.saving.folder import MANIFEST, Folder, load_folder, match
from te_models.training.lora_config import adapters_of, read_config, whole_modules
from te_models.training.lora_targets import (
    Adapter,
    Modules,
    adaptable_modules,
    alpha_of,
    join,
    layers_of,
    module_of,
    share_a,
    with_holders,
)

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    from peft import LoraConfig
    from peft.utils import ModulesToSaveWrapper

WEIGHTS = "adapter_model.safetensors"
# The document of a dropout in training for which peft's config has no place.
DROPOUT = "lora_dropout"
PREFIX = "base_model.model."  # of every name in an adapter's file
MAGNITUDE = ".lora_magnitude_vector"  # the end of the name of the lengths that DoRA trains


class SavedAdapter(NamedTuple):
    """An adapter as read from a folder."""

    saved: Folder
    config: LoraConfig
    layers: dict[str, Adapter]  # by their names in a CausalLM with the adapter
    values: dict[str, Tensor]  # of the parameters of the adapter, by `parameters_in`


def read_adapter(model: CausalLM, folder: Path, trainable: bool) -> SavedAdapter:
    """Read and check an adapter for `model`, which does not change."""
    path = folder / "adapter_config.json"
    modules = adaptable_modules(model)
    saved = _open_adapter(folder, path)
    tensors = _tensors_of_text(saved, modules)
    modules = modules.as_in(name.removeprefix(PREFIX) for name in tensors)
    fields = saved.documents["adapter_config"]
    if isinstance(fields, dict) and DROPOUT in saved.documents:
        fields = {**fields, DROPOUT: saved.documents[DROPOUT]}
    config = read_config(path, fields, modules)
    config.inference_mode = not trainable
    # peft names the modules of the model that it was given. Names of a model without a head do not begin with "model.".
    headless = not any(
        name.startswith((f"{PREFIX}model.", f"{PREFIX}lm_head.")) for name in tensors
    )
    with reraising(path, UsageError):
        adapters = adapters_of(config, modules, headless)
        in_transformers = modules
        if headless and modules.root == "model.":
            in_transformers = modules.without_head()
        in_file = with_holders(name.removeprefix(PREFIX).rpartition(".")[0] for name in tensors)
        whole = whole_modules(config, in_transformers, model, saved=in_file)
        # By names that `AdaptedModel` finds here: the file's may be of a model without a head, or match nothing.
        config.modules_to_save = list(whole.values()) or None
        layers = layers_of(adapters.values(), modules)
    tensors = _without_head(model, tensors, folder)
    # Names and shapes before any value: another rank or target is one line, not an error of a copy.
    match(_expected(model, adapters, whole, modules, config.use_dora), tensors, check_dtype=False)
    _check_values(tensors, folder)
    # A [rank, in] and B [out, rank] of each linear of transformers, and DoRA's lengths [out], by its rows in ours.
    pairs: dict[Place, tuple[Tensor, Tensor]] = {}
    lengths: dict[Place, Tensor] = {}
    for key, adapter in _keys(adapters, modules).items():
        place = adapter.place
        a = tensors[f"{key}.lora_A.weight"]
        b = tensors[f"{key}.lora_B.weight"]
        pairs[place] = _as_in_file(a, b, place, modules)
        if config.use_dora:
            lengths[place] = tensors[f"{key}{MAGNITUDE}"]
    values = {f"{ours}.weight": tensors[f"{PREFIX}{name}.weight"] for name, ours in whole.items()}
    layers = share_a(layers, modules, pairs)
    for name, adapter in layers.items():
        parts = _parts_of_layer(adapter.place, pairs, modules)
        a, b = join(adapter.place, {place: pairs[place] for place in parts})
        values[f"{name}.lora_A"] = a
        values[f"{name}.lora_B"] = b
        if config.use_dora:
            of_parts = {place: lengths[place] for place in parts}
            values[f"{name}.lora_magnitude"] = _join_lengths(adapter.place, of_parts)
    return SavedAdapter(saved, config, layers, values)


def _tensors_of_text(saved: Folder, modules: Modules) -> dict[str, Tensor]:
    """Return the tensors of a file by names in transformers' model; warn of those beside the text model, left out."""
    tensors = {}
    others = []
    for name, tensor in saved.tensors["adapter_model"].items():
        name = modules.in_transformers(name)
        if name.removeprefix(PREFIX).startswith(beside_text()):
            others.append(name)
        else:
            tensors[name] = tensor
    if others:
        warnings.warn(without_others(name.removeprefix(PREFIX) for name in others), stacklevel=4)
    return tensors


def _check_values(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise CheckpointError unless all tensors are finite, in BF16, FP16 or FP32."""
    for name, tensor in tensors.items():
        # FP8 adapters would lose most of their small values, and no writer makes them on purpose.
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype}: save adapters in BF16, FP16 or FP32"
            )
    check_finite(tensors, folder)


def _parts_of_layer(layer: Place, places: Iterable[Place], modules: Modules) -> list[Place]:
    """Return the entries of `places` that are rows of a layer: its own, or all parts of a whole te.Linear."""
    module = module_of(layer)
    is_whole = layer == modules.ours[module]
    parts = []
    for place in places:
        if place == layer or (is_whole and module_of(place) == module):
            parts.append(place)
    return parts


def _join_lengths(whole: Place, of_parts: Mapping[Place, Tensor]) -> Tensor:
    """Return DoRA's lengths of the rows of a layer, [out], from its own tensor or from its parts' tensors."""
    lengths = torch.zeros(whole.shape[0])
    for place, values in of_parts.items():
        if place == whole:
            lengths = values
        else:
            place.load(lengths, values)
    return lengths


def _open_adapter(folder: Path, config_file: Path) -> Folder:
    """Return the content of a folder of adapters, ours or peft's; refuse pickles and whole models."""
    if folder.is_dir() and not (folder / WEIGHTS).exists() and list(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its adapters as a pickle, which can run code: save them as safetensors"
        )
    if folder.is_dir() and not config_file.exists() and (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} holds a whole model and no adapters: load it with CausalLM.from_pretrained"
        )
    if (folder / MANIFEST).exists():
        return load_folder(
            folder, ["adapter_config", "adapter_model"], optional=["fp8_state", "recipe", DROPOUT]
        )
    # peft's own folders have no manifest.
    return Folder(
        folder,
        {"adapter_model": read_safetensors(folder / WEIGHTS)},
        {"adapter_config": read_json(config_file)},
    )


def _without_head(
    model: CausalLM, tensors: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the tensors without the copy of the frozen head that peft saves with an adapter on it."""
    left = dict(tensors)
    name = f"{PREFIX}lm_head.base_layer.weight"
    head = left.pop(name, None)
    if head is not None:
        model_head = plain(model.lm_head.get_parameter("weight")).cpu()
        # peft saves the frozen head beside an adapter on it: it must be the one that this model has.
        if model_head.shape != head.shape or not torch.equal(head.to(model_head.dtype), model_head):
            raise CheckpointError(
                f"{folder}: {name} is not the model's head: load the model that the adapter was trained on"
            )
    return left


def _keys(adapters: Mapping[str, Adapter], modules: Modules) -> dict[str, Adapter]:
    """Return the name in an adapter's file, without ".lora_A.weight", of each adapter of transformers' modules.

    peft wraps the module of a parameter, once for each of its parameters in order: the wrapper of gate_up_proj, or of
    up_proj where experts have no gate, is inside the one of down_proj.
    """
    keys = {}
    for name, adapter in adapters.items():
        key = name
        if module_of(adapter.place) in modules.counts:
            experts, _, parameter = name.rpartition(".")
            is_up = parameter in ("gate_up_proj", "up_proj")
            if is_up and f"{experts}.down_proj" in adapters:
                key = f"{experts}.base_layer"
            else:
                key = experts
        keys[f"{PREFIX}{key}"] = adapter
    return keys


def _expected(
    model: CausalLM,
    adapters: Mapping[str, Adapter],
    whole: Mapping[str, str],
    modules: Modules,
    dora: bool,
) -> dict[str, Tensor]:
    """Return the names and shapes in the file of an adapter, on the meta device."""
    expected: dict[str, tuple[int, ...]] = {
        f"{PREFIX}{name}.weight": (model.config.vocab_size, model.config.hidden_size)
        for name in whole
    }
    for key, adapter in _keys(adapters, modules).items():
        shape_of_a, shape_of_b = modules.sizes(adapter)
        expected[f"{key}.lora_A.weight"] = shape_of_a
        expected[f"{key}.lora_B.weight"] = shape_of_b
        if dora:
            expected[f"{key}{MAGNITUDE}"] = (adapter.place.shape[0],)
    return {name: torch.empty(shape, device="meta") for name, shape in expected.items()}


def layers_in(model: CausalLM, adapter_name: str) -> dict[str, LoraLinear]:
    """Return the name of each layer that has the adapter -> the layer."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear) and adapter_name in module.lora_A:
            layers[without_layers(name)] = module
    return layers


def adapters_in(model: CausalLM, adapter_name: str) -> dict[str, Adapter]:
    """Return the name of each layer that has the adapter -> its rows, rank and scaling."""
    modules = adaptable_modules(model)
    adapters = {}
    for name, layer in layers_in(model, adapter_name).items():
        base = layer.get_base_layer()
        place = base.place if isinstance(base, NamedRows) else modules.ours[name]
        adapters[name] = Adapter(place, layer.r[adapter_name], layer.scaling[adapter_name])
    return adapters


def ranks_of(layers: Mapping[str, Adapter]) -> dict[str, tuple[int, float]]:
    """Return the rank and the scaling of each layer, to be compared."""
    return {name: (one.rank, round(one.scaling, 9)) for name, one in layers.items()}


def parameters_in(model: CausalLM, adapter_name: str) -> dict[str, Tensor]:
    """Return the adapter's "<te.Linear>.lora_A" and ".lora_B", and the parameters of fully trained modules."""
    parameters: dict[str, Tensor] = {}
    for name, layer in layers_in(model, adapter_name).items():
        parameters[f"{name}.lora_A"] = layer.lora_A[adapter_name].get_parameter("weight")
        parameters[f"{name}.lora_B"] = layer.lora_B[adapter_name].get_parameter("weight")
        if adapter_name in layer.lora_magnitude_vector:
            magnitude = layer.lora_magnitude_vector[adapter_name].get_parameter("weight")
            parameters[f"{name}.lora_magnitude"] = magnitude
    # modules_to_save: whole copies that peft trains beside the frozen originals.
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save:
            parameters[f"{name}.weight"] = module.modules_to_save[adapter_name].get_parameter(
                "weight"
            )
    return parameters


def names_in_transformers(place: Place, modules: Modules) -> dict[str, Place]:
    """Return transformers' names of the linears, or of the parameter of experts, that are these rows, each with its."""
    module = module_of(place)
    if place == modules.ours[module]:
        return modules.parts_of(module)
    return {name: place for name, rows in modules.theirs.items() if rows == place}


def warn_of_peft(model: CausalLM, adapter_name: str, use_dora: bool) -> None:
    """Warn if peft will drop or refuse adapters in the file of a run that begins, as `adapter_file` does at a save."""
    modules = adaptable_modules(model)
    theirs: list[str] = []
    for one in adapters_in(model, adapter_name).values():
        theirs += names_in_transformers(one.place, modules)
    _warn_of_peft(modules, theirs, use_dora, stacklevel=3)


def _warn_of_peft(modules: Modules, theirs: Iterable[str], use_dora: bool, stacklevel: int) -> None:
    """Warn if peft will drop or refuse adapters of these modules of transformers."""
    as_parameters = set(modules.experts)
    # Linears that peft would take for experts are named as parameters, for which it has no DoRA.
    if not use_dora:
        as_parameters |= modules.taken_for_experts
    dropped = dropped_by_peft(modules.architecture, set(theirs) - as_parameters)
    if dropped:
        warnings.warn(
            f"{dropped}: load_lora reads them; for transformers merge them, or leave them out",
            stacklevel=stacklevel,
        )


def adapter_file(
    model: CausalLM, config: LoraConfig, adapter_name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config of an adapter, which has this config, as peft saves them in transformers."""
    modules = adaptable_modules(model)
    parameters = {name: p.detach() for name, p in parameters_in(model, adapter_name).items()}
    layers = adapters_in(model, adapter_name)
    adapters: dict[str, Adapter] = {}
    pairs: dict[Place, tuple[Tensor, Tensor]] = {}
    lengths: dict[Place, Tensor] = {}
    for layer, adapter in layers.items():
        a = parameters[f"{layer}.lora_A"]
        b = parameters[f"{layer}.lora_B"]
        magnitude = parameters.get(f"{layer}.lora_magnitude")
        # An adapter of a whole te.Linear becomes one per linear of transformers: the same A, and its rows of B.
        is_whole = adapter.place == modules.ours[module_of(adapter.place)]
        for name, place in names_in_transformers(adapter.place, modules).items():
            adapters[name] = dataclasses.replace(adapter, place=place)
            rows = place.save(b) if is_whole else b
            pairs[place] = _as_in_file(a.clone(), rows.clone().contiguous(), place, modules)
            if magnitude is not None:
                of_rows = place.save(magnitude) if is_whole else magnitude
                lengths[place] = of_rows.clone()
    tensors: dict[str, Tensor] = {}
    for key, adapter in _keys(adapters, modules).items():
        a, b = pairs[adapter.place]
        tensors[f"{key}.lora_A.weight"] = a
        tensors[f"{key}.lora_B.weight"] = b
        if adapter.place in lengths:
            tensors[f"{key}{MAGNITUDE}"] = lengths[adapter.place]
    trained_whole = []  # transformers' names of the modules that are fully trained
    for theirs, ours in modules.whole.items():
        parameter = parameters.get(f"{ours}.weight")
        if parameter is not None:
            trained_whole.append(theirs)
            tensors[f"{PREFIX}{theirs}.weight"] = parameter.clone()
    values: dict[str, Any] = {**config.to_dict(), "task_type": "CAUSAL_LM", "inference_mode": True}
    values["init_lora_weights"] = True
    values.pop("runtime_config", None)
    values |= their_targets(adapters, modules, config.use_rslora, parameters=not config.use_dora)
    values["modules_to_save"] = trained_whole or None
    if values["target_parameters"]:
        # peft has none for parameters, and only training uses it; DROPOUT keeps it.
        values["lora_dropout"] = 0.0
    _warn_of_peft(modules, adapters, config.use_dora, stacklevel=4)
    tensors = {modules.in_adapter_file(name): tensor for name, tensor in tensors.items()}
    return tensors, json.loads(json.dumps(values, default=list))  # peft has sets and enums there


def _as_in_file(a: Tensor, b: Tensor, place: Place, modules: Modules) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank] of a module as a file has them, or a file's pair as a module has it.

    The exchange of the two, where a file has the factors of the transposed weights, is its own inverse.
    """
    if not modules.swaps(place):
        return a, b
    a, b = swapped_factors(a, b, modules.counts[module_of(place)])
    return a.contiguous(), b.contiguous()


def _of_text(names: list[str], root: str) -> list[str] | str:
    """Return the ends of names of modules as an expression for the text model alone where it is inside another.

    peft would search that one too, such as an image encoder, and refuse modules of a kind that it does not know.
    """
    if root == "model." or not names:
        return names
    layers = rf"(?:{re.escape(root)}|model\.)layers\."
    ends = []
    whole_names = []
    heads = []
    for name in names:
        if "." in name:
            inside_layers = name.removeprefix(f"{root}layers.")
            whole_names.append(layers + re.escape(inside_layers))
        elif name == "lm_head":
            heads.append(name)
        else:
            ends.append(re.escape(name))
    expressions = []
    if ends:
        expressions.append(rf"{layers}.*\.(?:{'|'.join(ends)})")
    return "|".join([*expressions, *whole_names, *heads])


def their_targets(
    adapters: Mapping[str, Adapter], modules: Modules, rslora: bool, parameters: bool
) -> dict[str, Any]:
    """Return the shortest fields of LoraConfig that describe these adapters of transformers' modules.

    With `parameters`, linears that peft would take for experts are named by their weights, in `target_parameters`,
    which peft supports with neither DoRA nor dropout.
    """
    # Modules that are named by their weights.
    weights = modules.routers
    if parameters:
        weights = weights | modules.taken_for_experts

    def targets(theirs: Iterable[str], parts: int) -> list[str]:
        """Return the last `parts` of names that all have adapters, and others whole."""
        ends: dict[str, list[str]] = {}
        for name in theirs:
            ends.setdefault(".".join(name.split(".")[-parts:]), []).append(name)
        endings: list[str] = []
        for end, names in ends.items():
            present = [name for name in names if name in adapters]
            # An end that also fits linears without an adapter would adapt those too.
            if len(present) == len(names):
                endings.append(end)
            else:
                endings += present
        return endings

    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, adapter in adapters.items():
        pattern = f"{name}.weight" if name in weights else name
        ranks[pattern] = adapter.rank
        alphas[pattern] = alpha_of(adapter.scaling, adapter.rank, rslora)
    # The most common rank is the field, and patterns name the exceptions.
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    linears = [name for name in modules.theirs if name not in weights]
    of_weights = [f"{name}.weight" for name in targets(sorted(weights), 1)]
    return {
        "target_modules": _of_text(targets(linears, 1), modules.root),
        "target_parameters": targets(modules.experts, 2) + of_weights or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }
