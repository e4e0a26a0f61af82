"""memory_timeline: what memory each operation takes, who gives it back, and the bytes alive on each tier over time.

Memory is taken when the operation that defines a value is issued, and in host memory not before those are done who were
there. It is given back when the operation that frees it has been issued and all that use it are done. That is later
than the planned peaks assume, which count in the order of issue: where lanes lag behind the issue loop, more is alive
on the device than planned. In host memory it is never more than the slab.
"""

from __future__ import annotations

from gs_compile.placement.liveness import BEFORE, live_ranges
from gs_compile.placement.placement import Placement
from gs_compile.planner.simulate.dependencies import Dependencies
from gs_compile.planner.simulate.event_loop import Times
from gs_compile.program.ir import TIERS

Curve = tuple[tuple[float, int], ...]


def curves(placement: Placement, order: Dependencies, times: Times, since: float, until: float) -> dict[str, Curve]:
    """By tier, the bytes from each moment on, from `since` to `until`, relative to `since`.

    Of the last two programs: what those before have left is gone when the last begins, or lives on.
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
                ends += [stopped[user] for each in live.frees for user in users[each]]
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
