"""memory_timeline: what memory each operation takes, who gives it back, and the bytes alive on each tier over time.

Memory is taken when the operation that defines a value is issued, and in host memory not before those are done who were
there. It is given back when the operation that frees it has been issued and all that use it are done. That is later
than the planned peaks assume, which count in the order of issue: where lanes lag behind the issue loop, more is alive
on the device than planned. In host memory it is never more than the slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gs_compile.placement.kinds import slot_of
from gs_compile.placement.liveness import BEFORE, LiveRange, live_ranges
from gs_compile.placement.placement import Placement
from gs_compile.planner.simulate.dependencies import Dependencies
from gs_compile.planner.simulate.event_loop import Times

Curve = tuple[tuple[float, int], ...]
TIERS = ("device", "host", "ssd")


def leases(order: Dependencies, placement: Placement) -> list[LiveRange]:
    """All memory that is taken, in the order of issue. What a step hands out counts until its last operation."""
    homes = placement.homes(late=False) | placement.homes(late=True)
    stays = {slot_of(placement, home).key for home in homes}
    known: dict[int, list[LiveRange]] = {}  # of each program, which may come several times
    found: list[LiveRange] = []
    open_ranges: dict[object, LiveRange] = {}
    for start, stop in pairwise([*order.starts, len(order.ops)]):
        program = id(order.rows[start]) if start < stop else 0
        if program not in known:
            known[program] = live_ranges(order.ops[start:stop], placement)
        for live in known[program]:
            frees = [start + each for each in live.frees]
            now = open_ranges.pop(live.slot.key, None) if live.first == BEFORE else None
            if now is None:
                first = BEFORE if live.first == BEFORE else start + live.first
                now = LiveRange(live.value, live.slot, first)
                found.append(now)
            now.frees += frees
            now.last = None if live.last is None else start + live.last
            if now.last is None:
                open_ranges[live.slot.key] = now
        for key in open_ranges.keys() - stays:
            handed_out = open_ranges.pop(key)
            handed_out.frees.append(stop - 1)
            handed_out.last = stop - 1
    return found


def curves(
    taken: Sequence[LiveRange], order: Dependencies, times: Times, since: float, until: float
) -> dict[str, Curve]:
    """By tier, the bytes from each moment on, from `since` to `until`, relative to `since`."""
    issued, stopped = times.issued, times.stopped
    changes: dict[str, list[tuple[float, int, int]]] = {tier: [] for tier in TIERS}
    for live in taken:
        tier, nbytes = live.slot.tier, live.slot.nbytes
        if nbytes:
            begin = 0.0
            if live.first != BEFORE:
                former = order.former[live.first] if tier == "host" else ()
                begin = max(issued[live.first], *(stopped[user] for user in former), 0.0)
            changes[tier].append((begin, live.first, nbytes))
            if live.last is not None:
                ends = [issued[each] for each in live.frees]
                ends += [stopped[user] for each in live.frees for user in order.users[each]]
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
