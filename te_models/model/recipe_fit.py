"""Check that a recipe suits the sizes of a model, and choose the recipe for recipe="auto"."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from te_models.config.gpus import Gpu, get_gpu, missing_switches, why_not
from te_models.config.layer import LayerSpec
from te_models.config.measured_speed import gain
from te_models.config.model import ModelConfig
from te_models.config.precision import HEAD, precisions
from te_models.config.recipe import SCHEMES, Recipe, get_recipe
from te_models.engine import get_engine
from te_models.errors import ConfigError, UsageError

# The smallest hidden size at which FP8 saves time, for sizes and GPUs near which nothing is measured
# (te_models.config.measured_speed): under "current" 0.97 of BF16's speed at 768 and 1,024, 1.36 at 4,096 on an H200.
WIDE_ENOUGH = 2048
# The same for the width of experts. On Hopper, which has products of its own for them: 1.07 at 768, 1.11 at 1,024, 1.15
# at 2,880 and 1.34 at 14,336 on an H200. With the other products an H100 had 0.96 to 0.99 up to 2,880, 1.2 at 14,336.
WIDE_EXPERTS = {"Hopper": 768}
WIDE_EXPERTS_ELSEWHERE = 4096
CANDIDATES = ("mxfp8", "current")  # in this order: the first that runs natively


log = logging.getLogger(__name__)


@functools.cache
def say(line: str) -> None:
    """Log a line once per process, however many models are built."""
    log.warning(line)


def auto_recipe(
    config: ModelConfig,
    engine: str = "auto",
    device: torch.device | str | None = None,
    *,
    layers: tuple[LayerSpec, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fp8_params: bool = False,
    tokens: int | None = None,
    lora: bool = False,
    **fields: Any,
) -> tuple[Recipe, str]:
    """Return the recipe that recipe="auto" stands for in a model without a recipe of its own, and why in a few words.

    It is FP8 where that saves time: "mxfp8" on the native engine where Transformer Engine runs it (data-centre
    Blackwell), else "current" (Ada, Hopper, other Blackwell). It is "bf16" on the emulated engine, hence on every CPU,
    which gains no speed from FP8; for another dtype than bfloat16; where the recipe cannot run the model's sizes; and
    where a measurement on this GPU near the model's sizes says that FP8 saves no time, unless weights are stored in
    FP8. Where nothing is measured near, that is taken of models below a hidden size of WIDE_ENOUGH or with experts
    narrower than WIDE_EXPERTS of this generation of GPUs. The reason has the figure.

    Args:
        config: the shape.
        layers: one rank's share of the layers; None: all of them.
        engine: as in `get_engine`, as is `device`.
        dtype: of the parameters.
        fp8_params: whether weights are stored in FP8, which saves memory at any size.
        tokens: of a micro-batch on one GPU; None: not known.
        lora: whether only adapters are trained.
        fields: fields of the recipe to change.

    Raises:
        UsageError: an unknown engine, or a field or value that the chosen recipe does not have.
    """
    te, name, why = get_engine(engine, device)
    reason = "FP8 saves no time on the emulated engine" if name == "emulated" else ""
    if not reason and dtype != torch.bfloat16:
        reason = f"dtype is {str(dtype).removeprefix('torch.')}"
    if not reason:
        gpu = why.partition(",")[0]
        reason = f"{gpu} has no FP8"
        for candidate in CANDIDATES:
            # The engine's own question to Transformer Engine, which knows compute capability and cuBLAS.
            if not getattr(te, SCHEMES[get_recipe(candidate).scheme].available)():
                continue
            recipe = get_recipe(candidate, **fields)
            try:
                check_layers(config, recipe)
                check_sizes(layers or config.layers, config.vocab_size, recipe)
            except ConfigError as error:
                reason = str(error)
                continue
            pays, reason = pays_on(gpu, config, candidate, tokens, lora)
            if pays or fp8_params:
                return recipe, f"{gpu}, hidden size {config.hidden_size}: {reason}"
            break
    return get_recipe("bf16", **fields), reason


def suit_to_gpu(recipe: Recipe, engine: str) -> Recipe:
    """Return a recipe as it runs on this GPU: NVFP4 loses what fails on compute capability 12, with a line.

    Only the recipe itself changes, not those that its `precision` names.
    """
    if engine != "native":
        return recipe
    capability = torch.cuda.get_device_capability()
    switches = missing_switches(recipe, capability)
    if not switches:
        return recipe
    options = " and ".join(f"{name}=True" for name in switches)
    version = f"{capability[0]}.{capability[1]}"
    say(
        f"recipe {recipe.name}: {options} on compute capability {version}, where their kernels fail"
    )
    return recipe.replace(**dict.fromkeys(switches, True))


def best_on(
    gpu: Gpu, config: ModelConfig, tokens: int | None = None, lora: bool = False
) -> tuple[Recipe, str]:
    """Return the recipe that "auto" stands for on a GPU that need not be here, and why in a few words.

    `tokens` and `lora` are as for `auto_recipe`.
    """
    for candidate in CANDIDATES:
        recipe = get_recipe(candidate)
        if why_not(recipe, gpu.capability):
            continue
        pays, reason = pays_on(gpu.name, config, candidate, tokens, lora)
        if pays:
            return recipe, f"{gpu.name}, hidden size {config.hidden_size}: {reason}"
        return get_recipe("bf16"), reason
    return get_recipe("bf16"), f"{gpu.name} has no FP8"


def pays_on(
    gpu: str, config: ModelConfig, recipe: str, tokens: int | None, lora: bool
) -> tuple[bool, str]:
    """Return whether a recipe saves time on a GPU: as measured near these sizes, else by their width; and why.

    Arguments are as in `best_on`, with the names of GPU and recipe.
    """
    # A measurement near these sizes knows more than any rule about their width.
    measured = gain(gpu, config, recipe, tokens, lora)
    if measured.pays is not None:
        verdict = "" if measured.pays else "FP8 saves no time at this size: "
        return measured.pays, verdict + measured.text
    narrow = _too_narrow(gpu, config)
    return not narrow, f"{narrow}; {measured.text}" if narrow else measured.text


def _too_narrow(gpu: str, config: ModelConfig) -> str:
    """Return why FP8 is taken to save no time at this width on a GPU; empty if it is taken to save some."""
    sizes = [("a hidden size", config.hidden_size, WIDE_ENOUGH)]
    if config.moe is not None:
        try:
            generation = get_gpu(gpu).generation
        except UsageError:  # a GPU without a description
            generation = ""
        wide = WIDE_EXPERTS.get(generation, WIDE_EXPERTS_ELSEWHERE)
        sizes.append(("a width of experts", config.moe.moe_intermediate_size, wide))
    for name, size, least in sizes:
        if size < least:
            return f"FP8 saves no time below {name} of {least}, and this one is {size}"
    return ""


def quantizes(config: ModelConfig, recipe: Recipe) -> bool:
    """Return whether any te.Linear of a model runs below BF16 under a recipe."""
    layers = precisions(recipe, config.layers)
    return any(precision.recipe is not None for precision in layers.values())


def check_layers(config: ModelConfig, recipe: Recipe) -> None:
    """Raise a ConfigError if a quantized recipe keeps every layer in BF16."""
    edges = recipe.num_layers_at_start_in_bf16 + recipe.num_layers_at_end_in_bf16
    if not recipe.quantized or quantizes(config, recipe):
        return
    layers = config.num_hidden_layers
    in_bf16 = "all linears in BF16"
    if edges >= layers:
        in_bf16 = f"{edges} layers in BF16 and the model has {layers}"
    advice = "lower num_layers_at_start_in_bf16 or num_layers_at_end_in_bf16, or " if edges else ""
    raise ConfigError(
        f"recipe {recipe.name!r} keeps {in_bf16}: nothing would run in FP8; {advice}change its precision"
    )


def check_sizes(
    layers: tuple[LayerSpec, ...], vocab_size: int, recipe: Recipe, each: str = ""
) -> None:
    """Raise a ConfigError unless every feature dimension of an FP8 GEMM is a multiple of the recipe's alignment.

    `layers` are one rank's share; `each` follows a size in messages, to say that it is per rank.
    """
    by_layer = precisions(recipe, layers)
    for depth, layer in enumerate(layers):
        for part in layer.parts:
            for linear in part.linears:
                _check_features(
                    part.features,
                    by_layer[f"layers.{depth}.{part.name}.{linear.name}"].recipe,
                    each,
                )
    _check_features({"vocab_size": vocab_size}, by_layer[HEAD].recipe, each)


def _check_features(features: Mapping[str, int], recipe: Recipe | None, each: str) -> None:
    """Require the inputs and outputs of a part with a te.Linear under this recipe to suit it."""
    for name, size in features.items():
        # cuBLAS has no FP8 kernel for other sizes: it would fail in the first forward pass, far from the setting.
        if recipe is not None and size % recipe.feature_alignment:
            raise ConfigError(
                f"{name}={size}{each} is not a multiple of {recipe.feature_alignment}, which the GEMMs of recipe "
                f"{recipe.name!r} need: change it or use recipe='bf16'"
            )
