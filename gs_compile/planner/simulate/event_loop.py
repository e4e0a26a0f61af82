"""clock: when each operation is issued, starts and stops, under the rule of the lanes (`simulator` states it).

Lanes are fluid: each works off the seconds of its operation at a rate, which changes when another lane starts or stops.
Time goes from event to event: an operation is over, or the walk has come to the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gs_compile.planner.simulate.dependencies import COMPUTE, MEMORY, Waits
from gs_compile.program.ir import LANES


class Times(NamedTuple):
    """Of each operation, in seconds from the start of the first program; a memory verb starts as it is issued."""

    issued: list[float]
    started: list[float]
    stopped: list[float]
    holders: list[int]  # the operation that held the walk last before each was issued; -1 without one
    let_go: list[float]  # when that was: at the stop of the holder, or at its start


class Budget(NamedTuple):
    """Memory that the walk takes, and waits for."""

    nbytes: int  # at the start of the first program
    takes: Mapping[int, int]  # bytes that an operation takes as it is issued
    gives: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]  # bytes it gives back, once those who use them are done


def run(
    waits: Waits,
    seconds: Sequence[float],
    speeds: Mapping[tuple[str, str], float],
    *,
    inline: bool,
    op_seconds: float,
    budget: Budget | None = None,
) -> Times:
    """Carry out all operations."""
    clock = _Clock(waits, seconds, _Rates(speeds), inline, op_seconds, budget)
    clock.run()
    return Times(clock.issued, clock.started, clock.stopped, clock.holders, clock.let_go)


class _Rates:
    """How fast each lane runs while certain lanes do."""

    def __init__(self, speeds: Mapping[tuple[str, str], float]) -> None:
        self._speeds = [(LANES.index(lane), LANES.index(other), speed) for (lane, other), speed in speeds.items()]
        self._known: dict[tuple[int, ...], list[float]] = {}

    def __bool__(self) -> bool:
        return bool(self._speeds)

    def of(self, active: Sequence[int]) -> list[float]:
        """By lane, given the operation that each lane is at, or -1."""
        key = tuple(lane for lane, index in enumerate(active) if index >= 0)
        if key not in self._known:
            rates = [1.0] * len(LANES)
            for lane, other, speed in self._speeds:
                if lane in key and other in key:
                    rates[lane] *= speed
            self._known[key] = rates
        return self._known[key]


class _Clock:
    def __init__(
        self,
        waits: Waits,
        seconds: Sequence[float],
        rates: _Rates,
        inline: bool,
        op_seconds: float,
        budget: Budget | None,
    ) -> None:
        self.waits = waits
        self.seconds = seconds
        self.rates = rates
        self.inline = inline
        self.op_seconds = op_seconds
        number = len(waits.ops)
        self.issued = [0.0] * number
        self.started = [math.inf] * number
        self.stopped = [math.inf] * number
        self.now = 0.0
        self.at = 0  # what the walk issues next
        self.walked = 0.0  # when the walk was free to go on
        self.holder, self.freed_at = -1, 0.0  # who held it last, and until when
        self.holders = [-1] * number
        self.let_go = [0.0] * number
        self.takes, self.gives = (budget.takes, budget.gives) if budget else ({}, {})
        self.spare = budget.nbytes if budget else 0
        self.draining: list[tuple[int, tuple[int, ...]]] = []  # given back, but still in use
        self.queues: list[deque[int]] = [deque() for _ in LANES]
        self.active = [-1] * len(LANES)
        self.ends = [math.inf] * len(LANES)  # at the rates of now
        self.rate = [1.0] * len(LANES)

    def run(self) -> None:
        number = len(self.waits.ops)
        while True:
            coming = self._walk()
            if self._start():
                continue  # a computation that has begun lets the walk go on
            self._share()
            end = min(self.ends)
            if coming == end == math.inf:
                assert self.at == number, "the walk waits for nothing"
                return
            self.now = min(coming, end)
            for lane, when in enumerate(self.ends):
                if when <= self.now:
                    self._stop(lane)

    def _walk(self) -> float:
        """Issue what can be issued by now; when the next one can be, if only time is missing."""
        lanes, number, inline = self.waits.lanes, len(self.waits.ops), self.inline
        while self.at < number:
            index = self.at
            lane, before = lanes[index], self.waits.computed[index]
            if before >= 0 and (inline or lane == COMPUTE):
                let_go = (self.stopped if inline else self.started)[before]
                if let_go > self.now:
                    return math.inf  # the walk is held
                if let_go >= self.walked:
                    self._go_on(before, let_go)
            due = self.walked + self.op_seconds
            if index in self.takes:
                if due > self.now:
                    return due
                if not self._take(self.takes[index], due):
                    return math.inf
                due = max(due, self.walked)
            if lane != MEMORY and due > self.now:
                return due
            self.issued[index] = self.walked = due
            self.holders[index], self.let_go[index] = self.holder, self.freed_at
            if lane == MEMORY:
                self.started[index] = due
                self.walked = self.stopped[index] = due + self.seconds[index]
            else:
                self.queues[lane].append(index)
            self.draining += self.gives.get(index, ())
            self.at += 1
        return math.inf

    def _go_on(self, holder: int, when: float) -> None:
        self.holder = holder
        self.walked = self.freed_at = when

    def _take(self, nbytes: int, due: float) -> bool:
        """Take memory, if there is enough by now with what was given back and is not in use any more."""
        last = -1
        if self.spare < nbytes:
            assert self.draining, "the program takes more memory than its budget"
            waiting = []
            for given, users in self.draining:
                if any(self.stopped[user] > self.now for user in users):
                    waiting.append((given, users))
                else:
                    self.spare += given
                    last = max((last, *users), key=lambda user: self.stopped[user] if user >= 0 else 0.0)
            self.draining = waiting
            if self.spare < nbytes:
                return False
        self.spare -= nbytes
        if last >= 0 and self.stopped[last] > due:
            self._go_on(last, self.stopped[last])
        return True

    def _start(self) -> bool:
        """Start what can start; whether anything did."""
        any_started = False
        for lane, queue in enumerate(self.queues):
            if queue and self.active[lane] < 0:
                index = queue[0]
                if all(self.stopped[each] <= self.now for each in self.waits.after[index]):
                    queue.popleft()
                    self.active[lane] = index
                    self.started[index] = self.now
                    self.rate[lane] = 1.0
                    self.ends[lane] = self.now + self.seconds[index]
                    any_started = True
        return any_started

    def _share(self) -> None:
        """Lanes that work side by side slow each other down."""
        if not self.rates:
            return
        rates = self.rates.of(self.active)
        for lane, rate in enumerate(rates):
            if self.active[lane] >= 0 and rate != self.rate[lane]:
                self.ends[lane] = self.now + (self.ends[lane] - self.now) * self.rate[lane] / rate
                self.rate[lane] = rate

    def _stop(self, lane: int) -> None:
        self.stopped[self.active[lane]] = self.now
        self.active[lane] = -1
        self.ends[lane] = math.inf
