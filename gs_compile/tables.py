"""tables: rows as text, as wide as the terminal is, or as they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 140  # into a file or a pipe, where nobody tells
WIDE = 1000  # nothing is folded


def show(headings: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Mapping[str, str] | None = None) -> None:
    """Print a table to stdout, long cells folded; `styles`: the looks, on a terminal, of cells that say just that."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(_table(headings, rows, styles or {}, right=()))


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
