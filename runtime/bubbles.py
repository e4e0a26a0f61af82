"""bubbles: why the computation stood still, and the chain of waits behind any operation.

What an operation waited for is whoever was done last: an operation whose value it reads, the one before it on its lane,
or the walk that issued it. Whoever that is has waited too, and so on back: each link is blamed for its own time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from gs_compile.program import Op

from .clock import Times
from .waits import COMPUTE, Waits

WALK = -1  # in place of an operation


class Link(NamedTuple):
    """One operation, or the walk, that others waited for."""

    index: int
    start: float
    stop: float


class Chains:
    """What each operation waited for, when all times are known."""

    def __init__(self, waits: Waits, times: Times, *, inline: bool) -> None:
        self.waits = waits
        self.times = times
        self.inline = inline

    def cause(self, index: int) -> int:
        """The operation that let this one start, or WALK where it started as soon as it was issued."""
        stopped = self.times.stopped
        found, latest = WALK, self.times.issued[index]
        for each in (self.waits.previous[index], *self.waits.after[index]):
            if each >= 0 and stopped[each] >= latest:
                found, latest = each, stopped[each]
        return found

    def back(self, index: int) -> Iterator[Link]:
        """The links that led to the start of an operation, the last first; each ends where the one after it starts."""
        start = self.times.started[index]
        while True:
            cause = self.cause(index)
            if cause == WALK:
                held_by = self._held_by(index)
                let_go = 0.0
                if held_by >= 0:
                    let_go = (self.times.stopped if self.inline else self.times.started)[held_by]
                yield Link(WALK, let_go, start)
                if held_by < 0:
                    return
                index, start = held_by, let_go
                if not self.inline:
                    continue  # it is not that computation that was waited for, but its start
            else:
                index = cause
            yield Link(index, self.times.started[index], start)
            start = self.times.started[index]

    def label(self, index: int) -> str:
        return "issue" if index == WALK else label(self.waits.ops[index])

    def _held_by(self, index: int) -> int:
        """The computation that the walk waited for last, before it issued an operation; -1 without one."""
        before = self.waits.computed[index]
        if self.inline or before < 0 or self.waits.lanes[index] == COMPUTE:
            return before
        return self.waits.computed[before]


def label(op: Op) -> str:
    """The lane, and of a transfer the kind of what it moves: "ssd_read w"."""
    kind = (*op.results, *op.into, *op.reads)[0].kind
    return f"{op.lane} {kind}" if op.verb in ("prefetch", "offload") else op.lane


def bubbles(chains: Chains, since: float, until: float) -> dict[str, float]:
    """Seconds by cause in which nothing computes from `since` to `until`, when the last program runs.

    "fill" is before its first computation, "turn" before the first of its backward; "issue" the walk's own time. Any
    other is a lane, and what it moved while the computation waited for that, directly or through others.
    """
    waits, times = chains.waits, chains.times
    found: Counter[str] = Counter()
    reached, before = since, None
    for index in range(waits.starts[-1], len(waits.ops)):
        if waits.lanes[index] != COMPUTE:
            continue
        op, start = waits.ops[index], times.started[index]
        if start > reached:
            if before is None:
                found["fill"] += start - reached
            elif op.stage.phase == "backward" != before.stage.phase:
                found["turn"] += start - reached
            else:
                for link in chains.back(index):
                    found[chains.label(link.index)] += link.stop - max(link.start, reached)
                    if link.start <= reached:
                        break
        reached, before = max(reached, times.stopped[index]), op
    if until > reached:
        found["issue"] += until - reached
    return {cause: lost for cause, lost in found.most_common() if lost > 0}
