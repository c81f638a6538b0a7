"""Folders of models that no architecture of transformers computes, loaded without te-models.

TE_MODELS_TRANSFORMERS=FOLDER judges by the transformers in FOLDER, where `pip install --target FOLDER
transformers==4.57.6` has put one; the slow tests ran so with 4.57.6, 5.0.0, 5.3.0, 5.8.0 and 5.12.0.
"""

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import AutoModelForCausalLM, takes_a_cache_by_either_name

from te_models import CausalLM, ModelConfig, list_presets
from te_models.config.presets import PRESETS
from te_models.interop.hf_families import family_for
from te_models.interop.hf_parts import OWN_OPTIONS

pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from te_models.training.lora import add_lora, save_lora

SIZES: dict[str, Any] = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=3
)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0] * 8,
    long_factor=[2.0 + i for i in range(8)],
    factor=4.0,
)
LONGROPE |= dict(original_max_position_embeddings=8)
MIXED = ("sliding_attention", "full_attention", "sliding_attention")
TWO = dict(rope_theta=50.0, partial_rotary_factor=0.5, rope_type="linear", factor=2.0)
CASES: dict[str, dict[str, Any]] = {
    "elementwise": {},
    "headwise": dict(attention_gate="headwise"),
    "tied": dict(tie_word_embeddings=True),
    "tied-headwise": dict(tie_word_embeddings=True, attention_gate="headwise", head_dim=32),
    "qk-norm": dict(qk_norm=True),
    "zero-centered": dict(zero_centered_norm=True),
    "qwen3-next": dict(qk_norm=True, zero_centered_norm=True, partial_rotary_factor=0.5),
    "window": dict(sliding_window=5),
    "window-by-layer": dict(sliding_window=4, layer_types=MIXED, qk_norm=True),
    "partial": dict(partial_rotary_factor=0.5, qk_norm=True),
    "some-without-rope": dict(no_rope_layers=(1, 0, 1)),
    "bias": dict(attention_bias=True, attention_gate="headwise"),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
    "dynamic": dict(rope_scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=8),
    "llama3": dict(rope_scaling=LLAMA3, rope_theta=500.0),
    "yarn": dict(rope_scaling=YARN, qk_norm=True),
    "longrope": dict(rope_scaling=LONGROPE),
    "softplus": dict(
        attention_gate="headwise", attention_gate_activation="softplus", attention_output_bias=True
    ),
    "layer-norm": dict(norm_type="layer", parallel_residual=True, residual_multiplier=0.5),
    "layer-norms": dict(
        norm_type="layer", norm_position="both", zero_centered_norm=True, qk_norm=True
    ),
    "chunks": dict(
        attention_chunk_size=4,
        layer_types=("chunked_attention", "full_attention", "chunked_attention"),
        no_rope_layers=(1, 0, 1),
        qk_norm=True,
        qk_norm_weights=False,
        qk_norm_after_rope=True,
        qk_norm_layers="rope",
    ),
    "slots": dict(
        query_scale_beta=0.4,
        query_scale_length=3,
        query_scale_rule="slot",
        no_rope_layers=(1, 0, 1),
    ),
    "post-norm": dict(norm_position="post", qk_norm=True, qk_norm_scope="all_heads"),
    "four-norms": dict(
        norm_position="both", zero_centered_norm=True, hidden_act="gelu_pytorch_tanh"
    ),
    "caps": dict(
        attn_logit_softcapping=3.0, final_logit_softcapping=5.0, sliding_window=4, layer_types=MIXED
    ),
    "sinks": dict(attention_sinks=True, sliding_window=4, layer_types=MIXED),
    "sinks-caps": dict(attention_sinks=True, attn_logit_softcapping=3.0, attention_gate="none"),
    "two-ropes": dict(sliding_window=4, layer_types=MIXED, rope_theta=500.0, sliding_rope=TWO),
    "interleaved": dict(rope_interleaved=True, partial_rotary_factor=0.5),
    "query-scale": dict(query_scale_beta=0.3, query_scale_length=4, attention_multiplier=0.2),
    "plain-mlp": dict(mlp_gate=False, hidden_act="relu2", mlp_bias=True),
    "multipliers": dict(
        embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, hidden_act="gelu"
    ),
    "ungated": dict(
        attention_gate="none", sliding_window=4, partial_rotary_factor=0.5, attention_bias=True
    ),
}
OTHER = os.environ.get("TE_MODELS_TRANSFORMERS")
SLOW = pytest.mark.slow  # the options of presets and drawn ones, each of which is above
# Not those of architectures that transformers has: with linear attention, experts or short convolutions.
GATED_PRESETS = [
    name
    for name in list_presets()
    if PRESETS[name].get("attention_gate", "elementwise") != "none"
    and not {"linear_attention", "moe", "short_conv"} & {*PRESETS[name]}
]
MORE = {
    name: {
        key: value[: SIZES["num_hidden_layers"]]
        if key in ("no_rope_layers", "layer_types")
        else value
        for key, value in PRESETS[name].items()
        if key not in SIZES and not key.endswith("token_id")
    }
    for name in GATED_PRESETS
}


