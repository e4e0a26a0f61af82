"""sealing: the law of durable steps: before `seal`, all that it commits is on SSD, and nothing of its own step is."""

from __future__ import annotations

from collections.abc import Iterator

from gs_compile.placement.placement import Placement, StepContext
from gs_compile.placement.units import Group, UnitPlacement
from gs_compile.program.ir import COPIES, Op, Unit, Value, homed


class Seals:
    """There is one `seal` if the context asks for it: after every store of a late update, before any of an early one.

    The copy of a part in memory is written once, from the result of the part's update: after an early update if this
    step is to be committed, after a late one if the step before is.
    """

    def __init__(self, placement: Placement, context: StepContext) -> None:
        self.placement = placement
        self.copies, self.seals = context.copies, context.seals
        self.is_sealed = False
        self.made: dict[Value, bool] = {}  # the results of updates in host memory; True: the last one was early
        self.written: set[tuple[Value, bool]] = set()  # what was stored; True: after an early update
        waiting = context.waiting(placement)
        late = [(unit, group) for unit in placement.units for group in (unit.trained(*waiting) if waiting else ())]
        self.late = {store for unit, group in late for store in _stores(unit, group, copies=self.seals)}

    def breaks(self, op: Op) -> Iterator[str]:
        if op.verb == "update" and (unit := self.placement.unit_of(op)):
            self.made.update(dict.fromkeys(op.into, not unit.is_late(op)))
        elif op.verb == "seal":
            yield from self._breaks_seal()
        elif op.lane == "ssd_write" and op.into and op.kind != "dw":
            yield from self._breaks_store(op)

    def _breaks_seal(self) -> Iterator[str]:
        if self.is_sealed or not self.seals:
            yield "the step before is sealed a second time" if self.is_sealed else "the step before is not to be sealed"
        self.is_sealed = True
        for value in sorted(self.late - {store for store, is_early in self.written if not is_early}, key=str):
            yield f"{value} of the step before is not stored yet"

    def _breaks_store(self, op: Op) -> Iterator[str]:
        for source, store in zip(op.reads, op.into, strict=False):
            is_early = self.made.get(source, False)
            if self.seals and is_early and not self.is_sealed:
                yield f"{store} is stored before the step before is sealed"
            if self.is_sealed and not is_early:
                yield f"{store} is stored after the step before was sealed without it"
            if store.kind in COPIES.values():
                yield from self._breaks_copy(source, store, is_early)
            self.written.add((store, is_early))

    def _breaks_copy(self, source: Value, copy: Value, is_early: bool) -> Iterator[str]:
        if source not in self.made or homed(source) != homed(copy)._replace(tier="host"):
            yield f"{copy} is not of {source} as an update has made it"
        if not (self.copies if is_early else self.seals):
            yield f"{copy} is written, and no commit keeps it"
        if (copy, is_early) in self.written:
            yield f"{copy} is written twice"

    def missing(self, complete: set[Unit | None]) -> Iterator[str]:
        """What is missing at the end; `complete`: units whose gradients are."""
        if self.seals and not self.is_sealed:
            yield "the step before has not been sealed"
        for unit in self.placement.units if self.copies else ():
            for group in unit.trained("early") if unit.unit in complete else ():
                for _, copy in unit.copies(group):
                    if (copy, True) not in self.written:
                        yield f"{copy} has not been written"


def _stores(unit: UnitPlacement, group: Group, *, copies: bool) -> Iterator[Value]:
    """What the update of a group leaves on SSD."""
    yield from (value for value in unit.parts(group) if value.tier == "ssd")
    yield from (copy for _, copy in (unit.copies(group) if copies else ()))
