"""Give each transfer its stage: as late as it can be without a wait (arXiv 2512.17570, sections 4.2 to 4.4).

A transfer is issued in the stage of its layer, in the forward or the backward, plus the number in its row of `ROWS`.
The second number is for a device that reads host memory itself: no stage is spent on the way between them, unless ranks
share the units, where one is spent on gathering. A unit that is larger than a layer is updated in several groups: each
layer's worth takes a stage more.

What would come before the first stage is in `fill`, what would come after the last in `drain`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gs_compile.placement.cut import stages_after_first
from gs_compile.placement.placement import Placement
from gs_compile.placement.users import Users
from gs_compile.program.ir import DRAIN, FILL, Op, Program, Stage, Unit, Value, height, homed

# In the stage: at its start; after the computation that makes the value (made); before the one that reads it, one
# micro-batch ahead where it is copied (read), or two or more (ahead); piece k beside micro-batch k (piece); after all
# computation (end).
Anchor = Literal["start", "made", "read", "ahead", "piece", "end"]


class Row(NamedTuple):
    """Stages from the unit's own, where the device has memory of its own and where not, and where in that stage."""

    own_memory: int
    one_memory: int
    anchor: Anchor = "start"


ROWS = {
    "prefetch w ssd>host": Row(-2, -1),  # parameters, the whole unit
    "prefetch w host>device": Row(-1, -1, "piece"),
    "prefetch w": Row(-1, -1, "piece"),  # a rank's share
    "all_gather shard": Row(-1, -1, "piece"),
    "all_gather w": Row(-1, -1, "piece"),
    "prefetch x ssd>host": Row(-1, -1),  # a checkpoint, all micro-batches of the layer
    "prefetch x host>device": Row(0, 0, "read"),  # the first is still there
    "prefetch dx host>device": Row(0, 0, "read"),
    "prefetch a ssd>host": Row(0, 0, "ahead"),  # saved activations, one micro-batch at a time
    "prefetch a host>device": Row(0, 0, "read"),
    "offload a device>host": Row(0, 0, "made"),
    "offload a host>ssd": Row(0, 0, "made"),
    "alias a device>host": Row(0, 0, "made"),
    "alias a host>device": Row(0, 0, "read"),
    "offload x device>host": Row(0, 0, "made"),
    "offload dx device>host": Row(0, 0, "made"),
    "offload x host>ssd": Row(1, 1),  # all micro-batches of the layer
    "alias x device>host": Row(0, 0, "made"),
    "alias x host>device": Row(0, 0, "read"),
    "norm dw": Row(0, 0, "end"),
    "reduce_scatter dw": Row(0, 0, "end"),
    "alias dshard": Row(0, 0, "end"),
    "offload dshard": Row(1, 1),
    "alias dw device>host": Row(0, 0, "end"),
    "clip norm": Row(0, 0, "end"),
    "offload dw device>host": Row(1, 1),  # a complete gradient, or a sum between micro-batches
    "offload dw host>ssd": Row(2, 1),  # a sum, but before its next use
    "prefetch dw ssd>host": Row(-2, -1),
    "prefetch dw host>device": Row(-1, -1),
    "prefetch sums ssd>host": Row(-1, 0),  # what the backwards of a step add up; not before the user's own backward
    "prefetch sums host>device": Row(0, 0),
    "offload sums device>host": Row(0, 0, "end"),
    "offload sums host>ssd": Row(1, 1),
    "early update": Row(2, 1),
    "late update": Row(-2, -2),  # from the unit's stage in the forward
}
# What belongs to an update, in stages from it. `store` brings its result to where it is stored: SSD or the device.
BESIDE_UPDATE = {"fetch": -1, "empty": 0, "update": 0, "store": 1}
# The same where a layer takes several updates, in the update's own stage, in halves of an update. While one piece is
# updated, the next one comes in and the one before goes out: no more than three are in memory.
BESIDE_PIECE = {"fetch": -3, "empty": 0, "update": 0, "store": 2}
HERE = Row(0, 0)  # what takes no time stays in its stage
READS_FIRST = {"x": 0, "a": 0, "w": 1, "dw": 1, "s": 2}  # ranks on the lane `ssd_read`: what is needed first, first
OTHERS = 3
BEFORE, AT, AFTER = -1, 0, 1


class IssuePoint(NamedTuple):
    """A place in the order of issue, which these numbers sort."""

    stage: int
    position: int = -1  # of the micro-batch in the stage; -1: before all of them
    when: int = 0  # before, at or after that computation
    rank: int = OTHERS


def pipeline(program: Program, placement: Placement) -> Program:
    """The same operations, each issued in the stage that the table above gives it."""
    return program.with_ops(_StageAssigner(program, placement).ops(), made_by="pipeline")


