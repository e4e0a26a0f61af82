"""memory_timeline: what memory each operation takes, who gives it back, and the bytes alive on each tier over time.

Memory is taken when the operation that defines a value is issued. It is given back when the operation that frees it has
been issued and all that use it are done. That is later than the planned peaks assume, which count in the order of
issue: where lanes lag behind the issue loop, more is alive than planned. The executor does not take more host memory
than its budget, and waits instead; so does the simulator where it is given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gs_compile.placement.kinds import slot_of
from gs_compile.placement.placement import Placement
from gs_compile.planner.simulate.dependencies import Dependencies
from gs_compile.planner.simulate.event_loop import Budget, Times

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
    values: set[int] = field(default_factory=set)  # that are there; none: the lease is over


def leases(order: Dependencies, placement: Placement) -> list[Lease]:
    """All memory that is taken, in the order of issue. What a step hands out counts until its last operation."""
    book = _Book(order, placement)
    bounds = [*order.starts, len(order.ops)]
    numbers = {value: number for number, value in enumerate(order.values)}
    for present in placement.present(order.ops[: bounds[1]]):
        if present not in numbers:  # a part that no operation names
            book.values.append(present)
        book.take(numbers.setdefault(present, len(numbers)), START)
    homes = placement.homes(late=False) | placement.homes(late=True)
    stay = {numbers[home] for home in homes if home in numbers}
    for start, stop in pairwise(bounds):
        own: dict[int, None] = {}
        for index in range(start, stop):
            row = order.rows[index]
            for value in row.results:
                book.take(value, index)
                own[value] = None
            if row.is_free:
                book.give_back(row.reads[0], index)
                own.pop(row.reads[0], None)
        for value in own.keys() - stay:
            book.give_back(value, stop - 1)
    return book.leases


def host_budget(taken: Sequence[Lease], order: Dependencies, nbytes: int) -> Budget:
    """The host memory that is taken and given back, of `nbytes` in all."""
    takes: dict[int, int] = {}
    gives: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for lease in taken:
        if lease.tier == "host" and lease.nbytes:
            takes[lease.taken] = takes.get(lease.taken, 0) + lease.nbytes
            if not lease.values:
                users = tuple(user for free in lease.frees for user in order.users[free])
                gives.setdefault(lease.frees[-1], []).append((lease.nbytes, users))
    return Budget(nbytes - takes.pop(START, 0), takes, gives)


def curves(taken: Sequence[Lease], order: Dependencies, times: Times, since: float, until: float) -> dict[str, Curve]:
    """By tier, the bytes from each moment on, from `since` to `until`, relative to `since`."""
    issued, stopped = times.issued, times.stopped
    changes: dict[str, list[tuple[float, int, int]]] = {tier: [] for tier in TIERS}
    for lease in taken:
        if lease.nbytes:
            begin = issued[lease.taken] if lease.taken != START else 0.0
            changes[lease.tier].append((begin, lease.taken, lease.nbytes))
            if not lease.values:
                ends = [issued[each] for each in lease.frees]
                ends += [stopped[user] for each in lease.frees for user in order.users[each]]
                changes[lease.tier].append((max(ends), lease.frees[-1], -lease.nbytes))
    return {tier: _curve(changes[tier], since, until) for tier in TIERS}


class _Book:
    """The leases, and which of them each slot has now; values are those of `order`, by number."""

    def __init__(self, order: Dependencies, placement: Placement) -> None:
        self.placement = placement
        self.values = list(order.values)
        self.leases: list[Lease] = []
        self.slots: dict[int, tuple[object, str, int]] = {}
        self.alive: dict[object, Lease] = {}

    def take(self, value: int, index: int) -> None:
        key, tier, nbytes = self.slots.get(value) or self._slot(value)
        if key not in self.alive:
            self.alive[key] = Lease(tier, nbytes, index)
            self.leases.append(self.alive[key])
        self.alive[key].values.add(value)

    def give_back(self, value: int, index: int) -> None:
        key, _, _ = self.slots.get(value) or self._slot(value)
        lease = self.alive.get(key)
        if lease is not None:
            lease.frees.append(index)
            lease.values.discard(value)
            if not lease.values:
                del self.alive[key]

    def _slot(self, number: int) -> tuple[object, str, int]:
        slot = slot_of(self.placement, self.values[number])
        self.slots[number] = slot.key, slot.tier, slot.nbytes
        return self.slots[number]


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
