"""FP8 primary weights: te.Linear weights stored as FP8 data and inverse scales, without a BF16 copy on the device.

Transformer Engine makes them under `quantized_model_init` (section 10 of docs/internals/transformer_engine.md) and uses
them as they are, so a step casts no weight. The optimizer's FP32 masters keep the precision; after each
step the FP8 data is quantized from them. Only this module writes such weights: an ordinary in-place operation would
quantize already quantized values again, and an in-place operation on a slice would be lost.

Under FSDP2 a parameter is a DTensor whose local tensor is an FP8Shard (te_models.fp8.fsdp_gather).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from te_models.config.recipe import FP8_WEIGHTS, EngineRecipe, Recipe
from te_models.distributed.dtensor import from_shard, local, shard_of, write_shard
from te_models.errors import UsageError
from te_models.fp8.fsdp_gather import FP8Shard, amax_group, reduce_amax_over
from te_models.fp8.scaling_state import WIDTHS, delayed_states, make_state
from te_models.numerics.formats import FLT_MAX
from te_models.numerics.quantizers import Float8Quantizer, Quantizer
from te_models.numerics.scale_rules import scale_from_amax
from te_models.numerics.stored import StoredWeight
from te_models.numerics.tensors import Float8Tensor, QuantizedTensor

E4M3_MAX = 448.0
# One scale per weight, which all ranks can share; blocks with scales would have to fit the rows of each rank.
SHARDED_SCHEMES = FP8_WEIGHTS[:2]
# The fields of a recipe that decide how a weight is quantized.
WEIGHT_FIELDS = (
    "use_power_2_scales",
    "use_f32_scales",
    "w_block_scaling_dim",
    "enable_2d_quantization",
)
# Transformer Engine's attribute with the values that a weight was made from.
_INITIAL_VALUE = "_high_precision_init_val"
# Its attributes with FP8 data and inverse scales; a format has two or four of them.
_PARTS = (
    "data",
    "scale_inv",
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
)


def check_recipe(recipe: Recipe) -> None:
    """Raise a UsageError if weights cannot be stored in the format of this recipe, and of those that it names."""
    for used in recipe.in_use or [recipe]:
        if used.scheme not in FP8_WEIGHTS:
            raise UsageError(
                f"fp8_params=True needs an FP8 recipe, and {used.name!r} is {used.scheme!r}: choose recipe='current', "
                "'blockwise', 'delayed' or 'mxfp8', or leave fp8_params out"
            )


def quantize_weights_alike(one: Recipe | None, other: Recipe | None) -> bool:
    """Return True if both recipes (None: BF16) quantize weights in the same way."""
    # BF16 weights and FP8 ones are never alike.
    if one is None or other is None:
        return one is other
    return one.scheme == other.scheme and all(
        one.fields.get(f) == other.fields.get(f) for f in WEIGHT_FIELDS
    )


def quantized(parameter: Tensor) -> QuantizedTensor | None:
    """Return the engine's quantized tensor in an FP8 weight (this rank's rows of it); None for another tensor."""
    shard = local(parameter)
    if isinstance(shard, FP8Shard):
        shard = shard.fp8
    # The method that quantized tensors of both engines have.
    # By the method and not by the class: Transformer Engine's tensors are other classes than the emulated ones.
    return cast(QuantizedTensor, shard) if hasattr(shard, "quantize_") else None


def is_quantized(tensor: Tensor) -> bool:
    """Return True if a parameter is an FP8 primary weight, of either engine."""
    return quantized(tensor) is not None


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor detached; the dequantized values of an FP8 or a stored weight, in its nominal dtype."""
    if isinstance(tensor, StoredWeight):
        return tensor.dequantize()
    fp8 = quantized(tensor)
    return tensor.detach() if fp8 is None else from_shard(fp8.dequantize().detach(), tensor)


def clear_states(model: nn.Module) -> None:
    """Reset scales to 1 and histories to 0 in modules with FP8 weights, which were built from uninitialized memory."""
    for _, module, _, _ in _owners(model):
        # Transformer Engine's own reset fails under other recipes (2.20).
        if delayed_states(module):
            module.reset_fp8_meta_tensors()


