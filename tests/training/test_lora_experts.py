"""Adapters on experts: peft on transformers' models is the judge of values, gradients and files."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import assert_same_files, ours, theirs, trained_by_transformers
from autograd_bytes import autograd_bytes, planned_bytes
from families import make_config
from fewer import every, some
from hf_models import randomize
from judge import transformers
from safetensors.torch import load_file, save_file
from tiny_runs import SHORT
from torch import Tensor
from typed import submodule

import benchmarks.lora_experts as lora_experts
from te_models import CausalLM
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.errors import CheckpointError, UsageError
from te_models.fp8.primary_weights import plain
from te_models.kernels.grouped_product import grouped_product
from te_models.kernels.groups import Groups

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from te_models.adapters.layers import LoraExperts
from te_models.huggingface.modeling import TEModelsForCausalLM
from te_models.training.lora import add_lora, load_lora, save_lora
from te_models.training.lora_run import LoraRun, load_adapted
from te_models.training.settings import LoraSettings

SHAPE: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
pytestmark = pytest.mark.filterwarnings("ignore")

ALL = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "experts and attention": dict(target_modules=["q_proj", "o_proj"], target_parameters=ALL, r=3),
    "down alone": dict(
        target_modules=[], target_parameters=["experts.down_proj"], r=2, lora_alpha=5
    ),
    "a layer": dict(
        target_modules=["q_proj"], target_parameters=["layers.1.mlp.experts.gate_up_proj"], r=2
    ),
    "ranks": dict(
        target_modules=[],
        target_parameters=ALL,
        r=2,
        rank_pattern={".*gate_up_proj": 5},
        use_rslora=True,
    ),
    "beside a dense MLP": dict(
        target_modules=["q_proj", "down_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        r=3,
    ),
    "whatever their parent": dict(
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        r=3,
    ),
    "without a gate": dict(
        target_modules=["q_proj"], target_parameters=["experts.up_proj", "experts.down_proj"], r=3
    ),
}


ROWS = [
    ("mixtral-one-key", "experts and attention"),
    ("nemotron_h-plain", "without a gate"),
    ("qwen3_moe-steps", "experts and attention"),
    ("gemma4_text-experts-plain", "beside a dense MLP"),
    ("qwen2_moe-all-keys", "experts and attention"),
    ("mixtral-all-keys", "ranks"),
    ("olmoe-keys", "experts and attention"),
    ("glm4_moe-groups", "experts and attention"),
    ("mixtral-one-key", "down alone"),
    ("qwen3_next-steps", "experts and attention"),
    ("qwen3_5_moe_text-full", "experts and attention"),
    ("mixtral-one-key", "a layer"),
    ("afmoe-experts", "experts and attention"),
    ("laguna-experts", "experts and attention"),
    ("gpt_oss-all-keys", "experts and attention"),
    ("gpt_oss-window", "ranks"),
    ("llama4_text-one-key", "whatever their parent"),
    ("deepseek_v3-groups", "down alone"),
    ("deepseek_v2-plain", "ranks"),
    ("sarvam_moe-groups", "experts and attention"),
    ("granitemoe-one-key", "whatever their parent"),
    ("hy_v3-mixed", "experts and attention"),
    ("flint-odd", "experts and attention"),
    ("axk1-groups", "down alone"),
    ("bailing_hybrid-plain", "down alone"),
]


def ids_of(config: Any) -> Tensor:
    return torch.randint(1, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))


def gradients(model: Any, ids: Tensor) -> Any:
    """The model with the gradient of each adapter in its place."""
    model.eval()(ids, labels=ids).loss.backward()  # in training ours adds the loss of routers
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    return model


@pytest.mark.parametrize("case, targets", some(5, ROWS))
def test_adapters_of_experts_are_those_of_peft(case: str, targets: str, tmp_path: Path) -> None:
    """Values, gradients and files, both ways."""
    torch.manual_seed(1)
    config, base = make_config(case), tmp_path / "base"
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(base)
    ids = ids_of(config)
    judge = trained_by_transformers(base, tmp_path / "start", 0.1, **TARGETS[targets])

    adapted = load_lora(ours(base), tmp_path / "start", trainable=True)
    assert any(isinstance(module, LoraExperts) for module in adapted.modules())
    with torch.no_grad():
        plain, wanted, found = (
            theirs(base)(ids).logits,
            judge.eval()(ids).logits,
            adapted.eval()(ids).logits,
        )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (wanted - plain).abs().max() > 1e-2
    save_lora(adapted, tmp_path / "again")
    assert_same_files(tmp_path / "start", tmp_path / "again")
    back = PeftModel.from_pretrained(theirs(base), tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(back(ids).logits, wanted)

    gradients(judge, ids).save_pretrained(tmp_path / "theirs")
    save_lora(gradients(adapted, ids), tmp_path / "ours")
    first, second = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours")
    )
    for name, tensor in first.items():
        assert (second[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name


def test_a_shared_expert_has_two_names(tmp_path: Path) -> None:
    """Laguna's files say shared_expert and its class shared_experts, which peft writes; both are read here.

    transformers 5.24 takes the name of its class for one in files, renames it once more, and so cannot read what peft
    writes for its own model. Ours have the name in files, which it reads.
    """
    torch.manual_seed(1)
    config, base = make_config("laguna-experts"), tmp_path / "base"
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(base)
    fields = dict(target_modules=["down_proj", "up_proj"], rank_pattern={"up_proj": 3})
    adapted = add_lora(ours(base), r=2, init_lora_weights=False, **fields)
    save_lora(adapted, tmp_path / "ours")
    judge = get_peft_model(theirs(base), LoraConfig(r=2, task_type="CAUSAL_LM", **fields))
    judge.save_pretrained(tmp_path / "theirs")
    ids = ids_of(config)
    expected = adapted.eval()(ids).logits.detach()
    wrapped = PeftModel.from_pretrained(TEModelsForCausalLM.wrap(ours(base)), tmp_path / "ours")
    wrapped.eval().save_pretrained(tmp_path / "peft")
    folders = [tmp_path / name for name in ("ours", "theirs", "peft")]
    saved = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert saved[1].keys() == saved[2].keys()
    older = {name.replace("shared_expert.", "shared_experts."): t for name, t in saved[0].items()}
    assert older.keys() == saved[1].keys() != saved[0].keys()
    shutil.copytree(tmp_path / "ours", tmp_path / "older")  # as te-models wrote it before
    for file in (tmp_path / "older").iterdir():
        if file.name not in ("adapter_config.json", "adapter_model.safetensors"):
            file.unlink()
    save_file(older, tmp_path / "older/adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.warns(
        UserWarning, match=r"misreads peft's file of adapters on mlp\.shared_experts"
    ):
        get_peft_model(TEModelsForCausalLM.wrap(ours(base)), LoraConfig(r=2, **fields))
    # As the warning says.
    save_lora(load_lora(ours(base), tmp_path / "peft"), tmp_path / "again")
    found = [PeftModel.from_pretrained(theirs(base), tmp_path / "ours"), wrapped]
    found.append(PeftModel.from_pretrained(theirs(base), tmp_path / "again"))
    for folder in ("ours", "peft", "older"):
        inner = TEModelsForCausalLM.wrap(ours(base))
        found.append(load_lora(ours(base), tmp_path / folder))
        found.append(PeftModel.from_pretrained(inner, tmp_path / folder))
    with torch.no_grad():
        for again in found:
            torch.testing.assert_close(again.eval()(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("default:peft has no adapters")
def test_a_file_that_peft_refuses_is_said(tmp_path: Path) -> None:
    """peft adapts no output of Mamba in Nemotron-H, which is among our targets when none are named."""
    config, base = make_config("nemotron_h-plain"), tmp_path / "base"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    with pytest.warns(UserWarning, match="peft has no adapters on out_proj of nemotron_h"):
        save_lora(add_lora(ours(base), r=2), tmp_path / "adapter")
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba"):
        PeftModel.from_pretrained(theirs(base), tmp_path / "adapter")
    load_lora(ours(base), tmp_path / "adapter")


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": dict(shared_expert_intermediate_size=128, shared_expert_gate=True),
    "GLM": dict(
        router_fp32=True,
        router_scores="sigmoid",
        expert_bias=True,
        shared_expert_intermediate_size=64,
    ),
}


@pytest.mark.parametrize(
    "name, recipe, mode, experts",
    every(
        6,
        KINDS,
        ["bf16", "delayed", "current, FP8 weights"],
        ["none", "selective", "full"],
        [True, False],
    ),
)
def test_the_memory_plan_is_what_autograd_keeps(
    name: str, recipe: str, mode: str, experts: bool
) -> None:
    """But for rows of padding, of which the plan has the most that there can be, and choices that recomputes hold."""
    recipe, fp8_params = recipe.split(",")[0], "FP8 weights" in recipe
    moe = dict(num_experts=3, num_experts_per_tok=3, moe_intermediate_size=64, **KINDS[name])
    place = dict(recipe=recipe, fp8_params=fp8_params, device="cpu", activation_checkpointing=mode)
    shape = SHAPE | dict(num_hidden_layers=3)
    model = CausalLM.from_preset("gated-moe-nano", **shape, moe=moe, **place)
    targets = dict.fromkeys(
        linear.name for linear in model.config.linears.values() if linear.adapted
    )
    LoraRun(
        model, LoraSettings(rank=4, alpha=8.0, targets=(*targets, *["experts"] * experts)), None
    )
    how: dict[str, Any] = dict(logits=False, lora_rank=4, lora_experts=experts)
    planned = planned_bytes(model, 16, 64, **how)
    held = 0 if mode == "none" else 16 * 64 * 3 * 8 * 8 * model.config.num_hidden_layers
    kept = autograd_bytes(model, torch.randint(0, 288, (16, 64)), logits=False)
    assert 0.99 * kept <= planned <= 1.04 * kept + held


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_on_the_router(name: str) -> None:
    """Logits and gradients are those of a model whose router has the update in its weight, also where it is FP32."""
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **KINDS[name])
    model, plain_model = (
        CausalLM.from_preset(
            "gated-moe-nano", **SHAPE, moe=moe, recipe="bf16", device="cpu", dtype=torch.float32
        )
        for _ in range(2)
    )
    plain_model.load_state_dict(model.state_dict())
    adapted = add_lora(model, target_modules=["router"], r=4, init_lora_weights=False)
    names = [f"layers.{layer}.mlp.router" for layer in range(SHAPE["num_hidden_layers"])]
    routers = [(submodule(model, name), submodule(plain_model, name)) for name in names]
    with torch.no_grad():
        for adapter, router in routers:
            router.weight += adapter.get_delta_weight("default")
    ids = torch.randint(0, 288, (2, 16))
    found, expected = (m.eval()(ids, labels=ids) for m in (adapted, plain_model))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    found.loss.backward()
    expected.loss.backward()
    for adapter, router in routers:
        a = adapter.lora_A["default"].weight.detach()
        wanted = adapter.scaling["default"] * router.weight.grad @ a.t()
        torch.testing.assert_close(
            adapter.lora_B["default"].weight.grad, wanted, rtol=1e-3, atol=1e-6
        )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "the singular": (
        dict(target_modules=["expert"]),
        "did you mean 'experts'? choose one of all-linear",
    ),
    "typo": (dict(target_modules=["experts.gate_up_prj"]), "did you mean 'experts.gate_up_proj'"),
    "one expert": (
        dict(target_modules=["experts.0.gate_proj"]),
        "unknown target parameter 'experts.0.gate_proj'",
    ),
    "a parameter that is none": (
        dict(target_parameters=["input_layernorm.weight"]),
        "unknown target parameter",
    ),
    "a pattern": (
        dict(target_modules=["experts"], rank_pattern={"gate_proj": 2}),
        "matches no module that has an",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_expert_is_refused(case: str) -> None:
    fields, message = WRONG[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        add_lora(CausalLM.from_preset("gated-moe-nano", device="cpu", recipe="bf16"), **fields)


def test_experts_of_a_model_without_any(tmp_path: Path) -> None:
    """Named for a new adapter they are a mistake; peft's files name them for models that could have had some."""
    dense = CausalLM.from_preset("gated-nano", device="cpu", recipe="bf16")
    with pytest.raises(
        UsageError, match="unknown target parameter 'experts': the model has no experts"
    ):
        add_lora(dense, target_modules=["experts"])
    adapted = add_lora(
        CausalLM.from_preset("gated-moe-nano", device="cpu", recipe="bf16"),
        target_modules=["experts"],
    )
    save_lora(adapted, tmp_path)
    with pytest.raises(CheckpointError, match="matches no linear of the model"):
        load_lora(dense, tmp_path)
    wrapped = TEModelsForCausalLM.wrap(
        CausalLM.from_preset("gated-moe-nano", device="cpu", recipe="bf16")
    )
    found = {
        name
        for name, p in add_lora(wrapped, target_modules=["experts"]).named_parameters()
        if p.requires_grad
    }
    assert {name.split(".mlp.")[1] for name in found} == {
        f"experts.{inside}lora_{part}.default.weight"
        for inside in ("", "base_layer.")
        for part in "AB"
    }


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_from_the_command_line_to_a_merged_model(
    dtype: str, texts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    moe = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=64)
    CausalLM.from_preset("gated-moe-nano", device="cpu", **SHAPE, moe=moe).save_pretrained("base")
    options = "--model base --steps 3 --learning-rate 0.05 --recipe current --fp8-params --out run"
    lora = "--lora 4 --lora-targets qkvg_proj,experts --merge --merge-dtype"
    assert main(["finetune", *SHORT, *options.split(), *lora.split(), dtype]) == 0
    said = capsys.readouterr().out
    assert f"in {dtype}, " in said and "with adapters" in said
    config = json.loads(Path("run/adapter/adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    adapted = load_adapted(
        Path("run/adapter"), device="cpu", recipe="bf16", fp8_params=False, dtype=torch.float32
    )
    ids = torch.arange(16)[None] % 250
    with torch.no_grad():
        wanted, found = adapted(ids).logits, ours(Path("run/merged"), recipe="bf16")(ids).logits
    assert (found - wanted).norm() < (1e-5 if dtype == "float32" else 0.02) * wanted.norm()
    assert (
        main(
            ["evaluate", "--model", "run", "--data", "texts", "--device", "cpu", "--seq-len", "16"]
        )
        == 0
    )


def test_gaussian_values_of_a_new_adapter_depend_on_the_rank_of_an_expert() -> None:
    """Not on that of all experts together."""
    moe = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32)
    model = CausalLM(
        get_preset("gated-nano", **SHAPE | dict(num_hidden_layers=1, moe=moe)), device="cpu"
    )
    options = dict(target_modules=[], target_parameters=ALL, r=16)
    torch.manual_seed(1)
    adapted = add_lora(model, **options, init_lora_weights="gaussian")
    experts = [module for module in adapted.modules() if isinstance(module, LoraExperts)]
    for module in experts:
        weight = module.lora_A["default"].get_parameter("weight")
        assert weight.std().item() == pytest.approx(1 / 16, rel=0.05)
    assert len(experts) == 2


