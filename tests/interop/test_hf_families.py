"""Every family of decoders in odd shapes: transformers' own models, small and random, are the judge."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, FAMILY_CASES, SHAPES, make_config
from fewer import every
from hf_models import CASES as FIRST_CASES
from hf_models import (
    GATED_CASES,
    Pair,
    close,
    document_of,
    load,
    make_theirs,
    prompts,
    read_by_transformers,
    same_folder,
    save_hf,
)
from hybrids import HYBRIDS
from judge import CACHE, AutoModelForCausalLM, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.auto import tokenization_auto

from te_models import CausalLM, ModelConfig, get_preset, list_presets
from te_models.errors import CheckpointError, ConfigError
from te_models.interop.hf import describe
from te_models.interop.hf_families import FAMILIES, SPLIT_AS_QWEN, family_for, family_of
from te_models.interop.origin import Origin


def test_every_new_family_has_ten_shapes() -> None:
    few = {family for family, cases in FAMILY_CASES.items() if len(cases) < 10}
    assert few == {"llama", "qwen3", "smollm3"}, (
        "these have others in hf_models.py, and hybrids in hybrids.py"
    )
    others = {"mistral", "qwen2", "qwen3_5_text", "qwen3_5", "qwen3_5_moe", "te_models_decoder"}
    others |= {
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "muse_glimmer",
        "step3p7",
        "mistral3",
        "kimi_k2",
        "llama4",
    }  # in test_hf_nested.py
    others |= {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
    assert set(FAMILY_CASES) | others == {family.model_type for family in FAMILIES}


def transformers_presets() -> list[str]:
    """Return the presets of which transformers has a class for the text model alone."""
    names = []
    for name in list_presets():
        if get_preset(name).attention_gate == "none" or name.startswith(
            ("trinity", "laguna", "ling")
        ):
            names.append(name)
    return names


@pytest.mark.parametrize("name", every(8, transformers_presets()))
def test_presets_have_the_parameters_of_transformers_models(name: str) -> None:
    config = get_preset(name)
    written = family_for(config).write(config)
    with torch.device("meta"):
        kind = written.pop("model_type")
        judge = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **written))
    numbers = {n: p.numel() for n, p in judge.named_parameters()}
    stored = ("expert_bias", "e_score_correction_bias", "layer_scalar")
    numbers |= {n: b.numel() for n, b in judge.named_buffers() if n.endswith(stored)}
    assert sum(numbers.values()) == config.num_parameters


def test_a_model_that_no_family_has_names_the_nearest_and_what_it_lacks() -> None:
    with pytest.raises(
        ConfigError, match="the nearest, 'qwen3_5_moe_text', lacks attention_sinks=True$"
    ):
        family_for(get_preset("gated-moe-nano", attention_sinks=True))


def test_gemma_means_the_approximation_of_gelu() -> None:
    """As its first files have it, before transformers changes the word in what it saves."""
    document = {**make_config("gemma-odd").to_dict(), "hidden_act": "gelu"}
    assert family_of(document).read(document).hidden_act == "gelu_pytorch_tanh"


LONG = dict(
    rope_type="longrope",
    short_factor=[1.0] * 4,
    long_factor=[2.0] * 4,
    original_max_position_embeddings=9,
)
# A model that began here -> the family that it is written as; transformers refuses a family that comes before it.
REFUSED: dict[str, dict[str, Any]] = {
    "mistral": dict(hidden_size=20),  # no multiple of the heads, as Llama's config wants it
    "seed_oss": dict(
        attention_output_bias=True, mlp_bias=True
    ),  # InternLM 3 has biases everywhere or nowhere
    "te_models_decoder": dict(
        partial_rotary_factor=0.5, rope_scaling=dict(rope_type="linear", factor=2.0)
    ),
    "phi3": dict(partial_rotary_factor=0.5, rope_scaling=LONG, hidden_size=48),
}


@pytest.mark.filterwarnings("ignore:.*needs its own code in transformers")
@pytest.mark.parametrize("family", REFUSED)
def test_a_folder_is_of_a_family_whose_config_transformers_takes(
    family: str, tmp_path: Path
) -> None:
    sizes = dict(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=3,
    )
    shape: dict[str, Any] = {
        **sizes,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_gate": "none",
    }
    model = CausalLM(
        ModelConfig(**{**shape, **REFUSED[family]}), device="cpu", dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "own", format="hf")
    assert document_of(tmp_path / "own")["model_type"] == family
    judge = AutoModelForCausalLM.from_pretrained(tmp_path / "own", trust_remote_code=True).eval()
    ids = torch.randint(1, 64, (2, 17))
    with torch.no_grad():
        close(model(ids).logits, judge(ids).logits)


# One of each family, a third of them in every run and the rest in the long tests; of hybrids 1, 2 and 4 value heads per
# key head.
FEW = {
    f"{family}-{[*cases][number % len(cases)]}"
    for number, (family, cases) in enumerate(FAMILY_CASES.items())
}
QUICK = {case for number, case in enumerate(sorted(FEW)) if number % 3 == 1}
FEW |= {"glm4_moe-dense", *FIRST_CASES, *(f"hybrid-{seed}" for seed in (0, 1, 7, 14))}
QUICK |= {*FIRST_CASES, "hybrid-0", "hybrid-7"}


def left_out() -> set[str]:
    """Return each second case of a shape that most families have; its neighbors in the table have the others."""
    found = set()
    for number, (family, cases) in enumerate(FAMILY_CASES.items()):
        for place, name in enumerate(SHAPES):
            if name in cases and (number + place) % 2:
                found.add(f"{family}-{name}")
    return found


LEFT_OUT = left_out()
ALL = [
    pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in (*FIRST_CASES, *CASES, *HYBRIDS)
    if case in FEW or case not in LEFT_OUT
]


# In transformers the bias of a projection makes padding a token that the convolution after it reads.
PADDING_READ = (
    "lfm2-biases",
    "lfm2_moe-biases",
    "granitemoehybrid-biases",
    "nemotron_h-biases",
    "lfm3-biases",
    "bamba-biases",
    "falcon_h1-biases",
)
# Its positions begin with 0 in every pass, but for those that `generate` gives it.
COUNTS_ANEW = ("bamba",)
# Its steps of one token leave out the bounds of Mamba's time steps.
UNBOUNDED = ("granitemoehybrid-limits", "nemotron_h-steps", "bamba-limits", "falcon_h1-limits")


@pytest.mark.parametrize("case", ALL)
@torch.no_grad()
def test_a_model_is_that_of_transformers(
    case: str, theirs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """Its logits, under padding and with a cache too, and its folder, which comes back in every bit."""
    judge, folder = theirs(case)
    model = load(folder)
    assert model.dtype == torch.float32 and model.recipe.name == "bf16"
    vocabulary, longest = model.config.vocab_size, model.config.longest_sequence
    hybrid = case in HYBRIDS
    tolerance = 1e-4 if hybrid else 2e-5  # of FP32 rounding, which a recurrence adds up
    for length in (1, *((2, 3, 63, 64, 65, 129) if hybrid else ()), longest):
        ids = torch.randint(1, vocabulary, (2, length))
        close(model(ids).logits, judge(ids).logits, tolerance)
    ids = torch.randint(1, vocabulary, (3, 70 if hybrid else 13))
    mask = torch.ones_like(ids)
    mask[1, :8] = mask[2, : 66 if hybrid else 3] = 0
    found = model(ids, attention_mask=mask).logits[mask.bool()]
    if case in PADDING_READ:
        alone = (
            judge(row[real.bool()][None]).logits[0] for row, real in zip(ids, mask, strict=True)
        )
        reference = torch.cat(list(alone))
    else:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        reference = judge(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    close(found, reference, tolerance)

    lengths = (30, 1, 2, 2, 55) if hybrid else (9, 1, 3, 1, 1)
    ids = torch.randint(1, vocabulary, (2, sum(lengths)))
    cache, other = model.new_cache(2, sum(lengths)), transformers.DynamicCache(config=judge.config)
    whole = judge(ids).logits.split(lengths, dim=1)
    counted = {}
    if case.startswith(COUNTS_ANEW):
        counted = {"position_ids": torch.arange(sum(lengths))[None]}
    for place, (part, expected) in enumerate(zip(ids.split(lengths, dim=1), whole, strict=True)):
        if case not in UNBOUNDED:
            positions = {key: value.split(lengths, dim=1)[place] for key, value in counted.items()}
            expected = judge(part, **positions, **{CACHE: other}, use_cache=True).logits
        close(model(part, cache=cache).logits, expected, tolerance)

    numbers = [
        buffer.numel()
        for name, buffer in judge.named_buffers()
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
    ]
    assert model.config.num_parameters == sum(p.numel() for p in judge.parameters()) + sum(numbers)
    save_hf(model, tmp_path / "back", gated=case in GATED_CASES and case != "ungated")
    same_folder(folder, tmp_path / "back")
    if case in GATED_CASES:  # transformers has no such architecture
        return
    model.origin = (
        Origin()
    )  # as if it had begun here: the first family that can express it is written
    model.save_pretrained(tmp_path / "own", format="hf")
    close(read_by_transformers(tmp_path / "own")(ids).logits, model(ids).logits, tolerance)
    assert load(tmp_path / "own").config == model.config


# One of each kind of attention, of experts and of recurrence, and all that treats old positions unlike new ones.
TEXTS = [
    "llama3", "llama-linear", "qwen2-window", "qwen3", "mistral", "smollm3", "qwen3_next", "headwise", "elementwise",
    "qwen3_moe-one-key", "mixtral-window", "gpt_oss-plain", "glm4_moe-groups", "glm4_moe-sparse", "laguna-experts",
    "deepseek_v3-plain", "deepseek_v3-one", "deepseek_v3-mscale", "deepseek_v2-mscale", "qwen3_next-mixed",
    "qwen3_5_moe_text-one-key", "lfm2-one-key", "lfm2_moe-one-key",
    "granite_swa-no-rope", "hyperclovax-biases", "mellum-ropes", "minimax_m2-half",
    "flex_olmo-normed", "dots1-window", "exaone_moe-mixed", "solar_open-groups", "ernie4_5_moe-interval",
    "granitemoe_swa-no_rope", "hunyuan_v1_dense-one-key", "hunyuan_v1_moe-untied", "gemma4_text-one",
    "gemma4_text-wide",
    "gemma4_text-experts-untied", "gemma4_text-small-untied", "gemma4_text-small-wide",
    "exaone-llama3", "helium-linear", "cohere-llama3", "cohere2-one-key",
    "llama4_text-interleaved", "llama4_text-types", "llama4_text-no_rope",
    "minicpm3-untied", "vaultgemma-untied", "sarvam_moe-groups",
    "granitemoeshared-untied", "hy_v3-mixed", "flint-odd", "bamba-one_key", "bailing_hybrid-latent", "axk1-yarn",
    "falcon_h1-one_key", "falcon_h1-theta",
    "sarvam_mla-mscale", "mistral4-mscale", "youtu-yarn", *HYBRIDS,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * bool(number % 7 or case in HYBRIDS))
        for number, case in enumerate(TEXTS)
    ],
)
@torch.no_grad()
def test_greedy_text_is_that_of_transformers(case: str, theirs: Callable[[str], Pair]) -> None:
    judge, folder = theirs(case)
    model, (ids, mask) = load(folder), prompts()
    expected = judge.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=20), expected)
    again = model.generate(ids, attention_mask=mask, max_new_tokens=8, use_cache=False)
    assert torch.equal(again, expected[:, : again.shape[1]])
    assert len(set(expected[:, 13:].flatten().tolist())) > 8


def test_numbers_that_divide_by_zero_are_one_line(tmp_path: Path) -> None:
    """Gemma divides by the root of a number."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    with pytest.raises(CheckpointError, match="config.json: .*negative power"):
        describe(
            tmp_path, {"config": {**sizes, "model_type": "gemma2", "query_pre_attn_scalar": 0}}
        )


