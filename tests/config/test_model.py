"""ModelConfig and the presets: parameter counts, derived fields, refusals."""

import dataclasses
import re
from typing import Any

import pytest
from fewer import every

from te_models import CausalLM, ModelConfig, get_preset, get_recipe, list_presets
from te_models.config.presets import PRESETS
from te_models.errors import UsageError
from te_models.planning.memory_plan import plan_memory

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
)


OLDEST = [name for name in list_presets() if name.startswith(("gated", "qwen", "llama"))]


@pytest.mark.parametrize(("name", "gate"), every(7, OLDEST, ["elementwise", "headwise", "none"]))
def test_parameter_count_is_the_built_models(name: str, gate: str) -> None:
    config = get_preset(
        name, attention_gate=gate, qk_norm=gate == "none", attention_bias=gate == "headwise"
    )
    model = CausalLM(config, device="meta", engine="emulated")
    assert (
        sum(p.numel() for p in model.parameters())
        == config.num_parameters + config.num_padding_parameters
    )
    assert (config.num_padding_parameters > 0) == (
        gate == "headwise" and config.num_attention_heads % 32 > 0
    )


def test_sizes_are_those_the_names_promise() -> None:
    # Millions of parameters, counted by hand from the shapes: tables + layers * (attention + 3DF + 2D) + D.
    expected = {
        "gated-nano": 2.638,
        "gated-124m": 123.686,
        "gated-350m": 366.265,
        "gated-896": 356.265,
        "test-8bit": 28.355,
        "d20-e3-full": 282.491,
        "medium-3b": 1629.770,
    }
    for name, millions in {**expected, "gated-1b": 1242.647}.items():
        assert get_preset(name).num_parameters / 1e6 == pytest.approx(millions, abs=5e-4)


# Parameters of the published checkpoints, tied tables counted once and without the padding of the headwise gate.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm3-3b": 3_075_098_624,
    "qwen-gated-1b-elementwise": 1_728_177_152,
    "qwen-gated-1b-headwise": 1_721_754_624,
    "qwen-gated-1b-baseline": 1_720_837_120,
    "ministral-8b-2410": 8_019_808_256,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "cwm-32b": 32_581_097_472,
    "internlm3-8b": 8_804_241_408,
    "iquest-coder-v1-40b": 39_794_283_520,
    "seed-oss-36b": 36_151_104_512,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "afm-4.5b": 4_619_184_640,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "exaone4-1.2b": 1_279_391_488,
    "exaone4-32b": 32_003_216_384,
    "glm4-9b": 9_400_279_040,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "granite-4.0-h-micro": 3_191_396_096,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "exaone-3.5-2.4b": 2_405_327_360,
    "exaone-3.5-7.8b": 7_818_448_896,
    "helium-1-preview-2b": 2_172_643_840,
    "command-r-08-2024": 32_296_476_672,
    "command-r7b": 8_028_033_024,
    "aya-23-8b": 8_028_033_024,
    "minicpm3-4b": 4_073_875_968,
    "granite-3.1-1b-a400m": 1_334_628_352,
    "granite-3.1-3b-a800m": 3_298_793_472,
    "bamba-9b": 9_780_235_392,
    "falcon-h1-0.5b": 521_411_104,
    "falcon-h1-1.5b": 1_554_863_488,
    "falcon-h1-1.5b-deep": 1_554_874_768,
    "falcon-h1-3b": 3_149_392_384,
    "falcon-h1-7b": 7_585_654_880,
    "falcon-h1-34b": 33_642_516_224,
    "vaultgemma-1b": 1_038_741_120,
    "mistral-small-3.1-24b": 23_572_403_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "glm-4-9b-2024": 9_399_951_360,
    "ernie-4.5-0.3b": 360_748_032,
    "youtu-llm-2b": 1_961_560_064,
    "granite-swash-2b": 2_144_463_840,
    "mellum2-12b-a2.5b": 12_149_923_072,
    "glm-4.7-flash": 29_943_390_976
    + 46 * 64,  # with the numbers for the choice of experts, which are buffers there
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856
    + 22 * 32,  # with the numbers for the choice of experts, which are buffers there
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_shapes_have_the_published_size(name: str) -> None:
    assert get_preset(name).num_parameters == PUBLISHED[name]


