"""GaLore: AdamW with moments in a low-rank subspace of each matrix's gradient (Zhao et al. 2024,
arXiv 2403.03507).

For a gradient G [m, n] with m <= n (else transposed), P [m, r] spans its r leading left singular directions; Adam runs
on P^T G [r, n] and P times its update goes to the weights. P is recomputed every `refresh` steps. The state has r (m +
2n) elements instead of 2mn.

galore-torch 1.0 (2024) is not used: it needs transformers and bitsandbytes, and its projectors are Python objects,
which cannot be saved without a pickle. P comes from a randomized range finder (Halko et al. 2011, arXiv 0909.4061)
instead of a full SVD, which takes minutes at 4096 x 14336.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.errors import check_least
from te_models.optim.state_tensors import Group, State, like

OVERSAMPLING = 8
POWER_ITERATIONS = 2


class Projected(NamedTuple):
    """A gradient of which only its projection exists: P^T G [r, n] of the wider orientation, and P [m, r]."""

    gradient: Tensor
    projector: Tensor


class GaLore(torch.optim.Optimizer):
    """AdamW in a subspace of rank `rank`; matrices with a side of at most `rank` get plain AdamW.

    A matrix that has an entry in `projected` is updated from it, and has no gradient of its own.

    Args:
        params: FP32 matrices, or groups of them.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, as in AdamW.
        rank: r above.
        refresh: steps between two projectors. The moments are retained when it changes, as in the paper.
        scale: factor of the projected update.

    Raises:
        ValueError: `rank` or `refresh` is below 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        rank: int = 128,
        refresh: int = 200,
        scale: float = 1.0,
    ) -> None:
        check_least(1, rank=rank, refresh=refresh)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            rank=rank,
            refresh=refresh,
            scale=scale,
        )
        super().__init__(params, defaults)
        self.projected: dict[
            Tensor, Projected
        ] = {}  # of the next step, by te_models.optim.projected

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every matrix that has a gradient. A closure is not supported."""
        for group in self.param_groups:
            for p in group["params"]:
                projected = self.projected.pop(p, None)
                if projected is not None:
                    self.state[p]["projector"] = projected.projector
                    update = self._update_of(p, projected.gradient, group)
                elif p.grad is not None:
                    update = self._update(p, p.grad, group)
                else:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def expected_state(self, view: Tensor, group: Group) -> State:
        """Return the state of one matrix after a step, as a template for te_models.optim.state_tensors.check_values."""
        rank = group["rank"]
        short = min(view.shape)
        long = max(view.shape)
        if short <= rank:
            return dict(step=int, exp_avg=like(view), exp_avg_sq=like(view))
        moment = like(view, rank, long)
        return dict(step=int, exp_avg=moment, exp_avg_sq=moment, projector=like(view, short, rank))

    def _update(self, p: Tensor, gradient: Tensor, group: Group) -> Tensor:
        """Return the update direction, of the gradient's shape; the step subtracts it times the learning rate."""
        state = self.state[p]
        # A subspace as large as the space saves nothing.
        if min(gradient.shape) <= group["rank"]:
            return _adam(gradient, state, group)
        wide = as_wide(gradient)
        if state.get("step", 0) % group["refresh"] == 0:
            # The seed is the step, so that a resumed run finds the same directions.
            state["projector"] = leading_directions(wide, group["rank"], seed=state.get("step", 0))
        return self._update_of(p, state["projector"].mT @ wide, group)

    def _update_of(self, p: Tensor, projected: Tensor, group: Group) -> Tensor:
        """Return the update direction [m, n] of a matrix, or [n, m] of a tall one, from P^T G [r, n]."""
        state = self.state[p]
        low = _adam(projected, state, group)
        update = (state["projector"] @ low) * group["scale"]  # [m, n]
        return update.mT if p.shape[0] > p.shape[1] else update


def as_wide(matrix: Tensor) -> Tensor:
    """Return a matrix [m, n] with m <= n, transposed if need be: the projector works on the shorter side."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _adam(gradient: Tensor, state: State, group: Group) -> Tensor:
    """Return Adam's direction for this gradient and update the moments and step count in `state`."""
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state.update(
            step=0, exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient)
        )
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
    denominator = (
        state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
    )
    return state["exp_avg"] / denominator / (1 - beta1 ** state["step"])


def leading_directions(matrix: Tensor, rank: int, seed: int) -> Tensor:
    """Approximate the `rank` leading left singular vectors of `matrix` [m, n] as orthonormal columns [m, rank].

    A randomized range finder with power iterations. It has its own random generator, seeded with `seed`, so that a
    resumed run computes the same.
    """
    # A few more directions than asked for make the leading ones more exact, at little cost.
    width = min(rank + OVERSAMPLING, *matrix.shape)
    # On meta, for a plan, there are no random numbers.
    generator = None
    if not matrix.is_meta:
        generator = torch.Generator(matrix.device).manual_seed(seed)
    start = torch.randn(
        matrix.shape[1], width, generator=generator, device=matrix.device, dtype=matrix.dtype
    )
    # Random directions, multiplied by the matrix, lean towards its leading ones; each iteration leans them further.
    basis = torch.linalg.qr(matrix @ start).Q  # [m, width]
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ (matrix.mT @ basis)).Q
    # The leading directions within the basis: eigenvectors of a small matrix [width, width].
    low = basis.mT @ matrix
    rotation = torch.linalg.eigh(low @ low.mT).eigenvectors.flip(-1)  # eigenvalues ascend
    # Saved in checkpoints, whose tensors are contiguous.
    return (basis @ rotation[:, :rank]).contiguous()
