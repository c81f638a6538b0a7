"""AdamW in one kernel (optim/adamw_triton.py) against PyTorch's.

Run by tests/kernels/test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import copy
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from te_models import CausalLM
from te_models.fp8.primary_weights import is_quantized, plain
from te_models.optim import adamw_triton, build_optimizer, master
from te_models.optim.adamw import AdamW, Update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
SIZES = [1, 16, 100, adamw_triton.BLOCK, adamw_triton.BLOCK + 8, 3 * adamw_triton.BLOCK + 5]
LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8


def tensors(sizes: list[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = [10 ** (-4 * torch.rand(size, generator=generator)) for size in sizes]
    found = [
        torch.randn(size, generator=generator) * s for size, s in zip(sizes, spread, strict=True)
    ]
    return [value.to(DEVICE, dtype) for value in found]


def rounded_once(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's arithmetic in plain operations: moments in FP64 rounded once, the update in FP32."""
    p = (p.double() - LR * DECAY * p.double()).float()
    m = (BETAS[0] * m.double() + (1 - BETAS[0]) * g.double()).float()
    v = (BETAS[1] * v.double() + (1 - BETAS[1]) * g.double() * g.double()).float()
    bias = torch.tensor(1 - BETAS[0] ** step).double().float().double()
    size = (LR / bias).float()
    root = torch.tensor((1 - BETAS[1] ** step) ** 0.5, dtype=torch.float64).float()
    # FP32 roots and quotients, correctly rounded, which PyTorch's on a CPU are not.
    quotient = (v.double().sqrt().float().double() / root.double()).float()
    below = (quotient.double() + EPS).float()
    return p - ((size * m).double() / below.double()).float(), m, v


def assert_rounded_alike(own: Tensor, right: Tensor, name: str) -> None:
    """Assert equal bits in the interpreter, and on a GPU all but a few that are one rounding away.

    A GPU fuses the FP64 product with the sum. With betas of 0.9 and 0.95 the exact sums of FP32 values of like size are
    often halfway between two FP32 values, where the last bit of FP64 decides: up to one element in a hundred.
    """
    if DEVICE == "cpu":
        assert torch.equal(own, right), name
        return
    different = own != right
    assert different.float().mean() <= 0.01 or int(different.sum()) <= 1, name
    # Of a master the last bit of its update, which is a few times the learning rate at most.
    least = 4 * LR * 2.0**-23 if name.startswith("master") else 2.0**-30
    torch.testing.assert_close(own, right, rtol=2.0**-22, atol=least, msg=name)