def _part_in_update(op: Op) -> str | None:
    """The key of BESIDE_UPDATE for an operation that belongs to an update; None for any other."""
    if op.into and op.verb in ("prefetch", "offload") and op.kind != "dw":
        return "store"
    reads_from_ssd = op.verb == "prefetch" and (op.reads[0].kind == "s" or op.stage == FILL)
    if reads_from_ssd or (op.verb == "offload" and op.reads[0].kind == "w"):
        return "fetch"
    return op.verb if op.verb in ("update", "empty") else None


def _row_of(op: Op) -> str:
    """The name of the row of an operation that belongs to no update."""
    value, there = (*op.reads, *op.results)[0], (*op.results, *op.into)
    kind = "sums" if value.kind == "dw" and value.part else value.kind
    moves = op.lane != "net" and there and there[0].kind == value.kind
    return f"{op.verb} {kind}" + (f" {value.tier}>{there[0].tier}" if moves else "")


class _StageAssigner:
    def __init__(self, program: Program, placement: Placement) -> None:
        self.program = program
        self.placement = placement
        self.stages = [*dict.fromkeys(op.stage for op in program.ops if op.stage not in (FILL, DRAIN)), DRAIN]
        self.last = len(self.stages) - 1
        self.index = {stage: index for index, stage in enumerate(self.stages)} | {FILL: -1}
        self.sizes = Counter(self.index[op.stage] for op in program.ops if op.micro_batch is not None)
        last_head = max((self.index[op.stage] for op in program.ops if op.verb == "head"), default=-1)
        self.after_heads = IssuePoint(last_head, self.sizes[last_head], AFTER)
        self.fetches = defaultdict[Value, list[int]](list)  # the stages for which gradient sums come from SSD
        for op in program.ops:
            if op.verb == "prefetch" and op.reads[0].kind == "dw" and not op.reads[0].part:
                self.fetches[op.reads[0]].append(self.index[op.stage])
        self.staged: IssuePoint | None = None  # before the reader of the latest `ahead` transfer
        late = [op.into[0] for op in program.ops if op.verb == "update" and op.stage == FILL]
        self.late = {placement.by_unit[value.unit].group_of(value).when for value in late}
        # The stage of each unit's first use. Where updates run alone there is none: units then follow each other as in
        # a step, because `slab` gives a late parameter the memory of a gradient that is used before it.
        in_order = sorted(placement.units, key=lambda unit: height(unit.unit))
        self.first_stage: dict[Unit | None, int] = {unit.unit: number for number, unit in enumerate(in_order)}
        for op in reversed(program.ops):
            if op.verb == "gather":
                self.first_stage[op.results[0].unit] = self.index[op.stage]

    def ops(self) -> Iterator[Op]:
        points: list[IssuePoint] = []
        collectives: dict[tuple[str, int], IssuePoint] = {}  # the latest, by verb and stage
        dependencies = _IssueOrder(points)
        done: Counter[Stage] = Counter()  # computations of each stage
        for index, op in enumerate(self.program.ops):
            before = [points[other] for other in dependencies.before(op)]
            point = max([self._issue_point(op, done[op.stage]), *before])
            if op.lane == "net":  # in the same order on ranks with different numbers of micro-batches
                point = max(point, collectives.get((op.verb, point.stage), point))
                collectives[op.verb, point.stage] = point
            points.append(point)
            dependencies.enter(index, op)
            done[op.stage] += op.micro_batch is not None
        for index in sorted(range(len(points)), key=points.__getitem__):  # stable: equal ones stay in their order
            op, number = self.program.ops[index], points[index].stage
            stage = self.stages[min(number, self.last)] if number >= 0 else FILL
            yield op if op.stage == stage else op.moved(stage)

    def _issue_point(self, op: Op, position: int) -> IssuePoint:
        """Where an operation is issued by its row; it now stands before the computation `position` of its stage."""
        here = self.index[op.stage]
        if op.micro_batch is not None:
            return IssuePoint(here, position, AT)
        if op.verb == "seal":
            return IssuePoint(here)
        part = _part_in_update(op)
        name = f"{'late' if op.stage == FILL else 'early'} update" if part else _row_of(op)
        row = ROWS.get(name, HERE)
        stage = row.own_memory if self.placement.separate or self.placement.world > 1 else row.one_memory
        if part:
            return self._beside_update(op, part, stage)
        stage += here
        match row.anchor:
            case "made":
                return IssuePoint(here, position - 1, AFTER)
            case "read":
                return self._before_reader(here, position - (op.verb != "alias"))
            case "ahead":  # as soon as the one before it is used, so the lane has all the time until its own reader
                before, self.staged = self.staged, IssuePoint(here, position, BEFORE)
                return min(before or self.staged, self._before_reader(here, position - 2))
            case "piece":  # so that it shares the link with that micro-batch's checkpoint
                return (
                    IssuePoint(stage, self._beside(op, stage), BEFORE) if 0 <= stage < self.last else IssuePoint(stage)
                )
            case "end":
                return IssuePoint(stage, self.sizes[stage], AFTER)
        if name.startswith("prefetch sums"):
            return self._within_backward(stage)
        if name == "offload dw host>ssd":  # it must have left before the stage that needs it again
            fetches = self.fetches[op.results[0]]
            stage = min(stage, fetches[bisect_right(fetches, here)])
        if op.lane != "ssd_read":
            return IssuePoint(stage)
        return IssuePoint(self._ahead(stage), rank=READS_FIRST[op.reads[0].kind])

    def _within_backward(self, stage: int) -> IssuePoint:
        """The start of a stage, but not before the last head: a loss may wait while others have their backward."""
        return max(IssuePoint(stage), self.after_heads)

    def _beside(self, op: Op, stage: int) -> int:
        """The micro-batch beside which a piece of a unit moves."""
        if self.placement.world == 1:
            return op.results[0].piece or 0
        number = len(self.placement.by_unit[op.results[0].unit].pieces)
        return (op.results[0].piece or 0) * self.sizes[stage] // number

    def _beside_update(self, op: Op, part: str, stage: int) -> IssuePoint:
        """Where a part of an update is issued; `stage`: the update's, relative to its unit's."""
        value = next(value for value in map(homed, (*op.into, *op.results)) if value.kind in ("w", "s", "dw"))
        unit = self.placement.by_unit[value.unit]
        group = unit.group_of(value)
        groups = unit.trained(*(self.late if op.stage == FILL else (group.when,)))
        place, updates = groups.index(group), self.placement.decision.layer_updates
        if op.stage == FILL:
            stage += self.first_stage[unit.unit] - stages_after_first(len(groups) - 1, updates)
        else:
            stage += self.index[op.stage]
        stage += stages_after_first(place, updates)
        if updates > 1:
            return IssuePoint(stage, rank=OTHERS + 2 * place + BESIDE_PIECE[part])
        if op.lane != "ssd_read":
            return IssuePoint(stage + BESIDE_UPDATE[part])
        if stage >= self.last and op.stage != FILL:  # after the last backward: nothing computes beside it
            stage -= self.placement.decision.ahead
        return IssuePoint(self._ahead(stage + BESIDE_UPDATE[part]), rank=READS_FIRST[op.reads[0].kind])

    def _ahead(self, stage: int) -> int:
        """The stage of a read from SSD, moved `lookahead` stages earlier, except where the step begins with it."""
        return max(stage - self.placement.decision.lookahead, min(stage, 0))

    def _before_reader(self, stage: int, position: int) -> IssuePoint:
        """Before the computation `position` of a stage; -1 is the last of the stage before."""
        while position < 0 and stage > 0:
            stage -= 1
            position += self.sizes[stage]
        return IssuePoint(stage, position, BEFORE) if position >= 0 else IssuePoint(stage - 1)


