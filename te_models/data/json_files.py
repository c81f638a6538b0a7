"""The JSON files of a tokenizer, read with bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from te_models.errors import DataError
from te_models.files.atomic import first_line
from te_models.files.bounded import read_bounded

MAX_BYTES = {"tokenizer.json": 48 * 2**20}  # published ones have up to 33 MiB
OTHER_BYTES = 4 * 2**20


def read_json_object(file: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if there is no such file.

    Raises:
        DataError: it is no regular file, too large, damaged, nested too deeply, or not an object.
    """
    content = read_bounded(file, MAX_BYTES.get(file.name, OTHER_BYTES))
    if content is None:
        return None
    try:
        document = json.loads(content)
    except RecursionError:
        raise DataError(f"{file}: JSON that is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({first_line(error)})") from None
    if not isinstance(document, dict):
        raise DataError(f"{file}: a JSON {type(document).__name__}, not an object")
    return document