@pytest.mark.parametrize(
    ("dtype", "copied", "clipped", "shift"),
    every(2, [BF16, torch.float32], [True, False], [True, False], [0, 1]),
)
def test_an_update_is_pytorchs(dtype: torch.dtype, copied: bool, clipped: bool, shift: int) -> None:
    """Three steps; `shift` makes tensors that begin at odd addresses."""
    masters = [t[shift:] for t in tensors([size + shift for size in SIZES], torch.float32, 0)]
    parameters = [torch.empty_like(p, dtype=BF16) for p in masters] if copied else [None] * 6
    optimizer = AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    before = [(p.clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in masters]
    exact = [p.detach().cpu().double().clone() for p in masters]
    reference = torch.optim.AdamW(exact, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    factor = torch.tensor(1 / 3, device=DEVICE) if clipped else None
    for step in (1, 2, 3):
        gradients = tensors(SIZES, dtype, step)
        unchanged = [g.clone() for g in gradients]
        optimizer.update(list(map(Update, masters, gradients, parameters)), factor)
        assert all(map(torch.equal, gradients, unchanged))
        for number, gradient in enumerate(gradients):
            g = gradient.float() if factor is None else gradient.float() * factor
            exact[number].grad = g.cpu().double()
            state = optimizer.state[masters[number]]
            found = (masters[number], state["exp_avg"], state["exp_avg_sq"])
            # From the kernel's own state before the step: where values cancel each other, a difference would grow.
            right = rounded_once(*before[number], g, step)
            for name, own, value in zip(("master", "first", "second"), found, right, strict=True):
                assert_rounded_alike(own, value, f"{name} of tensor {number}, step {step}")
            before[number] = found[0].clone(), found[1].clone(), found[2].clone()
        reference.step()
    for number in range(len(masters)):
        assert optimizer.state[masters[number]]["step"].item() == 3
        torch.testing.assert_close(
            masters[number].cpu().double(), exact[number], rtol=2e-6, atol=2e-7
        )
        if copied:
            error = (parameters[number].double() - masters[number].double()).abs()
            step_of_bf16 = masters[number].double().abs() * 2.0**-7
            assert (error <= step_of_bf16).all()  # the interpreter cuts off where a GPU rounds
            if DEVICE == "cuda":
                assert torch.equal(parameters[number], masters[number].to(BF16))


class Read(TorchDispatchMode):
    """Counts how often the host reads a number of a step."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # Whole numbers are of tables that the host makes.
            self.count += args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_a_bad_step_changes_nothing(bad: float) -> None:
    (p,), (g,) = tensors([100], torch.float32, 0), tensors([100], BF16, 1)
    if bad:
        g[3] = float("nan")
    copy_of_p = p.to(BF16)
    before = (p.clone(), copy_of_p.clone())
    optimizer = AdamW([p], lr=LR)
    optimizer.found_inf = torch.tensor(bad, device=DEVICE)
    with Read() as read:
        optimizer.update([Update(p, g, copy_of_p)], None)
    assert not read.count, "the host would wait for the backward pass"
    state = optimizer.state[p]
    assert state["step"].item() == 1 - bad
    same = [torch.equal(*pair) for pair in zip((p, copy_of_p), before, strict=True)]
    assert same[0] == bool(bad) and (same[1] or not bad)
    assert bool(state["exp_avg"].any()) != bool(bad)


def test_tensors_may_move_and_be_left_out() -> None:
    """Gradients at other addresses, a step without one of the tensors: as many updates each, with own step counts."""
    masters = tensors([64, 300, 64], torch.float32, 0)
    optimizer = AdamW(masters, lr=LR, weight_decay=0.0, betas=BETAS, eps=EPS)
    alone = [p.clone() for p in masters]
    single = [AdamW([p], lr=LR, weight_decay=0.0, betas=BETAS, eps=EPS) for p in alone]
    kept = []
    for step in range(4):
        gradients = tensors([64, 300, 64], torch.float32, step)
        kept.append(gradients)  # so that the next ones are elsewhere
        used = [0, 1, 2] if step != 2 else [0, 2]
        optimizer.update([Update(masters[n], gradients[n], None) for n in used], None)
        for n in used:
            single[n].update([Update(alone[n], gradients[n], None)], None)
    assert all(map(torch.equal, masters, alone))
    assert [optimizer.state[p]["step"].item() for p in masters] == [4, 3, 4]


def test_a_model_trains_as_through_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters of BF16 parameters, with clipping, saved and loaded in between, and one parameter in FP32."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)).to(DEVICE, BF16)]
    bias = models[0].get_parameter("0.bias")
    bias.data = bias.data.float()
    models.append(copy.deepcopy(models[0]))
    found: list[Any] = []
    for model, kernel in zip(models, (True, False), strict=True):
        monkeypatch.setattr(master, "runs_triton", lambda device, kernel=kernel: kernel)
        found.append(build_optimizer("adamw", model, LR, DECAY))
    assert [optimizer._at_once for optimizer in found] == [True, False]
    for number in range(5):
        for model, optimizer in zip(models, found, strict=True):
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad.to(parameter)
            optimizer.take_gradients(1.0)
            optimizer.set_learning_rate(LR / (number + 1))
            optimizer.step()
            assert all(parameter.grad is None for parameter in model.parameters())
        if number == 2:
            found[0].load_state_dict(found[1].state_dict())
    for own, other in zip(found[0].masters, found[1].masters, strict=True):
        # On a GPU PyTorch rounds betas to FP32, so its moments differ by 2e-7 of themselves.
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
    states = [optimizer.state_dict() for optimizer in found]
    assert [sorted(entry) for entry in states[0]["state"]] == [
        sorted(entry) for entry in states[1]["state"]
    ]
    found[1].check_state_dict(states[0])


def test_fp8_weights_are_quantized_from_the_new_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As through PyTorch: the codes, but where a master at the middle of two of them differs in its last bit."""
    place: dict[str, Any] = dict(
        device=DEVICE, engine="emulated", recipe="current", fp8_params=True
    )
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2)
    models, found = [], []
    for kernel in (True, False):
        monkeypatch.setattr(master, "runs_triton", lambda device, kernel=kernel: kernel)
        torch.manual_seed(0)
        model = CausalLM.from_preset("gated-nano", num_key_value_heads=1, **shape, **place).train()
        models.append(model)
        found.append(build_optimizer("adamw", model, LR, DECAY))
    assert [optimizer._at_once for optimizer in found] == [True, False]
    before = [plain(p).clone() for p in models[0].parameters()]
    for number in range(2):
        for model, optimizer in zip(models, found, strict=True):
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad.to(DEVICE, parameter.dtype)
            optimizer.take_gradients(1.0)
            optimizer.step()
    assert any(is_quantized(p) for p in models[0].parameters())
    pairs = zip(models[0].parameters(), models[1].parameters(), before, strict=True)
    for own, other, first in pairs:
        new, wanted = plain(own).float(), plain(other).float()
        assert not torch.equal(new, first.float())
        if is_quantized(own) or DEVICE == "cuda":  # the interpreter cuts BF16 off
            assert (new != wanted).float().mean() <= 0.01
    for own, other in zip(found[0].masters, found[1].masters, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
