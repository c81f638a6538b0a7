"""RMSNorm at a width for which Transformer Engine has no tuned kernel, by ours, beside its module."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models import CausalLM
from te_models.engine import get_engine
from te_models.kernels import residual_norm_triton

pytestmark = pytest.mark.gpu
WIDTH, TUNED = 2560, 2048
TOKENS = 12288


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls of each of our kernels."""
    found: Counter[str] = Counter()
    for name in ("forward", "backward"):
        kernel = getattr(residual_norm_triton, name)

        def counted(*args: Any, name: str = name, kernel: Any = kernel, **options: Any) -> Any:
            found[name] += 1
            return kernel(*args, **options)

        monkeypatch.setattr(residual_norm_triton, name, counted)
    return found


def rms_norm(width: int, zero_centered: bool) -> Any:
    te, *_ = get_engine("native")
    module = te.RMSNorm(
        width, eps=1e-5, zero_centered_gamma=zero_centered, dtype=torch.bfloat16, device="cuda"
    )
    torch.nn.init.normal_(module.weight, 0.0 if zero_centered else 1.0, 0.2)
    return module


def output_norm(module: Any, x: Tensor) -> Tensor:
    te, *_ = get_engine("native")
    return te.handover["output_norm"](module, x)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_and_its_gradients_are_as_near_to_fp64_as_those_of_the_module(
    zero_centered: bool, calls: Counter[str]
) -> None:
    torch.manual_seed(0)
    module = rms_norm(WIDTH, zero_centered)
    sizes = torch.logspace(-4, 2, TOKENS, device="cuda")[:, None]
    x = (torch.randn(TOKENS, WIDTH, device="cuda") * sizes).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16()

    wide = x.detach().double().requires_grad_()
    weight = module.weight.detach().double().requires_grad_()
    exact = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * (weight + zero_centered)
    truth = [exact, *torch.autograd.grad(exact, [wide, weight], dy.double())]

    def errors(y: Tensor) -> list[Tensor]:
        """The largest distance from FP64 of each row; of the weight's gradient, all of it."""
        found = [y, *torch.autograd.grad(y, [x, module.weight], dy)]
        return [
            (one.double() - other).norm(dim=-1) / other.norm(dim=-1)
            for one, other in zip(found, truth, strict=True)
        ]

    theirs = errors(module(x))
    assert not calls
    ours = errors(output_norm(module, x))
    assert calls == dict(forward=1, backward=1)
    for one, other in zip(ours, theirs, strict=True):
        # Both round once; which way, in a sum of FP32 numbers in another order, is chance.
        assert one.max() <= 1.02 * other.max()
    assert torch.equal(output_norm(module, x), output_norm(module, x))


def test_at_a_width_with_tuned_kernels_the_bits_are_those_of_the_module(
    calls: Counter[str],
) -> None:
    module = rms_norm(TUNED, False)
    x = torch.randn(TOKENS, TUNED, device="cuda").bfloat16().requires_grad_()
    assert torch.equal(output_norm(module, x), module(x))
    assert not calls


@pytest.mark.parametrize("position", ["post", "both"])
@pytest.mark.parametrize(
    ("recipe", "floor"), [("bf16", 35), ("delayed", 12), ("blockwise", 20)]
)  # dB; FP8's own noise against BF16 is about 14 dB
def test_a_model_has_the_gradients_of_plain_modules(
    recipe: str, floor: float, position: str, calls: Counter[str]
) -> None:
    edges = {}
    if recipe != "bf16":
        edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    ids = torch.randint(0, 256, (2, 512), device="cuda")
    found = []
    for fused in (False, True):
        torch.manual_seed(1)
        model = CausalLM.from_preset(
            "gated-nano",
            recipe=recipe,
            fused=fused,
            compile=False,
            device="cuda",
            engine="native",
            hidden_size=WIDTH,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            norm_position=position,
            **edges,
        ).train()
        assert not calls
        for _ in range(3):
            model.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
        gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        found.append((loss.item(), gradients))
    (loss, plain), (fused_loss, fast) = found
    assert fused_loss == pytest.approx(loss, rel=2e-3)
    assert 20 * math.log10(plain.norm() / (plain - fast).norm()) > floor
    # Three passes of two layers with one or two norms at each part; under delayed those before a part write FP8.
    before = 0 if position == "post" else 12
    assert calls["backward"] == 12 + before
    assert calls["forward"] == 12 + (0 if recipe == "delayed" else before)
