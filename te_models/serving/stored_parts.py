"""The quantized weights of the folder that a model was read from, which an export in the same format writes again.

Their values alone do not say which scales they had: another export of the same weights may find others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from te_models.interop.hf import HuggingFaceFolder, hugging_face_documents, open_hugging_face
from te_models.interop.origin import Origin
from te_models.interop.quantized import dequantize, read_storage
from te_models.interop.tensor_places import tensor_places
from te_models.model.decoder import Decoder
from te_models.serving.formats import ExportFormat, Parts


@contextmanager
def source_in(format: ExportFormat, origin: Origin) -> Iterator[HuggingFaceFolder | None]:
    """Open the folder that a model was read from, if its weights are stored in `format`; else give None."""
    if origin.folder is None or format.storage is None:
        documents = None
    else:
        documents = hugging_face_documents(origin.folder)
    if (
        origin.folder is None
        or documents is None
        or read_storage(origin.folder, documents["config"]) != format.storage
    ):
        yield None
    else:
        with open_hugging_face(origin.folder, documents) as folder:
            yield folder


def stored_inputs(
    folder: HuggingFaceFolder | None, model: Decoder, format: ExportFormat
) -> dict[str, Tensor]:
    """Return the static scale of the input of each of our modules: the one for the largest input of its parts."""
    if folder is None:
        return {}
    shapes = {
        name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    scales: dict[str, Tensor] = {}
    divides = format.static == "input_global_scale"
    largest = torch.minimum if divides else torch.maximum
    for theirs, place in tensor_places(folder.family, model.config, shapes).items():
        if theirs in folder.stored.inputs:
            ours = place.name.rpartition(".")[0]
            scale = folder.stored.inputs[theirs].reshape([1] if divides else [])
            scales[ours] = largest(scales[ours], scale) if ours in scales else scale
    return scales


def parts_as_stored(
    folder: HuggingFaceFolder | None, values: dict[str, Tensor], encoded: Sequence[Parts]
) -> list[Parts]:
    """Return the parts of weights as the folder has them, or those `encoded` if any value differs from the stored one.

    `values` are the weights [out, in] by their names, which servers fuse: one scale of all is one number.
    """
    if folder is None or folder.stored.storage is None:
        return list(encoded)
    original_parts: list[Parts] = []
    for (name, weight), parts in zip(values.items(), encoded, strict=True):
        stored = {part: f"{name.removesuffix('.weight')}.{part}" for part in parts}
        # One weight that the folder lacks, and none is kept: a server fuses them, with one scale.
        if name not in folder.stored.scales or not all(map(folder.has, stored.values())):
            return list(encoded)
        tensors = {part: folder.read(tensor) for part, tensor in stored.items()}
        data = tensors[folder.stored.storage.data]
        stored_values = dequantize(folder.stored.storage, data, folder.stored.scales[name]).to(
            weight.dtype
        )
        if not torch.equal(stored_values, weight.to(stored_values.device)):
            return list(encoded)
        for part, tensor in parts.items():
            # A scale per tensor is one number of all weights that a server fuses.
            if (
                original_parts
                and tensor.dim() < 2
                and not torch.equal(original_parts[0][part], tensors[part])
            ):
                return list(encoded)
        original_parts.append(tensors)
    return original_parts
