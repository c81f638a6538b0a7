"""Checks of descriptions: each lists its mistakes in order, and the first is the error. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from te_models.errors import ConfigError, TeModelsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# First word of a field's type -> the types of its values; fields of other types are checked elsewhere.
TYPES = {"int": int, "float": (int, float), "bool": bool, "str": str, "tuple": tuple, "Scaling": Mapping}
SAID = {"str": "text", "tuple": "list", "Scaling": "dict"}  # in messages, where they have another name


def refuse(mistakes: Iterable[str | Exception], error: type[TeModelsError] = ConfigError) -> None:
    """Raise the first of the mistakes: an `error` of that line, or the mistake itself if it is an error."""
    for mistake in mistakes:
        raise mistake if isinstance(mistake, Exception) else error(mistake)


def wrong_values(owner: DataclassInstance, kind: type[DataclassInstance], prefix: str = "") -> Iterator[str]:
    """Yield a line for each field of `kind` whose value in `owner` has another type, or is no positive finite number.

    A field may be None if that is its default, and 0 if that is, or if it is a token id or a coefficient.
    """
    for field in dataclasses.fields(kind):
        value, name = getattr(owner, field.name), str(field.type).split(" ")[0].partition("[")[0]
        if name not in TYPES or (value is None and field.default is None):
            continue
        several = value if isinstance(value, tuple) and str(field.type).startswith("int | tuple") else (value,)
        numeric, zero = name in ("int", "float"), field.default == 0 or field.name.endswith(("_token_id", "_coef"))
        least = ("0 or a positive " if zero else "a positive ") if numeric else ""
        if not all(isinstance(v, TYPES[name]) and isinstance(v, bool) == (name == "bool") for v in several):
            said = SAID.get(name, name)
            yield f"{prefix}{field.name}={value!r} is not a valid {said}: give {least or 'a '}{said}"
        elif numeric and not all(is_positive(v) or (zero and v == 0) for v in several):
            yield f"{prefix}{field.name}={value!r} is out of range: give {least}{name}"


def is_positive(value: object) -> bool:
    """Return whether a value is a positive finite number; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
