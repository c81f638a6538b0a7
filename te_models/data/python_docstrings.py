"""Pairs of function and docstring from the running Python's own standard library: data to fine-tune on, on any machine.

The prompt is the source of a function without its docstring, the completion is the docstring. No torch.
"""

import ast
import hashlib
import inspect
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from te_models.config.data import parse_columns
from te_models.data.bad_records import BadRecords
from te_models.data.documents import load_documents
from te_models.data.files import walk
from te_models.data.formats import Document
from te_models.data.sources import open_sources
from te_models.errors import DataError

PYTHON_DOCSTRINGS = "python-docstrings"  # its name in --data
PYTHON_DOCS = "python-docs"  # Python's documentation and sources, the default data of `pretrain`
DOCSTRING_CHARACTERS = range(20, 401)
MAX_SOURCE_CHARACTERS = 1500
EVAL_FRACTION = 0.08
# The largest share of all pairs that a held-out module may have: none makes up most of the evaluation.
MAX_EVAL_SHARE = 0.01

_NOT_READ = {  # tests, generated tables, programs, and code of other projects
    "__phello__",
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "msilib",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_documents(
    data: str,
    columns: str = "",
    bad: BadRecords | None = None,
    remarks: list[str] | None = None,
) -> list[Document]:
    """Return the documents at a path, or of one of the two names above, to evaluate on.

    Args:
        data: a path; PYTHON_DOCS, Python's own documentation and sources; or PYTHON_DOCSTRINGS, of which only the
            modules that training does not see are returned.
        columns: as in DataConfig.
        bad: may skip records that cannot be read.
        remarks: as in load_documents.

    Raises:
        DataError: as load_documents.
        UsageError: no record has one of the columns.
    """
    names = parse_columns(columns)
    if names:
        paths = [] if data in (PYTHON_DOCS, PYTHON_DOCSTRINGS) else [data]
        # It refuses columns that no record has.
        open_sources(paths, names, skip_bad=bad is not None and bad.skip)
    if data == PYTHON_DOCSTRINGS:
        return python_docstrings()[1]
    path = None if data == PYTHON_DOCS else data
    return load_documents(path, names, bad, remarks)


def python_docstrings() -> tuple[list[Document], list[Document]]:
    """Return (training, evaluation) pairs of the standard library, in the order of its files; the same at every call.

    Each Document has the dedented source of a function or method without its docstring as `prompt`, and the docstring
    as `text`, indented as `inspect.getdoc` does; both without white space at their ends. `name` is the function's, such
    as "json.decoder.JSONDecoder.decode". Only functions that do more than have a docstring count, with a docstring of
    20 to 400 characters and a source of less than 1500. Of equal docstrings only the first remains, so none occurs on
    both sides. Evaluation gets whole top-level modules and packages, those whose names have the lowest hashes, until
    they hold 8 % of the pairs; modules with more than 1 % of them are for training.
    """
    root = Path(sysconfig.get_path("stdlib"))
    source = f"Python {sysconfig.get_python_version()} standard library"
    documents: dict[str, Document] = {}
    for file in _source_files(root):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        source_text = file.read_text(encoding="utf-8-sig", errors="replace")
        for name, prompt, docstring in read_pairs(source_text):
            # By docstring, so that the first function of several with the same one remains.
            documents.setdefault(docstring, Document(docstring, prompt, f"{module}.{name}", source))
    if not documents:
        raise DataError(
            f"--data {PYTHON_DOCSTRINGS}: {root} has no Python sources: install Python's standard library"
        )
    return _split_by_module(list(documents.values()))


def read_pairs(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield (qualified name, source without docstring, docstring) of the functions of a module that qualify."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # Some files of the library are templates, or wrong on purpose for a test.
        return
    lines = source.splitlines()
    for name, function in _functions(tree, ""):
        docstring = inspect.cleandoc(ast.get_docstring(function, clean=False) or "").strip()
        if len(docstring) not in DOCSTRING_CHARACTERS:
            continue
        prompt = _without_docstring(function, lines)
        if prompt:
            yield name, prompt, docstring


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    """Yield the functions at module level and in classes, also below `if` and `try`, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _functions(child, prefix)


def _without_docstring(function: _Function, lines: Sequence[str]) -> str:
    """Return the dedented source of a function without its docstring, or "" if it does not qualify."""
    docstring, *body = function.body
    if (
        not body
        or docstring.lineno <= function.lineno
        or body[0].lineno <= (docstring.end_lineno or 0)
    ):
        return ""  # nothing but a docstring, or other code on its lines
    # A function's own line is the one with `def`; its source begins with the decorators above.
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)]) - 1
    remaining = [
        *lines[first : docstring.lineno - 1],
        *lines[docstring.end_lineno : function.end_lineno],
    ]
    prompt = textwrap.dedent("\n".join(remaining)).strip()
    return prompt if len(prompt) < MAX_SOURCE_CHARACTERS else ""


def _split_by_module(pairs: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split into training and evaluation by top-level module; a hash of the name decides, so that releases agree."""
    sizes: dict[str, int] = {}
    for pair in pairs:
        top = _top_level(pair)
        sizes[top] = sizes.get(top, 0) + 1
    remaining = EVAL_FRACTION * len(pairs)
    held_out = set()
    for top in sorted(sizes, key=lambda name: hashlib.blake2b(name.encode()).digest()):
        # Whole modules: functions of one are alike, and would be known from training.
        if remaining > 0 and sizes[top] <= MAX_EVAL_SHARE * len(pairs):
            held_out.add(top)
            remaining -= sizes[top]
    training = []
    evaluation = []
    for pair in pairs:
        if _top_level(pair) in held_out:
            evaluation.append(pair)
        else:
            training.append(pair)
    return training, evaluation


def _top_level(pair: Document) -> str:
    """Return "json" for "json.decoder.JSONDecoder.decode"; a module and its Python twin ("_pyio") count as one."""
    return pair.name.split(".")[0].removeprefix("_py").removeprefix("_")


def _source_files(root: Path) -> list[Path]:
    """Return the modules of the standard library that are read, sorted."""
    modules = []
    for path in walk(str(root), _NOT_READ):
        file = Path(path)
        name = file.relative_to(root).as_posix()
        # The two folders differ by platform, and the data is to be the same on all of them.
        if name.endswith(".py") and not name.startswith(("config-", "ctypes/macholib/")):
            modules.append(file)
    return sorted(modules)
