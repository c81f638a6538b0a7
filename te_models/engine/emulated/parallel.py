"""Tensor and sequence parallelism of te.Linear: communication, and its format.

p ranks share a layer, T is the number of tokens; sequence parallelism splits the tokens outside the pair of layers:

| mode | weight | forward | backward |
|---|---|---|---|
| column | [O/p, I] | [the T/p tokens of the input are gathered] | dx is all-reduced [reduce-scattered to T/p tokens] |
| row | [O, I/p] | the output is all-reduced [or reduce-scattered to T/p tokens] | [the T/p tokens of dy are gathered] |

Tensors are quantized before they are gathered, which needs one scale on all ranks: delayed scaling has it from its amax
reduction, current scaling and NVFP4 reduce the tensor's amax over the group before they cast. 1x128 blocks are gathered
quantized where each rank has whole blocks, else in high precision and quantized after, as in Transformer Engine. A
weight's amax is not reduced: under current scaling and NVFP4 each shard has a scale of its own.
"""

import warnings
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_models.distributed.collectives import all_gather, all_reduce, reduce_scatter
from te_models.distributed.planned_ranks import world_size
from te_models.engine.emulated.recipe import DelayedScaling, Recipe
from te_models.errors import require
from te_models.numerics.matrices import pad_to
from te_models.numerics.nvfp4 import NVFP4Quantizer
from te_models.numerics.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
from te_models.numerics.tensors import (
    BLOCK,
    MX_BLOCK,
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MaybeQuantized,
    MXFP8TensorStorage,
    QuantizedTensorStorage,
)

MODES = (None, "row", "column")
T = TypeVar("T", bound=MaybeQuantized)
_PER_TENSOR = (Float8Quantizer, Float8CurrentScalingQuantizer)


class Parallelism(NamedTuple):
    """The split of one te.Linear: `mode` None, "row" or "column" over the `size` ranks of `group`."""

    mode: str | None = None
    size: int = 1
    group: ProcessGroup | None = None
    sequence: bool = False

    @property
    def gathers_input(self) -> bool:
        """True if a rank receives only its own tokens of the input."""
        return self.sequence and self.mode == "column"

    @property
    def gathers_gradient(self) -> bool:
        """True if a rank receives only its own tokens of the output's gradient."""
        return self.sequence and self.mode == "row"

    def configure(self, input_quantizer: Quantizer, grad_output_quantizer: Quantizer) -> None:
        """Make the quantizers of gathered tensors agree on an amax first."""
        for quantizer, gathers in (
            (input_quantizer, self.gathers_input),
            (grad_output_quantizer, self.gathers_gradient),
        ):
            if isinstance(quantizer, (Float8CurrentScalingQuantizer, NVFP4Quantizer)):
                # With one amax over all ranks the gathered parts have one scale, as if one process had cast the whole.
                quantizer.with_amax_reduction = gathers
                quantizer.amax_reduction_group = self.group if gathers else None

    def rowwise_only(self, quantizer: Quantizer | None) -> bool:
        """Return True if one rowwise gather of the input serves both GEMMs: with one scale, both copies are equal."""
        return self.gathers_input and isinstance(quantizer, _PER_TENSOR)

    def gather_input(self, x: T, quantizer: Quantizer | None = None, columnwise: bool = False) -> T:
        """Return the input of all ranks [T, I]: for the forward, or `columnwise` for the weight gradient."""
        if not self.gathers_input:
            return x
        if quantizer is not None:
            # With one scale per tensor both copies hold the same bytes: the rowwise gather of the forward serves
            # backward too.
            columnwise = columnwise and not self.rowwise_only(quantizer)
            quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        return _gather(x, quantizer, self.group)

    def gather_gradient(self, dy: MaybeQuantized, quantizer: Quantizer | None = None) -> Any:
        """Return dy of all ranks [T, O], quantized if there is a quantizer."""
        if self.gathers_gradient:
            return _gather(dy, quantizer, self.group)
        return dy if quantizer is None or isinstance(dy, QuantizedTensorStorage) else quantizer(dy)

    def reduce_output(self, out: Tensor) -> Tensor:
        """Return the sum of a row-parallel layer's partial outputs, all of it or this rank's tokens."""
        return self._reduced(out) if self.mode == "row" else out

    def reduce_input_gradient(self, dx: Tensor) -> Tensor:
        """Return the sum of a column-parallel layer's partial dx, all of it or this rank's tokens."""
        return self._reduced(dx) if self.mode == "column" else dx

    def _reduced(self, value: Tensor) -> Tensor:
        if self.size == 1:
            return value
        # Partial sums in the dtype of the result: each rank has rounded its part, as on GPUs.
        return reduce_scatter(value, self.group) if self.sequence else all_reduce(value, self.group)

    def check(self, initialized: bool, recipe: Recipe | None) -> None:
        """Check the group and the recipe before a forward; `recipe` is None without FP8."""
        require(
            initialized or self.size == 1,
            "Tensor parallel group not initialized. Call set_tensor_parallel_group() before forward pass when "
            "tp_size > 1.",
            RuntimeError,
        )
        require(
            not (self.sequence and isinstance(recipe, DelayedScaling)) or recipe.reduce_amax,
            "Amax reduction across tensor parallel group is necessary when using sequence parallelism with FP8.",
            AssertionError,
        )

    def check_quantized_results(self, output: bool, input_gradient: bool) -> None:
        """Raise a ValueError for FP8 results that would have to be summed in FP8."""
        if self.size > 1 and (
            (output and self.mode == "row") or (input_gradient and self.mode == "column")
        ):
            option = "fp8_output" if self.mode == "row" else "fp8_grad"
            raise ValueError(
                f"a {self.mode}-parallel te.Linear sums its result over the ranks: use {option}=False"
            )


