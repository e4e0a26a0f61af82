"""progress: what takes seconds before a first step, on a line of the terminal while it lasts, and in the log after it.

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

LOGGED_SECONDS = 0.5  # what took less is not worth a line
WIDTH = 20  # of the bar
USUAL_COLUMNS = 80
CLEAR = "\r\x1b[K"


def bar(part: float) -> str:
    """A bar of which so much is filled as is done of a whole."""
    filled = int(WIDTH * min(part, 1.0))
    return "━" * filled + "─" * (WIDTH - filled)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; scripts close them, and put objects of their own in their place."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class Line:
    """The last line of the terminal, written over and over; elsewhere nothing, or a line of its own each time."""

    def __init__(self, *, always: bool = False) -> None:
        """always: also where standard error is no terminal."""
        self.is_terminal, self._always = is_terminal(sys.stderr), always
        self._is_there = False

    def show(self, words: str) -> None:
        """Write this; empty: nothing is left of what was there. Once the terminal is gone, nothing is written."""
        try:
            if self.is_terminal and (words or self._is_there):
                self._is_there = bool(words)
                text = f"greedysnake: {words}"[: _columns() - 1] if words else ""  # of two lines one would stay
                sys.stderr.write(CLEAR + text)
                sys.stderr.flush()
            elif self._always and words:
                sys.stderr.write(f"greedysnake: {words}\n")
        except (AttributeError, OSError, ValueError):  # none, or closed: a terminal, or a file
            self.is_terminal = self._always = False


def _columns() -> int:
    """The width of the terminal; where it does not tell, the usual one."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (AttributeError, OSError, ValueError):
        return USUAL_COLUMNS


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
