"""Static scales of the inputs of an export: the ones a recipe has trained, or measured on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from te_models.errors import UsageError
from te_models.fp8.scaling_state import WIDTHS
from te_models.interop.hf import HuggingFaceFolder
from te_models.model.decoder import Decoder
from te_models.serving.formats import (
    E4M3_MAX,
    TINY,
    ExportFormat,
    static_scale,
)
from te_models.serving.stored_parts import stored_inputs

# Without data, NVFP4's divisor comes from random tokens, with this much room for larger inputs.
RANDOM_TOKENS = (4, 256)
HEADROOM = 4.0


def input_scales(
    model: Decoder,
    format: ExportFormat,
    modules: Mapping[str, nn.Module],
    calibration: Tensor | Iterable[Tensor] | None,
    source: HuggingFaceFolder | None,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the static scale of the input of each module, and notes on where they come from.

    The first of these that there is: measured on `calibration`, learned in training (delayed scaling), stored in the
    folder that the model came from, and for NVFP4 measured on random tokens.

    Raises:
        UsageError: a format with one scale per tensor gets no scales from any of these.
    """
    if not format.static:
        return {}, []
    if calibration is not None:
        batches = [calibration] if isinstance(calibration, Tensor) else calibration
        amaxes = input_amaxes(model, modules, batches)
        return {name: static_scale(format, amax) for name, amax in amaxes.items()}, []
    trained = trained_scales(model, modules)
    if trained.keys() == modules.keys():
        if format.static == "input_scale":
            return {name: scale.reciprocal().clamp(min=TINY) for name, scale in trained.items()}, []
        scales = {}
        for name, scale in trained.items():
            amax = _largest(model, name) / scale.item()
            scales[name] = static_scale(format, amax)
        return scales, []
    stored = stored_inputs(source, model, format)
    if source is not None and modules.keys() <= stored.keys():
        return stored, [
            f"{format.static} comes from {source.path}: give calibration=token ids (--data PATH) to measure it again"
        ]
    if format.static == "input_scale":
        why = "has not trained"
        if not model.recipe.stateful:
            why = f"under recipe {model.recipe.name!r} has none"
        if trained:
            why = f"has them for {len(trained)} of {len(modules)} linears"
        raise UsageError(
            "fp8-tensor stores one scale per input, which recipe 'delayed' learns in training, and this model "
            f"{why}: give calibration=token ids (--data PATH), or choose fp8-channel"
        )
    batch = RANDOM_TOKENS[0]
    length = min(RANDOM_TOKENS[1], model.config.longest_sequence)
    tokens = torch.randint(
        model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)
    )
    amaxes = input_amaxes(model, modules, [tokens])
    note = (
        "input_global_scale was measured on random tokens: give calibration=token ids (--data PATH) for "
        "your own data"
    )
    return {name: static_scale(format, HEADROOM * amax) for name, amax in amaxes.items()}, [note]


def _largest(model: Decoder, name: str) -> float:
    """Return the value that delayed scaling scales the amax of a linear's input to."""
    recipe = model.precision.recipe_of(name)
    margin = 0 if recipe is None else recipe.fields.get("margin", 0)
    return E4M3_MAX * 2.0**-margin


def trained_scales(model: Decoder, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the scales of the inputs of `modules` that delayed scaling has learned, FP32 [] each."""
    state = model.copied_fp8_state()
    scales = {}
    for name in modules:
        scale = state.get(f"{name}.scaling_fwd.scale")
        history = state.get(f"{name}.scaling_fwd.amax_history")
        if scale is None or history is None:
            continue
        # The input's is the first of each GEMM's scales; a te.GroupedLinear has a GEMM for each expert.
        own_scales = scale[:: WIDTHS["scaling_fwd"]]  # [GEMMs]
        own_history = history[:, :: WIDTHS["scaling_fwd"]]  # [steps, GEMMs]
        # A scale of 1 without an amax is where it started: an expert that got no token.
        seen = own_history.any(0) | (own_scales != 1)
        if bool(seen.any()):
            # One number for all experts: the least scale, which the largest amax made.
            scales[name] = own_scales[seen].amin().cpu()
    return scales


@torch.no_grad()
def input_amaxes(
    model: Decoder, modules: Mapping[str, nn.Module], batches: Iterable[Tensor]
) -> dict[str, float]:
    """Return the largest magnitude of each module's input over `batches` of token ids, int64 [B, S].

    The model's mode, scales and histories do not change.
    """
    amaxes: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            amax = inputs[0].detach().abs().amax().float()
            amaxes[name] = amax if name not in amaxes else torch.maximum(amaxes[name], amax)

        return hook

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_pre_hook(watch(name)))
        stack.callback(model.train, model.training)
        # With fused kernels the input of a linear may be quantized already.
        stack.enter_context(model.eval().unfused())
        for batch in batches:
            if not isinstance(batch, Tensor):
                raise UsageError(
                    f"calibration holds a {type(batch).__name__}: give token ids, int64 tensors [B, S]"
                )
            model(batch.to(model.device))
    if not amaxes and modules:
        raise UsageError("calibration has no batches: give token ids, int64 [B, S]")
    return {name: amax.item() for name, amax in amaxes.items()}
