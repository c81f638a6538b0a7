"""Write a model as a quantized Hugging Face folder for vLLM, SGLang, transformers and compressed-tensors.

The linears of the layers that the model's recipe runs in FP8 are quantized; embedding, norms, head and the layers that
the recipe keeps in BF16 are not, and the config lists their linears. Tensors that vLLM and SGLang fuse (q, k and v;
gate and up) are one weight here too, so their per-tensor scales are one number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.distributed.dtensor import local
from te_models.errors import UsageError, check_known
from te_models.files.formats import Document, Fields
from te_models.fp8.primary_weights import quantized_weights
from te_models.fp8.region import saving
from te_models.interop.hf import HuggingFaceFolder
from te_models.interop.hf_families import Family, family_for, family_of
from te_models.interop.hf_writing import write_hugging_face
from te_models.interop.origin import Origin
from te_models.interop.quantized import BLOCK, E4M3, TENSOR, WeightStorage, dequantize
from te_models.interop.stored_weights import collapse, spread
from te_models.interop.tensor_places import Place, tensor_places
from te_models.model.decoder import Decoder
from te_models.model.decoder_of import decoder_of, refuse_compiled
from te_models.model.tensor_parallel import gather_state
from te_models.saving.checkpoint_choice import ADAPTER_FOLDER
from te_models.saving.loadable import refuse_unloadable
from te_models.saving.pretrained import read_tokenizer, refuse_adapters, weights
from te_models.serving.formats import (
    FORMATS,
    Parts,
    WeightOptions,
    encode_blocks,
)
from te_models.serving.input_scales import input_scales
from te_models.serving.other_readers import not_read
from te_models.serving.quantized_linears import linears_kept, quantized_modules, weight_shapes
from te_models.serving.rounding import (
    ROUNDINGS,
    SEED,
    round_stochastically,
    scales_of,
    to_bfloat16,
)
from te_models.serving.stored_parts import parts_as_stored, source_in
from te_models.serving.survival import Survival, WeightChange, change_of
from te_models.serving.unchanged_base import UNCHANGED, export_unchanged

# E4M3 with the largest power of two for a scale rounds this to 2^128, which is infinite in FP32.
TOO_LARGE = 31 * 2.0**123


@dataclass(frozen=True)
class Export:
    """A written folder.

    Attributes:
        folder: the folder's path.
        format: its format.
        quantized: Hugging Face's names of the quantized modules.
        ignored: the names of linears that are not quantized.
        notes: what a reader of the folder should know, one line each.
        survival: how much of the tuning is left; None where the base model is not known.
    """

    folder: Path
    format: str
    quantized: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()
    survival: Survival | None = None


def export(
    model: nn.Module,
    origin: Origin,
    folder: str | Path,
    format: str,
    calibration: Tensor | Iterable[Tensor] | None = None,
    rounding: str = "nearest",
    base: nn.Module | None = None,
) -> Export:
    """Write `model` into `folder`, atomically; see te_models.causal_lm.CausalLM.export for arguments and errors.

    `base` is the model before it was tuned, on any device; with it the export reports how much of the tuning is left.
    """
    model = decoder_of(model)
    base = None if base is None else decoder_of(base)
    refuse_compiled(model)
    refuse_compiled(base)
    check_known("format", format, [*FORMATS, UNCHANGED])
    if format == UNCHANGED:
        if origin.adapters is None and any(".lora_" in n for n, _ in model.named_parameters()):
            raise UsageError(
                "format 'stored' writes adapters that are saved: save_lora first, and export the model that "
                "from_pretrained of their folder returns"
            )
        export_unchanged(origin.adapters, folder)
        note = f"adapters of peft are in {Path(folder) / ADAPTER_FOLDER}"
        return Export(Path(folder), format, (), (), (note,))
    check_known("rounding", rounding, ROUNDINGS)
    if calibration is not None and not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        raise UsageError(f"calibration is a {kind}: give token ids, int64 tensors [B, S]")
    # FSDP2's pieces would have to be gathered one by one, which the saved folder has done already.
    if any(local(p) is not p for p in model.parameters()):
        raise UsageError("a sharded model cannot be exported: save it, and export the saved folder")
    sources = [os.path.realpath(path) for path in (origin.folder, origin.adapters) if path]
    if os.path.realpath(folder) in sources:
        raise UsageError(
            f"{folder} holds the model that is exported, whose weights would be lost: choose another folder"
        )
    refuse_adapters(model)
    with saving(model), source_in(FORMATS[format], origin) as source:
        # Before anything is written: it refuses what the format does not take.
        writer = _Writer(model, origin, format, calibration, source, rounding, base)
        parameters = model.ep.gather(
            gather_state(weights(model), model.config, model.tp), model.device
        )
        # All ranks gathered the weights together; one of them writes.
        if model.tp.rank == 0:
            refuse_unloadable(model, parameters)
            write_hugging_face(
                model, origin, folder, parameters, read_tokenizer(origin), quantize=writer.quantize
            )
        model.tp.wait()
    notes = (*writer.notes, *not_read(format, writer.shapes))
    quantized = tuple(writer.quantized)
    ignored = tuple(writer.ignored)
    return Export(Path(folder), format, quantized, ignored, notes, writer.survival())


def default_format(model: nn.Module, origin: Origin) -> str:
    """Return the format to export a model in where none is asked for: the first of these that servers read.

    "fp8-block" needs rows and inputs in whole blocks, "fp8-channel" takes any size, and "bf16" is for families whose
    experts are stacked.

    Raises:
        ConfigError: no architecture of Hugging Face computes what this model does.
    """
    model = decoder_of(model)
    family = family_for(model.config, family_of(origin.config) if origin.config else None)
    modules = quantized_modules(model, origin)
    # By their descriptions: in a run with adapters the modules are other ones.
    if family.stacked and any(model.config.linears[name].experts for name in modules):
        return "bf16"
    return "fp8-block" if _in_whole_blocks(family, model.config, modules) else "fp8-channel"


def _in_whole_blocks(family: Family, config: ModelConfig, modules: Iterable[str]) -> bool:
    """Return whether vLLM and SGLang read these te.Linears in blocks of 128 x 128.

    They quantize inputs in groups of 128 channels, and a linear that is made of several, such as q, k and v, needs
    whole blocks in each of them but the last.
    """
    block_rows, block_columns = BLOCK.block
    shapes = weight_shapes(config, modules)
    # A server reads one weight's blocks at a time, and would find the next row's in an incomplete one.
    if any(inputs % block_columns for _, inputs in shapes.values()):
        return False
    # Name of a weight of ours -> rows of each part, in Hugging Face's order.
    parts: dict[str, list[int]] = {}
    for place in tensor_places(family, config, shapes).values():
        rows = [place.groups * count for _, count in place.blocks if count]
        # Servers fuse q, k and v, and gate and up, whose blocks then lie one below the other.
        parts.setdefault(place.name, []).extend(rows)
    checked: list[int] = []
    for rows in parts.values():
        checked += rows[:-1]
    return all(size % block_rows == 0 for size in checked)


class _Writer:
    """Makes the tensors and the config.json of an export; `quantize` is called by write_hugging_face."""

    def __init__(
        self,
        model: Decoder,
        origin: Origin,
        format: str,
        calibration: Tensor | Iterable[Tensor] | None,
        source: HuggingFaceFolder | None,
        rounding: str,
        base: Decoder | None,
    ) -> None:
        self.model = model
        self.name = format
        self.format = FORMATS[format]
        self.source = source
        self.rounding = rounding
        # A seed of its own: two exports of one model are the same bytes.
        self.generator = torch.Generator().manual_seed(SEED)
        self.base = None if base is None else weights(base)
        self.changes: list[WeightChange] = []
        self.modules = quantized_modules(model, origin) if self.format.storage else {}
        self.weights: dict[str, str] = {}  # name of a weight to quantize -> name of its module
        for name in self.modules:
            linear = model.config.linears[name]
            self.weights |= {f"{name}.{weight}": name for weight in linear.weights}
            # One scale serves this many inputs of a row.
            if (size := linear.inputs) % self.format.columns:
                raise UsageError(
                    f"{name} has {size} inputs, no multiple of {self.format.columns}, which {format} needs: choose "
                    "another format"
                )
        self.inputs, self.notes = input_scales(
            model, self.format, self.modules, calibration, source
        )
        if self.modules and linears_kept(model, origin):
            self.notes.append(
                f"linears that {origin.folder} has unquantized stay so: an FP8 recipe (--recipe) decides anew"
            )
        self.fp8_weights = quantized_weights(model) if model.tp.size == 1 else {}
        self.quantized: list[str] = []
        self.ignored: list[str] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def quantize(
        self, places: Mapping[str, Place], parameters: Mapping[str, Tensor], config: Document
    ) -> tuple[dict[str, Tensor], Fields]:
        """Return the tensors of the folder, and its config.json.

        Args:
            places: name of a tensor of Hugging Face -> the rows of our parameter that it holds.
            parameters: our parameters by name, whole.
            config: the config.json of the model without quantization.
        """
        # Our parameter -> names of the tensors that hold its rows. A format with one scale per weight encodes them
        # together, such as the fused q, k and v.
        groups: dict[str, list[str]] = {}
        for theirs, place in places.items():
            groups.setdefault(place.name, []).append(theirs)
        tensors: dict[str, Tensor] = {}
        done: set[str] = set()
        for theirs, place in places.items():
            if place.name in self.weights:
                if place.name not in done:
                    done.add(place.name)
                    tensors |= self._encoded(groups[place.name], places, parameters[place.name])
                continue
            tensors[theirs] = self._plain(theirs, place, parameters[place.name])
            module = self.model.get_submodule(place.name.rpartition(".")[0])
            if theirs.endswith(".weight") and isinstance(module, self.model.te.LINEARS):
                self.ignored.append(theirs.removesuffix(".weight"))
        return tensors, self._config(config)

    def _plain(self, theirs: str, place: Place, parameter: Tensor) -> Tensor:
        """Return the tensor `theirs`, which is not quantized, in the dtype to write."""
        tensor = place.save(parameter)
        # A rounded bias chooses other experts.
        if self.format.storage is not None or place.name.endswith(".expert_bias"):
            return tensor
        # Only here do values change in an export to BF16: a model in FP32 loses the bits that a small update may live
        # in.
        written = to_bfloat16(tensor, self.rounding, self.generator)
        if self.base is not None and theirs.endswith(".weight"):
            base = self._base_of(place.name, parameter)
            if base is not None:
                change = change_of(
                    theirs.removesuffix(".weight"),
                    base=place.save(base),
                    tuned=tensor,
                    # Nearest whatever the rounding of the tuned weights is.
                    base_left=place.save(base).bfloat16(),
                    left=written,
                )
                if change is not None:
                    self.changes.append(change)
        return written

    def _base_of(self, ours: str, parameter: Tensor) -> Tensor | None:
        """Return the base's values of one of our parameters; None for rows of a vocabulary that has grown since."""
        assert self.base is not None
        base = self.base.get(ours)
        if base is not None and base.shape == parameter.shape:
            return base.to(parameter.device)
        if ours.rpartition(".")[0] in self.model.config.linears:
            raise UsageError(
                f"the base model has no {ours} {list(parameter.shape)}: give the model that was tuned"
            )
        return None

    def _config(self, config: Document) -> Fields:
        """Return the config.json of the folder, with the keys that servers read and transformers does not write."""
        config = dict(config)
        for key, value in family_of(config).served(self.model.config).items():
            if config.get(key) is None:
                config[key] = value
        if self.format.storage is None:
            # Older versions of transformers, and some servers, read the second name.
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = "bfloat16"
            return config
        if "lm_head" not in self.ignored:  # tied: it has no tensor, and servers have the module
            self.ignored.append("lm_head")
        family = family_of(config)
        # Servers look for the names of the folder, transformers for names of its model, where experts are one module.
        theirs = [
            family.in_transformers(f"{name}.weight").removesuffix(".weight")
            for name in self.ignored
        ]
        linears = self.model.config.linears
        unquantized = []
        for name in linears:
            if linears[name].experts and name not in self.modules:
                unquantized.append(name.rpartition(".")[0])
        names = dict.fromkeys(
            [*self.ignored, *theirs, *(f"{family.root}{name}.experts" for name in unquantized)]
        )
        return {**config, "quantization_config": self.format.config(list(names))}

    def _encoded(
        self, names: list[str], places: Mapping[str, Place], parameter: Tensor
    ) -> dict[str, Tensor]:
        """Return the stored tensors (data and scales) of the weights `names`, which are the rows of `parameter`."""
        # `not ... <`, since a NaN compares as False.
        if not parameter.abs().amax().float() < TOO_LARGE:
            raise UsageError(
                f"{names[0]} has values that are not finite, or so large that {self.name} would round them to "
                "infinity: export a checkpoint from before the run diverged"
            )
        ours = places[names[0]].name
        static = {self.format.static: self.inputs[self.weights[ours]]} if self.format.static else {}
        values = {name: places[name].save(parameter) for name in names}
        parts_of_weights = self._parts(names, places, parameter, is_own=True)
        if self.base is not None:
            base = self._base_of(ours, parameter)
            if base is not None:
                self._compare(names, places, values, parts_of_weights, base)
        tensors = {}
        for name, parts in zip(names, parts_of_weights, strict=True):
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": tensor for part, tensor in {**parts, **static}.items()}
            self.quantized.append(module)
            self.shapes[module] = places[name].shape
        return tensors

    def _parts(
        self, names: list[str], places: Mapping[str, Place], parameter: Tensor, is_own: bool
    ) -> list[Parts]:
        """Return the stored tensors of the weights `names`, which together are one of our parameters.

        `is_own` is False for the base's, whose weights are no FP8 ones and which are rounded to the nearest.
        """
        ours = places[names[0]].name
        # A scale for the whole of our weight comes first: their parts of it share that scale.
        scaled_together = self._shared_parts(ours, names, places, parameter, is_own)
        values = {name: places[name].save(parameter) for name in names}
        encoded = []
        for name, weight in values.items():
            if scaled_together is None:
                encoded.append(self._block_parts(ours, places[name], weight, is_own))
            else:
                encoded.append(_rows(scaled_together, places[name]))
        stored = parts_as_stored(self.source, values, encoded)
        # What a release has stored so stays as it is, to the byte, and is not rounded once more.
        is_from_base = stored[0] is not encoded[0]
        if is_from_base or self.rounding == "nearest" or not is_own:
            return stored
        storage = self.format.storage
        assert storage is not None
        return [
            round_stochastically(storage, weight, parts, self.generator)
            for weight, parts in zip(values.values(), encoded, strict=True)
        ]

    def _compare(
        self,
        names: list[str],
        places: Mapping[str, Place],
        values: Mapping[str, Tensor],
        encoded: list[Parts],
        base: Tensor,
    ) -> None:
        """Note how much of the weights' change since `base` is left in the export, for the weights `names`."""
        storage = self.format.storage
        assert storage is not None
        base_encoded = self._parts(names, places, base, is_own=False)
        for name, parts, base_parts in zip(names, encoded, base_encoded, strict=True):
            change = change_of(
                name.removesuffix(".weight"),
                base=places[name].save(base),
                tuned=values[name],
                base_left=_values(storage, base_parts),
                left=_values(storage, parts),
            )
            if change is not None:
                self.changes.append(change)

    def survival(self) -> Survival | None:
        """Return how much of the tuning is left in the export; None if no base is known."""
        return None if self.base is None else Survival(tuple(self.changes))

    def _shared_parts(
        self,
        ours: str,
        names: list[str],
        places: Mapping[str, Place],
        parameter: Tensor,
        is_own: bool,
    ) -> Parts | None:
        """Return one of our weights quantized as a whole; None for a format with blocks of several rows."""
        if self.format.encode is None:
            return None
        # The FP8 weight itself, as it was trained: a second cast could round it otherwise.
        one_scale = self.format.storage is not None and self.format.storage.block == TENSOR.block
        if is_own and one_scale and f"{ours}.data" in self.fp8_weights:
            scale = self.fp8_weights[f"{ours}.scale_inv"]
            return {
                "weight": self.fp8_weights[f"{ours}.data"].view(E4M3),
                "weight_scale": scale.reshape(()),
            }
        # Without the rows that pad a headwise gate: nothing reads them.
        whole = torch.zeros_like(parameter)
        for name in names:
            places[name].load(whole, places[name].save(parameter))
        return self.format.encode(whole, self._options(ours))

    def _block_parts(self, ours: str, place: Place, values: Tensor, is_own: bool) -> Parts:
        """Return one of their weights in 128 x 128 blocks: the blocks of an FP8 primary weight where they coincide."""
        rows, columns = values.shape
        aligned = not (rows % BLOCK.block[0] or columns % BLOCK.block[1])
        scale_inv = self.fp8_weights.get(f"{ours}.rowwise_scale_inv") if is_own else None
        # The format has FP32 scales; E8M0 bytes are MXFP8's.
        if aligned and scale_inv is not None and scale_inv.is_floating_point():
            data = self.fp8_weights[f"{ours}.rowwise_data"]
            # [rows, blocks of columns]: a scale per row, so that the rows can move to their places in Hugging Face's
            # order.
            by_row = spread(
                scale_inv[:, : columns // BLOCK.block[1]],
                BLOCK.block,
                (len(data), columns),
                BLOCK.block[1],
            )
            scales = collapse(
                place.save(by_row), torch.ones(rows, dtype=torch.bool), BLOCK.block[0]
            )
            if scales is not None:
                return {
                    "weight": place.save(data).contiguous().view(E4M3),
                    "weight_scale_inv": scales,
                }
        return encode_blocks(values, self._options(ours))

    def _options(self, ours: str) -> WeightOptions:
        """Return the options by which a weight's recipe quantizes it; the model's recipe where it is in BF16."""
        recipe = self.model.precision.recipe_of(ours) or self.model.recipe
        fields = recipe.fields
        blockwise = recipe.scheme == "Float8BlockScaling"
        square = {
            "MXFP8BlockScaling": bool(fields.get("enable_2d_quantization")),
            "NVFP4BlockScaling": not fields.get("disable_2d_quantization"),
        }
        power_of_2 = blockwise and not fields["use_f32_scales"]
        return WeightOptions(recipe.scheme, power_of_2, square.get(recipe.scheme, False))


def _values(storage: WeightStorage, parts: Parts) -> Tensor:
    """Return the FP32 values of a quantized weight [out, in]."""
    data = parts[storage.data]
    shape = (data.shape[0], data.shape[1] * (2 if storage.packed else 1))
    return dequantize(storage, data, scales_of(storage, parts).reshape(storage.grid(shape)))


def _rows(parts: Parts, place: Place) -> Parts:
    """Return the rows of one of their weights; a scale of the whole weight applies to all of them."""
    selected = {}
    for name, tensor in parts.items():
        if tensor.dim() < 2:
            selected[name] = tensor
            continue
        # Rows of FP8 are moved as bytes: not every operation takes the FP8 dtypes.
        narrow = tensor.dtype == E4M3
        rows = place.save(tensor.view(torch.uint8) if narrow else tensor)
        selected[name] = rows.contiguous().view(E4M3) if narrow else rows
    return selected
