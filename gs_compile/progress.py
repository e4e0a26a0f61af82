"""progress: what takes seconds before a first step is shown on a line of the terminal, and logged when it has ended.

greedysnake: compiling the layers' code ━━━━━━━━━━──────────
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

LOGGED_SECONDS = 0.5  # what takes less is not worth a line in the log
WIDTH = 20  # of the bar
USUAL_COLUMNS = 80
CLEAR = "\r\x1b[K"


def bar(part: float) -> str:
    """A bar of which `part`, 0 to 1, is filled."""
    filled = int(WIDTH * min(part, 1.0))
    return "━" * filled + "─" * (WIDTH - filled)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. Scripts may have closed it, or put an object of their own in its place."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class Line:
    """The last line of the terminal, which each text replaces."""

    def __init__(self, *, always: bool = False) -> None:
        """always: if standard error is not a terminal, each text is a new line; otherwise nothing is written then."""
        self.is_terminal, self._always = is_terminal(sys.stderr), always
        self._is_there = False

    def show(self, words: str) -> None:
        """Show this text; an empty one clears the line. Once standard error is closed, nothing is written."""
        try:
            if self.is_terminal and (words or self._is_there):
                self._is_there = bool(words)
                text = f"greedysnake: {words}"[: _columns() - 1] if words else ""  # CLEAR removes one line, not two
                sys.stderr.write(CLEAR + text)
                sys.stderr.flush()
            elif self._always and words:
                sys.stderr.write(f"greedysnake: {words}\n")
        except (AttributeError, OSError, ValueError):  # standard error is None, or closed
            self.is_terminal = self._always = False


def _columns() -> int:
    """The width of the terminal, or the usual one if it cannot be asked."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (AttributeError, OSError, ValueError):
        return USUAL_COLUMNS


@contextmanager
def stage(words: str, num_parts: int = 0) -> Iterator[Callable[[], None]]:
    """Show `words` while the body runs. Gives a function to call after each of its parts, which a bar then shows."""
    line, start, done = Line(), time.perf_counter(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        line.show(f"{words} {bar(done / max(num_parts, 1))}")

    line.show(f"{words} {bar(0.0) if num_parts else '...'}")
    try:
        yield advance
    finally:
        line.show("")
    seconds = time.perf_counter() - start
    if seconds >= LOGGED_SECONDS:
        log.info("%s took %.1f s", words, seconds)
