"""What keeps generation on a CPU fast: one thread for small products, weights that are quantized once."""

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from te_models import CausalLM
from te_models.device.cpu_matmul import PACKED_ROWS, matmul, packed, packed_matmul
from te_models.engine import emulated as te
from te_models.engine.emulated import linear_products
from te_models.numerics.quantizers import Quantizer

PLACE = dict(device="cpu", engine="emulated")
IDS = torch.arange(1, 13)[None]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of(model: nn.Module, ids: Tensor) -> int:
    """The threads that the model's blocks may use in a pass over `ids`."""
    found: list[int] = []
    hook = model.get_submodule("layers.0").register_forward_hook(
        lambda *args: found.append(torch.get_num_threads())
    )
    model(ids)
    hook.remove()
    return found[0]


def test_passes_too_small_to_share_run_on_one_thread(two_threads: None) -> None:
    model = CausalLM.from_preset("gated-nano", recipe="bf16", **PLACE)
    with torch.no_grad():
        assert threads_of(model, IDS[:, :1]) == 1
        assert threads_of(model, IDS.repeat(1, 20)) == 2
        with pytest.raises(ValueError):
            model(IDS[0])
    assert threads_of(model, IDS[:, :1]) == 2  # a pass with a backward
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_threads_change_no_token(recipe: str, two_threads: None) -> None:
    model = CausalLM.from_preset("gated-nano", recipe=recipe, **PLACE).eval()
    found = model.generate(IDS, max_new_tokens=8)
    torch.set_num_threads(1)
    assert torch.equal(found, model.generate(IDS, max_new_tokens=8))


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "mxfp8", "nvfp4"])
def test_each_weight_is_quantized_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM.from_preset("gated-nano", recipe=recipe, **PLACE).eval()
    counted: Counter[int] = Counter()
    plain = Quantizer._build

    def build(self: Quantizer, tensor: Tensor, dtype: torch.dtype | None) -> object:
        counted[tensor.data_ptr()] += 1
        return plain(self, tensor, dtype)

    monkeypatch.setattr(Quantizer, "_build", build)
    model.generate(IDS, max_new_tokens=6)
    weights = [
        counted[p.data_ptr()]
        for name, p in model.named_parameters()
        if "_proj" in name and ".layers" in f".{name}"
    ]
    assert sorted(set(weights)) == [0, 1] and sum(weights) == 4 * (6 - 2)  # none in the BF16 edges


@pytest.mark.parametrize("rows", [1, 4, 12, PACKED_ROWS])
@pytest.mark.parametrize(
    "outputs, inputs", [(512, 192), (192, 192), (192, 512), (40, 96), (16, 2048), (1, 8)]
)
def test_packed_weights_change_no_bit(outputs: int, inputs: int, rows: int) -> None:
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
    if (kept := packed(weight)) is None:
        pytest.skip("this CPU has no exact products of packed weights")
    assert torch.equal(packed_matmul(x, kept), matmul(x, weight.t()))


@torch.no_grad()
def test_a_kept_weight_is_that_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(
        linear_products, "packed_matmul", lambda x, w: calls.append(w) or packed_matmul(x, w)
    )
    linear = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cpu")
    if packed(linear.weight) is None:
        pytest.skip("this CPU has no exact products of packed weights")
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(linear(x, is_first_microbatch=True), linear(x))
    assert torch.equal(linear(x, is_first_microbatch=False), linear(x))
    many = torch.randn(PACKED_ROWS + 1, 64).bfloat16()
    assert torch.equal(linear(many, is_first_microbatch=False), linear(many))
    assert len(calls) == 2 and calls[0] is calls[1]
    assert torch.equal(copy.deepcopy(linear)(x, is_first_microbatch=False), linear(x))
    linear.weight.mul_(2)
    assert torch.equal(linear(x, is_first_microbatch=False), linear(x))
    with torch.enable_grad():
        linear(x.requires_grad_(), is_first_microbatch=False).sum().backward()
    te.drop_cached_weights(linear)
    assert len(calls) == 4 and not linear._packed


@torch.no_grad()
def test_steps_use_packed_weights_and_drop_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(
        linear_products, "packed_matmul", lambda x, w: calls.append(w) or packed_matmul(x, w)
    )
    model = CausalLM.from_preset("gated-nano", recipe="bf16", num_hidden_layers=2, **PLACE).eval()
    if packed(model.lm_head.weight) is None:
        pytest.skip("this CPU has no exact products of packed weights")
    model.generate(IDS, max_new_tokens=5)
    assert len(calls) == 5 * (2 * 4 + 1) and len({id(w) for w in calls}) == 2 * 4 + 1
    assert not any(module._packed for module in model.modules() if isinstance(module, te.LINEARS))


@pytest.mark.parametrize(
    "width, rows", [(64, 1), (512, 4)]
)  # the norms of 512 channels have a kernel for fours
@torch.no_grad()
def test_a_step_of_one_token_has_no_more_rows_than_its_norms_need(width: int, rows: int) -> None:
    options = dict(
        hidden_size=width, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, **PLACE
    )
    model = CausalLM.from_preset(
        "gated-nano", recipe="current", num_key_value_heads=1, head_dim=32, **options
    ).eval()
    found: list[int] = []
    model.layers[2].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: found.append(len(args[0]))
    )
    model.generate(IDS, max_new_tokens=3)
    assert found == [12, rows, rows]
