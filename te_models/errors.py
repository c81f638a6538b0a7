"""Errors of one line: a name that is wrong, with the nearest that there is; an optional package that is missing."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from typing import Any


class MissingPackage(ImportError, ValueError):
    """An optional package is not installed, too old, or cannot be imported; the message says what to install."""


def unknown(kind: str, given: object, choices: Iterable[str]) -> ValueError:
    """The error for a `given` name that is not among `choices`; it names the nearest valid one."""
    names = sorted(choices)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    near = near or [name for name in names if _initials(name) == str(given).lower()]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {given!r}: {hint}choose one of {', '.join(names)}")


def _initials(name: str) -> str:
    """Return "lr" for "learning_rate"."""
    return "".join(word[:1] for word in name.split("_"))


class NamedFields:
    """Base of dataclasses whose constructor names the nearest field when it is given an unknown one."""

    def __new__(cls, *values: Any, **fields: Any) -> Any:
        """Raise a ValueError for a keyword that is no field; the dataclass's own `__init__` does the rest."""
        known = [name for name, field in cls.__dict__["__dataclass_fields__"].items() if field.init]
        for name in fields:
            if name not in known:
                raise unknown(f"field of {cls.__name__}", name, known)
        return super().__new__(cls)


@contextlib.contextmanager
def needs(what: str, package: str, oldest: str, extra: str) -> Iterator[None]:
    """Import an optional `package` inside this, and a failure becomes one line that says what to install.

    Args:
        what: what needs the package.
        package: its name, for pip.
        oldest: the oldest version that will do, as pyproject.toml has it.
        extra: the extra of te-models that installs it.

    Raises:
        MissingPackage: it is not installed, older than `oldest`, or its import fails.
    """
    install = f"{what} needs {package} {oldest} or newer%s: pip install -U 'te-models[{extra}]'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackage(install % "") from None
    if _release(found) < _release(oldest):
        raise MissingPackage(install % f", not {found}")
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingPackage(
            f"{what} needs {package}, and the installed {found} cannot be imported ({reason}): "
            f"pip install -U torch 'te-models[{extra}]'"
        ) from None


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