@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_a_merge_of_experts_is_undone_to_the_bit(recipe: str) -> None:
    torch.manual_seed(3)
    moe = dict(
        num_experts=3, num_experts_per_tok=3, moe_intermediate_size=64
    )  # no rounding chooses another
    options: dict[str, Any] = dict(
        recipe=recipe, fp8_params=recipe != "bf16", device="cpu", **SHAPE, moe=moe
    )
    model = CausalLM.from_preset("gated-moe-nano", **options)
    before = {name: plain(parameter).clone() for name, parameter in model.named_parameters()}
    adapted = add_lora(model, r=3, target_modules=["experts"], init_lora_weights=False)
    ids = torch.randint(0, 288, (2, 16))
    with torch.no_grad():
        tuned = adapted.eval()(ids).logits
        adapted.merge_adapter(safe_merge=True)
        merged = adapted(ids).logits
        adapted.unmerge_adapter()
        assert torch.equal(adapted(ids).logits, tuned)
        bound = (
            0.02 if recipe == "bf16" else 0.15
        )  # a rounding to BF16; two FP8 noises of about 20 dB apart
        assert (merged - tuned).norm() < bound * tuned.norm()
        assert not torch.equal(merged, tuned)
    for name, parameter in adapted.unload().named_parameters():
        assert torch.equal(plain(parameter), before[name]), name


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """benchmarks/lora_experts.py, whose full size needs a GPU, from its plan to its result."""
    arguments = ["--tiny", "--rank", "4", "--out", str(tmp_path / "result.json")]
    lora_experts.main(arguments, standalone_mode=False)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["losses"] == sorted(found["losses"], reverse=True) and len(found["losses"]) == 6
    assert (found["layers"], found["whole"], found["targets"][-1]) == (4, False, "experts")
    sizes = [linear.gemms * (linear.inputs + linear.outputs) for linear in
             lora_experts.shape_of(4, True).linears.values() if linear.adapted or linear.experts]  # fmt: skip
    assert found["trained"] == 4 * sum(sizes)


