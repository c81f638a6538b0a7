"""Models of transformers, made once for all tests of Hugging Face's format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """`theirs(case)` returns transformers' model of a case of hf_models.py, and its folder."""
    from hf_models import make_theirs  # noqa: PLC0415  imports transformers, which few files here need

    made: dict[str, tuple[Any, Path]] = {}

    def make(case: str) -> tuple[Any, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("hf") / case
            made[case] = make_theirs(case, folder), folder
        return made[case]

    return make
