"""bubbles: why the computation stood still, and the chain of waits that led to any operation.

An operation waited for whatever was done last: an operation whose value it reads, the one before it on its lane, or the
issue loop. That one has waited, too, and so on: each link of the chain is blamed for its own time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from gs_compile.planner.simulate.dependencies import COMPUTE, Dependencies
from gs_compile.planner.simulate.event_loop import Times
from gs_compile.program.ir import TRANSFERS

ISSUE = -1  # the issue loop, in place of an operation


class Link(NamedTuple):
    """One operation, or the issue loop, that others waited for."""

    op_index: int
    start: float
    stop: float


class Chains:
    """The operation that each operation waited for, when all times are known."""

    def __init__(self, order: Dependencies, times: Times) -> None:
        self.order = order
        self.times = times

    def cause(self, index: int) -> int:
        """The operation that let this one start, or ISSUE if it started as soon as it was issued."""
        stopped = self.times.stopped
        found, latest = ISSUE, self.times.issued[index]
        for each in (self.order.previous[index], *self.order.after[index]):
            if each >= 0 and stopped[each] >= latest:
                found, latest = each, stopped[each]
        return found

    def back(self, index: int) -> Iterator[Link]:
        """The links that led to the start of an operation, the last first; each ends where the one after it starts."""
        start = self.times.started[index]
        while True:
            cause = self.cause(index)
            if cause == ISSUE:
                holder, released = self.times.holders[index], self.times.released[index]
                yield Link(ISSUE, released, start)
                if holder < 0:
                    return
                index, start = holder, released
                if released < self.times.stopped[holder]:
                    continue  # the issue loop waited for the start of that computation, not for its end
            else:
                index = cause
            yield Link(index, self.times.started[index], start)
            start = self.times.started[index]

    def label(self, index: int) -> str:
        """The lane, and of a transfer the kind of what it moves: "ssd_read w"."""
        if index == ISSUE:
            return "issue"
        op = self.order.ops[index]
        return f"{op.lane} {op.kind}" if op.verb in TRANSFERS else op.lane


def bubbles(chains: Chains, since: float, until: float) -> dict[str, float]:
    """Seconds by cause in which nothing computes from `since` to `until`, when the last program runs.

    "fill" is before its first computation, "turn" before the first of its backward; "issue" is the issue loop's time.
    Any other cause is a lane and what it moved while the computation waited for it, directly or indirectly.
    """
    order, times = chains.order, chains.times
    by_cause: dict[str, float] = defaultdict(float)
    reached, before = since, None
    for index in range(order.starts[-1], len(order.ops)):
        if order.lanes[index] != COMPUTE:
            continue
        op, start = order.ops[index], times.started[index]
        if start > reached:
            if before is None:
                by_cause["fill"] += start - reached
            elif op.stage.phase == "backward" != before.stage.phase:
                by_cause["turn"] += start - reached
            else:
                for link in chains.back(index):
                    by_cause[chains.label(link.op_index)] += link.stop - max(link.start, reached)
                    if link.start <= reached:
                        break
        reached, before = max(reached, times.stopped[index]), op
    if until > reached:
        by_cause["issue"] += until - reached
    return {
        cause: by_cause[cause] for cause in sorted(by_cause, key=lambda each: -by_cause[each]) if by_cause[cause] > 0
    }
