"""The files of a tokenizer."""

from pathlib import Path

from te_models.errors import CheckpointError, DataError
from te_models.files.formats import as_object, parse_json
from te_models.saving.folder import read_listed


def read_file(file: Path) -> bytes | None:
    """Return the content of a small file, None if there is no such file; a manifest beside it must fit."""
    try:
        return read_listed(file.parent, [file.name]).get(file.name)
    except CheckpointError as error:
        raise DataError(str(error)) from None


def read_json_object(file: Path) -> dict[str, object] | None:
    """Return the object in a JSON file, None if there is no such file; a manifest beside it must fit.

    Raises:
        DataError: as `read_file`, or it is damaged, nested too deeply, or not an object.
    """
    content = read_file(file)
    if content is None:
        return None
    return as_object(parse_json(content, file, DataError), file, DataError)
