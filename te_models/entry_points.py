"""Packages that add to te-models: each names a function under the entry point `te_models.extensions`. No torch.

`import te_models` calls these functions, which call te_models.register_mixer and the others. Without such a package the
search takes milliseconds, and imports nothing.
"""

from importlib.metadata import EntryPoint, entry_points

from te_models.errors import UsageError

GROUP = "te_models.extensions"


def load_entry_points() -> None:
    """Call the function of every installed package that adds to te-models.

    Raises:
        UsageError: one of them failed; the message names the package.
    """
    for point in entry_points(group=GROUP):
        _load(point)


def _load(point: EntryPoint) -> None:
    package = point.dist.name if point.dist is not None else point.value
    try:
        register = point.load()
        register()
    except Exception as error:
        raise UsageError(
            f"{package} adds {point.name!r} to te-models, and that failed: {type(error).__name__}: {error}; update or "
            "uninstall it"
        ) from error
