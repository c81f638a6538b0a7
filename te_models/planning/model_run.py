"""The settings of a planned run that a model has itself: its dtype, its kind of weights, its adapters."""

from __future__ import annotations

from typing import NamedTuple

from te_models.model.decoder import Decoder
from te_models.numerics.stored import StoredWeight
from te_models.planning.planned_run import PlannedRun
from te_models.planning.stored_base import StoredBase

FIRST_FACTOR = ".lora_A."  # in the names of adapters' parameters [rank, in], as peft has them


class Adapters(NamedTuple):
    """The adapters in a model: their largest rank, 0 without any, and whether experts have some."""

    rank: int
    on_experts: bool


def run_of_model(model: Decoder, batch_size: int, seq_len: int) -> PlannedRun:
    """Return the run that trains a model as it is: its adapters where it has some, else all of it."""
    adapters = adapters_in(model)
    return PlannedRun(
        batch_size=batch_size,
        seq_len=seq_len,
        dtype_bytes=model.dtype.itemsize,
        activation_checkpointing=model.activation_checkpointing,
        activation_offload=model.activation_offload,
        fp8_params=model.fp8_params,
        base_weights=_stored_base(model),
        lora_rank=adapters.rank,
        lora_experts=adapters.on_experts,
    )


def adapters_in(model: Decoder) -> Adapters:
    """Return the LoRA adapters in a model."""
    rank = 0
    on_experts = False
    for name, parameter in model.named_parameters():
        module, factor, _ = name.partition(FIRST_FACTOR)
        if not factor:
            continue
        linear = model.config.linears.get(module)
        experts = 0 if linear is None else linear.experts
        # The factors of all experts stand below each other.
        rank = max(rank, len(parameter) // max(1, experts))
        on_experts = on_experts or experts > 0
    return Adapters(rank, on_experts)


def _stored_base(model: Decoder) -> StoredBase | None:
    """Return which weights stay as a release stores them; None: none does."""
    storages = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, StoredWeight):
            linear = model.precision.known(name)
            storages[linear] = parameter
    return StoredBase.in_model(storages)
