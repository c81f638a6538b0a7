"""Routing: which experts a token goes through, with which weights, and where its rows are.

Shapes: T tokens, E experts, k experts per token, R rows of all experts together, padding included, D hidden_size.
Every function gives the same result for the same logits: of equal scores the expert of the lowest number is chosen, and
sums have the order of Transformer Engine's permutation kernels (from the last expert to the first, in FP32).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from te_models.config.moe import MoEConfig
from te_models.kernels.expert_rows import PLAIN, RowKernels
from te_models.kernels.groups import Groups


class LayerRouting(NamedTuple):
    """The choices of one layer's router for the tokens of a pass, without padding."""

    counts: Tensor  # FP32 [2, E]: tokens of each expert, and those for which it is among the best by its logits alone
    probabilities: Tensor  # FP32 [E]: the softmax of the logits, summed over the tokens
    squares: Tensor  # FP32 []: logsumexp of the logits, squared and summed over the tokens
    tokens: Tensor  # FP32 []


class RoutingReport(NamedTuple):
    """A summary of the routers of a pass, all layers together: two losses, FP32 [], and shares.

    The balance loss is E * sum over experts of (tokens per token) * (mean probability), as in transformers (Fedus et
    al. 2021, arXiv 2101.03961, equations 4 to 6): k where the experts share equally. A token counts for the k experts
    of its largest logits, without groups and numbers for the choice. The z-loss is the mean squared logsumexp of the
    logits (Zoph et al. 2022, arXiv 2202.08906).
    """

    balance_loss: Tensor
    z_loss: Tensor
    shares: Tensor  # FP32 [layers, E]: the share of each expert in a layer's assignments
    # FP32 []: in training, the loss of the pass without these two.
    prediction_loss: Tensor | None = None

    def metrics(self, weight: Tensor | float) -> Tensor:
        """Return both losses, times `weight`, their factor in the loss of the step; then the largest share of an expert
        of any layer, and the mean share of each: FP32 [3 + E].
        """
        shares = self.shares.detach()
        losses = weight * torch.stack([self.balance_loss.detach(), self.z_loss.detach()])
        return torch.cat([losses, shares.max()[None], shares.mean(0)])

    def loss(self, moe: MoEConfig) -> Tensor:
        """Return the routers' losses times their factors, which training adds to the loss, FP32 []."""
        return moe.router_aux_loss_coef * self.balance_loss + moe.router_z_loss_coef * self.z_loss


class Routing:
    """The choices of a pass's routers, in the order of the layers. A class: hooks of FSDP2 copy tuples and lists."""

    def __init__(self) -> None:
        self.layers: list[LayerRouting] = []

    def take(self, group: dist.ProcessGroup | None = None) -> RoutingReport | None:
        """Return the losses and shares of the pass, and keep nothing; None if it had no router.

        What recomputes a block for backward keeps the context, and with it this object: with tensors of the graph in
        it, a graph that no backward runs through would keep itself alive.

        With `group`, the processes that train together, a collective of them. Shares then count all their tokens,
        and the losses are parts that add up to the losses of one process with all tokens.
        """
        layers = self.layers
        self.layers = []
        if not layers:
            return None
        counts, probabilities, squares, tokens = (
            torch.stack(values) for values in zip(*layers, strict=True)
        )
        # [layers, 2, E], [layers, E], [layers], [layers] from here on.
        total = tokens.sum()
        if group is not None:
            everywhere = torch.cat((counts.flatten(), total[None]))
            # Counts of all tokens make the loss the one of one process; probabilities stay this process's, whose
            # gradient it has.
            dist.all_reduce(everywhere, group=group)
            counts = everywhere[:-1].view_as(counts)
            total = everywhere[-1]
        total = total.clamp(min=1)
        # What the experts got (with bias and groups), and what the logits alone would have given them: the loss uses
        # the second.
        went, best = counts.unbind(1)
        balance = best.shape[1] * ((best.sum(0) / total) * (probabilities.sum(0) / total)).sum()
        shares = went / went.sum(1, keepdim=True).clamp(min=1)
        return RoutingReport(balance, squares.sum() / total, shares)


def choose(
    logits: Tensor,
    bias: Tensor | None,
    real: Tensor | None,
    moe: MoEConfig,
    kernels: RowKernels = PLAIN,
) -> Tensor:
    """Return the experts of each token, int64 [T, k], in descending order; E where `real` [T, 1] says padding.

    `logits` are FP32 [T, E], `bias` [E] is added to the scores for the choice.
    """
    # A choice has no gradient: it goes through the weights of what was chosen.
    scores = logits.detach()
    # Otherwise the logits have the order of the scores, without their rounding.
    if bias is not None or moe.n_group > 1:
        scores = _scores(scores, moe)
        if bias is not None:
            scores = scores + bias.detach()
    if moe.n_group > 1:
        # Node-limited routing (DeepSeek-V3): the best groups first, by the sum of their best scores, then experts in
        # these.
        groups = scores.unflatten(1, (moe.n_group, -1))  # [T, groups, E / groups]
        best = (
            groups.topk(moe.group_scores, dim=2)
            .values.sum(2)
            .sort(dim=1, descending=True, stable=True)
            .indices
        )
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(
            1, best[:, : moe.topk_group], True
        )
        # Experts of the other groups cannot be chosen, whatever their scores.
        scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    if kernels.choose is not None:
        return kernels.choose(scores, moe.num_experts_per_tok, real)
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, : moe.num_experts_per_tok]
    # Descending by number, which is the order in which Transformer Engine adds up the experts of a token.
    chosen = chosen.sort(dim=1, descending=True).values
    return chosen if real is None else chosen.masked_fill(~real, logits.shape[1])


