"""simulator: when everything in a step program happens, given how long each operation takes alone.

The executor and the simulator share one rule, so that a prediction and a run differ only in how long operations take:

1. The issue loop issues the operations in the order of the program.
2. A lane is first-in-first-out, and lanes run in parallel. An operation starts when it is issued, its lane is free,
   what it reads is ready, and what it changes in place has no other user.
3. Memory verbs run when they are issued, on no lane. Readers of their results wait for what the verbs would wait for.
   If device and host are one memory, an alias of what a layer saves is a copy, which holds the issue loop.
4. If the issue loop itself computes (`inline`: the device is the CPU), a computation holds it until it ends. If a
   stream computes, it issues a computation once the one before has begun; the executor is ahead of this by some
   milliseconds of short ones (`runtime/ahead.py`).
5. An operation that writes a new value into host memory waits for the users of what was in that range of the program's
   slab before.
6. An operation that takes device memory is issued once there is room for it, within what the program may have there
   (`placement.device_memory`).

By the fourth, transfers do not run ahead without bound: a prefetch is issued when the computation beside it is near.
Between steps nothing waits: the issue loop goes on with the next program, and lanes with the operations that they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gs_compile.placement.liveness import BEFORE, live_ranges, peak
from gs_compile.placement.placement import Placement
from gs_compile.placement.slab import packed
from gs_compile.placement.traffic import op_nbytes
from gs_compile.placement.workload import Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.bubbles import ISSUE, Chains, bubbles
from gs_compile.planner.simulate.dependencies import COMPUTE, MEMORY, Dependencies, dependencies
from gs_compile.planner.simulate.event_loop import EventLoop, LaneRule, Times
from gs_compile.planner.simulate.prices import op_prices
from gs_compile.program.ir import LANES, TIERS, TRANSFERS, Op, Program
from gs_compile.runtime.trace import Label, Trace

NUM_STEPS = (2, 4, 8)  # the first step finds all lanes idle; more steps if lanes fall further behind in each
STEADY = 1e-3  # of a lane's work in a step, by which it may fall behind in a steady state

Curve = tuple[tuple[float, int], ...]  # moments in seconds, and the bytes from there on


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on its lane, in seconds from the start of the step; `index` is its place in its program.

    It may begin before the step, if it was issued before the computation of the step before had ended, and end after
    the step. waited_for: what let it start: a lane and what that moved, "compute", "cpu", or "issue".
    """

    op: Op
    index: int
    lane: str
    start_seconds: float
    stop_seconds: float
    waited_for: str
    nbytes: int = 0  # that a transfer moves


def simulate(
    programs: Sequence[Program], seconds: Sequence[Sequence[float]], placement: Placement, rule: LaneRule
) -> Simulation:
    """A simulation of the last of `programs`, which run one after the other. (Equal ones before it make it steady.)

    seconds: for each program, the seconds of each operation alone on its lane; for a memory verb, in the issue loop.
    """
    assert programs, "nothing to simulate"
    order = dependencies(programs, placement)
    durations = [each for program in seconds for each in program]
    assert len(durations) == len(order.ops), "seconds are not one an operation"
    return Simulation(order, durations, EventLoop(order, durations, rule, programs).run(), tuple(programs), placement)


def predict(
    program: Program,
    placement: Placement,
    workload: Workload,
    profile: Profile,
    *,
    host_nbytes: int | None = None,
    device_nbytes: int | None = None,
) -> Simulation:
    """A step of `program` in its steady state, after others like it.

    host_nbytes: the budget of host memory; None: no bound. With less memory, ranges are reused sooner, and operations
        wait longer for them.
    device_nbytes: the device memory for values; None: no bound.
    """
    program = packed(program, placement, host_nbytes, device_nbytes)
    seconds = op_prices(program, placement, workload, profile)
    rule = LaneRule(speeds=profile.speeds(), inline=not profile.separate, op_seconds=profile.op_seconds)
    for number in NUM_STEPS:
        simulation = simulate([program] * number, [seconds] * number, placement, rule)
        if simulation.is_steady:
            break
    return simulation


