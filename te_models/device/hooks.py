"""Hooks on modules, and other changes to their calls."""

from __future__ import annotations

from torch import nn


def is_untouched(module: nn.Module) -> bool:
    """Return whether nothing but its class decides what a call of the module does: neither hooks nor a new forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and "forward" not in module.__dict__
