"""te-models: gated-attention decoders from te.Linear and te.RMSNorm, in FP8, on any GPU or on none.

Names are imported when first used, so that `import te_models` and the command line's help stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM
    from te_models.config.model import ModelConfig
    from te_models.config.presets import get_preset, list_presets
    from te_models.config.recipe import Recipe, get_recipe, list_recipes
    from te_models.training.cuda_graph import GraphedStep

__version__ = "0.1.0"
__all__ = [
    "CausalLM",
    "GraphedStep",
    "ModelConfig",
    "Recipe",
    "get_preset",
    "get_recipe",
    "list_presets",
    "list_recipes",
]

_HOME = {
    "CausalLM": "te_models.causal_lm",
    "GraphedStep": "te_models.training.cuda_graph",
    "ModelConfig": "te_models.config.model",
    "Recipe": "te_models.config.recipe",
    "get_preset": "te_models.config.presets",
    "get_recipe": "te_models.config.recipe",
    "list_presets": "te_models.config.presets",
    "list_recipes": "te_models.config.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'te_models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
