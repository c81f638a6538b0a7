"""Pairs of function and docstring: which functions qualify, what remains of them, and how they are split."""

import ast
import sysconfig
from pathlib import Path

import pytest

from te_models.config.training import TrainConfig
from te_models.data import python_docstrings as module
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.python_docstrings import python_docstrings, read_pairs
from te_models.data.training_data import open_data
from te_models.errors import DataError

TEXT = "Return one more than x, an int."


@pytest.fixture(scope="module")
def pairs() -> tuple:
    """The pairs of the standard library."""
    return python_docstrings()


def found(source: str) -> list[tuple[str, str, str]]:
    return list(read_pairs(source))


@pytest.mark.parametrize(
    ("source", "name", "prompt", "docstring"),
    [
        (
            f'def f(x):\n    """{TEXT}"""\n    return x + 1\n',
            "f",
            "def f(x):\n    return x + 1",
            TEXT,
        ),
        (
            "class A:\n    @cache  # twice\n    async def f(\n        self,\n    ):\n"
            f"        '''{TEXT}\n\n        a\n          b\n        '''\n\n"
            "        # Why\n        return 1  # end\n\n    y = 2\n",
            "A.f",
            "@cache  # twice\nasync def f(\n    self,\n):\n\n    # Why\n    return 1  # end",
            f"{TEXT}\n\na\n  b",
        ),
        (
            f'if X:\n    def f():\n        r"""{TEXT}"""\n        pass',
            "f",
            "def f():\n    pass",
            TEXT,
        ),
        (
            f'try:\n    a\nexcept E:\n    def f():\n        "{TEXT}"\n        pass',
            "f",
            "def f():\n    pass",
            TEXT,
        ),
    ],
    ids=["function", "method", "below if", "below except"],
)
def test_a_function_and_its_docstring(source: str, name: str, prompt: str, docstring: str) -> None:
    assert found(source) == [(name, prompt, docstring)]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return 1\n",
        f'def f():\n    """{TEXT}"""\n',
        f'def f(): "{TEXT}"; return 1\n',
        f'def f():\n    "{TEXT}"; return 1\n',
        'def f():\n    """Nineteen characters"""\n    return 1\n',
        f'def f():\n    """{"x" * 401}"""\n    return 1\n',
        f'def f():\n    """{TEXT}"""\n    return {"1 + " * 400} 1\n',
        f'def outer():\n    def f():\n        """{TEXT}"""\n        return 1\n',
        "def f(:\n",
        "\0",
    ],
    ids=[
        "none",
        "nothing else",
        "one line",
        "shared line",
        "short",
        "long",
        "long source",
        "nested",
        "syntax",
        "NUL",
    ],
)
def test_functions_that_do_not_qualify(source: str) -> None:
    assert found(source) == []


@pytest.mark.slow
def test_every_pair_of_the_standard_library(pairs: tuple) -> None:
    training, evaluation = pairs
    assert (
        len(training) > 1000 and 0.08 <= len(evaluation) / (len(training) + len(evaluation)) < 0.1
    )
    for pair in training + evaluation:
        assert pair.prompt == pair.prompt.strip() and pair.text == pair.text.strip()
        assert 20 <= len(pair.text) <= 400 and len(pair.prompt) < 1500
        if pair.prompt.isascii() and "\\" not in pair.text:
            function = ast.parse(pair.prompt).body[0]
            assert ast.get_docstring(function) != pair.text and pair.name.endswith(
                f".{function.name}"
            )


def test_modules_are_on_one_side(pairs: tuple) -> None:
    tops = [{pair.name.split(".")[0] for pair in side} for side in pairs]
    assert not tops[0] & tops[1] and len(tops[1]) >= 10
    assert not {pair.text for pair in pairs[0]} & {pair.text for pair in pairs[1]}
    assert not {"test", "idlelib", "lib2to3", "encodings"} & (tops[0] | tops[1])
    assert {"asyncio", "email"} <= tops[0]  # packages, and modules of more than 1 %
    assert python_docstrings() == pairs


def test_open_data_takes_the_name(pairs: tuple) -> None:
    config = TrainConfig(batch_size=2, seq_len=2048)
    dataset, batches = open_data("python-docstrings", ByteTokenizer(), config)
    assert dataset.num_documents == len(pairs[0]) and len(batches) == config.eval_batches
    first = ByteTokenizer().decode(batches[0]["input_ids"][0].tolist())
    assert any(first.startswith(pair.prompt + pair.text) for pair in pairs[1])
    assert (batches[0]["labels"] == -100).any()


def test_a_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert sysconfig.get_path("stdlib") == str(tmp_path)
    with pytest.raises(DataError, match="has no Python sources: install"):
        python_docstrings()