@torch.no_grad()
def drop_transposed(model: nn.Module) -> None:
    """Transpose weights in each backward and drop that copy after it, which saves a byte per parameter.

    Transformer Engine does so where FSDP2 gathers weights; for weights with one scale it can be done anywhere.
    """
    for _, module, _, fp8 in _owners(model):
        if "data" in _parts(fp8):  # else blocks have scales
            module._is_fsdp2 = True
            fp8._quantizer.set_usage(columnwise=False)
            fp8.update_usage(columnwise_usage=False)


@torch.no_grad()
def write_weight(parameter: Tensor, value: Tensor, for_master: bool = True) -> None:
    """Write `value`, of the whole parameter, into a parameter or this rank's rows of it.

    With `for_master` an FP8 weight also stores the values on the CPU, until an optimizer makes its master from them.

    Under DelayedScaling the scale is taken from the values first: Transformer Engine casts with the scale as it stands,
    which is 1 for the first values (section 10) and too large for a weight that grew, such as a merged one.
    """
    fp8 = quantized(parameter)
    if fp8 is None:
        write_shard(parameter, value)
        return
    # A fused optimizer steps through memory, whatever the strides: a transposed master would get others' gradients.
    value = value.detach().to(parameter.dtype).contiguous()
    for part, tensor in _parts(fp8).items():
        if part.endswith("scale_inv"):
            tensor.zero_()  # the padding of block scales would otherwise be uninitialized
    quantizer = fp8._quantizer
    # The amax recorded so far belongs to the old values.
    if _delayed(quantizer) and (amax := value.abs().amax().float()) > 0:
        quantizer.scale.copy_(scale_from_amax(amax, E4M3_MAX))
        quantizer.amax.zero_()
    # In place: the module, FSDP2 and captured graphs hold this tensor.
    fp8.quantize_(shard_of(value, parameter).to(fp8.device))
    # The master has more bits than FP8: made from the FP8 values it would begin with their rounding.
    if for_master:
        keep_initial_value(parameter, value)
    else:
        fp8.__dict__.pop(_INITIAL_VALUE, None)  # values that the weight no longer has


@torch.no_grad()
def saved_weight(parameter: Tensor) -> dict[str, Tensor]:
    """Return a copy of a parameter's values for `restore_weight`; of an FP8 weight its FP8 data and scales."""
    fp8 = quantized(parameter)
    if fp8 is None:
        return {"": parameter.detach().clone()}
    saved = {part: tensor.clone() for part, tensor in _parts(fp8).items()}
    if _delayed(fp8._quantizer):
        saved["scale"] = fp8._quantizer.scale.clone()
    return saved


@torch.no_grad()
def restore_weight(parameter: Tensor, saved: Mapping[str, Tensor]) -> None:
    """Write back what `saved_weight` returned, to the bit."""
    fp8 = quantized(parameter)
    if fp8 is None:
        parameter.copy_(saved[""])
        return
    live = _parts(fp8)
    for part in saved.keys() - {"scale"}:
        # In place, for whoever holds the tensors: captured graphs, FSDP2, the module.
        live[part].copy_(saved[part])
    if _delayed(quantizer := fp8._quantizer):
        quantizer.scale.copy_(saved["scale"])
        quantizer.amax.zero_()
    _transpose_again(fp8)


@torch.no_grad()
def take_master(parameter: Tensor, master: Tensor) -> None:
    """Quantize an FP8 weight from its master after a step."""
    fp8 = _fp8_of(parameter)
    fp8.quantize_(local(master).to(fp8.device))


def keep_initial_value(parameter: Tensor, value: Tensor) -> None:
    """Store the values that an FP8 weight was made from, where Transformer Engine's optimizers look for them too."""
    values = shard_of(value, parameter).detach()
    _fp8_of(parameter).__dict__[_INITIAL_VALUE] = values.to(
        "cpu", parameter.dtype, copy=values is not value
    )


