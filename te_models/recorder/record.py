"""The files of a record: written entry by entry, read as arrays. docs/internals/recorder.md has the format."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from te_models.errors import DataError, SaveError
from te_models.files.atomic import replace_text, reraising
from te_models.files.formats import read_json
from te_models.recorder.layout import INDEX, RECORDED_FIELDS, RecordedTensor

FOLDER = "record"  # in the folder of a run
LAYOUT = "layout.json"
STEPS = "steps.bin"
VERSION = 2
FIRST_VERSION = 1  # it has another hash of codes
# In a file: a count that could not be made, since the values before the cast were not in memory.
UNKNOWN = -1.0
MOST_TENSORS = 2**22  # a layout with more is taken for damaged

Floats = NDArray[np.float64]


def entry_type(tensors: int, fields: int) -> np.dtype[np.void]:
    """Return the NumPy type of an entry of steps.bin: one step with all tensors, little-endian."""
    return np.dtype(
        [("step", "<i8"), ("values", "<f8", (tensors, fields)), ("codes", "<u8", (tensors,))]
    )


class RecordWriter:
    """Appends entries to the record of a run.

    Args:
        run: the folder of the run.
        tensors: the tensors of each entry, in the order of its rows.
        after_step: the step after which the run goes on: entries of later steps are dropped. 0: a new run, without the
            entries of an earlier one.

    Raises:
        SaveError: the files cannot be written.
    """

    def __init__(self, run: Path, tensors: Sequence[RecordedTensor], after_step: int = 0) -> None:
        folder = run / FOLDER
        self.path = folder / STEPS
        self.type = entry_type(len(tensors), len(RECORDED_FIELDS))
        layout = {
            "version": VERSION,
            "fields": list(RECORDED_FIELDS),
            "tensors": [tensor.to_dict() for tensor in tensors],
        }
        with reraising(folder, OSError, error=SaveError):
            folder.mkdir(parents=True, exist_ok=True)
            self._keep_earlier_entries(folder / LAYOUT, json.dumps(layout, indent=1), after_step)
            # Unbuffered: a run that is killed leaves at most its last entry cut short.
            self.file = self.path.open("ab", buffering=0)

    def _keep_earlier_entries(self, layout: Path, text: str, after_step: int) -> None:
        """Keep the entries up to `after_step` if the layout in the folder is `text`, else begin a new record."""
        same_run = after_step > 0 and layout.exists() and layout.read_text() == text
        if not same_run:
            self.path.unlink(missing_ok=True)
            replace_text(layout, text)
            return
        if self.path.exists():
            self.drop_after(after_step)

    def drop_after(self, step: int) -> None:
        """Drop the entries after `step`, and one that was cut short."""
        with reraising(self.path, OSError, error=SaveError):
            entries = _read_entries(self.path, self.type)
            remaining = int((entries["step"] <= step).sum())
            del entries
            os.truncate(self.path, remaining * self.type.itemsize)

    def write(self, step: int, values: Floats, codes: NDArray[np.int64]) -> None:
        """Append the entry of a step: values float64 [tensors, fields], codes int64 [tensors]."""
        entry = np.zeros((), self.type)
        entry["step"] = step
        entry["values"] = values
        entry["codes"] = codes.view(np.uint64)
        with reraising(self.path, OSError, error=SaveError):
            self.file.write(entry.tobytes())

    def close(self) -> None:
        """Close the file."""
        self.file.close()


@dataclass(frozen=True)
class Record:
    """The statistics that a run recorded.

    Attributes:
        tensors: the recorded tensors, in the order of the model.
        steps: the recorded steps, ascending.
        values: the fields as they were recorded, float64 [steps, tensors, RECORDED_FIELDS]; see `field`.
        codes: the hashes of the FP8 data, uint64 [steps, tensors].
        version: the version of its files; only hashes of the same version are comparable.
    """

    tensors: list[RecordedTensor]
    steps: list[int]
    values: Floats
    codes: NDArray[np.uint64]
    version: int = VERSION

    @functools.cached_property
    def counted(self) -> NDArray[np.bool_]:
        """True where a tensor was quantized in a step, [steps, tensors]."""
        return self.values[:, :, INDEX["elements"]] > 0

    def field(self, name: str) -> Floats:
        """Return a field, float64 [steps, tensors]; NaN where nothing was quantized, or the count is unknown."""
        values = self.values[:, :, INDEX[name]]
        # The amax of a tensor may be infinite. Another field that is infinite is unknown.
        is_amax = name in ("amax", "amax_between")
        known = self.counted & (values != UNKNOWN) & (np.isfinite(values) | is_amax)
        return np.where(known, values, np.nan)

    def share(self, name: str) -> Floats:
        """Return the share of the elements that a field counts, [steps, tensors]."""
        return self.field(name) / self.field("elements")

    def sqnr(self) -> Floats:
        """Return the ratio of signal to quantization noise in dB, [steps, tensors]; infinite for an exact cast."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return 10 * np.log10(self.field("signal") / self.field("noise"))

    def block_spread(self) -> Floats:
        """Return the standard deviation of log2(scale) over the blocks, [steps, tensors]; 0 with one scale."""
        with np.errstate(divide="ignore", invalid="ignore"):
            blocks = self.field("blocks")
            mean = self.field("block_log2") / blocks
            # Mean of squares minus square of the mean: the record has sums over blocks, not the blocks themselves.
            variance = self.field("block_log2_squares") / blocks - mean**2
        # Rounding may make the difference of two large numbers negative.
        return np.sqrt(np.maximum(variance, 0.0))

    def at(self, step: int) -> int:
        """Return the index of a step in `steps`, and in the first dimension of `values` and `codes`.

        Raises:
            DataError: it was not recorded.
        """
        if step not in self.steps:
            raise DataError(f"step {step} was not recorded: {_range(self.steps)}")
        return self.steps.index(step)


