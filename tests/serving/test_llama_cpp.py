"""What llama.cpp's converter finds in an exported folder, by the names of its own package `gguf`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fewer import every
from hf_models import make_theirs
from safetensors import safe_open

from te_models import CausalLM

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

# Case -> the architecture of config.json that the converter registers, and the model of gguf that it becomes.
LISTED = {
    "llama-biases": ("LlamaForCausalLM", "LLAMA"),
    "mistral": ("MistralForCausalLM", "LLAMA"),
    "qwen2": ("Qwen2ForCausalLM", "QWEN2"),
    "qwen3-biases": ("Qwen3ForCausalLM", "QWEN3"),
    "smollm3-biases": ("SmolLM3ForCausalLM", "SMOLLM3"),
    "ministral3-odd": ("Ministral3ForCausalLM", "MISTRAL3"),
    "seed_oss-odd": ("SeedOssForCausalLM", "SEED_OSS"),
    "phi3-odd": ("Phi3ForCausalLM", "PHI3"),
    "granite-odd": ("GraniteForCausalLM", "GRANITE"),
    "arcee-odd": ("ArceeForCausalLM", "ARCEE"),
    "olmo2-odd": ("Olmo2ForCausalLM", "OLMO2"),
    "olmo3-odd": ("Olmo3ForCausalLM", "OLMO2"),
    "exaone4-odd": ("Exaone4ForCausalLM", "EXAONE4"),
    "glm-odd": ("GlmForCausalLM", "CHATGLM"),
    "glm4-odd": ("Glm4ForCausalLM", "GLM4"),
    "ernie4_5-odd": ("Ernie4_5ForCausalLM", "ERNIE4_5"),
    "gemma-odd": ("GemmaForCausalLM", "GEMMA"),
    "gemma2-odd": ("Gemma2ForCausalLM", "GEMMA2"),
    "gemma3_text-odd": ("Gemma3ForCausalLM", "GEMMA3"),
    "afmoe-odd": ("AfmoeForCausalLM", "AFMOE"),
    "qwen3_moe-one-key": ("Qwen3MoeForCausalLM", "QWEN3MOE"),
    "qwen2_moe-one-key": ("Qwen2MoeForCausalLM", "QWEN2MOE"),
    "qwen3_next-one-key": ("Qwen3NextForCausalLM", "QWEN3NEXT"),
    "qwen3_5_moe_text-one-key": ("Qwen3_5MoeForCausalLM", "QWEN35MOE"),
    "mixtral-one-key": ("MixtralForCausalLM", "LLAMA"),
    "olmoe-all-keys": ("OlmoeForCausalLM", "OLMOE"),
    "deepseek_v2-plain": ("DeepseekV2ForCausalLM", "DEEPSEEK2"),
    "deepseek_v3-plain": ("DeepseekV3ForCausalLM", "DEEPSEEK2"),
    "glm4_moe-all-keys": ("Glm4MoeForCausalLM", "GLM4_MOE"),
    "glm4_moe_lite-plain": ("Glm4MoeLiteForCausalLM", "DEEPSEEK2"),
}
# Names that the converter rewrites before it looks them up.
RENAMED = [
    (r"\.experts\.\d+\.", ".experts."),  # one tensor of all
    (r"\.e_score_correction_bias$", ".e_score_correction.bias"),
    (r"\.dt_bias$", ".dt_proj.bias"),
]


def lookup_name(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def names_in(folder: Path) -> list[str]:
    found: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += file.keys()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", every(2, LISTED))
def test_every_tensor_of_an_export_has_a_place(case: str, tmp_path: Path) -> None:
    architecture, arch = LISTED[case]
    make_theirs(case, tmp_path / "theirs")
    model = CausalLM.from_pretrained(tmp_path / "theirs", device="cpu", recipe="bf16")
    model.export(tmp_path / "out", format="bf16")
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    layers = model.config.num_hidden_layers
    places = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), layers)
    names = names_in(tmp_path / "out")
    lost = [n for n in names if places.get_name(lookup_name(n), (".weight", ".bias")) is None]
    assert names and not lost
