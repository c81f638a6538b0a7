"""The plugin of vLLM that serves gated models, which vLLM loads through its entry point `vllm.general_plugins`."""

from __future__ import annotations

from transformers import AutoConfig
from vllm import ModelRegistry

from te_models.interop.remote_code.configuration_te_models import TEModelsDecoderConfig

MODEL = "te_models.serving.vllm_model:TEModelsDecoderForCausalLM"


def register() -> None:
    """Register the config and, by name, the model, which vLLM imports when a folder asks for it."""
    AutoConfig.register(TEModelsDecoderConfig.model_type, TEModelsDecoderConfig, exist_ok=True)
    ModelRegistry.register_model("TEModelsDecoderForCausalLM", MODEL)
