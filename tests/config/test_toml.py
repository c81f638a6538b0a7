"""TOML files of settings: what is written reads back equal, and what cannot be read is one line."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from te_models import ModelConfig, get_preset, list_presets
from te_models.config.toml import MAX_BYTES, read_toml, render_toml
from te_models.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VALUES: dict[str, Any] = {
    "text": 'a "quoted" \\ path\nin lines \x7f \x01 é 🙂',
    "empty": "",
    "number": -3,
    "large": 2**62,
    "small": 1e-05,
    "whole": 1.0,
    "infinite": float("inf"),
    "yes": True,
    "list": [1, "two", [3.5, False]],
    "tuple": (1, 0, 1),
    "table": {"rope_type": "llama3", "factor": 8.0, "with space": [1]},
    "key with = and \"": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_reads_back_equal(name: str) -> None:
    value = VALUES[name]
    read = tomllib.loads(
        render_toml({"one": {name: value, "none": None}, "two": {"x": 1}}, "about\nit")
    )
    assert read == {
        "one": {name: list(value) if isinstance(value, tuple) else value},
        "two": {"x": 1},
    }
    assert type(read["one"][name]) is (list if isinstance(value, tuple) else type(value))


def test_a_value_without_a_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="a Path has no place|a PosixPath has no place"):
        render_toml({"one": {"path": Path("x")}}, "")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    for path in (tmp_path / "run.toml", tmp_path):
        with pytest.raises(ConfigError, match="it is not a file"):
            read_toml(path)


def test_a_file_of_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    """Its lines end in two characters, and a mark of three bytes may be in front."""
    path = tmp_path / "run.toml"
    path.write_bytes('\ufeffa = "\u00e9"\r\n[b]\r\nc = 1\r\n'.encode())
    assert read_toml(path) == {"a": "\u00e9", "b": {"c": 1}}


@pytest.mark.parametrize(
    "content, message",
    [(b"a = ", "is not TOML"), (b"\xff", "is not TOML"), (b"#" * (MAX_BYTES + 1), "is larger than"),
     (b"a = " + b"[" * 20000, "is not TOML"), (b"a = " + b"9" * 5000, "(Exceeds the limit|64 bits)"),
     (b"a = 0x" + b"f" * 20000, "an integer of more than 64 bits"), (b"a = [{b = -9223372036854775809}]", "64 bits"),
     (b"a" + b".a" * 400_000 + b" = 1", "a key of 50 parts"),
     (b'["\\""' + b" . '..' " * 60 + b"]", "a key of 50 parts"),
     (b"a = {b" + b".1-_" * 99 + b" = 1}", "a key of 50 parts"), (None, "cannot read .*: No such file")],
)  # fmt: skip
def test_unreadable_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(ConfigError, match=message) as error:
        read_toml(path)
    assert time.process_time() - start < 5 and str(path) in str(error.value)


@pytest.mark.parametrize("preset", list_presets())
def test_a_run_of_every_preset_is_written(preset: str, tmp_path: Path) -> None:
    """The groups of fields, such as `moe`, are inline tables; what is not given in them is left out."""
    config = get_preset(preset)
    path = tmp_path / "run.toml"
    path.write_text(render_toml({"model": config.to_dict()}, "a run"))
    assert ModelConfig.from_dict(read_toml(path)["model"]) == config
