"""te.GroupedLinear and the ways of rows against Transformer Engine 2.20.2 on an H200: tests/golden/README.md."""

import json
import lzma
import runpy
import sys
import zlib
from pathlib import Path

import pytest
import torch
from bits import assert_same_bits, digest
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor
from typed import gradient

import te_models.engine.emulated as te
from te_models.config.moe import MoEConfig
from te_models.kernels.expert_rows import combine, dispatch
from te_models.model.router import choose, places, weights_of

GOLDEN = Path(__file__).parents[1] / "golden"
PACKED = lzma.decompress((GOLDEN / "te_2.20.2_h200_grouped.safetensors.xz").read_bytes())
VECTORS = load(PACKED)
HEADER = json.loads(PACKED[8 : 8 + int.from_bytes(PACKED[:8], "little")])["__metadata__"]
DIGESTS, FACTS = json.loads(HEADER["digests"]), json.loads(HEADER["facts"])
SEED = 12
BF16 = torch.bfloat16
pytestmark = pytest.mark.recorded


@pytest.fixture(scope="module")
def captured(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, object]]:
    """Tensors, digests and facts of capture_grouped.py on the emulated engine."""
    path = tmp_path_factory.mktemp("golden") / "out.safetensors"
    with pytest.MonkeyPatch.context() as patch, te.exact_gemm():
        patch.setattr(sys, "argv", ["capture_grouped.py", str(path), str(SEED), "emulated"])
        runpy.run_path(str(GOLDEN / "capture_grouped.py"), run_name="__main__")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    return tensors, json.loads(metadata["digests"]), json.loads(metadata["facts"])


def quantized(key: str) -> bool:
    """Whether a product of FP8, which has one order on Hopper, made the tensor; cuBLAS's in BF16 has another."""
    case = key.split(".")[0]
    return not case.startswith("bf16") and not case.endswith("_bf16") and "_bf16_" not in case


def test_every_tensor_of_a_quantized_case_is_equal_in_every_bit(
    captured: tuple[dict, dict, dict],
) -> None:
    """Outputs, gradients, biases' too, scales, histories and codes, with experts that are idle or have all rows."""
    tensors, digests, _ = captured
    for key, expected in VECTORS.items():  # those that are stored say where they differ
        if key in tensors and quantized(key):
            got = tensors[key]
            if (
                "_scale_inv" in key and "blockwise" in key
            ):  # Transformer Engine leaves the padding uninitialized
                got, expected = (
                    t[:, : 64 if t.shape[0] == 1 else t.shape[1]] for t in (got, expected)
                )
                rows = {"0": 0, "1": 16, "2": 48, "3": 32}[key.split(".x")[1][0]]
                got, expected = (t[:, :rows] if "rowwise" in key else t for t in (got, expected))
            assert_same_bits(key, got, expected)
    common = [key for key in DIGESTS if key in digests and quantized(key)]
    assert len(common) > 500
    assert [key for key in common if digests[key] != DIGESTS[key]] == []


def test_products_in_bf16_differ_in_their_order_alone(captured: tuple[dict, dict, dict]) -> None:
    tensors, _, _ = captured
    for key in [key for key in VECTORS if key.startswith("bf16_odd.") and key in tensors]:
        got, expected = tensors[key].double(), VECTORS[key].double()
        assert (got - expected).norm() <= 2.0**-8 * expected.norm()  # one rounding of each number


def test_what_happens_without_rows_or_with_odd_ones_is_the_same(
    captured: tuple[dict, dict, dict],
) -> None:
    _, _, facts = captured
    found = {key.split(".", 1)[1]: value for key, value in FACTS.items()}
    for key in [key for key in facts if key.startswith(("empty_", "frozen"))]:
        assert facts[key] == found[key], key
    refused = {
        key for key in found if key.endswith(".error") and key.startswith(("train_", "forward_"))
    }
    assert {
        key for key in facts if key.endswith(".error") and key.startswith(("train_", "forward_"))
    } == refused
    for key in ("features_current.error", "splits_current.error"):
        assert facts[key] == found[key]


