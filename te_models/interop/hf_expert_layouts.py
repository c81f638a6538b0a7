"""Keys of config.json that say which layers have experts and which are dense. No torch.

A layout is a list with a bool per layer: True, the layer is dense; False, it has experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from te_models.interop.hf_parts import Fields, Values


@dataclass(frozen=True)
class Layout:
    """The keys of one kind of config.json that say which layers are dense.

    Attributes:
        keys: their names.
        read: returns whether each layer is dense, from a config.json.
        write: returns the keys, from whether each layer is dense.
    """

    keys: tuple[str, ...]
    read: Callable[[Values], list[bool]]
    write: Callable[[list[bool]], Fields]


def _read_steps(theirs: Values) -> list[bool]:
    """Read Qwen's keys: one layer of each step has experts, except those listed."""
    step = theirs.get("decoder_sparse_step", 1)
    listed = theirs.get("mlp_only_layers") or ()
    layers = range(theirs["num_hidden_layers"])
    return [(layer + 1) % step != 0 or layer in listed for layer in layers]


def _write_steps(dense: list[bool]) -> Fields:
    """Write Qwen's keys, with a list even where a step would say the same: it expresses every choice."""
    listed = []
    for layer, is_dense in enumerate(dense):
        if is_dense:
            listed.append(layer)
    return {"decoder_sparse_step": 1, "mlp_only_layers": listed}


def _read_types(theirs: Values) -> list[bool]:
    """Read the kind of each MLP; by default the first layer is dense, as in transformers."""
    types = theirs.get("mlp_layer_types")
    if not types:
        return [layer == 0 for layer in range(theirs["num_hidden_layers"])]
    return [kind == "dense" for kind in types]


def _write_types(dense: list[bool]) -> Fields:
    return {"mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense]}


def first_dense(key: str) -> Layout:
    """Return the layout of families whose first layers, as many as `key` says, are dense."""

    def read(theirs: Values) -> list[bool]:
        return [layer < theirs[key] for layer in range(theirs["num_hidden_layers"])]

    def write(dense: list[bool]) -> Fields:
        # Where other layers than the first are dense this describes another model. The caller reads what was written,
        # compares, and then tries the next family.
        return {key: sum(dense)}

    return Layout((key,), read, write)


def _read_types_or_first_dense(theirs: Values) -> list[bool]:
    """Read the kind of each MLP, or in older files the number of dense layers at the beginning."""
    types = theirs.get("mlp_layer_types")
    if types:
        return [kind == "dense" for kind in types]
    return FIRST_DENSE.read(theirs)


def _read_axk1_layout(theirs: Values) -> list[bool]:
    """Read A.X K1's keys: dense layers at the beginning, then experts in every `moe_layer_freq`-th layer."""
    types = theirs.get("mlp_layer_types")
    if types:
        return [kind == "dense" for kind in types]
    first = theirs.get("first_k_dense_replace", 1)
    step = theirs.get("moe_layer_freq", 1)
    return [layer < first or layer % step != 0 for layer in range(theirs["num_hidden_layers"])]


def axk1_unused(theirs: Values) -> tuple[str, ...]:
    """Return the prefixes of norms that A.X K1's release has in dense layers, which have none."""
    prefixes = []
    for layer, is_dense in enumerate(_read_axk1_layout(theirs)):
        if is_dense:
            prefixes.append(f"layers.{layer}.post_mlp_layernorm.")
    return tuple(prefixes)


def read_ernie_layout(theirs: Values) -> list[bool]:
    """Read Ernie's keys: the first and the last layer that may have experts, and the step between layers that do."""
    count = theirs["num_hidden_layers"]
    start = theirs["moe_layer_start_index"]
    end = theirs["moe_layer_end_index"]
    if end == -1:
        end = count - 1
    interval = theirs["moe_layer_interval"]
    return [(layer + 1) % interval != 0 or not start <= layer <= end for layer in range(count)]


def write_ernie_layout(dense: list[bool]) -> Fields:
    """Write the keys of layers with experts that follow one another; of others they describe another model."""
    sparse = []
    for layer, is_dense in enumerate(dense):
        if not is_dense:
            sparse.append(layer)
    if not sparse:
        sparse = [len(dense)]  # beyond the last layer: none has experts
    return {
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": 1,
    }


def _read_sparse_types(theirs: Values) -> list[bool]:
    """Read the kind of each MLP; by default all layers have experts."""
    types = theirs.get("mlp_layer_types")
    if not types:
        return [False] * theirs["num_hidden_layers"]
    return [kind == "dense" for kind in types]


# The layouts that several families share; a family's own stands beside its experts.
STEPS = Layout(("decoder_sparse_step", "mlp_only_layers"), _read_steps, _write_steps)
TYPES = Layout(("mlp_layer_types",), _read_types, _write_types)
SPARSE_TYPES = Layout(("mlp_layer_types",), _read_sparse_types, _write_types)
ALL_SPARSE = Layout((), lambda theirs: [False] * theirs["num_hidden_layers"], lambda dense: {})
FIRST_DENSE = first_dense("first_k_dense_replace")
TYPES_OR_FIRST = Layout(
    ("mlp_layer_types", "first_k_dense_replace"), _read_types_or_first_dense, _write_types
)
AXK1_LAYOUT = Layout(
    ("mlp_layer_types", "first_k_dense_replace", "moe_layer_freq"), _read_axk1_layout, _write_types
)
