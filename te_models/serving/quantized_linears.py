"""The te.Linears of a model that an export quantizes: what its recipe and the folder that it was read from leave.

A quantized folder has chosen already which linears are exact enough for it: its export in another format keeps to that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from te_models.config.model import ModelConfig
from te_models.config.precision import HEAD
from te_models.interop.hf import hugging_face_documents, open_hugging_face
from te_models.interop.origin import Origin
from te_models.interop.quantized import read_storage
from te_models.interop.tensor_places import tensor_places
from te_models.model.decoder import Decoder


def quantized_modules(model: Decoder, origin: Origin) -> dict[str, nn.Module]:
    """Return name -> te.Linear of blocks that an export quantizes: those that neither recipe nor folder has in BF16."""
    kept = linears_kept(model, origin)
    modules = {}
    for name, precision in model.precision.linears.items():
        if name != HEAD and not precision.stays and name not in kept:
            modules[name] = model.get_submodule(name)
    return modules


def linears_kept(model: Decoder, origin: Origin) -> frozenset[str]:
    """Return the te.Linears of blocks that are not quantized because the quantized folder of the model has them so.

    There are none under an FP8 recipe that the user chose, which decides by itself.
    """
    if model.recipe.quantized and not model.recipe_reason:
        return frozenset()
    precisions = model.precision.linears
    kept = [name for name in _unquantized_in(origin, model.config) if not precisions[name].stays]
    return frozenset(kept)


def weight_shapes(config: ModelConfig, names: Iterable[str]) -> dict[str, torch.Size]:
    """Return name -> shape [out, in] of each weight of the te.Linears `names` of blocks."""
    shapes = {}
    for name in names:
        linear = config.linears[name]
        for weight in linear.weights:
            shapes[f"{name}.{weight}"] = torch.Size((linear.outputs, linear.inputs))
    return shapes


def _unquantized_in(origin: Origin, config: ModelConfig) -> frozenset[str]:
    """Return the te.Linears that the folder of a model has unquantized; none if it has no quantized weights at all."""
    if origin.folder is None:
        return frozenset()
    documents = hugging_face_documents(origin.folder)
    if documents is None or read_storage(origin.folder, documents["config"]) is None:
        return frozenset()
    shapes = weight_shapes(config, config.linears)
    quantized = set()
    with open_hugging_face(origin.folder, documents, read_scales=False) as folder:
        for theirs, place in tensor_places(folder.family, config, shapes).items():
            name = place.name.rpartition(".")[0]
            # MXFP4 is a storage of stacks of experts, whose single weights have no names.
            if theirs in folder.stored.scales or (folder.mxfp4 and config.linears[name].experts):
                quantized.add(name)
    return frozenset(config.linears.keys() - quantized)
