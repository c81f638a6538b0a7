"""peft's own adapters on a TEModelsForCausalLM: named, computed and saved as on the model of transformers."""

import ast
import copy
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from hf_models import make_theirs
from places import PLACE
from torch import Tensor

from te_models import CausalLM, TEModelsForCausalLM
from te_models.errors import CheckpointError, UsageError
from te_models.fp8.kept_weights import forget_kept_weights
from te_models.interop.hf_expert_families import dropped_by_peft
from te_models.interop.hf_families import FAMILIES

pytest.importorskip("transformers", minversion="5.14")
peft = pytest.importorskip("peft")
lora = pytest.importorskip("te_models.training.lora")
pytestmark = [pytest.mark.filterwarnings("ignore")]

IDS = torch.randint(12, 60, (2, 11), generator=torch.Generator().manual_seed(0))
CLOSE: dict[str, Any] = dict(rtol=0, atol=1e-4)  # logits of FP32 with entries of up to 30
TARGETS: dict[str, dict[str, Any]] = {
    "one": dict(target_modules=["q_proj"]),
    "attention": dict(target_modules=["q_proj", "v_proj", "o_proj"]),
    "some": dict(target_modules=["v_proj", "o_proj", "up_proj"]),
    "all": dict(target_modules="all-linear"),
    "pattern": dict(target_modules=r".*\.1\.self_attn\.[qk]_proj"),
    "unequal": dict(
        target_modules=["k_proj", "q_proj", "down_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"down_proj": 3},
    ),
}
# What a CausalLM does not take. Trained whole, a tied embedding leaves the head its own table, not the copy.
OF_PEFT: dict[str, dict[str, Any]] = {
    "dora": dict(target_modules=["v_proj", "o_proj", "up_proj"], use_dora=True),
    "embedding": dict(target_modules=["embed_tokens", "k_proj"]),
    "whole norm": dict(target_modules=["q_proj"], modules_to_save=["norm"]),
    "whole table": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "whole linear": dict(target_modules=["q_proj"], modules_to_save=["down_proj"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "whole head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices=[12, 40]),
}


def config(case: str = "all", **fields: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, **{**TARGETS, **OF_PEFT}[case], **fields)


def trainable(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def fill(*models: Any) -> None:
    """Give trainable parameters random values that depend on their names."""
    for model in models:
        for name, parameter in trainable(model).items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def load(folder: Path, **options: Any) -> TEModelsForCausalLM:
    return TEModelsForCausalLM.from_pretrained(folder, device="cpu", **options)


def assert_trained_alike(theirs: Any, ours: Any) -> Tensor:
    """Compare names, logits and the gradients of what is trained; return the logits."""
    assert trainable(ours).keys() == trainable(theirs).keys()
    outputs = [model(input_ids=IDS, labels=IDS) for model in (theirs, ours)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, **CLOSE)
    for model, output in zip((theirs, ours), outputs, strict=True):
        model.zero_grad()
        output.loss.backward()
    for name, parameter in trainable(theirs).items():
        torch.testing.assert_close(
            trainable(ours)[name].grad, parameter.grad, rtol=1e-3, atol=1e-4, msg=name
        )
    return outputs[0].logits.detach()


# peft takes the MLP of a Qwen3-Next in transformers for experts.
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param("qwen3-next", "one", marks=pytest.mark.slow),
        ("qwen3-next", "attention"),
        ("gemma2", "embedding"),
        *every(9, ("llama", "gemma2", "qwen3-tied"), TARGETS),
        *every(2, ["qwen3-tied"], OF_PEFT),
    ],
)
def test_adapters_are_those_on_the_model_of_transformers(
    family: str, targets: str, pair: Callable[..., Any], tmp_path: Path
) -> None:
    """Names, logits, gradients, and the saved file, which each reads from the other."""
    models = pair(family)
    theirs = peft.get_peft_model(copy.deepcopy(models.theirs), config(targets))
    ours = peft.get_peft_model(load(models.folder), config(targets))
    fill(theirs, ours)
    logits = assert_trained_alike(theirs, ours)
    assert (logits - models.theirs(IDS).logits).abs().max() > 0.01
    assert torch.equal(
        pickle.loads(pickle.dumps(ours))(input_ids=IDS).logits, ours(input_ids=IDS).logits
    )
    theirs.save_pretrained(tmp_path / "theirs")
    again = peft.PeftModel.from_pretrained(
        load(models.folder), tmp_path / "theirs", is_trainable=True
    )
    assert_trained_alike(theirs, again)
    ours.save_pretrained(tmp_path)
    for base in (copy.deepcopy(models.theirs), load(models.folder)):
        again = peft.PeftModel.from_pretrained(base, tmp_path)
        torch.testing.assert_close(again(input_ids=IDS).logits, logits, **CLOSE)
        found = again.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert torch.equal(found[:, :11], IDS) and found.shape == (2, 16)
    if targets in TARGETS:
        inner = CausalLM.from_pretrained(models.folder, device="cpu")
        torch.testing.assert_close(lora.load_lora(inner, tmp_path)(IDS).logits, logits, **CLOSE)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_adapters_are_merged_switched_off_and_unloaded(
    family: str, safe: bool, pair: Callable[..., Any]
) -> None:
    models = pair(family)
    plain = models.theirs(IDS).logits
    ours = peft.get_peft_model(load(models.folder), config("attention"))
    fill(ours)
    tuned = ours.eval()(input_ids=IDS).logits
    names = set(models.ours.state_dict())
    with ours.disable_adapter():
        torch.testing.assert_close(ours(input_ids=IDS).logits, plain, **CLOSE)
    ours.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(ours(input_ids=IDS).logits, tuned, **CLOSE)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(input_ids=IDS).logits, tuned, **CLOSE)
    merged = ours.merge_and_unload(safe_merge=safe)
    assert isinstance(merged, TEModelsForCausalLM) and set(merged.state_dict()) == names
    torch.testing.assert_close(merged(IDS).logits, tuned, **CLOSE)
    again = peft.get_peft_model(load(models.folder), config("attention"))
    fill(again)
    torch.testing.assert_close(again.unload()(IDS).logits, plain, **CLOSE)


def test_a_merge_between_generations_is_quantized(build: Callable[..., CausalLM]) -> None:
    """The first generation keeps its FP8 weights, and peft merges by operations that count no version."""
    model = TEModelsForCausalLM.wrap(build("current", num_layers_at_start_in_bf16=0))
    ours = peft.get_peft_model(model, config("some")).eval()

    def logits() -> Tensor:
        options = dict(max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
        return torch.stack(ours.generate(input_ids=IDS[:1], **options).logits)

    before = logits()
    fill(ours)
    assert not torch.equal(logits(), before)
    for change in (ours.merge_adapter, ours.unmerge_adapter):
        logits()
        change()
        found = logits()
        forget_kept_weights(model.model)
        assert torch.equal(found, logits())
    with ours.disable_adapter():
        torch.testing.assert_close(logits(), before, rtol=0, atol=0.1)  # merging rounds to BF16


@pytest.mark.parametrize(
    "recipe, mode", [("bf16", "full"), ("delayed", "none"), ("current", "selective")]
)
def test_adapters_on_gated_layers_under_a_recipe(
    recipe: str, mode: str, build: Callable[..., CausalLM], tmp_path: Path
) -> None:
    """The gate is a linear too; the judge are our own adapters of the same file, without recompute."""
    edges = (
        dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0) if recipe != "bf16" else {}
    )
    ours = peft.get_peft_model(
        TEModelsForCausalLM.wrap(build(recipe, activation_checkpointing=mode, **edges)),
        config(),
        autocast_adapter_dtype=False,
    )
    assert any("g_proj" in name for name in trainable(ours))
    fill(ours)
    ours.save_pretrained(tmp_path)
    judge = lora.load_lora(build(recipe, **edges), tmp_path, trainable=True)
    loss, expected = ours(input_ids=IDS, labels=IDS).loss, judge(IDS, labels=IDS).loss
    torch.testing.assert_close(
        loss, expected, rtol=0, atol=2.0**-7
    )  # sums of BF16 are in another order
    loss.backward()
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in trainable(ours).values()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("targets", ["all", "some"])
def test_adapters_by_the_default_path(
    recipe: str, targets: str, build: Callable[..., CausalLM], tmp_path: Path
) -> None:
    """Transformer Engine's layers, as our own adapters of the same file compute; the loss falls."""
    options = (
        dict(PLACE, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
        if recipe != "bf16"
        else PLACE
    )
    model = TEModelsForCausalLM.wrap(build(recipe, initializer_range=0.2, **options)).eval()
    ids = IDS.to(model.device)
    plain = model(ids).logits.float()
    ours = peft.get_peft_model(model, config(targets), autocast_adapter_dtype=False)
    fill(ours)
    ours.save_pretrained(tmp_path)
    judge = lora.load_lora(build(recipe, initializer_range=0.2, **options), tmp_path)
    found, expected = ours.eval()(input_ids=ids).logits.float(), judge(ids).logits.float()
    # Our own adapters sum in another order: BF16 rounds by up to 2^-9 and E4M3 by 2^-4, which several layers add up.
    bound = 2.0**-6 if recipe == "bf16" else 2.0**-3
    assert (found - expected).norm() < bound * expected.norm() < 0.5 * (found - plain).norm()
    with torch.no_grad():
        inner, outer = ours.base_model.model.model(ids).logits, ours(input_ids=ids).logits
        torch.testing.assert_close(inner, outer, rtol=0, atol=0)
    optimizer = torch.optim.Adam(trainable(ours).values(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = ours.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) < losses[0] - 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_dora_and_merges_on_transformer_engine_itself(
    recipe: str, build: Callable[..., CausalLM]
) -> None:
    """peft's own layer for Transformer Engine's linears has neither."""
    model = TEModelsForCausalLM.wrap(build(recipe, initializer_range=0.2, **PLACE)).eval()
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    ours = lora.add_lora(model, r=4, target_modules=targets, use_dora=True)
    ids = IDS.to(model.device)
    layers = [module for module in ours.modules() if hasattr(module, "lora_A")]
    assert {type(layer) for layer in layers} == {lora.LoraLinear}
    loss = ours.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in trainable(ours).values())
    with torch.no_grad():
        for layer in layers:
            layer.lora_B["default"].weight.normal_(std=0.1)
    tuned = ours.eval()(input_ids=ids).logits.float()
    ours.merge_adapter()
    merged = ours(input_ids=ids).logits.float()
    assert (merged - tuned).norm() < 0.15 * tuned.norm(), "two FP8 noises of about 20 dB apart"
    ours.unmerge_adapter()
    assert torch.equal(ours(input_ids=ids).logits.float(), tuned)


def test_a_merge_into_fp8_weights(build: Callable[..., CausalLM]) -> None:
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    ours = peft.get_peft_model(
        TEModelsForCausalLM.wrap(build("current", fp8_params=True, **edges)), config("one")
    )
    fill(ours)
    rows = ours.base_model.model.model.layers[0].self_attn.q_proj
    expected = rows.base_layer.weight.data.float() + rows.get_delta_weight("default").float()
    ours.merge_adapter()
    # E4M3 has three mantissa bits, and subnormals of 2^-9 of a scale of amax / 448.
    torch.testing.assert_close(
        rows.base_layer.weight.data.float(),
        expected,
        rtol=2.0**-4,
        atol=float(expected.abs().max()) / 448 / 8,
    )


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("llama3", config("one"), config("some")),
        # down_proj is a module of the expert of all tokens, and here of the others too.
        (
            "laguna-experts",
            config("attention", target_parameters=["mlp.experts.gate_up_proj"]),
            config("unequal"),
        ),
    ],
)
def test_a_second_adapter_elsewhere_and_the_model_inside(
    case: str, first: Any, second: Any, tmp_path: Path
) -> None:
    """Also where the CausalLM is called, and where a copy is."""
    both = []
    for base in (make_theirs(case, tmp_path), load(tmp_path)):
        adapted = peft.get_peft_model(base, copy.deepcopy(first))
        adapted.add_adapter("other", copy.deepcopy(second))
        for name in ("default", "other"):
            adapted.set_adapter(name)
            fill(adapted)
        both.append(adapted.eval())
    theirs, ours = both
    assert trainable(ours).keys() == trainable(theirs).keys()
    ours = pickle.loads(pickle.dumps(ours))
    for name in ("other", "default"):
        theirs.set_adapter(name)
        ours.set_adapter(name)
        expected = theirs(input_ids=IDS).logits
        torch.testing.assert_close(ours(input_ids=IDS).logits, expected, **CLOSE)
        torch.testing.assert_close(ours.base_model.model.model(IDS).logits, expected, **CLOSE)
        torch.testing.assert_close(copy.deepcopy(ours)(input_ids=IDS).logits, expected, **CLOSE)


