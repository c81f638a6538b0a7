"""Folders of models with images, whose text model is read; and the line that refuses a model."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEFAULT, FAMILY_CASES, FULL, LINEAR, PAIRS, SIZES, SLIDING, YARN
from fewer import every
from hf_models import (
    close,
    document_of,
    load,
    randomize,
    read_by_transformers,
    same_folder,
    tensors_of,
)
from judge import transformers
from safetensors.torch import save_file

from te_models import CausalLM
from te_models.errors import UsageError
from te_models.interop.hf_families import family_of

VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
              patch_size=14)  # fmt: skip
MORE_VISION = {"Gemma3": {}, "Mistral3": dict(head_dim=16)}
MORE_VISION["MuseGlimmer"] = dict(pos_emb_height=4, pos_emb_width=4)
MORE_VISION["Step3p7"] = {}
MORE_VISION["Llama4"] = dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)
STEP: dict[str, Any] = dict(
    num_sliding_attention_heads=4, layer_types=[FULL, SLIDING, FULL], sliding_window=5, n_routed_experts=5,
    num_experts_per_tok=2, moe_intermediate_size=20, share_expert_dim=28, moe_router_scaling_factor=2.5,
    mlp_layer_types=["dense", "sparse", "sparse"], swiglu_limits=[None, 0.05, 0.2],
    swiglu_limits_shared=[0.1, 0.0, 0.07], rope_parameters=dict(
        full_attention=dict(DEFAULT, partial_rotary_factor=0.5), sliding_attention=LINEAR
    ),
)  # fmt: skip
MORE_VISION["Gemma4"] = dict(num_key_value_heads=2, head_dim=16, position_embedding_size=8)
MORE_VISION["Gemma4Unified"] = dict(mm_embed_dim=24, mm_posemb_size=8, patch_size=4)
MORE_VISION["Qwen2VL"] = dict(depth=1, num_heads=2, embed_dim=32, hidden_size=48)
MORE_VISION["Qwen2_5_VL"] = dict(
    depth=1, num_heads=2, out_hidden_size=48, fullatt_block_indexes=[0]
)
MORE_VISION |= dict.fromkeys(
    ("Qwen3VL", "Qwen3VLMoe"),
    dict(
        depth=2,
        num_heads=2,
        out_hidden_size=48,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
)
MORE_VISION |= dict.fromkeys(
    ("Qwen3_5", "Qwen3_5Moe"),
    dict(depth=1, num_heads=2, out_hidden_size=48, num_position_embeddings=16),
)
GEMMA = dict(
    model_type="gemma3_text",
    sliding_window=5,
    query_pre_attn_scalar=11,
    layer_types=[SLIDING, FULL, SLIDING],
)
SCALED = {**YARN, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 7}
# A hybrid, whose RoPE has three positions, and a head for later tokens.
QWEN: dict[str, Any] = dict(
    vocab_size=131, hidden_size=48, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, max_position_embeddings=64, attn_output_gate=True, mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, mamba_ssm_dtype="float32", mlp_only_layers=[], full_attention_interval=4,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
    ),
)  # fmt: skip
MUSE: dict[str, Any] = dict(
    head_dim=8,
    final_logit_softcapping=3.0,
    qk_scale_factor=1.7,
    output_multiplier=0.3,
    post_norm_eps=1e-3,
)
ADAPTER = dict(out_hidden_size=48, projector_hidden_size=32)  # by default 42 million parameters
QWEN_VL: dict[str, Any] = dict(
    head_dim=16, rope_parameters=dict(LINEAR, mrope_section=[4, 2, 2], mrope_interleaved=True)
)
QWEN2_VL: dict[str, Any] = dict(
    num_attention_heads=3, num_key_value_heads=1, rope_parameters=dict(YARN, mrope_section=[4, 2, 2]),
)  # fmt: skip
QWEN2_VL |= dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
# Name of a case -> class of transformers, its text model, and what the outer config has.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", GEMMA, {}),
    "gemma3-scaled": ("Gemma3", {**GEMMA, "rope_parameters": PAIRS}, {}),
    "mistral3": ("Mistral3", dict(model_type="mistral", rope_parameters=LINEAR), dict(tie_word_embeddings=False)),
    "mistral3-tied": ("Mistral3", dict(model_type="mistral", sliding_window=5), dict(tie_word_embeddings=True)),
    "mistral3-ministral": (
        "Mistral3", dict(model_type="ministral3", rope_parameters=SCALED), dict(tie_word_embeddings=False)
    ),
    "qwen3_5": ("Qwen3_5", QWEN, dict(tie_word_embeddings=True)),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(FAMILY_CASES["qwen3_5_moe_text"]["full"]), dict(tie_word_embeddings=False)),
    "qwen3_vl": ("Qwen3VL", QWEN_VL, dict(tie_word_embeddings=False)),
    "qwen3_vl-tied": ("Qwen3VL", dict(QWEN_VL, attention_bias=True), dict(tie_word_embeddings=True)),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        dict(QWEN_VL, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[1]),
        dict(tie_word_embeddings=False),
    ),
    "gemma4": (
        "Gemma4",
        {key: value for key, value in FAMILY_CASES["gemma4_text"]["one"].items() if key[:3] != "tie"},
        dict(tie_word_embeddings=True, audio_config=None),
    ),
    "gemma4-experts": (
        "Gemma4",
        dict(FAMILY_CASES["gemma4_text"]["experts-plain"]),
        dict(tie_word_embeddings=True, audio_config=None),
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        dict(FAMILY_CASES["gemma4_unified_text"]["plain"]),
        dict(tie_word_embeddings=True, audio_config=None),
    ),
    "muse_glimmer": ("MuseGlimmer", dict(MUSE, sliding_window=5), dict(ADAPTER, tie_word_embeddings=False)),
    "muse_glimmer-layers": (
        "MuseGlimmer",
        dict(MUSE, sliding_window=4, layer_types=[FULL, SLIDING, FULL], layer_rope_theta=[0, 9.0, 9.0]),
        dict(ADAPTER, tie_word_embeddings=True),
    ),
    "llama4": (
        "Llama4",
        {key: value for key, value in FAMILY_CASES["llama4_text"]["types"].items() if key[:3] != "tie"},
        dict(tie_word_embeddings=False),
    ),
    "step3p7": ("Step3p7", STEP, dict(tie_word_embeddings=False)),
    "qwen2_vl": ("Qwen2VL", QWEN2_VL, dict(tie_word_embeddings=True)),
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN2_VL, dict(tie_word_embeddings=False)),
}  # fmt: skip


@pytest.mark.parametrize("case", every(2, CASES))
@torch.no_grad()
def test_the_text_of_a_folder_with_images(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read, and the rest is written back: from the folder, or from one that is named beside our format."""
    name, text, outer = CASES[case]
    torch.manual_seed(len(case))
    vision = {**VISION, **MORE_VISION[name]}
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **text}, vision_config=vision, **outer
    )
    judge = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomize(judge)
    judge.save_pretrained(tmp_path / "theirs")
    with caplog.at_level(logging.WARNING):
        model, ids = load(tmp_path / "theirs"), torch.randint(11, SIZES["vocab_size"], (2, 33))
    assert (
        "model.visual.*, mtp.*" if name.startswith("Qwen3_5") else "tensors of other parts ("
    ) in caplog.text
    reference = text_of(judge)(input_ids=ids).logits
    close(model(ids).logits, reference, 1e-4 if case == "qwen3_5" else 2e-5)
    model.save_pretrained(tmp_path / "back", format="hf")
    same_folder(tmp_path / "theirs", tmp_path / "back")
    again = (
        getattr(transformers, f"{name}ForConditionalGeneration")
        .from_pretrained(tmp_path / "back")
        .eval()
    )
    assert torch.equal(text_of(again)(input_ids=ids).logits, reference)
    model.save_pretrained(tmp_path / "theirs", format="hf")  # over the tensors that it reads
    same_folder(tmp_path / "theirs", tmp_path / "back")
    model.save_pretrained(tmp_path / "native")
    native = load(tmp_path / "native")
    native.save_pretrained(tmp_path / "whole", format="hf", beside=tmp_path / "back")
    same_folder(tmp_path / "whole", tmp_path / "back")
    with pytest.raises(UsageError, match="has no tensors that belong beside"):
        native.save_pretrained(tmp_path / "none", format="hf", beside=tmp_path / "native")
    with pytest.raises(UsageError, match="format te has no place for the tensors of"):
        native.save_pretrained(tmp_path / "none", beside=tmp_path / "back")
    assert not (tmp_path / "none").exists()
    if name == "Step3p7":  # no architecture has its text alone
        return
    with pytest.warns(UserWarning, match="the text model alone"):
        native.save_pretrained(tmp_path / "text", format="hf")
    own = dict(trust_remote_code=True) if name == "MuseGlimmer" else {}  # which has no text class
    close(read_by_transformers(tmp_path / "text", **own)(ids).logits, reference, 1e-4)


