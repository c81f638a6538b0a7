"""Adapters to and from transformers: peft on small random models of every architecture is the judge."""

import faulthandler
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import (
    assert_same_files,
    ours,
    randomize_adapters,
    save_adapters_on_everything,
    theirs,
    trained_by_transformers,
)
from bits import assert_same_bits
from families import CASES, FAMILY_CASES, make_config
from fewer import every
from hf_models import make_theirs, of_config
from judge import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from te_models import CausalLM
from te_models.errors import CheckpointError, UsageError

pytest.importorskip("peft")

import peft
from peft import LoraConfig, PeftModel

from te_models.adapters.layers import LoraLinear
from te_models.training import lora_config
from te_models.training.lora import AdaptedModel, add_lora, load_lora, save_lora
from te_models.training.lora_config import _pattern_mistakes as pattern_mistakes
from te_models.training.lora_run import LoraRun
from te_models.training.settings import LoraSettings

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=3
)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": dict(num_key_value_heads=4),
    "mistral": dict(sliding_window=6),
    "qwen2": {},
    "qwen3": dict(head_dim=32),
    "smollm3": dict(no_rope_layers=[1, 0, 1], tie_word_embeddings=False),
    "qwen3_next": dict(head_dim=32, layer_types=["full_attention"] * 3, mlp_only_layers=[0, 1, 2]),
}
TARGETS: dict[str, dict[str, Any]] = {
    "all-linear": dict(target_modules="all-linear", r=4),
    "q and v": dict(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=16),
    "patterns": dict(
        target_modules=r".*layers\.(0|2)\..*(k_proj|q_proj|o_proj)", r=3, lora_alpha=7, use_rslora=True,
        rank_pattern={"k_proj": 5, "layers.2.self_attn.o_proj": 2}, alpha_pattern={"q_proj": 3},
    ),
    "one layer": dict(target_modules=["k_proj"], layers_to_transform=[1], r=2),
    "head": dict(target_modules=["v_proj", "lm_head"], modules_to_save=["embed_tokens"], r=2),
    "whole": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], r=2),
    "dora": dict(target_modules=["q_proj", "o_proj", "v_proj"], use_dora=True, r=3, rank_pattern={"q_proj": 2}),
    "dora on all": dict(target_modules="all-linear", use_dora=True, use_rslora=True, r=4),
}  # fmt: skip
LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def token_ids() -> Tensor:
    """Ids int64 [2, 12] without 0: transformers does not train the embedding of the padding."""
    return torch.randint(1, 131, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the folder of transformers' random model of an architecture."""
    root = tmp_path_factory.mktemp("base")

    def make(kind: str) -> Path:
        if not (root / kind).exists():
            torch.manual_seed(len(kind))
            config = transformers.AutoConfig.for_model(kind, **{**SIZES, **ARCHITECTURES[kind]})
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)
        return root / kind

    return make


