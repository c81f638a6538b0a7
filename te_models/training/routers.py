"""The routers of a model with experts in training: the factors of their losses, and what metrics.jsonl says of them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.config.training import TrainConfig
from te_models.errors import UsageError


class StepWeights(NamedTuple):
    """The factors of a process's micro-batches in the loss of their step."""

    predictions: Sequence[Tensor | float]  # of the mean cross-entropy: shares of the step's targets
    routers: Sequence[Tensor | float]  # of the losses of routers: shares of the step's tokens


def check_router_losses(shape: ModelConfig, config: TrainConfig) -> None:
    """Raise UsageError for factors of the losses of routers that a model of this shape does not have."""
    if shape.moe is None and (config.balance_loss is not None or config.z_loss is not None):
        raise UsageError(
            "balance_loss and z_loss are for experts, which this model does not have: leave them out"
        )


def weigh_losses(model: CausalLM, config: TrainConfig) -> None:
    """Give the routers' losses the factors of the run; None leaves the model's."""
    check_router_losses(model.config, config)
    balance = config.balance_loss
    z = config.z_loss
    moe = model.config.moe
    if moe is None or (balance is None and z is None):
        return
    model.router_losses = dataclasses.replace(
        moe,
        router_aux_loss_coef=moe.router_aux_loss_coef if balance is None else balance,
        router_z_loss_coef=moe.router_z_loss_coef if z is None else z,
    )


def over_micro_batches(routed: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return RoutingReport.metrics of a step from its micro-batches' metrics `routed`, as (losses, shares).

    Losses [2] are this process's part; they add up, as in the loss of the step, whose weights they have. Shares [1 + E]
    are the same on all processes, and means over the micro-batches. Both are empty for a model without routers, then of
    the dtype and on the device of `like`.
    """
    if not routed:
        return like.new_empty(0), like.new_empty(0)
    # [micro-batches, 2 + 1 + E]: two losses, the largest share, and the share of each expert
    metrics = torch.stack(list(routed))
    losses = metrics[:, :2].sum(0)
    shares = metrics[:, 2:].mean(0)
    return losses, shares


def router_row(values: Sequence[float]) -> dict[str, object]:
    """Return metrics of routers by name: two losses, the largest share of an expert, and the mean share of each."""
    if not values:
        return {}
    balance, z, fullest, *shares = values
    return dict(
        balance_loss=balance,
        z_loss=z,
        fullest_expert=fullest,
        expert_shares=[round(s, 6) for s in shares],
    )
