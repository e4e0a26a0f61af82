"""measured: steps that have run, by their trace, as if they were simulated.

A simulation is a program's dependencies with the times of all operations. A run whose operations are recorded
(``expert={"trace": True}``) has its own times for the same dependencies. So the same code says of simulated and of
measured steps what the computation waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from gs_compile.placement.placement import Placement
from gs_compile.planner.simulate.dependencies import MEMORY, dependencies
from gs_compile.planner.simulate.event_loop import Times
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.program.ir import Program
from gs_compile.runtime.trace import Issue, Trace, TraceEvent

Step = list[Issue]


def measured(trace: Trace, placement: Placement, program: Program, *, inline: bool) -> Iterator[Simulation]:
    """Each step of `program` that has run completely, after another one, in order. The lanes must be idle.

    inline: the issuing thread also computes.
    """
    events = {event.label.number: event for event in trace.events()}
    for before, step in pairwise(_steps(trace.issues())):
        if step[0].program is program and step[0].number == before[-1].number + 1:
            yield _simulation((before, step), events, placement, inline=inline)


def mean_bubbles(steps: Sequence[Simulation]) -> dict[str, float]:
    """The mean seconds of a step in which nothing computed, by cause, the longest first; {} without steps."""
    by_cause: dict[str, float] = defaultdict(float)
    for step in steps:
        for cause, seconds in step.bubbles.items():
            by_cause[cause] += seconds / len(steps)
    return {cause: by_cause[cause] for cause in sorted(by_cause, key=lambda each: -by_cause[each])}


def _steps(issues: Sequence[Issue]) -> Iterator[Step]:
    """The steps of which every operation was recorded."""
    step: Step = []
    for issue in issues:
        if issue.op_index == 0:
            step = []
        step.append(issue)
        if len(step) == len(issue.program.ops):
            yield step


def _simulation(
    steps: Sequence[Step], events: Mapping[int, TraceEvent], placement: Placement, *, inline: bool
) -> Simulation:
    programs = [step[0].program for step in steps]
    order = dependencies(programs, placement)
    issues = [issue for step in steps for issue in step]
    first = issues[0].seconds
    issued = [issue.seconds - first for issue in issues]
    started, stopped = list(issued), list(issued)  # an operation that no lane has recorded ends when it is issued
    for at, (issue, lane) in enumerate(zip(issues, order.lanes, strict=True)):
        if lane != MEMORY and issue.number in events:
            event = events[issue.number]
            started[at], stopped[at] = event.start_seconds - first, event.end_seconds - first
    let_go = stopped if inline else started
    holders, released = list(order.computed), [0.0] * len(issued)
    held, until = -1, 0.0  # the operation that a memory verb has waited for last
    for at, (lane, after) in enumerate(zip(order.lanes, order.after, strict=True)):
        if lane == MEMORY and after:
            last = max(after, key=stopped.__getitem__)
            if stopped[last] > issued[at]:
                held, until = last, stopped[last]
                issued[at] = started[at] = stopped[at] = until
        released[at] = let_go[holders[at]] if holders[at] >= 0 else 0.0
        if until > released[at]:
            holders[at], released[at] = held, until
    times = Times(issued, started, stopped, holders, released)
    durations = [stop - start for start, stop in zip(started, stopped, strict=True)]
    return Simulation(order, durations, times, tuple(programs), placement)
