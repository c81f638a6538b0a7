"""The order of RMSNorm's sums against vectors of an H200 (TE 2.20.2), every bit;
digests in golden/rmsnorm_digests.json.

A CPU's rsqrt is not the GPU's, so the GPU's reciprocals are part of the vectors, and the sums under the rsqrt (verified
through a table of the GPU's rsqrt) are compared on their own.
"""

import base64
import json
import zlib
from pathlib import Path

import pytest
import torch
from bits import digest
from torch import Tensor

from te_models.engine.emulated import rmsnorm_kernels

CASES = json.loads((Path(__file__).parent.parent / "golden" / "rmsnorm_digests.json").read_text())
pytestmark = pytest.mark.recorded
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def inputs(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and dy as they were when the vectors were captured."""
    g = torch.Generator().manual_seed(rows * 100003 + cols)
    x = (torch.randn(rows, cols, generator=g) * 2 + 0.3).to(dtype)
    weight = (torch.randn(cols, generator=g) * 0.3 + 1).to(dtype)
    return x, weight, torch.randn(rows, cols, generator=g).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_against_h200(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    dtype, rows, cols = name.split(".")
    x, weight, dy = inputs(int(rows), int(cols), DTYPES[dtype])
    r = torch.frombuffer(
        bytearray(zlib.decompress(base64.b64decode(case["r"]))), dtype=torch.float32
    )[:, None]
    gamma, y_hat, grad = weight.float(), x.float() * r, dy.float()
    found = {
        "y": y_hat * gamma,
        "dx": rmsnorm_kernels.input_gradient(grad, gamma, x, y_hat, r),
        "dw": rmsnorm_kernels.weight_gradient(grad, x, y_hat),
    }
    assert {k: digest(v.to(x.dtype))[:16] for k, v in found.items() if k in case} == {
        k: case[k] for k in found if k in case
    }
    assert (
        rmsnorm_kernels.reciprocal_rms(x, x.float(), 1e-5).view(torch.int32) - r.view(torch.int32)
    ).abs().max() <= 2
    monkeypatch.setattr(torch, "rsqrt", lambda t: t)
    assert digest(rmsnorm_kernels.reciprocal_rms(x, x.float(), 1e-5))[:16] == case["mean_square"]


@pytest.mark.parametrize("name", ["bf16.40.1024", "fp32.4099.96", "fp16.5.640"])
def test_without_fused_multiply_adds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch whose addcmul rounds twice takes the sums through FP64."""
    monkeypatch.setattr(rmsnorm_kernels, "_fuses", lambda device: False)
    test_against_h200(name, monkeypatch)


def test_fused_multiply_adds_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "addcmul", lambda c, a, b: c + a * b)
    assert not rmsnorm_kernels._fuses.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_few_rows_are_summed_in_the_same_order(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        inputs(rows, cols, DTYPES[dtype])[0]
        for rows in (1, 3, 16)
        for cols in (8, 100, 128, 192, 500)
    ]
    few = [rmsnorm_kernels.reciprocal_rms(x, x.float(), 1e-5) for x in rows]
    monkeypatch.setattr(rmsnorm_kernels, "_FEW", 0)
    assert all(
        torch.equal(rmsnorm_kernels.reciprocal_rms(x, x.float(), 1e-5), r)
        for x, r in zip(rows, few, strict=True)
    )
