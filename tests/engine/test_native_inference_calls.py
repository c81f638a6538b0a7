"""Which calls a te.Linear without gradients makes (engine/native_inference.py), on stand-ins for Transformer Engine."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models

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

    def __init__(self) -> None:
        super().__init__()
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
def inference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, imported with stand-ins."""
    package = "transformer_engine.pytorch"
    names: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        package: dict(
            Float8CurrentScalingQuantizer=CurrentScaling,
            Float8Quantizer=Quantizer,
            Linear=Linear,
            QuantizedTensor=type("QuantizedTensor", (Tensor,), {}),
            RMSNorm=type("RMSNorm", (nn.Module,), {}),
        ),
        "transformer_engine_torch": {},
        "transformer_engine.debug.pytorch.debug_state": dict(
            TEDebugState=type("TEDebugState", (), {"debug_enabled": False})
        ),
        f"{package}.constants": dict(TE_DType={}),
        f"{package}.cpp_extensions": dict(general_gemm=general_gemm),
        f"{package}.distributed": dict(is_fp8_activation_recompute_enabled=lambda: False),
        f"{package}.module.base": dict(quantize_weight=quantize_weight),
        f"{package}.quantization": dict(FP8GlobalStateManager=State),
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
    path = Path(te_models.__file__).parent / "engine/native_inference.py"
    spec = importlib.util.spec_from_file_location("native_inference_on_stand_ins", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


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
