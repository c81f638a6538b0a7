"""GaLore against the paper's equations, computed with a full SVD."""

import pytest
import torch

from te_models.optim import OPTIMIZERS, resolve_options
from te_models.optim.galore import leading_directions


def reference(
    matrix: torch.Tensor, gradients: list[torch.Tensor], rank: int, refresh: int, scale: float
) -> torch.Tensor:
    """Algorithm 2 of arXiv 2403.03507: Adam on P^T G with P of the gradient's SVD, and decoupled decay."""
    rate, (beta1, beta2), eps, decay = 1e-2, (0.9, 0.95), 1e-8, 0.1
    m = v = torch.zeros(rank, matrix.shape[1])
    basis = torch.empty(0)
    for step, gradient in enumerate(gradients, start=1):
        if (step - 1) % refresh == 0:
            basis = torch.linalg.svd(gradient).U[:, :rank]
        low = basis.mT @ gradient
        m, v = beta1 * m + (1 - beta1) * low, beta2 * v + (1 - beta2) * low**2
        direction = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        matrix = matrix - rate * decay * matrix - rate * scale * (basis @ direction)
    return matrix


@pytest.mark.parametrize("tall", [False, True])
def test_updates_are_those_of_the_paper(tall: bool) -> None:
    """For gradients of the projector's rank, whose subspace is unique; the basis in it is, too, up to signs."""
    torch.manual_seed(0)
    start, rank = torch.randn(6, 10), 2
    left, right = torch.linalg.qr(torch.randn(6, rank)).Q, torch.linalg.qr(torch.randn(10, rank)).Q
    gradients = [left @ torch.diag(torch.tensor([3.0 + i, 1.0])) @ right.mT for i in range(4)]
    found = {}
    for scale in (1.0, 0.25):
        matrix = torch.nn.Parameter((start.mT if tall else start).clone())
        options = resolve_options("galore", dict(rank=rank, refresh=2, scale=scale))
        group = dict(params=[matrix], weight_decay=0.1, matrices=True)
        (optimizer,) = OPTIMIZERS["galore"].build(1e-2, options, [group])
        for gradient in gradients:
            matrix.grad = gradient.mT if tall else gradient
            optimizer.step()
        found[scale] = matrix.detach().mT if tall else matrix.detach()
        torch.testing.assert_close(
            found[scale], reference(start, gradients, rank, 2, scale), rtol=0, atol=1e-5
        )
    assert (found[1.0] - found[0.25]).abs().max() > 1e-2


def test_leading_directions_are_those_of_the_svd() -> None:
    spectrum = 0.8 ** torch.arange(30.0)
    u, v = torch.linalg.qr(torch.randn(30, 30)).Q, torch.linalg.qr(torch.randn(70, 30)).Q
    found = leading_directions(u @ torch.diag(spectrum) @ v.T, rank=6, seed=0)
    assert torch.allclose(found.T @ found, torch.eye(6), atol=1e-5)
    assert torch.allclose((found.T @ u[:, :6]).abs().diagonal(), torch.ones(6), atol=1e-5)


def test_every_projector_is_of_other_random_numbers() -> None:
    """Those of the step's number: the same in a resumed run, and another range of the gradient at each refresh."""
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    seeded = [leading_directions(gradient, 4, seed) for seed in range(3)]
    assert not torch.equal(seeded[0], seeded[1])
    matrix = torch.nn.Parameter(torch.zeros(24, 40))
    (optimizer,) = OPTIMIZERS["galore"].build(
        1e-2,
        resolve_options("galore", dict(rank=4, refresh=2)),
        [dict(params=[matrix], matrices=True)],
    )
    for seed in (0, 0, 2, 2):
        matrix.grad = gradient
        optimizer.step()
        assert torch.equal(optimizer.state[matrix]["projector"], seeded[seed])