def write_release(folder: Path, case: str, **sizes: int) -> None:
    """Write a small random model with an image encoder, as transformers does."""
    name, text, outer = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **text, **sizes},
        vision_config={**VISION, **MORE_VISION[name]},
        **outer,
    )
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("source", "beside", "message"),
    [
        ("text", "gemma3", "release of gemma3, and this model came from gemma3_text: give"),
        ("gemma3", "mistral3", "release of mistral3, and this model came from gemma3: give"),
        ("gemma3", "wide", "release with hidden_size=.*, and this model has"),
        ("gemma3", "nowhere", "nowhere is no folder of Hugging Face, and so has no tensors"),
        ("preset", "gemma3", "this model came from no release, so no tensors of"),
    ],
)
def test_tensors_of_another_release_are_not_written_beside_a_model(
    source: str, beside: str, message: str, tmp_path: Path
) -> None:
    """transformers would load such a folder, with a random image encoder."""
    for case in {source, beside} & CASES.keys():
        write_release(tmp_path / case, case)
    if beside == "wide":
        write_release(tmp_path / "wide", "gemma3", hidden_size=2 * SIZES["hidden_size"])
    if source == "text":
        load(tmp_path / "gemma3").save_pretrained(tmp_path / "native")
        with pytest.warns(UserWarning, match="the text model alone"):
            load(tmp_path / "native").save_pretrained(tmp_path / "text", format="hf")
    if source == "preset":
        model = CausalLM.from_preset("gated-nano", num_hidden_layers=1, device="cpu")
    else:
        model = load(tmp_path / source)
    with pytest.raises(UsageError, match=message):
        model.save_pretrained(tmp_path / "out", format="hf", beside=tmp_path / beside)
    assert not (tmp_path / "out").exists()


