"""Which calls a te.Linear without gradients makes (engine/native_inference.py), on stand-ins for Transformer Engine.

And that modules in the place of te.Linears and te.GroupedLinears run themselves, and which norms our kernels compute.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from adapters import peft
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import te_models.engine
from te_models.adapters.layers import LoraExperts, LoraLinear
from te_models.kernels.groups import Groups

BF16 = torch.bfloat16


class Quantized:
    """An FP8 tensor, which here has the values that it was made from."""

    def __init__(self, values: Tensor) -> None:
        self._data = values


class Quantizer:
    """A quantizer, which counts its casts."""

    def __init__(self) -> None:
        self.casts = 0

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        assert rowwise and not columnwise

    def quantize_impl(self, x: Tensor) -> Quantized:
        self.casts += 1
        return Quantized(x.clone())


class CurrentScaling(Quantizer):
    """A quantizer of another recipe."""


class Linear(nn.Module):
    """The attributes of a te.Linear that are read."""

    use_bias = is_fsdp2 = return_bias = gemm_bias_unfused_add = False
    fp8 = fp8_initialized = False
    tp_size = 1
    fsdp_group = None

    in_features, out_features = 16, 24

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(24, 16, dtype=BF16))
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": []}
        self._fp8_workspaces: dict[str, Quantized] = {}
        self.prepared = 0

    def init_fp8_metadata(self, num_gemms: int) -> None:
        self.prepared += 1
        self.fp8 = self.fp8_initialized = True
        self.fp8_meta["recipe"] = State.recipe
        self.quantizers["scaling_fwd"] = [Quantizer(), Quantizer(), Quantizer()]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return x @ self.weight.T


class RMSNorm(nn.Module):
    """The attributes of a te.RMSNorm that are read."""

    eps = 1e-5
    zero_centered_gamma = False

    def __init__(self, width: int, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class GroupedLinear(nn.Module):
    """The attributes of a te.GroupedLinear of two experts that are read."""

    in_features, out_features, num_gemms = 16, 24, 2
    weight0: Tensor
    weight1: Tensor

    def __init__(self) -> None:
        super().__init__()
        for expert in range(2):
            weight = nn.Parameter(torch.randn(24, 16, dtype=BF16))
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x: Tensor, rows: Any, is_first_microbatch: bool | None = None) -> Tensor:
        rows = rows.counts.tolist() if isinstance(rows, Groups) else rows
        first, second = x.split(rows)
        return torch.cat([first @ self.weight0.T, second @ self.weight1.T])


class State:
    """Transformer Engine's state of the process."""

    recipe: object = object()

    @staticmethod
    def is_fp8_enabled() -> bool:
        return True

    @classmethod
    def get_fp8_recipe(cls) -> object:
        return cls.recipe


def quantize_weight(
    *,
    tensor: Tensor,
    quantizer: Quantizer,
    workspace: Any,
    update_workspace: bool,
    cache: bool,
    **_: Any,
) -> tuple[Quantized, Quantized | None]:
    """As Transformer Engine: a workspace is taken, or written anew; else a new one is made, and kept by the caller."""
    if workspace is not None:
        if update_workspace:
            workspace._data = quantizer.quantize_impl(tensor)._data
        return workspace, None
    made = quantizer.quantize_impl(tensor)
    return made, made if cache else None


