"""ahead: how far the issuing thread is ahead of a device that computes asynchronously.

It launches a computation once those that have not begun take at most `AHEAD_SECONDS` together, by the times of their
last runs. So a long computation is launched when the one before it begins, as in the simulator, and between short ones
the device does not wait for Python.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from gs_compile.runtime.stream import Clock, Event, wait_for

AHEAD_SECONDS = 5e-3  # ten times the overhead of one computation: Python, and a thread that wakes up


class _Computation(NamedTuple):
    what: Hashable
    clock: Clock
    begin: Event
    end: Event


class Ahead:
    """The computations of a run that were launched and may not have ended."""

    def __init__(self) -> None:
        self._waiting: deque[_Computation] = deque()  # not known to have begun
        self._running: deque[_Computation] = deque()
        self._seconds: dict[Hashable, float] = {}

    def wait(self, check: Callable[[], None]) -> None:
        """Return when one more may be launched; `check` raises if that will never be."""
        while self._look() > AHEAD_SECONDS:
            wait_for(self._waiting[0].begin, check)

    def add(self, what: Hashable, clock: Clock, begin: Event, end: Event) -> None:
        """A computation was launched between two events. `what`: those with the same key take the same time."""
        self._waiting.append(_Computation(what, clock, begin, end))

    def _look(self) -> float:
        """The seconds of those that have not begun; infinite if one of them has never run to its end."""
        while self._waiting and self._waiting[0].begin.query():
            self._running.append(self._waiting.popleft())
        while self._running and self._running[0].end.query():
            what, clock, begin, end = self._running.popleft()
            start, stop = clock.seconds(begin, end)
            self._seconds[what] = stop - start
        return sum(self._seconds.get(each.what, math.inf) for each in self._waiting)
