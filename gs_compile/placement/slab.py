"""slab: where every value in host memory stands: its offset in the one block that a run has there.

The program is static, so nothing is allocated while a step runs. What lives on from step to step has the same offset in
every program of a run; everything else is packed around it, by the time it is alive in its program:

    0                 fixed                                    transient
    | states, parameters | late parameters > < late gradients | transfers, checkpoints, gradients ...   |

A late parameter is stale between its last use and its update, and its gradient waits meanwhile (paper, section 4.3).
Units are updated in the order of the forward and used last in the opposite one, so one region serves both: up to some
unit the parameters are alive, from there on the gradients.

All offsets are multiples of a page, which direct I/O asks for. What the plan states as needed is the smallest slab. Who
begins in a range waits for those who still use what was there before; so where the budget has room, memory that a
transfer has used last is given on some stages later (`packed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gs_compile.placement.kinds import Slot, slot_of
from gs_compile.placement.liveness import BEFORE, LiveRange, live_ranges, nbytes_alive
from gs_compile.placement.placement import Placement
from gs_compile.placement.ranges import Occupants
from gs_compile.program.ir import TIED, Op, Program, Tier, Unit, Value, height

PAGE_NBYTES = 4096
LAGS = (2, 1, 0)  # stages that a transfer may take after its own; it is planned to take one


class FixedOffsets(NamedTuple):
    """Where what lives on stands, by slot: `always`, or in the region that late parameters and gradients share."""

    always: Mapping[object, int]
    shared: Mapping[object, int]
    always_nbytes: int
    nbytes: int


def rounded(nbytes: int) -> int:
    """Whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def fixed_offsets(placement: Placement) -> FixedOffsets:
    """The offsets that all programs of a placement have in common, whatever the size of their batches."""
    late, tied = _late(placement), _waiting(placement, TIED)
    shared = {slot.key for each in late for slot in (*each.stale, *each.waiting)} | {slot.key for slot in tied}
    always: dict[object, int] = {}
    end = 0
    for slot in _at_home(placement):
        if slot.key not in shared and slot.key not in always:
            always[slot.key] = end
            end += rounded(slot.nbytes)
    before = [0, *accumulate(_nbytes(each.stale) for each in late)]
    after = [*accumulate((_nbytes(each.waiting) for each in reversed(late)), initial=0)][::-1]
    apart = ((k, j) for k, one in enumerate(late) for j, other in enumerate(late) if not one.is_over_before(other))
    size = max((before[j + 1] + after[k] for k, j in apart), default=0)
    offsets = _stacked(tied, end + size)
    for k, each in enumerate(late):
        offsets |= _stacked(each.stale, end + before[k]) | _stacked(each.waiting, end + size - after[k])
    return FixedOffsets(always, offsets, end, end + size + _nbytes(tied))


def _nbytes(slots: Sequence[Slot]) -> int:
    return sum(rounded(slot.nbytes) for slot in slots)


def _stacked(slots: Sequence[Slot], start: int) -> dict[object, int]:
    ends = accumulate((rounded(slot.nbytes) for slot in slots), initial=start)
    return {slot.key: offset for slot, offset in zip(slots, ends, strict=False)}


def _at_home(placement: Placement) -> Iterator[Slot]:
    """The slots in host memory of what lives on."""
    homes = sorted(placement.homes(late=True) | placement.homes(late=False), key=str)
    slots = (slot_of(placement, value) for value in homes)
    return (slot for slot in slots if slot.tier == "host" and slot.nbytes)


class _Late(NamedTuple):
    """One update in the forward: parameters that are stale until then, and gradients that wait for it."""

    stage: int  # of the update, on the way up
    unit: int  # its place on that way
    stale: list[Slot]
    waiting: list[Slot]

    def is_over_before(self, other: _Late) -> bool:
        """Whether the gradients are gone before the other's parameters are there, and come after these have gone."""
        return self.stage < other.stage and self.unit <= other.unit


def _late(placement: Placement) -> list[_Late]:
    """The updates in the forward, in their order: of a unit with several groups each takes a stage, the last its own.

    Tied parameters are updated when the first unit needs them, wherever that is: they take no part.
    """
    found: list[_Late] = []
    units = sorted((unit for unit in placement.units if unit.unit != TIED), key=lambda unit: height(unit.unit))
    for number, unit in enumerate(units):
        groups = unit.trained(*placement.waiting(redo=True))
        if placement.keeps_gradient(unit):
            found.append(_Late(number, number, [], _waiting(placement, unit.unit)))
            continue
        for place, group in enumerate(groups):
            stale = [part for part in group.w if group.when == "late" and placement.reclaims(unit, part)]
            slots = [slot_of(placement, unit.value("w", part)) for part in stale]
            gradient = slot_of(placement, unit.gradient(group))
            found.append(_Late(number + place + 1 - len(groups), number, slots, [gradient]))
    return sorted(found, key=lambda each: each[:2])


def _waiting(placement: Placement, unit: Unit) -> list[Slot]:
    """The memory of a unit's gradients that may wait for the next step."""
    placed = placement.by_unit.get(unit)
    groups = placed.trained(*placement.waiting(redo=True)) if placed else ()
    slots = (slot_of(placement, placed.gradient(group)) for group in groups if placed)
    return list({slot.key: slot for slot in slots}.values())


