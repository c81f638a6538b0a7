"""te-models: gated-attention decoders built from te.Linear and te.RMSNorm, in FP8, with or without a GPU.

Names are imported when first used, so that `import te_models` and the command line's help stay fast.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from te_models.huggingface.registration import register_with_transformers as _register_with_transformers

if _TYPE_CHECKING:
    from te_models.causal_lm import CausalLM, plan
    from te_models.config.deltanet import DeltaNetConfig
    from te_models.config.model import ModelConfig
    from te_models.config.moe import MoEConfig
    from te_models.config.presets import get_preset, list_presets
    from te_models.config.recipe import Recipe, get_recipe, list_recipes
    from te_models.config.training import TrainConfig
    from te_models.data.tokenizer import load_tokenizer
    from te_models.data.training_data import open_data
    from te_models.engine import get_engine
    from te_models.generation.text import stream_text
    from te_models.huggingface.config import TEModelsConfig
    from te_models.huggingface.modeling import TEModelsForCausalLM
    from te_models.model.user_modules import checkpoint, fp8_state, load_fp8_state
    from te_models.saving.restore import load_te_checkpoint
    from te_models.serving.parity import parity
    from te_models.training.cuda_graph import GraphedStep
    from te_models.training.launch import parallel
    from te_models.training.lora import add_lora, load_lora, save_lora
    from te_models.training.trainer import Callback, Trainer

__version__ = "0.1.0"
_MODULES = {  # public name -> its module below te_models
    "Callback": "training.trainer",
    "CausalLM": "causal_lm",
    "DeltaNetConfig": "config.deltanet",
    "GraphedStep": "training.cuda_graph",
    "MoEConfig": "config.moe",
    "ModelConfig": "config.model",
    "Recipe": "config.recipe",
    "TEModelsConfig": "huggingface.config",
    "TEModelsForCausalLM": "huggingface.modeling",
    "TrainConfig": "config.training",
    "Trainer": "training.trainer",
    "add_lora": "training.lora",
    "checkpoint": "model.user_modules",
    "fp8_state": "model.user_modules",
    "get_engine": "engine",
    "get_preset": "config.presets",
    "get_recipe": "config.recipe",
    "list_presets": "config.presets",
    "list_recipes": "config.recipe",
    "load_fp8_state": "model.user_modules",
    "load_lora": "training.lora",
    "load_te_checkpoint": "saving.restore",
    "load_tokenizer": "data.tokenizer",
    "open_data": "data.training_data",
    "parallel": "training.launch",
    "parity": "serving.parity",
    "plan": "causal_lm",
    "save_lora": "training.lora",
    "stream_text": "generation.text",
}
__all__ = [
    "Callback",
    "CausalLM",
    "DeltaNetConfig",
    "GraphedStep",
    "MoEConfig",
    "ModelConfig",
    "Recipe",
    "TEModelsConfig",
    "TEModelsForCausalLM",
    "TrainConfig",
    "Trainer",
    "add_lora",
    "checkpoint",
    "fp8_state",
    "get_engine",
    "get_preset",
    "get_recipe",
    "list_presets",
    "list_recipes",
    "load_fp8_state",
    "load_lora",
    "load_te_checkpoint",
    "load_tokenizer",
    "open_data",
    "parallel",
    "parity",
    "plan",
    "save_lora",
    "stream_text",
]


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'te_models' has no attribute {name!r}")
    return getattr(_importlib.import_module(f"te_models.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


_register_with_transformers()
