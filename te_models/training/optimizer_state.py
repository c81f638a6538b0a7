"""The state of an optimizer in a checkpoint: the state of the whole model, whichever process has its parameters."""

from te_models.files.formats import Fields
from te_models.model.decoder import Decoder
from te_models.optim.master import MasterWeights
from te_models.saving.sharded import whole_optimizer_state


def optimizer_names(optimizer: MasterWeights, model: Decoder) -> dict[str, list[str]]:
    """Return the names of the whole model's parameters that have an entry in "state" and in "masters", in their order.

    Some may be their own masters, such as the FP32 ones of a model in BF16.
    """
    by_kind = {}
    for kind, names in _own_names(optimizer, model).items():
        by_kind[kind] = [name for name, _ in model.ep.every(zip(names, names, strict=True), str)]
    return by_kind


def trained_names(optimizer: MasterWeights, model: Decoder) -> list[str]:
    """Return the names of the whole model's parameters that a run trains, each once."""
    return list(dict.fromkeys(optimizer_names(optimizer, model)["state"]))


def optimizer_state(optimizer: MasterWeights, model: Decoder) -> Fields:
    """Return the state of an optimizer with an entry per parameter of the whole model."""
    state = optimizer.state_dict()
    if model.ep.size == 1:
        return state
    return whole_optimizer_state(state, model, _own_names(optimizer, model))


def _own_names(optimizer: MasterWeights, model: Decoder) -> dict[str, list[str]]:
    """Return the names of this process's parameters that have an entry in "state" and in "masters", in their order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "state": [names[id(parameter)] for parameter in optimizer.parameters],
        "masters": [names[id(parameter)] for parameter, _ in optimizer.saved_masters],
    }
