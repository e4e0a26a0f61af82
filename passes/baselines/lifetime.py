"""Leave every tensor where it waits for its next use, as far as there is room (TeraIO's way, arXiv 2506.06472).

A tensor is active on a tier while operations use it there, and inactive until they do again. The horizontal program
moves nearly all of them away and back in every such period:

    x1_0.device   made, read by forward 1     ...........     read by backward 1
                                        offload         prefetch
    w1.device     forward 1 of 0              ...........     backward 1 of 0   ...........     forward 1 of 1

Here all of them stay at first. Then, as long as the peak of a tier is above its budget, one of the periods in which the
peak lies becomes a round trip again: the one that frees the most bytes for the longest time, for the least time on the
lanes. First the device's memory is brought within its budget, then the host's, with what the device has left to it.
What stays is neither moved away nor back. The remaining prefetches keep the stages that `pipeline` gave them. What
outlives the step keeps the home that the placement gives it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gs_compile.machine import format_bytes
from gs_compile.passes.free import with_frees
from gs_compile.placement.liveness import LiveRange, live_ranges, nbytes_alive
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import TRANSFER_LANES, WORDS, Op, Program, Stage, Tier, Value

BACKWARD = 3.0  # the time of a backward, in forwards: one for the recomputation, two for its two gradients
STAYING = frozenset({"w", "x", "dw"})  # kinds that may stay; optimizer states are stored after each update
MOVES = frozenset({"prefetch", "offload", "alias", "gather"})  # of no use if nobody reads their results
ENDLESS = 1 << 60  # bytes, where no budget is known
INACTIVE = {"w": "between two uses", "x": "from forward to backward", "dw": "between two micro-batches"}
NEXT = {"device": "host", "host": "SSD"}  # where a tensor goes that does not stay


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that inactive tensors may fill, and the cost of moving them: `Decision.own` of this schedule.

    device_nbytes, host_nbytes: the peaks that it may reach; the device's counts only if it has memory of its own.
    bytes_per_second: of each lane that moves data, alone.
    """

    device_nbytes: int
    host_nbytes: int
    bytes_per_second: tuple[tuple[str, float], ...]


EVERYTHING = Room(
    device_nbytes=ENDLESS,
    host_nbytes=ENDLESS,
    bytes_per_second=tuple(dict.fromkeys(TRANSFER_LANES.values(), 1.0).items()),
)


@dataclass(frozen=True, slots=True)
class Period:
    """A tensor that is inactive on its tier from the end of `since` on, until it comes back for its use in `until`.

    index: of the operation that brings it back, in the program without frees.
    first, last: in the program with frees, the operations between which it takes no memory if it is moved away.
    duration: in forwards of a layer; seconds: of the round trip, on all its lanes.
    """

    value: Value
    nbytes: int
    since: Stage
    until: Stage
    index: int
    first: int
    last: int
    duration: float
    seconds: float
    stays: bool = True

    @property
    def worth(self) -> float:
        """The gain of moving it away: bytes that it frees times how long, for each second of moving."""
        return self.nbytes * self.duration / self.seconds if self.seconds else 0.0


def lifetime(program: Program, placement: Placement, *, late: bool = False) -> Program:
    """The same step with fewer round trips, none of its planned peaks above the room's or the horizontal program's own.

    late: as of `free`. Without a `Room` in the placement nothing stays.
    """
    return decided_periods(program, placement, late=late)[0]


def decided_periods(program: Program, placement: Placement, *, late: bool) -> tuple[Program, tuple[Period, ...]]:
    """The program with fewer round trips, and every period with what was decided on it."""
    decided: list[Period] = []
    room, homes = _room(placement), placement.homes(late=late)
    budgets: dict[Tier, int] = {}
    if room is not None:
        budgets = {"device": room.device_nbytes} if placement.separate else {}
        budgets["host"] = room.host_nbytes
    for tier, nbytes in budgets.items():
        ops = with_frees(program.ops, homes, placement)
        ranges = [live for live in live_ranges(ops, placement) if live.slot.tier == tier]
        periods = sorted(_periods(ops, ranges, placement), key=lambda period: period.index)
        periods = _decided(periods, nbytes_alive(ranges, tier, len(ops)), nbytes)
        dropped = {period.index for period in periods if period.stays}
        program = _without(program, dropped, homes, placement)
        decided += periods
    return program.with_ops(program.ops, made_by="lifetime"), tuple(decided)


