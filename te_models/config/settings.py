"""Settings: fields of dataclasses, each declared once. No torch.

A field that `setting` makes has its name, type, default, help, range and group in one place. From it come its option of
the command line with help, its line in run.toml, its check, and its entry in the reference.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from te_models.errors import ConfigError, NamedFields, check_known, field_values, mistyped

Value = object  # of a setting: a bool, number, text, tuple of texts, table or None
MOST = 2**63  # which no setting needs, and PyTorch's seeds do not reach
EVERYDAY = "Options"  # the group of the options that --help lists; --help-all lists the others too


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe one field of the settings: its option, its name in run.toml, and its checks.

    Attributes:
        name: its name in run.toml, and in kebab case on the command line.
        field: its name in the dataclass.
        kinds: the types of its values besides None, the first one that of the command line; a tuple is of texts.
        default: the value if it is not given.
        help: one line for the help and the reference.
        group: the heading of its option in the help.
        choices: its values, if they can be listed here.
        least, below: numbers are at least the one and below the other.
        above: numbers are above `least`.
        fixed: whether a resumed run keeps it, since with another value it would be another run.
        path: whether it may be a path.
        metavar: how the help writes its value; "": its type.
        shown: how the help writes its default; "": as it is.
        hidden: whether the help leaves it out.
    """

    name: str
    help: str
    kinds: tuple[type, ...]
    default: Value = None
    field: str = ""
    group: str = EVERYDAY
    choices: tuple[str | int, ...] = ()
    least: float = 0
    below: float = MOST
    above: bool = False
    fixed: bool = False
    path: bool = False
    metavar: str = ""
    shown: str = ""
    hidden: bool = False

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Return True if it holds several texts."""
        return self.kinds[0] is tuple

    @property
    def range(self) -> str:
        """Its numbers as the help writes them, such as "0<=x<1"; "" where another class checks them."""
        if self.kinds[0] not in (int, float) or not self.field:
            return ""
        least, above = f"{self.least:g}", "" if self.below in (MOST, math.inf) else f"<{self.below:g}"
        if above:
            return f"{least}{'<' if self.above else '<='}x{above}"
        return f"x{'>' if self.above else '>='}{least}"

    def wrong_type(self, value: Value) -> str:
        """Return what a value of this setting is, such as "a whole number", if this is none; else an empty text."""
        if self.several:
            texts = [value] if isinstance(value, str) else value
            good = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
            return "" if good else "a path, or a list of paths"
        if any(isinstance(value, kind) and not mistyped(value, kind) for kind in self.kinds):
            return ""
        return mistyped(value, self.kinds[0])

    def check(self, value: Value) -> None:
        """Raise a ConfigError for a value of a wrong type or out of range."""
        given = f"{self.name}={value!r}" if self.field in (self.name, "") else f"{self.flag} {value!r}"
        if wanted := self.wrong_type(value):
            raise ConfigError(f"{given} is of a wrong type: give {wanted}")
        if self.choices:
            check_known(self.name, value, self.choices)
        if isinstance(value, (int, float)):
            enough = value > self.least if self.above else value >= self.least
            if not (enough and value < self.below):
                raise ConfigError(f"{given} is out of range: give {self._range(enough)}")

    def _range(self, enough: bool) -> str:
        """Return the range of a number in words; of one that has no limit above, only the limit that it broke."""
        least = f"a number above {self.least}" if self.above else f"{self.least} or more"
        if self.below == MOST:
            return "less than 2**63" if enough else least
        return (
            f"{least.removesuffix(' or more')} and below {self.below}" if self.above else f"{least}, below {self.below}"
        )


def setting(default: Value, text: str, **about: Any) -> Any:
    """Return a dataclass field with this default and help text; `about` are other attributes of Setting."""
    return field(default=default, metadata={"help": text, "about": about})


@functools.cache
def settings_of(owner: type[Settings]) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares, in its order."""
    hints, found = get_type_hints(owner), []
    for one in fields(owner):
        if "about" in one.metadata:
            shared = {"name": one.name, "default": one.default, "group": owner.heading}
            about: dict[str, Any] = {**shared, **one.metadata["about"]}
            found.append(Setting(field=one.name, help=one.metadata["help"], kinds=kinds_of(hints[one.name]), **about))
    return tuple(found)


def kinds_of(hint: Any) -> tuple[type, ...]:
    """Return the types in an annotation such as `int | None` or `tuple[str, ...]`, None left out."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(member) or member for member in members if member is not types.NoneType)


def as_fields(owner: type[Settings], flat: Mapping[str, Value]) -> dict[str, Any]:
    """Return the settings of `owner` in `flat`, name -> value, as keywords of its constructor."""
    return {one.field: flat[one.name] for one in settings_of(owner) if one.name in flat}


def by_name(owner: Settings) -> dict[str, Value]:
    """Return name -> value of the settings of `owner`, as run.toml has them: texts that are one option as one text."""
    found: dict[str, Value] = {}
    for one in settings_of(type(owner)):
        value = field_values(owner)[one.field]
        if isinstance(value, tuple):
            value = (value or None) if one.several else ",".join(value)
        found[one.name] = value
    return found


@dataclass(frozen=True, kw_only=True)
class Settings(NamedFields):
    """Base of dataclasses of settings: it checks each when an instance is made.

    `heading` is the group in the help of the settings that name no other.

    Raises:
        ConfigError: a setting has a wrong type or is out of range.
    """

    heading: ClassVar[str] = EVERYDAY

    def __post_init__(self) -> None:
        values = vars(self)
        for one in settings_of(type(self)):
            if not (one.default is None and values[one.field] is None):
                one.check(values[one.field])
