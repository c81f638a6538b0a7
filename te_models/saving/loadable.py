"""Checks of a model that is to be saved: that what is written loads again."""

from collections.abc import Mapping

from torch import Tensor

from te_models.distributed.dtensor import local
from te_models.errors import UsageError
from te_models.files.tensors import all_finite
from te_models.model.decoder import Decoder


def refuse_unloadable(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Raise a UsageError for weights that no loader would accept, before they replace an earlier save.

    `tensors` are the whole weights by name.
    """
    blocks = len(model.layers)
    if blocks != model.config.num_hidden_layers:
        raise UsageError(
            f"the model has {blocks} blocks, and its config {model.config.num_hidden_layers}: build a CausalLM of "
            f"dataclasses.replace(model.config, num_hidden_layers={blocks}) and load the state_dict into it"
        )
    rows = tensors["embed_tokens.weight"].shape[0]
    if rows != model.config.vocab_size:
        raise UsageError(
            f"the embedding has {rows} rows, and the config vocab_size={model.config.vocab_size}: load the model with "
            f"vocab_size={rows}, and change the values of its rows"
        )
    for name, tensor in tensors.items():
        # A writer would read from the address of a whole, which a shard does not have.
        if local(tensor) is not tensor:
            raise UsageError(
                f"{name} is sharded: gather a full state_dict (torch.distributed.checkpoint.state_dict), load it into "
                "a CausalLM that is not, and save that"
            )
        # Tensors on the meta device are refused where they would be written.
        if not tensor.is_meta and not all_finite(tensor):
            raise UsageError(
                f"{name} has a NaN or an infinity, which no loader accepts: load an earlier save; nothing was written"
            )
