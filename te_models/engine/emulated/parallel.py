"""Tensor and sequence parallelism of te.Linear: what is communicated, when, and in which format.

p ranks share a layer, T is the number of tokens; sequence parallelism splits the tokens outside the pair of layers:

| mode | weight | forward | backward |
|---|---|---|---|
| column | [O/p, I] | [the T/p tokens of the input are gathered] | dx is all-reduced [or reduce-scattered to T/p tokens] |
| row | [O, I/p] | the output is all-reduced [or reduce-scattered to T/p tokens] | [the T/p tokens of dy are gathered] |

What is gathered is quantized first and travels as codes, which needs one scale on all ranks: delayed scaling has it from
its amax reduction, current scaling and NVFP4 reduce the tensor's amax over the group before they cast. 1x128 blocks travel
as codes where each rank has whole blocks; else in high precision, quantized after, as Transformer Engine does. A weight's
amax is not reduced: under current scaling and NVFP4 each shard has a scale of its own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.distributed.collectives import all_gather, all_reduce, reduce_scatter
from te_models.engine.emulated.nvfp4 import NVFP4Quantizer, NVFP4TensorStorage
from te_models.engine.emulated.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from te_models.engine.emulated.tensors import (
    BLOCK,
    MX_BLOCK,
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    QuantizedTensorStorage,
    pad_to,
)

MODES = (None, "row", "column")
# What Megatron-LM looks for on a parameter that is split along `partition_dim`.
_ATTRIBUTES = {"tensor_model_parallel": True, "partition_stride": 1}
_PER_TENSOR = (Float8Quantizer, Float8CurrentScalingQuantizer)


@dataclass(frozen=True)
class Parallelism:
    """How one te.Linear is split: `mode` None, "row" or "column" over the `size` ranks of `group`."""

    mode: str | None = None
    size: int = 1
    group: Any = None
    sequence: bool = False

    @property
    def gathers_input(self) -> bool:
        """Whether a rank is given its own tokens of the input alone."""
        return self.sequence and self.mode == "column"

    @property
    def gathers_gradient(self) -> bool:
        """Whether a rank is given its own tokens of the output's gradient alone."""
        return self.sequence and self.mode == "row"

    def configure(self, input_quantizer: Any, grad_output_quantizer: Any) -> None:
        """Let the quantizers of what is gathered agree on an amax first."""
        for quantizer, gathers in (
            (input_quantizer, self.gathers_input),
            (grad_output_quantizer, self.gathers_gradient),
        ):
            if hasattr(quantizer, "with_amax_reduction"):
                quantizer.with_amax_reduction = gathers
                quantizer.amax_reduction_group = self.group if gathers else None
            if gathers and isinstance(quantizer, NVFP4Quantizer) and quantizer.row_scaled_nvfp4:
                raise ValueError(
                    "row-scaled NVFP4 cannot be gathered: use sequence_parallel=False or row_scaled_activation=False"
                )

    def rowwise_only(self, quantizer: Any) -> bool:
        """Whether the input travels rowwise for both GEMMs: codes with one scale are the same codes transposed."""
        return self.gathers_input and isinstance(quantizer, _PER_TENSOR)

    def gather_input(self, x: Any, quantizer: Any = None, columnwise: bool = False) -> Any:
        """The input of all ranks [T, I]: for the forward, or `columnwise` for the weight gradient."""
        if not self.gathers_input:
            return x
        if quantizer is not None:
            columnwise = columnwise and not self.rowwise_only(quantizer)
            quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        return _gather(x, quantizer, self.group)

    def gather_gradient(self, dy: Any, quantizer: Any = None) -> Any:
        """dy of all ranks [T, O], quantized if there is a quantizer."""
        if self.gathers_gradient:
            return _gather(dy, quantizer, self.group)
        return dy if quantizer is None or isinstance(dy, QuantizedTensorStorage) else quantizer(dy)

    def reduce_output(self, out: Tensor) -> Tensor:
        """The sum of a row-parallel layer's partial outputs, all of it or this rank's tokens."""
        return self._reduced(out) if self.mode == "row" else out

    def reduce_input_gradient(self, dx: Tensor) -> Tensor:
        """The sum of a column-parallel layer's partial dx, all of it or this rank's tokens."""
        return self._reduced(dx) if self.mode == "column" else dx

    def _reduced(self, value: Tensor) -> Tensor:
        if self.size == 1:
            return value
        return reduce_scatter(value, self.group) if self.sequence else all_reduce(value, self.group)

    def mark(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        """Set the attributes by which Megatron-LM treats the parameters."""
        split = biases if self.mode == "column" else []
        for parameter in weights + split:
            for name, value in _ATTRIBUTES.items():
                setattr(parameter, name, value)
            parameter.partition_dim = 1 if self.mode == "row" else 0  # type: ignore[attr-defined]
        for bias in biases if self.mode == "row" else []:
            bias.sequence_parallel = self.sequence  # type: ignore[attr-defined]

    def check(self, initialised: bool, recipe: Any) -> None:
        """What must hold before a forward; `recipe` is the one of an FP8 forward, else None."""
        if self.size > 1 and not initialised:
            raise RuntimeError(
                "Tensor parallel group not initialized. Call set_tensor_parallel_group() before forward pass when "
                "tp_size > 1."
            )
        if self.sequence and recipe is not None and recipe.delayed() and not recipe.reduce_amax:
            raise AssertionError(
                "Amax reduction across tensor parallel group is necessary when using sequence parallelism with FP8."
            )

    def check_quantized_results(self, output: bool, input_gradient: bool) -> None:
        """Refuse FP8 results that would have to be summed as codes."""
        if self.size > 1 and ((output and self.mode == "row") or (input_gradient and self.mode == "column")):
            what = "fp8_output" if self.mode == "row" else "fp8_grad"
            raise ValueError(f"a {self.mode}-parallel te.Linear sums its result over the ranks: use {what}=False")


def divide(size: int, parts: int) -> int:
    """size / parts, which must be whole."""
    if size % parts:
        raise AssertionError(f"{size} is not divisible by {parts}")
    return size // parts


def split_sizes(split: Any, out_features: int, ranks: int) -> dict[str, int]:
    """Prefix of the parameter names -> rows of this rank, for `parameters_split`, which is in rows of the whole layer."""
    if split is None:
        return {"": out_features // ranks}
    if not split:
        raise ValueError("Cannot split weight buffer into 0 parameters")
    if isinstance(split, dict):
        sizes = {f"{name.rstrip('_')}_": size for name, size in split.items()}
    elif all(isinstance(name, str) for name in split):
        sizes = {f"{name.rstrip('_')}_": out_features // len(split) for name in split}
    else:
        raise TypeError("Invalid configuration for parameters split")
    if sum(sizes.values()) != out_features:
        raise ValueError(f"Trying to split weight buffer ({out_features=}) with split sizes {list(sizes.values())}")
    if uneven := [size for size in sizes.values() if size % ranks]:
        raise RuntimeError(
            f"Attempting to distribute a parameter with out_features={uneven[0]} between {ranks} tensor-parallel processes"
        )
    return {name: size // ranks for name, size in sizes.items()}


def _gather(x: Any, quantizer: Any, group: Any) -> Any:
    """x of all ranks along the first dimension; with a quantizer, the copies that it is set to, quantized."""
    if quantizer is None:
        return all_gather(x, group)
    quantized = isinstance(x, QuantizedTensorStorage)
    if not _travels_as_codes(x._shape if quantized else x.shape, quantizer):
        # For lack of whole blocks. What is quantized already is rounded a second time, as in Transformer Engine.
        warnings.warn(
            f"Cannot quantize input tensor. Performing all-gather in high precision. Give each rank rows in multiples of "
            f"the recipe's block, not {list(x._shape if quantized else x.shape)}.",
            stacklevel=2,
        )
        return quantizer(all_gather(x.dequantize(dtype=x._dtype) if quantized else x, group))
    return _gather_codes(x if quantized else quantizer(x), quantizer, group)


def _travels_as_codes(shape: torch.Size, quantizer: Any) -> bool:
    """Whether each rank's codes and scales are a part of those of the whole."""
    if isinstance(quantizer, Float8BlockQuantizer):
        rows, columns = shape[:-1].numel(), shape[-1]
        return quantizer.block_scaling_dim == 1 and rows % BLOCK == 0 and columns % BLOCK == 0
    return quantizer.is_quantizable(torch.empty(shape, device="meta"))


def _gather_codes(x: Any, quantizer: Any, group: Any) -> Any:
    """The storage of all ranks' rows; what belongs to the whole tensor (a scale, an amax) is this rank's."""
    layout, found = _layout(x), []
    for name in x._tensors:
        value = getattr(x, name)
        if not isinstance(x, Float8TensorStorage):
            wanted = quantizer.columnwise_usage if "columnwise" in name else quantizer.rowwise_usage
            value = value if wanted else None
        if value is not None and name in layout:
            dim, size, padding = layout[name]
            value = all_gather(value if size is None else value[: size[0], : size[1]], group, dim)
            value = value if padding is None else pad_to(value, *padding)
        elif name == "_transpose":
            value = None
        found.append(value)
    made = x.with_data_tensors(tuple(found))
    made._shape = torch.Size((x._shape[0] * torch.distributed.get_world_size(group), *x._shape[1:]))
    return made


def _layout(x: Any) -> dict[str, tuple[int, tuple[int, int] | None, tuple[int, int] | None]]:
    """Attribute -> the dimension of its tokens; for scales also their size without padding, and what pads them."""
    m, k = x._matrix
    if isinstance(x, Float8TensorStorage):
        return {"_data": (0, None, None)}
    if isinstance(x, Float8BlockwiseQTensorStorage):
        return {
            "_rowwise_data": (0, None, None), "_rowwise_scale_inv": (1, (k // BLOCK, m), (1, 4)),
            "_columnwise_data": (1, None, None), "_columnwise_scale_inv": (0, (m // BLOCK, k), (1, 4)),
        }  # fmt: skip
    if isinstance(x, MXFP8TensorStorage):
        return {
            "_rowwise_data": (0, None, None), "_rowwise_scale_inv": (0, (m, k // MX_BLOCK), (128, 4)),
            "_columnwise_data": (0, None, None), "_columnwise_scale_inv": (0, (m // MX_BLOCK, k), (4, 128)),
        }  # fmt: skip
    if isinstance(x, NVFP4TensorStorage):
        return {
            "_rowwise_data": (0, None, None), "_rowwise_scale_inv": (0, (m, k // 16), (128, 4)),
            "_columnwise_data": (1, None, None), "_columnwise_scale_inv": (1, (k, m // 16), (128, 4)),
        }  # fmt: skip
    raise TypeError(f"{type(x).__name__} cannot be gathered: use sequence_parallel=False")
