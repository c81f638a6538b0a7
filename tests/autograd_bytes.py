"""The activations of a training step as autograd has them, the judge of the memory plan."""

from typing import Any
from unittest.mock import patch

import torch

from te_models import CausalLM
from te_models.config.attention import AttentionSpec
from te_models.fp8.primary_weights import is_quantized
from te_models.model.context_parallel import RegatheredRows
from te_models.planning.memory_estimate import saved_bytes
from te_models.planning.training import Training


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

    pack_rows = RegatheredRows.pack

    def pack_others(rows: RegatheredRows, tensor: torch.Tensor) -> Any:
        """Count what attention to gathered keys saves beside them: torch calls the innermost hooks alone."""
        kept = pack_rows(rows, tensor)
        return pack(kept) if isinstance(kept, torch.Tensor) else kept

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        patch.object(RegatheredRows, "pack", pack_others),
    ):
        model(ids, labels=ids.clone(), return_logits=logits)
    return sum(found.values())


def planned_bytes(model: CausalLM, batch_size: int, seq_len: int, **how: Any) -> int:
    """Return the bytes that the plan says autograd keeps of this model on a CPU; `how` are other fields of Training."""
    own: dict[str, Any] = dict(
        activation_checkpointing=model.activation_checkpointing, fp8_params=model.fp8_params
    )
    own |= dict(
        batch_size=batch_size,
        seq_len=seq_len,
        dtype_bytes=model.dtype.itemsize,
        compile=False,
        cuda=False,
    )
    return saved_bytes(model.config, model.recipe, Training(**own | how))


def assert_planned(planned: int, kept: int, model: CausalLM, seq_len: int) -> None:
    """Assert that a plan is what autograd keeps, and what Python objects hold beside it until backward."""
    held = held_bytes(model, seq_len)
    assert kept <= planned <= kept + held, f"planned {planned}, kept {kept}, at most {held} held"


def held_bytes(model: CausalLM, seq_len: int) -> int:
    """Return the most bytes that Python objects hold of a pass, and autograd does not.

    Those are the loss, flags and positions; of recomputes also the rotary tables of the pass, the inputs of all layers
    and keys that layers share, of two rows of tokens; and of attention that is composed of operations, its mask.
    """
    element = model.dtype.itemsize
    tokens = 2 * seq_len
    held = 64 + 8 * seq_len
    mixers = [mixer for layer in model.config.layers for mixer in layer.mixers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    if any(mixer.window or mixer.chunk or mixer.sinks or mixer.softcap for mixer in attention):
        held += 2 * seq_len**2
    if model.activation_checkpointing != "none":
        ropes = {getattr(mixer, "rope", None) for mixer in mixers} - {None}
        held += 8 * seq_len * len(ropes) * model.config.head_dim
        if model.config.query_scale_beta is not None:
            held += 4 * seq_len  # the factor of the queries at each position
        if model.config.layer_inputs is not None:
            width = len(model.config.layers) * model.config.layer_inputs.width
            held += tokens * width * element
        lenders = [mixer for mixer in attention if mixer.lends_keys]
        held += sum(2 * tokens * mixer.heads.kv_size * element for mixer in lenders)
    return held
