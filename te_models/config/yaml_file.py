"""YAML files of settings, read with the limits of TOML files and the values of YAML 1.2. No torch."""

import re
from pathlib import Path
from typing import Any

from te_models.config.toml import check_values, read_limited
from te_models.errors import ConfigError, MissingPackage

SUFFIXES = (".yaml", ".yml")
# What a plain word means in YAML 1.2: PyYAML by itself reads 2e-5 as a text, `no` as false and 1:30 as 90.
_PLAIN = {
    "null": (re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    "int": (re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), list("-+0123456789")),
    "float": (
        re.compile(
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.nan"
        ),
        list("-+0123456789."),
    ),
}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file of settings: tables of names, as in TOML.

    Raises:
        ConfigError: it cannot be read, is no YAML, has a name twice, or an alias or a tag, which TOML does not have.
        MissingPackage: pyyaml is not installed.
    """
    data = read_limited(path)
    try:
        import yaml  # noqa: PLC0415
    except ImportError:
        raise MissingPackage(f"{path}: YAML needs pyyaml: pip install 'te-models[train]'") from None
    try:
        values = yaml.load(data.decode(), _loader(yaml))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no tables of settings: write `run:` and settings below it")
    check_values(values, path)
    return values


def _loader(yaml: Any) -> type:
    """Return a safe loader for plain words as in YAML 1.2, that refuses aliases, tags and names given twice."""

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, list[Any]] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            # Before the node is built: an alias may name a tree that grows with each use.
            event = self.peek_event()
            line = event.start_mark.line + 1
            if isinstance(event, yaml.events.AliasEvent):
                raise yaml.YAMLError(f"an alias in line {line}: write the value out")
            if event.tag is not None:
                raise yaml.YAMLError(f"a tag in line {line}: write the plain value")
            return super().compose_node(parent, index)

    def construct_mapping(loader: Any, node: Any) -> dict[str, Any]:
        values = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            # PyYAML itself would keep the last of two equal names.
            name = loader.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.YAMLError(f"the name {name!r} in line {line} is no text: quote it")
            if name in values:
                raise yaml.YAMLError(f"{name!r} is there twice, the second time in line {line}")
            values[name] = loader.construct_object(value, deep=True)
        return values

    def construct_int(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def construct_float(loader: Any, node: Any) -> float:
        text = loader.construct_scalar(node).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    # YAML 1.1, which PyYAML reads, takes "no" and "on" for booleans, and 1e-5 for a text.
    for kind, (spellings, firsts) in _PLAIN.items():
        whole = re.compile(rf"(?:{spellings.pattern})$")
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", whole, firsts)
    Loader.add_constructor("tag:yaml.org,2002:map", construct_mapping)
    Loader.add_constructor("tag:yaml.org,2002:int", construct_int)
    Loader.add_constructor("tag:yaml.org,2002:float", construct_float)
    return Loader
