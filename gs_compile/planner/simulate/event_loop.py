"""event_loop: when each operation is issued, starts and stops, under the rule of the lanes (`simulator` states it).

Each lane works off the seconds of its operation at a rate, which changes when another lane starts or stops. Time goes
from event to event: an operation ends, or the issue loop comes to the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from gs_compile.placement.device_memory import DeviceMemory
from gs_compile.planner.simulate.dependencies import COMPUTE, MEMORY, Dependencies
from gs_compile.program.ir import LANES, Program


class Times(NamedTuple):
    """The times of each operation, in seconds from the start of the first program; memory verbs start when issued."""

    issued: list[float]
    started: list[float]
    stopped: list[float]
    holders: list[int]  # the operation that held the issue loop last before each was issued; -1 without one
    released: list[float]  # when it let go of it: at its stop, or at its start


@dataclass(frozen=True, kw_only=True)
class LaneRule:
    """How a machine runs programs.

    speeds: the first lane's speed while the second runs, as a fraction of its speed alone. With several, speeds of
        a transfer or an update multiply; computation, which has most of the threads, has its lowest.
    inline: the issue loop itself computes.
    op_seconds: the time that the issue loop takes to issue an operation.
    """

    speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    inline: bool = False
    op_seconds: float = 0.0


class EventLoop:
    """Runs all operations; `seconds`: of each alone."""

    def __init__(
        self, order: Dependencies, seconds: Sequence[float], rule: LaneRule, programs: Sequence[Program]
    ) -> None:
        number = len(order.ops)
        self.order = order
        self.seconds = seconds
        self.rule = rule
        self.coming = deque(zip(order.starts, programs, strict=True))  # programs that have not begun
        self.start = 0  # of the current program
        self.device: DeviceMemory[int] | None = None  # of the current program, if it is bounded
        self.ended: list[tuple[int, Sequence[int]]] = []  # ended values that are still in use on the device
        self.awaited: Sequence[int] = ()  # operations that the issue loop waits for, until the device has room
        self.times = Times([0.0] * number, [math.inf] * number, [math.inf] * number, [-1] * number, [0.0] * number)
        self.now = 0.0
        self.at = 0  # the operation that is issued next
        self.free_from = 0.0  # the time from which on the issue loop was free
        self.holder, self.released_at = -1, 0.0  # the operation that held it last, and until when
        self.queues: list[deque[int]] = [deque() for _ in LANES]
        self.active = [-1] * len(LANES)
        self.ends = [math.inf] * len(LANES)  # at the current rates
        self.rates = [1.0] * len(LANES)
        self.shared = 0  # the lanes that run in parallel at these rates, a bit for each
        self.rates_of = cache(self._rates_of)

    def run(self) -> Times:
        """The times of all operations."""
        ends, active, stopped = self.ends, self.active, self.times.stopped
        while True:
            coming = self._issue()
            if self._start():
                continue  # a computation that has begun lets the issue loop go on
            if self.rule.speeds:
                self._share()
            end = min(ends)
            if coming == end == math.inf:
                assert self.at == len(stopped), "the issue loop waits for nothing"
                return self.times
            self.now = now = min(coming, end)
            if end <= now:
                for lane, when in enumerate(ends):
                    if when <= now:
                        stopped[active[lane]] = now
                        active[lane], ends[lane] = -1, math.inf

    # The issue loop ---------------------------------------------------------------------------------------------------

    def _issue(self) -> float:
        """Issue what can be issued now. Returns when the next one can be, if it only has to wait for a time."""
        lanes, computed, after, inline = self.order.lanes, self.order.computed, self.order.after, self.rule.inline
        stopped, released = self.times.stopped, self.times.stopped if inline else self.times.started
        while self.at < len(lanes):
            index = self.at
            if self.coming and self.coming[0][0] == index:
                self._begin(*self.coming.popleft())
            takes = self.device is not None and index - self.start in self.device.bound.takes
            lane, before = lanes[index], computed[index]
            if before >= 0 and (inline or lane == COMPUTE):
                if released[before] > self.now:
                    return math.inf  # it is held
                if released[before] >= self.free_from:
                    self._go_on(before, released[before])
            due = self.free_from + self.rule.op_seconds
            held = lane == MEMORY and after[index]
            if (lane != MEMORY or held or takes) and due > self.now:
                return due
            if held:
                last = max(held, key=stopped.__getitem__)
                if stopped[last] > self.now:
                    return math.inf
                if stopped[last] > due:
                    self._go_on(last, stopped[last])
                    due = stopped[last]
            if takes and not self._has_room(index):
                return math.inf
            self._enter(index, lane, max(due, self.free_from))
        return math.inf

    def _begin(self, start: int, program: Program) -> None:
        """Begin the next program, whose first operation has the index `start`."""
        self.start = start
        self.device = program.device and DeviceMemory(program.device, self._has_left, self.ended)

    def _has_room(self, index: int) -> bool:
        """Whether the device has room. If the issue loop had to wait, it goes on when the last user was done."""
        assert self.device is not None
        awaited = self.device.awaited(index - self.start)
        if self.awaited and not awaited:
            self._go_on(max(self.awaited, key=self.times.stopped.__getitem__), self.now)
        self.awaited = awaited
        return not awaited

    def _has_left(self, user: int) -> bool:
        """Whether later operations may take the device memory that an operation has used: computations are in order."""
        return self.order.lanes[user] == COMPUTE or self.times.stopped[user] <= self.now

    def _enter(self, index: int, lane: int, due: float) -> None:
        times = self.times
        if self.device is not None:
            self.device.take(index - self.start)
            self.device.give(index - self.start, self.order.users[index])
        times.issued[index] = self.free_from = due
        times.holders[index], times.released[index] = self.holder, self.released_at
        if lane == MEMORY:
            times.started[index] = due
            self.free_from = times.stopped[index] = due + self.seconds[index]
        else:
            self.queues[lane].append(index)
        self.at += 1

    def _go_on(self, holder: int, when: float) -> None:
        self.holder = holder
        self.free_from = self.released_at = when

    # The lanes --------------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start what can start. Returns whether a computation did."""
        active, stopped, after, now = self.active, self.times.stopped, self.order.after, self.now
        computes = False
        for lane, queue in enumerate(self.queues):
            if not queue or active[lane] >= 0:
                continue
            index = queue[0]
            for each in after[index]:
                if stopped[each] > now:
                    break
            else:
                queue.popleft()
                active[lane] = index
                self.times.started[index] = now
                self.rates[lane] = 1.0
                self.ends[lane] = now + self.seconds[index]
                self.shared = -1
                computes |= lane == COMPUTE
        return computes

    def _share(self) -> None:
        """Set the rates of lanes that run in parallel and slow each other down."""
        working = sum([1 << lane for lane, index in enumerate(self.active) if index >= 0])
        if working == self.shared:
            return
        self.shared = working
        for lane, rate in enumerate(self.rates_of(working)):
            if self.active[lane] >= 0 and rate != self.rates[lane]:
                self.ends[lane] = self.now + (self.ends[lane] - self.now) * self.rates[lane] / rate
                self.rates[lane] = rate

    def _rates_of(self, working: int) -> list[float]:
        rates = [1.0] * len(LANES)
        for (lane, other), speed in self.rule.speeds.items():
            own = LANES.index(lane)
            if working >> own & working >> LANES.index(other) & 1:
                rates[own] = min(rates[own], speed) if lane == "compute" else rates[own] * speed
        return rates
