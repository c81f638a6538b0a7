"""The model in third-party tools: peft's LoRA with merge and unmerge, transformers.Trainer, accelerate."""

import warnings
from pathlib import Path
from typing import Any

import kinds
import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from graph_tape import pretend_cuda
from torch import Tensor

from te_models import CausalLM
from te_models.errors import CheckpointError
from te_models.fp8.primary_weights import is_quantized, plain, saved_weight
from te_models.fp8.scaling_state import fp8_state, weight_scale
from te_models.saving.folder import load_folder, save_folder

for package in ("peft", "accelerate", "transformers"):
    pytest.importorskip(package)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    from te_models.training.lora import LoraLinear, add_lora, load_lora, save_lora

SHAPE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64)
ENGINES = ["emulated", pytest.param("native", marks=pytest.mark.gpu)]
RECIPES = ["bf16", "delayed", "current", "blockwise"]


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> Any:
    def make(recipe: str = "current", **options: Any) -> CausalLM:
        torch.manual_seed(1)
        place = dict(
            engine=request.param,
            device="cuda" if request.param == "native" else "cpu",
            compile=False,
        )
        # A linear with adapters takes BF16, so the others must for outputs to be equal.
        place["fused"] = False
        return CausalLM.from_preset("gated-nano", recipe=recipe, **{**SHAPE, **place, **options})

    return make


def tokens(model: CausalLM | None = None, seed: int = 0) -> Tensor:
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
    return ids if model is None else ids.to(model.device)


