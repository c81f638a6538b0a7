"""Hugging Face checkpoints: transformers' own models, small and random, are the judge of every family."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_process
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from te_models import CausalLM, get_preset
from te_models.interop.hf import MAX_SHARD_BYTES, write_hugging_face
from te_models.interop.hf_families import FAMILIES, family_for, family_of
from te_models.saving.pretrained import weights

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32, rope_theta=10000.0)
SIZES: dict[str, Any] = dict(vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)

# One row a case: the family, and what differs from SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama3-tied": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32)),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=500.0))),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "qwen3-window": ("qwen3", dict(head_dim=32, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "mistral": ("mistral", dict(sliding_window=6)),
    "mistral-full": ("mistral", dict(sliding_window=None, head_dim=32)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0, 1, 0])),
    "smollm3-interval": ("smollm3", dict(no_rope_layer_interval=3, tie_word_embeddings=False)),
    "smollm3-window": ("smollm3", dict(no_rope_layers=[1, 1, 0, 1], use_sliding_window=True, sliding_window=5)),
    "qwen3_next": ("qwen3_next", dict(head_dim=32, layer_types=["full_attention"] * 4, mlp_only_layers=[0, 1, 2, 3])),
    "qwen3_next-no-experts": ("qwen3_next", dict(head_dim=16, layer_types=["full_attention"] * 4, num_experts=0)),
}
# transformers ignores partial_rotary_factor where these models have the default RoPE.
HALF = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
CASES |= {f"{kind}-half": (kind, HALF) for kind in ("llama", "qwen2", "qwen3", "mistral", "smollm3")}
# Qwen's gated-attention release: Qwen3 with a wider q_proj.
GATED_CASES = {"headwise": dict(headwise_attn_output_gate=True), "elementwise": dict(elementwise_attn_output_gate=True)}
GATED_CASES |= {"ungated": {}}
CASES |= {name: ("gated", dict(head_dim=16, num_attention_heads=6)) for name in GATED_CASES}
Pair = tuple[Any, Path]


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """A function that gives transformers' model of a case, every parameter random, and the folder it is saved in."""
    made: dict[str, Pair] = {}

    def make(case: str) -> Pair:
        if case not in made:
            kind, changes = CASES[case]
            torch.manual_seed(len(case))
            family = "qwen3" if kind == "gated" else kind
            config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
            model = AutoModelForCausalLM.from_config(config).eval()
            folder = tmp_path_factory.mktemp("hf") / case
            if kind == "gated":
                save_gated(model, folder, **GATED_CASES[case])
            else:
                randomize(model)
                model.save_pretrained(folder)
            made[case] = model, folder
        return made[case]

    return make


class WideQuery(nn.Module):
    """A q_proj whose rows hold, for each group of heads that share a key, their queries and then their gates."""

    def __init__(self, hidden: int, heads: int, groups: int, head_dim: int, gates: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads * (head_dim + gates), hidden))
        self.groups, self.sizes = groups, [heads // groups * head_dim, heads // groups * gates]
        self.gate = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        q, g = nn.functional.linear(x, self.weight).unflatten(-1, (self.groups, -1)).split(self.sizes, dim=-1)
        self.gate = g.flatten(-2)
        return q.flatten(-2)


class GatedOutput(nn.Module):
    """An o_proj whose input is multiplied by the sigmoid of the gates that the q_proj beside it has just made."""

    def __init__(self, inner: nn.Linear, query: WideQuery) -> None:
        super().__init__()
        self.weight, self.query = inner.weight, [query]

    def forward(self, x: Tensor) -> Tensor:
        gate = self.query[0].gate
        gate = (
            gate.repeat_interleave(x.shape[-1] // gate.shape[-1], dim=-1) if gate.shape[-1] else torch.full_like(x, 50)
        )
        return nn.functional.linear(x * gate.sigmoid(), self.weight)


def save_gated(model: Any, folder: Path, **flags: bool) -> None:
    """Turn transformers' Qwen3 into the gated release's and save it as that is published."""
    config = model.config
    gates = {"headwise_attn_output_gate": 1, "elementwise_attn_output_gate": config.head_dim}
    width = sum(gates[flag] for flag in flags)
    for layer in model.model.layers:
        shape = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim, width)
        layer.self_attn.q_proj = WideQuery(*shape)
        layer.self_attn.o_proj = GatedOutput(layer.self_attn.o_proj, layer.self_attn.q_proj)
    randomize(model)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    theirs = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "rope_parameters")}
    theirs |= {"model_type": "qwen2", "use_qk_norm": True, "qkv_bias": False, "rope_theta": 10000.0, "dtype": "float32"}
    theirs |= {"auto_map": {"AutoConfig": "configuration_qwen3.Qwen3Config"}, "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**theirs, **dict.fromkeys(gates, False), **flags}))


def save_hf(model: CausalLM, folder: Path) -> None:
    """Save a model, with one line about the code that its folder needs if transformers has none."""
    gated = model.config.attention_gate != "none" and not model.config.zero_centered_norm
    with (
        pytest.warns(UserWarning, match="needs .* to load in transformers|needs its own code")
        if gated
        else nullcontext()
    ):
        model.save_pretrained(folder, format="hf")


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Values of a trained model's size, norms and biases included."""
    for name, parameter in model.named_parameters():
        centre = 0.0 if parameter.ndim > 1 or "bias" in name or parameter.abs().max() == 0 else 1.0
        parameter.copy_(centre + torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))


