"""te.checkpoint: same numbers as without, under every recipe, and no silent misuse."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from engine_reference import RECIPES
from fewer import every
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from typed import gradient

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

BF16 = torch.bfloat16


class Block(nn.Module):
    """RMSNorm, two Linears, dropout and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = te.RMSNorm(32, dtype=BF16)
        self.up = te.Linear(32, 64, params_dtype=BF16)
        self.down = te.Linear(64, 32, bias=False, params_dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.silu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(h), 0.25)


def train(
    wrap: Callable[[nn.Module, Tensor], Tensor], name: str, steps: int = 4, accumulate: int = 1
) -> list[Tensor]:
    """Outputs, gradients, scales and histories of some steps of three blocks; `wrap` runs a block."""
    torch.manual_seed(1)
    te.FP8GlobalStateManager.reset()
    blocks, recipe = nn.ModuleList(Block() for _ in range(3)), RECIPES[name]()
    found: list[Tensor] = []
    for step in range(steps):
        for _ in range(accumulate):
            h = (torch.randn(32, 32) * 2**step).to(BF16).requires_grad_()
            leaf = h
            with te.autocast(recipe=recipe):
                for block in blocks:
                    h = wrap(block, h)
            h.float().square().sum().backward()
            assert leaf.grad is not None
            found += [h.detach(), leaf.grad]
        found += [p.grad.clone() for p in blocks.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in blocks.parameters():
                p -= 1e-4 * gradient(p)
                p.grad = None
    if name == "delayed":
        for m in blocks.modules():
            if isinstance(m, te.Linear):
                for meta in (m.fp8_meta["scaling_fwd"], m.fp8_meta["scaling_bwd"]):
                    found += [meta.scale, meta.amax_history]
    return found


@pytest.mark.parametrize(
    ("name", "accumulate", "reentrant"), every(4, RECIPES, [1, 2], [False, True])
)
def test_changes_nothing(name: str, accumulate: int, reentrant: bool) -> None:
    """Outputs, gradients, scales and histories in every bit; dropout and stochastic rounding draw the same numbers."""
    expected = train(lambda block, x: block(x), name, accumulate=accumulate)
    got = train(
        lambda block, x: te.checkpoint(block, x, use_reentrant=reentrant),
        name,
        accumulate=accumulate,
    )
    assert len(got) == len(expected) and all(
        torch.equal(a, b) for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("reentrant", "expected"),
    [
        # Each Linear of a reentrant recomputation is the first module of a new autocast.
        (True, ["forward", "forward", "backward", "backward"]),
        (False, ["forward", "forward", "backward"]),
    ],
)
def test_updates(reentrant: bool, expected: list[str], updates: list[str]) -> None:
    a, b = (te.Linear(32, 32, params_dtype=BF16) for _ in range(2))
    x = torch.ones(32, 32, dtype=BF16, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]()):
        y = te.checkpoint(lambda v: b(a(v)), x, use_reentrant=reentrant)
    y.sum().backward()
    assert updates == expected


def test_a_recomputation_inside_an_autocast_has_the_flag_of_its_forward(updates: list[str]) -> None:
    a, b, c = (te.Linear(32, 32, params_dtype=BF16) for _ in range(3))
    x = torch.ones(32, 32, dtype=BF16, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]()):
        h = te.checkpoint(lambda v: b(a(v)), x, use_reentrant=True)
        c(h).sum().backward()
    # c is the first module with grad; the recomputed a and b see the flag as it was before c took it.
    assert updates == ["backward"] * 3 + ["forward"]


