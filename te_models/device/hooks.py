"""Hooks on modules, and other changes to their calls."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as module_calls


def is_untouched(module: nn.Module) -> bool:
    """Return whether nothing but its class decides what a call of the module does: neither hooks nor a new forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and "forward" not in module.__dict__


def has_hooks_on_all_modules() -> bool:
    """Return whether torch.nn.modules.module.register_module_forward_hook or its sibling has added a hook."""
    return bool(module_calls._global_forward_hooks or module_calls._global_forward_pre_hooks)
