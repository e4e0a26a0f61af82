"""laws: the laws on the values of a step program: their lifetimes, their updates, and where they are at the end.

Each class is given the operations one by one, and yields the laws that an operation breaks. `verify` calls them in
order; each sees only operations that those before it accept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain

from gs_compile.placement.placement import Placement
from gs_compile.placement.sealing import Seals
from gs_compile.placement.slab import conflicts, planned_memory
from gs_compile.program.ir import TIERS, Op, Program, Stage, Unit, Value, homed
from gs_compile.program.values import COPIES, SHADOWED
from gs_compile.program.verbs import MOVEMENTS

INPUT_KINDS = frozenset({"batch", "w", "dy"})  # defined before the step begins
PLACED_KINDS = frozenset({"w", "s", "sw", "ss", "cw", "cs", "dw", "scale"})  # of placed units: there if they are stored


class Updates:
    """A part is updated once, not used before its late update or while it is empty, and stored after it has changed.

    A speculative update may come after a late one of the same part.
    """

    def __init__(self, placement: Placement | None, waiting: tuple[str, ...]) -> None:
        self.placement = placement
        self.shadows = Shadows(placement) if placement and placement.speculative else None
        self.waiting = _parts(placement, *waiting) if placement and waiting else set()  # until their late update
        homes = placement.homes(late=False) if placement else ()
        self.tiers = {_anywhere(value): value.tier for value in homes}  # where parts are stored
        self.updated: set[Value] = set()
        self.speculated: set[Value] = set()  # updated before the scale was known, where there is one
        self.empty: set[Value] = set()  # parts on their way to an update that fills them
        self.changed: set[Value] = set()  # parts that an update has changed in host memory, and are stored elsewhere

    def breaks(self, op: Op) -> Iterator[str]:
        if self.shadows is not None:
            yield from self.shadows.breaks(op, self.speculated)
        if op.verb == "update":
            yield from self._breaks_update(op)
        elif op.verb in MOVEMENTS:
            yield from self._breaks_reads(op)
            yield from self._breaks_results(op)
            self.changed.difference_update(_anywhere(homed(value)) for value in op.into)

    def _breaks_update(self, op: Op) -> Iterator[str]:
        done = self.speculated if self.shadows and is_speculative(op) else self.updated
        for value in op.into:
            part = _anywhere(value)
            if _anywhere(homed(value)) in done:
                yield f"{value} is updated twice"
            done.add(_anywhere(homed(value)))
            self.waiting.discard(part)
            self.empty.discard(part)
            if value.tier == "host" and self.tiers.get(part) in ("ssd", "device"):
                self.changed.add(part)

    def _breaks_reads(self, op: Op) -> Iterator[str]:
        """A movement reads the updated value, and no empty one."""
        to_device = (*op.results, *op.into)[0].tier == "device"
        for value in op.reads:
            part = _anywhere(value)
            if to_device and part in self.waiting:
                yield f"{value} is used before its late update"
            if part in self.empty:
                yield f"{value} is empty until its update"
            if value.tier != "host" and part in self.changed:
                yield f"{value} is not what the update has made"

    def _breaks_results(self, op: Op) -> Iterator[str]:
        """A movement overwrites only what is no longer needed."""
        for value in op.results:
            part = _anywhere(value)
            if value.tier == "host" and (part in self.changed or (op.verb == "empty" and part in self._early)):
                yield f"{value} would lose what the update has made"
            if op.verb == "empty":
                self.empty.add(part)

    @property
    def _early(self) -> set[Value]:
        """What early updates have changed; a late one may come before."""
        return self.speculated if self.shadows else self.updated

    def missing(self, complete: set[Unit | None]) -> Iterator[str]:
        """The updates that are missing at the end, of the units whose gradients are complete."""
        assert self.placement is not None
        for value in sorted(self.waiting, key=str):
            yield f"{value} has not had its late update"
        for value in sorted(_parts(self.placement, "early"), key=str):
            if value.unit in complete and value not in self._early:
                yield f"{value} has not had its update"
        if self.shadows is not None:
            yield from self.shadows.missing(complete)


class Shadows:
    """Updates that do not know the scale can be rolled back until all of their results are committed.

    Such an update changes nothing at home that would be needed to repeat it: it reads these parts, and writes to their
    shadow copies, or to a copy that was read from SSD. A shadow copy is written once, by an update or by the transfer
    of an update's result, and is read only to write the copy on SSD that a commit keeps.
    """

    def __init__(self, placement: Placement) -> None:
        self.pairs = {
            _anywhere(home): _anywhere(other)
            for unit in placement.units
            for group in placement.speculated(unit)
            for home, other in unit.shadows(group)
        }
        self.homes = placement.homes(late=False)
        self.written: set[Value] = set()
        self.committed: set[Value] = set()

    def breaks(self, op: Op, speculated: set[Value]) -> Iterator[str]:
        for value in op.reads:
            if value.kind in SHADOWED and not (op.into and op.into[0].kind in COPIES.values()):
                yield f"{value} is read before it is known whether it holds"
        speculates = is_speculative(op)
        for value in op.into:
            part = _anywhere(value)
            if value.kind in SHADOWED:
                yield from self._breaks_shadow(op, value, part)
            elif (
                op.verb != "commit"
                and part in self.pairs
                and value in self.homes
                and (speculates or part in speculated)
            ):
                yield f"{value} could not be rolled back"

    def _breaks_shadow(self, op: Op, value: Value, part: Value) -> Iterator[str]:
        if op.verb != "commit":
            if part in self.written:
                yield f"{value} is written twice"
            self.written.add(part)
            return
        if part not in self.written:
            yield f"{value} has not been written"
        if part in self.committed:
            yield f"{value} is committed twice"
        self.committed.add(part)

    def missing(self, complete: set[Unit | None]) -> Iterator[str]:
        """The commits that are missing at the end, of the units whose gradients are complete."""
        for value in sorted(self.pairs.values(), key=str):
            if value.unit in complete and value not in self.committed:
                yield f"{value} has not been committed"


def is_speculative(op: Op) -> bool:
    """Whether it is an update that does not read the scale. (With clipping, all others do.)"""
    return op.verb == "update" and all(value.kind != "scale" for value in op.reads)


class Gathers:
    """Parts that the device reads where they are stored do not change while their unit is gathered."""

    def __init__(self) -> None:
        self.gathered: dict[Value, tuple[Value, ...]] = {}  # whole units, and the parts whose memory they are in

    def breaks(self, op: Op) -> Iterator[str]:
        for value in (*op.results, *op.into):
            whole = Value("w", value.unit)
            if value.part and value in self.gathered.get(whole, ()):
                yield f"{value} changes while {whole} is in use"
        if op.verb == "gather":
            self.gathered[op.results[0]] = op.reads
        elif op.verb == "free":
            self.gathered.pop(op.reads[0], None)


class Collectives:
    """All ranks issue them in the same order: pieces in the order in which units are gathered, and sums after all
    others of their stage. So it depends on stages alone, not on a rank's micro-batches. Once a gradient is summed over
    all ranks, only the sum is used.
    """

    def __init__(self) -> None:
        self.pieces: deque[Value] = deque()
        self.summed: dict[Value, Stage] = {}  # gradients of this rank alone, by the stage of their sum over all

    def breaks(self, op: Op) -> Iterator[str]:
        for value in op.reads if op.verb != "free" else ():
            if value in self.summed:
                yield f"{value} is this rank's alone, and there is the sum of all"
        for value in op.results:
            self.summed.pop(value, None)
        if op.verb == "all_gather" and op.stage in self.summed.values():
            yield f"it comes after a reduce_scatter in {op.stage}"
        elif op.verb == "all_gather":
            self.pieces.append(op.results[0])
        elif op.verb == "reduce_scatter":
            self.summed[op.reads[0]] = op.stage
        elif op.verb == "gather" and self.pieces:
            for value in op.reads:
                if value != (first := self.pieces.popleft() if self.pieces else None):
                    yield f"{value} here, and ranks have exchanged {first}"


class Lifetimes:
    """A value is defined before its uses and freed after them, and only a movement defines it again, whether it was
    freed or not. Sums are complete when they are read. present: what is stored when the step begins.
    """

    def __init__(self, program: Program, placement: Placement | None, present: frozenset[Value]) -> None:
        self.placement = placement
        self.present = present
        self.on_device = program.form == "updates"  # all parts are there until they get their tiers
        self.defined: set[Value] = set()
        self.freed: set[Value] = set()
        self.additions: Counter[Value] = Counter()  # how many operations have added to an accumulator
        self.all_additions = Counter(value for op in program.ops for value in op.into if value.kind == "dw")

    def breaks(self, op: Op) -> Iterator[str]:
        for value in (*op.reads, *op.into):
            if value in self.freed:
                yield f"{value} was freed"
            if value not in self.defined and not self._is_input(value):
                yield f"{value} is not defined"
        yield from self._breaks_sums(op)
        for value in op.results:
            if value in self.defined and op.verb not in MOVEMENTS:
                yield f"{value} is defined twice"
            self.defined.add(value)
            self.freed.discard(value)
        if op.verb == "free":
            self.freed.update(op.reads)

    def _breaks_sums(self, op: Op) -> Iterator[str]:
        for value in filter(_is_sum, op.reads):
            whole = self.all_additions[value._replace(tier="device")]
            if self.additions[value] != whole and not self._keeps_sum(op, value):
                yield f"{value} is read after {self.additions[value]} of {whole} micro-batches"
        self.additions.update(op.into)
        for value in filter(_is_sum, op.results):
            self.additions[value] = self.additions[op.reads[0]] if op.reads else 0

    def _keeps_sum(self, op: Op, value: Value) -> bool:
        """Whether an incomplete sum is only moved, or ends where it has been moved to."""
        if op.verb != "free":
            return op.verb in MOVEMENTS and all(value._replace(tier=result.tier) == result for result in op.results)
        others = (value._replace(tier=tier) for tier in TIERS if tier != value.tier)
        return any(
            other in self.defined and other not in self.freed and self.additions[other] == self.additions[value]
            for other in others
        )

    def _is_input(self, value: Value) -> bool:
        """Whether a value is there before the step begins."""
        placed = self.placement is not None and (value.unit in self.placement.by_unit or value.kind == "scale")
        if not placed or value.kind not in PLACED_KINDS:
            return value.kind in INPUT_KINDS
        if self.on_device:
            return bool(value.part) or value.kind == "scale"
        return value in self.present


def at_the_end(program: Program, sealing: Seals, updates: Updates, lifetimes: Lifetimes) -> Iterator[str]:
    """All that must outlive the step does, nothing else is left behind, and the planned peaks are true."""
    placement, complete = sealing.placement, {value.unit for value in lifetimes.all_additions}
    yield from chain(updates.missing(complete), sealing.missing(complete))
    stored = placement.homes(late=placement.has_late and program.trains, warm=program.trains)
    for value in sorted(stored, key=str):
        if _anywhere(value) in updates.changed:
            yield f"{value} is not what the update has made"
        if value in lifetimes.freed or (value not in lifetimes.defined and value not in lifetimes.present):
            yield f"{value} is not at home"
    for value in sorted(lifetimes.defined - lifetimes.freed - stored - lifetimes.present, key=str):
        if value.tier != "device" or (value.kind in ("w", "dw") and value.unit in placement.by_unit):
            yield f"{value} is left behind"
    peaks, offsets = planned_memory(program.ops, placement)
    if program.peaks and program.peaks != peaks:
        yield f"the peaks are not {program.peaks}"
    for one, other in conflicts(program.ops, placement, program.offsets or offsets):
        yield f"{one} and {other} are alive in the same memory"


def _is_sum(value: Value) -> bool:
    """Whether it is all of a unit's gradient, wherever it is."""
    return value.kind == "dw" and not value.part


def _parts(placement: Placement, *when: str) -> set[Value]:
    """The parts of parameters that are updated early, or late, wherever they are."""
    parts = ((unit, part) for unit in placement.units for group in unit.trained(*when) for part in group.w)
    return {_anywhere(unit.value("w", part)) for unit, part in parts}


def _anywhere(value: Value) -> Value:
    """The part that a value is, wherever it is."""
    return value._replace(tier=None)
