"""The console that all commands print to, and one table in three places: there, as text from `str`, as HTML."""

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from te_models.errors import for_terminal

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

        In a file no line ends in the spaces that pad a table.
        """
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
