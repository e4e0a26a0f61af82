"""tables: what the command line prints on a terminal: rows in colours, folded to its width, and what is under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gs_compile.planner import summary

QUIET_SECONDS = 1.0  # what is done sooner needs no progress


def show(headings: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Mapping[str, str] | None = None) -> None:
    """Print a table to stdout: on a terminal long cells are folded, and `styles` are looks of whole cells."""
    console = Console()
    if not console.is_terminal:  # a row is a line
        console.file.write(summary.table(headings, rows) + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, (styles or {}).get(cell, "")) for cell in row))
    console.print(table)


@contextmanager
def busy(words: str) -> Iterator[None]:
    """Say on a terminal what takes longer than a second, and what the planner logs meanwhile; elsewhere say nothing."""
    status = Console(stderr=True).status(Text(f"{words} ..."))
    planner, shown, timer = logging.getLogger("gs_compile.planner"), _Shown(), Timer(QUIET_SECONDS, status.start)
    shown.show = lambda message: status.update(Text(f"{words}: {message}"))
    level = planner.level
    planner.addHandler(shown)
    planner.setLevel(logging.INFO)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
        planner.removeHandler(shown)
        planner.setLevel(level)


class _Shown(logging.Handler):
    """Hands the messages of a log to a function."""

    show: Callable[[str], None]

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())
