"""slab: where every value in host memory is: its offset in the one block that a run has there.

The program is static, so nothing is allocated while a step runs. What lives on from step to step has the same offset in
every program of a run. Everything else is packed around it, by the time for which it is alive in its program:

    0                 fixed                                    transient
    | states, parameters | late parameters > < late gradients | transfers, checkpoints, gradients ...   |

A late parameter is stale between its last use and its update, and its gradient waits meanwhile (paper, section 4.3).
Units are updated in the order of the forward and used last in the opposite one, so one region serves both: up to some
unit the parameters are alive, from there on the gradients.

All offsets are multiples of a page, which direct I/O requires. The plan states the smallest slab as needed. An
operation that writes to a range waits for those that still use its former contents. So if the budget has room, memory
that a transfer used last is not reused before other transfers have moved some bytes, maybe in the next step (`packed`).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from gs_compile.placement.cut import stages_after_first
from gs_compile.placement.device_memory import bounded
from gs_compile.placement.kinds import Slot, slot_of
from gs_compile.placement.liveness import LiveRange, Numbers, live_ranges, peak, spans_of, summed
from gs_compile.placement.placement import Placement
from gs_compile.placement.ranges import Occupants
from gs_compile.placement.traffic import op_nbytes
from gs_compile.program.ir import TIED, Op, Program, Value, height
from gs_compile.program.verbs import NORMS

PAGE_NBYTES = 4096  # what direct I/O asks of addresses, offsets and lengths; no drive asks for more
EVER = -(1 << 30), 1 << 30  # a span that overlaps all others
LONGEST_LAG = 3 / 10  # of the bytes that a step moves: with more, no simulated step waited clearly less
BLOCK = 1 << 15  # operations: a longer program is packed in several blocks of time, each searched alone
NUM_LAGS = 96  # that are tried: with a hundred layers, the least is about what one layer moves

Spans = Sequence[tuple[int, int]]  # of time: from the first to before the second


class FixedOffsets(NamedTuple):
    """The offsets of what lives on, by slot: in the region that is in use all the time (`always`), or in the one that
    late parameters and gradients share.
    """

    always: Mapping[object, int]
    shared: Mapping[object, int]
    always_nbytes: int
    nbytes: int


def rounded(nbytes: int) -> int:
    """Whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def fixed_offsets(placement: Placement) -> FixedOffsets:
    """The offsets that all programs of a placement have in common, whatever the size of their batches.

    What one step carries into the next shares its memory with nothing that lives on: programs of a run differ in the
    times for which it is in memory.
    """
    late = sorted(_late(placement), key=lambda each: -len(each[1]))  # gradients, then parameters from below
    carried = [(slot_of(placement, value), (EVER,)) for value in sorted(placement.carried_values, key=str)]
    shared = {slot.key: (rounded(slot.nbytes), spans) for slot, spans in (*late, *carried)}
    always: dict[object, int] = {}
    end = 0
    for value in sorted(placement.homes(late=True) | placement.homes(late=False), key=str):
        slot = slot_of(placement, value)
        if slot.is_in_slab and slot.key not in shared and slot.key not in always:
            always[slot.key] = end
            end += rounded(slot.nbytes)
    packing = _Packing(end)
    offsets = packing.fill(shared)
    return FixedOffsets(always, offsets, end, max(packing.end, placement.layout.home_nbytes))


def _late(placement: Placement) -> Iterator[tuple[Slot, Spans]]:
    """The times for which parameters that are stale until their late update, and gradients that wait for it, are in
    memory.

    Times are stages of a step with n units: up from 0, and down to 2 n. The last group of a unit is updated in the
    unit's stage, the others in the stages before it. Tied parameters are updated when the first unit needs them,
    wherever that is: they are in memory all the time, and their gradients count as if they were. Sums over several
    backwards are.
    """
    if placement.accumulates:
        return
    units, updates = sorted(placement.units, key=lambda unit: height(unit.unit)), placement.decision.layer_updates
    for number, unit in enumerate(units):
        down = 2 * len(units) - number
        groups = unit.trained(*placement.waiting(redo=True))
        last = stages_after_first(len(groups) - 1, updates)
        for place, group in enumerate(groups):
            up = number if placement.keeps_gradient(unit) else number + stages_after_first(place, updates) - last
            is_tied = unit.unit == TIED
            gradient = slot_of(placement, unit.gradient(group))
            yield gradient, (EVER,) if is_tied else ((EVER[0], up + 1), (down, EVER[1]))
            for part in group.w if group.when == "late" and not is_tied else ():
                if placement.reclaims(unit, part):
                    yield slot_of(placement, unit.value("w", part)), ((up, down),)