def load(folder: Path, **options: Any) -> CausalLM:
    return CausalLM.from_pretrained(folder, **{"device": "cpu", "engine": "emulated", **options}).eval()


def prompts() -> tuple[Tensor, Tensor]:
    """ids and mask of a batch of unequal prompts, padded on the left."""
    lengths, ids = (13, 5, 9), torch.randint(1, SIZES["vocab_size"], (3, 13))
    mask = torch.stack([torch.arange(13) >= 13 - length for length in lengths]).long()
    return ids * mask, mask


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, theirs: Callable[..., Pair]) -> None:
    judge, folder = theirs(case)
    model = load(folder)
    assert model.dtype == torch.float32 and model.recipe.name == "bf16"
    ids, mask = prompts()
    reference = judge(ids, attention_mask=mask).logits
    assert reference.std() > 0.1, "a comparison of zeros would prove nothing"
    single = model(ids[:1]).logits
    torch.testing.assert_close(single, judge(ids[:1]).logits, atol=1e-4, rtol=0)
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[mask.bool()], reference[mask.bool()], atol=1e-4, rtol=0)


# One of each family, and every feature that treats old positions differently from new ones.
TEXT_CASES = ["llama3", "llama-linear", "qwen2-window", "qwen3", "mistral", "smollm3", "qwen3_next", "headwise"]


