"""from_pretrained is a short walk: the calls between files that it really makes, traced, and how often they climb."""

import functools
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import te_models
from te_models import CausalLM
from tests.test_layering import ORDER

ROOT = Path(te_models.__file__).parent
# The packages that load. A call into any other, which describes or builds a model, counts and is not followed.
FOLLOWED = ("causal_lm", "files", "interop", "saving")
SHAPE: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=1, num_key_value_heads=1,
)  # fmt: skip
PLACE: dict[str, Any] = dict(engine="emulated", device="cpu")


def module(code: CodeType) -> str:
    """The module of te_models with this code; "" for any other."""
    return module_of(code.co_filename)


@functools.cache
def module_of(file: str) -> str:
    path = Path(file)
    return (
        ".".join(path.relative_to(ROOT).with_suffix("").parts) if path.is_relative_to(ROOT) else ""
    )


def callers(frame: FrameType) -> list[CodeType]:
    """The functions of te_models that are being called, the newest first."""
    found, up = [], frame.f_back
    while up is not None:
        found += [up.f_code] if module(up.f_code) else []
        up = up.f_back
    return found


def calls_between_files(folder: Path, recipe: str) -> set[tuple[str, str]]:
    """Return (calling function, called file) of the calls between files of te_models, each once."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = module(frame.f_code) if event == "call" else ""
        above = callers(frame) if name else []
        if not above or module(above[0]) == name:
            return
        leads = all(
            module(code).split(".")[0] in FOLLOWED and code.co_name != "__init__" for code in above
        )
        if leads:
            function = above[0].co_qualname.partition(".<locals>")[0]
            found.add((f"{module(above[0])}.{function}", name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        CausalLM.from_pretrained(folder, recipe=recipe, **PLACE)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname is new in Python 3.11")
@pytest.mark.parametrize("format", ["te", "hf"])
def test_loading_is_at_most_29_calls_between_files_and_4_climbs(
    format: str, tmp_path: Path
) -> None:
    """Of a folder of ours with FP8 state, and of a family of Hugging Face."""
    options: dict[str, Any] = (
        dict(attention_gate="none", recipe="bf16") if format == "hf" else dict(recipe="delayed")
    )
    model = CausalLM.from_preset("gated-nano", **SHAPE, **PLACE, **options)
    if format == "te":
        ids = model.embed_tokens.weight.new_ones((1, 16)).long()
        model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "m", format=format)
    CausalLM.from_pretrained(
        tmp_path / "m", recipe=options["recipe"], **PLACE
    )  # imports are no part of the walk
    calls = calls_between_files(tmp_path / "m", options["recipe"])
    climbs = [
        call
        for call in calls
        if ORDER.index(call[1].split(".")[0]) > ORDER.index(call[0].split(".")[0])
    ]
    listing = "\n".join(f"{one} -> {other}" for one, other in sorted(calls))
    assert 10 < len(calls) <= 29, f"{len(calls)}\n{listing}"
    assert 0 < len(climbs) <= 4, climbs