def plan_offsets(ranges: Sequence[LiveRange], ops: Sequence[Op], placement: Placement) -> tuple[dict[object, int], int]:
    """The offset of each slot in host memory that a program uses, and the bytes of the slab.

    The largest is packed first: that is deterministic, and close to the most bytes that are alive at a time. What lives
    on and what lives in one step are two blocks: nothing crosses the end of the first. A program that updates nothing
    has all of its own behind that end, as it may run while a step is open.
    """
    fixed = fixed_offsets(placement)
    updates = any(op.verb in NORMS or op.verb == "update" for op in ops)
    carried = {slot_of(placement, value).key for value in placement.carried_values if not updates}
    shared = {key: offset for key, offset in fixed.shared.items() if key not in carried}
    wanted: dict[object, tuple[int, list[tuple[int, int]]]] = {}
    for live in ranges:
        key = live.slot.key
        if live.slot.is_in_slab and key not in fixed.always:
            span = live.first, len(ops) if live.last is None else live.last
            wanted.setdefault(key, (rounded(live.slot.nbytes), []))[1].append(span)
    packing = _Packing(fixed.always_nbytes if updates else fixed.nbytes, len(ops))
    packing.put((EVER,), fixed.nbytes, 0)
    for key in wanted.keys() & shared.keys():
        nbytes, spans = wanted.pop(key)
        packing.put(spans, shared[key], nbytes)
    largest = sorted(wanted.items(), key=lambda each: (-each[1][0], each[1][1], str(each[0])))
    return {**fixed.always, **shared, **packing.fill(dict(largest))}, packing.end


def planned_memory(ops: Sequence[Op], placement: Placement) -> tuple[tuple[tuple[str, int], ...], dict[object, int]]:
    """The peak of each tier in bytes (of the host: the size of the smallest slab), and the offsets in that slab."""
    ranges = live_ranges(ops, placement)
    offsets, host_nbytes = plan_offsets(ranges, ops, placement)
    device, ssd = peak(ranges, "device", len(ops)), peak(ranges, "ssd", len(ops))
    return (("device", device), ("host", host_nbytes), ("ssd", ssd)), offsets


def packed(
    program: Program, placement: Placement, host_nbytes: int | None = None, device_nbytes: int | None = None
) -> Program:
    """A program as `free` leaves it, in the slab of at most `host_nbytes` in which it waits least.

    Memory that a transfer used last is reused only after others have moved some bytes: as many as there is room for, up
    to LONGEST_LAG. On the device a step waits for room within `device_nbytes`. None: that memory has no bound.
    """
    ops, ranges = program.ops, live_ranges(program.ops, placement)
    if device_nbytes is not None:
        program = replace(program, device=bounded(ranges, program, device_nbytes))
    most = math.inf if host_nbytes is None else host_nbytes
    lagging = _Lagging(ranges, ops, placement)
    number = bisect_right(range(1, NUM_LAGS + 1), most, key=lagging.peak)
    while number:
        offsets, nbytes = plan_offsets(list(lagging.ranges(number)), ops, placement)
        if nbytes <= most:
            return replace(program, offsets=offsets, slab_nbytes=nbytes)
        number -= number // 4 or 1
    return program


def placed_as(program: Program, other: Program, placement: Placement) -> Program:
    """A program at the offsets of another one of the same placement, if it can have them; otherwise unchanged."""
    slots = (live.slot for live in live_ranges(program.ops, placement))
    known = all(slot.key in other.offsets for slot in slots if slot.is_in_slab)
    if not known or any(conflicts(program.ops, placement, other.offsets)):
        return program
    return replace(program, offsets=other.offsets, slab_nbytes=other.slab_nbytes)


class _Lagging:
    """The live ranges in the slab, those that a transfer or an update used last being longer: until others have moved a
    number of lags. If that is in the next step, such a range also takes the start of this one.
    """

    def __init__(self, ranges: Sequence[LiveRange], ops: Sequence[Op], placement: Placement) -> None:
        self.all, self.num_ops = [live for live in ranges if live.slot.is_in_slab], len(ops)
        self.first, self.last, self.nbytes = spans_of(self.all, self.num_ops)
        self.lags = np.array([_is_left_by_a_lane(live, ops) for live in self.all], dtype=bool)
        self.moved = np.cumsum([0, *(op_nbytes(op, placement) if _is_on_a_lane(op) else 0 for op in ops)])

    def peak(self, number: int) -> int:
        """The most bytes alive at a time."""
        ends, again = self._ends(number)
        first, last = np.hstack((self.first, np.zeros_like(again))), np.hstack((ends, again))
        return int(summed(first, last, np.tile(self.nbytes, 2), self.num_ops).max(initial=0))

    def ranges(self, number: int) -> Iterator[LiveRange]:
        """Each live range, and what it takes of the start of the step."""
        for live, last, again in zip(self.all, *(each.tolist() for each in self._ends(number)), strict=True):
            yield live if live.last is None else replace(live, last=last)
            if again:
                yield replace(live, first=0, last=again)

    def _ends(self, number: int) -> tuple[Numbers, Numbers]:
        """Where each ends, in this step and in the next one."""
        until = self.moved[self.last] + int(self.moved[-1] * LONGEST_LAG) * number // NUM_LAGS
        ends = np.maximum(self.last, self.moved.searchsorted(until).clip(max=self.num_ops))
        again = np.minimum(self.moved.searchsorted(until - self.moved[-1]), self.first).clip(0)
        return np.where(self.lags, ends, self.last), np.where(self.lags, again, 0)