def test_a_model_keeps_its_tokenizer_where_its_family_changes(tmp_path: Path) -> None:
    """Seed-OSS has no windows. Qwen2 has, but AutoTokenizer splits any text in its folders as Qwen does."""
    make_theirs("seed_oss-odd", tmp_path / "base")
    text = "In 2026: 12345 tokens"
    letters = sorted(set(text))
    words = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    wanted = words.encode(text).ids
    for options in ({}, dict(sliding_window=7)):
        model = CausalLM.from_pretrained(
            tmp_path / "base", recipe="bf16", device="cpu", engine="emulated", **options
        )
        folder = tmp_path / f"out{len(options)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # needs its own code in transformers
            model.save_pretrained(folder, format="hf")
        read = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert read.encode(text, add_special_tokens=False) == wanted
        again = CausalLM.from_pretrained(folder, recipe="bf16", device="cpu", engine="emulated")
        assert again.config == model.config


def test_families_in_whose_folders_qwens_tokenizer_is_taken_are_known() -> None:
    generic = (None, "TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast")
    forced = {
        name
        for name in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if tokenization_auto.TOKENIZER_MAPPING_NAMES.get(name) not in generic
    }
    assert forced & {family.model_type for family in FAMILIES} == set(SPLIT_AS_QWEN)


# Presets of releases whose shape transformers has as the defaults of its config.
DEFAULTS = {
    "mellum2-12b-a2.5b": "mellum",
    "granite-swash-2b": "granite_swa",
    "youtu-llm-2b": "youtu",
    "glm-4.7-flash": "glm4_moe_lite",
    "ernie-4.5-0.3b": "ernie4_5",
    "gemma-7b": "gemma",
    "glm-4-9b-2024": "glm",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_presets_are_the_defaults_of_transformers(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(DEFAULTS[name])
    document = json.loads(theirs.to_json_string(use_diff=False))
    del document["architectures"]
    assert family_of(document).read(document) == get_preset(name)
