"""Quantized weights in Hugging Face folders: the storage that config.json declares, checks, and dequantized values.

A `WeightStorage` says how a weight [out, in] is stored: E4M3 (or two E2M1 per byte) and one scale per block of
elements. Four kinds of config are read: `fp8` (DeepSeek, Qwen, vLLM and transformers), `compressed-tensors` with
floating-point weights, and ModelOpt's, in hf_quant_config.json or config.json. Sources: transformers 5.23
(quantizers/quantizer_finegrained_fp8.py), compressed-tensors 0.20 (compressors), vLLM
(model_executor/layers/quantization/modelopt.py at 00155cde).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from te_models.errors import CheckpointError, refuse, require
from te_models.files.formats import Document, Value, as_object, read_json
from te_models.files.tensors import SafetensorsFile
from te_models.numerics import casts, nvfp4
from te_models.numerics.blocks import scale_blocks_
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import DType

E4M3 = torch.float8_e4m3fn
NARROW = (E4M3, torch.float8_e5m2)
MODELOPT_FILE = "hf_quant_config.json"
# The second key is written by compressed-tensors before 0.8.
CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class WeightStorage:
    """The storage of a quantized weight [out, in].

    Attributes:
        block: rows and columns that share a scale; 0 means all of them.
        data: the last part of the name of the tensor with the weight's data.
        scales: names that the tensor with its scales may have.
        scale_dtypes: dtypes that it may have.
        activations: how a server quantizes the input of the linear: "static" (one scale per tensor, stored), "token",
            "block" (per token and 128 channels), "mxfp8", "nvfp4", or "none".
        factor: the name of the tensor with one more scale of the whole weight, which four-bit weights have; "": none.
        divide: whether scales are divided by it, and not multiplied.
    """

    block: tuple[int, int]
    activations: str
    data: str = "weight"
    scales: tuple[str, ...] = ("weight_scale",)
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    factor: str = ""
    divide: bool = True

    @property
    def packed(self) -> bool:
        """Two values per byte."""
        return bool(self.factor)

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of scales along each dimension of a weight [out, in]."""
        rows, columns = shape
        row_step, column_step = self.steps(shape)
        return math.ceil(rows / row_step), math.ceil(columns / column_step)

    def steps(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of a weight [out, in] that share a scale: no more than it has."""
        rows, columns = shape
        # A block size of 0 stands for the whole dimension.
        row_step = min(self.block[0] or rows, rows)
        column_step = min(self.block[1] or columns, columns)
        return row_step, column_step


BOTH = ("weight_scale_inv", "weight_scale")
BLOCK = WeightStorage((128, 128), "block", scales=BOTH)
TENSOR = WeightStorage((0, 0), "static", scales=BOTH)
CHANNEL = WeightStorage((1, 0), "token")
MXFP8 = WeightStorage((1, 32), "mxfp8", scale_dtypes=(torch.uint8,))
GLOBAL_SCALE = "weight_global_scale"
NVFP4 = WeightStorage(
    (1, 16), "nvfp4", data="weight_packed", scale_dtypes=(E4M3,), factor=GLOBAL_SCALE
)
# ModelOpt's, whose factors are the reciprocals of those above.
MODELOPT_NVFP4 = dataclasses.replace(NVFP4, data="weight", factor="weight_scale_2", divide=False)
# The parameters of stacked experts.
MXFP4 = WeightStorage(
    (1, 32), "none", data="blocks", scales=("scales",), scale_dtypes=(torch.uint8,)
)
INPUT_GLOBAL_SCALE = "input_global_scale"
INPUT_SCALES = ("input_scale", "activation_scale")
# Scales of a quantized cache of keys and values, which we do not read.
UNREAD = ("k_scale", "v_scale", "q_scale", "output_scale")


def read_storage(folder: Path, config: Document) -> WeightStorage | None:
    """Return the storage of the quantized weights in a folder with this config.json; None if there are none.

    Raises:
        CheckpointError: the weights are quantized in another way; one line that names it.
    """
    # Both names are in use, and mean the same.
    values = next((config[key] for key in CONFIG_KEYS if config.get(key)), None)
    source = folder / "config.json"
    if values is None:
        # ModelOpt's first exports describe the weights in a file of their own, without the method.
        source = folder / MODELOPT_FILE
        if not source.is_file():
            return None
        values = as_object(read_json(source), source).get("quantization")
        if isinstance(values, dict):
            values = {**values, "quant_method": "modelopt"}
    readers = {
        "fp8": _fp8_storage,
        "compressed-tensors": _compressed_storage,
        "modelopt": _modelopt_storage,
        "modelopt_fp4": _modelopt_storage,
        "mxfp4": _mxfp4_storage,
    }
    method = values.get("quant_method") if isinstance(values, dict) else None
    read = readers.get(method) if isinstance(method, str) else None
    problem = f"quantization_config={_shown(values)} is not supported: te-models reads {', '.join(readers)}"
    try:
        if read is not None and isinstance(values, dict):
            return read(values)
    # The readers take what they need without looking first: the document is anybody's.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"it lacks or misuses {error}"
        problem = f"quantization_config of {method!r} is not supported: {reason}"
    raise CheckpointError(f"{source}: {problem}")


def _shown(values: object) -> str:
    text = repr(values)
    return text if len(text) < 100 else f"{text[:97]}..."


def _refuse_unknown(values: Document, known: Iterable[str]) -> None:
    """Raise a ValueError for an unknown key with a value that matters."""
    for name, value in values.items():
        require(
            name in known or value in (None, False, [], {}), f"{name}={_shown(value)} is not known"
        )


def _require(values: Document, name: str, *allowed: object) -> Value:
    """Return values[name]; raise a ValueError unless it is one of `allowed`."""
    value = values.get(name)
    known = any(type(value) is type(choice) and value == choice for choice in allowed)
    require(known, f"{name}={_shown(value)}, and te-models reads {' or '.join(map(repr, allowed))}")
    return value


def _block_size(value: Value) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    pair = isinstance(value, (list, tuple)) and len(value) == 2
    good = pair and all(type(size) is int and 1 <= size <= 2**16 for size in value)
    require(good, f"the block size {_shown(value)} is not a pair of positive numbers")
    return value[0], value[1]


def _fp8_storage(values: Document) -> WeightStorage:
    # An unknown key could change the meaning of the data, so it is refused.
    known = (
        "quant_method",
        "activation_scheme",
        "weight_block_size",
        "ignored_layers",
        "modules_to_not_convert",
        "fmt",
        "scale_fmt",
        "dequantize",
        "expert_dtype",
        "kv_cache_scheme",
        "provider",
    )
    _refuse_unknown(values, known)
    _require(values, "fmt", None, "e4m3", "float8_e4m3fn")
    activations = _require(values, "activation_scheme", "static", "dynamic", None)
    if (block := values.get("weight_block_size")) is not None:
        return dataclasses.replace(BLOCK, block=_block_size(block))
    return dataclasses.replace(TENSOR, activations="static" if activations == "static" else "token")


def _compressed_storage(values: Document) -> WeightStorage:
    known = (
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "quantization_status",
        "global_compression_ratio",
        "kv_cache_scheme",
        "version",
    )
    _refuse_unknown(values, known)
    groups = values["config_groups"]
    require(isinstance(groups, dict) and bool(groups), "config_groups names no weights")
    storages = {_compressed_group(group, values.get("format")) for group in groups.values()}
    require(len(storages) == 1, "config_groups quantizes weights in several ways")
    return storages.pop()


def _compressed_group(group: Document, format: object) -> WeightStorage:
    _refuse_unknown(group, ("targets", "weights", "input_activations", "format"))
    weights = group["weights"]
    inputs = group.get("input_activations")
    _require(weights, "type", "float")
    _require(weights, "symmetric", True, None)
    _require(weights, "dynamic", False, None)
    format = group.get("format") or format
    if not inputs:
        activations = "none"
    elif inputs.get("dynamic"):
        activations = "token"
    else:
        activations = "static"
    if format in ("nvfp4-pack-quantized", "mxfp8-quantized"):
        # The two formats with blocks along the inputs, which fix bits and block.
        bits, size, storage = (4, 16, NVFP4) if format.startswith("nv") else (8, 32, MXFP8)
        _require(weights, "num_bits", bits)
        _require(weights, "group_size", size)
        return storage if inputs else dataclasses.replace(storage, activations="none")
    require(
        format in ("float-quantized", "naive-quantized"), f"format={_shown(format)} is not known"
    )
    _require(weights, "num_bits", 8)
    strategy = _require(weights, "strategy", "tensor", "channel", "block")
    if strategy == "block":
        block = _block_size(weights["block_structure"])
        if inputs and inputs.get("strategy") == "group":
            activations = "block"
        return dataclasses.replace(BLOCK, block=block, activations=activations)
    return dataclasses.replace(TENSOR if strategy == "tensor" else CHANNEL, activations=activations)


def _mxfp4_storage(values: Document) -> WeightStorage:
    _refuse_unknown(values, ("quant_method", "modules_to_not_convert", "dequantize"))
    return MXFP4


def _modelopt_storage(values: Document) -> WeightStorage:
    known = (
        "quant_method",
        "quant_algo",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "exclude_modules",
        "ignore",
        "producer",
        "config_groups",
        "group_size",
        "quantized_layers",
    )
    _refuse_unknown(values, known)
    algorithm = str(values["quant_algo"]).upper()
    algorithms = {
        "FP8": TENSOR,
        "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
        "FP8_PB_WO": BLOCK,
        "NVFP4": MODELOPT_NVFP4,
    }
    require(
        algorithm in algorithms,
        f"quant_algo={values['quant_algo']!r}, and te-models reads {', '.join(algorithms)}",
    )
    if algorithm == "NVFP4":
        _require(values, "group_size", 16, None)
    return algorithms[algorithm]


@dataclass
class StoredWeights:
    """The tensors of a folder under the names and shapes of the model's weights, however they are stored.

    Attributes:
        storage: of the quantized weights; None if there are none.
        tensors: name -> tensor on the meta device; a quantized weight has its own name, its shape and dtype BF16.
        scales: name of a quantized weight -> its scales, FP32 [rows, columns of the grid].
        inputs: name of a quantized weight -> static scale of the linear's input, FP32 []; for NVFP4, the divisor.
        data: name of the stored data -> name of the weight.
        scale_names: name of a quantized weight -> names of the tensors with its scales: one for its blocks, and one
            for the factor of all blocks, if it has one.
    """

    storage: WeightStorage | None
    tensors: dict[str, Tensor]
    scales: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    scale_names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def dequantize(storage: WeightStorage, data: Tensor, scales: Tensor) -> Tensor:
    """Return the FP32 values of a quantized weight: data times scale, rounded once.

    Args:
        storage: how it is stored.
        data: E4M3 [out, in], or uint8 [out, in / 2] with two E2M1 values per byte.
        scales: FP32, as StoredWeights has them.
    """
    raw = data.view(torch.uint8)
    values = nvfp4.unpack(raw) if storage.packed else casts.decode_fp8(raw, DType.kFloat8E4M3)
    return scale_blocks_(
        values.contiguous(), scales, storage.steps((values.shape[0], values.shape[1]))
    )


def open_weights(
    folder: Path,
    storage: WeightStorage | None,
    tensors: Mapping[str, Tensor],
    files: Iterable[SafetensorsFile],
    read_scales: bool = True,
) -> StoredWeights:
    """Return the tensors of a folder, with the scales of quantized weights read and checked.

    Args:
        folder: for errors.
        storage: from `read_storage`.
        tensors: name -> tensor on the meta device, of everything that the files hold.
        files: the safetensors files.
        read_scales: False leaves scales on the meta device, unread, for a caller that asks for names and sizes.

    Raises:
        CheckpointError: a quantized weight lacks its scales, or they have a wrong shape or dtype, or are negative or
            not finite.
    """
    if storage is None:
        for name, tensor in tensors.items():
            # FP8 without scales has no values.
            if tensor.dtype in NARROW:
                raise CheckpointError(
                    f"{folder}: {name} is FP8, and config.json has no quantization_config with scales"
                )
        return StoredWeights(None, dict(tensors))
    weights = _Weights(folder, storage, tensors)
    names = weights.scales_to_read()
    if not read_scales:
        return weights.unread()
    return weights.checked(
        {name: file.read(name) for file in files for name in names & file.tensors.keys()}
    )


class _Weights:
    """The quantized weights among the tensors of a folder, by their names and shapes."""

    def __init__(self, folder: Path, storage: WeightStorage, tensors: Mapping[str, Tensor]) -> None:
        self.folder = folder
        self.storage = storage
        self.tensors = tensors
        dtype = torch.uint8 if storage.packed else E4M3
        suffix = f".{storage.data}"
        self.modules: list[str] = []
        for name, tensor in tensors.items():
            if name.endswith(suffix) and tensor.dtype == dtype:
                self.modules.append(name.removesuffix(suffix))
        self.scale_names = {module: self._scale_name(module) for module in self.modules}

    def _scale_name(self, module: str) -> str:
        """Return the name of the tensor with a weight's scales, whose shape and dtype are right."""
        data = self.tensors[f"{module}.{self.storage.data}"]
        names = [
            f"{module}.{name}" for name in self.storage.scales if f"{module}.{name}" in self.tensors
        ]
        one = len(names) == 1 and data.dim() == 2 and bool(data.numel())
        self._must(
            one,
            f"{module} is quantized {list(data.shape)} and has {len(names)} of {self.storage.scales}",
        )
        scale = self.tensors[names[0]]
        shape = self.shape(module)
        grid = self.storage.grid(shape)
        # Writers add dimensions of one to scales, [rows, 1] or [1]; the sizes themselves must fit.
        squeezed = [size for size in scale.shape if size != 1]
        fits = squeezed == [size for size in grid if size != 1] and scale.dim() <= 4
        expected = f"and a weight {list(shape)} has scales {list(grid)}"
        self._must(fits, f"{names[0]} has shape {list(scale.shape)}, {expected}")
        known = scale.dtype in self.storage.scale_dtypes
        self._must(known, f"{names[0]} is {scale.dtype}, which is no scale of this format")
        return names[0]

    def _must(self, good: bool, problem: str) -> None:
        """Raise a CheckpointError about the folder unless `good`."""
        refuse([] if good else [f"{self.folder}: {problem}"], CheckpointError)

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape of a weight."""
        rows, columns = self.tensors[f"{module}.{self.storage.data}"].shape
        return rows, columns * (2 if self.storage.packed else 1)

    def scales_to_read(self) -> set[str]:
        """Return the names of the scales to read: of the weights, and static ones of their inputs."""
        factors = (self.storage.factor,) if self.storage.packed else ()
        small = (*INPUT_SCALES, *factors, INPUT_GLOBAL_SCALE)
        singles = {
            f"{module}.{name}" for module in self.modules for name in small
        } & self.tensors.keys()
        for name in singles:
            one = self.tensors[name].numel() == 1 and self.tensors[name].is_floating_point()
            self._must(one, f"{name} is {list(self.tensors[name].shape)}, not one number")
        return singles | set(self.scale_names.values())

    def checked(self, read: Mapping[str, Tensor]) -> StoredWeights:
        """Return the weights with their scales, once all of these are known to be numbers."""
        stored = StoredWeights(self.storage, dict(self.tensors))
        for module in self.modules:
            weight = f"{module}.weight"
            shape = self.shape(module)
            scales = self._numbers(self.scale_names[module], read).reshape(self.storage.grid(shape))
            stored.scale_names[weight] = (self.scale_names[module],)
            if self.storage.packed:
                name = f"{module}.{self.storage.factor}"
                factor = self._numbers(name, read, positive=True).reshape(())
                # Some writers store the factor as its inverse.
                scales = scales / factor if self.storage.divide else scales * factor
                scales = self._finite(name, scales)
                stored.scale_names[weight] += (name,)
            stored.scales[weight] = scales
            for name in (*INPUT_SCALES, INPUT_GLOBAL_SCALE):
                if f"{module}.{name}" in read:
                    scale = self._numbers(f"{module}.{name}", read, positive=True).reshape(())
                    inverse = self.storage.packed and not self.storage.divide
                    stored.inputs[weight] = 1 / scale if inverse else scale
            self._take(stored, module)
        return self._without_others(stored)

    def unread(self) -> StoredWeights:
        """Return the weights by name and shape, with scales on the meta device."""
        stored = StoredWeights(self.storage, dict(self.tensors))
        for module in self.modules:
            grid = self.storage.grid(self.shape(module))
            stored.scales[f"{module}.weight"] = torch.empty(grid, device="meta")
            self._take(stored, module)
        return self._without_others(stored)

    def _take(self, stored: StoredWeights, module: str) -> None:
        """Put a quantized weight into the place of the tensors that hold it."""
        weight = f"{module}.weight"
        shape = self.shape(module)
        stored.data[f"{module}.{self.storage.data}"] = weight
        for name in (
            self.storage.data,
            *self.storage.scales,
            *INPUT_SCALES,
            self.storage.factor,
            INPUT_GLOBAL_SCALE,
        ):
            stored.tensors.pop(f"{module}.{name}", None)
        # As if it were stored in BF16: what reads shapes need not know of quantization.
        stored.tensors[weight] = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def _without_others(self, stored: StoredWeights) -> StoredWeights:
        """Return the weights without scales of a cache; refuse FP8 that is no weight."""
        for name, tensor in list(stored.tensors.items()):
            if name.endswith(UNREAD):
                del stored.tensors[name]
                continue
            known = tensor.dtype not in NARROW
            self._must(known, f"{name} is {tensor.dtype}, which this format has no scales for")
        return stored

    def _numbers(self, name: str, read: Mapping[str, Tensor], positive: bool = False) -> Tensor:
        """Return scales in FP32."""
        self._must(name in read, f"it lacks {name}")
        tensor = read[name]
        values = e8m0_to_float(tensor) if tensor.dtype == torch.uint8 else tensor.float()
        return self._finite(name, values, positive)

    def _finite(self, name: str, scales: Tensor, positive: bool = False) -> Tensor:
        """Return scales that are numbers and not negative; refuse others."""
        good = scales.isfinite() & ((scales > 0) if positive else (scales >= 0))
        self._must(bool(good.all()), f"{name} has a scale that is negative or not finite")
        return scales
