"""liveness: which memory is alive at which point of a program, counted once for all who ask.

A live range is the time of one slot (`kinds.Slot`) from the operation that defines its first value to the one that
frees its last. What is at home when a program begins lives from before its first operation (`BEFORE`), and what is at
home when it ends has no last one. Memory on SSD is a file, which is made before a step and stays: all values that a
step has there live all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gs_compile.errors import ProgramError
from gs_compile.placement.kinds import Slot, slot_of
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Tier, Value

Numbers = NDArray[np.int64]
BEFORE = -1  # in place of an operation: there before the first


@dataclass(slots=True)
class LiveRange:
    """One slot's memory from `first`, an operation or BEFORE, to `last`, the last of `frees`; None: to the end."""

    value: Value  # the first that is in it
    slot: Slot
    first: int
    frees: list[int] = field(default_factory=list)
    last: int | None = None


class Slots:
    """The slot of each value, as the operations of a program come in their order."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._made: dict[Value, Slot] = {}

    def of(self, value: Value) -> Slot:
        """The memory of a value: that it was made in, or is at home in."""
        return self._made.get(value) or slot_of(self._placement, value)

    def made(self, op: Op) -> list[tuple[Slot, bool]]:
        """The memory of each result, and whether none of the operation's reads was made in it."""
        sources = {slot.key for slot in map(self._made.get, op.reads) if slot} if op.results else set()
        return [(slot, slot.key not in sources) for slot in self.of_results(op)]

    def of_results(self, op: Op) -> list[Slot]:
        """The memory of each result.

        Back from the host on a device that reads host memory itself, a value stays where it is.
        """
        stays = op.verb == "alias" and op.reads[0].tier == "host"
        slots = [self.of(op.reads[0]) if stays else slot_of(self._placement, value) for value in op.results]
        self._made.update(zip(op.results, slots, strict=True))
        return slots


def live_ranges(ops: Sequence[Op], placement: Placement) -> list[LiveRange]:
    """The live ranges of one program, or of several in a row, in the order in which they come to be used.

    Raises ProgramError where a value changes its memory while it is alive.
    """
    slots = Slots(placement)
    ranges: list[LiveRange] = []
    alive: dict[object, tuple[LiveRange, set[Value]]] = {}
    keys: dict[Value, object] = {}  # of the slots that values which are alive are in

    def begin(value: Value, slot: Slot, at: int) -> None:
        key = slot.key
        if keys.setdefault(value, key) != key:
            raise ProgramError(f"{value} changes its memory while it is alive")
        if (there := alive.get(key)) is None:
            ranges.append(LiveRange(value, slot, BEFORE if slot.tier == "ssd" else at))
            alive[key] = ranges[-1], {value}
        else:
            there[1].add(value)

    for value in sorted(placement.present(ops), key=str):
        begin(value, slots.of(value), BEFORE)
    for at, op in enumerate(ops):
        if op.results:
            for value, slot in zip(op.results, slots.of_results(op), strict=True):
                begin(value, slot, at)
        if op.verb == "free" and op.reads[0] in keys:
            live, values = alive[keys.pop(op.reads[0])]
            live.frees.append(at)
            values.discard(op.reads[0])
            if not values and live.slot.tier != "ssd":
                live.last = at
                del alive[live.slot.key]
    return ranges


def nbytes_alive(ranges: Iterable[LiveRange], tier: Tier, num_ops: int) -> Numbers:
    """The bytes alive on a tier after each operation."""
    return summed(*spans_of([live for live in ranges if live.slot.tier == tier], num_ops), num_ops)


def spans_of(ranges: Sequence[LiveRange], num_ops: int) -> tuple[Numbers, Numbers, Numbers]:
    """Where each begins and ends, and its bytes."""
    rows = [(live.first, num_ops if live.last is None else live.last, live.slot.nbytes) for live in ranges]
    first, last, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return first, last, nbytes


def summed(first: Numbers, last: Numbers, nbytes: Numbers, num_ops: int) -> Numbers:
    """The bytes alive after each operation, of what begins and ends there."""
    changes = np.zeros(num_ops + 1, dtype=np.int64)
    np.add.at(changes, first.clip(0), nbytes)
    np.subtract.at(changes, last, nbytes)
    alive: Numbers = np.cumsum(changes)[:-1]
    return alive


def peak(ranges: Iterable[LiveRange], tier: Tier, num_ops: int) -> int:
    """The most bytes alive on a tier at a time; a slab of host memory may have gaps between them."""
    return int(nbytes_alive(ranges, tier, num_ops).max(initial=0))
