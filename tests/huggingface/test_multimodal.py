"""Folders of multimodal releases as a TEModelsForCausalLM, and adapters for both it and transformers."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fewer import every
from hf_models import SIZES, close, randomize, tensors_of
from judge import transformers
from safetensors.torch import load_file
from torch import Tensor

from te_models import CausalLM
from te_models.huggingface.modeling import TEModelsForCausalLM
from te_models.training.lora import add_lora, load_lora, save_lora

VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64,
                    num_position_embeddings=16),
    "gemma3": dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                   patch_size=14),
    "mistral3": dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                     patch_size=14, head_dim=16, model_type="pixtral"),
}  # fmt: skip
VISION["qwen3_5_moe"] = VISION["qwen3_5"]
TEXT: dict[str, dict[str, Any]] = {
    "qwen3_5": dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                    linear_value_head_dim=16),
    "gemma3": dict(head_dim=24, sliding_window=9, eos_token_id=1, query_pre_attn_scalar=24),
    "mistral3": dict(model_type="mistral", head_dim=32, sliding_window=None),
}  # fmt: skip
TEXT["qwen3_5_moe"] = TEXT["qwen3_5"] | dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
)
KINDS = ("qwen3_5", "qwen3_5_moe", "gemma3", "mistral3")
IDS = torch.randint(11, 120, (2, 17), generator=torch.Generator().manual_seed(0))
TARGETS = ["q_proj", "o_proj", "down_proj"]


def save_theirs(kind: str, folder: Path) -> Path:
    """Save a random multimodal model of transformers."""
    torch.manual_seed(len(kind))
    text = {**SIZES, **TEXT[kind]}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=VISION[kind])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    randomize(model)
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path, auto: str = "AutoModelForImageTextToText") -> Any:
    return getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()


def ours(folder: Path) -> TEModelsForCausalLM:
    return TEModelsForCausalLM.from_pretrained(folder, recipe="bf16", dtype="float32", device="cpu")


def without_image(model: Any) -> Any:
    """Draw the adapters' B, but not those of the image encoder, which text does not reach."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_multimodal_folder_is_a_causal_lm(kind: str, tmp_path: Path) -> None:
    """From the folder, from a CausalLM, and from a folder of ours; it generates as transformers does."""
    folder = save_theirs(kind, tmp_path / "theirs")
    judge = theirs(folder)
    model = ours(folder)
    close(logits(model), logits(judge), 1e-4)
    wrapped = TEModelsForCausalLM.wrap(
        CausalLM.from_pretrained(folder, recipe="bf16", dtype="float32", device="cpu")
    )
    assert torch.equal(logits(wrapped), logits(model))
    model.save_pretrained(tmp_path / "own")
    assert torch.equal(logits(ours(tmp_path / "own")), logits(model))
    options = dict(input_ids=IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(**options), judge.generate(**options))
    model.model.save_pretrained(tmp_path / "back", format="hf")
    back, whole = tensors_of(tmp_path / "back"), tensors_of(folder)
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], whole[name]) for name in whole)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_a_text_model_saved_from_a_multimodal_folder_is_read(kind: str, tmp_path: Path) -> None:
    """transformers keeps the names "model.language_model.layers" under the model_type of the text."""
    judge = theirs(save_theirs(kind, tmp_path / "whole"), "AutoModelForCausalLM")
    judge.save_pretrained(tmp_path / "text")
    assert judge.config.model_type == f"{kind}_text"
    assert any(name.startswith("model.language_model.") for name in tensors_of(tmp_path / "text"))
    close(logits(ours(tmp_path / "text")), logits(judge), 1e-4)


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_adapters_of_peft_work_in_both_directions(kind: str, tmp_path: Path) -> None:
    folder = save_theirs(kind, tmp_path / "theirs")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of experts without adapters, and of the image encoder's
        trained = without_image(peft.get_peft_model(theirs(folder), config))
        trained.save_pretrained(tmp_path / "from-theirs")
        read = peft.PeftModel.from_pretrained(ours(folder), tmp_path / "from-theirs")
        assert (logits(trained) - logits(theirs(folder))).abs().max() > 0.01
        close(logits(read), logits(trained), 1e-4)
        own = without_image(peft.get_peft_model(ours(folder), config))
        own.save_pretrained(tmp_path / "from-ours")
        back = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "from-ours")
        close(logits(own), logits(back), 1e-4)
        again = peft.PeftModel.from_pretrained(ours(folder), tmp_path / "from-ours")
        assert torch.equal(logits(again), logits(own))
    names = load_file(tmp_path / "from-ours" / "adapter_model.safetensors")
    prefix = "base_model.model.model.language_model.layers."
    assert names and all(name.startswith(prefix) for name in names)


