"""The console that all commands print to, and one table in three places: there, as text from `str`, as HTML."""

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from te_models.errors import for_terminal

FOLDED = 12  # characters of a word in a column that may break words
ELLIPSIS = "…"  # where rich cuts a word
BLANKS_AT_END = re.compile(" +(?=\n)")


class Terminal(Console):
    """A console for text of any origin: names of folders, data, and what a model generates.

    Markup and emoji codes are off, since names and paths may contain them, and no character is printed that a terminal
    would obey.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of `renderable`; those that control the terminal are rich's own.

        In a file no line ends in the spaces that pad a table. A table that is wider than the terminal, and would be
        cut, becomes a list.
        """
        if isinstance(renderable, Table) and self._is_too_narrow(renderable, options):
            renderable = _as_list(renderable)
        blanks: list[Segment] = []  # seen since the last text, which may be at the end of a line
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            safe = Segment(for_terminal(segment.text), segment.style)
            if self.is_terminal:
                yield safe
            elif not safe.text.strip(" "):
                blanks.append(safe)
            else:
                if not safe.text.startswith("\n"):
                    yield from blanks
                blanks = []
                text = safe.text.rstrip(" ")
                yield Segment(BLANKS_AT_END.sub("", text), safe.style)
                if text != safe.text:
                    blanks.append(Segment(safe.text[len(text) :], safe.style))
        yield from blanks

    def _is_too_narrow(self, table: Table, options: ConsoleOptions | None) -> bool:
        """Return whether a table does not fit into a line: words would be broken into pieces, or cut."""
        options = options or self.options
        if _least_width(table) > options.max_width:
            return True
        # Columns that fit by their longest words may still get less: rich takes from the widest ones in proportion.
        shown = "".join(segment.text for segment in super().render(table, options))
        texts = [str(table.title)]
        for column in table.columns:
            texts += [str(column.header), *_cells(column)]
        return shown.count(ELLIPSIS) > sum(text.count(ELLIPSIS) for text in texts)


def _cells(column: Column) -> list[str]:
    """Return the cells of a column as plain text."""
    return [str(cell) for cell in column.cells]


def _least_width(table: Table) -> int:
    """Return the characters in a line below which a table of text without a box loses some."""
    widths = []
    for column in table.columns:
        texts = [str(column.header), *_cells(column)]
        if column.no_wrap:
            pieces = texts
        else:
            pieces = [word for text in texts for word in text.split()]
        width = max(map(cell_len, pieces), default=0)
        if column.overflow == "fold":
            # Such a column breaks a long word, such as the name of a linear, and loses nothing.
            width = min(width, FOLDED)
        widths.append(width)
    _, right, _, left = table.padding
    between = max(left, right) if table.collapse_padding else left + right
    edges = left + right if table.pad_edge else 0
    return sum(widths) + between * (len(widths) - 1) + edges


def _as_list(table: Table) -> Group:
    """Return a table as one entry per row, "first cell: heading cell, heading cell", without empty cells."""
    entries: list[Text] = []
    if table.title:
        entries.append(Text(str(table.title), "bold"))
    first, *others = table.columns
    for number, name in enumerate(_cells(first)):
        figures = []
        for column in others:
            cell = _cells(column)[number]
            if cell:
                figures.append(f"{column.header} {cell}".strip())
        entry = f"{name}: {', '.join(figures)}" if figures else name
        entries.append(Text(entry, overflow="fold"))
    return Group(*entries)


class Printable(ABC):
    """Base of results that print as a table."""

    width: ClassVar[int] = 140  # characters, as text and as HTML

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return the table."""

    @abstractmethod
    def to_dict(self) -> object:
        """Return the result as plain JSON values."""

    def __str__(self) -> str:
        out = io.StringIO()
        Terminal(file=out, width=self.width, no_color=True).print(self)
        return out.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return the table for IPython, with inline styles."""
        console = Terminal(file=io.StringIO(), width=self.width, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(
            inline_styles=True, code_format="<pre style='line-height:normal'>{code}</pre>"
        )
