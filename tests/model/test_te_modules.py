"""Every parameter belongs to a te.Linear, a te.RMSNorm or the embedding, and their own `forward` computes with it.

Except the taps and decays of linear attention, and attention's sinks, with which the mixer itself computes; the factor
of a block's output in Gemma 4; and the product of a router in FP32, for which te.Linear has no dtype of its own.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fewer import every, some
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_models import CausalLM, ModelConfig, get_preset, list_presets
from te_models.config.fields import PER_LAYER
from te_models.kernels.elementwise import gate
from te_models.model.attention import GatedAttention
from te_models.model.block import Block
from te_models.model.convolution import Taps
from te_models.model.deltanet import GatedDeltaNet
from te_models.model.kda import KimiDeltaAttention
from te_models.model.mamba2 import GroupNorm, Mamba2
from te_models.model.moe import Experts

ENGINES = ["emulated", pytest.param("native", marks=pytest.mark.gpu)]
SMALL: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None, rope_scaling=None,
)  # fmt: skip


def three_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields with a value per layer, of the three layers in a row (the last such) that differ most."""
    fields = {name: value for name in PER_LAYER if (value := getattr(config, name))}
    if not fields:
        return {}
    layers = list(zip(*fields.values(), strict=True))
    most = max(range(len(layers) - 2), key=lambda n: (len(set(layers[n : n + 3])), n))
    found = {name: value[most : most + 3] for name, value in fields.items()}
    if config.shared_key_layers is not None:  # the last reuses the keys of the first
        found |= dict(shared_key_layers=(0, 0, 1))
        found["layer_types"] = ("sliding_attention", "full_attention", "sliding_attention")
    return found


def small(preset: str, engine: str, recipe: str = "bf16", **options: Any) -> CausalLM:
    """A preset with all of its options and three layers of small sizes."""
    config = get_preset(preset)
    per_layer = three_layers(config)
    if config.moe is not None:  # all of them chosen, so that each has tokens
        few = dict(num_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1)
        options.setdefault("moe", dataclasses.replace(config.moe, **few))
    sizes = dict(SMALL)
    if config.latent_attention is not None:  # a key per query head, of which some channels rotate
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes["head_dim"] = config.latent_attention.qk_rope_head_dim
    place = dict(device="cuda" if engine == "native" else "cpu", engine=engine, compile=False)
    torch.manual_seed(1)
    return CausalLM.from_preset(
        preset,
        **sizes,
        **per_layer,
        num_hidden_layers=3,
        recipe=recipe,
        fused=False,
        **place,
        **options,
    )


# Modules of recurrent layers with taps, decays and a norm that is one operation with its gate; experts with numbers for
# their choice; attention with sinks; and blocks with a factor.
BESIDE = (
    Block,
    Experts,
    GatedAttention,
    GatedDeltaNet,
    GroupNorm,
    KimiDeltaAttention,
    Mamba2,
    Taps,
)


def owners(model: CausalLM) -> dict[str, nn.Module]:
    """The modules that have parameters of their own, without linear attention's."""
    found = {
        name: m
        for name, m in model.named_modules()
        if next(m.parameters(recurse=False), None) is not None
    }
    return {name: m for name, m in found.items() if not isinstance(m, BESIDE)}


def routers_in_fp32(model: CausalLM) -> list[str]:
    """Return the names of routers whose product is computed in FP32, not by their own `forward`."""
    moe = model.config.moe
    if moe is None or not moe.router_fp32:
        return []
    return [name for name, _ in model.named_modules() if name.endswith(".router")]