class _IssueOrder:
    """The operations that each operation must come after: those that it would wait for, and no others.

    points: where each operation so far is issued; of several users of a value the last one stands for all.
    A gathered unit is in the memory of its parts, so they are in use as long as it is. `seal` commits what is stored
    before it.
    """

    def __init__(self, points: Sequence[IssuePoint]) -> None:
        self.values: Users[Value, int] = Users(lambda users: (max(users, key=points.__getitem__),))
        self.gathered: dict[Value, Value] = {}  # the unit that is in a part's memory
        self.stores: list[int] = []
        self.seal: list[int] = []

    def before(self, op: Op) -> list[int]:
        """The operations that define what it reads, and those that use what it changes or defines anew. `seal` comes
        after all stores of the step before, and the stores of this step after `seal`.
        """
        changed = (*op.changes, *op.results)
        found = self.values.awaited(op.reads, changed)
        for value in changed:
            if value in self.gathered:
                found += self.values.idle(self.gathered[value])
        if op.verb == "seal":
            return found + self.stores
        return found + self.seal if _is_stored(op) else found

    def enter(self, index: int, op: Op) -> None:
        """The operation is issued."""
        if op.verb == "seal":
            self.seal = [index]
        elif _is_stored(op):
            self.stores.append(index)
        for value in op.reads:
            self.values.use(value, index)
        for value in (*op.results, *op.changes):
            self.values.change(value, index)
        if op.verb == "gather":
            self.gathered |= dict.fromkeys(op.reads, op.results[0])


def _is_stored(op: Op) -> bool:
    """Whether an operation brings to SSD what outlives the step."""
    return op.lane == "ssd_write" and bool(op.into)