def _room(placement: Placement) -> Room | None:
    own = placement.decision.own
    assert own is None or isinstance(own, Room)
    return own


def _periods(ops: Sequence[Op], ranges: Iterable[LiveRange], placement: Placement) -> Iterator[Period]:
    """The times between two live ranges of the same memory, the second begun by a tensor that comes back."""
    clock = np.cumsum([_forwards(op) for op in ops])
    numbers = np.cumsum([op.verb != "free" for op in ops]) - 1  # of the operations in the program without its frees
    gathers = defaultdict[Value, list[int]](list)  # by the first piece of what they put together
    for at, op in enumerate(ops):
        if op.verb == "gather":
            gathers[op.reads[0]].append(at)
    left: dict[object, int] = {}
    for live in ranges:
        value, last, first = live.value, live.first, left.get(live.slot.key)
        if first is not None and value.kind in STAYING and ops[last].verb == "prefetch":
            back = last if value.piece is None else next(at for at in gathers[value] if at > last)
            yield Period(
                value._replace(piece=None),
                nbytes := live.slot.nbytes,
                since=ops[first].stage,
                until=ops[last].stage,
                index=int(numbers[back]),
                first=first,
                last=last,
                duration=float(clock[last] - clock[first]),
                seconds=_seconds(value, nbytes, placement),
            )
        if live.last is not None:
            left[live.slot.key] = live.last


def _decided(periods: Sequence[Period], now: NDArray[np.int64], budget: int) -> list[Period]:
    """All periods, each with the decision whether its tensor stays. The tier keeps to its budget, or to the peak that
    it has if none stays.

    now: the bytes on the tier after each operation, if none stays.
    """
    budget = max(budget, int(now.max(initial=0)))
    first, last, nbytes = (
        np.array([getattr(period, name) for period in periods], dtype=np.int64) for name in ("first", "last", "nbytes")
    )
    worth = np.array([period.worth for period in periods])
    for start, stop, size in zip(first, last, nbytes, strict=True):
        now[start:stop] += size
    stays = np.ones(len(periods), dtype=bool)
    while now.max(initial=0) > budget:
        peak = now.argmax()
        over = np.flatnonzero(stays & (first <= peak) & (peak < last))
        moved = over[worth[over].argmax()]
        stays[moved] = False
        now[first[moved] : last[moved]] -= nbytes[moved]
    for index in sorted(np.flatnonzero(~stays), key=lambda index: worth[index]):  # no longer needed, after later ones
        span = slice(first[index], last[index])
        if now[span].max(initial=0) + nbytes[index] <= budget:
            stays[index] = True
            now[span] += nbytes[index]
    return [replace(period, stays=bool(each)) for period, each in zip(periods, stays, strict=True)]


def _forwards(op: Op) -> float:
    """How long an operation computes, in forwards of a layer."""
    if op.micro_batch is None:
        return 0.0
    return BACKWARD if op.stage.phase == "backward" else 1.0


def _seconds(value: Value, nbytes: int, placement: Placement) -> float:
    """The time of a round trip from a value's tier on all its lanes; parameters need not be written."""
    room = _room(placement)
    assert room is not None
    rates = dict(room.bytes_per_second)
    on_ssd = _ssd_nbytes(value, nbytes, placement)
    lanes = {"ssd_read": on_ssd, "ssd_write": on_ssd}
    lanes |= {"h2d": nbytes, "d2h": nbytes} if value.tier == "device" else {}
    return sum(moved / rates[lane] for lane, moved in lanes.items() if value.kind != "w" or lane in ("h2d", "ssd_read"))


