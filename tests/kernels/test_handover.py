"""Hand-over between te modules: successor, order, and on a GPU one FP8 copy."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models import CausalLM
from te_models.engine import get_engine

# Heads and sequence for which attention is one operation on a GPU.
SHAPE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=256)


def build(recipe: str, fused: bool, **place: Any) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM.from_preset(
        "gated-nano", recipe=recipe, fused=fused, compile=False, **SHAPE, **place
    ).train()


def batch(device: Any, rows: int = 2, length: int = 128) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0)).to(
        device
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_codes_are_handed_on_and_kept_once(recipe: str) -> None:
    """te.Linear gets FP8 with its own scale, and after its GEMM the transposed codes alone are left for backward."""
    te = get_engine("native")[0]
    model, seen = build(recipe, True, device="cuda", engine="native"), []
    ids = batch("cuda")
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
    for layer in model.fp8_layers:
        block = model.layers[layer]
        for linear in (block.self_attn.qkvg_proj, block.mlp.gate_up_proj, block.mlp.down_proj):
            linear.register_forward_hook(
                lambda module, inputs, output: seen.append((module, inputs[0]))
            )
    loss = model(ids, labels=ids).loss
    assert len(seen) == 3 * len(model.fp8_layers)
    for linear, x in seen:
        assert isinstance(x, te.QuantizedTensor) and x._data is None and x._transpose is not None
        if recipe == "delayed":
            assert linear.fp8_meta["scaling_fwd"].amax_history[-1, 0] > 0
    loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("recipe", "floor"), [("bf16", 35), ("delayed", 12), ("current", 12), ("blockwise", 20)]
)  # dB; FP8's own noise against BF16 is about 14 dB
def test_gradients_are_the_plain_ones_but_for_rounding(
    recipe: str, floor: float, mode: str
) -> None:
    found = []
    for fused in (False, True):
        model = build(recipe, fused, device="cuda", engine="native", activation_checkpointing=mode)
        ids = batch("cuda", rows=4)
        for _ in range(3):
            model.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
        found.append(
            (loss.item(), torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        )
    (loss, plain), (fused_loss, fast) = found
    assert fused_loss == pytest.approx(loss, rel=2e-3)
    assert 20 * math.log10(plain.norm() / (plain - fast).norm()) > floor