def weights_of(logits: Tensor, chosen: Tensor, moe: MoEConfig) -> Tensor:
    """Return the weights of the chosen experts, FP32 [T, k]; at padding they mean nothing."""
    scores = _scores(logits, moe).gather(1, chosen.clamp(max=logits.shape[1] - 1))
    if moe.norm_topk_prob:
        total = scores.sum(1, keepdim=True)
        epsilon = moe.norm_topk_eps
        if epsilon is None and moe.router_scores == "sigmoid":
            epsilon = 1e-20
        scores = scores / (total if epsilon is None else total + epsilon)
    return scores if moe.routed_scaling_factor == 1 else scores * moe.routed_scaling_factor


def _scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    return logits.sigmoid() if moe.router_scores == "sigmoid" else logits.softmax(1)


def describe(logits: Tensor, counts: Tensor, real: Tensor | None, moe: MoEConfig) -> LayerRouting:
    """Return the statistics of a layer whose experts got `counts` tokens, for losses and metrics."""
    best = counts
    if moe.expert_bias or moe.n_group > 1:
        # Without bias and groups the choice is the one by logits alone, and `counts` has it already.
        named = logits.detach().topk(moe.num_experts_per_tok, dim=1).indices
        if real is None:
            each = torch.ones_like(named, dtype=counts.dtype)
        else:
            each = real.to(counts).expand_as(named)
        best = torch.zeros_like(counts).index_add(0, named.flatten(), each.flatten())
    probabilities = logits.softmax(1)
    squares = logits.logsumexp(1, keepdim=True).square()
    tokens = logits.new_full((), len(logits))
    if real is not None:
        probabilities = probabilities * real
        squares = squares * real
        tokens = real.sum().float()
    return LayerRouting(
        torch.stack((counts, best)).float(), probabilities.sum(0), squares.sum(), tokens
    )


class Places(NamedTuple):
    """The places of tokens among the rows of all experts, which are in the order of experts and then of tokens."""

    token: Tensor  # int64 [R]: the token of each row; T for a row of padding, T + 1 behind the last expert's rows
    row: Tensor  # int64 [T, k]: the rows of each token; R for a token of padding
    rows: list[int] | Groups  # of each expert, padding included
    counts: Tensor  # int64 [E]: the tokens of each expert


def places(
    chosen: Tensor,
    experts: int,
    alignment: int,
    on_device: bool = False,
    kernels: RowKernels = PLAIN,
) -> Places:
    """Return the places of tokens whose experts are `chosen` [T, k]; each expert's rows are a multiple of `alignment`.

    The host waits for the device to learn the numbers of rows, or with `on_device` never does: R is then the most that
    there can be, and the rows behind the last expert's are padding too.
    """
    tokens, k = chosen.shape
    # Of all ranks' tokens, some of the k experts may be on other ranks.
    assigned = tokens * min(k, experts)
    if on_device and kernels.places is not None:
        from_kernels = kernels.places(
            chosen, experts, alignment, _most(assigned, experts, alignment)
        )
        return Places(*from_kernels)
    # Sorted by expert, then by token; padding is last.
    # int16, since sorting takes a radix pass per byte on CUDA; E fits by far.
    order = chosen.flatten().to(torch.int16).argsort(stable=True)
    expert = chosen.flatten()[order]
    # The first place of each expert number in the sorted list; differences are the tokens of each.
    counts = torch.searchsorted(expert, torch.arange(experts + 1, device=expert.device)).diff()
    # Each expert begins at a multiple of the alignment, which its FP8 GEMM needs.
    padded = (counts + alignment - 1) // alignment * alignment
    host = [] if on_device else padded.tolist()
    most = _most(assigned, experts, alignment) if on_device else sum(host)
    rows = Groups(F.pad(padded.cumsum(0), (1, 0)), most) if on_device else host
    # Rows of padding before each expert's first row.
    before = F.pad((padded - counts).cumsum(0), (1, 0))
    row = torch.arange(len(order), device=order.device) + before[expert]
    # Padding (expert E) goes to one row behind all others, which is cut off below.
    row = torch.where(expert < experts, row, most)
    token = (
        torch.full((most + 1,), tokens, device=order.device)
        .index_copy(0, row, order // k)[:most]
        .clone()
    )
    if on_device:
        token += torch.arange(most, device=order.device) >= padded.sum()
    return Places(
        token, torch.empty_like(order).index_copy(0, order, row).view(tokens, k), rows, counts
    )


def _most(rows: int, experts: int, alignment: int) -> int:
    """Return the most rows that there can be of all experts, padding included."""
    return -(-(rows + experts * (alignment - 1)) // alignment) * alignment
