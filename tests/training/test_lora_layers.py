"""The layers of LoRA on rows of fused weights beside those on all rows; peft on transformers' model is the judge."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ours, randomize_adapters, theirs
from bits import assert_same_bits
from fewer import every
from judge import transformers
from torch import Tensor

from te_models import CausalLM, TEModelsForCausalLM
from te_models.fp8.primary_weights import plain, saved_weight, write_weight

peft = pytest.importorskip("peft")
lora = pytest.importorskip("te_models.training.lora")
pytestmark = [pytest.mark.filterwarnings("ignore")]

IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
PARTS = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with biases on q, k and v."""
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.1)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


def learned(model: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a few steps, and what is trained, by the end of its names."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    losses = []
    torch.manual_seed(5)  # of dropout
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.train()(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ends = {name.partition("layers.")[2]: p.detach() for name, p in trained.items()}
    return losses, ends


@pytest.mark.parametrize(
    ("fields", "dropout"),
    every(
        2,
        [
            dict(target_modules=PARTS),
            dict(target_modules=PARTS, use_dora=True),
            dict(target_modules=PARTS, use_rslora=True, init_lora_weights="gaussian"),
            dict(target_modules=PARTS, rank_pattern={"q_proj": 6}, alpha_pattern={"v_proj": 3}),
        ],
        [0.0, 0.4],
    ),
)
def test_a_run_from_the_same_seed_is_that_of_transformers(
    fields: dict[str, Any], dropout: float, base: Path
) -> None:
    """Initial values, masks of dropout, losses and updates: of a CausalLM, and of a TEModelsForCausalLM."""
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, **fields)
    found = []
    for model in (theirs(base), ours(base), TEModelsForCausalLM.wrap(ours(base))):
        add = lora.add_lora if isinstance(model, CausalLM) else peft.get_peft_model
        torch.manual_seed(3)
        found.append(learned(add(model, copy.deepcopy(config))))
    (losses, wanted), *others = found
    assert abs(losses[2] - losses[0]) > 0.01
    for own_losses, own in others:
        torch.testing.assert_close(own_losses, losses, rtol=0, atol=1e-4)
        assert own.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_layers_of_lora_are_the_same_class_everywhere(base: Path) -> None:
    """Also of adapters that come later, and around all rows of a te.Linear where others have parts of it."""
    inner = lora.add_lora(ours(base), target_modules=PARTS)
    wrapped = peft.get_peft_model(
        TEModelsForCausalLM.wrap(ours(base)), peft.LoraConfig(target_modules=["q_proj"])
    )
    wrapped.add_adapter("other", peft.LoraConfig(target_modules=PARTS))
    wrapped(input_ids=IDS)
    for model in (inner, wrapped):
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        assert len(layers) == 2 * len(PARTS)
        assert {type(layer) for layer in layers} == {lora.LoraLinear}


@pytest.mark.parametrize("order", [["qkvg_proj", "q_proj"], ["q_proj", "qkvg_proj"]])
def test_adapters_of_a_linear_and_of_its_parts(
    order: list[str], base: Path, tmp_path: Path
) -> None:
    """Both at once, merged one by one and taken out again, saved and loaded."""
    model = ours(base)
    plain_logits = model(IDS).logits
    names = {name for name, _ in model.named_parameters()}
    adapted = lora.add_lora(model, r=3, target_modules=order[:1]).eval()
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=order[1:]))
    randomize_adapters(adapted)
    expected = {}
    for name in ("default", "other"):
        adapted.set_adapter(name)
        expected[name] = adapted(IDS).logits
    assert (expected["default"] - expected["other"]).abs().max() > 0.05
    adapted.save_pretrained(tmp_path)
    adapted.base_model.set_adapter(["default", "other"])
    both = adapted(IDS).logits
    for name in ("default", "other"):
        adapted.merge_adapter([name])
    adapted.unmerge_adapter()
    assert_same_bits("unmerged", adapted(IDS).logits, both)
    adapted.merge_adapter()
    torch.testing.assert_close(adapted(IDS).logits, both, rtol=0, atol=1e-4)
    again = copy.deepcopy(adapted)
    again.unmerge_adapter()
    assert_same_bits("a copy", again(IDS).logits, both)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, both, rtol=0, atol=1e-4)
    assert {name for name, _ in merged.named_parameters()} == names
    assert not [name for name, _ in merged.named_modules() if "q_proj" in name.split(".")]
    for name, folder in (("default", tmp_path), ("other", tmp_path / "other")):
        loaded = lora.load_lora(ours(base), folder)
        assert_same_bits(name, loaded(IDS).logits, expected[name])
    without = loaded.unload()
    assert_same_bits("without", without(IDS).logits, plain_logits)


