"""Calls of another function in place of a module's forward, between the hooks by which FSDP2 gathers its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

FSDP = "torch.distributed.fsdp"  # the package of its hooks


def only_fsdp_hooks(module: nn.Module) -> bool:
    """Return whether no one but FSDP2 has registered hooks around the forward of a module."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return all((getattr(hook, "__module__", None) or "").startswith(FSDP) for hook in hooks)


def call_inside(
    modules: Sequence[nn.Module], function: Callable[..., Tensor], *inputs: Tensor | None
) -> Tensor:
    """Return function(*inputs), with the weights of `modules` gathered where each is a unit of FSDP2.

    They are gathered again for its backward, after which their gradients are reduced. The output must depend on an
    input that requires a gradient for that, as backward of any module does.
    """
    if not modules:
        return function(*inputs)
    module, *others = modules
    if not isinstance(module, FSDPModule):
        return call_inside(others, function, *inputs)

    def forward(*tensors: Tensor | None) -> Tensor:
        return call_inside(others, function, *tensors)

    # An attribute of the instance comes before the method of its class, and not among its parameters and modules.
    vars(module)["forward"] = forward
    try:
        return nn.Module.__call__(module, *inputs)
    finally:
        del vars(module)["forward"]
