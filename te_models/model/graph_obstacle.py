"""Which models do not compute the same shapes in every pass."""

from te_models.model.decoder import Decoder
from te_models.numerics.stored import StoredWeight


def graph_obstacle(model: Decoder, ranks_alike: bool = False) -> str:
    """Return why no CUDA graph can contain a pass of `model`; "" if one can.

    `ranks_alike` says whether all ranks that share experts have as many tokens in it, as in steps of training.
    """
    for module in model.modules():
        # `parameters()` looks for the names too, which takes twice as long, before every prompt.
        if any(isinstance(weight, StoredWeight) for weight in module._parameters.values()):
            return "weights of the base stay as they are stored, and are dequantized in each pass"
    counts = model.kernels.counts_on_device
    experts = [name for name, linear in model.config.linears.items() if linear.experts]
    waits = model.ep.size > 1 and not (ranks_alike and model.ep.gathered is not None)
    if not waits and all(
        counts(model.get_submodule(name), model.precision.te_recipe_of(name)) for name in experts
    ):
        return ""
    return model.config.graph_obstacle