def test_derived_fields_are_derived_after_overrides() -> None:
    assert get_preset("gated-1b", num_attention_heads=32).head_dim == 64
    assert get_preset("gated-350m", num_attention_heads=16).num_key_value_heads == 16
    assert get_preset("gated-8b", num_hidden_layers=4).num_hidden_layers == 4
    assert get_preset("gated-nano", eos_token_id=0).eos_token_id == 0
    kinds = get_preset("qwen3.5-0.8b", num_hidden_layers=5).layer_types
    assert kinds == ("linear_attention",) * 3 + ("full_attention", "linear_attention")
    with pytest.raises(ValueError, match="layer_types has 24 entries for num_hidden_layers=28"):
        get_preset("qwen3.5-0.8b", num_hidden_layers=28)


def test_the_headwise_gate_is_padded_to_the_fp8_alignment() -> None:
    config = ModelConfig(**SMALL, attention_gate="headwise")
    linear = config.linears["layers.0.self_attn.qkvg_proj"]
    assert linear.rows[-1] == 32 and linear.outputs % 32 == 0


# Options of all kinds, with the parameters that they add to SMALL's 64 x 64 projections of q, o and the gate and so on.
@pytest.mark.parametrize(
    "change, more",
    [
        (dict(norm_position="post"), 0),
        (dict(norm_position="both"), 3 * 2 * 64),
        (dict(qk_norm=True), 3 * 2 * 16),
        (
            dict(qk_norm=True, qk_norm_scope="all_heads", num_key_value_heads=1),
            3 * (64 + 16 - 2 * 48 * 64),
        ),
        (dict(mlp_gate=False), -3 * 64 * 96),
        (dict(norm_type="layer"), 0),
        (dict(parallel_residual=True), -3 * 64),
        (dict(mlp_bias=True), 3 * (2 * 96 + 64)),
        (dict(mlp_bias=True, mlp_gate=False), 3 * (96 + 64 - 64 * 96)),
        (dict(attention_output_bias=True), 3 * 64),
        (dict(attention_bias=True), 3 * 4 * 64),
    ],
    ids=str,
)
def test_options_count_their_parameters(change: dict[str, Any], more: int) -> None:
    config = ModelConfig(**SMALL, **change)
    assert config.num_parameters == ModelConfig(**SMALL).num_parameters + more
    model = CausalLM(config, device="meta", engine="emulated")
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    plan = plan_memory(config, get_recipe("bf16"), batch_size=1, seq_len=16)
    assert plan.num_trained == config.num_parameters


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(norm_position="sandwich"), "norm_position"),
        (dict(norm_type="batch"), "unknown norm_type 'batch'"),
        (dict(parallel_residual=True, norm_position="post"), "leave out norm_position='post'"),
        (dict(hidden_act="gelu_pytorch"), "did you mean 'gelu_pytorch_tanh'"),
        (dict(attention_gate_activation="softplus", attention_gate="none"), "without a gate"),
        (dict(qk_norm_scope="all_heads"), "without qk_norm=True"),
        (dict(query_scale_beta=0.1), "belong together"),
        (dict(attn_logit_softcapping=0.0), "attn_logit_softcapping=0.0"),
        (dict(logits_scaling=-1.0), "logits_scaling=-1.0"),
        (dict(sliding_rope=dict(rope_theta=5.0)), "give sliding_window"),
        (dict(sliding_rope=dict(factor=5.0), sliding_window=4), "lacks rope_theta"),
        (dict(sliding_rope=dict(rope_theta=-5.0), sliding_window=4), "rope_theta=-5.0"),
        (dict(sliding_rope=dict(rope_theta=5.0, factor=2.0), sliding_window=4), "of type None"),
        (
            dict(sliding_rope=dict(rope_theta=5.0, partial_rotary_factor=0.2), sliding_window=4),
            "it must be an even",
        ),
        (dict(hidden_size=0), "hidden_size=0"),
        (dict(hidden_size="64"), "hidden_size='64'"),
        (dict(num_hidden_layers=True), "num_hidden_layers=True"),
        (dict(rms_norm_eps=-1.0), "rms_norm_eps=-1.0"),
        (dict(attention_gate="element"), "did you mean 'elementwise'"),
        (dict(hidden_size=66), "not a multiple of num_attention_heads"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3"),
        (dict(head_dim=15), "head_dim=15 is odd"),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings='yes'"),
        (dict(rope_scaling={"rope_type": "ntk", "factor": 4.0}), "type 'ntk' is not supported"),
        (dict(rope_scaling={"rope_type": {}}), "rope_scaling of type {} is not supported"),
        (dict(rope_scaling={"rope_type": "linear"}), "lacks factor"),
        (
            dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta": 1.0}),
            "beta=1.0 is not supported",
        ),
        (
            dict(rope_scaling={"rope_type": "linear", "factor": "2"}),
            "rope_scaling.factor='2' is of a wrong type: give",
        ),
        (dict(no_rope_layers=[1, 0]), "no_rope_layers has 2 entries"),
        (dict(no_rope_layers=[1, 0, 2]), "unknown no_rope_layers 2: choose one of 0, 1"),
        (dict(layer_types=["full_attention"] * 2 + ["dilated_attention"]), "'dilated_attention'"),
        (dict(layer_types=["chunked_attention"] * 3), "give attention_chunk_size"),
        (dict(attention_chunk_size=4), "give layer_types"),
        (dict(query_scale_rule="slot"), "give query_scale_beta"),
        (dict(qk_norm_layers="rope"), "without qk_norm=True"),
        (dict(layer_types=["sliding_attention"] * 3), "give sliding_window"),
        (
            dict(num_hidden_layers=10**9),
            "num_hidden_layers=1000000000 is out of range: give 1 or more, below 10001",
        ),
        (dict(sliding_window=0), "sliding_window=0"),
        (dict(partial_rotary_factor=1.5), "partial_rotary_factor=1.5"),
        (dict(partial_rotary_factor=0.2), "partial_rotary_factor=0.2"),
        (dict(eos_token_id=[1, -2]), "eos_token_id=[1, -2] is out of range"),
        (dict(qk_norm=1), "qk_norm=1 is of a wrong type: give true or false"),
        (dict(rope_theta=float("nan")), "rope_theta=nan is out of range: give a number above 0"),
        (dict(rope_scaling=3), "rope_scaling=3 is of a wrong type: give a table"),
        (dict(layer_types=3), "layer_types=3 is of a wrong type: give a list"),
        (dict(moe=3), "moe=3 is of a wrong type: give a table"),
        (dict(rope_scaling={1: 2}), "rope_scaling={1: 2} is of a wrong type: give a table"),
        (dict(linear_attention={1: 2}), "linear_attention={1: 2} is of a wrong type: give a table"),
        (
            dict(moe=dict(num_experts=4)),
            "moe lacks num_experts_per_tok, moe_intermediate_size: give all",
        ),
        (
            dict(moe=dict(EXPERTS, num_experts_per_tok=5)),
            "is more than the 4 experts to choose from",
        ),
        (
            dict(moe=dict(EXPERTS, router_aux_loss_coef=-1.0)),
            "moe.router_aux_loss_coef=-1.0 is out of range: give 0",
        ),
    ],
)
def test_bad_values_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ModelConfig(**{**SMALL, **change})


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gated-nano'"):
        get_preset("gated-nan")
    with pytest.raises(ValueError, match="did you mean 'num_hidden_layers'"):
        get_preset("gated-nano", num_hiden_layers=3)
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        ModelConfig.from_dict({**SMALL, "hidden_sizes": 3})
    with pytest.raises(ValueError, match="lacks vocab_size"):
        ModelConfig.from_dict({k: v for k, v in SMALL.items() if k != "vocab_size"})


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_config_survives_json(name: str) -> None:
    config = get_preset(name)
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    config.use_cache = False  # as transformers.Trainer does, every time one is made
    config.use_cache = True
    assert ModelConfig.from_dict(config.to_dict()) == config
