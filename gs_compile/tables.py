"""tables: rows as text, as wide as the terminal is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 140  # into a file or a pipe, where nobody tells


def show(headings: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Mapping[str, str] | None = None) -> None:
    """Print a table to stdout, long cells folded; `styles`: the looks, on a terminal, of cells that say just that."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, (styles or {}).get(cell, "")) for cell in row))
    console.print(table)