def drop_initial_values(model: nn.Module) -> None:
    """Free the values that FP8 weights were made from, once an optimizer has their masters."""
    for _, _, _, fp8 in _owners(model):
        fp8.__dict__.pop(_INITIAL_VALUE, None)


@torch.no_grad()
def new_master(parameter: Tensor) -> Tensor:
    """Return the FP32 master of an FP8 weight: the stored values it was made from, else the dequantized ones."""
    fp8 = _fp8_of(parameter)
    value = fp8.__dict__.pop(_INITIAL_VALUE, None)
    if value is None:
        return plain(parameter).float()
    return from_shard(value.to(fp8.device, torch.float32, copy=True), parameter)


def quantized_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> live FP8 data and inverse scales of every FP8 weight.

    `<weight>.data` is uint8 [O, I] and `<weight>.scale_inv` FP32 [1]; where blocks have scales there are rowwise and
    columnwise ones. Data is sharded like its weight.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for part, tensor in _parts(quantized(parameter)).items():
            # Scales are whole on every rank.
            tensors[f"{name}.{part}"] = from_shard(tensor, parameter) if part == "data" else tensor
    return tensors


@torch.no_grad()
def load_quantized_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Overwrite FP8 data and inverse scales with tensors of the names and shapes of `quantized_weights`."""
    live = quantized_weights(model)
    for name, tensor in saved.items():
        write_shard(live[name], tensor)
    for name, parameter in model.named_parameters():
        fp8 = quantized(parameter)
        if fp8 is not None and f"{name}.data" in saved:
            _transpose_again(fp8)
        if fp8 is not None and f"{name}.rowwise_scale_inv" in saved:
            _keep_kind_of_scales(fp8)


@torch.no_grad()
def set_scale(parameter: Tensor, inverse: Tensor) -> None:
    """Make `inverse`, a positive FP32 number, the inverse scale of an FP8 weight's next cast under delayed scaling."""
    quantizer = _fp8_of(parameter)._quantizer
    if _delayed(quantizer):
        quantizer.scale.copy_(inverse.reciprocal().clamp(max=FLT_MAX))
        quantizer.amax.zero_()


def _keep_kind_of_scales(fp8: QuantizedTensor) -> None:
    """Keep FP32 scales when a weight that has them, from a checkpoint of another library, is quantized again.

    They also tell the emulated engine that products of data and scale are not BF16 numbers.
    """
    scales = _parts(fp8).get("rowwise_scale_inv")  # weights with one scale have none
    if scales is None or not scales.is_floating_point():
        return
    # frexp of a power of two has the mantissa 1/2.
    mantissas = scales[scales > 0].frexp().mantissa
    if not bool((mantissas == 0.5).all()):
        vars(fp8._quantizer)["force_pow_2_scales"] = False


def _transpose_again(fp8: QuantizedTensor) -> None:
    """Make the transposed copy of a weight with one scale again, after its data changed."""
    # The engines derive a missing copy on request, but do not notice that its source has changed.
    usages = fp8.get_usages()
    if "data" in _parts(fp8) and usages["columnwise"]:
        fp8.update_usage(columnwise_usage=False)
        fp8.update_usage(columnwise_usage=True)


@torch.no_grad()
def relink(model: nn.Module, built: Callable[[str], EngineRecipe | None]) -> None:
    """Connect FP8 weights to the new FP8 state of their modules after the old one was dropped.

    `built` returns the engine's recipe object of a module, given its name. The caller copies delayed scales.
    """
    for name, module, gemm, fp8 in _owners(model):
        quantizer = _weight_quantizer(module, gemm, built(name))
        # Carry over what the old quantizer was told: its copies, and the group that shares its amax.
        quantizer.set_usage(columnwise=fp8._quantizer.columnwise_usage)
        reduce_amax_over(quantizer, amax_group(fp8._quantizer))
        fp8._quantizer = quantizer
        _keep_kind_of_scales(fp8)


