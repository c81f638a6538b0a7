"""Which models do not compute the same shapes in every pass."""

from te_models.model.decoder import Decoder


def graph_obstacle(model: Decoder) -> str:
    """Return why no CUDA graph can contain a pass of `model`; "" if one can."""
    counts = model.kernels.counts_on_device
    experts = [name for name, linear in model.config.linears.items() if linear.experts]
    if model.ep.size == 1 and all(
        counts(model.get_submodule(name), model.precision.te_recipe_of(name)) for name in experts
    ):
        return ""
    return model.config.graph_obstacle