def general_gemm(weight: Quantized, x: Quantized, **options: Any) -> tuple[Tensor]:
    return (x._data @ weight._data.T,)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The files of the native engine, imported with stand-ins."""
    package = "transformer_engine.pytorch"
    recipes = dict.fromkeys(
        ("Recipe", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"), type
    )
    names: dict[str, Any] = {
        "transformer_engine": {},
        "transformer_engine.common": dict(recipe=type("recipe", (), recipes)),
        package: dict(
            DType=MagicMock(),
            Float8CurrentScalingQuantizer=CurrentScaling,
            Float8Quantizer=Quantizer,
            Float8Tensor=type("Float8Tensor", (Tensor,), {}),
            GroupedLinear=GroupedLinear,
            LayerNorm=type("LayerNorm", (nn.Module,), {}),
            Linear=Linear,
            QuantizedTensor=type("QuantizedTensor", (Tensor,), {}),
            RMSNorm=RMSNorm,
        ),
        "transformer_engine.debug.pytorch.debug_state": dict(
            TEDebugState=type("TEDebugState", (), {"debug_enabled": False})
        ),
        f"{package}.constants": dict(TE_DType={BF16: "BF16", torch.float32: "FP32"}),
        f"{package}.cpp_extensions": dict(general_gemm=general_gemm),
        f"{package}.distributed": dict(is_fp8_activation_recompute_enabled=lambda: False),
        f"{package}.module.base": dict(quantize_weight=quantize_weight),
        f"{package}.quantization": dict(
            FP8GlobalStateManager=State,
            DelayedScalingRecipeState=type("DelayedScalingRecipeState", (), {}),
            get_fp8_te_dtype=MagicMock(),
        ),
        f"{package}.tensor.storage.float8_tensor_storage": dict(Float8TensorStorage=Quantized),
    }
    for name, content in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):  # the packages on the way
            parent = ".".join(parts[:end])
            if parent not in names:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", MagicMock())
    loaded = {}
    # Each imports those before.
    for name in ("linear", "inference", "norm", "targets", "residual_norm", "experts", "handover"):
        full = f"te_models.engine.native_{name}"
        path = Path(te_models.__file__).parent / f"engine/native_{name}.py"
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None and spec.loader is not None
        loaded[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, full, loaded[name])
        monkeypatch.setattr(te_models.engine, f"native_{name}", loaded[name], raising=False)
        spec.loader.exec_module(loaded[name])
    return loaded


@pytest.fixture
def inference(engine: dict[str, Any]) -> Any:
    """te_models.engine.native_inference, imported with stand-ins."""
    return engine["inference"]


def casts(module: Linear) -> list[int]:
    """How often the input and the weight were cast."""
    return [quantizer.casts for quantizer in module.quantizers["scaling_fwd"][:2]]


@torch.no_grad()
def test_a_kept_weight_is_used_as_it_is(inference: ModuleType) -> None:
    module = Linear()
    x = torch.randn(8, 16, dtype=BF16)
    wanted = x @ module.weight.T
    assert torch.equal(inference.linear(module, x, True), wanted) and casts(module) == [1, 1]
    assert torch.equal(inference.linear(module, x, False), wanted) and casts(module) == [2, 1]
    # te_models.fp8.kept_weights takes it away between two generations, and gives it back or does not.
    taken = dict(module._fp8_workspaces)
    module._fp8_workspaces.clear()
    assert torch.equal(inference.linear(module, x, False), wanted) and casts(module) == [3, 2]
    module._fp8_workspaces = taken
    module.weight.mul_(2)
    assert torch.equal(inference.linear(module, x, False), wanted) and casts(module) == [4, 2]
    assert torch.equal(inference.linear(module, x, True), 2 * wanted) and casts(module) == [5, 3]
    assert torch.equal(inference.linear(module, x, None), 2 * wanted) and casts(module) == [6, 4]
    assert module.prepared == 1


@torch.no_grad()
def test_another_recipe_prepares_the_module_again(
    inference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Linear()
    x = torch.randn(8, 16, dtype=BF16)
    for _ in range(2):
        inference.linear(module, x, None)
    assert module.prepared == 1
    monkeypatch.setattr(State, "recipe", object())
    inference.linear(module, x, None)
    assert module.prepared == 2
    module.fp8 = False  # it ran without FP8 in between
    inference.linear(module, x, None)
    assert module.prepared == 3


@torch.no_grad()
def test_an_observer_of_the_quantizer_sees_the_cast(inference: ModuleType) -> None:
    """te_models.engine.native_observers replaces this method of the quantizer."""
    module = Linear()
    x = torch.randn(8, 16, dtype=BF16)
    inference.linear(module, x, None)
    seen = []
    quantizer: Any = module.quantizers["scaling_fwd"][0]
    original = quantizer.quantize_impl
    quantizer.quantize_impl = lambda tensor: (seen.append(tensor), original(tensor))[1]
    inference.linear(module, x, None)
    assert len(seen) == 1 and seen[0] is x


@torch.no_grad()
def test_what_the_calls_do_not_cover_is_left_to_the_module(inference: ModuleType) -> None:
    x = torch.randn(8, 16, dtype=BF16)
    hooked = Linear()
    hooked.register_forward_hook(lambda *given: None)
    divided = Linear()
    divided.tp_size = 2
    blocks = Linear()
    blocks.init_fp8_metadata(1)
    blocks.quantizers["scaling_fwd"][0] = object()  # type: ignore[call-overload]
    for module in (hooked, divided, blocks):
        assert inference.linear(module, x, None) is None
    assert inference.linear(Linear(), x[:7], None) is None  # rows that FP8 products do not take
    assert inference.linear(Linear(), x.float(), None) is None


class Doubled(nn.Module):
    """A parametrization, and a module around another one."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return 2 * (x if self.module is None else self.module(x, *args, **options))


