"""Settings: fields of dataclasses, each declared once. No torch.

A field that `setting` makes has its name, type, default, help, range and group in one place. From it come its option of
the command line with help, its line in run.toml, its check, and its entry in the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from te_models.errors import SAID, ConfigError, NamedFields, check_known, mistyped

# A bool, number, text, several of them, a table, a group of settings, or None.
SettingValue = object
# The bound of numbers that have no other: no setting needs more, and PyTorch takes no larger seed.
MOST = 2**63
EVERYDAY = "Options"  # the group of the options that --help lists; --help-all lists the others too
Made = TypeVar("Made", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe one field of the settings: its option, its name in run.toml, and its checks.

    Attributes:
        name: its name in run.toml, and in kebab case on the command line.
        field: its name in the dataclass.
        kinds: the types of its values besides None; the command line takes the first.
        members: the type of the entries, where one of `kinds` is a tuple.
        default: the value if it is not given.
        help: one line for the help and the reference.
        group: the heading of its option in the help.
        choices: its values, if they can be listed here.
        least: the smallest number allowed.
        above: whether `least` itself is not allowed either.
        below: numbers are below this one.
        fixed: whether a resumed run keeps it, since with another value it would be another run.
        path: whether it may be a path.
        metavar: how the help writes its value; "": its type.
        shown: how the help writes its default; "": as it is.
        hidden: whether the help leaves it out.
        bare: its value where its option is given without one; None: the option needs one.
    """

    name: str
    help: str
    kinds: tuple[type, ...]
    members: type = str
    default: SettingValue = None
    field: str = ""
    group: str = EVERYDAY
    choices: Collection[str | int] = ()
    least: float = 0
    below: float = MOST
    above: bool = False
    fixed: bool = False
    path: bool = False
    metavar: str = ""
    shown: str = ""
    hidden: bool = False
    bare: int | None = None

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Return True if it always holds several values."""
        return self.kinds[0] is tuple

    @property
    def range(self) -> str:
        """Its numbers as the help writes them, such as "0<=x<1"; "" where another class checks them."""
        if self.kinds[0] not in (int, float) or not self.field:
            return ""
        least = f"{self.least:g}"
        above = "" if self.below in (MOST, math.inf) else f"<{self.below:g}"
        if above:
            return f"{least}{'<' if self.above else '<='}x{above}"
        return f"x{'>' if self.above else '>='}{least}"

    def wrong_type(self, value: SettingValue) -> str:
        """Return the kind of value that is missing, such as "a whole number", if `value` is of another; else ""."""
        if any(self._is_one(value, kind) for kind in self.kinds):
            return ""
        if self.several:
            return "a path, or a list of paths" if self.path else "a list"
        return SAID.get(self.kinds[0], "a table")

    def _is_one(self, value: SettingValue, kind: type) -> bool:
        if kind is tuple:
            if isinstance(value, (list, tuple)):
                entries = value
            # One path may be given for a list of paths; other lists must be lists.
            elif self.path:
                entries = [value]
            else:
                entries = [None]
            return all(
                isinstance(entry, self.members) and not mistyped(entry, self.members)
                for entry in entries
            )
        if issubclass(kind, (Mapping, Settings)):
            table = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
            return table or (issubclass(kind, Settings) and isinstance(value, kind))
        return isinstance(value, (int, float) if kind is float else kind) and not mistyped(
            value, kind
        )

    def check(self, value: SettingValue) -> None:
        """Raise a ConfigError for a value of a wrong type or out of range."""
        # The name is not what users write: the option tells them which setting is meant.
        renamed = (
            self.field and not self.name.endswith(f".{self.field}") and self.field != self.name
        )
        option = f"{self.flag} {value!r}" if renamed else f"{self.name}={value!r}"
        if right_type := self.wrong_type(value):
            raise ConfigError(f"{option} is of a wrong type: give {right_type}")
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            if self.choices:
                check_known(self.name, entry, self.choices)
            if isinstance(entry, (int, float)) and not isinstance(entry, bool):
                enough = entry > self.least if self.above else entry >= self.least
                if not (enough and entry < self.below):
                    raise ConfigError(f"{option} is out of range: give {self._range(enough)}")

    def _range(self, enough: bool) -> str:
        """Return the range of a number in words; of one that has no limit above, only the limit that it broke."""
        least = f"a number above {self.least}" if self.above else f"{self.least} or more"
        if self.below == MOST:
            return "less than 2**63" if enough else least
        if self.above:
            return f"{least.removesuffix(' or more')} and below {self.below}"
        return f"{least}, below {self.below}"

    def taken(self, value: SettingValue) -> SettingValue:
        """Check a value; return it as the dataclass stores it: a list as a tuple, a table as the group of settings."""
        self.check(value)
        if isinstance(value, list) and tuple in self.kinds:
            return tuple(value)
        if isinstance(value, Mapping) and issubclass(self.kinds[0], Settings):
            return from_table(self.kinds[0], value, self.name)
        return value


def setting(default: SettingValue, text: str, hash: bool | None = None, **about: Any) -> Any:
    """Return a dataclass field with this default and help text; `about` are other attributes of Setting."""
    return dataclasses.field(default=default, hash=hash, metadata={"help": text, "about": about})


count = functools.partial(setting, least=1)  # a whole number of 1 or more
positive = functools.partial(setting, above=True)  # a number above 0


@functools.cache
def settings_of(owner: type[Settings]) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares, in its order."""
    hints = get_type_hints(owner)
    settings = []
    for field in dataclasses.fields(owner):
        if "about" in field.metadata:
            kinds, members = kinds_of(hints[field.name])
            # A field may override what its dataclass says of all, such as the group in the help.
            group_defaults = {
                "name": owner.prefix + field.name,
                "default": field.default,
                "group": owner.heading,
            }
            about: dict[str, Any] = {**group_defaults, **field.metadata["about"]}
            settings.append(
                Setting(
                    field=field.name,
                    help=field.metadata["help"],
                    kinds=kinds,
                    members=members,
                    **about,
                )
            )
    return tuple(settings)


