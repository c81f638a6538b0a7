"""Launches of kernels and torch operations for a te.Linear; the host never waits for a result."""

from collections import Counter
from typing import Any

import pytest
import torch
from engine_reference import RECIPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import te_models.engine.emulated as te
from te_models.engine.emulated import gemm
from te_models.numerics import fused, nvfp4

# Operations that launch nothing: views and allocations.
FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select", "slice",
    "split",
    "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.found[name] += name not in FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
def test_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three kernels of ours for each of the three products, and no more operations of torch than kernels."""
    launched: Counter[str] = Counter()
    recipe = RECIPES[name]()

    def product(a: Tensor, b: Tensor, dtype: Any = None, *_: Any) -> Tensor:
        rows, columns = (
            (a, b.t()) if isinstance(a, Tensor) else (a.data.contiguous(), b.data.contiguous())
        )
        return torch.empty(
            len(rows), len(columns), dtype=dtype if isinstance(a, Tensor) else torch.bfloat16
        )

    monkeypatch.setattr(fused, "run", lambda kernel, *_, **__: launched.update([kernel]))
    monkeypatch.setattr(fused, "kernels", lambda: {"any": None})
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(gemm, "_tensor_cores", lambda device: True)
    monkeypatch.setattr(nvfp4, "device_type", lambda tensor: "cuda")
    monkeypatch.setattr(gemm, "_on_tensor_cores", product)
    monkeypatch.setattr(gemm, "_narrow_product", product)
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    x, g = torch.randn(256, 64).bfloat16().requires_grad_(), torch.randn(256, 32).bfloat16()

    def one_pass() -> None:
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)

    with te.exact_gemm(0):
        one_pass()
        launched.clear()
        with Operations() as counted:
            one_pass()
    assert 0 < launched.total() <= 3 * 3, launched
    assert (
        "_local_scalar_dense" not in counted.found and counted.found.total() <= launched.total()
    ), +counted.found


class Kernel:
    """Stand-in for a Triton kernel: `kernel[grid](...)` looks up a variant, `variant[grid](...)` launches it."""

    arg_names = ("x", "scale", "n", "WIDE", "BLOCK")
    packed_metadata = ()

    def __init__(self) -> None:
        self.searches: list[dict[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **options: Any) -> Kernel:
            (self.searches if options else self.launches).append(options or (grid, *arguments))
            return self

        return call


def test_a_variant_of_a_kernel_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(fused, "kernels", lambda: {"k": kernel})
    monkeypatch.setattr(fused, "_VARIANTS", {})
    x, s = torch.zeros(64), torch.ones(1)
    for _ in range(3):
        fused.run("k", (2,), (x, s), (64,), {"BLOCK": 32, "num_warps": 4, "WIDE": False})
    assert kernel.searches == [
        {"enable_fp_fusion": False, "BLOCK": 32, "num_warps": 4, "WIDE": False}
    ]
    # The constants come in the order of the kernel's parameters, and the grid has three numbers.
    assert kernel.launches == [((2, 1, 1), x, s, 64, False, 32)] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"s": torch.ones(1, dtype=torch.float64)},
        {"n": 63},
        {"n": 1},
        {"BLOCK": 16},
        {"WIDE": True},
        {"num_warps": 8},
    ],
)
def test_arguments_that_change_the_variant(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(fused, "kernels", lambda: {"k": kernel})
    monkeypatch.setattr(fused, "_VARIANTS", {})
    call: dict[str, Any] = {
        "x": torch.zeros(64),
        "s": torch.ones(1),
        "n": 64,
        "BLOCK": 32,
        "num_warps": 4,
        "WIDE": False,
    }
    for arguments in (call, call | change):
        constants = {name: value for name, value in arguments.items() if name not in "xsn"}
        fused.run("k", (2,), (arguments["x"], arguments["s"]), (arguments["n"],), constants)
    assert len(kernel.searches) == 2 and not kernel.launches
