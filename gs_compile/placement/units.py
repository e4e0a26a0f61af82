"""units: the parts of every unit, each with one home.

A unit's parameters stand one after the other in one flat space, trained ones first, every tensor at a multiple of
QUANTUM elements. A ratio cuts the space into a host zone and an SSD zone; alpha, and the size of one update, cut both
into groups. A group is what one update changes. Its parameter parts are its pieces of the two zones; its state is cut
by a ratio of its own.

      host zone         SSD zone
    [ a    | c    ] [ b      | d      ]     w: group 0 is a and b, group 1 (late, say) is c and d
    [ group 0             | group 1   ]     dw, s: the same elements, group after group

If the device has memory of its own, the first zone may live there, as whole tensors: the code reads them where they
are, and an update's results are brought there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from gs_compile.placement.shards import pieces
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import COPIES, SHADOWS, Op, Tier, Value, homed

When = Literal["early", "late", "never"]  # beside the backward, in the next forward, or not at all


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a unit's parameters or of a group's state, `start` to `stop` in elements, and its home."""

    letter: str
    tier: Tier
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Group:
    """The elements that one update changes; frozen elements are a group without updates."""

    letter: str  # of its gradient
    when: When
    w: tuple[Part, ...]  # in the unit's space: the pieces of the device's zone, the host's and the SSD's
    s: tuple[Part, ...]  # in the group's own space, which is its w parts end to end

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.w)


class Stretch(NamedTuple):
    """Elements of a group that are in one part of the parameters and, if they have state, in one part of the state."""

    w: Part
    s: Part | None
    start: int  # in the group's space
    unit_start: int  # the same in the unit's
    numel: int


@dataclass(frozen=True)
class UnitPlacement(UnitSize):
    """A unit whose elements are cut into groups, with a home for each part."""

    groups: tuple[Group, ...] = field(kw_only=True)

    @cached_property
    def w(self) -> dict[str, Part]:
        return {part.letter: part for group in self.groups for part in group.w}

    @cached_property
    def s(self) -> dict[str, Part]:
        return {part.letter: part for group in self.groups for part in group.s}

    @cached_property
    def dw(self) -> dict[str, Group]:
        return {group.letter: group for group in self.groups}

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Where each of the pieces in which ranks exchange a unit starts and stops."""
        return pieces(self.num_trained, self.numel)

    @cached_property
    def ssd_zone(self) -> tuple[int, int]:
        """Where the parameters on SSD begin and end in the unit's space, which one request moves."""
        parts = [part for part in self.w.values() if part.tier == "ssd"]
        return (min(p.start for p in parts), max(p.stop for p in parts)) if parts else (0, 0)

    @cached_property
    def host_numel(self) -> int:
        """Where the parameters that live in host memory end in the unit's space."""
        return max((part.stop for part in self.w.values() if part.tier == "host"), default=0)

    @cached_property
    def num_resident(self) -> int:
        """The number of parameter elements that live on the device, which are the first ones."""
        return max((part.stop for part in self.w.values() if part.tier == "device"), default=0)

    def group_of(self, value: Value) -> Group:
        """The group that a part of the parameters, of the state or of the gradient belongs to."""
        if value.kind == "dw":
            return self.dw[value.part]
        is_parameter = homed(value).kind == "w"
        part = (self.w if is_parameter else self.s)[value.part]
        return next(group for group in self.groups if part in (group.w if is_parameter else group.s))

    def is_late(self, update: Op) -> bool:
        """Whether an update, in a program that has its tiers, is of the step before."""
        return self.group_of(update.into[0]).when == "late" or any(value.kind == "scale" for value in update.reads)

    def trained(self, *when: str) -> tuple[Group, ...]:
        """The groups that are updated early, late, or, if nothing is given, at either time."""
        return tuple(group for group in self.groups if group.when in (when or ("early", "late")))

    def stretches(self, group: Group, start: int, stop: int) -> Iterator[Stretch]:
        """The elements of a group between two places in the unit, cut wherever a part begins."""
        end = 0
        for w in group.w:
            shift = end - w.start  # from the unit's space to the group's
            for s in group.s or (None,):
                first = max(start, w.start, s.start - shift if s else 0)
                last = min(stop, w.stop, s.stop - shift if s else w.stop)
                if first < last:
                    yield Stretch(w, s, first + shift, first, last - first)
            end += w.numel

    def value(self, kind: str, part: Part, tier: Tier | None = None) -> Value:
        """The value of a part, at its home or on `tier`."""
        return Value(kind, self.unit, tier=tier or part.tier, part=part.letter)

    def parts(self, *groups: Group) -> Iterator[Value]:
        """The parts of these groups, or of all, at home: each group's parameters before its state."""
        for group in groups or self.groups:
            yield from (self.value("w", part) for part in group.w)
            yield from (self.value("s", part) for part in group.s)

    def shadows(self, group: Group) -> tuple[tuple[Value, Value], ...]:
        """The parts of a group, at home, that repeating its update needs unchanged, and the shadow copy of each.

        A narrow parameter is not among them: it follows from its master.
        """
        parts = [("s", part) for part in group.s] + [("w", part) for part in group.w if not self.has_master]
        return tuple((self.value(kind, part), self.value(SHADOWS[kind], part)) for kind, part in parts)

    def copies(self, group: Group) -> tuple[tuple[Value, Value], ...]:
        """The parts of a group that live in memory, and the copy on SSD that a commit keeps of each.

        A narrow parameter that is trained has none: it follows from its master.
        """
        kinds = ("w", "s") if group.when == "never" or not self.has_master else ("s",)
        parts = (value for value in self.parts(group) if value.kind in kinds and value.tier != "ssd")
        return tuple((value, value._replace(kind=COPIES[value.kind], tier="ssd")) for value in parts)

    def gradient(self, group: Group) -> Value:
        return Value("dw", self.unit, tier="host", part=group.letter)
