"""Handling of records that cannot be read: the first one ends the run, or they are skipped and counted."""

from dataclasses import dataclass, field

from te_models.errors import DataError, DataUnavailable, plural

SHOWN = 3  # of the skipped records, each with a line


@dataclass
class BadRecords:
    """Receives the error of each record that cannot be read.

    Attributes:
        skip: whether such records are skipped; otherwise their error is raised.
        count: the records skipped so far.
        examples: the lines of the first ones.
    """

    skip: bool = False
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def meet(self, error: DataError) -> None:
        """Count the record of an error, or raise the error; data that cannot be reached at all is no bad record."""
        if isinstance(error, DataUnavailable):
            raise error
        if not self.skip:
            raise DataError(f"{error} (or leave such records out: --on-bad-record skip)") from error
        self.count += 1
        if len(self.examples) < SHOWN:
            self.examples.append(str(error))

    def describe(self) -> list[str]:
        """Return a line that says how many are skipped, and one for each of the first."""
        if not self.count:
            return []
        are = "is" if self.count == 1 else "are"
        lines = [f"{plural(self.count, 'bad record')} {are} skipped"]
        return [*lines, *(f"skipped: {example}" for example in self.examples)]

    def refuse_all(self, source: str) -> None:
        """Raise a DataError if records were skipped: for a source of which none is left."""
        if self.count:
            raise DataError(f"{source}: no record is left: {'; '.join(self.describe())}")
