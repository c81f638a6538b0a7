"""The update of delayed scales by kernels of our own beside Transformer Engine's: the same bits."""

import importlib

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_update_of_transformer_engine(algorithm: str) -> None:
    """Of modules with few and with many scales, some of whose tensors were not cast, over several steps."""
    native = importlib.import_module("te_models.engine.native")
    native_scales = native.native_scales
    g = torch.Generator("cuda").manual_seed(0)
    sizes = [3, 384, 2, 96]
    histories = [torch.rand(1024, n, device="cuda", generator=g) for n in sizes]
    scales = [torch.rand(n, device="cuda", generator=g) for n in sizes]
    histories[1][:, 7] = 0.0
    histories[1][3, 8] = torch.inf
    others = [tensor.clone() for tensor in (*histories, *scales)]
    form = native.DType.kFloat8E4M3
    for _ in range(3):
        amaxes = torch.rand(sum(sizes), device="cuda", generator=g) * 9
        amaxes[torch.rand(len(amaxes), device="cuda", generator=g) < 0.3] = 0.0
        native_scales.update_scales(amaxes, histories, scales, algorithm, form, 1.0)
        native_scales._original_update(
            amaxes, others[: len(sizes)], others[len(sizes) :], algorithm, form, 1.0
        )
        for found, wanted in zip((*histories, *scales), others, strict=True):
            assert torch.equal(found, wanted)
