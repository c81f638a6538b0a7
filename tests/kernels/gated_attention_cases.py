"""The Triton parts of gated attention against the plain ones, in Triton's interpreter.

test_triton_kernels.py runs them. On a GPU the tests marked `gpu` compare whole models with and without these kernels.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expert_counts import counted_by
from fewer import every
from kernels.test_gated_attention import (
    BATCH,
    EPS,
    KINDS,
    LAYOUTS,
    SEQ,
    check,
    projection,
    tables,
)
from torch import Tensor

from te_models.config.attention import Heads
from te_models.kernels import head_norm_backward_fp8_triton
from te_models.kernels.attention_parts import PLAIN, Norm, Rotation, split_heads
from te_models.kernels.gated_attention_triton import TRITON
from te_models.kernels.handover import CastScale
from te_models.recorder.layout import FIELDS
from te_models.recorder.statistics import Cast, count_cast, hash_codes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)
assert_close = torch.testing.assert_close


@pytest.mark.parametrize(("layout", "per_row"), every(2, LAYOUTS, [False, True]))
def test_every_part_equals_the_plain_one(layout: str, per_row: bool) -> None:
    """In FP32: the interpreter cuts BF16 off where a GPU rounds it."""
    heads = LAYOUTS[layout]
    (cos, sin), qkvg = tables(heads.dim, torch.float32, per_row), projection(heads, torch.float32)
    results = []
    for ops in (PLAIN, TRITON):
        own = qkvg.clone()
        q, k, v, gate = split_heads(heads, own[: BATCH * SEQ], BATCH)
        ops.rotate(q, q, Rotation(cos, sin), False)
        ops.rotate(k, k, Rotation(cos, sin), True)
        ops.copy(k, v)
        found = [own]
        if gate is not None:
            dgate = torch.full_like(gate.contiguous(), 7.0)
            dy = torch.ones_like(v[:, :, :1]).expand(-1, -1, heads.query, -1) * 0.5
            for softplus in (False, True):
                found += [ops.gate(q, gate, softplus)]
                found += [ops.gate_backward(dy, q, gate, dgate, softplus), dgate.clone()]
        results.append(found)
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.is_contiguous() == other.is_contiguous()


FIRST = 32  # column of a wider tensor from which on a kernel writes


def fp8_of(rows: int, columns: int) -> Any:
    """Room for FP8 that is wider than what is written."""
    fp8 = TRITON.fp8.new(rows, columns + 64, torch.device("cpu"))
    fp8.data.fill_(7), fp8.transposed.fill_(7)
    return fp8


def assert_written_as_fp8(write: Callable[..., Any], wanted: Tensor, e5m2: bool) -> Any:
    """`write` casts `wanted` with the scale 3 into columns of a wider tensor, and changes nothing beside them."""
    rows, form = BATCH * SEQ, torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    amax = torch.zeros(1)
    wanted = wanted.reshape(rows, -1)
    fp8 = fp8_of(*wanted.shape)
    returned = write(fp8, CastScale(torch.full((1,), 3.0), amax, e5m2), FIRST)
    found = fp8.data[:, FIRST : FIRST + wanted.shape[1]].view(form).float()
    cast = (3 * wanted).to(form).float()
    assert (torch.cat((fp8.data[:, :FIRST], fp8.data[:, FIRST + wanted.shape[1] :]), 1) == 7).all()
    assert torch.equal(fp8.data.t(), fp8.transposed)
    assert (found != cast).float().mean() < 0.01, "values in the middle between two codes"
    assert_close(found, cast, rtol=0.25, atol=1e-2)
    assert_close(amax[0], wanted.abs().max(), rtol=1e-5, atol=0)
    assert fp8.scale_inv.item() == torch.tensor(1 / 3).item()
    assert_counted(write, wanted, 2.0**16 if e5m2 else 3.0, e5m2)  # the first of them saturates
    return returned


def assert_counted(write: Callable[..., Any], wanted: Tensor, scale: float, e5m2: bool) -> None:
    """`write` counts what it casts as PyTorch does, and writes the same bits as without."""
    wanted = wanted.reshape(BATCH * SEQ, -1)
    plain = fp8_of(*wanted.shape)
    known = torch.full((1,), scale)
    amaxes = torch.zeros(1), torch.zeros(1)
    without = write(plain, CastScale(known, amaxes[0], e5m2), FIRST)
    fp8 = fp8_of(*wanted.shape)
    returned, found, hashed = counted_by(write, fp8, CastScale(known, amaxes[1], e5m2), FIRST)
    for one, other in ((plain.data, fp8.data), (plain.transposed, fp8.transposed), amaxes):
        assert torch.equal(one, other)
    if without is not None:
        assert_close(without, returned, rtol=0, atol=0, equal_nan=True)
    own = slice(FIRST, FIRST + wanted.shape[1])
    assert hashed == int(hash_codes(F.pad(fp8.data[:, own], (FIRST, 0))))
    cast = Cast(
        fp8.data[:, own].contiguous(),
        fp8.scale_inv.view(1, 1),
        tuple(wanted.shape),
        8 if e5m2 else 7,
        known,
    )
    fields, _ = count_cast(wanted, cast)
    expected = dict(zip(FIELDS, fields.tolist(), strict=True))
    # The launch that writes column 0 notes the scale for all that share the tensor.
    for name in ("blocks", "block_log2", "block_log2_squares", "scale_min", "scale_max"):
        assert found.pop(name) == (math.inf if name == "scale_min" else 0)
        del expected[name]
    del expected["scale_age"]
    # Of values that are rounded otherwise, the smallest errors differ most.
    assert found.pop("noise") == pytest.approx(expected.pop("noise"), rel=1e-3)
    assert expected["nonfinite"] == wanted.numel() - int(wanted.isfinite().sum())
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


@pytest.mark.parametrize(
    ("layout", "per_row", "e5m2"),
    every(
        4,
        [name for name, heads in LAYOUTS.items() if heads.gate != "headwise"],
        [False, True],
        [False, True],
    ),
)
def test_fp8_is_the_cast_of_the_plain_result(layout: str, per_row: bool, e5m2: bool) -> None:
    heads = LAYOUTS[layout]
    (cos, sin), qkvg = tables(heads.dim, torch.float32, per_row), projection(heads, torch.float32)
    q, k, _, gate = split_heads(heads, qkvg[: BATCH * SEQ], BATCH)
    rotated = torch.empty_like(q.contiguous())
    turn = Rotation(cos, sin)
    PLAIN.rotate(q, rotated, turn, True)
    assert_written_as_fp8(
        lambda *at, **how: TRITON.fp8.rotate(*at, q, turn, True, **how), rotated, e5m2
    )
    assert_written_as_fp8(lambda *at, **how: TRITON.fp8.gate(*at, k, None, False, **how), k, e5m2)
    if gate is None:
        return
    dgate, dy = torch.empty_like(gate.contiguous()), torch.linspace(-1, 1, q.numel()).view_as(q)
    for softplus in (False, True):
        gated = PLAIN.gate(q, gate, softplus)
        assert_written_as_fp8(
            lambda *at, s=softplus, **how: TRITON.fp8.gate(*at, q, gate, s, **how), gated, e5m2
        )
        dx = PLAIN.gate_backward(dy, q, gate, dgate, softplus)
        found = assert_written_as_fp8(
            lambda *at, s=softplus, **how: TRITON.fp8.gate_backward(*at, dy, q, gate, s, **how),
            dgate,
            e5m2,
        )
        assert_close(found, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "e5m2"),
    every(
        4,
        [name for name, kind in KINDS.items() if not kind.together and kind.rotated],
        [False, True],
    ),
)
def test_the_gradient_of_a_norm_is_cast_to_fp8(
    kind: str, e5m2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = KINDS[kind]
    # Several tiles of channels, and one.
    monkeypatch.setattr(head_norm_backward_fp8_triton, "CHANNELS", 4 if e5m2 else 64)
    torch.manual_seed(1)
    q = projection(case.heads, torch.float32)[: BATCH * SEQ, : case.heads.q_size]
    q = q.view(BATCH, SEQ, -1, case.heads.dim)
    dy, dx = torch.randn_like(q), torch.empty_like(q)
    weight, _ = case.weights(torch.float32)
    turn = case.rotation(torch.float32)
    if weight is None:
        assert turn is not None
        PLAIN.rotate(dy, dx, turn, True)
        assert_written_as_fp8(
            lambda *at, **how: TRITON.fp8.rotate(*at, dy, turn, True, **how), dx, e5m2
        )
        return
    norm = Norm(weight, EPS, case.zero_centered)
    wanted = PLAIN.norm_backward(dy, q, norm, turn, dx)
    found = assert_written_as_fp8(
        lambda *at, **how: TRITON.fp8.norm_backward(*at, dy, q, norm, turn, **how), dx, e5m2
    )
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
@pytest.mark.parametrize("interleaved", [False, True])
def test_values_that_are_not_finite_are_counted_where_they_are(interleaved: bool) -> None:
    """Not those beside the channels of a head, which has twelve, and of whose pairs four turn."""
    heads = Heads(3, 1, 12, "elementwise")
    qkvg = projection(heads, torch.float32)
    q, _, _, gate = split_heads(heads, qkvg[: BATCH * SEQ], BATCH)
    assert gate is not None
    q = q.contiguous()
    q[0, 1, 2, 3], q[0, 3, 0, 11], q[1, 2, 1, 0] = math.nan, math.inf, -math.inf
    q[1, 5] = 0
    cos, sin = tables(8, torch.float32, False)
    turn = Rotation(cos, sin, interleaved)
    dy = torch.linspace(-1, 1, q.numel()).view_as(q)
    rotated = torch.empty_like(q)
    PLAIN.rotate(q, rotated, turn, True)
    assert_counted(
        lambda *at, **how: TRITON.fp8.rotate(*at, q, turn, True, **how), rotated, 3.0, True
    )
    gated = PLAIN.gate(q, gate, False)
    assert_counted(
        lambda *at, **how: TRITON.fp8.gate(*at, q, gate, False, **how), gated, 3.0, False
    )
    dgate = torch.empty_like(q)
    PLAIN.gate_backward(dy, q, gate, dgate, False)
    assert_counted(
        lambda *at, **how: TRITON.fp8.gate_backward(*at, dy, q, gate, False, **how),
        dgate,
        3.0,
        True,
    )
    norm = Norm(torch.linspace(-0.5, 1.5, 12), EPS, False)
    slope = torch.empty_like(q)
    PLAIN.norm_backward(dy, q, norm, turn, slope)
    assert_counted(
        lambda *at, **how: TRITON.fp8.norm_backward(*at, dy, q, norm, turn, **how),
        slope,
        3.0,
        True,
    )


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_every_kind_of_query_and_key_equals_fp64(kind: str) -> None:
    check(kind, TRITON, torch.float32)