def memory(tensor: Tensor) -> range:
    """The addresses from a tensor's first byte to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return range(tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size())


class Uses(TorchDispatchMode):
    """Return which module ran while an operation read a parameter: {(parameter's name, module's name)}.

    Memory is compared, so that a view, a slice or a cast in place of a parameter is seen too.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.names = {id(m): name for name, m in model.named_modules()}
        # Experts' weights lie one after the other in one storage.
        self.parameters: dict[int, list[tuple[range, str]]] = {}
        for name, p in model.named_parameters():
            self.parameters.setdefault(p.untyped_storage().data_ptr(), []).append((memory(p), name))
        self.running = [""]
        self.found: set[tuple[str, str]] = set()
        for module in model.modules():
            module.register_forward_pre_hook(lambda m, *_: self.running.append(self.names[id(m)]))
            module.register_forward_hook(lambda *_: self.running.pop() and None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.numel() == 0:
                continue
            read = memory(leaf)
            for owned, name in self.parameters.get(leaf.untyped_storage().data_ptr(), []):
                if read.start < owned.stop and owned.start < read.stop:
                    self.found.add((name, self.running[-1]))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the calls of the classes' own `forward` by the module's name."""
    calls: Counter[str] = Counter()
    names = {id(m): name for name, m in model.named_modules()}
    with monkeypatch.context() as patch:
        norms = (model.te.RMSNorm, model.te.LayerNormWithoutBias)
        for kind in (*model.te.LINEARS, *norms, nn.Embedding):
            own = kind.forward

            def forward(self: nn.Module, *args: Any, own: Any = own, **options: Any) -> Any:
                calls[names[id(self)]] += 1
                return own(self, *args, **options)

            patch.setattr(kind, "forward", forward)
        yield calls


def tokens(model: CausalLM) -> Tensor:
    return torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0)).to(
        model.device
    )


@pytest.mark.parametrize("preset", every(12, list_presets()))
def test_parameters_belong_to_te_modules_and_the_embedding(preset: str) -> None:
    """At full size, without memory. Nothing else has values: no buffers, and no tensors among attributes."""
    model = CausalLM.from_preset(preset, device="meta", engine="emulated")
    allowed = {
        model.te.Linear: "proj lm_head router shared_gate",
        model.te.RMSNorm: "norm layernorm",
        nn.Embedding: "embed_tokens layer_inputs.table",
    }
    allowed |= {model.te.GroupedLinear: "proj"} if model.config.moe is not None else {}
    if model.config.norm_type == "layer":
        allowed[model.te.LayerNormWithoutBias] = allowed.pop(model.te.RMSNorm)
    found = owners(model)
    assert {type(module) for module in found.values()} == set(allowed)
    for name, module in found.items():
        assert name.endswith(tuple(allowed[type(module)].split())), name
    assert not list(model.buffers())
    for name, module in model.named_modules():
        if name not in found:
            assert not [key for key, value in vars(module).items() if isinstance(value, Tensor)], (
                name
            )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("preset", "recipe"),
    some(10, zip(list_presets(), itertools.cycle(["bf16", "delayed"]), strict=False)),
)
def test_the_forward_of_each_runs_once(
    preset: str, recipe: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pass with logits. In one for the loss alone the head and the loss are one operation, fused or not."""
    model = small(preset, engine, recipe)
    every = dict.fromkeys(owners(model), 1) | {"lm_head": 1}  # a tied table belongs to two modules
    for name in routers_in_fp32(model):
        del every[name]
    ids = tokens(model)
    model(
        ids, labels=ids
    )  # delayed scaling has the scales of these tokens afterwards, in both passes below
    with counted(model, monkeypatch) as calls:
        output = model(ids, labels=ids)
        assert calls == every
        output.loss.backward()
        assert calls == every, "a backward without recompute runs no forward"
    with counted(model, monkeypatch) as calls:
        alone = model(ids, labels=ids, return_logits=False)
        assert calls == {name: count for name, count in every.items() if name != "lm_head"}
    assert alone.loss.item() == pytest.approx(output.loss.item(), rel=2e-3)


@pytest.mark.parametrize("preset", every(6, list_presets()[::-1]))
def test_only_te_modules_compute_with_weights(preset: str) -> None:
    model = small(preset, "emulated")
    ids = tokens(model)
    uses = Uses(model)
    with uses, torch.no_grad():
        model(ids)
    table = {"embed_tokens.weight"} if model.config.tie_word_embeddings else set()
    expected = set()
    routers = routers_in_fp32(model)
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in routers:  # experts compute with it, and are themselves no module that is called
            owner = owner.rpartition(".")[0]
        if isinstance(
            model.get_submodule(owner), (Experts, GroupNorm, Taps)
        ):  # which the module around them reads
            owner = owner.rpartition(".")[0]
        expected.add((name, owner))
    assert uses.found == expected | {(name, "lm_head") for name in table}


def test_the_check_sees_a_module_that_computes_with_a_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small("gated-nano", "emulated")
    uses, attention = Uses(model), model.layers[1].self_attn
    own = type(attention).forward

    def forward(self: Any, x: Tensor, context: Any) -> Tensor:
        return gate(own(self, x, context), self.qkvg_proj.weight[:1, :64] * 0)

    monkeypatch.setattr(type(attention), "forward", forward)
    with uses, torch.no_grad():
        model(tokens(model))
    assert ("layers.1.self_attn.qkvg_proj.weight", "layers.1.self_attn") in uses.found
