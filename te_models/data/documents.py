"""Documents: a corpus as a list in memory, and its split into those to train on and those to evaluate on."""

import hashlib
import math
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from te_models.config.shares import share_of
from te_models.data.bad_records import BadRecords
from te_models.data.files import check_text, find_files, walk, without_outputs
from te_models.data.formats import Document
from te_models.data.marks import ignored_fields
from te_models.data.rows import file_ranges, read_range
from te_models.errors import DataError, plural

_NOT_CORPUS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "pydoc_data",
}


def load_documents(
    path: str | Path | None,
    columns: Mapping[str, str] | None = None,
    bad: BadRecords | None = None,
    remarks: list[str] | None = None,
) -> list[Document]:
    """Load all documents at `path`, sorted by file name.

    * A .jsonl (.ndjson, .json) file has one object per line or is an array of objects, a .parquet, .csv or .tsv file
      has one record per row: te_models.data.formats lists their formats.
    * Any other file is one document of UTF-8 text, unless its first line is a JSON object: then it is read as JSONL.
    * A folder is read recursively; hidden files, __pycache__, links to folders, folders of runs and models, and binary
      files (a NUL byte in the first 8000, as git defines it) are skipped.
    * "owner/name" or "owner/name#split", where there is no such folder, is a dataset of the Hugging Face Hub.
    * None gives the running Python's language documentation and the sources of its standard library.

    Documents that contain only white space are left out.

    Args:
        path: file, folder, glob, URL or name.
        columns: your column names -> the formats' (te_models.config.data.parse_columns).
        bad: may skip records that cannot be read; None raises their error.
        remarks: gets a line that names the folders of runs and models that are skipped, if there are some.

    Raises:
        DataError: a file cannot be read or is of another format, or there is no text.
    """
    if path is None:
        return _python_corpus()
    system, files, left_out = find_files(str(path))
    documents = []
    for file in files:
        # Ranges of any size: each file is one.
        for part, _ in file_ranges(system, file, sys.maxsize):
            for document in read_range(part, str(path), columns or {}, bad):
                if has_text(document):
                    documents.append(document)
    if not documents and bad is not None:
        bad.refuse_all(str(path))
    check_text(str(path), documents, left_out)
    if left_out and remarks is not None:
        remarks.append(f"{path}: read {without_outputs(left_out)}")
    return documents


def split_documents(
    documents: Sequence[Document], eval_fraction: float = 0.05, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to train on and those to evaluate on, both in the order given and never empty.

    Evaluation gets the `eval_fraction` of distinct documents whose hashes of (seed, content) are lowest. A seeded
    shuffle would depend on the order of the documents and could put copies of one on both sides. A single text is cut
    at a line break, and its end is for evaluation.

    Raises:
        DataError: one side would be empty.
    """
    # A record is never cut.
    if len(documents) == 1 and not documents[0].is_record:
        return _cut(documents[0], eval_fraction)
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document, aside in zip(
        documents, in_evaluation(documents, eval_fraction, seed).tolist(), strict=True
    ):
        sides[aside].append(document)
    return sides


def in_evaluation(
    documents: Sequence[Document], eval_fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Return which documents `split_documents` evaluates on, bool [D]; it cuts a single text itself."""
    hashes = [hash_document(seed, document) for document in documents]
    # Equal documents have one hash, and so are on the same side.
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        records = any(document.is_record for document in documents)
        noun = "record" if records else "document"
        if len(documents) > 1:
            noun = f"equal {noun}"
        names = plural(len(documents), noun)
        raise DataError(
            f"{names} cannot be split into training and evaluation: give at least two different ones, or --eval-data"
        )
    # At least one document on each side.
    count = min(max(1, round(share_of(eval_fraction, len(distinct)))), len(distinct) - 1)
    evaluated = set(distinct[:count])
    return np.array([key in evaluated for key in hashes])


def refuse_mixture(
    documents: Iterable[Document], records: bool | None, bad: BadRecords | None = None
) -> list[Document]:
    """Return the documents, all of which must be records with an answer, or all texts; None: they may be of both kinds.

    A record would be cut among texts, and a text among records trained on as raw text.

    Raises:
        DataError: a document is of the other kind, unless `bad` skips it.
    """
    bad = bad or BadRecords()
    of_kind = []
    for document in documents:
        if records is None or document.is_record == records:
            of_kind.append(document)
        else:
            checked, first = (
                ("a text", "has an answer") if records else ("a record with an answer", "is text")
            )
            error = DataError(
                f"{document.name}: {checked}, where the first record of the data {first}: give records and texts as "
                "--data of their own"
            )
            bad.meet(error)
    return of_kind


def has_text(document: Document) -> bool:
    """Return whether there is more than white space; a record without an answer is left out, and counted, later."""
    return document.is_record or bool(document.text.strip())


def ignored_lines(documents: Iterable[Document]) -> list[str]:
    """Return a line per file that names the fields of its records that nothing reads."""
    return ignored_fields((document.file, document.ignored) for document in documents)


def unused_lines(
    documents: Iterable[Document], truncate: str, chat_template: str | None, saved: bool = False
) -> list[str]:
    """Return a line for each of two fields of DataConfig that changes nothing in these documents.

    Args:
        documents: all, or the first of each source.
        truncate: at its default it asks for nothing.
        chat_template: as in DataConfig.
        saved: whether the template is saved with a model, where it has an effect later.
    """
    records = False
    conversations = False
    for document in documents:
        records = records or document.is_record
        conversations = conversations or document.conversation is not None
    lines = []
    if truncate != "drop" and not records:
        lines.append(
            f"--truncate {truncate} has no effect: the data is text, and only records are cut"
        )
    if chat_template is not None and not conversations:
        later = ": the template is only saved with the model" if saved else ""
        lines.append(
            f"--chat-template has no effect on this data, which has no conversations{later}"
        )
    return lines


def hash_document(seed: int, document: Document) -> bytes:
    """Return 16 evenly distributed bytes that depend only on seed, prompt and text, or conversation."""
    digest = hashlib.blake2b(
        f"{seed} {len(document.prompt or '')} {document.prompt}".encode(), digest_size=16
    )
    digest.update((document.conversation or document.text).encode())
    return digest.digest()


def _cut(document: Document, eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """Cut the only document, a text, at the last line break before the evaluation's share begins."""
    evaluated = math.ceil(share_of(eval_fraction, len(document.text)))
    at = document.text.rfind("\n", 0, len(document.text) - evaluated) + 1
    if at == 0:
        raise DataError(
            "the only document cannot be cut into training and evaluation: give more documents, or one with more "
            "lines, or --eval-data"
        )
    first = Document(document.text[:at], name=document.name, source=document.source)
    last = Document(document.text[at:], name=document.name, source=document.source)
    return [first], [last]


def _python_corpus() -> list[Document]:
    """Return the topics of Python's language documentation, then its standard library, both sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    version = sysconfig.get_python_version()
    documents = [
        Document(text, name=f"topics/{name}", source=f"Python {version} documentation")
        for name, text in sorted(topics.items())
    ]
    for file in sorted(walk(str(root), _NOT_CORPUS)):
        if file.endswith(".py"):
            name = Path(file).relative_to(root).as_posix()
            text = Path(file).read_text(encoding="utf-8-sig")
            documents.append(Document(text, name=name, source=f"Python {version} standard library"))
    return [document for document in documents if has_text(document)]
