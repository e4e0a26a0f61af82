"""ahead: how far the thread that issues is ahead of a device that computes asynchronously.

It launches a computation once those that have not begun take `AHEAD_SECONDS` together at most, each as long as it took
when it ran last. So long ones are launched as the one before begins, as the simulator has it, and the device does not
wait for Python between short ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from gs_compile.runtime.stream import Clock, Event, wait_for

AHEAD_SECONDS = 5e-3  # ten times what Python and a thread that wakes up take for one computation


class _Computation(NamedTuple):
    what: Hashable
    clock: Clock
    begin: Event
    end: Event


class Ahead:
    """The computations that were launched and may not be over, of all steps of a run."""

    def __init__(self) -> None:
        self._waiting: deque[_Computation] = deque()  # their begin has not been seen
        self._running: deque[_Computation] = deque()
        self._seconds: dict[Hashable, float] = {}

    def wait(self, check: Callable[[], None]) -> None:
        """Return when one more may be launched; `check` raises where that never comes."""
        while self._look() > AHEAD_SECONDS:
            wait_for(self._waiting[0].begin, check)

    def add(self, what: Hashable, clock: Clock, begin: Event, end: Event) -> None:
        """A computation was launched between two events. `what`: others of the same take as long."""
        self._waiting.append(_Computation(what, clock, begin, end))

    def _look(self) -> float:
        """The seconds of those that have not begun; infinite with one that has never been over."""
        while self._waiting and self._waiting[0].begin.query():
            self._running.append(self._waiting.popleft())
        while self._running and self._running[0].end.query():
            what, clock, begin, end = self._running.popleft()
            start, stop = clock.seconds(begin, end)
            self._seconds[what] = stop - start
        return sum(self._seconds.get(each.what, math.inf) for each in self._waiting)
