"""One table in three places: printed by rich, as text from `str`, as HTML in a notebook."""

from __future__ import annotations

import io
from typing import Any, ClassVar

from rich.console import Console, RenderableType


class Printable:
    """Base of results that print as a table; subclasses define `__rich__` and `to_dict`."""

    width: ClassVar[int] = 140  # characters, as text and as HTML

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def to_dict(self) -> Any:
        """Return the result as plain JSON values."""
        raise NotImplementedError

    def __str__(self) -> str:
        out = io.StringIO()
        Console(markup=False, emoji=False, file=out, width=self.width, no_color=True).print(self)
        return out.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return the table for IPython, with inline styles."""
        console = Console(
            markup=False, emoji=False, file=io.StringIO(), width=self.width, record=True, force_jupyter=False
        )
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:normal'>{code}</pre>")
