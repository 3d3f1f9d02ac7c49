from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

# Width below which a column that folds its words, such as the names of recipes, is hard to read.
_FOLDED = 16
# Share of the longest word of a head by which it is recognized.
_HEAD_SHARE = 0.75
_UNLIMITED = 10_000


class Table(RichTable):
    """Table that has one field a line where the console is narrower than its words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        padding = sum(self.padding[1::2]) or 1
        width = sum(_min_width(column, console, options) + padding for column in self.columns) - padding
        if width <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._fields()

    def _fields(self) -> Iterator[RenderableType]:
        if self.title:
            yield self.title
        for row in zip(*(column.cells for column in self.columns), strict=True):
            indent = ""
            for column, cell in zip(self.columns, row, strict=True):
                if not isinstance(cell, str | Text):
                    yield cell
                elif text := str(cell):
                    head = f"{column.header}: " if self.show_header and str(column.header) else ""
                    yield Text(f"{indent}{head}{text}")
                indent = "  "


def _min_width(column: Column, console: Console, options: ConsoleOptions) -> int:
    """Return the width that shows whole words of a column's cells, and whose head is still recognizable."""
    wide = options.update(width=_UNLIMITED)
    head, *cells = (Measurement.get(console, wide, item) for item in (column.header, *column.cells))
    width = max([cell.maximum if column.no_wrap else cell.minimum for cell in cells], default=0)
    if column.overflow == "fold":
        width = min(width, _FOLDED)
    return max(width, round(_HEAD_SHARE * head.minimum))
