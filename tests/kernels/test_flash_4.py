"""FlashAttention-4 in the place of other kernels: when it runs, what it is asked for, and on a GPU what it returns."""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.attention import Heads
from te_models.kernels import flash_4
from te_models.kernels.gated_attention import AttentionSetting, attention_core
from te_models.kernels.sdpa import attention_kernel
from te_models.kernels.span_attention_triton import spans

BATCH, SEQ = 2, 6
WINDOWS = (None, 1, 3, 9)


@pytest.fixture
def flash() -> Iterator[ModuleType]:
    """The module, which looks for the package anew before and after."""
    flash_4._functions.cache_clear()
    yield flash_4
    flash_4._functions.cache_clear()


def seen(seq: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """Which keys each query sees, bool [S, S], as the arguments of the package say it."""
    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)
    return (distance >= 0) & (distance < (seq if window is None else window))


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of [B, S, heads, H] and the logarithms of its sums [B, N, S]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
    logits = logits.masked_fill(~mask, float("-inf"))
    return torch.einsum("bnqk,bknh->bqnh", logits.softmax(-1), v), logits.logsumexp(-1)


class StandIn:
    """The package's two functions in plain PyTorch, which count their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **mask: Any
    ) -> tuple[Any, ...]:
        assert return_lse
        self.calls.append("forward")
        return *attention(q, k, v, *self._mask(q, **mask)), None, None

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dy: Tensor, log_sum: Tensor, **mask: Any
    ) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        scale, visible = self._mask(q, **mask)
        with torch.enable_grad():
            again, sums = attention(q, k, v, scale, visible)
        torch.testing.assert_close(out, again.detach())
        torch.testing.assert_close(log_sum, sums.detach())
        return torch.autograd.grad(again, (q, k, v), dy)

    @staticmethod
    def _mask(
        q: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[float, Tensor]:
        assert causal == (window_size_left is None) and window_size_right == (None if causal else 0)
        window = None if window_size_left is None else window_size_left + 1
        return softmax_scale, seen(q.shape[1], window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [Heads(4, 2, 8, "elementwise"), Heads(2, 2, 4, "none")])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("norm", [False, True])
def test_a_stand_in_gives_what_the_other_kernels_do(
    norm: bool,
    scale: float | None,
    heads: Heads,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn()
    monkeypatch.setattr(flash_4, "_functions", lambda: (stand_in.forward, stand_in.backward))
    torch.manual_seed(0)
    sizes = heads.query + 2 * heads.key + (heads.query if heads.gate == "elementwise" else 0)
    qkvg = torch.randn(BATCH * SEQ, sizes * heads.dim, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(heads.dim, dtype=torch.float64, requires_grad=True) if norm else None
    own = AttentionSetting(BATCH, BATCH * SEQ, heads, eps=1e-3, scale=scale)
    slope = torch.randn(BATCH * SEQ, heads.query * heads.dim, dtype=torch.float64)

    def run(setting: AttentionSetting) -> list[Tensor]:
        out = attention_core(qkvg * 1.0, setting, q_weight=weight, k_weight=weight)
        leaves = [qkvg] if weight is None else [qkvg, weight]
        return [out.detach(), *torch.autograd.grad(out, leaves, slope)]

    # Anywhere: this test has no GPU, and small rows.
    monkeypatch.setattr(flash_4, "suits", lambda q: True)
    view = None if window is None else spans(SEQ, window, None, torch.device("cpu"))
    found = run(AttentionSetting(**{**vars(own), "spans": view}))
    assert stand_in.calls == ["forward", "backward"]
    monkeypatch.setattr(flash_4, "suits", lambda q: False)
    if window is None:
        wanted = run(own)
    else:
        wanted = run(AttentionSetting(**{**vars(own), "spans": Masked(SEQ, window)}))
    assert len(stand_in.calls) == 2
    for one, other in zip(found, wanted, strict=True):
        # The other way computes in FP32.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Masked:
    """Spans of a window, in plain PyTorch."""

    def __init__(self, seq: int, window: int) -> None:
        self.mask = seen(seq, window)

    def kernel_for(self, q: Tensor, sinks: None, cap: None) -> str:
        return "ours"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *_: Any
    ) -> tuple[Tensor]:
        return (self._attention(q, k, v, scale),)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: Any, **_: Any
    ) -> tuple[Tensor | None, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            out = self._attention(q, k, v, scale)
        return *torch.autograd.grad(out, (q, k, v), dy), None

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, enable_gqa=True, scale=scale)


@pytest.mark.parametrize(("alone", "window"), [(False, None), (False, 3), (True, 3)])
def test_backward_takes_the_kernel_that_ran_forward(
    alone: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although deterministic algorithms are asked for between the two."""
    stand_in = StandIn()
    monkeypatch.setattr(flash_4, "_functions", lambda: (stand_in.forward, stand_in.backward))
    monkeypatch.setattr(flash_4, "suits", lambda q: True)
    heads = Heads(2, 2, 8, "none")
    qkv = torch.randn(BATCH * SEQ, 6 * heads.dim, requires_grad=True)
    view = None if window is None else spans(SEQ, window, None, qkv.device)
    if alone:
        assert view is not None
        q, k, v = qkv.view(BATCH, SEQ, 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = view(q, k, v)
    else:
        setting = AttentionSetting(BATCH, BATCH * SEQ, heads, spans=view)
        out = attention_core(qkv * 1.0, setting)
    monkeypatch.setattr(flash_4, "suits", lambda q: False)
    out.sum().backward()
    assert stand_in.calls == ["forward", "backward"]
    assert qkv.grad is not None


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("window", [None, 3])
def test_only_windows_leave_the_spans(
    window: int | None,
    cap: float | None,
    sinks: bool,
    documents: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_4, "suits", lambda q: True)
    numbers = (torch.arange(SEQ) // 2).expand(BATCH, -1) if documents else None
    view = spans(SEQ, window, numbers, torch.device("cpu"))
    q = torch.zeros(BATCH, 2, SEQ, 8)
    leaves = window is not None and not documents and not sinks and cap is None
    kernel = view.kernel_for(q, torch.zeros(2) if sinks else None, cap)
    assert kernel == ("FlashAttention-4" if leaves else "ours")


class Query:
    """The shape of queries [B, N, S, H] on a GPU."""

    def __init__(self, channels: int = 128, seq: int = 128, dtype: torch.dtype = torch.bfloat16):
        self.is_cuda = True
        self.dtype = dtype
        self.shape = (1, 2, seq, channels)


@pytest.mark.parametrize(
    ("query", "taken"),
    [
        *((Query(channels), channels % 32 == 0) for channels in (32, 48, 64, 80, 96, 112, 128)),
        *((Query(channels), True) for channels in (160, 192, 256)),
        (Query(224), False),  # not measured
        (Query(512), False),
        (Query(seq=127), False),
        (Query(dtype=torch.float16), True),
        (Query(dtype=torch.float32), False),
    ],
)
def test_which_queries_it_takes(
    query: Any, taken: bool, flash: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert flash.suits(query) == taken
    assert not flash.suits(torch.zeros(1, 2, 128, 128, dtype=torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not flash.suits(query)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not flash.suits(query)


def test_the_name_of_the_kernel(flash: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    gpu = torch.device("cuda")
    assert attention_kernel(gpu, 128) == f"FlashAttention-4 {flash.VERSION}, Triton for documents"
    assert attention_kernel(gpu, 80) == "cuDNN (PyTorch SDPA), Triton for documents"
    assert attention_kernel(gpu, 128, sinks=True) == "Triton, for its sinks"
    assert attention_kernel(torch.device("cpu"), 128) == "PyTorch SDPA (CPU)"


def install(
    patch: pytest.MonkeyPatch, version: str = flash_4.VERSION, broken: bool = False
) -> None:
    """Have the package installed as a stand-in, on a GPU that is said to be Hopper."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        patch.setitem(sys.modules, name, ModuleType(name))
    if not broken:
        members: dict[str, Callable[..., Any]] = dict(_flash_attn_fwd=print, _flash_attn_bwd=print)
        vars(sys.modules["flash_attn.cute.interface"]).update(members)
    patch.setattr(flash_4.importlib.metadata, "version", lambda name: version)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.delenv("TE_MODELS_FLASH_ATTENTION_4", raising=False)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    "why", ["turned off", "no GPU", "other GPU", "not installed", "version", "broken"]
)
def test_a_package_that_cannot_run_is_not_asked(
    why: str,
    asked: bool,
    flash: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch, "4.0.0b40" if why == "version" else flash.VERSION, why == "broken")
    if asked:
        monkeypatch.setenv("TE_MODELS_FLASH_ATTENTION_4", "1")
    if why == "turned off":
        monkeypatch.setenv("TE_MODELS_FLASH_ATTENTION_4", "0")
    if why == "other GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    if why == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if why == "not installed":

        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(flash.importlib.metadata, "version", missing)
    with caplog.at_level("WARNING"):
        assert not flash.has_heads(128)
        assert not flash.has_heads(128)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    # What is asked for and does not run is said, once; what is broken always.
    wanted = why == "broken" or (asked and why in ("other GPU", "not installed", "version"))
    assert len(said) == wanted
    assert all(line.startswith("FlashAttention-4 does not run, cuDNN's") for line in said)


def test_what_it_compiles_is_kept_in_the_users_own_folder(
    flash: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    for name in variables:
        monkeypatch.setenv(name, "")  # to be undone
        monkeypatch.delenv(name)
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flash.keep_compiled()  # it is not installed
    install(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no folder can be made there
    flash.keep_compiled()
    assert not any(name in os.environ for name in variables)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    flash.keep_compiled()
    enabled, folder = (os.environ[name] for name in variables)
    assert enabled == "1" and Path(folder) == tmp_path / "caches/flash_attention_4"
    assert Path(folder).is_dir()
    monkeypatch.setenv(variables[0], "0")
    flash.keep_compiled()
    assert os.environ[variables[0]] == "0"  # a choice of the user's own


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100, 700])
@pytest.mark.parametrize("seq", [128, 1000])
@pytest.mark.parametrize("channels", flash_4.CHANNELS)
def test_output_and_gradients_are_as_near_to_fp64_as_the_others(
    channels: int,
    seq: int,
    window: int | None,
    flash: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of views of a projection, with four heads that share two keys, and in a CUDA graph."""
    if not flash.has_heads(channels):
        pytest.skip("flash-attn-4 is not installed, or this is no Hopper")
    heads = Heads(4, 2, channels, "elementwise")
    torch.manual_seed(0)
    qkvg = torch.randn(2 * seq, 12 * channels, device="cuda").bfloat16()
    slope = torch.randn(2 * seq, 4 * channels, device="cuda").bfloat16()
    view = None if window is None else spans(seq, window, None, qkvg.device)
    setting = AttentionSetting(2, 2 * seq, heads, spans=view)

    def run() -> list[Tensor]:
        leaf = qkvg.clone().requires_grad_()
        out = attention_core(leaf * 1.0, setting)
        return [out.detach(), torch.autograd.grad(out, leaf, slope)[0]]

    found = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "suits", lambda q: False)
        usual = run()
    exact = qkvg.double().requires_grad_()
    q, k, v, gate = exact.view(2, seq, 12, channels).split([4, 2, 2, 4], 2)
    mask = seen(seq, window, qkvg.device)
    out, _ = attention(q, k, v, channels**-0.5, mask)
    out = (out * gate.sigmoid()).reshape(2 * seq, -1)
    wanted = [out.detach(), torch.autograd.grad(out, exact, slope.double())[0]]
    for ours, other, right in zip(found, usual, wanted, strict=True):
        error, usual_error = ((x.double() - right).norm() for x in (ours, other))
        assert error <= 1.5 * usual_error + 1e-3 * right.norm()

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[0], found[0])
    # Parts of the gradient of q are added in an order that varies.
    gap = (captured[1].double() - found[1].double()).norm()
    assert gap <= 1e-2 * found[1].double().norm()
