"""Leave every tensor where it waits for its next use, as far as there is room (TeraIO's way, arXiv 2506.06472).

A tensor is active on a tier while operations use it there, and inactive until they do again. The horizontal program
moves nearly all of them away and back in every such period:

    x1_0.device   made, read by forward 1     ...........     read by backward 1
                                        offload         prefetch
    w1.device     forward 1 of 0              ...........     backward 1 of 0   ...........     forward 1 of 1

Here all of them stay at first. Then, as long as the peak of a tier is above its budget, of all periods over the moment
of the peak one becomes a journey again: the one that frees the most bytes for the longest time, for the least time on
the lanes. First the device's memory is brought within its budget, then the host's, with what the device has left to it.
What stays is neither moved away nor back; each prefetch that is left is where `pipeline` has put it, as late as hides
it. What outlives the step is not in question: its home is the placement's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gs_compile.passes.free import Free
from gs_compile.placement.kinds import slot_of
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Program, Stage, Tier, Unit, Value

BACKWARD = 3.0  # forwards that a backward takes: one again, and twice one for its two gradients
STAYING = frozenset({"w", "x", "dw"})  # kinds; optimizer states go home after each update: that is what is learned
MOVES = frozenset({"prefetch", "offload", "alias", "gather"})  # what is of no use if nobody reads what it defines


@dataclass(frozen=True, slots=True)
class Period:
    """A tensor that is inactive on a tier from the end of `since` on, until it comes back for its use in `until`.

    index: of the operation that brings it back, in the program in question.
    first, last: in the same with its frees, those between which it takes no memory if it is moved away.
    duration: in forwards of a layer; seconds: of the journey, on all its lanes.
    """

    value: Value
    tier: Tier
    nbytes: int
    since: Stage
    until: Stage
    index: int
    first: int
    last: int
    duration: float
    seconds: float
    kept: bool = True

    @property
    def worth(self) -> float:
        """What moving it away frees, bytes for as long as they are free, for each second of moving."""
        return self.nbytes * self.duration / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Lifetime:
    """The same step with fewer journeys, none of its planned peaks above the room's or the horizontal program's own.

    late: as of `Free`. Without a room in the placement nothing stays.
    """

    name: ClassVar[str] = "lifetime"

    placement: Placement
    late: bool = False

    def __call__(self, program: Program) -> Program:
        return self.decide(program)[0]

    def decide(self, program: Program) -> tuple[Program, tuple[Period, ...]]:
        """What becomes of a program, and every period with what was decided on it."""
        found: list[Period] = []
        room = self.placement.room
        budgets: dict[Tier, int] = {}
        if room is not None:
            budgets = {"device": room.device_nbytes} if self.placement.separate else {}
            budgets["host"] = room.host_nbytes
        for tier, nbytes in budgets.items():
            periods = _Timeline(program, self.placement, tier, late=self.late).within(nbytes)
            dropped = {period.index for period in periods if period.kept}
            program = _without(program, dropped, self.placement.homes(late=self.late), self.placement)
            found += periods
        return program.with_ops(program.ops, made_by=self.name), tuple(found)


class _Timeline:
    """The bytes of a tier after each operation of a program, and the periods in which its tensors are away."""

    def __init__(self, program: Program, placement: Placement, tier: Tier, *, late: bool) -> None:
        self.placement = placement
        self.tier = tier
        self.ops = Free(placement=placement, late=late)(program).ops
        self.number = -1  # of the operation in the program without its frees
        self.changes = np.zeros(len(self.ops) + 1, dtype=np.int64)
        self.clock = np.cumsum([_forwards(op) for op in self.ops])
        self.alive: dict[object, set[Value]] = {}
        self.ended: dict[object, int] = {}  # slots that were left, and when
        self.coming: dict[Value, tuple[int, int]] = {}  # whole units whose pieces are on their way back
        self.periods: list[Period] = []
        for value in placement.present(self.ops):
            self._begin(value, -1)
        for at, op in enumerate(self.ops):
            self._note(at, op)
        self.bytes: NDArray[np.int64] = np.cumsum(self.changes)[:-1]

    def _note(self, at: int, op: Op) -> None:
        if op.verb == "free":
            self._end(op.reads[0], at)
            return
        self.number += 1
        for value in op.results:
            left = self._begin(value, at)
            if value.kind not in STAYING:
                continue
            if left is not None and op.verb == "prefetch" and value.piece is None:
                self._add(value, left, at)
            elif left is not None and op.verb == "prefetch":
                self.coming[replace(value, piece=None)] = left, at
            elif value in self.coming:
                self._add(value, *self.coming.pop(value))

    def _begin(self, value: Value, at: int) -> int | None:
        """When the memory was left that a value begins to take again, if it was."""
        slot = slot_of(self.placement, value)
        key, nbytes = slot.key, slot.nbytes
        if slot.tier != self.tier:
            return None
        if key not in self.alive:
            self.changes[max(at, 0)] += nbytes
        left = None if key in self.alive else self.ended.pop(key, None)
        self.alive.setdefault(key, set()).add(value)
        return left

    def _end(self, value: Value, at: int) -> None:
        slot = slot_of(self.placement, value)
        key, nbytes = slot.key, slot.nbytes
        values = self.alive.get(key, set())
        values.discard(value)
        if key in self.alive and not values:
            del self.alive[key]
            self.changes[at] -= nbytes
            self.ended[key] = at

    def _add(self, value: Value, first: int, last: int) -> None:
        self.periods.append(
            Period(
                value,
                self.tier,
                slot_of(self.placement, value).nbytes,
                self.ops[first].stage,
                self.ops[last].stage,
                self.number,
                first,
                last,
                float(self.clock[last] - self.clock[first]),
                _seconds(value, self.tier, self.placement),
            )
        )

    def within(self, budget: int) -> list[Period]:
        """All periods: those are kept that leave the tier within its budget, or within what it takes without any."""
        budget = max(budget, int(self.bytes.max(initial=0)))
        now, periods = self.bytes.copy(), self.periods
        first, last, nbytes = (
            np.array([getattr(period, name) for period in periods], dtype=np.int64)
            for name in ("first", "last", "nbytes")
        )
        worth = np.array([period.worth for period in periods])
        for start, stop, size in zip(first, last, nbytes, strict=True):
            now[start:stop] += size
        kept = np.ones(len(periods), dtype=bool)
        while now.max(initial=0) > budget:
            peak = now.argmax()
            over = np.flatnonzero(kept & (first <= peak) & (peak < last))
            moved = over[worth[over].argmax()]
            kept[moved] = False
            now[first[moved] : last[moved]] -= nbytes[moved]
        for index in sorted(np.flatnonzero(~kept), key=lambda index: worth[index]):  # of use no more, after later ones
            span = slice(first[index], last[index])
            if now[span].max(initial=0) + nbytes[index] <= budget:
                kept[index] = True
                now[span] += nbytes[index]
        return [replace(period, kept=bool(stays)) for period, stays in zip(periods, kept, strict=True)]


def _forwards(op: Op) -> float:
    """How long an operation computes, in forwards of a layer."""
    if op.micro_batch is None:
        return 0.0
    return BACKWARD if op.stage.phase == "backward" else 1.0


def _seconds(value: Value, tier: Tier, placement: Placement) -> float:
    """What a journey away from a tier and back takes on all its lanes; parameters are at home already."""
    assert placement.room is not None
    rates = dict(placement.room.bytes_per_second)
    nbytes, on_ssd = _journey(value, placement)
    lanes = {"h2d": nbytes, "d2h": nbytes} if tier == "device" else {}
    lanes |= {"ssd_read": on_ssd, "ssd_write": on_ssd}
    return sum(moved / rates[lane] for lane, moved in lanes.items() if value.kind != "w" or lane in ("h2d", "ssd_read"))


def _journey(value: Value, placement: Placement) -> tuple[int, int]:
    """The bytes of a tensor, and how many of them go as far as the SSD."""
    nbytes = slot_of(placement, value).nbytes
    if value.kind == "x":
        return nbytes, nbytes if placement.checkpoint_home(value) == "ssd" else 0
    unit = placement.by_unit[_unit(value)]
    if value.kind == "dw":
        return nbytes, nbytes if placement.gradient_home(unit) == "ssd" else 0
    start, stop = unit.ssd_zone
    return nbytes, (stop - start) * unit.itemsize


def _unit(value: Value) -> Unit:
    assert value.unit is not None, f"{value} is of no unit"
    return value.unit


def _without(program: Program, dropped: set[int], outlives: frozenset[Value], placement: Placement) -> Program:
    """The program without some movements, and without what has led to them alone."""
    wanted, written = set(outlives), set[Value]()
    left: list[Op] = []
    for index in reversed(range(len(program.ops))):
        op = program.ops[index]
        if index in dropped or (op.verb in MOVES and op.results and wanted.isdisjoint(op.results)):
            continue
        if _is_copied_for_ssd(op, placement) and written.isdisjoint(op.results):
            op = replace(op, verb="alias")
        if op.lane == "ssd_write":
            written.update(op.reads)
        wanted.difference_update(op.results)
        wanted.update((*op.reads, *op.into))
        left.append(op)
    return program.with_ops(reversed(left), program.made_by)


def _is_copied_for_ssd(op: Op, placement: Placement) -> bool:
    """Whether a checkpoint is copied only to be written from there: in one memory."""
    return op.verb == "offload" and op.lane == "d2h" and op.reads[0].kind == "x" and not placement.separate
