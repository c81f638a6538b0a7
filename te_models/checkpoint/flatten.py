"""Nested state, such as an optimizer's, as named tensors and plain JSON, and back, with the same bits and types."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import first_line
from te_models.files.formats import METADATA, list_some


def flatten_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Splits nested state into named tensors and plain JSON, from which `unflatten_state` rebuilds it exactly.

    Takes dicts (keys of any type below), lists, tuples, ints of any size, floats with infinities and NaN, strings,
    bools, None and tensors, such as an optimizer's `state_dict()` or random-number states.

    Returns:
        The tensors, named by their place ("state.0.exp_avg"), and a JSON value that refers to them by name.

    Raises:
        ValueError: a value of another type; it would not come back as it is.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            name = place or "_"
            while name in tensors or name == METADATA:
                name += "_"
            tensors[name] = value
            return {"$tensor": name}
        kind = type(value)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: encode(item, _join(place, key)) for key, item in value.items()}
            return {"$dict": [[encode(key, place), encode(item, _join(place, key))] for key, item in value.items()]}
        if kind in (list, tuple):
            items = [encode(item, _join(place, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is float and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or kind in (bool, int, float, str):
            return value
        raise UsageError(f"{place or 'the state'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold")

    return tensors, encode(state, "")


def unflatten_state(tensors: Mapping[str, Tensor], document: Any) -> Any:
    """Rebuilds what `flatten_state` split.

    Raises:
        CheckpointError: the document is not of that form, or names other tensors than those given.
    """
    unused = set(tensors)

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if not any(key.startswith("$") for key in node):
            return {key: decode(item) for key, item in node.items()}
        ((tag, value),) = node.items()
        if tag == "$tensor" and value in tensors:
            unused.discard(value)
            return tensors[value]
        if tag == "$tuple" and isinstance(value, list):
            return tuple(decode(item) for item in value)
        if tag == "$dict" and isinstance(value, list):
            return {decode(key): decode(item) for key, item in value}
        if tag == "$float" and value in ("inf", "-inf", "nan"):
            return float(value)
        raise ValueError(f"there is no {tag} {str(value)[:40]!r}")

    try:
        state = decode(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the saved state is damaged: {first_line(error)}") from None
    if unused:
        raise CheckpointError(f"the saved state does not refer to {list_some(sorted(unused))}")
    return state


def _join(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)