@pytest.mark.parametrize("kind", ["linear", "cat", "svd"])
def test_a_weighted_sum_of_adapters(kind: str, base: Path, tmp_path: Path) -> None:
    """peft's tuner makes it of the layers, as it does of those on the model of transformers."""
    adapted = lora.add_lora(ours(base), r=3, target_modules=PARTS).eval()
    adapted.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=5, target_modules=PARTS))
    randomize_adapters(adapted)
    adapted.save_pretrained(tmp_path)
    judge = peft.PeftModel.from_pretrained(theirs(base), tmp_path)
    judge.load_adapter(tmp_path / "other", "other")
    found = []
    for model in (judge, adapted):
        sum_of = dict(adapters=["default", "other"], weights=[0.7, 0.4], adapter_name="sum")
        model.add_weighted_adapter(**sum_of, combination_type=kind)
        model.set_adapter("sum")
        found.append(model.eval()(IDS).logits)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_merged_rows_of_an_fp8_weight_are_rounded_once(recipe: str) -> None:
    """However many parts are merged into a weight, one after the other: as if all came at once."""
    shape = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    torch.manual_seed(0)
    model = CausalLM.from_preset(
        "gated-nano", recipe=recipe, fp8_params=True, device="cpu", **shape, **edges
    )
    before = saved_weight(model.layers[0].self_attn.qkvg_proj.weight)
    targets = ["q_proj", "k_proj", "v_proj", "g_proj"]
    adapted = lora.add_lora(model, r=4, target_modules=targets)
    randomize_adapters(adapted, std=0.2)
    linear = model.layers[0].self_attn.qkvg_proj.base_layer
    exact = plain(linear.weight).float().clone()
    for layer in (model.layers[0].self_attn.get_submodule(name) for name in targets):
        place = layer.base_layer.place
        place.load(exact, place.save(exact) + layer.get_delta_weight("default"))
    adapted.merge_adapter()
    found = {name: tensor.clone() for name, tensor in saved_weight(linear.weight).items()}
    adapted.unmerge_adapter()
    for name, tensor in saved_weight(linear.weight).items():
        assert_same_bits(name, tensor, before[name])
    write_weight(linear.weight, exact, for_master=False)
    for name, tensor in saved_weight(linear.weight).items():
        assert_same_bits(name, tensor, found[name])


def test_a_generation_may_come_before_the_first_step() -> None:
    """Samples before training run in inference mode, whose tensors no backward may use."""
    model = CausalLM.from_preset("gated-nano", device="cpu", num_hidden_layers=1)
    adapted = lora.add_lora(model, r=2, target_modules=["q_proj", "up_proj"])
    ids = torch.arange(32)[None]
    with torch.inference_mode():
        adapted(ids)
    adapted(ids, labels=ids).loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_a_hook_that_only_looks_changes_no_output(base: Path, dora: bool) -> None:
    """It is called for every layer with an adapter; FP32 sums in another order are all that may differ."""
    model = lora.add_lora(ours(base), r=4, target_modules=PARTS, use_dora=dora).eval()
    randomize_adapters(model)
    with torch.no_grad():
        expected = model(IDS).logits
    called = set()
    for name, module in model.named_modules():
        if name.endswith(tuple(PARTS)) and hasattr(module, "lora_A"):
            module.register_forward_pre_hook(lambda module, inputs, name=name: called.add(name))
    with torch.no_grad():
        found = model(IDS).logits
    assert len(called) == len(PARTS) * SHAPE["num_hidden_layers"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