def make_shards(
    model: nn.Module,
    device: torch.device,
    linears: tuple[type[nn.Module], ...],
    recipe: Recipe,
    built: Callable[[str], EngineRecipe | None],
    group: ProcessGroup | None,
) -> None:
    """Give the shards of a model on the meta device memory on `device`, without values: FP8 layers' weights in FP8.

    `linears` are the engine's classes of those layers, `built` returns the engine's recipe object of a module by its
    name, and `group` are the processes that share each weight, over which current scaling takes its amax.
    """
    for used in recipe.in_use:
        if used.scheme not in SHARDED_SCHEMES:
            raise UsageError(
                f"sharded FP8 primary weights need one scale per weight, which recipe {used.name!r} does not have: "
                "choose recipe='delayed' or 'current', or leave fp8_params out"
            )
    quantizers: dict[int, Quantizer] = {}  # by the id of the weight
    for name, module, gemm, weight in _weights(model):
        if not (isinstance(module, linears) and module.primary_weights_in_fp8):
            continue
        if len(weight) % weight.device_mesh.size():
            raise UsageError(
                f"the {len(weight)} rows of {name}.weight cannot be divided evenly among {weight.device_mesh.size()} "
                "processes, as FP8 primary weights have to be: change the number of processes, or leave fp8_params out"
            )
        quantizer = _weight_quantizer(module, gemm, built(name))
        quantizer.set_usage(rowwise=True, columnwise=False)
        quantizers[id(weight)] = quantizer

    def with_memory(tensor: Tensor) -> Tensor:
        """Return an empty tensor on the device in place of one on meta."""
        quantizer = quantizers.get(id(tensor))
        if quantizer is None:
            return torch.empty_like(tensor, device=device)
        shard = local(tensor)
        fp8 = quantizer.make_empty(shard.shape, dtype=shard.dtype, device=device)
        reduce_amax_over(fp8._quantizer, group)
        return from_shard(FP8Shard(cast(Float8Tensor, fp8)), tensor)

    # As `to_empty` does. Had it made BF16 shards first, FSDP2 would keep those until the first forward pass, beside the
    # FP8 ones.
    model._apply(with_memory)


def _weight_quantizer(module: Any, gemm: int, built: EngineRecipe | None) -> Quantizer:
    """Return a quantizer for the FP8 weight of a GEMM, with the module's scale and amax under delayed scaling."""
    make_state(module, built)
    quantizer = module.quantizers["scaling_fwd"][WIDTHS["scaling_fwd"] * gemm + 1].copy()
    quantizer.internal = False
    return quantizer


def _weights(model: nn.Module) -> Iterator[tuple[str, Any, int, Any]]:
    """Yield every weight as (name of its module, module, number of its GEMM, weight); experts have one GEMM each."""
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            number = parameter_name.removeprefix("weight")
            if parameter_name != number and (number.isdigit() or not number):
                yield name, module, int(number or 0), parameter


def _owners(model: nn.Module) -> list[tuple[str, Any, int, QuantizedTensor]]:
    """Return the quantized tensors of the FP8 weights with their modules, as `_weights` does."""
    owners = [
        (name, module, gemm, quantized(weight)) for name, module, gemm, weight in _weights(model)
    ]
    return [(name, module, gemm, fp8) for name, module, gemm, fp8 in owners if fp8 is not None]


def _fp8_of(parameter: Tensor) -> QuantizedTensor:
    """Return the engine's quantized tensor of a parameter that is an FP8 weight."""
    fp8 = quantized(parameter)
    assert fp8 is not None
    return fp8


def _parts(fp8: QuantizedTensor | None) -> dict[str, Tensor]:
    """Return the FP8 data and the inverse scales of a quantized tensor, by name; a format lacks some of them."""
    parts = {}
    for part in _PARTS:
        tensor = getattr(fp8, f"_{part}", None)
        if tensor is not None:
            parts[part] = tensor
    return parts


def _delayed(quantizer: Quantizer) -> TypeGuard[Float8Quantizer]:
    """Return whether a quantizer of either engine casts with a delayed scale; the class has one name in both."""
    return type(quantizer).__name__ == Float8Quantizer.__name__