def products(x: Tensor, weights: Tensor, dy: Tensor, rows: Any) -> list[Tensor]:
    """The product, and the gradients of both, in FP32."""
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = grouped_product(*leaves, rows=rows)
    return [part.float() for part in (y, *torch.autograd.grad(y, leaves, dy))]


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True])
def test_the_product_in_one_launch(on_device: bool) -> None:
    torch.manual_seed(0)
    rows = [5, 0, 33, 128, 0, 7, 0]
    x, dy = (torch.randn(sum(rows), width).bfloat16() for width in (256, 16))
    weights = torch.randn(len(rows), 16, 256).bfloat16()
    wanted = products(*(tensor.float() for tensor in (x, weights, dy)), rows=rows)
    cuda = [tensor.cuda() for tensor in (x, weights, dy)]
    found = products(*cuda, rows=Groups.of(rows, cuda[0].device) if on_device else rows)
    for one, other in zip(found, wanted, strict=True):
        assert (one.cpu() - other).norm() < 2**-8 * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("fp8_params", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_adapters_on_transformer_engine_itself(recipe: str, fp8_params: bool, rank: int) -> None:
    """The fast path learns what the plain one does, also from FP8 weights and with ranks that need padding."""
    if fp8_params and recipe == "bf16":
        pytest.skip("BF16 has no FP8 weights")
    losses = []
    for fused in (True, False):
        torch.manual_seed(3)
        options: dict[str, Any] = dict(
            recipe=recipe, fp8_params=fp8_params, fused=fused, device="cuda"
        )
        model = CausalLM.from_preset("gated-moe-nano", **options, **SHAPE)
        adapted = add_lora(model, r=rank, target_modules=["all-linear", "experts"])
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
        ids = torch.randint(0, 288, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(8):
            loss = adapted.train()(ids, labels=ids, return_logits=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[7] < losses[0] - 0.3
    torch.testing.assert_close(losses[:8], losses[8:], atol=0.05, rtol=0)