def _ssd_nbytes(value: Value, nbytes: int, placement: Placement) -> int:
    """How many of a tensor's bytes a round trip takes to SSD."""
    if value.kind == "x":  # the head's input never does
        is_far = value.unit != placement.layout.num_layers
        return nbytes if is_far and placement.activations.home(value) == "ssd" else 0
    unit = placement.by_unit[value.unit]
    if value.kind == "dw":
        return nbytes if placement.gradient_home(unit) == "ssd" else 0
    start, stop = unit.ssd_zone
    return (stop - start) * unit.itemsize


def _without(program: Program, dropped: set[int], outlives: frozenset[Value], placement: Placement) -> Program:
    """The program without some movements, and without others that served only these."""
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


# What the planner asks ------------------------------------------------------------------------------------------------


class Outcome(Protocol):
    """What a simulation says of a step."""

    @property
    def seconds(self) -> float: ...

    @property
    def moved_nbytes(self) -> int: ...


class Rooms:
    """The variants of this schedule: each has a room, which its pass follows.

    unbounded: the room that no budget bounds. Where it changes nothing, there are no variants, and `none` says so.
    spare_parts: of host memory, what other homes may leave to variants.
    """

    unbounded = EVERYTHING
    none = "nothing is moved away and back within a step: there is nothing to keep"
    spare_parts = (0.25, 0.5)

    def within(self, *, device_nbytes: int | None, host_nbytes: int, bytes_per_second: Mapping[str, float]) -> Room:
        """What budgets leave; device_nbytes: None where nothing on the device is counted."""
        return Room(
            device_nbytes=ENDLESS if device_nbytes is None else device_nbytes,
            host_nbytes=host_nbytes,
            bytes_per_second=tuple(bytes_per_second.items()),
        )

    def why(self, plain: Outcome, chosen: Outcome) -> str:
        """In a sentence, what it brings to let tensors stay, or that it would bring nothing."""
        before, after = plain.seconds, chosen.seconds
        if chosen is plain:
            return f"to keep what there is room for would not be faster than {before:.3g} s: nothing is kept"
        saved = plain.moved_nbytes - chosen.moved_nbytes
        words = f"{format_bytes(saved)} less are moved" if saved >= 0 else f"{format_bytes(-saved)} more are moved"
        return (
            f"what there is room for stays where it is: {words} in a step, which takes {after:.3g} s in simulation, "
            f"and {before:.3g} s by the horizontal schedule"
        )

    def table(
        self, program: Program, placement: Placement
    ) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]:
        """Headings, rows, and the headings of numbers: the periods in which tensors are inactive, by kind, and what
        becomes of them in `program`, which this schedule's pass gets.
        """
        headings = ("", "on", "inactive", "times", "bytes", "stay", "bytes that stay", "others go to")
        _, periods = decided_periods(program, placement, late=placement.has_late)
        return headings, list(_rows(periods)), ("times", "bytes", "stay", "bytes that stay")

    def as_dict(self, program: Program, placement: Placement) -> dict[str, Any]:
        """All periods, each with what was decided."""
        _, periods = decided_periods(program, placement, late=placement.has_late)
        return {
            "periods": [
                {
                    "tensor": str(period.value),
                    "since": str(period.since),
                    "until": str(period.until),
                    "nbytes": period.nbytes,
                    "stays": period.stays,
                }
                for period in periods
            ]
        }


def _rows(periods: Iterable[Period]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Period]] = {}
    for period in periods:
        groups.setdefault((period.value.kind, str(period.value.tier)), []).append(period)
    for (kind, tier), members in groups.items():
        staying = [period for period in members if period.stays]
        elsewhere = NEXT[tier] if len(staying) < len(members) else ""
        yield WORDS[kind], tier, INACTIVE[kind], *_totals(members), *_totals(staying), elsewhere


def _totals(periods: Sequence[Period]) -> tuple[str, str]:
    return str(len(periods)), format_bytes(sum(period.nbytes for period in periods))
