"""Tables that are never cut: ids, dates and numbers can be read and copied whole.

On a terminal a table fits its width: texts fold at blanks; a table that is still too wide is shown in parts, each with the
key columns, and in the narrowest terminals a row is one field a line. Anywhere else, as in a pipe or a file, it is plain: a
line for each row, columns two spaces apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from rich import box
from rich.cells import cell_len as width_of
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

GAP: Final = 2
_ENDLESS: Final = 100_000  # columns where there is no terminal: no text is cut or folded


def console(**options: Any) -> Console:
    """Standard output: whole lines unless it is a terminal."""
    made = Console(**options)
    if not made.is_terminal:
        made.width = _ENDLESS
    return made


@dataclass(frozen=True)
class Column:
    heading: str
    right: bool = True
    folds: bool = False


def words(heading: str) -> Column:
    """Makes a column of texts, which may fold at blanks if a line is too long."""
    return Column(heading, right=False, folds=True)


class Table:
    """The first `keys` columns say which row it is. A column given by its heading alone holds figures, unless it is a key."""

    def __init__(self, title: str, *columns: str | Column, keys: int = 1) -> None:
        self.title, self.keys = title, keys
        self.columns = [
            column if isinstance(column, Column) else Column(column, right=index >= keys)
            for index, column in enumerate(columns)
        ]
        self.rows: list[tuple[tuple[str, ...], str]] = []

    def row(self, *texts: str, style: str = "") -> None:
        """`style`: as rich has it, for terminals."""
        assert len(texts) == len(self.columns)
        self.rows.append((texts, style))

    def show(self, console: Console) -> None:
        if not console.is_terminal:
            self._plain(console)
            return
        if self.title:
            console.print(Text(self.title, style="bold italic"))
        parts = self._parts(console.width)
        if parts is None:
            self._stacked(console)
        for number, part in enumerate(parts or ()):
            if number:
                console.print()
            console.print(self._rendered(part, console.width))

    # --- on a terminal --------------------------------------------------------------------------------------------------

    def _parts(self, width: int) -> list[list[int]] | None:
        """Returns groups of column numbers: the key columns, and as many others as fit. None: not even one other column
        fits."""
        least = [self._least(index) for index in range(len(self.columns))]
        keys = list(range(self.keys))
        if _total(least) <= width:
            return [list(range(len(self.columns)))]
        parts: list[list[int]] = []
        for index in range(self.keys, len(self.columns)):
            if parts and _total([least[i] for i in (*parts[-1], index)]) <= width:
                parts[-1].append(index)
            elif _total([least[i] for i in (*keys, index)]) <= width:
                parts.append([*keys, index])
            else:
                return None
        return parts

    def _rendered(self, part: Sequence[int], width: int) -> RichTable:
        headings = any(column.heading for column in self.columns)
        made = RichTable(
            box=box.SIMPLE_HEAD if headings else None, show_header=headings, show_edge=False, pad_edge=False,
            padding=(0, GAP - 1 if headings else GAP, 0, 0), header_style="bold",
        )  # fmt: skip
        for index, wide in zip(part, self._widths(part, width), strict=True):
            column = self.columns[index]
            made.add_column(Text(column.heading), justify="right" if column.right else "left", width=wide)
        for texts, style in self.rows:
            made.add_row(*(Text(texts[index]) for index in part), style=style)
        return made

    def _widths(self, part: Sequence[int], width: int) -> list[int]:
        """Returns the width of each column. Columns that fold share the rest of the width, the narrowest first."""
        widths, whole = [self._least(index) for index in part], [self._whole(index) for index in part]
        for _ in range(width - _total(widths)):
            folded = [place for place, (now, most) in enumerate(zip(widths, whole, strict=True)) if now < most]
            if not folded:
                break
            widths[min(folded, key=lambda place: widths[place])] += 1
        return widths

    def _whole(self, index: int) -> int:
        every = (self.columns[index].heading, *(texts[index] for texts, _ in self.rows))
        return max(map(width_of, every))

    def _least(self, index: int) -> int:
        """Returns the least width of a column: headings and prose fold at blanks, other texts never do."""
        column, parts = self.columns[index], [texts[index] for texts, _ in self.rows]
        if column.folds:
            parts = list(chain.from_iterable(part.split() for part in parts))
        return max(map(width_of, (*column.heading.split(), *parts)), default=0)

    def _stacked(self, console: Console) -> None:
        """Prints each field of a row on a line of its own, which the terminal itself may break."""
        named = max(width_of(column.heading) for column in self.columns)
        for number, (texts, style) in enumerate(self.rows):
            if number:
                console.print()
            for column, text in zip(self.columns, texts, strict=True):
                console.print(Text(_padded(column.heading, named) + " " * GAP + text, style=style), soft_wrap=True)

    # --- anywhere else --------------------------------------------------------------------------------------------------

    def _plain(self, console: Console) -> None:
        headings = tuple(column.heading for column in self.columns)
        widths = [self._whole(index) for index in range(len(self.columns))]
        lines = [self.title] if self.title else []
        for texts in (*([headings] if any(headings) else []), *(texts for texts, _ in self.rows)):
            padded = [
                _padded(text, width, right=column.right)
                for text, width, column in zip(texts, widths, self.columns, strict=True)
            ]
            lines.append((" " * GAP).join(padded).rstrip())
        for line in lines:
            console.print(Text(line), soft_wrap=True)


def _padded(text: str, width: int, *, right: bool = False) -> str:
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)
