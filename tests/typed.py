"""Parts of modules and tensors that PyTorch types as optional or as any module, with the types that tests rely on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def submodule(module: nn.Module, name: str) -> Any:
    """Return a module by its name, with whatever attributes its class has."""
    return module.get_submodule(name)
