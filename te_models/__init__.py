"""te-models: gated-attention decoders built from te.Linear and te.RMSNorm, in FP8, with or without a GPU.

Names are imported when first used, so that `import te_models` and the command line's help stay fast.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from te_models.entry_points import load_entry_points as _load_entry_points
from te_models.garbage import collecting_later as _collecting_later
from te_models.huggingface.registration import (
    register_with_transformers as _register_with_transformers,
)

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
    from te_models.extensions import (
        register_family,
        register_mixer,
        register_mlp,
        register_preset,
    )
    from te_models.generation.text import stream_text
    from te_models.huggingface.config import TEModelsConfig
    from te_models.huggingface.modeling import TEModelsForCausalLM
    from te_models.inspect.recipe_advice import advise_recipe
    from te_models.inspect.replay import replay
    from te_models.model.user_modules import checkpoint, fp8_state, load_fp8_state
    from te_models.recorder.record import read_record
    from te_models.saving.load_model import load_te_checkpoint
    from te_models.serving.parity import parity
    from te_models.training.callback import Callback
    from te_models.training.cuda_graph import GraphedStep
    from te_models.training.launch import parallel
    from te_models.training.lora import add_lora, load_lora, save_lora
    from te_models.training.trainer import Trainer

__version__ = "0.1.0"  # the one place of the version: pyproject.toml reads it here
_NAMES = {  # module below te_models -> its public names
    "causal_lm": "CausalLM plan",
    "config.deltanet": "DeltaNetConfig",
    "config.model": "ModelConfig",
    "config.moe": "MoEConfig",
    "config.presets": "get_preset list_presets",
    "config.recipe": "Recipe get_recipe list_recipes",
    "config.training": "TrainConfig",
    "data.tokenizer": "load_tokenizer",
    "data.training_data": "open_data",
    "engine": "get_engine",
    "extensions": "register_family register_mixer register_mlp register_preset",
    "generation.text": "stream_text",
    "huggingface.config": "TEModelsConfig",
    "huggingface.modeling": "TEModelsForCausalLM",
    "inspect.recipe_advice": "advise_recipe",
    "inspect.replay": "replay",
    "model.user_modules": "checkpoint fp8_state load_fp8_state",
    "recorder.record": "read_record",
    "saving.load_model": "load_te_checkpoint",
    "serving.parity": "parity",
    "training.cuda_graph": "GraphedStep",
    "training.launch": "parallel",
    "training.lora": "add_lora load_lora save_lora",
    "training.callback": "Callback",
    "training.trainer": "Trainer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
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
    "advise_recipe",
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
    "read_record",
    "register_family",
    "register_mixer",
    "register_mlp",
    "register_preset",
    "replay",
    "save_lora",
    "stream_text",
]


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'te_models' has no attribute {name!r}")
    # The first of them imports torch.
    with _collecting_later():
        return getattr(_importlib.import_module(f"te_models.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


_register_with_transformers()
_load_entry_points()
