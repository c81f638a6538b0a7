"""The backward of one chunk of the delta rule in Triton; test_triton_kernels.py runs this with TRITON_INTERPRET=1."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from fewer import every
from torch import Tensor
from typed import gradient

from te_models.kernels.delta_rule_triton import FASTEST, autotuned, fix_configurations, gradients

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZE = 64
# Rows, tokens, key heads, value heads, d_k, d_v.
CASES = [
    (1, 64, 1, 1, 16, 16),
    (2, 65, 1, 2, 24, 40),
    (1, 5, 2, 2, 8, 12),
    (1, 185, 1, 2, 160, 136),
]
CASES += (
    [(2, 333, 4, 8, 128, 128), (1, 200, 2, 4, 64, 128), (1, 200, 2, 2, 256, 256)] if ON_GPU else []
)


def of_a_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The outputs and the next state, as the rule says, of one head."""
    seen = torch.ones(len(g), len(g), dtype=torch.bool, device=g.device).tril()
    between = 2.0 ** (g[:, None] - g[None, :]).masked_fill(~seen, -math.inf)
    outputs = scale * (2.0 ** g[:, None] * (q @ h) + ((q @ k.mT) * between) @ v)
    return outputs, 2.0 ** g[-1] * h + (k * 2.0 ** (g[-1] - g)[:, None]).mT @ v


# Decay per token at most; beyond 2 a chunk's sum leaves FP32's exponents.
@pytest.mark.parametrize(("case", "decay", "corrects"), every(2, CASES, [0.3, 30.0], [True, False]))
def test_gradients_are_those_of_autograd(
    case: tuple[int, ...], decay: float, corrects: bool
) -> None:
    """Of the delta rule, and of attention that only decays, whose states are in FP32."""
    batch, seq, key_heads, heads, d_k, d_v = case
    torch.manual_seed(0)
    chunks, dtype = -(-seq // SIZE), torch.bfloat16 if ON_GPU else torch.float32
    q, k = (
        torch.randn(batch, seq, key_heads, d_k, device=DEVICE).to(dtype) / d_k**0.5
        for _ in range(2)
    )
    v, do, dv = (torch.randn(batch, seq, heads, d_v, device=DEVICE).to(dtype) for _ in range(3))
    state_dtype = dtype if corrects else torch.float32
    h, dh = (
        torch.randn(batch, chunks, heads, d_k, d_v, device=DEVICE).to(state_dtype) for _ in range(2)
    )
    steps = -torch.rand(batch, seq, heads, device=DEVICE) * decay
    g = torch.cat([part.cumsum(1) for part in steps.split(SIZE, 1)], 1)
    scale = d_k**-0.5
    w = q.new_empty(batch, seq, heads, d_k)
    correction = dict(w=w, dv=dv) if corrects else {}
    found = gradients(q, k, v, do, h, dh, g, scale, **correction, chunk_size=SIZE)

    leaves = [x.detach().double().requires_grad_() for x in (q, k, g)]
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    dw = torch.empty_like(w, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            for chunk in range(chunks):
                here = slice(chunk * SIZE, min(seq, (chunk + 1) * SIZE))
                keys = head // (heads // key_heads)
                state = h[row, chunk, head].double()
                outputs, after = of_a_chunk(
                    leaves[0][row, here, keys], leaves[1][row, here, keys], v[row, here, head].double(),
                    leaves[2][row, here, head], state, scale,
                )  # fmt: skip
                total = (
                    total
                    + (outputs * do[row, here, head]).sum()
                    + (after * dh[row, chunk, head]).sum()
                )
                dw[row, here, head] = -dv[row, here, head].double() @ state.mT
    total.backward()
    dq, dk, dg = (gradient(leaf) for leaf in leaves[:3])
    wanted = [dq, dk, dw, dg / math.log(2.0)]  # of g in units of e
    # BF16 rounds factors and results by up to 2^-9; the interpreter multiplies in FP32.
    bound = 2.0**-7 if ON_GPU else 1e-5
    # A decay is exp(g_i - g_j), whose exponent is rounded relative to the sums g.
    bound = max(bound, 2.0**-24 * float(g.abs().max()))
    for name, ours, theirs in zip(("dq", "dk", "dw", "dg"), found, wanted, strict=True):
        if name == "dw" and not corrects:
            assert ours is None
            continue
        assert ours is not None
        assert (ours.double() - theirs).norm() <= bound * theirs.norm(), name


def test_kernels_of_common_widths_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stand-in for a module of flash-linear-attention; wider heads, and other kernels, choose as before."""
    every = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4)]

    def made(name: str, module: str) -> Any:
        def kernel(x, K):
            pass

        kernel.__name__, kernel.__module__ = name, module
        return triton.heuristics({})(triton.autotune(every, key=["K"])(triton.jit(kernel)))

    module = ModuleType("fla.ops.common.chunk_o")
    module.chunk_bwd_kernel_dv_local = made("chunk_bwd_kernel_dv_local", module.__name__)
    module.other = made("other", module.__name__)
    module.chunk_fwd_kernel_o = made("chunk_fwd_kernel_o", module.__name__)
    module.imported = made(
        "chunk_fwd_kernel_o", "fla.ops.gla.chunk"
    )  # another kernel of the same name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fix_configurations()
    tuners = {name: tuner for name, tuner in autotuned() if name.startswith("ops.common.chunk_o.")}
    assert {name.rpartition(".")[2] for name in tuners} == {
        "chunk_bwd_kernel_dv_local",
        "chunk_fwd_kernel_o",
        "other",
    }
    name = "ops.common.chunk_o.chunk_bwd_kernel_dv_local"
    for width, wanted in ((64, [FASTEST[name]]), (128, [FASTEST[name]]), (256, every)):
        tuners[name].nargs = dict(K=width)
        assert tuners[name].prune_configs(dict(num_warps=4)) == wanted
    assert tuners["ops.common.chunk_o.other"].prune_configs({}) == every
    not_offered = tuners["ops.common.chunk_o.chunk_fwd_kernel_o"]  # as on a GPU with less memory
    not_offered.nargs = dict(K=64)
    assert not_offered.prune_configs({}) == every


@pytest.mark.skipif(
    not ON_GPU, reason="flash-linear-attention asks for the GPU when it is imported"
)
def test_fixed_configurations_are_of_kernels_that_there_are() -> None:
    pytest.importorskip("fla.ops.gated_delta_rule")
    pytest.importorskip("fla.ops.kda")
    names = dict(autotuned())
    assert names.keys() >= FASTEST.keys()
    for name, config in FASTEST.items():
        assert str(config) in map(str, names[name].configs)