def _range(steps: Sequence[int]) -> str:
    """Describe which steps a record has."""
    if not steps:
        return "the record has no step yet"
    return f"the record has {len(steps)} steps from {steps[0]} to {steps[-1]}"


def has_record(run: str | os.PathLike[str]) -> bool:
    """Return whether a run has a record."""
    return (Path(run) / FOLDER / LAYOUT).is_file()


def check_folder(run: str | os.PathLike[str]) -> None:
    """Raise a DataError if there is no such folder."""
    if not Path(run).is_dir():
        raise DataError(f"{run}: no such folder; give the folder of a run, its --out")


def check_record(run: str | os.PathLike[str]) -> None:
    """Raise a DataError for the folder of a run that has no record, or that is not there."""
    check_folder(run)
    if not has_record(run):
        raise DataError(f"{run} has no record: give the folder of a run that has --record")


def read_record(run: str | os.PathLike[str]) -> Record:
    """Return the record of the run in a folder, of any version.

    Raises:
        DataError: it has no record, or one that cannot be read.
    """
    folder = Path(run) / FOLDER
    check_record(run)
    layout = read_json(folder / LAYOUT)
    try:
        version, fields, tensors = _parse_layout(layout)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / LAYOUT} is no layout of a record ({error})") from None
    entries = _read_entries(folder / STEPS, entry_type(len(tensors), len(fields)))
    values = np.full((len(entries), len(tensors), len(RECORDED_FIELDS)), UNKNOWN)
    for place, name in enumerate(fields):
        # By name: a record of another version may have other fields, in another order.
        if name in INDEX:
            values[:, :, INDEX[name]] = entries["values"][:, :, place]
    steps = [int(step) for step in entries["step"]]
    return Record(tensors, steps, values, entries["codes"].copy(), version)


def _parse_layout(layout: object) -> tuple[int, list[str], list[RecordedTensor]]:
    """Return the version, the names of the fields and the tensors of layout.json."""
    if not isinstance(layout, dict) or layout["version"] not in (FIRST_VERSION, VERSION):
        raise ValueError(f"its version is neither {FIRST_VERSION} nor {VERSION}")
    fields = [str(name) for name in layout["fields"]]
    tensors = [RecordedTensor.from_dict(entry) for entry in layout["tensors"]]
    if not fields or len(tensors) > MOST_TENSORS:
        raise ValueError("it lists no fields, or too many tensors")
    return int(layout["version"]), fields, tensors


def _read_entries(path: Path, kind: np.dtype[np.void]) -> NDArray[np.void]:
    """Return the complete entries of steps.bin."""
    if not path.exists():
        return np.zeros(0, kind)
    # The last entry may be cut short, or half written by a run that goes on: leave it out.
    count = path.stat().st_size // kind.itemsize
    with path.open("rb") as file:
        return np.fromfile(file, kind, count)
