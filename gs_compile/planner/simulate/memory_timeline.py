"""occupancy: what memory each operation takes, who gives it back, and the bytes alive on each tier over time.

Memory is taken when the operation that defines a value is issued. It is given back when the operation that frees it has
been issued and whoever works on it is done. That is later than the planned peaks assume, which count in the order of
issue: where lanes lag behind the walk, more is alive than planned. The executor does not take more host memory than its
budget, and waits instead; so does the simulator where it is given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gs_compile.placement.placement import Placement
from gs_compile.planner.simulate.dependencies import Waits
from gs_compile.planner.simulate.event_loop import Times
from gs_compile.program.ir import Value

Curve = tuple[tuple[float, int], ...]
TIERS = ("device", "host", "ssd")
START = -1  # in place of an operation: there before the first


@dataclass(slots=True)
class Lease:
    """A slot's memory from when it is taken to when all of its values are gone; slots are those of `Placement`."""

    tier: str
    nbytes: int
    taken: int  # by the operation that defines its first value
    frees: list[int] = field(default_factory=list)  # operations that end its values
    is_over: bool = False


def leases(waits: Waits, placement: Placement) -> list[Lease]:
    """All memory that is taken, in the order of issue. What a step hands out counts until its last operation."""
    book, ops = _Book(placement), waits.ops
    homes = placement.homes(late=False) | placement.homes(late=True)
    bounds = [*waits.starts, len(ops)]
    for value in placement.present(ops[: bounds[1]]):
        book.take(value, START)
    for start, stop in pairwise(bounds):
        own: dict[Value, None] = {}
        for index in range(start, stop):
            op = ops[index]
            for value in op.results:
                book.take(value, index)
                own[value] = None
            if op.verb == "free":
                book.give_back(op.reads[0], index)
                own.pop(op.reads[0], None)
        for value in own:
            if value not in homes:
                book.give_back(value, stop - 1)
    return book.leases


def occupancy(taken: Sequence[Lease], waits: Waits, times: Times, since: float, until: float) -> dict[str, Curve]:
    """By tier, the bytes from each moment on, from `since` to `until`, relative to `since`."""
    changes: dict[str, list[tuple[float, int, int]]] = {tier: [] for tier in TIERS}
    for lease in taken:
        if not lease.nbytes:
            continue
        begin = times.issued[lease.taken] if lease.taken != START else 0.0
        changes[lease.tier].append((begin, lease.taken, lease.nbytes))
        if lease.is_over:
            end = max(when for each in lease.frees for when in (times.issued[each], *_ends(waits, times, each)))
            changes[lease.tier].append((end, lease.frees[-1], -lease.nbytes))
    return {tier: _curve(changes[tier], since, until) for tier in TIERS}


def _ends(waits: Waits, times: Times, free: int) -> list[float]:
    return [times.stopped[user] for user in waits.users[free]]


class _Book:
    """The leases, and which of them each slot has now."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.leases: list[Lease] = []
        self.slots: dict[Value, tuple[object, str, int]] = {}
        self.alive: dict[object, tuple[Lease, set[Value]]] = {}

    def take(self, value: Value, index: int) -> None:
        key, tier, nbytes = self._slot(value)
        if key not in self.alive:
            self.leases.append(Lease(tier, nbytes, index))
            self.alive[key] = self.leases[-1], set()
        self.alive[key][1].add(value)

    def give_back(self, value: Value, index: int) -> None:
        key, _, _ = self._slot(value)
        if key in self.alive:
            lease, values = self.alive[key]
            lease.frees.append(index)
            values.discard(value)
            if not values:
                lease.is_over = True
                del self.alive[key]

    def _slot(self, value: Value) -> tuple[object, str, int]:
        if value not in self.slots:
            key, nbytes = self.placement.slot(value)
            in_host = not self.placement.separate and value.kind in ("w", "dw") and value.tier == "device"
            self.slots[value] = key, "host" if in_host else value.tier or "device", nbytes
        return self.slots[value]


def _curve(changes: list[tuple[float, int, int]], since: float, until: float) -> Curve:
    """What is alive from each moment on; at equal moments in the order of issue."""
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
