"""FP32 master weights and clipping."""

import pytest
import torch
from bits import assert_same_bits
from fewer import every

from te_models.optim import adamw_blocks, build_optimizer
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
    assert optimizer.take_gradients(max_norm).item() == pytest.approx(60.0)
    optimizer.step()
    (state,) = optimizer.state_dict()["state"]
    beta1 = 0.9  # the first moment of a first step is (1 - beta1) times the gradient
    assert state["exp_avg"].norm().item() == pytest.approx((1 - beta1) * kept, rel=1e-4)
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


SIZES = [1, 15, 16, 17, 100, 4096, 5003]  # of which few end where a vector of 16 does
BLOCKS = [16, 112, 1000, 2**21]  # elements; 1000 is no multiple of 16


@pytest.mark.parametrize(
    ("block", "dtype", "max_norm", "offload"),
    every(3, BLOCKS, [torch.bfloat16, torch.float16, torch.float32], [0.0, 0.5], [False, True]),
)
def test_an_update_in_blocks_has_the_bits_of_one_pass_per_operation(
    block: int, dtype: torch.dtype, max_norm: float, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge converts, clips, updates and rounds whole tensors, by PyTorch's own AdamW."""
    monkeypatch.setattr(adamw_blocks, "THREAD_BLOCK", 1)
    monkeypatch.setattr(adamw_blocks, "LEAST_BLOCK", block)
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.randn(size).to(dtype) for size in SIZES])
    model.append(torch.randn(37, 65).to(dtype))  # a matrix decays
    optimizer = build_optimizer("adamw", model, lr=1e-2, weight_decay=0.1, offload=offload)
    right = [parameter.detach().float().clone() for parameter in model]
    groups = [
        dict(params=right[:-1], weight_decay=0.0),
        dict(params=right[-1:], weight_decay=0.1),
    ]
    judge = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(3):
        for parameter, master in zip(model, right, strict=True):
            parameter.grad = torch.randn_like(parameter) * 10.0**-step
            master.grad = parameter.grad.float().clone()
        norm = optimizer.take_gradients(max_norm)
        if max_norm:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for master in right:
                master.grad *= factor
        optimizer.step()
        judge.step()
        for number, (parameter, master) in enumerate(zip(model, right, strict=True)):
            assert_same_bits(f"step {step}, parameter {number}", parameter, master.to(dtype))
    by_parameter = dict(zip(map(id, optimizer.parameters), optimizer.masters, strict=True))
    for number, (parameter, master) in enumerate(zip(model, right, strict=True)):
        own = by_parameter[id(parameter)]
        assert_same_bits(f"master {number}", own, master)
        for name, value in judge.state[master].items():
            assert_same_bits(f"{name} {number}", optimizer.optimizers[0].state[own][name], value)


def test_a_skipped_step_on_a_cpu_changes_nothing() -> None:
    holder = torch.nn.Linear(50, 9, dtype=torch.bfloat16)
    optimizer = build_optimizer("adamw", holder, lr=1e-2, weight_decay=0.1)
    for bad in (False, True):
        before = [t.clone() for t in (*holder.parameters(), *optimizer.masters)]
        for parameter in holder.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan if bad else 1.0)
        optimizer.take_gradients(1.0)
        optimizer.skip_if(torch.tensor(bad))
        optimizer.step()
        same = map(torch.equal, before, (*holder.parameters(), *optimizer.masters))
        assert all(same) if bad else not any(same)
    steps = [state["step"].item() for state in optimizer.state_dict()["state"]]
    assert steps == [1, 1]
