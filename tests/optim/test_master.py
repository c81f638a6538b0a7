"""FP32 master weights and clipping."""

import pytest
import torch
from bits import assert_same_bits

from te_models.optim import build_optimizer
from te_models.optim.gradients import scale


def test_masters_keep_updates_that_bf16_loses() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    holder = torch.nn.Linear(1, 1, bias=False)
    holder.weight = weight
    optimizer = build_optimizer("adamw", holder, lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.take_gradients(0.0)
        optimizer.step()
    assert weight[0].item() == pytest.approx(0.98, abs=0.004), "each step alone rounds away in BF16"


@pytest.mark.parametrize("max_norm, kept", [(0.0, 60.0), (1.0, 1.0), (100.0, 60.0)])
def test_gradients_are_clipped_to_the_norm_and_not_below_it(max_norm: float, kept: float) -> None:
    holder = torch.nn.Linear(100, 9, bias=False, dtype=torch.bfloat16)
    optimizer = build_optimizer("adamw", holder, lr=1e-3, weight_decay=0.0)
    holder.weight.grad = torch.full_like(holder.weight, 2.0)
    seen: list[float] = []
    optimizer.optimizers[0].register_step_pre_hook(
        lambda *_: seen.append(optimizer.masters[0].grad.norm().item())
    )
    assert optimizer.take_gradients(max_norm).item() == pytest.approx(60.0)
    optimizer.step()
    assert seen == [pytest.approx(kept, rel=1e-4)]
    assert holder.weight.grad is None and optimizer.masters[0].grad is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1 / 3, 0.9990234375, 1.0])
def test_clipping_rounds_each_product_once(factor: float, dtype: torch.dtype, device: str) -> None:
    """Such factors are no BF16 numbers: rounded to BF16 they would be 0.334 and 1."""
    sizes = [(7,), (300, 65), (64, 1024)]
    gradients = [torch.randn(size).to(device, dtype) for size in sizes]
    gradients.append(torch.randn(40, 50).to(device, dtype).t())
    expected = [(g.double() * torch.tensor(factor).double().item()).to(dtype) for g in gradients]
    scale(gradients, torch.tensor(factor))
    for number, (found, wanted) in enumerate(zip(gradients, expected, strict=True)):
        assert_same_bits(f"gradient {number}", found, wanted)