def doubled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with a forward of its own."""

    def forward(self: Any, *args: Any, **options: Any) -> Tensor:
        return 2 * kind.forward(self, *args, **options)

    return type("Subclass", (kind,), {"forward": forward})


def adapted(base: Any, kind: type[Any], **fields: Any) -> nn.Module:
    config = peft.LoraConfig(r=4, init_lora_weights=False, **fields)
    layer = kind(base, "default", config, r=4, lora_alpha=8)
    return layer.to(BF16)


def parametrized(base: nn.Module, name: str) -> nn.Module:
    return parametrize.register_parametrization(base, name, Doubled())


def pruned(base: nn.Module, name: str) -> nn.Module:
    module = prune.random_unstructured(base, name, amount=0.5)
    with torch.no_grad():
        module.get_parameter(f"{name}_orig").mul_(2)  # after a step: its hook reads it anew
    return module


def patched(base: Any) -> nn.Module:
    forward = base.forward
    base.forward = lambda *args, **options: 2 * forward(*args, **options)
    return base


def biased(base: Any) -> nn.Module:
    base.use_bias, base.bias = True, nn.Parameter(torch.ones(24))
    return base


LINEARS: dict[str, Any] = {
    "lora": lambda base: adapted(base, LoraLinear),
    "dora": lambda base: adapted(base, LoraLinear, use_dora=True),
    "peft": lambda base: adapted(base, peft.tuners.lora.layer.Linear),
    "subclass": lambda base: doubled_class(type(base))(),
    "parametrized": lambda base: parametrized(base, "weight"),
    "pruned": lambda base: pruned(base, "weight"),
    "patched": patched,
    "biased": biased,
    "wrapped": Doubled,
    "torch": lambda base: nn.Linear(16, 24, bias=False, dtype=BF16),
}
EXPERTS: dict[str, Any] = {
    "plain": lambda base: base,
    "lora": lambda base: adapted(base, LoraExperts),
    "subclass": lambda base: doubled_class(type(base))(),
    "parametrized": lambda base: parametrized(base, "weight0"),
    "pruned": lambda base: pruned(base, "weight1"),
    "patched": patched,
    "wrapped": Doubled,
}


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("case", LINEARS)
@torch.no_grad()
def test_a_module_in_the_place_of_a_linear_runs_itself(
    case: str, of_torch: bool, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[nn.Module] = []
    kind = engine["linear"].LinearOfTorch if of_torch else Linear
    monkeypatch.setattr(kind, "forward", Linear.forward)  # without the padding of rows
    base = kind()
    module = LINEARS[case](base)
    if case == "torch":
        monkeypatch.setattr(nn.Linear, "forward", Linear.forward)  # it takes the option
    x = torch.randn(8, 16, dtype=BF16)
    assert engine["inference"].linear(module, x, None) is None
    expected = module(x)
    module.register_forward_hook(lambda *args: calls.append(module))
    run = engine["handover"].handover["linear"]
    assert torch.equal(run(module, x, is_first_microbatch=None), expected)
    assert len(calls) == 1


@torch.no_grad()
def test_a_linear_of_torch_is_computed_by_calls(engine: dict[str, Any]) -> None:
    x = torch.randn(8, 16, dtype=BF16)
    module = engine["linear"].LinearOfTorch.of(Linear())
    assert torch.equal(engine["inference"].linear(module, x, None), x @ module.weight.T)


@pytest.mark.parametrize("case", LINEARS)
def test_a_weight_that_is_made_in_the_call_is_not_cast_before(
    case: str, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients: our own kernel casts the weight of a te.Linear, whose output reads that copy."""
    handover = engine["handover"]
    weights: list[Tensor] = []
    target = MagicMock()
    monkeypatch.setattr(handover, "target_of", lambda quantizer: target)
    monkeypatch.setattr(handover, "quantizer_of", lambda *args: None)
    monkeypatch.setattr(
        handover.handover_triton, "cast", lambda weight, **_: weights.append(weight)
    )
    plain = Linear()
    handover._cast_weight(plain)
    assert len(weights) == 1 and weights[0].data_ptr() == plain.weight.data_ptr()
    module = LINEARS[case](Linear())
    handover._cast_weight(module)
    parameters = {p.data_ptr() for p in [module._parameters.get("weight")] if p is not None}
    assert len(weights) == 1 or weights[1].data_ptr() in parameters
    assert len(weights) == 1 or case in ("subclass", "biased")


