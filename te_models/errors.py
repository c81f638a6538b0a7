"""One way to say that a name is wrong: what was given, what is nearest, what there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, given: object, choices: Iterable[str]) -> ValueError:
    """The error for a `given` name that is not among `choices`; it names the nearest valid one."""
    names = sorted(choices)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {given!r}: {hint}choose one of {', '.join(names)}")
