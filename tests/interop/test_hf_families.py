"""Every family of decoders in ten odd shapes: transformers' own models, small and random, are the judge."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, FAMILY_CASES, make_config
from fewer import every
from hf_models import load, randomize, tensors_of
from judge import CACHE, AutoModelForCausalLM, transformers
from torch import Tensor

from te_models import CausalLM, ModelConfig, get_preset, list_presets
from te_models.errors import CheckpointError, ConfigError
from te_models.interop.hf import describe
from te_models.interop.hf_families import FAMILIES, family_for, family_of
from te_models.interop.origin import Origin

Pair = tuple[Any, Path]
TOLERANCE = 2e-5  # of FP32 rounding, relative to the size of the logits


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function that gives transformers' model of a case, every parameter random, and the folder it is saved in."""
    made: dict[str, Pair] = {}

    def make(case: str) -> Pair:
        if case not in made:
            torch.manual_seed(len(case))
            model = AutoModelForCausalLM.from_config(make_config(case), attn_implementation="eager").eval()
            randomize(model)
            folder = tmp_path_factory.mktemp("families") / case
            model.save_pretrained(folder)
            made[case] = model, folder
        return made[case]

    return make


def close(ours: Tensor, reference: Tensor) -> None:
    size = reference.abs().max().item()
    assert size > 0.05, "a comparison of zeros would prove nothing"
    torch.testing.assert_close(ours, reference, atol=TOLERANCE * max(size, 1.0), rtol=0)


def test_every_new_family_has_ten_shapes() -> None:
    few = {family for family, cases in FAMILY_CASES.items() if len(cases) < 10}
    assert few == {"llama", "qwen3", "smollm3"}, "these have others in test_hf.py, and hybrids in test_hybrid.py"
    others = {"mistral", "qwen2", "qwen3_5_text", "qwen3_5", "qwen3_5_moe", "te_models_decoder"}
    others |= {"gemma3", "mistral3", "kimi_k2"}  # in test_hf_nested.py
    assert set(FAMILY_CASES) | others == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize(
    "name", every(2, [name for name in list_presets() if get_preset(name).attention_gate == "none"])
)
def test_presets_have_the_parameters_of_transformers_models(name: str) -> None:
    config = get_preset(name)
    written = family_for(config).write(config)
    with torch.device("meta"):
        kind = written.pop("model_type")
        judge = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **written))
    assert sum(p.numel() for p in judge.parameters()) == config.num_parameters


def test_a_model_that_no_family_has_names_the_nearest_and_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="the nearest, 'qwen3_5_moe_text', lacks attention_sinks=True$"):
        family_for(get_preset("gated-moe-nano", attention_sinks=True))


def test_gemma_means_the_approximation_of_gelu() -> None:
    """As its first files have it, before transformers changes the word in what it saves."""
    document = {**make_config("gemma-odd").to_dict(), "hidden_act": "gelu"}
    assert family_of(document).read(document).hidden_act == "gelu_pytorch_tanh"


LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=9)
# A model that began here -> the family that it is written as; transformers refuses a family that comes before it.
REFUSED: dict[str, dict[str, Any]] = {
    "mistral": dict(hidden_size=20),  # no multiple of the heads, as Llama's config wants it
    "seed_oss": dict(attention_output_bias=True, mlp_bias=True),  # InternLM 3 has biases everywhere or nowhere
    "te_models_decoder": dict(partial_rotary_factor=0.5, rope_scaling=dict(rope_type="linear", factor=2.0)),
    "phi3": dict(partial_rotary_factor=0.5, rope_scaling=LONG, hidden_size=48),
}


@pytest.mark.filterwarnings("ignore:.*needs its own code in transformers")
@pytest.mark.parametrize("family", REFUSED)
def test_a_folder_is_of_a_family_whose_config_transformers_takes(family: str, tmp_path: Path) -> None:
    sizes = dict(vocab_size=64, hidden_size=24, intermediate_size=16, num_hidden_layers=1, num_attention_heads=3)
    shape: dict[str, Any] = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "attention_gate": "none"}
    model = CausalLM(ModelConfig(**{**shape, **REFUSED[family]}), device="cpu", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "own", format="hf")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == family
    judge = AutoModelForCausalLM.from_pretrained(tmp_path / "own", trust_remote_code=True).eval()
    ids = torch.randint(1, 64, (2, 17))
    with torch.no_grad():
        close(model(ids).logits, judge(ids).logits)


# Two of each family in every run, and all in the long tests.
FEW = {f"{family}-{name}" for n, (family, cases) in enumerate(FAMILY_CASES.items())
       for name in (*cases, *cases)[n % len(cases) :: 5][:2]}  # fmt: skip
FEW.add("glm4_moe-dense")  # of a family with experts, which it stays


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FEW)) for case in CASES])
@torch.no_grad()
def test_a_model_is_that_of_transformers(case: str, theirs: Callable[[str], Pair], tmp_path: Path) -> None:
    """Its logits, under padding and with a cache too, and its folder, which comes back in every bit."""
    judge, folder = theirs(case)
    model = load(folder)
    vocabulary = model.config.vocab_size
    for length in (1, model.config.longest_sequence):
        ids = torch.randint(1, vocabulary, (2, length))
        close(model(ids).logits, judge(ids).logits)
    ids, mask = torch.randint(1, vocabulary, (3, 13)), torch.ones(3, 13, dtype=torch.long)
    mask[1, :8] = mask[2, :3] = 0
    reference = judge(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    close(model(ids, attention_mask=mask).logits[mask.bool()], reference[mask.bool()])

    ids = torch.randint(1, vocabulary, (2, 15))
    cache, other = model.new_cache(2, 15), transformers.DynamicCache(config=judge.config)
    for part in (ids[:, :9], *ids[:, 9:].split((1, 3, 1, 1), dim=1)):
        close(model(part, cache=cache).logits, judge(part, **{CACHE: other}, use_cache=True).logits)

    numbers = [buffer.numel() for name, buffer in judge.named_buffers() if name.endswith("correction_bias")]
    assert model.config.num_parameters == sum(p.numel() for p in judge.parameters()) + sum(numbers)
    model.save_pretrained(tmp_path / "back", format="hf")
    ours, original = tensors_of(tmp_path / "back"), tensors_of(folder)
    assert ours.keys() == original.keys() and all(torch.equal(ours[name], original[name]) for name in ours)
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back")]
    assert configs[0] == configs[1]
    model.origin = Origin()  # as if it had begun here: the first family that can express it is written
    model.save_pretrained(tmp_path / "own", format="hf")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not any(report.values()), report
    close(again.eval()(ids).logits, model(ids).logits)
    assert load(tmp_path / "own").config == model.config


def test_numbers_that_divide_by_zero_are_one_line(tmp_path: Path) -> None:
    """Gemma divides by the root of a number."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    with pytest.raises(CheckpointError, match="config.json: .*negative power"):
        describe(tmp_path, {"config": {**sizes, "model_type": "gemma2", "query_pre_attn_scalar": 0}})