@pytest.mark.parametrize("case", EXPERTS)
@torch.no_grad()
def test_a_module_in_the_place_of_experts_runs_itself(case: str, engine: dict[str, Any]) -> None:
    module = EXPERTS[case](GroupedLinear())
    experts = engine["experts"]
    x = torch.randn(8, 16, dtype=BF16)
    expected = module(x, [3, 5])
    assert torch.equal(experts.grouped(module, x, [3, 5]), expected)
    assert not experts.counts_on_device(module, None) and not experts.experts_join(module)
    base = module if isinstance(module, GroupedLinear) else module._modules.get("base_layer")
    if isinstance(base, GroupedLinear):
        assert experts._is_plain(base) == (case in ("plain", "lora"))


class Norms:
    """Stand-ins for the kernels of a norm, ours and Transformer Engine's, which note their calls."""

    def __init__(self, norms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(norms.residual_norm_triton, "forward", self.forward)
        monkeypatch.setattr(norms.residual_norm_triton, "backward", self.backward)
        monkeypatch.setattr(norms.tex, "rmsnorm_fwd", self.te_forward)
        monkeypatch.setattr(norms.tex, "rmsnorm_bwd_add", self.te_backward)

    def forward(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("our forward")
        total = x if delta is None else x + delta
        return total * (weight + zero_centered), total, total[:, 0].float()

    def backward(
        self,
        dy: Tensor,
        total: Tensor,
        dtotal: Tensor | None,
        weight: Tensor,
        rstd: Tensor,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("our backward")
        dx = dy * (weight + zero_centered)
        return dx if dtotal is None else dx + dtotal, (dy * total).sum(0)

    def te_forward(
        self, x: Tensor, weight: Tensor, eps: float, *options: Any
    ) -> tuple[Tensor, None, Tensor]:
        self.calls.append("forward")
        return x * (weight + options[-1]), None, x[:, 0].float()

    def te_backward(
        self, dy: Tensor, total: Tensor, dtotal: Tensor, rstd: Tensor, weight: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("backward")
        return dy * (weight + options[-1]) + dtotal, (dy * total).sum(0)


@pytest.fixture
def norms(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Norms:
    """The kernels of norms, which note their calls."""
    return Norms(engine["residual_norm"], monkeypatch)


# Width, dtype -> whether our kernels compute the norm.
NORMS = {
    (2560, BF16): True,
    (2880, BF16): True,
    (8184, torch.float16): True,
    # Transformer Engine has kernels for these.
    (1024, BF16): False,
    (2048, BF16): False,
    (4096, BF16): False,
    (8192, BF16): False,
    # Ours do not take them.
    (640, BF16): False,
    (2564, BF16): False,
    (8200, BF16): False,
    (2560, torch.float32): False,
}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(2560, BF16), (2048, BF16), (2560, torch.float32)])
def test_our_kernels_compute_the_norm_before_a_part_at_widths_without_a_tuned_one(
    width: int,
    dtype: torch.dtype,
    with_delta: bool,
    zero_centered: bool,
    engine: dict[str, Any],
    norms: Norms,
) -> None:
    module = RMSNorm(width, dtype)
    module.zero_centered_gamma = zero_centered
    x = torch.randn(3, width, dtype=dtype, requires_grad=True)
    delta = torch.randn(3, width, dtype=dtype, requires_grad=True) if with_delta else None
    inputs = [x, module.weight] if delta is None else [x, delta, module.weight]
    y, total = engine["handover"].handover["norm"](module, x, delta, None)
    found = torch.autograd.grad([y, total], inputs, [2 * y, total])
    wanted_total = x if delta is None else x + delta
    wanted = wanted_total * (module.weight + zero_centered)
    assert torch.equal(y, wanted) and torch.equal(total, wanted_total)
    outputs = [wanted, wanted_total]
    gradients = torch.autograd.grad(outputs, inputs, [2 * wanted, wanted_total])
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)
    ours = NORMS[width, dtype]
    assert norms.calls == (["our forward", "our backward"] if ours else ["forward", "backward"])


@pytest.mark.parametrize(("width", "dtype"), NORMS)
def test_our_kernels_compute_the_norm_of_an_output_at_widths_without_a_tuned_one(
    width: int, dtype: torch.dtype, engine: dict[str, Any], norms: Norms
) -> None:
    module = RMSNorm(width, dtype)
    x = torch.randn(3, width, dtype=dtype, requires_grad=True)
    y = engine["handover"].handover["output_norm"](module, x)
    assert torch.equal(y, module(x))
    dy = torch.randn(3, width).to(dtype)
    found = torch.autograd.grad(y, [x, module.weight], dy)
    wanted = torch.autograd.grad(module(x), [x, module.weight], dy)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert norms.calls == (["our forward", "our backward"] if NORMS[width, dtype] else [])


def _hooked(module: RMSNorm) -> RMSNorm:
    module.register_forward_hook(lambda *given: None)
    return module


def _of_another_dtype(module: RMSNorm) -> RMSNorm:
    module.weight.data = module.weight.data.float()
    return module


def _of_a_subclass(module: RMSNorm) -> RMSNorm:
    class Other(RMSNorm):
        """A norm of another kind."""

    module.__class__ = Other
    return module


@pytest.mark.parametrize("change", [_hooked, _of_another_dtype, _of_a_subclass])
def test_a_norm_of_an_output_that_is_no_plain_te_rmsnorm_runs_itself(
    change: Callable[[RMSNorm], RMSNorm], engine: dict[str, Any], norms: Norms
) -> None:
    module = change(RMSNorm(2560))
    x = torch.randn(3, 2560, dtype=BF16)
    assert torch.equal(engine["handover"].handover["output_norm"](module, x), module(x))
    assert norms.calls == []


@pytest.mark.parametrize("name", ["torch.compiler.is_compiling", "torch.is_autocast_enabled"])
def test_a_compiler_and_torchs_autocast_see_the_norm_of_an_output(
    name: str, engine: dict[str, Any], norms: Norms, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = RMSNorm(2560)
    x = torch.randn(3, 2560, dtype=BF16)
    with monkeypatch.context() as patch:
        patch.setattr(name, lambda *given: True)
        engine["handover"].handover["output_norm"](module, x)
    with torch.no_grad():
        engine["handover"].handover["output_norm"](module, x)
    assert norms.calls == []