def text_of(judge: Any) -> Any:
    """The model of transformers that computes logits; in 5.24 Llama 4 with images fails after it has them."""
    return judge.language_model if type(judge).__name__.startswith("Llama4") else judge


def made(case: str, folder: Path) -> Any:
    """transformers' model of a case, random and saved in `folder`."""
    name, text, outer = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **text}, vision_config={**VISION, **MORE_VISION[name]}, **outer
    )
    judge = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomize(judge)
    judge.save_pretrained(folder)
    return judge


@pytest.mark.parametrize("case", every(9, CASES))
@pytest.mark.filterwarnings("ignore")  # of transformers and of peft
@torch.no_grad()
def test_adapters_on_everything_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """On every linear, expert and router of the text model, and on none of the model of images."""
    peft = pytest.importorskip("peft")
    from adapters import save_adapters_on_everything  # noqa: PLC0415  needs peft

    torch.manual_seed(len(case))
    judge = made(case, tmp_path / "base")
    adapted = save_adapters_on_everything(tmp_path / "base", tmp_path / "adapter")
    back = peft.PeftModel.from_pretrained(judge, tmp_path / "adapter").eval()
    ids = torch.randint(11, SIZES["vocab_size"], (2, 13))
    reference = text_of(back.get_base_model())(input_ids=ids).logits
    close(adapted(ids).logits, reference, 1e-4)
    names = [name for name, _ in back.named_parameters() if ".lora_A." in name]
    assert names and all(".language_model." in name for name in names)


