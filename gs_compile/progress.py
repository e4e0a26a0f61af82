"""progress: what takes seconds before a first step, on a line of the terminal while it lasts, and in the log after it.

greedysnake: compiling the layers' code ━━━━━━━━━━──────────
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LOGGED_SECONDS = 0.5  # what took less is not worth a line
WIDTH = 20  # of the bar
CLEAR = "\r\x1b[K"


def bar(part: float) -> str:
    """Of a whole, so much is done."""
    filled = int(WIDTH * min(part, 1.0))
    return "━" * filled + "─" * (WIDTH - filled)


class Line:
    """The last line of the terminal, written over and over; elsewhere nothing, or a line of its own each time."""

    def __init__(self, *, always: bool = False) -> None:
        """always: also where standard error is no terminal."""
        self.is_terminal, self._always = sys.stderr.isatty(), always
        self._is_there = False

    def show(self, words: str) -> None:
        """Write this; empty: nothing is left of what was there. Once the terminal is gone, nothing is written."""
        try:
            if self.is_terminal and (words or self._is_there):
                self._is_there = bool(words)
                sys.stderr.write(f"{CLEAR}greedysnake: {words}" if words else CLEAR)
                sys.stderr.flush()
            elif self._always and words:
                sys.stderr.write(f"greedysnake: {words}\n")
        except (OSError, ValueError):  # of a terminal that is closed; of a file that is
            self.is_terminal = self._always = False


@contextmanager
def stage(words: str, num_parts: int = 0) -> Iterator[Callable[[], None]]:
    """Something that may take a while; gives the function to call after each of its parts."""
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