def _is_left_by_a_lane(live: LiveRange, ops: Sequence[Op]) -> bool:
    """Whether the last user of a range is a transfer or an update."""
    user = live.last
    while user and ops[user].verb == "free":
        user -= 1
    return user is not None and _is_on_a_lane(ops[user])


def _is_on_a_lane(op: Op) -> bool:
    return op.lane not in ("compute", "memory")


def conflicts(ops: Sequence[Op], placement: Placement, offsets: Mapping[object, int]) -> Iterator[tuple[Value, Value]]:
    """Values that are alive together in memory that overlaps."""
    ranges = [each for each in live_ranges(ops, placement) if each.slot.is_in_slab]
    events = [(r.first, 1, r) for r in ranges] + [(r.last, 0, r) for r in ranges if r.last is not None]
    alive: Occupants[Value] = Occupants()
    for _, begins, each in sorted(events, key=lambda event: event[:2]):
        where = offsets[each.slot.key], rounded(each.slot.nbytes)
        others = alive.take(*where)
        if begins:
            yield from ((other, each.value) for other in others)
            alive.leave(*where, [each.value])


class _Packing:
    """Rectangles of time and offset that do not overlap, from the offset `base` on, by blocks of time."""

    def __init__(self, base: int, num_ops: int = 0) -> None:
        self.base = self.end = base
        self.blocks = [_Block() for _ in range(num_ops // BLOCK + 1)]

    def fill(self, wanted: Mapping[object, tuple[int, Spans]]) -> dict[object, int]:
        """Pack these in their order, each at the lowest offset that is free in all its spans. Returns the offsets."""
        offsets = {}
        for key, (nbytes, spans) in wanted.items():
            offsets[key] = self._lowest(spans, nbytes)
            self.put(spans, offsets[key], nbytes)
        return offsets

    def put(self, spans: Spans, offset: int, nbytes: int) -> None:
        for first, last in spans:
            for block in self._blocks(first, last):
                block.put(first, last, offset, offset + nbytes)
        self.end = max(self.end, offset + nbytes)

    def _blocks(self, first: int, last: int) -> list[_Block]:
        low, high = (min(max(at, 0) // BLOCK, len(self.blocks) - 1) for at in (first, last))
        return self.blocks[low : high + 1]

    def _lowest(self, spans: Spans, nbytes: int) -> int:
        """The lowest offset from which `nbytes` are free in all of these spans."""
        within = defaultdict[_Block, list[tuple[int, int]]](list)
        for span in spans:
            for block in self._blocks(*span):
                within[block].append(span)
        offsets, stops = _together([block.during(each) for block, each in within.items()])
        free = np.full(len(stops) + 1, self.base)  # from where on
        np.maximum.accumulate(stops, out=free[1:])
        np.maximum(free, self.base, out=free)
        large = (offsets - free[:-1] >= nbytes).nonzero()[0]
        return int(free[large[0] if large.size else -1])


class _Block:
    """The rectangles of some time, by offset: first, last, offset, stop."""

    def __init__(self) -> None:
        self.number = 0
        self.taken = np.zeros((4, 64), dtype=np.int64)  # more columns than are in use

    def put(self, *rectangle: int) -> None:
        if self.number == self.taken.shape[1]:
            self.taken = np.hstack((self.taken, np.zeros_like(self.taken)))
        at = self.taken[2, : self.number].searchsorted(rectangle[2])
        self.taken[:, at + 1 : self.number + 1] = self.taken[:, at : self.number]
        self.taken[:, at] = rectangle
        self.number += 1

    def during(self, spans: Spans) -> Numbers:
        """Offset and stop of the rectangles that are alive in any of these spans, by offset."""
        first, last = self.taken[:2, : self.number]
        alive = reduce(operator.or_, ((first < end) & (last > begin) for begin, end in spans))
        return self.taken[2:, alive.nonzero()[0]]


def _together(found: Sequence[Numbers]) -> Numbers:
    """The rectangles of several blocks, by offset; one that is in two blocks is there twice."""
    if len(found) == 1:
        return found[0]
    every = np.hstack(found)
    return every[:, every[0].argsort(kind="stable")]  # quick where parts of it are in order
