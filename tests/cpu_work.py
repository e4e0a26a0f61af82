"""How much work something is by itself, whatever the machine's speed, in a process that has run a thousand other tests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache
from typing import Any


def work(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of this process for `run`, in multiples of what a fixed piece of work takes around it, and its result.

    On a slow or a busy machine both take longer. What is shorter than the process's first piece needs no other. The
    garbage collector, which would walk through all objects that other tests have left, does not count.
    """
    gc.disable()
    try:
        first = _first_piece()
        seconds, found = _cpu_seconds(run)
        return seconds / (first if seconds < first else max(first, _cpu_seconds(_piece)[0])), found
    finally:
        gc.enable()


@cache
def _first_piece() -> float:
    return _cpu_seconds(_piece)[0]


def _cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


def _piece() -> int:
    """About a twentieth of a second on a machine of 2024: objects made, looked up and put in order."""
    known = {number * 7919 % 50_021: (number, str(number)) for number in range(50_000)}
    return sum(known[key][0] for key in sorted(known, key=lambda key: known[key][1]))
