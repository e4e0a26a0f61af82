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


@contextmanager
def stage(words: str, num_parts: int = 0) -> Iterator[Callable[[], None]]:
    """Something that may take a while; gives the function to call after each of its parts."""
    is_terminal, start, done = sys.stderr.isatty(), time.perf_counter(), 0

    def show(line: str) -> None:
        if is_terminal:
            sys.stderr.write(CLEAR + line)
            sys.stderr.flush()

    def advance() -> None:
        nonlocal done
        done += 1
        filled = WIDTH * done // max(num_parts, 1)
        show(f"greedysnake: {words} {'━' * filled}{'─' * (WIDTH - filled)}")

    show(f"greedysnake: {words} {'─' * WIDTH if num_parts else '...'}")
    try:
        yield advance
    finally:
        show("")
    seconds = time.perf_counter() - start
    if seconds >= LOGGED_SECONDS:
        log.info("%s took %.1f s", words, seconds)