def test_saves_no_activations() -> None:
    block, x = Block(), torch.randn(32, 32, dtype=BF16, requires_grad=True)
    sizes: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    )
    with hooks, te.autocast(recipe=R.Float8CurrentScaling()):
        te.checkpoint(block, x, use_reentrant=True)
    assert sizes == [x.numel()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputes_under_the_torch_autocast_of_the_forward(reentrant: bool) -> None:
    m, seen = te.Linear(32, 32), []

    def function(x: Tensor) -> Tensor:
        y = m(x)
        seen.append(y.dtype)
        return y

    x = torch.randn(32, 32, requires_grad=True)
    with torch.autocast("cpu", BF16), te.autocast(recipe=R.Float8CurrentScaling()):
        y = te.checkpoint(function, x, use_reentrant=reentrant)
    y.sum().backward()
    assert seen == [BF16, BF16] and x.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_tuples_keywords_and_non_tensors(reentrant: bool) -> None:
    m = te.Linear(32, 32, params_dtype=BF16)

    def function(x: Tensor, scale: float, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        return m(x) * scale, x + shift

    x = torch.ones(32, 32, dtype=BF16, requires_grad=True)
    shift = torch.ones(32, 32, dtype=BF16, requires_grad=True)
    a, b = te.checkpoint(function, x, 2.0, shift=shift, use_reentrant=reentrant)
    (a.sum() + b.sum()).backward()
    expected = torch.ones(32, 32, dtype=BF16).mul(2) @ m.weight + 1
    torch.testing.assert_close(x.grad, expected)
    assert (shift.grad == 1).all()


def test_without_grad_it_just_calls() -> None:
    m = te.Linear(32, 32, params_dtype=BF16)
    with torch.no_grad(), te.autocast(recipe=RECIPES["delayed"]()):
        te.checkpoint(m, torch.ones(32, 32, dtype=BF16))
    assert not m._stash


def test_a_module_without_te_modules_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setattr(
        torch.utils.checkpoint,
        "checkpoint",
        lambda function, *args, **options: called.update(options),
    )
    te.checkpoint(nn.Linear(4, 4), torch.ones(4, 4), use_reentrant=False, debug=True)
    assert called["use_reentrant"] is False and called["debug"] is True


@pytest.mark.parametrize("reentrant", [False, True])
def test_context_fn(reentrant: bool) -> None:
    log: list[str] = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        log.append(name)
        yield

    m, x = te.Linear(32, 32), torch.ones(32, 32, requires_grad=True)
    y = te.checkpoint(
        m, x, use_reentrant=reentrant, context_fn=lambda: (note("forward"), note("recompute"))
    )
    assert log == ["forward"]
    y.sum().backward()
    assert log == ["forward", "recompute"]


class TestReentrant:
    def test_needs_an_input_that_requires_grad(self) -> None:
        m = te.Linear(32, 32, params_dtype=BF16)
        assert not te.checkpoint(m, torch.ones(32, 32, dtype=BF16)).requires_grad

    def test_refuses_autograd_grad(self) -> None:
        m, x = te.Linear(32, 32), torch.ones(32, 32, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
            torch.autograd.grad(te.checkpoint(m, x).sum(), x)

    def test_refuses_delayed_scaling_with_the_autocast_inside(self) -> None:
        m, x = (
            te.Linear(32, 32, params_dtype=BF16),
            torch.ones(32, 32, dtype=BF16, requires_grad=True),
        )

        def function(x: Tensor) -> Tensor:
            with te.autocast(recipe=RECIPES["delayed"]()):
                return m(x)

        with pytest.raises(
            RuntimeError, match="open te.autocast outside, or pass use_reentrant=False"
        ):
            te.checkpoint(function, x, use_reentrant=True)
        for _ in range(2):
            te.checkpoint(function, x, use_reentrant=False).sum().backward()
        assert m.fp8_meta["scaling_fwd"].scale[0] == 448


@pytest.mark.parametrize("reentrant", [False, True])
class TestStash:
    """Delayed scaling's first-in first-out stash of scales."""

    def make(self, reentrant: bool) -> tuple[te.Linear, Callable[[float], Tensor]]:
        m, recipe = te.Linear(32, 32, params_dtype=BF16), RECIPES["delayed"]()

        def forward(size: float) -> Tensor:
            x = torch.full((32, 32), size, dtype=BF16, requires_grad=True)
            with te.autocast(recipe=recipe):
                return te.checkpoint(m, x, use_reentrant=reentrant)

        return m, forward

    def test_a_recomputation_leaves_no_trace_in_later_steps(self, reentrant: bool) -> None:
        """Forwards with and without checkpointing, then backwards: a recomputation restores what others recorded."""
        found = []
        for checkpointed in (True, False):
            te.FP8GlobalStateManager.reset()
            torch.manual_seed(0)
            m, recipe = te.Linear(32, 32, params_dtype=BF16), RECIPES["delayed"]()
            for sizes in ((1.0, 8.0), (2.0, 64.0)):
                outputs = []
                for i, size in enumerate(sizes):
                    x = torch.full((32, 32), size, dtype=BF16, requires_grad=True)
                    with te.autocast(recipe=recipe):
                        wrapped = checkpointed and i == 0
                        outputs.append(
                            te.checkpoint(m, x, use_reentrant=reentrant) if wrapped else m(x)
                        )
                for y in outputs:
                    y.sum().backward()
            found.append(
                [
                    m.fp8_meta["scaling_fwd"].scale,
                    m.fp8_meta["scaling_fwd"].amax_history,
                    m.weight.grad,
                ]
            )
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_the_other_order_is_refused(self, reentrant: bool) -> None:
        _, forward = self.make(reentrant)
        forward(1.0)
        b = forward(8.0)
        with pytest.raises(RuntimeError, match="reset_fp8_state"):
            b.sum().backward()

    def test_an_abandoned_forward_is_refused_until_reset(self, reentrant: bool) -> None:
        m, forward = self.make(reentrant)
        forward(1.0)
        with pytest.raises(RuntimeError, match="whose backward never came"):
            forward(2.0).sum().backward()
        te.reset_fp8_state(m)
        forward(2.0).sum().backward()


class TestTorchCheckpoint:
    """torch.utils.checkpoint on te modules, which real Transformer Engine partly gets wrong without a word."""

    @pytest.mark.parametrize(
        ("inside", "name", "reentrant", "message"),
        [
            (False, "delayed", False, "use te.checkpoint, or open te.autocast inside"),
            (False, "current", True, "use te.checkpoint, or open te.autocast inside"),
            (True, "delayed", False, "use te.checkpoint"),
            (True, "delayed", True, ""),
            (True, "current", False, ""),
        ],
    )
    def test_autocast_outside_and_inside(
        self, inside: bool, name: str, reentrant: bool, message: str
    ) -> None:
        m, x = (
            te.Linear(32, 32, params_dtype=BF16),
            torch.ones(32, 32, dtype=BF16, requires_grad=True),
        )
        outer, inner = te.autocast(recipe=RECIPES[name]()), nullcontext()
        if inside:
            outer, inner = inner, outer

        def function(x: Tensor) -> Tensor:
            with inner:
                return m(x)

        with outer:
            y: Any = torch_checkpoint(function, x, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match=message) if message else nullcontext():
            y.sum().backward()
        assert message or x.grad is not None

    def test_without_fp8_it_works(self) -> None:
        m, x = te.Linear(32, 32), torch.ones(32, 32, requires_grad=True)
        torch_checkpoint(m, x, use_reentrant=False).sum().backward()
        assert x.grad is not None


def test_distributed_activations_are_not_there() -> None:
    with pytest.raises(NotImplementedError):
        te.checkpoint(te.Linear(8, 8), torch.ones(8, 8), distribute_saved_activations=True)
