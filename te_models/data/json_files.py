"""Small files, such as a tokenizer's, read with the check of a manifest beside them."""

from pathlib import Path

from te_models.errors import CheckpointError, DataError
from te_models.files.formats import as_object, parse_json
from te_models.saving.folder import read_listed


def read_file(file: Path) -> bytes | None:
    """Return the content of a small file, None if there is no such file.

    Raises:
        DataError: it cannot be read, or differs from the manifest of the folder, if there is one.
    """
    try:
        return read_listed(file.parent, [file.name]).get(file.name)
    except CheckpointError as error:
        raise DataError(str(error)) from None


def read_json_object(file: Path) -> dict[str, object] | None:
    """Return the object in a JSON file, None if there is no such file.

    Raises:
        DataError: as in `read_file`, or it is damaged, nested too deeply, or not an object.
    """
    content = read_file(file)
    if content is None:
        return None
    return as_object(parse_json(content, file, DataError), file, DataError)
