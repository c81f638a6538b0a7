"""FP8 weights of a folder as FP8 primary weights of a model, with the folder's own data and scales.

That is possible where both have the same blocks: one scale per fused weight (DelayedScaling, Float8CurrentScaling), or
one per 128 x 128 elements (Float8BlockScaling). Where scales differ inside a block of ours, such as the scales of q and
k under one scale per weight, the weight stays as the loader made it: quantized from the dequantized values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from te_models.config.recipe import Recipe
from te_models.files.tensors import SafetensorsFile
from te_models.fp8.primary_weights import (
    SHARDED_SCHEMES,
    load_quantized_weights,
    quantized,
    quantized_weights,
    set_scale,
)
from te_models.interop.quantized import StoredWeights
from te_models.interop.tensor_places import Place
from te_models.model.decoder import Decoder

BLOCK = 128


def blocks_of(recipe: Recipe) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in FP8 weights, 0 for all; None if scales are not FP32."""
    if recipe.scheme in SHARDED_SCHEMES:
        return 0, 0
    if recipe.scheme == "Float8BlockScaling" and recipe.fields["w_block_scaling_dim"] == 2:
        return BLOCK, BLOCK
    return None


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, int], columns: int) -> Tensor:
    """Return one scale per row and `columns` columns (0: all), [rows, n], of a weight with one scale per `block`.

    Blocks must be at least `columns` wide.
    """
    rows, width = shape
    # [grid rows, grid columns] -> [rows, grid columns]; the last block may reach beyond the weight.
    by_row = scales.repeat_interleave(block[0] or rows, 0)[:rows]
    if not columns:
        return by_row
    # The first column of each block of ours lies in one block of theirs, since theirs are no narrower.
    starts = torch.arange(0, width, columns, device=scales.device)
    return by_row[:, starts // (block[1] or width)]


def collapse(by_row: Tensor, used: Tensor, rows: int) -> Tensor | None:
    """Return one scale per `rows` rows (0: all), [n, columns]; None if they differ inside a block.

    Args:
        by_row: one scale per row and column, [rows, columns].
        used: bool [rows], False for rows that hold nothing and fit any scale.
        rows: rows per block.
    """
    height = rows or len(by_row)
    scales = []
    for block, is_used in zip(by_row.split(height), used.split(height), strict=True):
        if not bool(is_used.any()):
            # A block of padding alone holds zeros, for which any scale is right.
            scales.append(block.new_ones(block.shape[1]))
            continue
        scales_of_rows = block[is_used]
        if not bool((scales_of_rows == scales_of_rows[0]).all()):
            return None
        scales.append(scales_of_rows[0])
    return torch.stack(scales)


@torch.no_grad()
def keep_stored_weights(
    model: Decoder,
    places: Mapping[str, Place],
    files: Iterable[SafetensorsFile],
    stored: StoredWeights,
) -> None:
    """Give FP8 primary weights the data and scales of a folder where both have the same blocks.

    The model is already filled. `places` are the rows of their tensors by name, in these safetensors `files`, and
    `stored` the weights in them.
    """
    # Four-bit values are not FP8, and under tensor parallelism a rank has a part of the rows only.
    if model.tp.size > 1 or stored.storage is None or stored.storage.packed:
        return
    fp8_parameters = {}
    for name, parameter in model.named_parameters():
        if quantized(parameter) is not None:
            fp8_parameters[name] = parameter
    parts_of: dict[str, list[str]] = {}  # our parameter -> the weights of theirs that are its rows
    for name, place in places.items():
        if place.name in fp8_parameters:
            parts_of.setdefault(place.name, []).append(name)
    data_names = {weight: data for data, weight in stored.data.items()}
    for name, parts in parts_of.items():
        recipe = model.precision.recipe_of(name)
        block = None if recipe is None else blocks_of(recipe)
        if block is None or not _is_no_narrower(stored.storage.block[1], block[1]):
            continue
        parameter = fp8_parameters[name]
        scales = _fused_scales(parts, places, stored, parameter.shape, block)
        if scales is None:
            continue
        data = torch.zeros(parameter.shape, dtype=torch.uint8)
        part_of = {data_names[part]: part for part in parts}
        for file in files:
            for data_name in part_of.keys() & file.tensors.keys():
                values = file.read(data_name).view(torch.uint8)
                places[part_of[data_name]].load(data, values)
        _write(model, name, data, scales, parameter)


def _is_no_narrower(theirs: int, ours: int) -> bool:
    """Return whether each block of ours lies in one of theirs, by the columns of both; 0: all columns."""
    if not theirs or not ours:
        return True
    return theirs % ours == 0


def _fused_scales(
    parts: list[str],
    places: Mapping[str, Place],
    stored: StoredWeights,
    shape: torch.Size,
    block: tuple[int, int],
) -> Tensor | None:
    """Return the scales of one parameter in its own blocks; None if it cannot have the stored ones."""
    if stored.storage is None or not all(part in stored.scales for part in parts):
        return None
    rows, _ = shape
    by_row = None
    # Rows of padding have no scale: they are left out where blocks of rows are compared.
    used = torch.zeros(rows, 1)
    for part in parts:
        blocks = (places[part].shape[0], places[part].shape[1])
        values = spread(stored.scales[part], stored.storage.steps(blocks), blocks, block[1])
        # A parameter with one scale cannot have parts with several.
        if not block[1] and not bool((values == values[:1, :1]).all()):
            return None
        if not block[1]:
            values = values[:, :1]
        if by_row is None:
            by_row = torch.ones(rows, values.shape[1])
        places[part].load(by_row, values)
        places[part].load(used, torch.ones(blocks[0], 1))
    if by_row is None:
        return None
    scales = collapse(by_row, used[:, 0] > 0, block[0])
    if scales is None or not bool((scales > 0).all()):
        return None
    return scales


def _write(model: nn.Module, name: str, data: Tensor, scales: Tensor, parameter: Tensor) -> None:
    """Overwrite the data and scales of one FP8 weight."""
    live = {}
    for key, tensor in quantized_weights(model).items():
        if key.rsplit(".", 1)[0] == name:
            live[key] = tensor
    if f"{name}.data" in live:
        set_scale(parameter, scales.reshape(()))
        load_quantized_weights(
            model, {f"{name}.data": data, f"{name}.scale_inv": scales.reshape(1)}
        )
        return
    # Transformer Engine keeps weights in blocks a second time, transposed, for the gradient of the input.
    written = {"rowwise_data": data, "columnwise_data": data.t().contiguous()}
    written |= {"rowwise_scale_inv": scales, "columnwise_scale_inv": scales.t()}
    padded_parts = {}
    for part, tensor in written.items():
        if f"{name}.{part}" in live:
            # Its scales are padded to multiples that its kernels read.
            padded = torch.zeros(live[f"{name}.{part}"].shape, dtype=tensor.dtype)
            padded[tuple(slice(size) for size in tensor.shape)] = tensor
            padded_parts[f"{name}.{part}"] = padded
    load_quantized_weights(model, padded_parts)
