"""The choice of an engine, and its reasons."""

from types import SimpleNamespace

import pytest
import torch

import te_models.engine as engine


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "not installed"),
        ("2.9.0", "2.9.0 is older than 2.20"),
        ("1.13.0", "older"),
        ("2.20.2", ""),
        ("3.0", ""),
    ],
)
def test_an_old_transformer_engine_is_named_and_not_imported(
    found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    asked: list[str] = []

    def imported(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(__version__=found)

    monkeypatch.setattr(engine, "engine_module", imported)
    _, name, why = engine.get_engine("auto")
    assert (name, asked) == (("emulated", ["emulated"]) if reason else ("native", ["native"]))
    assert (reason or "a GPU") in why
    if reason:
        with pytest.raises(ValueError, match=f"native. is not possible here: .*{reason}"):
            engine.get_engine("native")
    else:
        assert engine.get_engine("native")[1] == "native"


def test_no_engine_is_the_default() -> None:
    assert engine.get_engine(None, "cpu")[1:] == engine.get_engine("auto", "cpu")[1:]
