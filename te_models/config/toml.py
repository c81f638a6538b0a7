"""TOML files of settings: read with a limit and one-line errors, and written with a comment per file. No torch."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from te_models.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 2**20
_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*\.[ \t]*"""
# tomllib reads such keys in quadratic time and memory.
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:{_PART}){{50}}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file of at most MAX_BYTES bytes."""
    data = read_limited(path)
    if _DEEP_KEY.search(data.decode(errors="replace")):
        raise ConfigError(f"{path} has a key of 50 parts or more: settings have one or two")
    try:
        # Editors on Windows put a mark of three bytes in front, which TOML does not have.
        values = tomllib.loads(data.decode("utf-8-sig"))
    # A number with thousands of digits is a ValueError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {' '.join(str(error).split())}") from None
    check_values(values, path)
    return values


def read_limited(path: Path) -> bytes:
    """Return the bytes of a file of settings; a ConfigError if it has more than MAX_BYTES or is no file."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot read {path}: it is not a file")
    try:
        with open(path, "rb") as file:
            # One byte more than allowed tells a file that is too large, without reading all of it.
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_BYTES} bytes, too large for a file of settings"
        )
    return data


def check_values(values: dict[str, Any], path: Path) -> None:
    """Raise a ConfigError for an integer of more than 64 bits, which TOML does not have."""
    for value in _leaves(values):
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"{path} has an integer of more than 64 bits: give a smaller one")


def _leaves(value: Any) -> Iterator[object]:
    """Yield the values in tables and lists, at any depth."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        yield value


def render_toml(sections: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """Return a TOML document: `comment`, then one table per section. Values of None are left out, also inside."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for title, values in sections.items():
        entries = []
        for name, value in values.items():
            if value is not None:
                entries.append(f"{_key(name)} = {_value(value)}")
        if entries:
            lines += ["", f"[{title}]", *entries]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    if name.replace("_", "").replace("-", "").isalnum() and name.isascii():
        return name
    return _value(name)


def _value(value: Any) -> str:
    """Return a value as TOML: JSON's strings, numbers and lists are also TOML's, but for DEL."""
    if isinstance(value, Mapping):
        items = []
        for name, item in value.items():
            if item is not None:
                items.append(f"{_key(name)} = {_value(item)}")
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value)  # also inf and nan
    raise TypeError(f"a {type(value).__name__} has no place in TOML")