def drawn(seed: int) -> dict[str, Any]:
    """A config with random options."""
    draw = random.Random(seed)
    found: dict[str, Any] = dict(
        attention_gate=draw.choice(["elementwise", "headwise", "none"]), rms_norm_eps=1e-6
    )
    found |= {
        name: draw.random() < 0.5 for name in ("attention_bias", "qk_norm", "zero_centered_norm")
    }
    found |= dict(
        tie_word_embeddings=draw.random() < 0.5,
        num_key_value_heads=draw.choice([1, 2, 4]),
        head_dim=16,
    )
    found |= draw.choice([{}, dict(sliding_window=3), dict(sliding_window=3, layer_types=MIXED)])
    found |= draw.choice([{}, dict(no_rope_layers=(0, 1, 1)), dict(partial_rotary_factor=0.25)])
    found |= dict(
        norm_position=draw.choice(["pre", "post", "both"]),
        hidden_act=draw.choice(["silu", "gelu", "relu2"]),
    )
    found |= dict(
        mlp_gate=draw.random() < 0.7,
        mlp_bias=draw.random() < 0.3,
        rope_interleaved=draw.random() < 0.3,
    )
    found |= draw.choice(
        [{}, dict(attn_logit_softcapping=4.0), dict(residual_multiplier=0.7, logits_scaling=1.5)]
    )
    return {
        **found,
        "rope_scaling": draw.choice([None, dict(rope_type="linear", factor=3.0), YARN]),
    }


MORE |= {f"drawn-{seed}": drawn(seed) for seed in range(8)}
NAMES = [*CASES, *(pytest.param(name, marks=SLOW) for name in MORE)]
CASES |= MORE

