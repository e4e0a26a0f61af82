"""tables: what the command line prints on a terminal: rows in colours, folded to its width, and what is under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
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
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(f"{words} ...")
    handler = _Shown(lambda message: progress.update(task, description=f"{words}: {message}"))
    planner, timer = logging.getLogger("gs_compile.planner"), Timer(QUIET_SECONDS, progress.start)
    level = planner.level
    planner.addHandler(handler)
    planner.setLevel(logging.INFO)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
        planner.removeHandler(handler)
        planner.setLevel(level)


class _Shown(logging.Handler):
    """Hands the messages of a log to a function."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())
