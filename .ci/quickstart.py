"""Import te_models and run the first Python program of README.md, on any system."""

import os
import re
import tempfile
from pathlib import Path

import te_models

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the program in an empty folder, since it saves a model."""
    match = BLOCK.search(README.read_text(encoding="utf-8"))
    if match is None:
        raise SystemExit("README.md has no Python program")
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec(compile(match[1], README.name, "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(before)  # Windows deletes no folder that a process is in
    print(f"te-models {te_models.__version__} ran the program of README.md")  # noqa: T201


if __name__ == "__main__":
    main()