def train(model: Any, ids: Tensor, steps: int = 5) -> list[float]:
    """Losses of a few steps on the trainable parameters."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        loss = model.train()(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_start_at_zero_and_only_they_train(build: Any, recipe: str) -> None:
    model = build(recipe)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = tokens(model)
    before = model.eval()(ids).logits
    adapted = add_lora(model, r=4, lora_alpha=8)
    assert torch.equal(adapted.eval()(ids).logits, before)
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 * 4 * 2 and all(".lora_" in name for name in trainable)
    losses = train(adapted, ids)
    assert min(losses) < losses[0] - 0.1  # the steps are large
    for name, p in adapted.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(
                p, frozen[name.removeprefix("base_model.model.").replace("base_layer.", "")]
            ), name


@pytest.mark.parametrize("preset", ["gated-hybrid-nano", "gated-moe-nano"])
def test_every_linear_of_a_block_gets_an_adapter_but_no_expert_and_no_router(preset: str) -> None:
    torch.manual_seed(1)
    model = CausalLM.from_preset(preset, recipe="current", device="cpu")
    adapted = add_lora(model, r=2)
    layers = [name for name, module in adapted.named_modules() if isinstance(module, LoraLinear)]
    kinds = {name.rsplit(".", 1)[-1] for name in layers}
    own = {"shared_gate", "shared_gate_up_proj", "shared_down_proj"}
    if preset == "gated-hybrid-nano":
        own = {"gate_up_proj", "down_proj", "qkvz_proj", "ba_proj", "out_proj"}
    assert kinds == {"qkvg_proj", "o_proj"} | own
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trainable == model.plan_memory(batch_size=1, seq_len=16, lora_rank=2).num_trained


@pytest.mark.parametrize("experts", [False, True])
def test_the_memory_plan_of_a_model_with_adapters_is_of_their_training(experts: bool) -> None:
    model = CausalLM.from_preset("gated-moe-nano", recipe="bf16", device="cpu", num_hidden_layers=1)
    size = dict(batch_size=2, seq_len=32)
    whole = model.plan_memory(**size).to_dict()
    of_adapters = model.plan_memory(**size, lora_rank=6, lora_experts=experts).to_dict()
    targets = ["all-linear", "experts"] if experts else "all-linear"
    add_lora(model, r=4, target_modules=targets, rank_pattern={"down_proj": 6, "o_proj": 6})
    assert model.plan_memory(**size).to_dict() == of_adapters
    assert model.plan_memory(**size, lora_rank=0).to_dict() == whole != of_adapters


def test_dropout_is_applied_to_the_input_of_the_adapter_in_training(build: Any) -> None:
    adapted = add_lora(build("bf16", dtype=torch.float32), r=4, lora_alpha=8, lora_dropout=0.5)
    layer = next(module for module in adapted.modules() if isinstance(module, LoraLinear))
    a, b = (layer.get_parameter(f"lora_{side}.default.weight") for side in "AB")
    torch.nn.init.normal_(b)
    x = torch.randn(8, a.shape[1], device=b.device)
    for training in (True, False):
        layer.train(training)
        torch.manual_seed(3)
        found = layer(x)
        torch.manual_seed(3)
        expected = (
            layer.base_layer(x) + F.linear(F.linear(F.dropout(x, 0.5, training), a), b) * 8 / 4
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_is_the_same_model_and_unmerge_undoes_it(build: Any, dtype: torch.dtype) -> None:
    model = build("bf16", dtype=dtype)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = tokens(model)
    plain = model.eval()(ids).logits.float()
    adapted = add_lora(model, r=4, lora_alpha=8, target_modules=["qkvg_proj", "down_proj"])
    train(adapted, ids)
    tuned = adapted.eval()(ids).logits.float()
    assert (tuned - plain).abs().max() > 0.1
    adapted.merge_adapter()
    exact = (
        1e-5 if model.engine == "emulated" else 2e-3
    )  # Transformer Engine multiplies FP32 as TF32
    tolerance = exact if dtype == torch.float32 else 0.1
    torch.testing.assert_close(adapted(ids).logits.float(), tuned, atol=tolerance, rtol=0)
    assert (adapted(ids).logits.float() - plain).abs().max() > 0.1
    adapted.unmerge_adapter()
    assert torch.equal(adapted(ids).logits.float(), tuned)
    with adapted.disable_adapter():
        assert torch.equal(adapted(ids).logits.float(), plain)
    adapted.merge_adapter(safe_merge=True)
    with adapted.disable_adapter():
        assert torch.equal(adapted(ids).logits.float(), plain), "switching off undoes a merge"
    merged = adapted.merge_and_unload()
    assert isinstance(merged, CausalLM) and {n for n, _ in merged.named_parameters()} == set(
        weights
    )
    assert all(parameter.requires_grad for parameter in merged.parameters()), "as before add_lora"
    torch.testing.assert_close(merged(ids).logits.float(), tuned, atol=tolerance, rtol=0)


def test_a_merge_of_tiny_weights_leaves_a_finite_scale(build: Any) -> None:
    adapted = add_lora(
        build("delayed", dtype=torch.float32), r=4, lora_alpha=8, target_modules=["down_proj"]
    )
    train(adapted, tokens(adapted), 1)
    layers = [m for m in adapted.modules() if isinstance(m, LoraLinear)]
    with torch.no_grad():
        for layer in layers:
            layer.get_parameter("lora_B.default.weight").zero_()
            layer.get_parameter("base_layer.weight").mul_(1e-37)
    adapted.merge_adapter()
    scales = [scale for layer in layers if (scale := weight_scale(layer.base_layer)) is not None]
    assert scales and all(scale.item() == torch.finfo(torch.float32).max for scale in scales)


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_a_merge_into_fp8_weights_takes_fresh_scales(build: Any, recipe: str) -> None:
    model = build(recipe, fp8_params=True)
    adapted = add_lora(model, r=4, lora_alpha=8, target_modules=["qkvg_proj", "down_proj"])
    train(adapted, tokens(model), 2)
    layers = [
        m
        for m in adapted.modules()
        if isinstance(m, LoraLinear) and is_quantized(m.base_layer.weight)
    ]
    assert len(layers) == 4
    for layer in layers:
        torch.nn.init.normal_(
            layer.lora_B["default"].weight, std=0.1
        )  # many times the weight itself
    before = [
        {name: t.clone() for name, t in saved_weight(m.base_layer.weight).items()} for m in layers
    ]
    exact = [plain(m.base_layer.weight).float() + m.get_delta_weight("default") for m in layers]
    adapted.merge_adapter()
    for layer, wanted in zip(layers, exact, strict=True):
        # A rounding to BF16 and one to E4M3, whose half step is 2^-4 of a number at most.
        error = (plain(layer.base_layer.weight).float() - wanted).norm() / wanted.norm()
        assert error < 2**-4 + 2**-8, f"{recipe}: {error:.3f}"
    adapted.unmerge_adapter()
    for layer, wanted in zip(layers, before, strict=True):
        for name, tensor in saved_weight(layer.base_layer.weight).items():
            assert_same_bits(f"{recipe}: {name}", tensor, wanted[name])


def test_a_broken_adapter_is_not_merged(build: Any) -> None:
    model = build("bf16")
    adapted = add_lora(model, r=4)
    layer = model.layers[1].mlp.down_proj
    weight = layer.base_layer.weight.detach().clone()
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(float("inf"))
        layer.lora_A["default"].weight.fill_(1.0)
    with pytest.raises(ValueError, match="not finite"):
        adapted.merge_adapter(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, weight)


def test_padding_and_scales_are_those_of_the_base_model(build: Any) -> None:
    """An adapter sees the padded rows as zeros, and the frozen layers update their scales as ever."""
    model = build("delayed")
    adapted = add_lora(model, r=4, lora_dropout=0.5)
    seen = []
    model.layers[1].mlp.down_proj.register_forward_hook(
        lambda m, inputs, out: seen.append(inputs[0][15:].abs().max())
    )
    adapted.train()(tokens(model)[:1, :15], labels=tokens(model)[:1, :15]).loss.backward()
    assert (
        seen[0] == 0 and len([n for n in fp8_state(model) if n.endswith("fwd.amax_history")]) == 8
    )


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_an_adapted_model_generates_replayed_as_eagerly(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = CausalLM.from_preset(
        "gated-nano", recipe=recipe, device="cpu", engine="emulated", **SHAPE
    )
    plain = model.generate([1, 2, 3], max_new_tokens=6)
    adapted = add_lora(model, r=4, lora_alpha=8)
    train(adapted, tokens(model))
    eager = adapted.generate([1, 2, 3], max_new_tokens=6)
    assert not torch.equal(eager, plain)
    tapes = pretend_cuda(monkeypatch)
    assert torch.equal(adapted.generate([1, 2, 3], max_new_tokens=6, cuda_graph=True), eager)
    assert tapes[0].replays == 4
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate([1, 2, 3], max_new_tokens=6, cuda_graph=True), plain)
    adapted.eval()  # in training no graph is left for the next generation
    for _ in range(2):
        replayed = adapted.generate([1, 2, 3], max_new_tokens=6, cuda_graph=True)
        assert torch.equal(replayed, eager)
        with adapted.disable_adapter():
            replayed = adapted.generate([1, 2, 3], max_new_tokens=6, cuda_graph=True)
            assert torch.equal(replayed, plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_merged_adapter_that_is_switched_off_for_a_generation(recipe: str, build: Any) -> None:
    """It is unmerged in the first pass, which must not read the weights quantized for the generation before."""
    model = build(recipe)
    ids = tokens(model)
    adapted = add_lora(model, r=4, lora_alpha=8).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    with adapted.disable_adapter():
        wanted = adapted.generate(input_ids=ids, max_new_tokens=6, eos_token_id=None)
    adapted.merge_adapter()
    merged = adapted.generate(input_ids=ids, max_new_tokens=6, eos_token_id=None)
    assert not torch.equal(merged, wanted)
    with adapted.disable_adapter():
        off = adapted.generate(input_ids=ids, max_new_tokens=6, eos_token_id=None)
    assert_same_bits("tokens", off, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_on_transformer_engine_itself(recipe: str) -> None:
    """Frozen FP8 layers under training adapters: gradients, scales, merging and a captured decode, on a GPU."""
    torch.manual_seed(1)
    model = CausalLM.from_preset(
        "gated-nano", recipe=recipe, device="cuda", engine="native", **SHAPE
    )
    adapted = add_lora(model, r=4, lora_alpha=8)
    ids = tokens(model)
    losses = train(adapted, ids, steps=8)
    assert min(losses) < losses[0] - 0.1  # the steps are large
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for p in adapted.parameters()
        if p.requires_grad
    )
    scales = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    assert bool(scales) == (recipe == "delayed")
    found = [tensor for name, tensor in scales.items() if "fwd.scale" in name]
    assert all(tensor.isfinite().all() and (tensor != 1).any() for tensor in found)
    eager = adapted.generate(ids[:, :5], max_new_tokens=12, cuda_graph=False)
    assert torch.equal(adapted.generate(ids[:, :5], max_new_tokens=12, cuda_graph=True), eager)
    assert all(torch.equal(tensor, scales[name]) for name, tensor in fp8_state(model).items())
    tuned = adapted.eval()(ids).logits.float()
    adapted.merge_adapter()
    merged = adapted(ids).logits.float()
    assert (merged - tuned).norm() < 0.15 * tuned.norm(), "two FP8 noises of about 20 dB apart"
    adapted.unmerge_adapter()
    assert torch.equal(adapted(ids).logits.float(), tuned)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_merged_weight_has_a_scale_of_its_own(recipe: str) -> None:
    """The sum may be larger than the weight that the scale was made for; saturated, the logits are 30 % off."""
    torch.manual_seed(1)
    model = CausalLM.from_preset("gated-nano", recipe=recipe, device="cpu", **SHAPE)
    adapted, ids = add_lora(model, r=4, lora_alpha=8), tokens(model)
    train(adapted, ids, steps=8)
    tuned, scales = (
        adapted.eval()(ids).logits.float(),
        {k: v.clone() for k, v in fp8_state(model).items()},
    )
    adapted.merge_adapter()
    merged = adapted(ids).logits.float()
    assert (merged - tuned).norm() < 0.15 * tuned.norm(), "two FP8 noises of about 20 dB apart"
    adapted.unmerge_adapter()
    assert_same_bits("logits", adapted(ids).logits.float(), tuned)
    for name, scale in fp8_state(model).items():
        assert_same_bits(name, scale, scales[name])


def test_a_feature_that_is_off_is_off(build: Any, tmp_path: Path) -> None:
    save_lora(add_lora(build("bf16"), r=4), tmp_path / "adapter")
    saved = load_folder(tmp_path / "adapter")
    off = dict.fromkeys(
        ("trainable_token_indices", "layer_replication", "use_bdlora", "eva_config"), False
    )
    config = {**saved.documents["adapter_config"], **off}
    save_folder(
        tmp_path / "off",
        {"adapter_model": saved.tensors["adapter_model"]},
        {"adapter_config": config},
    )
    load_lora(build("bf16"), tmp_path / "off")


def test_a_pickle_is_no_adapter(build: Any, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="pickle"):
        load_lora(build("bf16"), tmp_path)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_frozen_linears_are_calibrated(mode: str, build: Any) -> None:
    """New adapters compute zero, so operands are those of the model without them. Their dropout uses up no numbers."""
    edges = dict(
        num_layers_at_start_in_bf16=0
    )  # so that nothing before the first linear is trained
    plain, model = (
        build("delayed", **edges),
        build("delayed", activation_checkpointing=mode, **edges),
    )
    adapted = add_lora(model, r=4, lora_dropout=0.5)
    before = torch.get_rng_state()
    plain.train().calibrate(dict(input_ids=tokens(plain), labels=tokens(plain)))
    adapted.train().calibrate(dict(input_ids=tokens(plain), labels=tokens(plain)))
    assert torch.equal(torch.get_rng_state(), before) and all(
        p.grad is None for p in model.parameters()
    )
    found = {name.replace(".base_layer", ""): tensor for name, tensor in fp8_state(model).items()}
    assert found
    last_bits = 0 if model.device.type == "cpu" else 2.0**-6  # cuDNN's attention adds in any order
    for name, tensor in fp8_state(plain).items():
        torch.testing.assert_close(found[name], tensor, rtol=last_bits, atol=0)


def test_mixers_beside_each_other_are_adapted_by_default() -> None:
    model = kinds.build(kinds.KINDS["Mamba 2 beside attention"])
    names = {name for name, linear in model.config.linears.items() if linear.adapted}
    adapted = add_lora(model, r=2)
    found = {
        name.removeprefix("base_model.model.")
        for name, p in adapted.named_parameters()
        if p.requires_grad
    }
    assert {name.partition(".lora_")[0] for name in found} == names
    assert set(adapted.peft_config["default"].target_modules) == names
