"""waits: who waits for whom when programs run one after the other, read off them before anything has a time.

This is the executor's bookkeeping (`tiered`, `tiers.Board`) with numbers in place of tickets. An operation that reads a
value waits for who made it; one that changes a value in place also for all who use it; memory verbs pass on what their
reads wait for. As a lane is first-in-first-out, the last operation of each lane stands for all before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gs_compile.program.ir import LANES, Op, Program, Value

MEMORY = -1  # the lane of what happens on the walk itself
COMPUTE = LANES.index("compute")


class Waits(NamedTuple):
    """All operations of all programs in the order of issue. Lanes are places in LANES, or MEMORY."""

    ops: list[Op]
    starts: list[int]  # of each program: its first operation
    lanes: list[int]
    after: list[tuple[int, ...]]  # the operations of other lanes that each waits for
    users: list[tuple[int, ...]]  # of a `free`: who works on the value still, as far as the order of issue tells
    previous: list[int]  # on the same lane; -1 without one
    computed: list[int]  # the computation before, on whatever lane an operation is; -1 without one


def waits(programs: Sequence[Program]) -> Waits:
    """The waits of `programs`, each going on with what the one before has left."""
    found = Waits([], [], [], [], [], [], [])
    numbers: dict[Value, int] = {}
    rows: dict[int, list[_Row]] = {}
    board = _Board(found.lanes)
    last = [-1] * (len(LANES) + 1)
    for program in programs:
        found.starts.append(len(found.ops))
        if id(program) not in rows:
            rows[id(program)] = [_row(op, numbers) for op in program.ops]
        for op, row in zip(program.ops, rows[id(program)], strict=True):
            index = len(found.ops)
            found.ops.append(op)
            found.lanes.append(row.lane)
            found.previous.append(last[row.lane])
            found.computed.append(last[COMPUTE])
            found.after.append(() if row.lane == MEMORY else board.carry_out(index, row))
            found.users.append(board.remember(row) if row.lane == MEMORY else ())
            last[row.lane] = index
    return found


class _Row(NamedTuple):
    """An operation with numbers for its values."""

    lane: int
    is_free: bool
    reads: tuple[int, ...]
    into: tuple[int, ...]
    results: tuple[int, ...]


def _row(op: Op, numbers: dict[Value, int]) -> _Row:
    def numbered(values: tuple[Value, ...]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(value, len(numbers)) for value in values)

    lane = MEMORY if op.lane == "memory" else LANES.index(op.lane)
    return _Row(lane, op.verb == "free", numbered(op.reads), numbered(op.into), numbered(op.results))


class _Board:
    """Who made each value, and who has used it since."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes
        self.made: dict[int, tuple[int, ...]] = {}
        self.used: dict[int, tuple[int, ...]] = {}

    def carry_out(self, index: int, row: _Row) -> tuple[int, ...]:
        """Enter an operation on a lane; who it waits for."""
        made, used = self.made, self.used
        found = [each for value in row.reads for each in made.get(value, ())]
        for value in row.into:
            found += (*made.get(value, ()), *used.get(value, ()))
        for value in row.reads:
            used[value] = self._latest((*used.get(value, ()), index))
        for value in (*row.results, *row.into):
            made[value] = (index,)
            used.pop(value, None)
        return tuple(each for each in self._latest(found) if self.lanes[each] != row.lane)

    def remember(self, row: _Row) -> tuple[int, ...]:
        """Enter a memory verb; of a `free`, who has to be done with the value."""
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
        return tuple(indices) if len(indices) < 2 else tuple(_latest_by_lane(indices, self.lanes))


def _latest_by_lane(indices: Iterable[int], lanes: list[int]) -> Iterable[int]:
    found: dict[int, int] = {}
    for index in indices:
        if found.get(lanes[index], -1) < index:
            found[lanes[index]] = index
    return found.values()
