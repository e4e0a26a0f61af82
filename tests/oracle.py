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
    placement: Placement
    started: list[dict[int, float]] = field(default_factory=list)
    stopped: list[dict[int, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def run(self) -> Oracle:
        self.env = simpy.Environment()
        self.ready: dict[Value, Any] = {}
        self.users: dict[Value, list[Any]] = {}
        self.slots: dict[Value, Any] = {}
        self.computations: set[Any] = set()  # when each is over
        self.ended: list[tuple[int, int, list[Any]]] = []  # ranges of the slab that were left, and who used them
        self.alive: dict[
            object, tuple[int, set[Value], list[Any]]
        ] = {}  # on the device: bytes, values, users of others
        self.leaving: list[tuple[int, list[Any]]] = []  # from there: bytes, and who still uses them
        for value in self.placement.present(self.programs[0].ops):
            self._take(value)
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
            self.offsets = program.offsets
            for index, op in enumerate(program.ops):
                if self.inline:
                    yield over
                elif op.lane == "compute":
                    yield begun
                yield self.env.timeout(self.op_seconds)
                yield from self._make_room(program, op)
                former = self._former(op) + [over] * (op.lane in ("h2d", "net"))
                if op.verb == "alias":
                    yield self.env.all_of(former)
                if op.lane == "memory":
                    self._remember(op, former)
                    yield self.env.timeout(seconds[index])
                else:
                    one = self._submit(op, index, seconds[index], former)
                    if op.lane == "compute":
                        begun, over = one
            self.env.process(self._over(over, len(self.steps)))
            self.steps.append(self.env.now)

    def _over(self, over: Any, number: int) -> Iterator[Any]:
        yield over
        self.steps[number] = max(self.env.now, self.steps[number])

    def _submit(self, op: Op, index: int, seconds: float, former: list[Any]) -> tuple[Any, Any]:
        changed = (*op.into, *(op.reads if op.verb in ("norm", "reduce_scatter") else ()))  # completed where they are
        after = former + [self.ready[value] for value in (*op.reads, *op.into) if value in self.ready]
        after += [user for value in changed for user in self.users.get(value, ())]
        begun, over = self.env.event(), self.env.event()
        started, stopped = self.started[-1], self.stopped[-1]
        begun.callbacks.append(lambda _: started.__setitem__(index, self.env.now))
        over.callbacks.append(lambda _: stopped.__setitem__(index, self.env.now))
        self.lanes[op.lane].put((after, seconds, begun, over))
        if op.lane == "compute":
            self.computations.add(over)
        for value in op.reads:
            self.users.setdefault(value, []).append(over)
        for value in (*op.results, *changed):
            self.ready[value] = over
            self.users[value] = []
        return begun, over

    def _remember(self, op: Op, former: list[Any]) -> None:
        events = former + [self.ready[value] for value in op.reads if value in self.ready]
        if op.verb == "free":
            (value,) = op.reads
            where = self._range(value)
            if where is not None:
                self.ended.append((*where, [*events, *self.users.get(value, ())]))
            self._give(value, [*events, *self.users.get(value, ())])
            self.ready.pop(value, None)
            self.users.pop(value, None)
        for value in op.results:
            self.ready[value] = self.env.all_of(events)
            self.users[value] = []

    # Host memory -----------------------------------------------------------------------------------------------------

    def _range(self, value: Value) -> tuple[int, int] | None:
        """Where a value's slot begins and ends in the slab of the program that runs."""
        if not self.offsets:
            return None
        slot = self.slots.get(value) or slot_of(self.placement, value)
        if slot.tier != "host" or not slot.nbytes:
            return None
        offset = self.offsets[slot.key]
        return offset, offset + slot.nbytes

    # Device memory ---------------------------------------------------------------------------------------------------

    def _make_room(self, program: Program, op: Op) -> Iterator[Any]:
        """Wait until what begins on the device fits beside what is there; enter what begins and ends."""
        slots = [slot_of(self.placement, value) for value in op.results] if program.device else []
        begun = {slot.key: slot.nbytes for slot in slots if slot.tier == "device" and slot.key not in self.alive}
        while sum(begun.values()) and sum(begun.values()) + self._device_nbytes() > program.device.nbytes:
            changed = self.env.event()  # not an any_of: once that happens, it takes the all_of among its events apart
            for user in (user for _, users in self.leaving for user in users if not self._has_left(user)):
                user.callbacks.append(lambda _, changed=changed: changed.triggered or changed.succeed())
            yield changed
        for value in op.results if program.device else ():
            self._take(value)

    def _device_nbytes(self) -> int:
        leaving = [nbytes for nbytes, users in self.leaving if not all(map(self._has_left, users))]
        return sum(leaving) + sum(nbytes for nbytes, _, _ in self.alive.values())

    def _has_left(self, user: Any) -> bool:
        """Whether an operation, or all of several, is over, or computes: what takes memory next comes behind it."""
        several = getattr(user, "_events", ())
        return user.processed or user in self.computations or (bool(several) and all(map(self._has_left, several)))

    def _take(self, value: Value) -> None:
        slot = slot_of(self.placement, value)
        if slot.tier == "device":
            self.alive.setdefault(slot.key, (slot.nbytes, set(), []))[1].add(value)

    def _give(self, value: Value, users: list[Any]) -> None:
        for key, (nbytes, values, others) in list(self.alive.items()):
            if value in values:
                values.remove(value)
                others += users
                if not values:
                    self.leaving.append((nbytes, others))
                    del self.alive[key]

    def _former(self, op: Op) -> list[Any]:
        """Who has ever used what the results of an operation take anew."""
        known = [self._range(value) for value in op.reads]
        for value in op.results:
            is_renamed = op.verb == "alias" and op.reads[0].tier == "host"
            self.slots[value] = self.slots[op.reads[0]] if is_renamed else slot_of(self.placement, value)
        taken = [each for each in map(self._range, op.results) if each and each not in known]
        return [user for a, b in taken for start, stop, users in self.ended if start < b and a < stop for user in users]