@pytest.mark.parametrize("kind", every(2, reversed(KINDS)))
def test_adapters_of_a_causal_lm_work_in_both_directions(kind: str, tmp_path: Path) -> None:
    folder = save_theirs(kind, tmp_path / "theirs")
    pattern = r".*language_model.*\.(q_proj|o_proj|down_proj)"
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=pattern, task_type="CAUSAL_LM")

    def load() -> CausalLM:
        return CausalLM.from_pretrained(folder, recipe="bf16", dtype="float32", device="cpu")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = without_image(peft.get_peft_model(theirs(folder), config))
        trained.save_pretrained(tmp_path / "from-theirs")
        close(logits(load_lora(load(), tmp_path / "from-theirs")), logits(trained), 1e-4)
        own = add_lora(load(), r=4, target_modules=TARGETS)
        for name, parameter in own.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        save_lora(own, tmp_path / "from-ours")
        back = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "from-ours")
        close(logits(own), logits(back), 1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_adapters_of_the_text_class_are_read(kind: str, tmp_path: Path) -> None:
    """AutoModelForCausalLM makes the text model of such a folder, whose layers are "model.layers"."""
    folder = save_theirs(kind, tmp_path / "theirs")
    config = peft.LoraConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = theirs(folder, "AutoModelForCausalLM")
        trained = without_image(peft.get_peft_model(text, config))
        trained.save_pretrained(tmp_path / "adapter")
        read = peft.PeftModel.from_pretrained(ours(folder), tmp_path / "adapter")
        close(logits(read), logits(trained), 1e-4)
        whole = CausalLM.from_pretrained(folder, recipe="bf16", dtype="float32", device="cpu")
        close(logits(load_lora(whole, tmp_path / "adapter")), logits(trained), 1e-4)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_a_trained_copy_of_the_embedding_works_in_both_directions(
    kind: str, tmp_path: Path
) -> None:
    folder = save_theirs(kind, tmp_path / "theirs")
    config = peft.LoraConfig(target_modules=TARGETS, modules_to_save=["embed_tokens"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, and of the image encoder
        own = without_image(peft.get_peft_model(ours(folder), config))
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        own.save_pretrained(tmp_path / "from-ours")
        back = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "from-ours")
        close(logits(back), logits(own), 1e-4)
        back.save_pretrained(tmp_path / "from-theirs")
        read = peft.PeftModel.from_pretrained(ours(folder), tmp_path / "from-theirs")
        close(logits(read), logits(own), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_read_again(kind: str, tmp_path: Path) -> None:
    """Its names are those of the parameters, whether or not they are the ones of a multimodal model."""
    model = ours(save_theirs(kind, tmp_path / "theirs"))
    state = model.state_dict()
    assert {name for name, _ in model.named_parameters()} <= state.keys()
    before = logits(model)
    saved = {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved, strict=False)
    assert torch.equal(logits(model), before)
    halved = {name: tensor / 2 for name, tensor in saved.items()}
    model.save_pretrained(tmp_path / "own", state_dict=halved)
    model.load_state_dict(halved, strict=False)
    assert torch.equal(logits(ours(tmp_path / "own")), logits(model))
