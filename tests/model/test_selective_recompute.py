"""Operations that "selective" recomputes, and the memory it saves; test_recompute.py compares bits."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_model import loss_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_models import CausalLM
from te_models.config.recompute_modes import recomputes_mlp
from te_models.kernels import elementwise, handover
from te_models.kernels.early_save import discarding, save_early

SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_attention_heads=1
)
SHAPE |= dict(num_key_value_heads=1, max_position_embeddings=32, num_hidden_layers=7)
NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
ENGINES = ["emulated", pytest.param("native", marks=pytest.mark.gpu)]


def build(recipe: str, mode: str, engine: str = "emulated", **options: Any) -> CausalLM:
    torch.manual_seed(1)
    place = dict(engine=engine, device="cpu" if engine == "emulated" else "cuda")
    edges = {} if recipe == "bf16" else NO_EDGES
    return CausalLM.from_preset(
        "gated-nano",
        recipe=recipe,
        activation_checkpointing=mode,
        **{**SHAPE, **edges, **place, **options},
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("recipe", "again"),
    [("bf16", [1, 3, 5]), ("delayed", [0, 2, 3, 4, 5]), ("current", [0, 2, 3, 4, 5])],
)
def test_a_recompute_ends_with_the_gemm(
    engine: str,
    compile: bool,
    fused: bool,
    recipe: str,
    again: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One RMSNorm and one GEMM each in so many blocks, no SwiGLU, no down_proj."""
    ran: dict[str, list[int]] = {
        name: [] for name in ("post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj")
    }
    swiglu: list[int] = []
    activations: list[Any] = [handover._SwiGLU]
    if engine == "native":
        activations.append(importlib.import_module("te_models.engine.native_handover")._Activation)
    for activation in activations:
        forward = activation.forward

        def spy(*args: Any, forward: Callable[..., Tensor] = forward) -> Tensor:
            swiglu.append(0)
            return forward(*args)

        monkeypatch.setattr(activation, "forward", staticmethod(spy))
    model = build(recipe, "selective", engine, compile=compile, fused=fused)
    for layer, block in enumerate(model.layers):
        for name, found in ran.items():
            note = lambda *call, layer=layer, found=found: found.append(layer)  # noqa: E731
            block.get_submodule(name).register_forward_pre_hook(note)
    loss = loss_of(model)
    assert ran["mlp.gate_up_proj"] == ran["mlp.down_proj"] == list(range(7)) and len(swiglu) == 7
    for found in (swiglu, *ran.values()):
        found.clear()
    loss.backward()
    assert sorted(ran["mlp.gate_up_proj"]) == again and ran["mlp.down_proj"] == [] and swiglu == []
    if not (engine == "native" and fused):  # whose norm reads the module's weight
        assert sorted(ran["post_attention_layernorm"]) == again


def test_some_blocks_keep_their_mlp() -> None:
    kinds = {"bf16": (False, False), "fp8": (True, False), "fp8 weights": (True, True)}
    kept = {
        name: [n for n in range(20) if not recomputes_mlp("selective", n, 20, *kind)]
        for name, kind in kinds.items()
    }
    assert kept == {
        "bf16": [1, 3, 5, 7, 9, 11, 13, 15, 17, 19],
        "fp8": [4, 9, 14, 19],
        "fp8 weights": [3, 7, 11, 15, 19],
    }
    assert not any(
        recomputes_mlp(mode, 0, 20, fp8) for mode in ("none", "full", 2) for fp8 in (False, True)
    )


class Allocated(TorchDispatchMode):
    """The memory that operations inside allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage())._cdata not in given
            ):
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def left(self) -> int:
        """Return the bytes of it that are not free yet."""
        return sum(size for storage, size in self.storages.values() if not storage.expired())


@pytest.mark.parametrize("recipe", [pytest.param("bf16", marks=pytest.mark.slow), "delayed"])
def test_selective_needs_at_most_seven_tenths_of_the_memory(recipe: str) -> None:
    """Of the memory that "none" has allocated between forward and backward.

    In the proportions of gated-1b, with the fused attention of a GPU, which alone saves no more than it must.
    """
    shape = dict(
        SHAPE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=10,
        max_position_embeddings=128,
    )
    ids, left = torch.randint(0, 96, (2, 128)), {}
    for mode in ("none", "selective"):
        model = build(recipe, mode, **shape, fused=True)
        model(
            ids, labels=ids, return_logits=False
        ).loss.backward()  # creates what stays from step to step
        with Allocated() as allocated:
            loss = model(ids, labels=ids, return_logits=False).loss
        left[mode] = allocated.left()
        loss.backward()
        assert allocated.left() < left[mode] / 100
    assert 0.6 < left["selective"] / left["none"] < 0.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglus_gradient_is_autograds(dtype: torch.dtype) -> None:
    gate_up = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    dy = torch.randn(8, 16, dtype=dtype)
    (expected,) = torch.autograd.grad(elementwise.swiglu(gate_up), gate_up, dy)
    assert_same_bits("result", torch.autograd.grad(_swiglu(gate_up), gate_up, dy)[0], expected)


_swiglu = partial(handover.swiglu, producer=None, consumer=None)


def test_an_output_is_made_again_wherever_it_was_saved() -> None:
    """Twice here, beside an input and a weight that are kept; and the input is then still there for SwiGLU's
    backward."""
    gate_up, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(
        (elementwise.swiglu(gate_up) ** 2 * weight).sum(), (gate_up, weight)
    )
    packed: list[Any] = []
    real = torch.autograd.graph.saved_tensors_hooks

    def hooks(pack: Any, unpack: Any) -> Any:
        return real(lambda tensor: packed.append(pack(tensor)) or packed[-1], unpack)

    hidden = _swiglu(gate_up)
    source = hidden.grad_fn.source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "saved_tensors_hooks", hooks)
        with discarding(hidden):
            total = ((hidden * 1) * hidden * weight).sum()
    assert sum(p is None for p in packed) == 1 and len(packed) == 4
    del hidden
    for _ in range(2):
        found = torch.autograd.grad(total, (gate_up, weight), retain_graph=True)
        assert all(map(torch.allclose, found, expected)) and source.read is None


def test_a_change_between_the_passes_is_noticed() -> None:
    """No gradient of other weights is computed, as without hooks."""
    for mode in ("none", "selective"):
        model = build("bf16", mode)
        loss = loss_of(model)
        with torch.no_grad():
            model.layers[6].mlp.down_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_gradients_of_down_proj_only(recipe: str) -> None:
    """SwiGLU's backward in that block, which would read what was made again, does not come."""
    found = []
    for mode in ("none", "selective"):
        model = build(recipe, mode)
        loss_of(model).backward()
        weights = [model.layers[layer].mlp.down_proj.weight for layer in (2, 6)]
        found.append(torch.autograd.grad(loss_of(model, 1), weights))
    assert all(map(torch.equal, *found))


def test_a_node_that_nothing_reads_keeps_its_input_itself() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert_same_bits("_swiglu(x)", _swiglu(x), elementwise.swiglu(x))
    assert save_early(x).grad_fn is None
    with discarding(x):  # which came of nothing
        pass