@pytest.mark.parametrize("targets", [["qkvg_proj"], ["gate_up_proj", "o_proj"], ["q_proj"], None])
def test_add_lora_takes_the_model_of_transformers(
    targets: Any, pair: Callable[..., Any], tmp_path: Path
) -> None:
    models = pair("llama")
    ours = (
        lora.add_lora(load(models.folder), r=4, target_modules=targets)
        if targets
        else lora.add_lora(load(models.folder))
    )
    assert isinstance(ours, peft.PeftModelForCausalLM)
    fill(ours)
    ours.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(models.theirs), tmp_path)
    torch.testing.assert_close(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits, **CLOSE)
    expected = {
        "qkvg_proj": {"q_proj", "k_proj", "v_proj"},
        "gate_up_proj": {"gate_proj", "up_proj"},
    }
    named = {leaf for target in targets or () for leaf in expected.get(target, {target})}
    assert not named or ours.peft_config["default"].target_modules == named


@pytest.mark.parametrize(
    ("case", "default"),
    every(
        2,
        ["hybrid-0", "qwen3_5_moe_text-linear", "qwen3_next-all", "qwen3_moe-one-key"],
        [True, False],
    ),
)
def test_adapters_of_hybrids_and_experts_are_saved(
    case: str, default: bool, tmp_path: Path
) -> None:
    """peft reads the config of the base model, whose config.json lacks fields of ours."""
    theirs = make_theirs(case, tmp_path / "base")
    ours = load(tmp_path / "base")
    ours = lora.add_lora(ours) if default else peft.get_peft_model(ours, config("one"))
    fill(ours)
    ours.save_pretrained(tmp_path / "adapter")
    judge = peft.PeftModel.from_pretrained(theirs.eval(), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = judge(input_ids=IDS).logits
        torch.testing.assert_close(ours.eval()(input_ids=IDS).logits, expected, **CLOSE)


# peft turns "all-linear" into parameters of experts and routers in qwen3_moe, mixtral, glm4_moe and qwen3_next; the
# rows of gpt_oss alternate, and its parameters are transposed, as are Llama 4's, where peft does not know it.
@pytest.mark.parametrize(("case", "targets"), [
    ("qwen3_moe-steps", "all-linear"),
    pytest.param("laguna-experts", "all-linear", marks=pytest.mark.slow),
    ("gpt_oss-all-keys", ["q_proj"]),
    ("llama4_text-types", ["q_proj"]),
    *every(6, ["deepseek_v3-groups", "glm4_moe-groups", "mixtral-all-keys", "qwen2_moe-all-keys",
               "qwen3_5_moe_text-full", "qwen3_next-steps"], ["all-linear"]),
])  # fmt: skip
def test_adapters_of_experts_and_routers_are_those_of_transformers(
    case: str, targets: Any, tmp_path: Path
) -> None:
    """A file of transformers' model: logits, gradients, merged, unmerged and saved again; load_lora reads it too."""
    theirs = make_theirs(case, tmp_path / "base")
    named = ["experts.gate_up_proj", "experts.down_proj"] if targets != "all-linear" else None
    fields = peft.LoraConfig(
        r=4, target_modules=targets, target_parameters=named, task_type="CAUSAL_LM"
    )
    judge = peft.get_peft_model(copy.deepcopy(theirs), fields).eval()
    fill(judge)
    judge.save_pretrained(tmp_path / "adapter")
    ours = peft.PeftModel.from_pretrained(
        load(tmp_path / "base"), tmp_path / "adapter", is_trainable=True
    ).eval()
    expected = assert_trained_alike(judge, ours)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(input_ids=IDS).logits, theirs(IDS).logits, **CLOSE)
    ours.save_pretrained(tmp_path / "again")
    inner = CausalLM.from_pretrained(tmp_path / "base", device="cpu")
    torch.testing.assert_close(
        lora.load_lora(inner, tmp_path / "again")(IDS).logits, expected, **CLOSE
    )
    own = ours(input_ids=IDS).logits
    ours.merge_adapter(safe_merge=True)
    torch.testing.assert_close(ours(input_ids=IDS).logits, expected, **CLOSE)
    with ours.disable_adapter():
        switched_off = ours(input_ids=IDS).logits  # in the first pass that sees the switch
    torch.testing.assert_close(switched_off, theirs(IDS).logits, **CLOSE)
    ours.merge_adapter()
    ours.unmerge_adapter()
    assert torch.equal(copy.deepcopy(ours)(input_ids=IDS).logits, own)
    merged = ours.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, expected, **CLOSE)
    assert set(merged.state_dict()) == set(load(tmp_path / "base").state_dict())


