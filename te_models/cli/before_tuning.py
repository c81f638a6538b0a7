"""Options of `te-models export` and `parity` that compare an export with the model before the tuning."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from te_models.cli.options import option, show_line
from te_models.errors import TeModelsError
from te_models.training.run_settings import read_run_file
from te_models.training.settings import RUN_FILE

if TYPE_CHECKING:
    from te_models.causal_lm import CausalLM

NONE = "none"
rounding_option = option(
    "--rounding",
    default="nearest",
    metavar="[nearest|stochastic]",
    help="Rounding of the weights; stochastic loses no small change on average.",
)
base_option = option(
    "--base",
    metavar="DIR",
    help="The model before it was tuned, to tell how much of the tuning is left; default: the run's or the adapters' "
    "own; none: do not tell.",
)


def base_model(model: CausalLM, folder: str | None, base_option: str | None) -> CausalLM | None:
    """Return the model that `model`, read from `folder`, was tuned from, on the CPU; None if it is not known.

    Args:
        model: the tuned model.
        folder: where it was read from; None for a preset.
        base_option: the value of --base.
    """
    from te_models.causal_lm import CausalLM  # noqa: PLC0415  imports torch

    if base_option == NONE:
        return None
    path = base_option or _known(model, folder)
    if path is None:
        return None
    # The adapters were merged into this folder's weights: it has been read, and its notices are on the screen.
    read_before = base_option is None and model.origin.adapters is not None
    try:
        with warnings.catch_warnings(), _without_notices(read_before):
            warnings.simplefilter("ignore", UserWarning)  # of FP8 state, which BF16 has no use for
            return CausalLM.from_pretrained(path, device="cpu", recipe="bf16", dtype=model.dtype)
    except (TeModelsError, OSError) as error:
        # A base that the user named has to be readable; one that was only recorded may be gone by now.
        if base_option is not None:
            raise
        show_line(
            f"the base model cannot be read ({error}): nothing is said about the tuning", err=True
        )
        return None


@contextlib.contextmanager
def _without_notices(silent: bool) -> Iterator[None]:
    """Inside, if `silent`, log no notices about the folders that are read."""
    readers = logging.getLogger("te_models.interop")
    level = readers.level
    if silent:
        readers.setLevel(logging.ERROR)
    try:
        yield
    finally:
        readers.setLevel(level)


def _known(model: CausalLM, folder: str | None) -> str | Path | None:
    """Return the folder or name of the base of adapters, or of a run that tuned all weights; None if there is none."""
    if folder is None:
        return None
    if model.origin.adapters is not None:
        return model.origin.folder
    file = Path(folder) / RUN_FILE
    return read_run_file(file).get("model") if file.is_file() else None
