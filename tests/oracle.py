"""The rule of the lanes once more, as processes of simpy: what the simulator's times are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from gs_compile.placement.kinds import slot_of
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import LANES, Op, Program, Value


@dataclass
class Oracle:
    """Programs in a row: when each operation starts and stops, and when each program is over (`steps`)."""

    programs: Sequence[Program]
    seconds: Sequence[Sequence[float]]
    inline: bool
    op_seconds: float
    placement: Placement | None = None
    host_nbytes: int | None = None
    started: list[dict[int, float]] = field(default_factory=list)
    stopped: list[dict[int, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def run(self) -> Oracle:
        self.env = simpy.Environment()
        self.ready: dict[Value, Any] = {}
        self.users: dict[Value, list[Any]] = {}
        self.alive: dict[object, tuple[set[Value], list[Any]]] = {}
        if self.host_nbytes is not None:
            nbytes = max(self.host_nbytes, 1)  # simpy has no container for nothing
            self.host = simpy.Container(self.env, nbytes, nbytes)
            late = any(value.kind == "dw" for value in _inputs(self.programs[0]))
            taken = sum(self._begin(value) for value in self.placement.homes(late=late))
            if taken:
                self.host.get(taken)
        self.lanes = {lane: simpy.Store(self.env) for lane in LANES}
        for store in self.lanes.values():
            self.env.process(self._lane(store))
        self.env.process(self._walk())
        self.env.run()
        return self

    def _lane(self, store: Any) -> Iterator[Any]:
        while True:
            after, seconds, begun, over = yield store.get()
            yield self.env.all_of(after)
            begun.succeed()
            yield self.env.timeout(seconds)
            over.succeed()

    def _walk(self) -> Iterator[Any]:
        begun = over = self.env.timeout(0)  # of the computation before
        for program, seconds in zip(self.programs, self.seconds, strict=True):
            self.started.append({})
            self.stopped.append({})
            for index, op in enumerate(program.ops):
                if self.inline:
                    yield over
                elif op.lane == "compute":
                    yield begun
                yield self.env.timeout(self.op_seconds)
                if self.host_nbytes is not None:
                    nbytes = sum(self._begin(value) for value in op.results)
                    if nbytes:
                        yield self.host.get(nbytes)
                if op.lane == "memory":
                    self._remember(op)
                    yield self.env.timeout(seconds[index])
                else:
                    one = self._submit(op, index, seconds[index])
                    if op.lane == "compute":
                        begun, over = one
            self.env.process(self._over(over, len(self.steps)))
            self.steps.append(self.env.now)

    def _over(self, over: Any, number: int) -> Iterator[Any]:
        yield over
        self.steps[number] = max(self.env.now, self.steps[number])

    def _submit(self, op: Op, index: int, seconds: float) -> tuple[Any, Any]:
        after = [self.ready[value] for value in (*op.reads, *op.into) if value in self.ready]
        after += [user for value in op.into for user in self.users.get(value, ())]
        begun, over = self.env.event(), self.env.event()
        started, stopped = self.started[-1], self.stopped[-1]
        begun.callbacks.append(lambda _: started.__setitem__(index, self.env.now))
        over.callbacks.append(lambda _: stopped.__setitem__(index, self.env.now))
        self.lanes[op.lane].put((after, seconds, begun, over))
        for value in op.reads:
            self.users.setdefault(value, []).append(over)
        for value in (*op.results, *op.into):
            self.ready[value] = over
            self.users[value] = []
        return begun, over

    def _remember(self, op: Op) -> None:
        events = [self.ready[value] for value in op.reads if value in self.ready]
        if op.verb == "free":
            (value,) = op.reads
            if self.host_nbytes is not None:
                self._end(value, [*events, *self.users.get(value, ())])
            self.ready.pop(value, None)
            self.users.pop(value, None)
        for value in op.results:
            self.ready[value] = self.env.all_of(events)
            self.users[value] = []

    # Host memory -----------------------------------------------------------------------------------------------------

    def _begin(self, value: Value) -> int:
        """Bytes of host memory that a value takes: none if another of its slot is there."""
        slot, _, nbytes, _ = slot_of(self.placement, value)
        values, _ = self.alive.setdefault(slot, (set(), []))
        values.add(value)
        return nbytes if len(values) == 1 and self._in_host(value) else 0

    def _end(self, value: Value, users: list[Any]) -> None:
        slot, _, nbytes, _ = slot_of(self.placement, value)
        values, all_users = self.alive.get(slot, ({value}, []))
        values.discard(value)
        all_users += users
        if not values and slot in self.alive:
            del self.alive[slot]
            if nbytes and self._in_host(value):
                self.env.process(self._give_back(all_users, nbytes))

    def _give_back(self, users: list[Any], nbytes: int) -> Iterator[Any]:
        yield self.env.all_of(users)
        self.host.put(nbytes)

    def _in_host(self, value: Value) -> bool:
        in_place = not self.placement.separate and value.kind in ("w", "dw") and value.tier == "device"
        return value.tier == "host" or in_place


def _inputs(program: Program) -> set[Value]:
    """What is read before it is defined."""
    found, defined = set(), set()
    for op in program.ops:
        found |= {value for value in op.reads if value not in defined}
        defined |= set(op.results)
    return found
