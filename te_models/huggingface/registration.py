"""Register our model type with transformers' Auto classes without importing transformers, which takes seconds.

The config class is registered when transformers' own table of configs is imported, or at once if it is; the model
class when the first config is made, since its module needs most of transformers.

Why an import hook: `import te_models` takes 0.15 s, and every command begins with it. transformers finds model types in
its own table alone, without entry points (5.24), and importing that table takes 2 s beyond torch. So either each user
writes a second import before `AutoModelForCausalLM.from_pretrained`, or the table is extended when somebody imports it.
The hook finds one module, leaves `sys.meta_path` as soon as it has, and changes nothing of the search.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"
# The oldest transformers that TEModelsForCausalLM runs with; te_models.huggingface.config refuses older ones too.
OLDEST = (5, 14)


def register_with_transformers() -> None:
    """Register TEModelsConfig and TEModelsForCausalLM, now or when transformers' Auto classes are imported."""
    if TABLE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    version = importlib.metadata.version("transformers").split(".")
    if (int(version[0]), int(version[1])) < OLDEST:
        return  # the caches of older ones have other methods
    table = importlib.import_module(TABLE)
    config = importlib.import_module("te_models.huggingface.config")
    config.TEModelsConfig.on_first_use[:] = [_import_model]
    table.AutoConfig.register(config.MODEL_TYPE, config.TEModelsConfig, exist_ok=True)


def _import_model() -> None:
    """Import the model class, which registers itself."""
    importlib.import_module("te_models.huggingface.modeling")


class _Finder(MetaPathFinder):
    """Finds transformers' table of configs where the other finders do, once, and registers after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TABLE:
            return None
        # First, since the search below asks all finders, and would ask this one again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            # The search made this loader for this one module, so that no other is affected.
            spec.loader.exec_module = execute_and_register
        return spec