# Run by a Python in which te_models cannot be imported.
JUDGE = """
import json, sys, warnings
from pathlib import Path
sys.modules["te_models"] = None
warnings.simplefilter("ignore")
warnings.filterwarnings("error", "`past_key_values` is deprecated")
sys.path[:0] = sys.argv[2:]
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
root, found = Path(sys.argv[1]), {}
for case in sorted(root.iterdir()):
    if not (case / "wanted.pt").exists():
        continue
    wanted = torch.load(case / "wanted.pt")
    ids, mask, prompt = wanted["ids"], wanted["mask"], wanted["ids"][:, :6]
    model, report = AutoModelForCausalLM.from_pretrained(
        case / "hf", trust_remote_code=True, output_loading_info=True, dtype=torch.float32
    )
    model.eval()
    result = found[case.name] = {"class": type(model).__name__, "report": [k for k, v in report.items() if v]}
    greedy = dict(max_new_tokens=7, do_sample=False)
    with torch.no_grad():
        output = model(ids, labels=ids, output_hidden_states=True)
        padded = model(ids, attention_mask=mask).logits
        result["logits"] = float((output.logits - wanted["logits"]).abs().max())
        result["padded"] = float((padded - wanted["padded"])[mask.bool()].abs().max())
        result["loss"] = float((output.loss - wanted["loss"]).abs())
        result["kept"] = float((model(ids, logits_to_keep=2).logits - output.logits[:, -2:]).abs().max())
        result["states"] = len(output.hidden_states)
        result["generated"] = torch.equal(model.generate(prompt, **greedy), wanted["generated"])
        result["no cache"] = torch.equal(model.generate(prompt, **greedy, use_cache=False), wanted["generated"])
        for name in ("cache", "past_key_values") if result["class"].startswith("TEModels") else ():
            past, other = transformers.DynamicCache(), transformers.DynamicCache()
            model(prompt, **{name: past})
            result[name] = float((model(ids[:, 6:], **{name: past}).logits - output.logits[:, 6:]).abs().max())
            result["generated"] &= torch.equal(model.generate(prompt, **greedy, **{name: other}), wanted["generated"])
            padding, rest = torch.zeros_like(ids[:, :3]), ids[:, 6:]
            seen = torch.cat((torch.ones_like(prompt), padding, torch.ones_like(rest)), 1)
            past = transformers.DynamicCache()
            model(torch.cat((prompt, padding), 1), attention_mask=seen[:, :9], **{name: past})
            step = model(rest, attention_mask=seen, **{name: past}).logits
            result["right " + name] = float((step - output.logits[:, 6:]).abs().max())
        static = model.generate(prompt, **greedy, cache_implementation="static")
        result["static"] = torch.equal(static, wanted["generated"])
        left = torch.cat((torch.zeros_like(ids[:, :3]), prompt), 1)
        seen = torch.cat((torch.zeros_like(ids[:, :3]), torch.ones_like(prompt)), 1)
        result["left"] = torch.equal(model.generate(left, attention_mask=seen, **greedy)[:, 3:], wanted["generated"])
    base = AutoModel.from_pretrained(case / "hf", trust_remote_code=True, dtype=torch.float32)
    result["base"] = type(base).__name__
    model.save_pretrained(case / "again")
    if (case / "adapter").exists():
        import peft
        adapted = peft.PeftModel.from_pretrained(model, case / "adapter")
        with torch.no_grad():
            result["adapter"] = float((adapted(ids).logits - wanted["adapted"]).abs().max())
        adapted.unload()
    if case.name in ("elementwise", "window-by-layer"):
        gradients = []
        for recompute in (False, True):
            model.train().zero_grad()
            if recompute:
                model.gradient_checkpointing_enable()
            model.requires_grad_(True)(ids, labels=ids).loss.backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        result["recompute"] = all(torch.allclose(gradients[0][n], gradients[1][n], atol=1e-6) for n in gradients[0])
json.dump(found, open(root / "found.json", "w"))
"""


