"""Launches of Triton kernels on tensors without memory: their grids, and whether they compile, without a GPU."""

import inspect
import os
from typing import Any, NamedTuple

import pytest
import torch

from te_models.config.attention import Heads
from te_models.kernels.attention_parts import Norm, Rotation, split_heads
from te_models.kernels.handover import CastScale

triton = pytest.importorskip("triton", "3.6")
pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter launches nothing"
)

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Launch(NamedTuple):
    """A kernel, the programs of its grid, its arguments and the options of the compiler."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int | None]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """A launch that did not happen."""
    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        found.append(
            Launch(
                kernel,
                grid,
                dict(inspect.signature(kernel.fn).bind(*args, **kwargs).arguments),
                options,
            )
        )

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    return found


def attend(batch: int, seq: int, heads: Heads) -> None:
    """All operations of attention, forward and backward, with and without FP8."""
    from te_models.kernels.gated_attention_triton import TRITON  # noqa: PLC0415  the skip above comes first
    from te_models.kernels.span_attention_triton import Spans  # noqa: PLC0415

    assert TRITON.fp8 is not None
    device, bf16 = torch.device("meta"), dict(dtype=torch.bfloat16, device="meta")
    width = sum(section.stored for section in heads.sections)
    q, k, v, gate = split_heads(heads, torch.empty(batch * seq, width, **bf16), batch)
    assert gate is not None
    cos, one = (
        torch.empty(seq, heads.dim, **bf16),
        torch.empty(1, dtype=torch.float32, device=device),
    )
    turn = Rotation(cos, cos)
    norms = [Norm(torch.empty(size, **bf16), 1e-6, True) for size in (heads.dim, heads.q_size)]
    TRITON.rotate(q, q, turn, True)
    TRITON.copy(k, v)
    TRITON.gate(q, gate, False)
    for norm in norms if heads.query <= 16 else norms[:1]:
        TRITON.norm_backward(TRITON.norm(q, norm, turn), q, norm, turn, torch.empty_like(q))
    dy = torch.empty_like(q)
    TRITON.gate_backward(dy, q, gate, gate, False)
    first = torch.empty(1, seq, dtype=torch.int32, device=device)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    out, sums = Spans(first, first).forward(*turned)
    Spans(first, first).backward(out, *turned, out, sums)
    fp8 = TRITON.fp8.new(batch * seq, width, device)
    cast_scale = CastScale(scale=one, amax=one, e5m2=True)
    TRITON.fp8.rotate(fp8, cast_scale, 0, q, turn, True)
    TRITON.fp8.norm_backward(fp8, cast_scale, 0, dy, q, norms[0], turn)
    TRITON.fp8.gate(fp8, cast_scale, 0, k, None, False)
    TRITON.fp8.gate_backward(fp8, cast_scale, 0, dy, q, gate, False)


def recur(batch: int, seq: int, heads: int) -> None:
    """The operations around a recurrence with heads of 128 channels, forward and backward, with and without FP8."""
    from te_models.kernels import conv_triton, head_norm_triton  # noqa: PLC0415  the skip above comes first
    from te_models.kernels.fp8_tiles_triton import new_fp8  # noqa: PLC0415

    device, bf16 = torch.device("meta"), dict(dtype=torch.bfloat16, device="meta")
    width = 128 * heads
    x, taps = torch.empty(batch, seq, width, **bf16), torch.empty(width, 1, 4, **bf16)
    documents = torch.empty(batch, seq, dtype=torch.int64, device=device)
    conv_triton.conv(x, taps, None, documents, (width,))
    conv_triton.conv_backward(x, taps, None, documents, (x,), x)
    rows, weight = x.flatten(0, 1), torch.empty(128, **bf16)
    head_norm_triton.head_norm(rows, rows, weight, 1e-6)
    head_norm_triton.head_norm_backward(rows, rows, rows, weight, 1e-6, rows)
    one = torch.empty(1, dtype=torch.float32, device=device)
    fp8 = new_fp8(*rows.shape, device=device)
    cast_scale = CastScale(scale=one, amax=one, e5m2=False)
    head_norm_triton.head_norm_fp8(rows, rows, weight, 1e-6, fp8, cast_scale)


def normalize(rows: int, columns: int) -> None:
    """The norm of the residual stream, forward and backward, with and without a sum."""
    from te_models.kernels import residual_norm_triton  # noqa: PLC0415  the skip above comes first

    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(columns, dtype=torch.bfloat16, device="meta")
    rstd = torch.empty(rows, dtype=torch.float32, device="meta")
    for other in (None, x):
        residual_norm_triton.forward(x, other, weight, 1e-6, False)
        residual_norm_triton.backward(x, x, other, weight, rstd, False)


@pytest.mark.parametrize(
    ("batch", "seq", "heads"), [(700, 64, 128), (1, 262144, 128), (80000, 16, 1), (4, 2048, 4)]
)
def test_grids_are_those_that_a_gpu_has(
    batch: int, seq: int, heads: int, launches: list[Launch]
) -> None:
    """2**31 - 1 programs in the first dimension, and 65,535 in the others."""
    attend(batch, seq, Heads(heads, max(1, heads // 4), 128, "elementwise"))
    recur(batch, seq, heads)
    normalize(batch * seq, 2560)
    assert launches
    for launch in launches:
        most = (2**31 - 1, 65535, 65535)
        assert all(size <= limit for size, limit in zip(launch.grid, most, strict=False)), (
            launch.kernel.fn.__name__
        )


def compile_for_h200(launch: Launch) -> None:
    """Compile a kernel to machine code with the types and constants of a launch."""
    compiler, backends = triton.compiler, triton.backends.compiler
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    for number, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[value.dtype]
        elif parameter.is_constexpr or value is None or value == 1:
            types[parameter.name], constants[(number,)] = "constexpr", value
        else:
            types[parameter.name] = (
                "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            )
    source = compiler.ASTSource(launch.kernel, types, constants)
    triton.compile(source, target=backends.GPUTarget("cuda", 90, 32), options=launch.options)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "size",
    [80, pytest.param(96, marks=pytest.mark.slow), pytest.param(192, marks=pytest.mark.slow)],
)
def test_heads_of_any_size_compile(size: int, launches: list[Launch]) -> None:
    attend(1, 64, Heads(4, 2, size, "elementwise"))
    for launch in launches:
        if size == 80 and "fp8" not in launch.kernel.fn.__name__:  # the interpreter runs the others
            continue
        compile_for_h200(launch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_operations_around_a_recurrence_compile(launches: list[Launch]) -> None:
    recur(1, 64, 4)
    for launch in launches:
        compile_for_h200(launch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("columns", [1032, 2560, 2880, 5120, 8184])
def test_norms_of_the_residual_stream_compile(columns: int, launches: list[Launch]) -> None:
    normalize(64, columns)
    for launch in launches:
        compile_for_h200(launch)
