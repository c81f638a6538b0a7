"""te-models: gated-attention decoders from te.Linear and te.RMSNorm, in FP8, on any GPU or on none.

Names are imported when first used, so that `import te_models` and the command line's help stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_models.config import ModelConfig
    from te_models.graphed import GraphedStep
    from te_models.model import CausalLM
    from te_models.presets import get_preset, list_presets
    from te_models.recipe import Recipe, get_recipe, list_recipes

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
    "CausalLM": "te_models.model",
    "GraphedStep": "te_models.graphed",
    "ModelConfig": "te_models.config",
    "Recipe": "te_models.recipe",
    "get_preset": "te_models.presets",
    "get_recipe": "te_models.recipe",
    "list_presets": "te_models.presets",
    "list_recipes": "te_models.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'te_models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