def test_the_gpu_itself_equals_linears_and_repeats_itself() -> None:
    """What the emulated engine relies on, as Transformer Engine did it."""
    linears = [value for key, value in FACTS.items() if key.endswith("differs_from_linear")]
    assert len(linears) > 80 and not any(linears)
    assert all(value for key, value in FACTS.items() if key.endswith("same_twice"))
    assert FACTS["connections.different"] == []
    plain = {key: value for key, value in DIGESTS.items() if key.startswith("plain_")}
    for mode in ("recompute0", "recompute1"):
        assert {
            key.replace("plain", mode, 1): value for key, value in plain.items()
        }.items() <= DIGESTS.items()


def test_an_unfused_update_rolls_a_zero_in_and_the_emulated_one_is_fused() -> None:
    scale, history = "idle_delayed.3.scale_fwd", "idle_delayed.3.amax_history_fwd"
    torch.testing.assert_close(VECTORS[scale], VECTORS[f"unfused_{scale}"], rtol=1e-6, atol=0)
    assert VECTORS[history][-1, 3] > 0 and VECTORS[f"unfused_{history}"][-1, 3] == 0


class Draw:
    """As capture_grouped.py draws."""

    def __init__(self, case: str) -> None:
        self.generator = torch.Generator().manual_seed(SEED * 2**32 + zlib.crc32(case.encode()))

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype)


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_rows_go_as_by_the_permutation_kernels(name: str, k: int) -> None:
    """Output and gradients in every bit, but for the order of the sum in the gradient of FP32 weights."""
    case, dtype = f"permute_{name}_{k}", torch.float32 if name == "fp32" else BF16
    draw = Draw(case)
    chosen = torch.rand(64, 16, generator=draw.generator).topk(k, dim=1).indices
    mask = torch.zeros(64, 16, dtype=torch.int32).scatter(1, chosen, 1)
    probs = (torch.rand(64, 16, generator=draw.generator) * mask).to(dtype)
    x, h, g, drows = draw(64, 128), draw(64 * k, 128), draw(64, 128), draw(64 * k, 128)
    x, h = x.requires_grad_(), h.requires_grad_()
    chosen = chosen.sort(dim=1, descending=True).values
    where = places(chosen, 16, 1)
    weights = probs.gather(1, chosen).float().requires_grad_()
    rows, y = dispatch(x, where.token, where.row), combine(h, weights, where.token, where.row)
    rows.backward(drows)
    y.backward(g)
    found = dict(rows=rows, y=y, dh=h.grad, dx=x.grad)
    dp = torch.zeros(64, 16).scatter(1, chosen, gradient(weights)).to(dtype)
    if name == "bf16":
        found["dp"] = dp
    elif k == 4:
        expected = VECTORS[f"{case}.dp"]
        assert (dp - expected).abs().max() <= 128 * 2.0**-24 * expected.abs().max()
    assert {
        key for key, value in found.items() if digest(value)[:32] != DIGESTS[f"{case}.{key}"]
    } == set()


ROUTERS = {
    "router_softmax": dict(num_experts_per_tok=8),
    "router_sigmoid_8": dict(num_experts_per_tok=8, router_scores="sigmoid", expert_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUTERS)
def test_the_router_chooses_as_the_fused_one(case: str) -> None:
    """Without groups, of which the fused router sums the best k / groups scores and transformers the best two."""
    moe = MoEConfig(num_experts=64, moe_intermediate_size=8, **ROUTERS[case])
    draw = Draw(case)
    logits = draw(64, 64, dtype=torch.float32)
    bias = draw(64, scale=0.1, dtype=torch.float32) if moe.expert_bias else None
    chosen = choose(logits, bias, None, moe)
    assert VECTORS[f"{case}.map"].gather(1, chosen).all()
    found = torch.zeros(64, 64).scatter(1, chosen, weights_of(logits, chosen, moe))
    torch.testing.assert_close(found, VECTORS[f"{case}.probs"], rtol=1e-5, atol=1e-7)
