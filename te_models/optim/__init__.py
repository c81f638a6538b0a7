"""Optimizers by name, over FP32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from te_models.errors import unknown
from te_models.optim.master import MasterWeights


def adamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's AdamW, fused, with the betas usual for language models (Touvron et al. 2023, arXiv 2307.09288)."""
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]] = {"adamw": adamw}


def build_optimizer(name: str, model: nn.Module, lr: float, weight_decay: float) -> MasterWeights:
    """The optimizer called `name` over the model's parameters; `weight_decay` applies to matrices alone."""
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return MasterWeights(parameter_groups(model, weight_decay), lambda groups: OPTIMIZERS[name](groups, lr))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices of linears decay; norms, biases and the embedding table (which is sparse in use) do not."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}

    def decays(parameter: nn.Parameter) -> bool:
        return parameter.dim() > 1 and id(parameter) not in tables

    parameters: Iterable[nn.Parameter] = list(model.parameters())
    return [
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