def divide(size: int, parts: int) -> int:
    """Return size / parts; raise an AssertionError if it is not whole."""
    require(size % parts == 0, f"{size} is not divisible by {parts}", AssertionError)
    return size // parts


def _gather(x: Any, quantizer: Quantizer | None, group: ProcessGroup | None) -> Any:
    """Return x of all ranks along the first dimension; with a quantizer, the copies that it is set to make."""
    if quantizer is None:
        return all_gather(x, group)
    quantized = isinstance(x, QuantizedTensorStorage)
    if not _can_gather_quantized(x._shape if quantized else x.shape, quantizer):
        # Blocks are incomplete. A quantized x is rounded a second time, as in Transformer Engine.
        warnings.warn(
            "Cannot quantize input tensor. Performing all-gather in high precision. Give each rank rows in multiples "
            f"of the recipe's block, not {list(x._shape if quantized else x.shape)}.",
            stacklevel=2,
        )
        return quantizer(all_gather(x.dequantize(dtype=x._dtype) if quantized else x, group))
    return _gather_quantized(x if quantized else quantizer(x), quantizer, group)


def _can_gather_quantized(shape: torch.Size, quantizer: Quantizer) -> bool:
    """Return True if each rank's data and scales are a part of the whole tensor's."""
    if isinstance(quantizer, Float8BlockQuantizer):
        rows = shape[:-1].numel()
        columns = shape[-1]
        # 128 x 128 blocks belong to weights, which are never gathered here.
        return quantizer.block_scaling_dim == 1 and rows % BLOCK == 0 and columns % BLOCK == 0
    return quantizer.is_quantizable(torch.empty(shape, device="meta"))


def _gather_quantized(
    x: QuantizedTensorStorage, quantizer: Quantizer, group: ProcessGroup | None
) -> QuantizedTensorStorage:
    """Return the storage of all ranks' rows; per-tensor values (a scale, an amax) are this rank's."""
    # Scales are gathered without the padding of each rank, and the whole is padded again.
    layout = _layout(x)
    gathered = []
    for name, value in zip(x._tensors, x.get_data_tensors(), strict=True):
        if not isinstance(x, Float8TensorStorage):
            is_used = (
                quantizer.columnwise_usage if "columnwise" in name else quantizer.rowwise_usage
            )
            if not is_used:
                value = None
        if value is not None and name in layout:
            dim, size, padding = layout[name]
            value = all_gather(value if size is None else value[: size[0], : size[1]], group, dim)
            if padding is not None:
                value = pad_to(value, *padding)
        elif name == "_transpose":
            value = None
        gathered.append(value)
    whole = x.with_data_tensors(tuple(gathered))
    whole._shape = torch.Size((x._shape[0] * world_size(group), *x._shape[1:]))
    return whole


def _layout(
    x: QuantizedTensorStorage,
) -> dict[str, tuple[int, tuple[int, int] | None, tuple[int, int] | None]]:
    """Return attribute -> (dimension of its tokens, size of scales without padding, multiples they are padded to)."""
    m, k = x._matrix
    if isinstance(x, Float8TensorStorage):
        return {"_data": (0, None, None)}
    if isinstance(x, Float8BlockwiseQTensorStorage):
        return {
            "_rowwise_data": (0, None, None),
            "_rowwise_scale_inv": (1, (k // BLOCK, m), (1, 4)),
            "_columnwise_data": (1, None, None),
            "_columnwise_scale_inv": (0, (m // BLOCK, k), (1, 4)),
        }
    if isinstance(x, MXFP8TensorStorage):
        return {
            "_rowwise_data": (0, None, None),
            "_rowwise_scale_inv": (0, (m, k // MX_BLOCK), (128, 4)),
            "_columnwise_data": (0, None, None),
            "_columnwise_scale_inv": (0, (m // MX_BLOCK, k), (4, 128)),
        }
    return {  # of NVFP4
        "_rowwise_data": (0, None, None),
        "_rowwise_scale_inv": (0, (m, k // 16), (128, 4)),
        "_columnwise_data": (1, None, None),
        "_columnwise_scale_inv": (1, (k, m // 16), (128, 4)),
    }