def kinds_of(hint: Any) -> tuple[tuple[type, ...], type]:
    """Return the types in an annotation such as `int | None`, without None, and the type of the entries of a tuple."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    members = [get_args(option)[0] for option in options if get_origin(option) is tuple]
    kinds = []
    for option in options:
        if option is not types.NoneType:
            kinds.append(get_origin(option) or option)
    return tuple(kinds), (*members, str)[0]


def from_table(owner: type[Made], values: Mapping[str, Any], title: str) -> Made:
    """Return the settings of `owner` in a table, such as a file's; `title` names it in errors."""
    lacking = []
    for field in dataclasses.fields(owner):
        if field.default is MISSING and field.name not in values:
            lacking.append(field.name)
    if lacking:
        raise ConfigError(f"{title} lacks {', '.join(lacking)}: give all that has no default")
    return owner(**values)


def as_fields(owner: type[Settings], flat: Mapping[str, SettingValue]) -> dict[str, Any]:
    """Return the settings of `owner` in `flat`, name -> value, as keywords of its constructor."""
    return {
        declared.field: flat[declared.name]
        for declared in settings_of(owner)
        if declared.name in flat
    }


def by_name(owner: Settings) -> dict[str, SettingValue]:
    """Return name -> value of the settings of `owner`, as run.toml has them: texts that are one option as one text."""
    values: dict[str, SettingValue] = {}
    for declared in settings_of(type(owner)):
        value = vars(owner)[declared.field]
        if isinstance(value, tuple):
            value = (value or None) if declared.several else ",".join(value)
        values[declared.name] = value
    return values


class Settings(NamedFields):
    """Base of dataclasses of settings: it checks each when an instance is made.

    `heading` is the group in the help of the settings that name no other, and `prefix` stands before their names.

    Raises:
        ConfigError: a setting has a wrong type or is out of range.
    """

    heading: ClassVar[str] = EVERYDAY
    prefix: ClassVar[str] = ""
    # Every subclass is a dataclass.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    def __post_init__(self) -> None:
        take_settings(self, type(self))


def take_settings(instance: Settings, owner: type[Settings]) -> None:
    """Check the settings that `owner`, the class of an instance or one above it, declares; see Setting.taken."""
    for declared in settings_of(owner):
        value = vars(instance)[declared.field]
        if not (declared.default is None and value is None):
            object.__setattr__(instance, declared.field, declared.taken(value))