@torch.no_grad()
def test_a_config_without_an_inner_one_as_the_first_files_of_qwen2_5_vl_have_it(
    tmp_path: Path,
) -> None:
    judge = made("qwen2_5_vl", tmp_path / "theirs")
    own = document_of(tmp_path / "theirs")
    text = {key: value for key, value in own.pop("text_config").items() if key != "model_type"}
    ropes = text.pop("rope_parameters")
    text |= dict(rope_theta=1e6, rope_scaling=dict(type="mrope", mrope_section=[4, 2, 2]))
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**text, **own}))
    judge.model.language_model.rotary_emb = type(judge.model.language_model.rotary_emb)(
        type(judge.config.text_config)(**{**text, "rope_scaling": {**text["rope_scaling"]}})
    )
    assert ropes["rope_type"] == "yarn"
    model, ids = load(tmp_path / "theirs"), torch.randint(11, SIZES["vocab_size"], (2, 33))
    close(model(ids).logits, judge(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "back", format="hf")
    same_folder(tmp_path / "theirs", tmp_path / "back")
    family, longer = family_of({**text, **own}), replace(model.config, max_position_embeddings=99)
    changed = family.rewritten({**text, **own}, longer)
    assert family.read(changed) == longer
    assert changed["rope_parameters"]["mrope_section"] == [4, 2, 2] and "text_config" not in changed


@torch.no_grad()
def test_experts_of_qwen3_vl_as_releases_have_them(tmp_path: Path) -> None:
    """Inputs before outputs, which transformers turns when it reads them, and does not turn back."""
    judge = made("qwen3_vl_moe", tmp_path / "theirs")
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in tensors_of(tmp_path / "theirs").items()
    }
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    model, ids = load(tmp_path / "theirs"), torch.randint(11, SIZES["vocab_size"], (2, 33))
    close(model(ids).logits, judge(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "back", format="hf")
    same_folder(tmp_path / "theirs", tmp_path / "back")


@pytest.mark.parametrize(
    "case", ["step3p7", "muse_glimmer-layers", "gemma4-experts", "qwen3_vl_moe"]
)
def test_gradients_of_a_text_model_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Of all tensors together: a folder of transformers' gradients is read as a model of ours."""
    judge = made(case, tmp_path / "theirs")
    model, ids = load(tmp_path / "theirs"), torch.randint(11, SIZES["vocab_size"], (2, 33))
    judge(input_ids=ids, labels=ids).loss.backward()
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in judge.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    judge.save_pretrained(tmp_path / "gradients")
    expected = dict(load(tmp_path / "gradients").named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert not parameter.requires_grad, name
            continue
        error = (parameter.grad - expected[name]).norm()
        assert error <= 1e-3 * expected[name].norm() + 1e-7, f"{name}: {error:.2g}"


def test_the_first_config_of_step_means_what_transformers_makes_of_it() -> None:
    legacy = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_attention_groups=2, head_dim=8, num_nextn_predict_layers=1, moe_num_experts=5, moe_top_k=2,
        layer_types=[FULL, SLIDING, SLIDING, FULL], sliding_window=5, moe_layers_enum="1,2", share_expert_dims=12,
        attention_other_setting=dict(num_attention_heads=6), rope_theta=[500.0, 100.0, 100.0, 500.0],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5], swiglu_limits=[0.0, 0.0, 7.0, 7.0],
        swiglu_limits_shared=[0.0, 16.0, 0.0, 0.0], pad_token_id=1, max_position_embeddings=99,
    )  # fmt: skip
    modern = transformers.Step3p7Config(text_config=dict(legacy)).text_config.to_dict()
    family = family_of(dict(model_type="step3p7"))
    found = [family.read(dict(text_config=text)) for text in (legacy, modern)]
    assert found[0] == found[1] and found[0].sliding_heads is not None


@pytest.mark.parametrize(
    ("kind", "missing", "nearest"),
    [
        ("falcon", "LayerNorm", "cohere"),
        ("phi", "LayerNorm", "phi3"),
        ("starcoder2", "LayerNorm", "llama"),
        ("olmo", "LayerNorm", "olmo2"),
        ("apertus", "xIELU", "arcee"),
        ("gemma3n_text", "per layer", "gemma3_text"),
        ("minimax", "recurrence", "qwen3_next"),
        ("phimoe", "experts", "qwen3_moe"),
        ("longcat_flash", "latent", "deepseek_v3"),
        ("jamba", "recurrence", "qwen3_next"),
        ("mamba2", "recurrence", "qwen3_next"),
        ("stablelm", "LayerNorm", "llama"),
        ("t5", "encoder", "llama"),
        ("llava", "multimodal", "llama"),
        ("qwen2_5_omni_thinker", "multimodal", "qwen2"),
    ],
)
def test_a_refusal_names_what_is_missing_and_the_nearest(
    kind: str, missing: str, nearest: str
) -> None:
    config = transformers.AutoConfig.for_model(kind).to_dict()
    with pytest.raises(UsageError) as refused:
        family_of(config)
    line = str(refused.value)
    assert line.startswith(f"unknown architecture (model_type) {kind!r}: it ")
    assert missing in line and line.endswith(f"reads is {nearest!r}") and "\n" not in line
