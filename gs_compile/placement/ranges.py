"""ranges: where values are in a slab, and who used that memory before, for the runtime and the simulator alike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from gs_compile.placement.kinds import Slot
from gs_compile.placement.liveness import Slots
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Program

User = TypeVar("User")


class Range(NamedTuple):
    """The memory of a slot in a slab, in bytes."""

    key: object
    offset: int
    nbytes: int


def range_of(slot: Slot, offsets: Mapping[object, int]) -> Range | None:
    """Where a slot is in host memory; None if it is elsewhere, takes no memory, or has no offset."""
    return Range(slot.key, offsets[slot.key], slot.nbytes) if slot.is_in_slab and slot.key in offsets else None


class ResultRange(NamedTuple):
    """Where a result is: the range of its slot, its offset in that, and whether no read of the operation is there."""

    where: Range | None
    offset: int
    is_new: bool


def result_ranges(program: Program, placement: Placement) -> list[list[ResultRange]]:
    """Where the results of each operation of a program are."""
    slots = Slots(placement)
    return [
        [ResultRange(range_of(slot, program.offsets), slot.offset, is_new) for slot, is_new in slots.made(op)]
        for op in program.ops
    ]


@dataclass
class _Alive(Generic[User]):
    former: Sequence[User]
    users: list[User] = field(default_factory=list)  # of values that have ended
    num_values: int = 0


class Ranges(Generic[User]):
    """The slots that are alive in a slab, and who has to be done with a range before it is written anew."""

    def __init__(self) -> None:
        self._alive: dict[object, _Alive[User]] = {}
        self._former: Occupants[User] = Occupants()

    def __bool__(self) -> bool:
        """Whether anything is alive."""
        return bool(self._alive)

    @property
    def users(self) -> list[User]:
        """Who may still use what has ended."""
        return self._former.users

    def begin(self, where: Range) -> list[User]:
        """One more value is in a slot. Returns who has to be done before it is written."""
        if where.key not in self._alive:
            self._alive[where.key] = _Alive(self._former.take(where.offset, where.nbytes))
        alive = self._alive[where.key]
        alive.num_values += 1
        return [*alive.former, *alive.users]

    def end(self, where: Range, users: Sequence[User]) -> None:
        """A value in a slot has ended, and `users` may still use it. They began after the former users of the range."""
        alive = self._alive[where.key]
        alive.num_values -= 1
        alive.users += users
        if not alive.num_values:
            del self._alive[where.key]
            self._former.leave(where.offset, where.nbytes, alive.users)


class Occupants(Generic[User]):
    """Who last used each range of the slab that is free: whoever takes it next waits for them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, Sequence[User]]] = []  # where each stops, and who used it

    @property
    def users(self) -> list[User]:
        return [user for _, users in self._ranges for user in users]

    def leave(self, offset: int, nbytes: int, users: Sequence[User]) -> None:
        """The range is free as soon as all of `users` are done."""
        if users and nbytes:
            self.take(offset, nbytes)
            at = bisect_left(self._starts, offset)
            self._starts.insert(at, offset)
            self._ranges.insert(at, (offset + nbytes, users))

    def take(self, offset: int, nbytes: int) -> list[User]:
        """Who has to be done with the range before it is used again."""
        stop = offset + nbytes
        low = max(bisect_right(self._starts, offset) - 1, 0)
        high = bisect_left(self._starts, stop)
        found: list[User] = []
        rest: list[tuple[int, int, Sequence[User]]] = []
        for start, (end, users) in zip(self._starts[low:high], self._ranges[low:high], strict=True):
            if end <= offset:
                rest.append((start, end, users))
                continue
            found += users
            rest += [(a, b, users) for a, b in ((start, min(end, offset)), (max(start, stop), end)) if a < b]
        self._starts[low:high] = [start for start, _, _ in rest]
        self._ranges[low:high] = [(end, users) for _, end, users in rest]
        return found
