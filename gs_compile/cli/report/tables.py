"""tables: rows as text, as wide as the terminal is, or as they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 10_000  # in a file or a pipe nothing is folded: a row is a line


def show(headings: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Mapping[str, str] | None = None) -> None:
    """Print a table to stdout; on a terminal long cells are folded, and `styles` are looks of whole cells."""
    console = Console()
    if console.is_terminal:
        console.print(_table(headings, rows, styles or {}, right=()))
    else:
        console.file.write(text(headings, rows) + "\n")


def text(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """A table as lines of plain text; the columns called `right` hold numbers, which end together."""
    console = Console(file=StringIO(), width=WIDE, color_system=None)
    with console.capture() as captured:
        console.print(_table(headings, rows, {}, right))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


@contextmanager
def busy(words: str) -> Iterator[None]:
    """Say on a terminal what takes so long, for as long as it does; a file or a pipe hears nothing of it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{words} ..."):
        yield


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], styles: Mapping[str, str], right: Sequence[str]
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*(Text(cell, styles.get(cell, "")) for cell in row))
    return table
