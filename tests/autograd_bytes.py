"""The activations of a training step as autograd has them, the judge of the memory plan."""

from typing import Any

import torch

from te_models import CausalLM
from te_models.fp8.primary_weights import is_quantized


def autograd_bytes(model: CausalLM, ids: torch.Tensor, logits: bool = True) -> int:
    """Bytes that autograd keeps after a forward: each storage once, parameters not, each copy of FP8 codes by itself.

    The emulated engine's two copies of a weight are views of one buffer; on a GPU they are two buffers.
    """
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    weights: list[Any] = list(model.parameters())
    own = {
        part.untyped_storage().data_ptr()
        for p in weights
        for part in (p.get_data_tensors() if is_quantized(p) else (p,))
        if part is not None
    }
    alive: list[torch.Tensor] = []  # an address is a tensor's own only as long as it lives

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            copy = tensor.stride() if tensor.dtype == torch.uint8 else ()
            found[storage.data_ptr(), copy] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids.clone(), return_logits=logits)
    return sum(found.values())
