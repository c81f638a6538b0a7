"""The emulated engine on a CUDA device: the same FP8 values, scales and histories as on the CPU, in every bit."""

import engine_reference
import pytest
import torch
from torch import Tensor
from typed import gradient

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R
from te_models.numerics.fused import fused

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
RECIPES = engine_reference.RECIPES | {
    "nvfp4": lambda: R.NVFP4BlockScaling(disable_stochastic_rounding=True)
}


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_change_nothing(name: str) -> None:
    with fused(False):
        plain = train("cuda", name, None)
    with fused(True):
        kernels = train("cuda", name, None)
    assert all(torch.equal(a, b) for a, b in zip(plain, kernels, strict=True))


def train(device: str, name: str, reentrant: bool | None) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    norm = te.RMSNorm(256, dtype=BF16, device=device)
    layers = [te.Linear(256, 256, params_dtype=BF16, device=device) for _ in range(2)]
    found: list[Tensor] = []
    with torch.no_grad():
        for m in layers:
            m.weight.copy_(torch.randn(256, 256, generator=g) * 0.05)
    recipe = RECIPES[name]()
    for step in range(4):
        x = (torch.randn(128, 256, generator=g) * 2**step).to(BF16).to(device).requires_grad_()

        def function(v: Tensor) -> Tensor:
            return layers[1](torch.nn.functional.silu(layers[0](norm(v))))

        with te.autocast(recipe=recipe):
            y = (
                function(x)
                if reentrant is None
                else te.checkpoint(function, x, use_reentrant=reentrant)
            )
        y.backward(torch.randn(128, 256, generator=g).to(BF16).to(device))
        weight, bias = layers[0].weight, layers[1].bias
        found += [y.detach(), gradient(x), gradient(weight), gradient(bias)]
        if name == "delayed":
            found += [
                m.fp8_meta[d].scale.clone() for m in layers for d in ("scaling_fwd", "scaling_bwd")
            ]
    return [t.float().cpu() for t in found]


@pytest.mark.parametrize("name", RECIPES)
def test_layers_agree_with_the_cpu(name: str) -> None:
    # Another order of accumulation moves BF16 steps of the first layer, and those FP8 codes of the second.
    for a, b in zip(train("cpu", name, None), train("cuda", name, None), strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpoint_changes_nothing(name: str, reentrant: bool) -> None:
    plain, checkpointed = train("cuda", name, None), train("cuda", name, reentrant)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