def train(model: Any, steps: int = 3) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    for _ in range(steps):
        model.train()(token_ids(), labels=token_ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(token_ids()).logits


def assert_equal_but_for_rounding(found: Tensor, wanted: Tensor, limit: float = 1e-5) -> None:
    """FP32 values of a few layers, relative to the largest."""
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error < limit, f"{error:.1e}"


@pytest.mark.parametrize(("kind", "targets"), every(7, ARCHITECTURES, TARGETS))
def test_an_adapter_of_transformers_computes_the_same_here(
    kind: str, targets: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    judge = trained_by_transformers(base(kind), tmp_path / "theirs", **TARGETS[targets])
    wanted = logits(judge)
    model = ours(base(kind))
    before = logits(model)
    adapted = load_lora(model, tmp_path / "theirs")
    assert (wanted - before).abs().max() > 0.01
    assert_equal_but_for_rounding(logits(adapted), wanted)
    save_lora(adapted, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    back = PeftModel.from_pretrained(theirs(base(kind)), tmp_path / "ours")
    torch.testing.assert_close(logits(back), wanted, atol=0, rtol=0)
    adapted.merge_and_unload()
    assert_equal_but_for_rounding(logits(model), wanted)
    model.save_pretrained(tmp_path / "merged", format="hf")
    assert_equal_but_for_rounding(logits(theirs(tmp_path / "merged")), wanted)


OURS: dict[str, dict[str, Any]] = {
    "fused": {},
    "all-linear": dict(target_modules="all-linear"),
    "gate": dict(
        target_modules=["gate_up_proj", "q_proj", "down_proj"], rank_pattern={"gate_up_proj": 6}
    ),
    "by name": dict(
        target_modules=["layers.1.self_attn.qkvg_proj", "model.layers.2.mlp.up_proj"],
        use_rslora=True,
    ),
    "whole": dict(
        target_modules=["up_proj", "lm_head"], modules_to_save=["embed_tokens"], lora_alpha=3
    ),
    "dora": dict(target_modules=["qkvg_proj", "up_proj", "o_proj"], use_dora=True),
}


@pytest.mark.parametrize(
    ("kind", "targets"), every(5, [kind for kind in ARCHITECTURES if kind != "qwen3_next"], OURS)
)
def test_an_adapter_trained_here_computes_the_same_in_transformers(
    kind: str, targets: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, **OURS[targets]}
    adapted = add_lora(ours(base(kind)), **options)
    train(adapted)
    wanted = logits(adapted)
    save_lora(adapted, tmp_path / "adapter")
    judge = PeftModel.from_pretrained(theirs(base(kind)), tmp_path / "adapter")
    assert_equal_but_for_rounding(logits(judge), wanted)
    again = load_lora(ours(base(kind)), tmp_path / "adapter", trainable=True)
    mine = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    found = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert mine.keys() == found.keys(), "an adapter of a fused linear comes back as one"
    for name, p in mine.items():
        assert_same_bits(name, p, found[name])
    assert torch.equal(logits(again), wanted)


@pytest.mark.parametrize("targets", ["all-linear", "patterns", "whole"])
def test_parts_of_a_fused_linear_train_as_in_transformers(
    targets: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    judge = trained_by_transformers(base("qwen3"), tmp_path / "start", **TARGETS[targets])
    adapted = load_lora(ours(base("qwen3")), tmp_path / "start", trainable=True)
    assert adapted.get_nb_trainable_parameters()[0] == judge.get_nb_trainable_parameters()[0]
    train(judge)
    train(adapted)
    judge.save_pretrained(tmp_path / "theirs")
    save_lora(adapted, tmp_path / "ours")
    start, wanted, found = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("start", "theirs", "ours")
    )
    for name, tensor in wanted.items():
        assert (tensor - start[name]).abs().max() > 3e-4, name
        torch.testing.assert_close(
            found[name], tensor, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_values_of_a_new_adapter_depend_on_the_rank_of_its_part(
    base: Callable[[str], Path],
) -> None:
    for init, name, std in (("gaussian", "lora_A", 1 / 64), (False, "lora_B", (3 * 64) ** -0.5)):
        torch.manual_seed(1)
        adapted = add_lora(
            ours(base("llama")),
            r=64,
            target_modules=["q_proj", "k_proj", "v_proj"],
            init_lora_weights=init,
        )
        attention = adapted.get_base_model().layers[0].self_attn
        layers = [attention.q_proj, attention.k_proj, attention.v_proj]
        weight = torch.cat([layer.get_submodule(name)["default"].weight for layer in layers])
        assert weight.std().item() == pytest.approx(std, rel=0.05), init


def test_several_adapters_in_one_folder_beside_other_files(
    base: Callable[[str], Path], tmp_path: Path
) -> None:
    adapted = add_lora(ours(base("qwen3")), r=2, target_modules=["q_proj"])
    adapted.add_adapter("other", LoraConfig(r=3, target_modules="all-linear"))
    randomize_adapters(adapted)
    first = logits(adapted)
    adapted.set_adapter("other")
    second = logits(adapted)
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        adapted.save_pretrained(tmp_path)
    names = (
        "adapter_config.json adapter_model.safetensors manifest.json notes.txt other recipe.json"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == names.split()
    again = AdaptedModel.from_pretrained(ours(base("qwen3")), tmp_path)
    assert torch.equal(logits(again), first)
    again.load_adapter(tmp_path / "other", "second")
    again.set_adapter("second")
    assert torch.equal(logits(again), second)
    with pytest.raises(CheckpointError, match="other modules or ranks"):
        again.load_adapter(tmp_path, "second")
    again.get_base_model().layers[0].mlp.down_proj.lora_B["second"].weight.data.zero_()
    again.load_adapter(tmp_path / "other", "second")
    assert torch.equal(logits(again), second)
    again.delete_adapter("second")
    again.set_adapter("default")
    assert torch.equal(logits(again), first)
    with pytest.raises(UsageError, match="add_adapter"):
        add_lora(again)  # type: ignore[no-matching-overload]
    with pytest.raises(UsageError, match="pickle"):
        again.save_pretrained(tmp_path, safe_serialization=False)


def test_an_adapter_of_fused_names_is_read(base: Callable[[str], Path], tmp_path: Path) -> None:
    """Such as te-models wrote before its files had the names of transformers."""
    adapted = add_lora(
        ours(base("qwen3")), r=2, lora_alpha=6, target_modules=["qkvg_proj", "down_proj"]
    )
    randomize_adapters(adapted)
    tensors = {
        name.replace(".default", ""): p.detach().clone()
        for name, p in adapted.named_parameters()
        if "lora_" in name
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["qkvg_proj", "down_proj"])
    config.save_pretrained(tmp_path)
    assert torch.equal(logits(load_lora(ours(base("qwen3")), tmp_path)), logits(adapted))


def test_adapters_on_fp8_layers_and_their_scales_come_back(
    base: Callable[[str], Path], tmp_path: Path
) -> None:
    model, other = (
        ours(base("llama"), recipe="delayed", amax_history_len=4, dtype=torch.bfloat16)
        for _ in range(2)
    )
    adapted = add_lora(model, r=4, target_modules=["q_proj", "up_proj"])
    train(adapted)
    save_lora(adapted, tmp_path / "adapter")
    again = load_lora(other, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))
    assert (tmp_path / "adapter/fp8_state.safetensors").exists()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another name": (dict(rank=8), "unknown field 'rank' of LoraConfig: write r, as peft does"),
    "a field": (
        dict(lora_alfa=8),
        "unknown field 'lora_alfa' of LoraConfig: did you mean 'lora_alpha'",
    ),
    "typo": (dict(target_modules=["q_prj"]), "did you mean 'q_proj'"),
    "twice": (dict(target_modules=["q_proj", "qkvg_proj"]), "choose one of the two"),
    "nothing": (dict(target_modules=".*z"), "matches no linear"),
    "no expression": (dict(target_modules="(z"), "regular expression"),
    "rank pattern": (
        dict(target_modules=["q_proj"], rank_pattern={"v_proj": 2}),
        "rank_pattern: 'v_proj' matches no",
    ),
    "alpha pattern": (
        dict(target_modules=["q_proj"], alpha_pattern={"zz": 2}),
        "alpha_pattern: 'zz' matches no",
    ),
    "bias": (dict(bias="lora_only"), "bias=lora_only is not supported"),
    "tokens": (dict(trainable_token_indices=[1]), "trainable_token_indices"),
    "pissa": (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    "a norm": (dict(modules_to_save=["norm"]), "modules_to_save='norm' is not supported"),
}


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_adapters_are_refused(case: str, base: Callable[[str], Path]) -> None:
    model = ours(base("llama"))
    names = [name for name, _ in model.named_modules()]
    fields, message = WRONG[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        add_lora(model, **fields)
    assert [name for name, _ in model.named_modules()] == names
    with pytest.raises(UsageError, match="IA3 is not supported"):
        add_lora(model, peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[]))  # type: ignore[no-matching-overload]


def head_of_another_model(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["base_model.model.lm_head.base_layer.weight"] = torch.ones(131, 64)


def in_fp8(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float8_e4m3fn)


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "another layer": (
        lambda t, c: t.update(
            {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}
        ),
        r"unexpected: .*layers\.7",
    ),
    "an untargeted module": (
        lambda t, c: c.update(target_modules=["q_proj"]),
        "unexpected: .*v_proj",
    ),
    "a module without tensors": (
        lambda t, c: c["target_modules"].append("up_proj"),
        "missing: .*up_proj",
    ),
    "a magnitude": (
        lambda t, c: t.update(
            {
                "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(
                    64
                )
            }
        ),
        "unexpected: .*lora_magnitude",
    ),
    "dora": (lambda t, c: c.update(use_dora=True), "missing: .*lora_magnitude_vector"),
    "tokens": (
        lambda t, c: c.update(trainable_token_indices=[3]),
        "not supported on a CausalLM: load it with peft.PeftModel.from_pretrained into a TEModels",
    ),
    "another method": (
        lambda t, c: c.update(peft_type="LOHA"),
        "type LOHA is not supported: .*PeftModel.from_pretrained into a TEModelsForCausalLM",
    ),
    "a newer field": (lambda t, c: c.update(from_the_future=[1]), "from_the_future"),
    "repeats without end": (
        lambda t, c: c.update(target_modules="(?:(?:[a-z]|[l-o])*)*[.](?:.|.)*x"),
        "takes more than 0.1 s for .*: list the modules",
    ),
    "no targets": (
        lambda t, c: c.pop("target_modules"),
        "target_modules is missing: name the modules",
    ),
    "a flag inside": (
        lambda t, c: c.update(rank_pattern={"(?i)Q_PROJ": 4}),
        "is not a regular expression: global",
    ),
    "a dropout": (lambda t, c: c.update(lora_dropout=2.0), "lora_dropout=2.0 is not a probability"),
    "values in FP8": (in_fp8, "is torch.float8_e4m3fn: save adapters in BF16"),
    "another head": (head_of_another_model, "is not the model's head"),
    "another rank": (lambda t, c: c.update(rank_pattern={"q_proj": 3}), "has shape"),
    "a head to save without its tensor": (
        lambda t, c: c.update(modules_to_save=["lm_head"]),
        r"missing: base_model\.model\.lm_head\.weight",
    ),
    "a norm to save": (
        lambda t, c: c.update(modules_to_save=["norm"]),
        "modules_to_save='norm' is not supported",
    ),
    "a module to save of another model": (
        lambda t, c: (
            c.update(modules_to_save=["score"]),
            t.update({"base_model.model.score.weight": torch.ones(2, 64)}),
        ),
        "modules_to_save='score' is not supported",
    ),
    "a lost tensor": (lambda t, c: t.pop(next(iter(t))), "missing: "),
    "no tensors": (lambda t, c: t.clear(), ""),
    "not a number": (lambda t, c: next(iter(t.values())).fill_(torch.nan), ""),
    "integers": (lambda t, c: t.update({name: tensor.int() for name, tensor in t.items()}), ""),
    "a column less": (
        lambda t, c: t.update({n: tensor[:, :-1].contiguous() for n, tensor in t.items()}),
        "shape",
    ),
    "repeats of repeats": (lambda t, c: c.update(target_modules="(l|l|a|y|e)*(r|s)*x"), ""),
    "a rank of repeats": (lambda t, c: c.update(rank_pattern={"(.|.)*x": 2}), ""),
    "a target that is a number": (lambda t, c: c.update(target_modules=[5]), ""),
    "an enormous rank": (lambda t, c: c.update(r=10**9), ""),
    "a rank of text": (lambda t, c: c.update(r="4"), ""),
    "an infinite alpha": (lambda t, c: c.update(lora_alpha=1e300), ""),
    "a bias that is false": (lambda t, c: c.update(bias=False), ""),
    "layers of text": (lambda t, c: c.update(layers_to_transform="../x"), ""),
}


@pytest.fixture(scope="module")
def undamaged(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter of llama, which tests copy."""
    folder = tmp_path_factory.mktemp("undamaged")
    trained_by_transformers(base("llama"), folder, r=4, target_modules=["q_proj", "v_proj"])
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_adapter_that_does_not_fit_is_refused(
    damage: str,
    base: Callable[[str], Path],
    undamaged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = load_file(undamaged / "adapter_model.safetensors")
    config = json.loads((undamaged / "adapter_config.json").read_text())
    change, message = DAMAGE[damage]
    change(tensors, config)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if damage == "repeats without end":
        monkeypatch.setattr(lora_config, "MAX_SECONDS", 0.1)
    model = ours(base("llama"))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    faulthandler.dump_traceback_later(
        600, exit=True
    )  # a pattern without end holds the interpreter's lock
    with pytest.raises(CheckpointError, match=message) as caught:
        load_lora(model, tmp_path)
    faulthandler.cancel_dump_traceback_later()
    assert len(str(caught.value)) < 600
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(
        torch.equal(tensor, after[name]) for name, tensor in before.items()
    )
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize(
    "names", [["classifier"], ["score", "embed_tokens"], ["embed_tokens"], ["lm_head"]]
)
def test_modules_to_save_that_peft_did_not_find(
    names: list[str], headless: bool, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """peft skips a name that the model lacks, as a model without its head lacks lm_head."""
    judge = transformers.AutoModelForCausalLM.from_pretrained(base("llama"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    adapted = peft.get_peft_model(judge.model if headless else judge, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_lora(ours(base("llama")), tmp_path / "adapter")
    # peft has its layers in the judge itself.
    assert_equal_but_for_rounding(logits(loaded), logits(judge))
    save_lora(loaded, tmp_path / "again")
    assert torch.equal(logits(load_lora(ours(base("llama")), tmp_path / "again")), logits(loaded))


@pytest.mark.filterwarnings("error:peft (has no|takes) adapters")
@pytest.mark.parametrize(("case", "fields"), every(5, ["glm4_moe-groups", "afmoe-experts", "deepseek_v2-one"], [
    dict(target_modules=["gate_proj", "down_proj"], lora_dropout=0.1),
    dict(target_modules=["up_proj", "o_proj"], rank_pattern={"layers.2.*up_proj": 5}, use_rslora=True),
    dict(target_modules=r".*layers\.[12]\.mlp\..*down_proj", lora_alpha=3),
    dict(target_parameters=["up_proj.weight", "experts.down_proj"]),
]))  # fmt: skip
def test_linears_that_peft_takes_for_experts(
    case: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Some of a dense MLP or a shared expert: peft finds them as parameters, also where experts have adapters."""
    judge = make_theirs(case, tmp_path / "base")
    adapted = add_lora(ours(tmp_path / "base"), r=2, **fields)
    randomize_adapters(adapted)
    save_lora(adapted, tmp_path / "adapter")
    expected = logits(adapted)
    back = PeftModel.from_pretrained(judge, tmp_path / "adapter")
    assert_equal_but_for_rounding(logits(back), expected, limit=1e-4)
    assert torch.equal(logits(load_lora(ours(tmp_path / "base"), tmp_path / "adapter")), expected)
    back.save_pretrained(tmp_path / "again")
    assert_same_files(tmp_path / "adapter", tmp_path / "again")
    assert torch.equal(logits(load_lora(ours(tmp_path / "base"), tmp_path / "again")), expected)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("glm4_moe-groups", dict(target_modules=["gate_proj", "o_proj"])),
        ("afmoe-experts", dict(target_parameters=["experts.down_proj"])),
    ],
)
def test_a_dropout_that_peft_has_no_place_for_goes_on(
    case: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """peft's config of such adapters has none, so that its own loader takes them."""
    make_theirs(case, tmp_path / "base")
    adapted = add_lora(ours(tmp_path / "base"), r=2, lora_dropout=0.5, **fields)
    randomize_adapters(adapted)
    save_lora(adapted, tmp_path / "adapter")
    assert LoraConfig.from_pretrained(tmp_path / "adapter").lora_dropout == 0
    loaded = load_lora(ours(tmp_path / "base"), tmp_path / "adapter", trainable=True)
    losses = []
    for model in (adapted, loaded):
        torch.manual_seed(1)
        ids = torch.arange(12)[None]
        losses.append(model.train()(ids, labels=ids).loss)
    assert torch.equal(*losses)
    (tmp_path / "adapter" / "manifest.json").unlink()
    plain = load_lora(ours(tmp_path / "base"), tmp_path / "adapter", trainable=True)
    assert plain.peft_config["default"].lora_dropout == 0


def test_peft_has_no_dora_on_parameters(base: Callable[[str], Path], tmp_path: Path) -> None:
    adapted = add_lora(ours(base("qwen3_next")), r=2, use_dora=True)
    with pytest.warns(
        UserWarning, match="peft takes adapters on gate_proj, up_proj, down_proj of qwen3_next"
    ):
        save_lora(adapted, tmp_path / "adapter")
    back = load_lora(ours(base("qwen3_next")), tmp_path / "adapter")
    assert torch.equal(logits(back), logits(adapted))


@pytest.mark.parametrize("settings", [
    dict(dora=True), dict(dora=True, targets=("q_proj", "o_proj")), dict(dropout=0.1), dict(targets=("up_proj",)),
])  # fmt: skip
@pytest.mark.parametrize("family", ["qwen2", "qwen3_next"])
def test_a_run_says_at_its_start_what_peft_would_not_read(
    family: str, settings: dict[str, Any], base: Callable[[str], Path], tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = LoraRun(ours(base(family)), LoraSettings(rank=2, **settings))
        said = [str(one.message) for one in caught if "peft takes adapters" in str(one.message)]
        save_lora(run.adapted, tmp_path / "adapter")
    judge = theirs(base(family))
    try:
        back = PeftModel.from_pretrained(judge, tmp_path / "adapter")
        read = {name for name, _ in back.named_parameters() if "lora_B" in name}
        written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        all_read = len(read) == sum("lora_B" in name for name in written)
    except (KeyError, RuntimeError, ValueError):
        all_read = False
    assert bool(said) != all_read
    assert len(said) <= 1


def largest(family: str) -> str:
    """Return a case of a family, with experts if it has some."""
    names = list(FAMILY_CASES[family])
    return next((name for name in names if name in ("experts", "experts-plain")), names[0])


@pytest.mark.filterwarnings("error:peft (has no|takes) adapters")
@pytest.mark.parametrize("family", every(20, FAMILY_CASES))
def test_adapters_on_everything_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """On every linear, expert and router of a family, saved here and placed by peft in transformers."""
    judge = make_theirs(f"{family}-{largest(family)}", tmp_path / "base")
    adapted = save_adapters_on_everything(tmp_path / "base", tmp_path / "adapter")
    back = PeftModel.from_pretrained(judge, tmp_path / "adapter")
    assert_equal_but_for_rounding(logits(back), logits(adapted), limit=1e-4)
    again = load_lora(ours(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))


@pytest.mark.parametrize(
    "family", every(12, [family for family in FAMILY_CASES if family not in ARCHITECTURES])
)
def test_adapters_of_every_family(family: str, tmp_path: Path) -> None:
    """Some have q, k and v, or gate and up, in one linear, as we do, or gates of attention, or no gate of the MLP."""
    torch.manual_seed(1)
    case = next(case for case, (kind, _) in CASES.items() if kind == family)
    of_config(make_config(case)).save_pretrained(tmp_path / "base")
    shape = ours(tmp_path / "base").config
    experts = shape.moe is not None  # parameters of transformers, no linears
    named: Any = ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"
    if family == "falcon_h1":  # peft refuses its out_proj
        named = [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "in_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
    targets = (
        ["qkvg_proj", "o_proj"] if family != "afmoe" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    if shape.latent_attention is not None:
        latents = ["q_b_proj"] if shape.latent_attention.q_lora_rank else []
        latents += ["kv_b_proj", "o_proj"]
        named = ["q_a_proj" if "q_b_proj" in latents else "q_proj", "kv_a_proj_with_mqa", *latents]
        targets = ["qkv_a_proj", *latents]
        if shape.kda is not None:  # Kimi Delta Attention in other layers
            targets.append("qkvg_proj")
    judge = trained_by_transformers(
        tmp_path / "base", tmp_path / "theirs", target_modules=named, r=2
    )
    adapted = load_lora(ours(tmp_path / "base"), tmp_path / "theirs")
    assert_equal_but_for_rounding(
        logits(adapted), logits(judge), limit=1e-4
    )  # norms enlarge small values
    save_lora(adapted, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    targets += (
        ["gate_up_proj", "down_proj"] if family != "afmoe" and not experts else []
    )  # where peft expects experts
    fused = add_lora(ours(tmp_path / "base"), r=3, init_lora_weights=False, target_modules=targets)
    save_lora(fused, tmp_path / "fused")
    back = PeftModel.from_pretrained(theirs(tmp_path / "base"), tmp_path / "fused")
    assert_equal_but_for_rounding(logits(back), logits(fused), limit=1e-4)


PARTS = "(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
KINDS = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"


@pytest.mark.parametrize("fields", [
    # As unsloth writes it, for models with and without images.
    dict(target_modules=rf"(?:.*?(?:language|text).*?{KINDS}.*?{PARTS}.*?)|"
                        rf"(?:\bmodel\.layers\.[\d]{{1,}}\.{KINDS}\.(?:{PARTS}))"),
    dict(target_modules=r"(?:model\.)?layers\.(?:\d+\.)+self_attn\.(?:[qv]_proj)+"),
    dict(target_modules=r".*_proj", exclude_modules=r"(?:.*\.)*(?:mlp|experts)(?:\..*)*"),
    dict(target_modules=["q_proj"], rank_pattern={"nothing": 700}, alpha_pattern={"v_proj": 3}),
])  # fmt: skip
def test_configs_that_peft_reads(
    fields: dict[str, Any], base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Expressions with repeated groups, and patterns that match nothing, which peft ignores."""
    judge = trained_by_transformers(base("qwen3"), tmp_path, r=4, **fields)
    found = load_lora(ours(base("qwen3")), tmp_path)
    assert_equal_but_for_rounding(logits(found), logits(judge))


def test_dora_is_merged_and_taken_away(base: Callable[[str], Path]) -> None:
    model = ours(base("qwen2"))
    before = logits(model)
    adapted = add_lora(model, r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    assert_equal_but_for_rounding(logits(adapted), before)
    train(adapted)
    lengths = [p for name, p in adapted.named_parameters() if "lora_magnitude" in name]
    assert lengths and all(p.requires_grad and p.dtype == torch.float32 for p in lengths)
    tuned = logits(adapted)
    adapted.merge_adapter()
    assert_equal_but_for_rounding(logits(adapted), tuned)
    adapted.unmerge_adapter()
    adapted.add_adapter("other", LoraConfig(target_modules=["q_proj"], use_dora=True))
    adapted.merge_adapter(["default"])
    adapted.merge_adapter(["other"])
    one_by_one = logits(adapted)
    adapted.unmerge_adapter()
    adapted.merge_adapter(["default", "other"])
    assert torch.equal(logits(adapted), one_by_one), "each sum is made from the values before"
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), before)
    assert torch.equal(logits(adapted), tuned)


def test_dora_with_dropout_trains_as_in_peft(base: Callable[[str], Path], tmp_path: Path) -> None:
    """The length of a row scales the frozen product of what dropout has left."""
    fields = dict(target_modules=["o_proj"], use_dora=True, lora_dropout=0.4, r=4)
    judge = trained_by_transformers(base("qwen2"), tmp_path, **fields).train()
    found = load_lora(ours(base("qwen2")), tmp_path, trainable=True).train()
    losses = []
    for model in (judge, found):
        torch.manual_seed(5)
        losses.append(model(token_ids(), labels=token_ids()).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


def test_dora_on_experts_is_refused(tmp_path: Path) -> None:
    make_theirs("qwen3_moe-steps", tmp_path)
    model = CausalLM.from_pretrained(tmp_path, device="cpu")
    with pytest.raises(UsageError, match="DoRA on experts is not supported: leave experts out"):
        add_lora(model, target_modules=["q_proj", "experts"], use_dora=True)


@pytest.mark.parametrize("pattern", [
    r".*\.(self_attn|mlp)\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    r".*\.layers\.\d+\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    r"model\.layers\.(1[0-9]|2[0-3])\..*?\.(q|v)_proj", r".*\.(?:q|v)_proj(?<!lm_head)",
])  # fmt: skip
def test_usual_patterns_are_bounded(pattern: str) -> None:
    assert not [*pattern_mistakes(pattern)]
