"""Experts stored as one tensor per projection, under names that each expert would have alone.

    <layer>.mlp.experts.<projection>         [E, inputs, outputs], as in gpt-oss, or [E, outputs, inputs]
    <layer>.mlp.experts.<projection>_bias    [E, outputs]

are the tensors `<layer>.mlp.experts.<e>.<projection>.weight`, [outputs, inputs], and `.bias` of E experts. In OpenAI's
own folders the first is MXFP4 (OCP Microscaling Formats 1.0), dequantized when it is read:

    <projection>_blocks    uint8 [E, outputs, inputs / 32, 16], two E2M1 per byte, the lower half first
    <projection>_scales    uint8 [E, outputs, inputs / 32], an E8M0 per 32 values
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from te_models.errors import CheckpointError, UsageError
from te_models.numerics import nvfp4
from te_models.numerics.e8m0 import e8m0_to_float

STACK = re.compile(r"(.+\.experts\.)([a-z_]+?)(_bias|_blocks|_scales|)")
INPUTS_FIRST = "inputs first"
OUTPUTS_FIRST = "outputs first"
DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
ALONE = re.compile(r"(.+\.experts\.)(\d+)\.([a-z_]+)\.(weight|bias)")


def experts_of(
    name: str, tensor: Tensor, scales: Callable[[str], Tensor], order: str = INPUTS_FIRST
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each expert's part of a stored tensor, or the tensor itself if it is no stack.

    Nothing for scales, which `scales` reads by their name. Tensors on the meta device give the shapes. `order` is that
    of the dimensions of a weight in the stack, INPUTS_FIRST or OUTPUTS_FIRST.

    Raises:
        CheckpointError: MXFP4 with other dtypes or shapes than above.
    """
    match = STACK.fullmatch(name)
    if match is None or tensor.dim() != DIMENSIONS[match[3]]:
        yield name, tensor
        return
    prefix, projection, kind = match.groups()
    if kind == "_blocks":
        parts = _dequantized(name, tensor, scales(f"{prefix}{projection}_scales"))
    else:
        weights = tensor.mT if order == INPUTS_FIRST else tensor
        # Scales are read with their blocks, and yield nothing themselves.
        parts = {"": weights, "_bias": tensor, "_scales": ()}[kind]
    for expert, part in enumerate(parts):
        yield f"{prefix}{expert}.{projection}.{'bias' if kind == '_bias' else 'weight'}", part


def first_expert(name: str) -> str:
    """Return the name of the first expert's tensor in a stored stack; "" for scales and other tensors."""
    match = STACK.fullmatch(name)
    if match is None or match[3] == "_scales":
        return ""
    return f"{match[1]}0.{match[2]}.{'bias' if match[3] == '_bias' else 'weight'}"


def weights_in(name: str, experts: int) -> list[str]:
    """Return the names of the experts' weights in a stored stack."""
    match = STACK.fullmatch(name)
    assert match is not None
    prefix, projection, _ = match.groups()
    return [f"{prefix}{expert}.{projection}.weight" for expert in range(experts)]


def stack_order(tensors: Mapping[str, Tensor], hidden_size: int) -> str:
    """Return the order of dimensions in which a folder has the weights of experts, by their shapes.

    transformers reads either for some families: releases have INPUTS_FIRST there, what it saves OUTPUTS_FIRST.
    """
    for name, tensor in tensors.items():
        if not name.endswith(".experts.down_proj") or tensor.dim() != 3:
            continue
        _, rows, columns = tensor.shape
        if rows != columns:  # else the other projection, which is twice as wide, tells
            return OUTPUTS_FIRST if rows == hidden_size else INPUTS_FIRST
        other = tensors.get(name.removesuffix("down_proj") + "gate_up_proj")
        if other is not None and other.dim() == 3:
            return INPUTS_FIRST if other.shape[1] == hidden_size else OUTPUTS_FIRST
    return INPUTS_FIRST


def _dequantized(name: str, blocks: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Yield the values [outputs, inputs] of each expert, FP32 that BF16 holds exactly; on the meta device BF16."""
    if (
        blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.shape != (*scales.shape, 16)
    ):
        raise CheckpointError(
            f"{name} is {blocks.dtype} {list(blocks.shape)} with scales {scales.dtype} {list(scales.shape)}: MXFP4 "
            "has two values per byte, and a scale for each 16 bytes"
        )
    for data, exponents in zip(blocks, scales, strict=True):
        if data.is_meta:
            yield torch.empty(len(data), 32 * data.shape[1], dtype=torch.bfloat16, device="meta")
        else:
            # E2M1 values of 16 bytes times a power of two, exact in BF16.
            yield nvfp4.unpack(data).mul_(e8m0_to_float(exponents)[..., None]).flatten(1)


def stacked(tensors: Mapping[str, Tensor], order: str = INPUTS_FIRST) -> dict[str, Tensor]:
    """Return tensors by name, single experts stacked, in the order of the first of each stack.

    `order` as in `experts_of`.

    Raises:
        UsageError: an expert is quantized.
    """
    members: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        match = ALONE.fullmatch(name)
        if ".experts." in name and (match is None or tensor.dtype.itemsize < 2):
            raise UsageError(
                f"{name} would be quantized, and the experts of this architecture are stacked in BF16: choose the "
                "format bf16, or keep them in BF16 (precision *.mlp.gate_up_proj=bf16 and *.mlp.down_proj=bf16)"
            )
        if match is None:
            members[name] = [tensor]
        else:
            prefix, _, projection, kind = match.groups()
            stack = f"{prefix}{projection}"
            if kind == "bias":
                stack += "_bias"
            elif order == INPUTS_FIRST:
                # [inputs, outputs], as in a product x @ weight; te-models has [outputs, inputs].
                tensor = tensor.mT
            members.setdefault(stack, []).append(tensor)
    stored = {}
    for name, parts in members.items():
        if STACK.fullmatch(name):
            stored[name] = torch.stack(parts)
        else:
            stored[name] = parts[0]
    return stored
