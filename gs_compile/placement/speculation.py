"""speculation: the laws of updates that may be rolled back, which `verify` holds programs to.

* A speculative update changes nothing that is at home and would be needed to do it again: those parts are read, and
  what it makes of them goes to their shadow copies, or to a copy that was brought from the SSD.
* A shadow copy is written once, by one update or by the transfer of what one has made, and read by no one.
* Everything that was speculated is committed, once, after all of it is in place; from then on nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import SHADOWS, Op, Unit, Value, homed

SHADOW_KINDS = frozenset(SHADOWS.values())


def is_speculative(op: Op) -> bool:
    """Whether it is an update that does not know the scale, where there is one to know."""
    return op.verb == "update" and all(value.kind != "scale" for value in op.reads)


class Speculation:
    """The state of speculative updates at one point of a program."""

    def __init__(self, placement: Placement) -> None:
        self.pairs = {
            replace(home, tier=None): replace(other, tier=None)
            for unit in placement.units
            for group in placement.speculated(unit)
            for home, other in unit.shadows(group)
        }
        self.homes = placement.homes(late=False)
        self.begun: set[Value] = set()  # parts that have been speculated on, wherever they are
        self.written: set[Value] = set()  # shadow copies
        self.committed: set[Value] = set()

    def breaks(self, op: Op) -> Iterator[str]:
        """The laws that one operation breaks."""
        for value in op.reads:
            if value.kind in SHADOW_KINDS:
                yield f"{value} is read before it is known whether it holds"
        if op.verb == "commit":
            yield from self._breaks_commit(op)
            return
        for value in op.into:
            part = replace(value, tier=None)
            if value.kind in SHADOW_KINDS:
                if part in self.written:
                    yield f"{value} is written twice"
                self.written.add(part)
            elif part in self.pairs and value in self.homes and (part in self.begun or is_speculative(op)):
                yield f"{value} could not be rolled back"
        if is_speculative(op):
            parts = {replace(homed(value), tier=None): value for value in op.into}
            yield from (f"{value} is updated twice" for part, value in parts.items() if part in self.begun)
            self.begun.update(parts)

    def _breaks_commit(self, op: Op) -> Iterator[str]:
        for value in op.into[1::2]:
            part = replace(value, tier=None)
            if part not in self.written:
                yield f"{value} has not been written"
            if part in self.committed:
                yield f"{value} is committed twice"
            self.committed.add(part)

    def unfinished(self, complete: Set[Unit | None]) -> Iterator[str]:
        """The updates and commits that are missing at the end, of the units whose gradients are complete."""
        for part, other in sorted(self.pairs.items(), key=str):
            if part.unit in complete and part not in self.begun:
                yield f"{part} has not had its update"
            if part.unit in complete and other not in self.committed:
                yield f"{other} has not been committed"