@pytest.mark.parametrize("case", [*TEXT_CASES, "elementwise"])
@torch.no_grad()
def test_greedy_text_is_that_of_transformers(case: str, theirs: Callable[..., Pair]) -> None:
    judge, folder = theirs(case)
    model = load(folder)
    ids, mask = prompts()
    expected = judge.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=64), expected)
    single = model.generate(ids[:1], max_new_tokens=64, use_cache=False)  # the first prompt has no padding
    assert torch.equal(single, expected[:1]) and len(set(single[0, 13:].tolist())) > 4


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_given_back_it_is_equal_in_every_bit(case: str, theirs: Callable[..., Pair], tmp_path: Path) -> None:
    judge, folder = theirs(case)
    save_hf(load(folder), tmp_path / "back")
    assert same_tensors(tensors_of(folder), tensors_of(tmp_path / "back"))
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back")]
    assert configs[0] == configs[1]
    if CASES[case][0] == "gated":
        return  # transformers has no such architecture
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    ids, mask = prompts()
    assert torch.equal(again.eval()(ids, attention_mask=mask).logits, judge(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("case", ["llama3", "qwen2-window", "smollm3", "qwen3_next", "headwise"])
def test_through_our_own_format_and_back(case: str, theirs: Callable[..., Pair], tmp_path: Path) -> None:
    _, folder = theirs(case)
    load(folder, recipe="current").save_pretrained(tmp_path / "own")
    own = load(tmp_path / "own")
    assert own.recipe.name == "current" and own.config == load(folder).config
    save_hf(own, tmp_path / "back")
    assert same_tensors(tensors_of(folder), tensors_of(tmp_path / "back"))
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.parametrize("case", ["llama3", "llama-linear", "qwen2-window", "smollm3", "qwen3_next"])
@torch.no_grad()
def test_files_of_older_versions_say_the_same(case: str, theirs: Callable[..., Pair], tmp_path: Path) -> None:
    """Before transformers 5: rope_theta and rope_scaling, torch_dtype, no layer_types; tables tied and still saved."""
    judge, folder = theirs(case)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    old = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype"), "tie_word_embeddings": False}
    old |= {"partial_rotary_factor": rope.pop("partial_rotary_factor")} if "partial_rotary_factor" in rope else {}
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if case != "qwen3_next":
        config.pop("layer_types", None)
    tensors = tensors_of(folder) | {"lm_head.weight": judge.lm_head.weight.clone()}
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    for tied in {False, judge.config.tie_word_embeddings}:
        (tmp_path / "config.json").write_text(json.dumps({**config, **old, "tie_word_embeddings": tied}))
        ids, mask = prompts()
        logits = load(tmp_path)(ids, attention_mask=mask).logits
        reference = judge(ids, attention_mask=mask).logits
        torch.testing.assert_close(logits[mask.bool()], reference[mask.bool()], atol=1e-4, rtol=0)


def test_text_ends_as_generation_config_says(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    judge, folder = theirs("llama2")
    judge.save_pretrained(tmp_path)
    ids, mask = prompts()
    free = load(folder).generate(ids, attention_mask=mask, max_new_tokens=12)[:, 13:]
    ends = dict(eos_token_id=[int(free[0, 4]), int(free[2, 7])], pad_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    judge = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = judge.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(load(tmp_path).generate(ids, attention_mask=mask, max_new_tokens=12), expected)
    assert (expected[:, 13:] == 3).any()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


@pytest.mark.parametrize("recipe", ["bf16", "current"])
@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("case", ["llama3", "qwen2", "mistral", "ungated"])
def test_a_gate_starts_as_the_identity_and_trains(
    case: str, gate: str, recipe: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    _, folder = theirs(case)
    options = dict(recipe=recipe, dtype=torch.float32 if recipe == "bf16" else torch.bfloat16)
    plain, gated = load(folder, **options), load(folder, attention_gate=gate, **options)
    ids, mask = prompts()
    with torch.no_grad():
        assert torch.equal(gated(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    assert gated.config.attention_gate == gate and plain.config.attention_gate == "none"
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        losses.append(gated.train()(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    start = gated.config.q_size + 2 * gated.config.kv_size
    rows = gated.config.gate_size if gate == "elementwise" else gated.config.num_attention_heads
    moved = gated.layers[1].self_attn.qkvg_proj.weight[start : start + rows].abs().amax(dim=1)
    assert (moved > 0).all() and losses[-1] < losses[0], "every gate has left its start"
    plain.save_pretrained(tmp_path / "own")
    assert torch.equal(
        load(tmp_path / "own", attention_gate=gate)(ids, attention_mask=mask).logits,
        plain(ids, attention_mask=mask).logits,
    )


@pytest.mark.parametrize("case", ["qwen3", "llama2"])
def test_a_model_that_was_given_a_gate_comes_back_from_hugging_faces_format(
    case: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    model = load(theirs(case)[1], attention_gate="elementwise")
    with torch.no_grad():
        model.layers[0].self_attn.qkvg_proj.weight.normal_(0, 0.1)
    save_hf(model, tmp_path / "gated")
    again = load(tmp_path / "gated")
    assert again.config == model.config and again.config.attention_gate == "elementwise"
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("llama2", dict(model_type="gpt2"), "unknown architecture (model_type) 'gpt2'"),
        ("llama2", dict(model_type="lama"), "did you mean 'llama'"),
        ("llama2", dict(model_type="mixtral"), "'mixtral'"),
        ("llama2", dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        ("llama2", dict(attention_bias=True), "missing: model.layers.0.self_attn.k_proj.bias"),
        ("llama2", dict(mlp_bias=True), "missing: model.layers.0.mlp.down_proj.bias"),
        ("llama2", dict(hidden_act="quick_gelu"), "hidden_act='quick_gelu'"),
        ("llama2", dict(attention_dropout=0.1), "attention_dropout=0.1"),
        ("llama2", dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantization_config="),
        ("llama2", dict(rope_parameters=dict(rope_type="proportional", factor=4.0)), "'proportional' is not supp"),
        ("llama2", dict(rope_parameters=None, rope_scaling=dict(type="axial", factor=2.0)), "'axial'"),
        (
            "llama2",
            dict(rope_parameters=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)),
            "'linear' is not",
        ),
        ("llama2", dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "by layer type"),
        ("llama2", dict(sliding_window=64), "sliding_window=64"),
        ("llama2", dict(num_local_experts=8), "num_local_experts=8"),
        ("llama2", dict(auto_map=dict(AutoModel="code.Model")), "auto_map="),
        ("llama2", dict(head_dim="16"), "head_dim='16'"),
        ("llama2", dict(dtype="int8"), "dtype 'int8'"),
        ("qwen3", dict(attention_bias=True), "missing: model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", dict(layer_types=["full_attention"] * 3 + ["linear_attention"]), "'linear_attention'"),
        ("smollm3", dict(mlp_bias=True), "missing: model.layers.0.mlp.down_proj.bias"),
        ("headwise", dict(qkv_bias=True), "qkv_bias=True"),
        ("headwise", dict(use_sliding_window=True), "use_sliding_window=True"),
        ("headwise", dict(elementwise_attn_output_gate=True), "together are not supported"),
        ("qwen3_next", dict(mlp_only_layers=[0, 1, 2]), "num_experts=512 in layer 3"),
        (
            "qwen3_next",
            dict(layer_types=["full_attention"] * 3 + ["linear_attention"]),
            "layer 3 is 'linear_attention'",
        ),
        ("qwen3_next", dict(layer_types=None), "layer 0 is 'linear_attention'"),
        ("llama2", dict(hidden_size=None), "lacks hidden_size"),
        ("smollm3", dict(num_hidden_layers="4"), "num_hidden_layers='4' is not a whole number"),
        ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers has 1 entries"),
        ("smollm3", dict(no_rope_layers=7), "config.json: "),
        ("llama2", dict(rope_parameters="linear"), "config.json: "),
        ("llama2", dict(is_encoder_decoder=True), "is_encoder_decoder=True"),
        (
            "llama2",
            dict(intermediate_size=100),
            "model.layers.0.mlp.gate_proj.weight has shape [96, 64], not [100, 64]",
        ),
        ("llama2", dict(num_hidden_layers=5), "num_hidden_layers is 5, and the tensors have 4"),
        ("llama2", dict(num_hidden_layers=3), "unexpected: model.layers.3"),
    ],
)
def test_what_a_config_asks_for_and_is_not_computed_is_named(
    case: str, change: dict[str, Any], message: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    folder = theirs(case)[1]
    config = json.loads((folder / "config.json").read_text()) | change
    if change.get("hidden_size", 1) is None:
        del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    refused(tmp_path, message)


def test_what_changes_nothing_is_accepted(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    folder = theirs("llama2")[1]
    more = {"transformers.js_config": {"dtype": "q4"}, "_name_or_path": "x", "unsloth_fixed": True, "temperature": 0.6}
    more |= {"pretraining_tp": 2, "rope_interleaved": False, "some_feature": None, "id2label": {"0": "a"}}
    config = json.loads((folder / "config.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    model = load(tmp_path)
    assert model.config == load(folder).config
    model.save_pretrained(tmp_path / "back", format="hf")
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


def refused(folder: Path | str, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=".") as error:
        load(folder, **options)  # type: ignore[arg-type]
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400, error.value


@pytest.fixture
def sharded(theirs: Callable[..., Pair], tmp_path: Path) -> Path:
    """A checkpoint of several shards."""
    theirs("llama3")[0].save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def test_shards_are_read_and_damage_is_named(sharded: Path, theirs: Callable[..., Pair]) -> None:
    ids = prompts()[0]
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert torch.equal(load(sharded)(ids).logits, load(theirs("llama3")[1])(ids).logits)
    tensors = tensors_of(sharded)
    for value in (math.nan, -math.inf):
        name = sorted(load_file(shards[1]))[0]
        good = shards[1].read_bytes()
        broken = {
            n: t.index_fill(0, torch.tensor([0]), value) if n == name else t for n, t in load_file(shards[1]).items()
        }
        save_file(broken, shards[1], {"format": "pt"})
        refused(sharded, f"{name} has a NaN or an infinity")
        shards[1].write_bytes(good)
    assert same_tensors(tensors, tensors_of(sharded))
    moved = shards[1].rename(sharded / "elsewhere")
    refused(sharded, f"lacks {shards[1].name}")
    moved.rename(shards[1]).write_bytes(shards[0].read_bytes())
    refused(sharded, "is both in")
    shards[1].write_bytes(shards[0].read_bytes()[:1000])
    refused(sharded, f"{shards[1].name} is damaged")
    (sharded / "model.safetensors.index.json").write_text("{}")
    refused(sharded, "no map of tensor names")
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "holds no weights")
    (sharded / "pytorch_model.bin").touch()
    refused(sharded, "as a pickle (pytorch_model.bin)")


def test_what_cannot_be_done_is_refused(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    refused(theirs("headwise")[1], "cannot become 'elementwise'", attention_gate="elementwise")
    refused(theirs("elementwise")[1], "cannot become 'none'", attention_gate="none")
    model = load(theirs("mistral")[1])
    with pytest.raises(ValueError, match="did you mean 'hf'"):
        model.save_pretrained(tmp_path / "x", format="hff")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds thesis.txt"):
        load(theirs("llama2")[1]).save_pretrained(tmp_path, format="hf")
    assert not (tmp_path / "x").exists() and (tmp_path / "thesis.txt").exists()


def test_saving_in_shards(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    judge, folder = theirs("qwen3")
    model = load(folder)
    write_hugging_face(model, model.origin, tmp_path / "back", weights(model), max_shard_bytes=60_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3 and MAX_SHARD_BYTES == 5e9
    assert same_tensors(tensors_of(folder), tensors_of(tmp_path / "back"))
    ids = prompts()[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(ids).logits, judge(ids).logits)
    load(tmp_path / "back").save_pretrained(tmp_path / "back", format="hf")
    assert [f.name for f in (tmp_path / "back").glob("*.safetensors")] == ["model.safetensors"], (
        "the old shards are gone"
    )


@pytest.mark.parametrize("preset", ["gated-nano", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "smollm3-3b"])
def test_a_model_of_our_own_is_given_away(preset: str, tmp_path: Path) -> None:
    changes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    changes |= dict(head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=None, num_hidden_layers=3)
    if get_preset(preset).no_rope_layers:
        changes |= dict(no_rope_layers=[1, 1, 0])
    model = CausalLM.from_preset(preset, device="cpu", dtype=torch.float32, **changes).eval()
    save_hf(model, tmp_path)
    ids = prompts()[0] % 96
    assert torch.equal(load(tmp_path)(ids).logits, model(ids).logits)
    if model.config.attention_gate == "none":
        judge, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        torch.testing.assert_close(judge.eval()(ids).logits, model(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.model_type}{'-gated' * bool(family.marks)}")
def test_a_table_reads_what_it_writes(family: Any) -> None:
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    theirs = {
        "model_type": family.model_type,
        **sizes,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention"] * 2,
        "num_experts": 0,
        "decoder_options": {"attention_gate": "headwise", "sliding_window": 8},
        "num_dense_layers": 2,
        "mlp_layer_types": ["dense"] * 2,
    }
    allowed = family.known() | {"model_type"}
    config = family.read({key: value for key, value in theirs.items() if key in allowed})
    assert family.read(family.write(config)) == config
    assert family_of(family.write(config)) is family and family_for(config, family) is family


def test_the_hub_is_asked_for_names_and_offline_says_so(
    monkeypatch: pytest.MonkeyPatch, theirs: Any, pretend: Any
) -> None:
    refused("nobody/nothing-0.1b", "nobody/nothing-0.1b is no folder here, and the Hugging Face hub did not give it")
    refused("/no/such/folder", "/no/such/folder")
    folder = theirs("llama2")[1]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert load("meta/llama").config == load(folder).config  # type: ignore[arg-type]
    pretend("huggingface_hub", None)
    refused("meta/llama", "pip install -U 'te-models[hf]'")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_the_files_or_the_one_asked_for(dtype: Any, theirs: Callable[..., Pair], tmp_path: Path) -> None:
    judge, folder = theirs("llama3")
    model = load(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path, format="hf")
    expected = {name: value.to(dtype) for name, value in judge.state_dict().items()}
    assert same_tensors(tensors_of(tmp_path), expected) and load(tmp_path).dtype == dtype


STREAMING = """
import resource, sys, torch
from te_models import CausalLM

def peak(): return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

CausalLM.from_pretrained(sys.argv[2], device="cpu", engine="emulated")  # everything is imported and warm
open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = CausalLM.from_pretrained(sys.argv[1], device="cpu", engine="emulated")
print(peak() - before - sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
def test_loading_takes_one_shard_of_memory_beside_the_model(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    sizes = dict(vocab_size=4000, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8)
    model = CausalLM.from_preset("qwen3-0.6b", device="cpu", **{**sizes, "head_dim": 64, "num_key_value_heads": 8})
    shard = 20_000_000
    write_hugging_face(model, model.origin, tmp_path, weights(model), max_shard_bytes=shard)
    files = [file.stat().st_size for file in tmp_path.glob("model-*.safetensors")]
    assert len(files) >= 4
    command = [sys.executable, "-c", STREAMING, str(tmp_path), str(theirs("llama2")[1])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_process(command, env=environment)
    assert int(done.stdout) <= 1.15 * max(files), f"{int(done.stdout) / max(files):.2f} of the largest shard"