def plan_offsets(ranges: Sequence[LiveRange], ops: Sequence[Op], placement: Placement) -> tuple[dict[object, int], int]:
    """The offset of each slot in host memory that a program uses, and the bytes of the slab.

    Largest first, each at the lowest offset that is free for as long as it is alive: deterministic, and near the
    bytes that are alive at most. What is alive in a step alone is not across the end of what lives on: these are two
    blocks. In a program that updates nothing it is all behind that end, as a step may be open meanwhile.
    """
    fixed = fixed_offsets(placement)
    spans: dict[object, list[tuple[int, int]]] = {}
    sizes: dict[object, int] = {}
    for live in ranges:
        if live.slot.tier == "host" and live.slot.nbytes and live.slot.key not in fixed.always:
            spans.setdefault(live.slot.key, []).append((live.first, len(ops) if live.last is None else live.last))
            sizes[live.slot.key] = rounded(live.slot.nbytes)
    updates = any(op.verb in ("norm", "update") for op in ops)
    packing = _Packing(sum(map(len, spans.values())) + 1, fixed.always_nbytes if updates else fixed.nbytes)
    packing.put([(BEFORE - 1, len(ops) + 1)], fixed.nbytes, 0)
    for key in spans.keys() & fixed.shared.keys():
        packing.put(spans[key], fixed.shared[key], sizes[key])
    offsets: dict[object, int] = {}
    for key in sorted(spans.keys() - fixed.shared.keys(), key=lambda key: (-sizes[key], spans[key], str(key))):
        offsets[key] = packing.lowest(spans[key], sizes[key])
        packing.put(spans[key], offsets[key], sizes[key])
    return {**fixed.always, **fixed.shared, **offsets}, packing.end


def plan(ops: Sequence[Op], placement: Placement) -> tuple[tuple[tuple[str, int], ...], dict[object, int]]:
    """The peak of each tier in bytes, that of the host being the smallest slab's size, and the offsets in that slab."""
    ranges = live_ranges(ops, placement)
    offsets, host_nbytes = plan_offsets(ranges, ops, placement)
    tiers: tuple[Tier, Tier] = ("device", "ssd")
    device, ssd = (int(nbytes_alive(ranges, tier, len(ops)).max(initial=0)) for tier in tiers)
    return (("device", device), ("host", host_nbytes), ("ssd", ssd)), offsets


def packed(program: Program, placement: Placement, host_nbytes: int | None = None) -> Program:
    """The same in the slab in which it waits least, of `host_nbytes` at most, or of the bytes that it needs.

    What a transfer uses last is given on when the transfer has had some stages to end: the most of LAGS that fits.
    """
    ranges = live_ranges(program.ops, placement)
    for lag in LAGS:
        offsets, nbytes = plan_offsets(_prolonged(ranges, program.ops, lag), program.ops, placement)
        if host_nbytes is None or nbytes <= host_nbytes:
            break
    return replace(program, offsets=offsets, slab_nbytes=nbytes)


def _prolonged(ranges: Sequence[LiveRange], ops: Sequence[Op], lag: int) -> list[LiveRange]:
    """The ranges whose last user is a transfer or an update, to the start of the stage that comes `lag` after."""
    starts = [at for at, op in enumerate(ops) if at == 0 or op.stage != ops[at - 1].stage]
    found = []
    for live in ranges:
        user = live.last
        while user is not None and user > 0 and ops[user].verb == "free":
            user -= 1
        if lag and live.last is not None and user is not None and ops[user].lane not in ("compute", "memory"):
            at = bisect_right(starts, live.last) - 1 + lag
            live = replace(live, last=max(live.last, starts[at] if at < len(starts) else len(ops)))
        found.append(live)
    return found


def conflicts(ops: Sequence[Op], placement: Placement, offsets: Mapping[object, int]) -> Iterator[tuple[Value, Value]]:
    """Values that are alive together in memory that overlaps."""
    ranges = [r for r in live_ranges(ops, placement) if r.slot.tier == "host" and r.slot.nbytes]
    events = [(r.first, 1, r) for r in ranges] + [(r.last, 0, r) for r in ranges if r.last is not None]
    alive: Occupants[Value] = Occupants()
    for _, begins, each in sorted(events, key=lambda event: event[:2]):
        where = offsets[each.slot.key], rounded(each.slot.nbytes)
        others = alive.take(*where)
        if begins:
            yield from ((other, each.value) for other in others)
            alive.leave(*where, [each.value])


class _Packing:
    """Rectangles of time and offset that do not overlap."""

    def __init__(self, number: int, base: int) -> None:
        self.base = self.end = base
        self.number = 0
        self.first, self.last, self.offset, self.stop = np.zeros((4, number), dtype=np.int64)

    def put(self, spans: Sequence[tuple[int, int]], offset: int, nbytes: int) -> None:
        for first, last in spans:
            at, self.number = self.number, self.number + 1
            self.first[at], self.last[at], self.offset[at], self.stop[at] = first, last, offset, offset + nbytes
        self.end = max(self.end, offset + nbytes)

    def lowest(self, spans: Sequence[tuple[int, int]], nbytes: int) -> int:
        """The lowest offset from which so many bytes are free in all of these spans."""
        taken = slice(self.number)
        overlaps = np.zeros(self.number, dtype=bool)
        for first, last in spans:
            overlaps |= (self.first[taken] < last) & (self.last[taken] > first)
        offsets, stops = self.offset[taken][overlaps], self.stop[taken][overlaps]
        order = np.argsort(offsets, kind="stable")
        begins = np.maximum.accumulate(np.concatenate(([self.base], stops[order])))
        gaps = np.append(offsets[order], np.iinfo(np.int64).max) - begins
        return int(begins[np.argmax(gaps >= nbytes)])
