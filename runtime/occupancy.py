"""occupancy: the bytes alive on each tier over time, when the times of all operations are known.

Memory is taken when the operation that defines a value is issued. It is given back when the operation that frees it has
been issued and whoever works on it is done. That is later than the planned peaks assume, which count in the order of
issue: where lanes lag behind the walk, more is alive than planned. The executor does not take more than its budget, and
waits instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gs_compile.placement import Placement
from gs_compile.program import Op, Value

from .clock import Times
from .waits import Waits

Curve = tuple[tuple[float, int], ...]
TIERS = ("device", "host", "ssd")


def occupancy(waits: Waits, times: Times, placement: Placement, since: float, until: float) -> dict[str, Curve]:
    """By tier, the bytes from each moment on, from `since` to `until`; slots are those of `Placement.peaks`."""
    leases = _Leases(placement, waits, times)
    leases.run()
    return {tier: _curve(leases.changes[tier], since, until) for tier in TIERS}


class _Leases:
    """Slots alive, and by tier the moments at which bytes come and go."""

    def __init__(self, placement: Placement, waits: Waits, times: Times) -> None:
        self.placement = placement
        self.waits = waits
        self.times = times
        self.changes: dict[str, list[tuple[float, int]]] = {tier: [] for tier in TIERS}
        self.slots: dict[Value, tuple[object, str, int]] = {}
        self.alive: dict[object, tuple[set[Value], float]] = {}  # by slot: its values, and when the last that went did

    def run(self) -> None:
        ops, issued, stopped = self.waits.ops, self.times.issued, self.times.stopped
        bounds = [*self.waits.starts, len(ops)]
        homes = self.placement.homes(late=False) | self.placement.homes(late=True)
        for value in self.placement.homes(late=_begins_late(ops[: bounds[1]])):
            self._take(value, 0.0)
        for start, stop in pairwise(bounds):
            own: dict[Value, None] = {}
            for index in range(start, stop):
                op = ops[index]
                for value in op.results:
                    self._take(value, issued[index])
                    if value not in homes:
                        own[value] = None
                if op.verb == "free":
                    over = max((stopped[each] for each in self.waits.users[index]), default=0.0)
                    self._give_back(op.reads[0], max(over, issued[index]))
                    own.pop(op.reads[0], None)
            for value in own:  # results, which the step hands out when it is over
                self._give_back(value, stopped[stop - 1])

    def _slot(self, value: Value) -> tuple[object, str, int]:
        if value not in self.slots:
            key, nbytes = self.placement.slot(value)
            in_host = not self.placement.separate and value.kind in ("w", "dw") and value.tier == "device"
            self.slots[value] = key, "host" if in_host else value.tier or "device", nbytes
        return self.slots[value]

    def _take(self, value: Value, when: float) -> None:
        key, tier, nbytes = self._slot(value)
        if key not in self.alive:
            self.alive[key] = set(), 0.0
            if nbytes:
                self.changes[tier].append((when, nbytes))
        self.alive[key][0].add(value)

    def _give_back(self, value: Value, when: float) -> None:
        key, tier, nbytes = self._slot(value)
        if key in self.alive:
            values, until = self.alive.pop(key)
            values.discard(value)
            until = max(until, when)
            if values:
                self.alive[key] = values, until
            elif nbytes:
                self.changes[tier].append((until, -nbytes))


def _begins_late(ops: Sequence[Op]) -> bool:
    """Whether a program finds gradients of the step before."""
    defined: set[Value] = set()
    for op in ops:
        if any(value.kind == "dw" and value not in defined for value in op.reads):
            return True
        defined.update(op.results)
    return False


def _curve(changes: list[tuple[float, int]], since: float, until: float) -> Curve:
    """What is alive from each moment on, relative to `since`; at equal moments in the order of issue."""
    now, curve = 0, [(0.0, 0)]
    for when, nbytes in sorted(changes, key=lambda change: change[0]):
        if when > until:
            break
        now += nbytes
        at = max(when - since, 0.0)
        if when <= since:
            curve[0] = (0.0, now)
        else:
            curve.append((at, now))
    return tuple(curve)
