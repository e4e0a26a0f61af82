"""dependencies: which operations each operation waits for: it follows from the programs, without any times.

This is the executor's bookkeeping with numbers in place of tickets. An operation that reads a value waits for the
operation that made it. One that changes a value in place also waits for all that use it (`placement.users`). One that
writes a new value into host memory also waits for the users of what the plan had there before. What comes to the device
waits for the computation before, which has used memory there. Memory verbs pass on what they would wait for; the one
that copies a checkpoint waits itself. A lane is first-in-first-out, so its last operation stands for all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gs_compile.placement.kinds import slot_of
from gs_compile.placement.liveness import Slots
from gs_compile.placement.placement import Placement
from gs_compile.placement.ranges import Range, Ranges, range_of
from gs_compile.placement.users import Users
from gs_compile.program.ir import LANES, Op, Program, Value

MEMORY = -1  # the lane of operations that the issue loop itself runs
COMPUTE = LANES.index("compute")
BEHIND_COMPUTE = frozenset(map(LANES.index, ("h2d", "net")))  # lanes that write memory of the device
LANE = {"memory": MEMORY} | {name: place for place, name in enumerate(LANES)}


class NumberedOp(NamedTuple):
    """An operation with numbers for its values. `lane` is a place in LANES, or MEMORY.

    begins: where its results are in host memory; True: none of its reads is in the same memory.
    ends: of a `free`, where its value was.
    """

    lane: int
    verb: str
    reads: tuple[int, ...]
    changes: tuple[int, ...]
    results: tuple[int, ...]
    begins: tuple[tuple[Range, bool], ...]
    ends: Range | None


class Dependencies(NamedTuple):
    """All operations of all programs in the order of issue; -1 stands for no operation."""

    ops: list[Op]
    starts: list[int]  # the first operation of each program
    lanes: list[int]
    after: list[Sequence[int]]  # the operations of other lanes that each waits for
    users: list[Sequence[int]]  # of the value that a `free` ends, or of what was in the memory of new results before
    previous: list[int]  # the operation before on the same lane
    computed: list[int]  # the computation before, on whatever lane an operation is


def dependencies(programs: Sequence[Program], placement: Placement) -> Dependencies:
    """The dependencies of consecutive `programs`; also those by shared host memory, if the programs have offsets."""
    found = Dependencies([], [], [], [], [], [], [])
    numbers: dict[Value, int] = {}
    rows: dict[int, list[NumberedOp]] = {}
    waits = _Waits(found.lanes)
    last = [-1] * (len(LANES) + 1)
    slots_before = (slot_of(placement, value) for value in placement.present(programs[0].ops))
    for where in filter(None, (range_of(slot, programs[0].offsets) for slot in slots_before)):
        waits.memory.begin(where)
    for program in programs:
        found.starts.append(len(found.ops))
        if id(program) not in rows:
            rows[id(program)] = _rows(program, numbers, Slots(placement) if program.offsets else None)
        for op, row in zip(program.ops, rows[id(program)], strict=True):
            index, lane = len(found.ops), row.lane
            found.ops.append(op)
            found.lanes.append(lane)
            found.previous.append(last[lane])
            found.computed.append(last[COMPUTE])
            found.users.append(waits.free(row) if row.verb == "free" else waits.begin(row))
            former = [*found.users[-1], *([last[COMPUTE]] if lane in BEHIND_COMPUTE and last[COMPUTE] >= 0 else ())]
            found.after.append(() if row.verb == "free" else waits.enter(index, row, former))
            last[lane] = index
    return found


def _rows(program: Program, numbers: dict[Value, int], slots: Slots | None) -> list[NumberedOp]:
    offsets, rows = program.offsets, list[NumberedOp]()

    def numbered(values: tuple[Value, ...]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(value, len(numbers)) for value in values]) if values else ()

    for op in program.ops:
        made = [(range_of(slot, offsets), is_new) for slot, is_new in slots.made(op)] if slots and op.results else ()
        begins = tuple([(where, is_new) for where, is_new in made if where])
        ends = range_of(slots.of(op.reads[0]), offsets) if slots and op.verb == "free" else None
        rows.append(
            NumberedOp(
                LANE[op.lane], op.verb, numbered(op.reads), numbered(op.changes), numbered(op.results), begins, ends
            )
        )
    return rows


class _Waits:
    """Who waits for whom so far; of the users of a value, the last on each lane stands for all."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes
        self.values: Users[int, int] = Users(self._latest)
        self.memory: Ranges[int] = Ranges()

    def begin(self, row: NumberedOp) -> Sequence[int]:
        """Note an operation, and return the users of what was in the memory of its results before."""
        if not row.begins:
            return ()
        users = [user for where, is_new in row.begins for user in self.memory.begin(where) if is_new]
        return self._latest(users)

    def enter(self, index: int, row: NumberedOp, former: Sequence[int]) -> Sequence[int]:
        """Enter an operation, and return the operations of other lanes that it waits for."""
        if row.lane == MEMORY:
            return self._remember(row, former)
        lanes, own, values = self.lanes, row.lane, self.values
        found = [*former, *values.awaited(row.reads, row.changes)]
        for value in row.reads:
            values.use(value, index)
        for value in (*row.results, *row.changes):
            values.change(value, index)
        return self._latest([each for each in found if lanes[each] != own])

    def _remember(self, row: NumberedOp, former: Sequence[int]) -> Sequence[int]:
        held = former if row.verb == "alias" else ()
        ready = self._latest([*former, *self.values.awaited(row.reads, ())])
        for value in row.results:
            self.values.define(value, ready)
        if row.changes:  # values are exchanged: later users of any of them wait for the users of all
            every = self._latest([*ready, *self.values.awaited((), row.changes)])
            for value in row.changes:
                self.values.define(value, every)
        return held

    def free(self, row: NumberedOp) -> Sequence[int]:
        """The operations that may still use a value that ends."""
        (value,) = row.reads
        users = self.values.free(value)
        if row.ends is not None:
            self.memory.end(row.ends, users)
        return users

    def _latest(self, indices: Sequence[int]) -> Sequence[int]:
        """The last operation of each lane."""
        if len(indices) < 2:
            return indices
        by_lane: dict[int, int] = {}
        for index in indices:
            lane = self.lanes[index]
            if by_lane.get(lane, -1) < index:
                by_lane[lane] = index
        return tuple(by_lane.values())
