"""The training runs that come with the package by name, as files recipes/runs/<name>.toml. No torch."""

import functools
from pathlib import Path

from te_models.config.recipe import recipes_folder
from te_models.errors import check_known


@functools.cache
def _files() -> dict[str, Path]:
    """Return name -> file."""
    files = (recipes_folder() / "runs").glob("*.toml")
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def list_runs() -> list[str]:
    """Return the names of the runs that come with the package."""
    return list(_files())


def run_file(name: str) -> Path:
    """Return the file of a run that comes with the package; its name may have _ in place of -.

    Raises:
        UsageError: there is no run of this name; the message has the nearest.
    """
    name = name.replace("_", "-")
    check_known("run", name, _files(), "`te-models list --runs`")
    return _files()[name]