@pytest.mark.filterwarnings("error:peft (has no|takes) adapters")
@pytest.mark.parametrize(
    "case",
    every(4, ["glm4_moe-groups", "kimi_linear-plain", "granitemoehybrid-one-key", "afmoe-odd"]),
)
def test_adapters_on_weights_of_linears(case: str, tmp_path: Path) -> None:
    """Linears that peft takes for experts are named by their weights; others are elsewhere here by the same name."""
    theirs = make_theirs(case, tmp_path / "base")
    fields: dict[str, Any] = dict(r=2, target_modules="all-linear")
    inner = lora.add_lora(CausalLM.from_pretrained(tmp_path / "base", device="cpu"), **fields)
    fill(inner)
    lora.save_lora(inner, tmp_path / "adapter")
    expected = inner.eval()(IDS).logits
    ours = peft.PeftModel.from_pretrained(
        load(tmp_path / "base"), tmp_path / "adapter", is_trainable=True
    ).eval()
    judge = peft.PeftModel.from_pretrained(
        copy.deepcopy(theirs), tmp_path / "adapter", is_trainable=True
    ).eval()
    torch.testing.assert_close(assert_trained_alike(judge, ours), expected, **CLOSE)
    own = ours(input_ids=IDS).logits
    ours.merge_adapter(safe_merge=True)
    torch.testing.assert_close(ours(input_ids=IDS).logits, expected, **CLOSE)
    ours.unmerge_adapter()
    assert torch.equal(copy.deepcopy(ours)(input_ids=IDS).logits, own)
    ours.save_pretrained(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(theirs), tmp_path / "again").eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, expected, **CLOSE)
    ours.load_adapter(tmp_path / "adapter", "other")
    ours.set_adapter("other")
    assert torch.equal(ours(input_ids=IDS).logits, own)

    added = lora.add_lora(load(tmp_path / "base"), **fields)
    fill(added)
    added.save_pretrained(tmp_path / "added")
    again = peft.PeftModel.from_pretrained(theirs, tmp_path / "added").eval()
    torch.testing.assert_close(
        again(input_ids=IDS).logits, added.eval()(input_ids=IDS).logits, **CLOSE
    )


