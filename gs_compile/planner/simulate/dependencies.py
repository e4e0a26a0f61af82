"""dependencies: which operations each operation waits for, read off the programs before anything has a time.

This is the executor's bookkeeping with numbers in place of tickets. An operation that reads a value waits for the
operation that made it; one that changes a value in place also for all that use it; memory verbs pass on what their
reads wait for. As a lane is first-in-first-out, the last operation of each lane stands for all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gs_compile.program.ir import LANES, Op, Program, Value

MEMORY = -1  # the lane of what happens in the issue loop itself
COMPUTE = LANES.index("compute")


class Row(NamedTuple):
    """An operation with numbers for its values. `lane` is a place in LANES, or MEMORY."""

    lane: int
    is_free: bool
    reads: tuple[int, ...]
    into: tuple[int, ...]
    results: tuple[int, ...]


class Dependencies(NamedTuple):
    """All operations of all programs in the order of issue; -1 stands for no operation."""

    ops: list[Op]
    rows: list[Row]
    values: list[Value]  # by number
    starts: list[int]  # the first operation of each program
    lanes: list[int]
    after: list[tuple[int, ...]]  # the operations of other lanes that each waits for
    users: list[tuple[int, ...]]  # of a `free`: the operations that may still use the value
    previous: list[int]  # the operation before on the same lane
    computed: list[int]  # the computation before, on whatever lane an operation is

    def program_of(self, index: int) -> int:
        """The number of the program that an operation is of."""
        return max(number for number, start in enumerate(self.starts) if start <= index)


def dependencies(programs: Sequence[Program]) -> Dependencies:
    """The dependencies of `programs`, each going on with what the one before has left."""
    found = Dependencies([], [], [], [], [], [], [], [], [])
    numbers: dict[Value, int] = {}
    rows: dict[int, list[Row]] = {}
    values = _ValueTable(found.lanes)
    last = [-1] * (len(LANES) + 1)
    for program in programs:
        found.starts.append(len(found.ops))
        if id(program) not in rows:
            rows[id(program)] = [_row(op, numbers) for op in program.ops]
        for op, row in zip(program.ops, rows[id(program)], strict=True):
            index, lane = len(found.ops), row.lane
            found.ops.append(op)
            found.rows.append(row)
            found.lanes.append(lane)
            found.previous.append(last[lane])
            found.computed.append(last[COMPUTE])
            found.after.append(() if lane == MEMORY else values.carry_out(index, row))
            found.users.append(values.remember(row) if lane == MEMORY else ())
            last[lane] = index
    found.values.extend(numbers)
    return found


def _row(op: Op, numbers: dict[Value, int]) -> Row:
    def numbered(values: tuple[Value, ...]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(value, len(numbers)) for value in values])

    lane = MEMORY if op.lane == "memory" else LANES.index(op.lane)
    return Row(lane, op.verb == "free", numbered(op.reads), numbered(op.into), numbered(op.results))


class _ValueTable:
    """The operation that made each value, and those that have used it since: the last of each lane."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes
        self.made: dict[int, tuple[int, ...]] = {}
        self.used: dict[int, tuple[int, ...]] = {}

    def carry_out(self, index: int, row: Row) -> tuple[int, ...]:
        """Enter an operation on a lane; the operations that it waits for."""
        made, used = self.made, self.used
        found: list[int] = []
        for value in row.reads:
            found += made.get(value, ())
        for value in row.into:
            found += (*made.get(value, ()), *used.get(value, ()))
        for value in row.reads:
            used[value] = self._latest((*used.get(value, ()), index))
        for value in (*row.results, *row.into):
            made[value] = (index,)
            used.pop(value, None)
        lanes, own = self.lanes, row.lane
        return self._latest([each for each in found if lanes[each] != own])

    def remember(self, row: Row) -> tuple[int, ...]:
        """Enter a memory verb; of a `free`, the operations that have to be done with the value."""
        if row.is_free:
            (value,) = row.reads
            return self._latest((*self.made.pop(value, ()), *self.used.pop(value, ())))
        ready = self._latest([each for value in row.reads for each in self.made.get(value, ())])
        for value in row.results:
            self.made[value] = ready
            self.used.pop(value, None)
        if row.into:  # places are exchanged: whoever comes for either waits for those who work on any of them
            every = [each for value in row.into for each in (*self.made.get(value, ()), *self.used.get(value, ()))]
            self.made.update(dict.fromkeys(row.into, self._latest((*ready, *every))))
        return ()

    def _latest(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The last of each lane."""
        if len(indices) < 2:
            return tuple(indices)
        found: dict[int, int] = {}
        for index in indices:
            lane = self.lanes[index]
            if found.get(lane, -1) < index:
                found[lane] = index
        return tuple(found.values())
