"""The gated delta rule against its recurrence in FP64, token by token."""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fewer import every
from places import DEVICE, ON_GPU
from torch import Tensor
from typed import gradient

from te_models.config.deltanet import DeltaNetConfig
from te_models.kernels import delta_rule as kernels
from te_models.kernels import flash_qla
from te_models.kernels.delta_rule import chunked, delta_rule, delta_rule_kernel, recurrent
from te_models.kernels.elementwise import causal_conv

LENGTHS = (1, 2, 13, 63, 64, 65, 128, 190)
TOLERANCE = 1e-5
# Key heads, value heads, d_k, d_v.
HEADS = [(1, 1, 8, 8), (2, 4, 16, 12), (1, 4, 7, 20), (3, 3, 32, 16)]


def inputs(length: int, heads: tuple[int, ...] = (2, 4, 16, 12), batch: int = 2) -> list[Tensor]:
    """q, k, v, g and beta, as a layer makes them: some heads forget at once, others almost nothing."""
    keys, values, key, value = heads
    made = torch.Generator().manual_seed(length)
    q, k = (torch.randn(batch, length, keys, key, generator=made) for _ in range(2))
    v = torch.randn(batch, length, values, value, generator=made)
    g = -torch.exp(torch.randn(batch, length, values, generator=made) * 2 - 2)
    beta = torch.rand(batch, length, values, generator=made)
    return [q, k, v, g, beta]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Any = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, in FP64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    batch, length, heads, value = v.shape
    out = torch.zeros(v.shape, dtype=torch.float64)
    states = torch.zeros(batch, heads, k.shape[3], value, dtype=torch.float64)
    rows = []
    for row in range(batch):
        for head in range(heads):
            s = states[row, head] if state is None else state[row, head].double()
            shared = head // (heads // k.shape[2])
            outputs = []
            for t in range(length):
                if documents is not None and t and documents[row, t] != documents[row, t - 1]:
                    s = torch.zeros_like(s)
                query, key = (
                    x[row, t, shared] / (x[row, t, shared].square().sum() + 1e-6).sqrt()
                    for x in (q, k)
                )
                s = s * g[row, t, head].exp()
                s = s + torch.outer(key, beta[row, t, head] * (v[row, t, head] - s.T @ key))
                outputs.append(s.T @ query / k.shape[3] ** 0.5)
            rows.append((torch.stack(outputs), s))
    out = torch.stack([o for o, _ in rows]).unflatten(0, (batch, heads)).transpose(1, 2)
    return out, torch.stack([s for _, s in rows]).unflatten(0, (batch, heads))