@dataclass(frozen=True, eq=False)
class Simulation:
    """One step, the last of `programs`, with its times. What follows from these is derived when it is asked for."""

    order: Dependencies
    durations: list[float]  # of each operation, alone on its lane
    times: Times
    programs: tuple[Program, ...]
    placement: Placement

    @property
    def program(self) -> Program:
        """The step's own."""
        return self.programs[-1]

    @property
    def seconds(self) -> float:
        """The seconds from the time at which the program before was issued and computed to the same of this one."""
        return self._until - self._since

    @property
    def is_steady(self) -> bool:
        """Whether each lane does as much work during the step as the step gives it: none falls further behind."""
        begun, done = [0.0] * len(LANES), [0.0] * len(LANES)
        for index, (lane, stopped) in enumerate(zip(self.order.lanes, self.times.stopped, strict=True)):
            if lane != MEMORY:
                begun[lane] += self.durations[index] * (index >= self.order.starts[-1])
                done[lane] += self.durations[index] * (self._since < stopped <= self._until)
        return all(abs(a - b) <= STEADY * a for a, b in zip(begun, done, strict=True))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the step's operations on lanes, in the order of their starts."""
        of_step = range(self.order.starts[-1], len(self.order.ops))
        spans = [self._span(index) for index in of_step if self.order.lanes[index] != MEMORY]
        return tuple(sorted(spans, key=lambda span: span.start_seconds))

    @cached_property
    def busy(self) -> Mapping[str, float]:
        """The share of the step in which each lane works, on this step's operations or on another's."""
        sums, since, until = [0.0] * len(LANES), self._since, self._until
        for lane, start, stop in zip(self.order.lanes, self.times.started, self.times.stopped, strict=True):
            if lane != MEMORY and stop > since and start < until:
                sums[lane] += min(stop, until) - max(start, since)
        used = sorted(set(self.order.lanes) - {MEMORY})
        return {LANES[lane]: sums[lane] / self.seconds if self.seconds > 0 else 0.0 for lane in used}

    @cached_property
    def bubbles(self) -> Mapping[str, float]:
        """Seconds in which nothing computes, by cause; with the busy seconds of "compute" they are the step."""
        return bubbles(self._chains, self._since, self._until)

    @cached_property
    def memory(self) -> Mapping[str, Curve]:
        """By tier, the bytes alive from each moment on."""
        return _memory_curves(self.placement, self.order, self.times, self._since, self._until)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes alive at a time on each tier. They exceed the planned ones if lanes lag behind the issue loop,
        up to `room`.
        """
        return {tier: max(nbytes for _, nbytes in curve) for tier, curve in self.memory.items()}

    @property
    def room(self) -> dict[str, int]:
        """The bytes that the step has on each tier, which bound its peaks: in host memory its slab, on SSD a file for
        each value, on the device what it may have there. A device without memory of its own is left out.
        """
        program = self.program
        room = {"host": program.slab_nbytes}
        if program.device is not None:
            room["device"] = program.device.nbytes
        return room | {"ssd": peak(live_ranges(program.ops, self.placement), "ssd", len(program.ops))}

    @property
    def moved_nbytes(self) -> int:
        """Bytes of all transfers of the step."""
        return sum(span.nbytes for span in self.spans)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """Spans from the start of the step, or before, to its end, each of which started when the one before ended; or,
        if a stream computes, when that let the issue loop go on.
        """
        last = len(self.order.ops) - 1
        end = last if self.order.lanes[last] == COMPUTE else self.order.computed[last]
        if end < self.order.starts[-1]:
            return ()
        path, reached = [end], self.times.started[end]
        for link in self._chains.back(end):
            if reached <= self._since:
                break
            if link.op_index != ISSUE:
                path.append(link.op_index)
            reached = link.start
        return tuple(self._span(index) for index in reversed(path))

    def trace(self) -> Trace:
        """The spans as the events of a run."""
        trace = Trace(events=True)
        for span in self.spans:
            op = span.op
            kind = op.verb if span.lane == "compute" else op.kind
            label = Label(span.lane, op.name, span.nbytes, kind, str(op.stage))
            trace.add(label, span.start_seconds, span.stop_seconds)
        return trace

    @cached_property
    def _since(self) -> float:
        return self._over(len(self.programs) - 1)

    @cached_property
    def _until(self) -> float:
        return self._over(len(self.programs))

    @cached_property
    def _chains(self) -> Chains:
        return Chains(self.order, self.times)

    def _over(self, number: int) -> float:
        """When the first `number` programs were issued and computed."""
        order, times = self.order, self.times
        stop = order.starts[number] if number < len(order.starts) else len(order.ops)
        if not stop:
            return 0.0
        last = stop - 1
        issued = times.stopped[last] if order.lanes[last] == MEMORY else times.issued[last]
        computation = last if order.lanes[last] == COMPUTE else order.computed[last]
        return max(issued, times.stopped[computation] if computation >= 0 else 0.0)

    def _span(self, index: int) -> Span:
        op, start = self.order.ops[index], max(start for start in self.order.starts if start <= index)
        return Span(
            op,
            index - start,
            op.lane,
            self.times.started[index] - self._since,
            self.times.stopped[index] - self._since,
            self._chains.label(self._chains.cause(index)),
            op_nbytes(op, self.placement) if op.verb in TRANSFERS else 0,
        )


def _memory_curves(
    placement: Placement, order: Dependencies, times: Times, since: float, until: float
) -> dict[str, Curve]:
    """By tier, the bytes from each moment on, from `since` to `until`, relative to `since`.

    Memory is taken when the operation that defines a value is issued; in host memory, once the range's former users are
    done. It is given back when the `free` has been issued and all users are done; on the device except computations,
    which are in order anyway. That is later than in the planned peaks, which count in the order of issue: if lanes lag
    behind the issue loop, more is alive on the device than planned. In host memory it is never more than the slab.

    Only the last two programs are looked at: what earlier ones have left has ended when the last begins, or lives on.
    """
    start = order.starts[-2:][0]
    issued, stopped, users = times.issued[start:], times.stopped, order.users[start:]
    changes: dict[str, list[tuple[float, int, int]]] = {tier: [] for tier in TIERS}
    for live in live_ranges(order.ops[start:], placement):
        tier, nbytes = live.slot.tier, live.slot.nbytes
        if nbytes:
            begin = 0.0
            if live.first != BEFORE:
                former = users[live.first] if tier == "host" else ()
                begin = max([issued[live.first], *(stopped[user] for user in former)])
            changes[tier].append((begin, live.first, nbytes))
            if live.last is not None:
                ends = [issued[each] for each in live.frees]
                last = (user for each in live.frees for user in users[each])
                ends += [stopped[user] for user in last if tier != "device" or order.lanes[user] != COMPUTE]
                changes[tier].append((max(ends), live.last, -nbytes))
    return {tier: _curve(changes[tier], since, until) for tier in TIERS}


def _curve(changes: list[tuple[float, int, int]], since: float, until: float) -> Curve:
    """The bytes alive from each moment on; at equal moments in the order of issue."""
    now, curve = 0, [(0.0, 0)]
    for when, _, nbytes in sorted(changes):
        if when > until:
            break
        now += nbytes
        if when <= since:
            curve[0] = (0.0, now)
        else:
            curve.append((when - since, now))
    return tuple(curve)
