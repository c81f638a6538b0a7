"""The keywords with which a model is built, by name and type, for editors and type checkers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from te_models.config.options import ConfigOptions, RecipeOptions
from te_models.config.recipe import Recipe


class BuildOptions(RecipeOptions, total=False):
    """How a model of a given shape is built; Decoder documents each."""

    recipe: str | Path | Recipe | Any
    engine: Literal["auto", "native", "emulated"]
    device: torch.device | str | None
    dtype: torch.dtype
    activation_checkpointing: str | int
    activation_offload: bool
    fp8_params: bool
    compile: bool | str
    fused: bool | None
    tp_mesh: DeviceMesh | None
    sequence_parallel: bool
    amax_group: ProcessGroup | None


class ModelOptions(BuildOptions, ConfigOptions, total=False):
    """Every keyword of CausalLM.from_preset and from_pretrained: how to build the model, and fields of its config."""