@pytest.mark.parametrize("recipe", ["bf16", "current"])
@pytest.mark.parametrize("place", [{}, pytest.param(PLACE, marks=pytest.mark.gpu)])
def test_adapters_of_experts_under_a_recipe(
    recipe: str, place: dict[str, Any], tmp_path: Path
) -> None:
    """As our own adapters of the same file compute; in FP32, since a rounding may send a token to another expert."""
    edges = (
        dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0) if recipe != "bf16" else {}
    )
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, **place}
    model = CausalLM.from_preset("gated-moe-nano", recipe=recipe, **options, **edges)
    model.save_pretrained(tmp_path / "base")
    fields = peft.LoraConfig(
        target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    ours = peft.get_peft_model(
        TEModelsForCausalLM.wrap(model), fields, autocast_adapter_dtype=False
    ).eval()
    fill(ours)
    ours.save_pretrained(tmp_path / "adapter")
    base = CausalLM.from_pretrained(tmp_path / "base", **options)
    ids = IDS.to(model.device)
    with torch.no_grad():
        found, expected = (
            ours(input_ids=ids).logits.float(),
            lora.load_lora(base, tmp_path / "adapter")(ids).logits.float(),
        )
        plain = CausalLM.from_pretrained(tmp_path / "base", **options)(ids).logits.float()
    assert (found - expected).norm() < 2.0**-6 * expected.norm() < 0.5 * (found - plain).norm()


def test_what_peft_cannot_place_beside_experts_is_said(tmp_path: Path) -> None:
    """Nothing is lost in silence: a router inside a module that is a te.Linear here, linears that peft drops there."""
    theirs = make_theirs("afmoe-experts", tmp_path / "afmoe")
    added = lora.add_lora(load(tmp_path / "afmoe"), r=2, target_modules=["experts", "q_proj"])
    assert any("experts.base_layer.lora_A" in name for name in trainable(added))
    peft.get_peft_model(theirs, peft.LoraConfig(target_modules="all-linear")).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(
        CheckpointError, match=r"cannot place the adapter's .*router\.gate\.lora_A.*give load_lora"
    ):
        peft.PeftModel.from_pretrained(load(tmp_path / "afmoe"), tmp_path / "adapter")
    lora.load_lora(CausalLM.from_pretrained(tmp_path / "afmoe", device="cpu"), tmp_path / "adapter")
    make_theirs("glm4_moe-groups", tmp_path / "glm4_moe")
    with pytest.warns(
        UserWarning,
        match="drops them there, and refuses a file with DoRA: for transformers merge them",
    ):
        peft.get_peft_model(
            load(tmp_path / "glm4_moe"), peft.LoraConfig(target_modules="all-linear")
        )


def test_a_linear_whose_name_is_taken_is_said(tmp_path: Path) -> None:
    """Gemma 4 has a dense MLP beside its experts, one of whose products has the name of its last linear here."""
    theirs = make_theirs("gemma4_text-experts-plain", tmp_path / "base")
    torch.testing.assert_close(load(tmp_path / "base")(IDS).logits, theirs(IDS).logits, **CLOSE)
    taken = (
        r"peft adapts no layers\.0\.mlp\.down_proj, .*give te_models\.add_lora the CausalLM inside"
    )
    for targets in ("all-linear", ["q_proj", "up_proj", "down_proj"]):
        with pytest.warns(UserWarning, match=taken):
            peft.get_peft_model(load(tmp_path / "base"), peft.LoraConfig(target_modules=targets))
        with pytest.raises(UsageError, match=r"mlp\.down_proj needs a CausalLM"):
            lora.add_lora(load(tmp_path / "base"), target_modules=targets)
    inner = lora.add_lora(
        load(tmp_path / "base").model, r=2, target_modules=["q_proj", "down_proj"]
    )
    fill(inner)
    lora.save_lora(inner, tmp_path / "adapter")
    judge = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    torch.testing.assert_close(inner(IDS).logits, judge(IDS).logits, **CLOSE)
    with pytest.raises(CheckpointError, match=r"cannot place the adapter's .*mlp\.down_proj"):
        peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.filterwarnings("error:peft adapts no")
def test_adapters_beside_a_linear_whose_name_is_taken(tmp_path: Path) -> None:
    theirs = make_theirs("gemma4_text-experts-plain", tmp_path / "base")
    fields = peft.LoraConfig(
        r=2, target_modules=["q_proj", "up_proj"], target_parameters=["experts.down_proj"]
    )
    judge = peft.get_peft_model(theirs, fields).eval()
    fill(judge)
    judge.save_pretrained(tmp_path / "adapter")
    ours = peft.PeftModel.from_pretrained(
        load(tmp_path / "base"), tmp_path / "adapter", is_trainable=True
    ).eval()
    assert_trained_alike(judge, ours)


@pytest.mark.filterwarnings("error:no expert")
def test_experts_left_out_are_said(tmp_path: Path) -> None:
    """Also where the linears of an MLP are named, which are those of experts in files; with the names that help."""
    make_theirs("mixtral-one-key", tmp_path)
    for targets in ("all-linear", ["q_proj", "w1", "w2", "w3"]):
        with pytest.warns(
            UserWarning, match="no expert has an adapter: for that, give target_parameters="
        ) as told:
            adapted = peft.get_peft_model(load(tmp_path), peft.LoraConfig(target_modules=targets))
    adapted.save_pretrained(tmp_path / "adapter")
    peft.PeftModel.from_pretrained(load(tmp_path), tmp_path / "adapter")
    named = ast.literal_eval(str(told[0].message).partition("target_parameters=")[2])
    ours = peft.get_peft_model(
        load(tmp_path), peft.LoraConfig(target_modules="all-linear", target_parameters=named)
    )
    assert any(".experts.base_layer.lora_A" in name for name in trainable(ours))
    peft.get_peft_model(load(tmp_path), config("one"))


def test_the_families_whose_linears_peft_takes_for_experts_are_known() -> None:
    table = pytest.importorskip(
        "peft.utils.transformers_weight_conversion"
    )._MODEL_TO_CONVERSION_PATTERN
    without_others = {"olmoe"}  # which has no linears of these names beside its experts
    converted = {
        f.model_type for f in FAMILIES if table.get(f.model_type) == "qwen2_moe"
    } - without_others
    assert {kind for kind in converted if dropped_by_peft(kind, ["mlp.up_proj"])} == converted


def test_what_only_a_causal_lm_takes_is_refused(pair: Callable[..., Any], tmp_path: Path) -> None:
    ours = load(pair("llama").folder)
    for fields in (dict(modules_to_save=["lm_head"]), dict(target_modules=["lm_head"])):
        with pytest.raises(UsageError, match="needs a CausalLM: give add_lora the model inside"):
            lora.add_lora(ours, **fields)
    with pytest.raises(UsageError, match="is a LlamaForCausalLM: give a CausalLM"):
        lora.add_lora(pair("llama").theirs)
    with pytest.raises(UsageError, match="config is a LlamaConfig, not a ModelConfig: give a Caus"):
        TEModelsForCausalLM.wrap(pair("llama").theirs)
    message = "bias=lora_only is not supported by add_lora: leave it out, or call get_peft_model of"
    with pytest.raises(UsageError, match=message):
        lora.add_lora(ours, target_modules=["q_proj"], bias="lora_only")
    with pytest.raises(UsageError, match=r"load its adapters with peft.PeftModel.from_pretrained"):
        lora.load_lora(ours, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(target_modules=["q_proj"], bias="all"),
            "peft cannot train the biases of fused linears: leave out bias=",
        ),
        (
            dict(target_modules=["q_proj"], bias="lora_only"),
            "peft cannot train the biases of fused linears",
        ),
        (
            dict(target_modules=["o_proj"], modules_to_save=["q_proj"]),
            "cannot train copies of layers.0.self_attn.q_pr",
        ),
    ],
)
def test_files_that_transformers_would_not_know_are_refused(
    fields: dict[str, Any], message: str, build: Callable[..., CausalLM]
) -> None:
    ours = TEModelsForCausalLM.wrap(build(attention_bias=True))
    with pytest.raises(UsageError, match=message):
        peft.get_peft_model(ours, peft.LoraConfig(**fields))


