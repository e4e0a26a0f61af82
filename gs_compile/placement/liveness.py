"""liveness: which memory is alive at which point of a program, counted once for all who ask.

A live range is the time of one slot (`kinds.Slot`) from the operation that defines its first value to the one that
frees its last. What is at home when a program begins lives from before its first operation (`BEFORE`), and what is at
home when it ends has no last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from gs_compile.errors import ProgramError
from gs_compile.placement.kinds import Slot, slot_of
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Tier, Value

BEFORE = -1  # in place of an operation: there before the first


@dataclass(slots=True)
class LiveRange:
    """One slot's memory from `first`, an operation or BEFORE, to `last`, the last of `frees`; None: to the end."""

    value: Value  # the first that is in it
    slot: Slot
    first: int
    frees: list[int] = field(default_factory=list)
    last: int | None = None


def slot_made(placement: Placement, op: Op, value: Value, slots: Mapping[Value, Slot]) -> Slot:
    """The memory of a result, `slots` being those of values so far: back from the host on a device that reads host
    memory itself, a value stays where it is.
    """
    renamed = op.verb == "alias" and op.reads[0].tier == "host"
    return slots[op.reads[0]] if renamed else slot_of(placement, value)


class Liveness:
    """The live ranges of operations that are given in order."""

    def __init__(self, placement: Placement, present: Iterable[Value] = ()) -> None:
        self.placement = placement
        self.ranges: list[LiveRange] = []
        self._slots: dict[Value, Slot] = {}
        self._alive: dict[object, tuple[LiveRange, set[Value]]] = {}
        for value in present:
            self._begin(value, slot_of(placement, value), BEFORE)

    def add(self, at: int, op: Op) -> None:
        """The operation number `at`."""
        for value in op.results:
            self._begin(value, slot_made(self.placement, op, value, self._slots), at)
        if op.verb == "free":
            self.end(op.reads[0], at)

    def _begin(self, value: Value, slot: Slot, at: int) -> None:
        if value in self._slots and self._slots[value].key != slot.key:
            self._leave(value)
        self._slots[value] = slot
        if slot.key not in self._alive:
            self.ranges.append(LiveRange(value, slot, at))
            self._alive[slot.key] = self.ranges[-1], set()
        self._alive[slot.key][1].add(value)

    def _leave(self, value: Value) -> None:
        alive = self._alive.get(self._slots[value].key)
        if alive is not None and value in alive[1]:
            raise ProgramError(f"{value} changes its memory while it is alive")

    def end(self, value: Value, at: int) -> None:
        """The value ends at operation `at`."""
        key = self._slots[value].key if value in self._slots else value
        if key in self._alive:
            live, values = self._alive[key]
            live.frees.append(at)
            values.discard(value)
            if not values:
                live.last = at
                del self._alive[key]


def live_ranges(ops: Sequence[Op], placement: Placement) -> list[LiveRange]:
    """The live ranges of one program, in the order of their first operations."""
    liveness = Liveness(placement, sorted(placement.present(ops), key=str))
    for at, op in enumerate(ops):
        liveness.add(at, op)
    return liveness.ranges


def nbytes_alive(ranges: Iterable[LiveRange], tier: Tier, num_ops: int) -> NDArray[np.int64]:
    """The bytes alive on a tier after each operation."""
    changes = np.zeros(num_ops + 1, dtype=np.int64)
    for live in ranges:
        if live.slot.tier == tier:
            changes[max(live.first, 0)] += live.slot.nbytes
            changes[num_ops if live.last is None else live.last] -= live.slot.nbytes
    return np.cumsum(changes)[:-1]


def peaks(ops: Sequence[Op], placement: Placement) -> dict[str, int]:
    """By tier, the most bytes alive at a time; a slab of host memory may have gaps between them."""
    ranges = live_ranges(ops, placement)
    return {tier: int(nbytes_alive(ranges, tier, len(ops)).max(initial=0)) for tier in get_args(Tier)}