def close(ours: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert wanted.abs().max() > 1e-2
    torch.testing.assert_close(ours.double(), wanted.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("function", [chunked, recurrent])
def test_outputs_and_states_are_those_of_the_recurrence(
    function: Any, heads: tuple[int, ...]
) -> None:
    for length in LENGTHS if heads == HEADS[0] else (3, 70):
        given = inputs(length, heads)
        wanted, state = reference(*given)
        out, last = function(*given)
        close(out, wanted)
        close(last, state)
        wanted, last = reference(*given, state=last)
        close(function(*given, state.float())[0], wanted)


@pytest.mark.parametrize(("heads", "length", "packed"), every(3, HEADS, [5, 64, 70], [False, True]))
def test_gradients_are_those_of_the_recurrence(
    heads: tuple[int, ...], length: int, packed: bool
) -> None:
    documents = (torch.arange(length) // 3).expand(2, -1) if packed else None
    leaves, others = ([x.clone().requires_grad_() for x in inputs(length, heads)] for _ in range(2))
    slope = torch.randn(2, length, heads[1], heads[3])
    delta_rule(*leaves, documents=documents)[0].backward(slope)
    (reference(*others, documents=documents)[0] * slope).sum().backward()
    for ours, wanted in zip(leaves, others, strict=True):
        assert (gradient(ours) - gradient(wanted)).norm() <= 1e-5 * gradient(wanted).norm()


@pytest.mark.parametrize("length", [7, 64, 130, 200])
def test_documents_of_a_row_do_not_see_each_other(length: int) -> None:
    """At any place in a chunk, with documents of one token, of many chunks, and a new one at a chunk's beginning."""
    given = inputs(length)
    ends = torch.tensor([[1, 2, 6, 64, 66, 129, 131], [3, 4, 5, 63, 65, 128, 192]])
    documents = (torch.arange(length)[None, :, None] >= ends[:, None, :]).sum(-1)
    out, last = chunked(*given, documents=documents)
    wanted, state = reference(*given, documents=documents)
    close(out, wanted)
    close(last, state)
    for row in range(2):
        for number in documents[row].unique():
            (places,) = torch.where(documents[row] == number)
            alone, _ = chunked(*(x[row : row + 1, places] for x in given))
            torch.testing.assert_close(out[row : row + 1, places], alone, atol=TOLERANCE, rtol=0)


def test_nothing_of_another_document_is_seen_however_large() -> None:
    given, documents = inputs(40), (torch.arange(40) >= 23).long().expand(2, -1)
    large = [x.clone() for x in given]
    large[2][:, :23] = 1e30
    (out, _), (other, _) = (chunked(*x, documents=documents) for x in (given, large))
    assert torch.equal(out[:, 23:], other[:, 23:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_documents_have_any_numbers(dtype: torch.dtype) -> None:
    given, small = inputs(40), (torch.arange(40) // 7).expand(2, -1)
    large = small + 2**40 if dtype == torch.int64 else small.to(dtype)
    assert torch.equal(chunked(*given, documents=large)[0], chunked(*given, documents=small)[0])
    x, taps = torch.randn(2, 40, 6), torch.randn(6, 1, 4)
    assert torch.equal(causal_conv(x, None, taps, large), causal_conv(x, None, taps, small))


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_the_convolution_is_that_of_pytorch(taps: int, length: int) -> None:
    x, weight = torch.randn(2, length, 6), torch.randn(6, 1, taps)
    whole = torch.nn.functional.conv1d(x.mT, weight, padding=taps - 1, groups=6)[..., :length].mT
    wanted = torch.nn.functional.silu(whole)
    torch.testing.assert_close(causal_conv(x, None, weight, None), wanted, atol=1e-6, rtol=0)
    parts, tail = [], torch.zeros(2, taps - 1, 6)
    for token in x.split(1, dim=1):
        parts.append(causal_conv(token, tail, weight, None))
        tail = torch.cat((tail, token), dim=1)[:, 1:]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, atol=1e-6, rtol=0)
    documents = torch.tensor([[0] * length, [n // 2 for n in range(length)]])
    packed = causal_conv(x, None, weight, documents)
    torch.testing.assert_close(packed[:1], wanted[:1], atol=1e-6, rtol=0)
    for start in range(0, length, 2):
        alone = causal_conv(x[1:, start : start + 2], None, weight, None)
        torch.testing.assert_close(packed[1:, start : start + 2], alone, atol=1e-6, rtol=0)


def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    kernels._kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert kernels._kernels() is None
    assert kernels._kernels() is None
    assert [record.message for record in caplog.records] == [kernels.HINT]
    kernels._kernels.cache_clear()


def stand_ins() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions with the arguments of flash-linear-attention's, in its order, that compute by ours."""

    def chunk(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert use_qk_l2norm_in_kernel and scale is None
        return chunked(q, k, v, g, beta, initial_state)

    def step(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: None = None, gv: None = None, beta: Tensor | None = None,
        scale: None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert (
            use_qk_l2norm_in_kernel
            and gk is None
            and gv is None
            and scale is None
            and beta is not None
        )
        return recurrent(q, k, v, g, beta, initial_state)

    return chunk, step


def test_no_other_package_takes_the_place_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention hands whole rows to FlashQLA, if that is installed, in a wrapper around its function."""
    chunk, step = stand_ins()

    @functools.wraps(chunk)
    def dispatched(*args: Any, **options: Any) -> Any:
        pytest.fail("another package computes")

    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = torch.compiler.disable(dispatched)  # type: ignore[attr-defined]
    package.fused_recurrent_gated_delta_rule = step  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    triton_part = ModuleType("te_models.kernels.delta_rule_triton")
    triton_part.register = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, triton_part.__name__, triton_part)
    monkeypatch.setattr("te_models.kernels.delta_rule_triton", triton_part, raising=False)
    kernels._kernels.cache_clear()
    try:
        given = inputs(9, (2, 4, 8, 8))
        found, _ = kernels._by_kernels(*given, state=None, documents=None)
        torch.testing.assert_close(found, recurrent(*given)[0], atol=1e-5, rtol=1e-5)
    finally:
        kernels._kernels.cache_clear()


def test_kernels_get_each_argument_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", stand_ins)
    given = inputs(9, (2, 4, 8, 8))
    state = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        for length in (1, 9):
            own = [x[:, :length] for x in given]
            for found, wanted in zip(
                kernels._by_kernels(*own, state=state, documents=None),
                recurrent(*own, state=state),
                strict=True,
            ):
                assert found is not None
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [(2, 4, 128, 128), (4, 4, 64, 128), (1, 4, 128, 64)])
def test_kernels_compute_the_same(heads: tuple[int, ...], packed: bool) -> None:
    """Those of flash-linear-attention, in BF16: outputs, gradients and states, whole, in parts and packed."""
    pytest.importorskip("fla")
    if not ON_GPU:
        pytest.skip("the kernels run on a GPU")
    length = 500
    documents = (torch.arange(length, device=DEVICE) // 37).expand(2, -1) if packed else None
    given = [x.to(DEVICE) for x in inputs(length, heads)]
    given = [x.bfloat16() for x in given[:3]] + given[3:]
    leaves, others = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    slope = torch.randn(2, length, heads[1], heads[3], device=DEVICE)
    out, wanted = (
        delta_rule(*leaves, documents=documents)[0],
        chunked(*others, documents=documents)[0],
    )
    near(out, wanted)
    for made in (out, wanted):
        made.backward(slope.to(made.dtype))
    for ours, reference_ in zip(leaves, others, strict=True):
        near(ours.grad, reference_.grad)
    if packed:
        return
    with torch.no_grad():
        state = torch.zeros(2, heads[1], *heads[2:], device=DEVICE)
        whole, last = chunked(*given, state=state)
        first, state = delta_rule(*(x[:, :301] for x in given), state=state)
        second, state = delta_rule(*(x[:, 301:499] for x in given), state=state)
        third, state = delta_rule(*(x[:, 499:] for x in given), state=state)
    near(torch.cat((first, second, third), dim=1), whole)
    near(state, last)


@pytest.fixture
def flash() -> Iterator[ModuleType]:
    """FlashQLA's module of this package, which looks for the package anew before and after."""
    flash_qla._functions.cache_clear()
    yield flash_qla
    flash_qla._functions.cache_clear()


def install(patch: pytest.MonkeyPatch, rule: Callable[..., Any] | None) -> None:
    """Have FlashQLA, flash-linear-attention's norm and TileLang stand-ins, on a GPU that is said to be Hopper."""
    found = {
        "fla.modules.l2norm": dict(l2norm=lambda x: F.normalize(x.float(), dim=-1).to(x.dtype)),
        "flash_qla": {} if rule is None else dict(chunk_gated_delta_rule=rule),
        "tilelang.contrib.nvcc": dict(find_cuda_path=lambda: "/usr/local/cuda"),
    }
    for name, members in found.items():
        module = ModuleType(name)
        vars(module).update(members)
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            patch.setitem(sys.modules, package, ModuleType(package))
        patch.setitem(sys.modules, name, module)
    patch.setattr(flash_qla.importlib.util, "find_spec", lambda name: object())
    patch.setattr(flash_qla.importlib.metadata, "version", lambda name: "1.2")
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.delenv("FLA_FLASH_QLA", raising=False)


def plain_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, auto_cp: bool) -> Any:
    """FlashQLA's arguments, computed by ours: its queries and keys have been normed."""
    assert not auto_cp
    for x in (q, k):
        torch.testing.assert_close(
            x.float().norm(dim=-1), torch.ones(x.shape[:3]), rtol=1e-2, atol=0
        )
    return chunked(q, k, v, g, beta)[0], None


@pytest.mark.parametrize(
    ("batch", "heads", "taken"),
    [
        (2, (16, 32, 128, 128), True),
        (3, (16, 32, 128, 128), True),
        (1, (16, 32, 128, 128), True),
        (1, (16, 16, 128, 128), False),  # too few programs
        (64, (1, 1, 128, 128), True),
        (2, (16, 32, 64, 128), False),
        (2, (16, 32, 128, 64), False),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_flash_qla_computes_whole_rows_where_it_is_faster(
    batch: int,
    heads: tuple[int, ...],
    taken: bool,
    packed: bool,
    flash: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[None] = []

    def rule(*given: Tensor, auto_cp: bool) -> Any:
        calls.append(None)
        return plain_rule(*given, auto_cp=auto_cp)

    install(monkeypatch, rule)
    monkeypatch.setattr(kernels, "_kernels", stand_ins)
    given = inputs(9, heads, batch)
    documents = (torch.arange(9) // 4).expand(batch, -1) if packed else None
    out, state = kernels._by_kernels(*given, state=None, documents=documents)
    assert len(calls) == taken and (state is None or not taken)
    close(out, chunked(*given, documents=documents)[0])
    # Generation keeps the state, and evaluation runs what training does.
    before = torch.zeros(batch, heads[1], *heads[2:])
    with torch.no_grad():
        kernels._by_kernels(*given, state=before, documents=None)
        assert len(calls) == taken
        kernels._by_kernels(*given, state=None, documents=None)
    assert len(calls) == 2 * taken


def test_the_plan_says_which_batches_flash_qla_computes(
    flash: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, plain_rule)
    monkeypatch.setattr(kernels, "_kernels", stand_ins)
    place = torch.device("cuda"), torch.bfloat16
    usual = DeltaNetConfig(num_key_heads=16, num_value_heads=32)
    few_heads = DeltaNetConfig(num_key_heads=4, num_value_heads=12)
    compiled = "whose kernels are compiled in the first step"
    named = f"flash-linear-attention 1.2, {compiled}"
    assert delta_rule_kernel(*place, usual) == f"FlashQLA 1.2, {compiled}"
    assert (
        delta_rule_kernel(*place, few_heads)
        == f"FlashQLA 1.2 for 3 rows or more at a time, otherwise {named}"
    )
    narrow = DeltaNetConfig(num_key_heads=8, num_value_heads=24, key_head_dim=64)
    assert delta_rule_kernel(*place, narrow) == named


@pytest.mark.parametrize("why", ["environment", "other GPU", "not installed", "broken", "no nvcc"])
def test_flash_qla_that_cannot_run_is_not_asked(
    why: str, flash: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None if why == "broken" else plain_rule)
    if why == "environment":
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
    if why == "other GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    if why == "not installed":
        monkeypatch.setattr(flash_qla.importlib.util, "find_spec", lambda name: None)
    if why == "no nvcc":

        def missing() -> None:
            raise RuntimeError("Cannot find cuda path")

        monkeypatch.setattr(sys.modules["tilelang.contrib.nvcc"], "find_cuda_path", missing)
    q, _, v, *_ = inputs(1, (16, 32, 128, 128))
    assert not flash.takes(q, v)
    assert not flash.takes(q, v)
    said = [record.message for record in caplog.records]
    # What is installed and does not work is said, once.
    assert len(said) == (why in ("broken", "no nvcc"))
    assert all(
        line.startswith("flash-linear-attention runs, since FlashQLA cannot: ") for line in said
    )


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 63, 500, 1024])
def test_flash_qla_computes_the_same(length: int, packed: bool, flash: ModuleType) -> None:
    """In BF16, outputs and gradients; with documents of 1 to 129 tokens; as near to FP32 as the other kernels are."""
    pytest.importorskip("flash_qla")
    if not ON_GPU or flash._functions() is None:
        pytest.skip("FlashQLA runs on Hopper")
    heads = (16, 32, 128, 128)
    ends = torch.tensor([1, 2, 3, 64, 66, 130, 259, 320], device=DEVICE)
    numbers = (torch.arange(length, device=DEVICE)[:, None] >= ends).sum(-1)
    documents = numbers.expand(2, -1) if packed else None
    given = [x.to(DEVICE) for x in inputs(length, heads)]
    given = [x.bfloat16() for x in given[:3]] + given[3:]
    slope = torch.randn(2, length, 32, 128, device=DEVICE).bfloat16()
    assert flash.takes(given[0], given[2])
    found = []
    for compute in (delta_rule, without_flash_qla, chunked):
        leaves = [x.clone().requires_grad_() for x in given]
        out, _ = compute(*leaves, documents=documents)
        out.backward(slope)
        found.append([out.detach(), *map(gradient, leaves)])
    for fused, other, wanted in zip(*found, strict=True):
        near(fused, wanted)
        error, usual = ((x.float() - wanted.float()).norm() for x in (fused, other))
        assert error <= 2 * usual + 1e-3 * wanted.float().norm()


def without_flash_qla(*given: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_qla, "takes", lambda q, v: False)
        return delta_rule(*given, documents=documents)


def near(ours: Tensor, wanted: Tensor) -> None:
    """Within the rounding of BF16."""
    assert (ours.float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm()