def test_copies_of_norms_that_transformers_names_otherwise_are_refused(
    pair: Callable[..., Any],
) -> None:
    """A norm of Gemma 2 has the name of another one here."""
    fields = peft.LoraConfig(
        target_modules=["o_proj"], modules_to_save=["post_attention_layernorm"]
    )
    with pytest.raises(
        UsageError, match="copies of layers.0.post_attention_layernorm.*names otherwise: change mod"
    ):
        peft.get_peft_model(load(pair("gemma2").folder), fields)


@pytest.mark.parametrize("pattern", [r".*_proj", r".*\.(qkvg_proj|q_proj|k_proj|v_proj|o_proj)"])
def test_a_pattern_of_names_of_transformers_may_fit_the_fused_ones(
    pattern: str, pair: Callable[..., Any]
) -> None:
    inner = CausalLM.from_pretrained(pair("llama").folder, device="cpu")
    adapted = lora.add_lora(inner, r=2, target_modules=pattern)
    ranks = {
        name.split(".")[-4]: p.shape[0]
        for name, p in adapted.named_parameters()
        if "lora_A" in name
    }
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if pattern == r".*_proj":
        names += ["gate_proj", "up_proj", "down_proj"]
    assert ranks == dict.fromkeys(names, 2)


def test_the_head_stays_the_head(pair: Callable[..., Any]) -> None:
    ours = pair("llama").ours
    head = ours.get_output_embeddings()
    assert head.weight is ours.model.lm_head.weight and head.bias is None
    assert sum(p is head.weight for p in ours.parameters()) == 1
    assert not any("head." in name for name in ours.state_dict() if "lm_head" not in name)


