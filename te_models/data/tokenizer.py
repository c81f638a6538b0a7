"""Tokenizers from files: a tokenizer.json, files that transformers can convert to one, or bytes, which need none.

`load_tokenizer` reads what a user names, `as_tokenizer` also takes a tokenizer of transformers. Each kind has a file
beside this one: te_models.data.byte_tokenizer and te_models.data.tokenizer_json, over te_models.data.tokenizer_base.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.chat_template import template_source
from te_models.data.json_files import read_json_object
from te_models.data.tokenizer_base import Tokenizer
from te_models.data.tokenizer_conversion import convert_tokenizer
from te_models.data.tokenizer_json import HuggingFaceTokenizer
from te_models.errors import DataError, UsageError
from te_models.interop.hf import hugging_face_documents
from te_models.interop.hub import local_folder
from te_models.saving.checkpoint_choice import describe_missing_checkpoint
from te_models.saving.pretrained import saved_folder
from te_models.saving.run_folder import offering_older


class SavesItself(Protocol):
    """The part of transformers' tokenizers that is used here."""

    def save_pretrained(self, save_directory: str) -> Any: ...


TokenizerLike: TypeAlias = "Tokenizer | SavesItself | str | os.PathLike[str]"


def load_tokenizer(source: str | Path | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: a tokenizer.json, a folder with one, or with files that transformers can convert to one, a saved model,
            the folder of a run (its newest checkpoint), or the name of a model on the Hugging Face hub. None, and a
            model of te-models saved without a tokenizer, give the ByteTokenizer.

    Raises:
        ValueError: there is no such file, it is not a tokenizer, or the packages that read it are missing.
    """
    if source is None:
        return ByteTokenizer()
    file = Path(source)
    if file.is_file() or file.suffix == ".json":
        return _tokenizer_of(file)
    folder = saved_folder(local_folder(source))
    with offering_older(folder):
        return _tokenizer_in(folder)


def as_tokenizer(tokenizer: object) -> Tokenizer:
    """Return a Tokenizer: one as it is, a copy of a tokenizer of transformers, or what `load_tokenizer` loads.

    Raises:
        UsageError: it is something else, or a tokenizer of transformers without a tokenizer.json.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | os.PathLike):
        return load_tokenizer(os.fspath(tokenizer))
    save = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        raise UsageError(
            f"the tokenizer is a {type(tokenizer).__name__}: give what load_tokenizer returns, a folder, or a "
            "tokenizer of transformers"
        )
    # Through its files, which all tokenizers of transformers write, and te-models reads.
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return load_tokenizer(folder)


def _tokenizer_in(folder: Path) -> Tokenizer:
    """Load the tokenizer in a folder."""
    file = folder / "tokenizer.json"
    if os.path.lexists(file):
        return _tokenizer_of(file)
    if (converted := convert_tokenizer(folder)) is not None:
        return HuggingFaceTokenizer(converted[0], file, converted[1])
    # Adapters have no tokenizer of their own: their base has it, and at most a chat template is beside them.
    base = (read_json_object(folder / "adapter_config.json") or {}).get("base_model_name_or_path")
    if isinstance(base, str):
        tokenizer = load_tokenizer(base)
        if (template := template_source(folder)) is not None:
            tokenizer.set_chat_template(template)
        return tokenizer
    has_model = (folder / "config.json").is_file()
    if has_model and hugging_face_documents(folder) is None:
        return ByteTokenizer()
    if has_model:
        raise DataError(f"{folder} has no tokenizer.json: give --tokenizer the path of one")
    problem = describe_missing_checkpoint(folder)
    raise DataError(f"{folder} {problem or 'holds no model and no tokenizer'}")


def _tokenizer_of(file: Path) -> Tokenizer:
    """Load the tokenizer of a tokenizer.json and the files beside it."""
    advice = "give a Hugging Face tokenizer.json or a folder that holds one"
    try:
        document = read_json_object(file)
    except DataError as error:
        if file.suffix == ".json":
            raise
        # Other files of a tokenizer, such as tokenizer.model, are read from their folder.
        raise DataError(f"{error}; {advice}") from None
    if document is None:
        raise DataError(f"{file}: no such file; {advice}")
    # The byte tokenizer, saved as a tokenizer.json: our own code is faster than the library, and gives the same ids.
    if document == ByteTokenizer().documents()["tokenizer"]:
        return ByteTokenizer(file.parent)
    return HuggingFaceTokenizer(document, file)