def make(**changes: Any) -> CausalLM:
    """A model with random values in every parameter, also in norms and biases."""
    torch.manual_seed(len(str(changes)))
    config = ModelConfig(**{**SIZES, **changes})
    model = CausalLM(config, dtype=torch.float32, device="cpu", engine="emulated").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [2, 14], and a mask with padding on the left of the first row."""
    ids = torch.randint(0, 131, (2, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Folders of the cases that are asked for, and the results that a fresh process computed from them."""
    root = tmp_path_factory.mktemp("remote")
    own = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    asked = {item.callspec.params["case"] for item in own}
    for case, changes in CASES.items():
        if case not in asked or (
            OTHER and is_next(case)
        ):  # before 5.19 those fail in a code of transformers
            continue
        model, (ids, mask) = make(**changes), prompts()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model(ids, labels=ids)
            wanted = dict(ids=ids, mask=mask, logits=output.logits, loss=output.loss)
            wanted["padded"] = model(ids, attention_mask=mask).logits
            wanted["generated"] = model.generate(ids[:, :6], max_new_tokens=7, do_sample=False)
            model.save_pretrained(root / case / "hf", format="hf")
            if case in ("headwise", "qk-norm", "gated-nano") and not OTHER:
                targets = (
                    ["qkvg_proj", "up_proj"]
                    if case == "headwise"
                    else ["g_proj", "q_proj", "down_proj"]
                )
                adapted = add_lora(
                    model, r=3, target_modules=targets, init_lora_weights=False
                ).eval()
                save_lora(adapted, root / case / "adapter")
                wanted["adapted"] = adapted(ids).logits
        torch.save(wanted, root / case / "wanted.pt")
    (root / "judge.py").write_text(JUDGE)
    places = {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = [
        sys.executable,
        "-I",
        str(root / "judge.py"),
        str(root),
        *(OTHER.split(os.pathsep) if OTHER else []),
    ]
    done = subprocess.run(
        run, cwd=root, capture_output=True, text=True, env={**os.environ, **places}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((root / "found.json").read_text()), root


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_transformers_without_te_models_computes_the_same(case: str, results: Any) -> None:
    if OTHER and is_next(case):
        return
    found = results[0][case]
    assert found["report"] == [], "tensors are missing, unexpected or of another shape"
    for name in ("logits", "padded", "loss", "kept"):
        assert found[name] < 1e-5, f"{name}: {found[name]:.1e}"
    assert found["generated"] and found["static"]
    if case == "slots":  # padding counts, as in transformers' Llama 4
        return
    assert found["left"]
    if case != "dynamic":  # keys in a cache keep the angles of when the text was short
        assert found["no cache"]
    if case not in ("dynamic", "longrope"):
        for name in ("cache", "past_key_values"):
            assert max(found.get(name, 0), found.get(f"right {name}", 0)) < 1e-5
    next_model = {"qwen3-next"} | {
        name for name in CASES if CASES[name].get("zero_centered_norm") and is_next(name)
    }
    assert (found["class"] == "Qwen3NextForCausalLM") == (case in next_model)
    assert found["states"] == 4 and found.get("recompute", True) and found.get("adapter", 0) < 1e-5


def is_next(case: str) -> bool:
    return family_for(ModelConfig(**{**SIZES, **CASES[case]})).model_type == "qwen3_next"


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_a_folder_saved_by_transformers_is_read_back_exactly(case: str, results: Any) -> None:
    """Also after transformers has loaded and saved it."""
    if OTHER and is_next(case):
        return
    model, ids = make(**CASES[case]), prompts()[0]
    for folder in ("hf", "again"):
        again = CausalLM.from_pretrained(
            results[1] / case / folder, device="cpu", engine="emulated"
        ).eval()
        assert again.config == model.config
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.fixture
def tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with a tied head as transformers loads it, with the code in its folder."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(tie_word_embeddings=True).save_pretrained(tmp_path / "model", format="hf")
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", trust_remote_code=True, dtype=torch.float32
        )


@torch.no_grad()
def test_a_cache_has_either_name(tied: Any) -> None:
    takes_a_cache_by_either_name(tied, prompts()[0])
    past = tied.model(prompts()[0], past_key_values=None, use_cache=True)[1]
    assert past.get_seq_length() == 14


def test_loading_leaves_loaded_tensors_as_they_are(tied: Any) -> None:
    """transformers 5.0 initializes every module of a model with code of its own, and leaves it to the functions of
    nn.init to skip what was loaded; 5.3 believes that the tied head was loaded."""
    before = {name: p.detach().clone() for name, p in tied.named_parameters()}
    for p in tied.parameters():
        p._is_hf_initialized = True  # as loading leaves it
    with pytest.importorskip("transformers.initialization").guard_torch_init_functions():
        tied.apply(tied._init_weights)
    assert all(torch.equal(p, before[name]) for name, p in tied.named_parameters())
    tied.lm_head.weight = torch.nn.Parameter(torch.empty_like(tied.lm_head.weight, device="meta"))
    tied.tie_weights(missing_keys=set(), recompute_mapping=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_the_folder_says_that_it_needs_code(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"/gated needs its own code .*trust_remote_code=True"
    ) as caught:
        make().save_pretrained(tmp_path / "gated", format="hf")
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    names = {path.name for path in (tmp_path / "gated").iterdir()}
    assert {"modeling_te_models.py", "configuration_te_models.py"} <= names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(attention_gate="none").save_pretrained(tmp_path / "gated", format="hf")
    assert not {path.name for path in (tmp_path / "gated").iterdir()} & {"modeling_te_models.py"}
    again = CausalLM.from_pretrained(tmp_path / "gated", device="cpu", attention_gate="headwise")
    with pytest.warns(UserWarning, match="needs its own code"):
        again.save_pretrained(tmp_path / "given", format="hf")


def test_the_options_are_those_of_the_code() -> None:
    path = (
        Path(sys.modules["te_models"].__file__ or "").parent
        / "interop/remote_code/configuration_te_models.py"
    )
    names = {
        line.split('"')[1]
        for line in path.read_text().splitlines()
        if line.startswith('    "') and '": ' in line
    }
    assert names == set(OWN_OPTIONS)