@pytest.mark.parametrize("preset", ["gated-moe-nano", "gated-nano"])
def test_a_wrapped_model_shows_linears_and_no_other_layers(preset: str) -> None:
    """Live modules keep their class; parameters have the names of the state_dict; no module is an embedding but one."""
    model = CausalLM.from_preset(preset, recipe="bf16", device="cpu", engine="emulated")
    before = {name: (module, type(module)) for name, module in model.named_modules()}
    wrapped = TEModelsForCausalLM.wrap(model)
    for module, kind in before.values():
        assert type(module) is kind
    names = {name for name, _ in wrapped.named_parameters()}
    assert names == {name for name in wrapped.state_dict() if "_extra_state" not in name} | {
        name for name in names if name.endswith("lm_head.weight")
    }
    kinds = {name: type(module) for name, module in wrapped.named_modules()}
    assert sum(issubclass(kind, torch.nn.Embedding) for kind in kinds.values()) == 1
    linears = {
        name.rpartition(".")[2] for name, kind in kinds.items() if issubclass(kind, torch.nn.Linear)
    }
    shown = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    experts = preset == "gated-moe-nano"
    assert linears == shown | {"shared_expert_gate" if experts else "g_proj"}
    grouped = [name for name in kinds if name.endswith(("mlp.down_proj", "mlp.gate_up_proj"))]
    assert not experts or not grouped
    adapted = peft.get_peft_model(wrapped, peft.LoraConfig(target_modules="all-linear"))
    assert adapted.get_nb_trainable_parameters()[1] == sum(p.numel() for p in adapted.parameters())
    assert (
        adapted.unload().state_dict().keys() == TEModelsForCausalLM.wrap(model).state_dict().keys()
    )


def test_experts_of_a_wrapped_model_have_no_weight_while_they_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformer Engine's GroupedLinear reads an attribute `weight` as the weights of all experts in one tensor."""
    model = CausalLM.from_preset("gated-moe-nano", recipe="bf16", device="cpu", engine="emulated")
    seen = []
    forward = model.te.GroupedLinear.forward

    def spied(module: Any, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(getattr(module, "weight", None))
        return forward(module, *args, **options)

    monkeypatch.setattr(model.te.GroupedLinear, "forward", spied)
    TEModelsForCausalLM.wrap(model)(IDS)
    assert seen and all(weight is None for weight in seen)
