"""Give each transfer its stage: as late as it can be without a wait (arXiv 2512.17570, sections 4.2 to 4.4).

With S the stage of the layer itself, in the forward or the backward:

    parameters, SSD to host                     S - 2     the whole layer
    parameters, host to device                  S - 1     in pieces, one beside each micro-batch
    checkpoint, SSD to host                     S - 1     all micro-batches of the layer
    checkpoint, gradient, host to device        S         one micro-batch ahead; the first is still there
    checkpoint, gradient, device to host        S         as soon as it is made
    checkpoint, host to SSD                     S + 1     all micro-batches of the layer
    gradient of parameters, device to host      S + 1     with the early optimizer state, SSD to host
    update, early part                          S + 2
    parameters and state, early, host to home   S + 3
    optimizer state, late, SSD to host          S - 3     of the forward
    update, late part                           S - 2
    parameters and state, late, host to home    S - 1

and for gradient sums in the horizontal order, where a stage is of one micro-batch:

    SSD to host                                 S - 2     as parameters
    host to device                              S - 1
    device to host                              S + 1     as complete gradients
    host to SSD                                 S + 2

Where the device reads host memory itself, no stage is spent on the way between them: parameters come from SSD at S - 1,
all of the early update is one stage earlier, and gradient sums come from SSD at S - 1 and go there at S + 1.
A unit that is updated in several groups, as it is larger than a layer, takes one stage more for each.

What would come before the first stage stands in `fill`, what would come after the last in `drain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import DRAIN, FILL, Op, Program, Stage, Value, homed

# Stages from the unit's own, for what moves between SSD and host; forward and backward alike.
EARLY = {"prefetch s": 1, "empty w": 2, "update": 2, "offload w": 3, "offload s": 3}
LATE = {"prefetch w": -3, "prefetch s": -3, "empty w": -2, "update": -2, "offload w": -1, "offload s": -1}
READS_FIRST = {"x": 0, "w": 1, "dw": 1, "s": 2}  # on the SSD's read lane, by how soon they are needed


class Slot(NamedTuple):
    """A place in the order of issue."""

    stage: int
    position: int = -1  # of the micro-batch in the stage; -1: before all of them
    moment: int = 0  # before, at or after that computation
    rank: int = 3


BEFORE, AT, AFTER = -1, 0, 1


def pipeline(program: Program, *, placement: Placement) -> Program:
    """The same operations, each issued in the stage that the table above gives it."""
    return program.with_ops(_Clock(program, placement).ops(), made_by="pipeline")


class _Clock:
    def __init__(self, program: Program, placement: Placement) -> None:
        self.program = program
        self.placement = placement
        stages = [stage for stage, _ in program.stages() if stage not in (FILL, DRAIN)]
        self.names = tuple(dict.fromkeys(stages))
        self.stages = {stage: index for index, stage in enumerate(self.names)}
        self.last = len(self.names)
        self.positions: dict[int, tuple[int, int]] = {}  # of computations: stage and place in it
        self.makers: dict[Value, int] = {}  # the computation that makes a value, and those that read it
        self.readers: dict[Value, list[int]] = {}
        self.fetches: dict[Value, list[int]] = {}  # the stages for which gradient sums come from SSD
        self.sizes = [0] * self.last
        for index, op in enumerate(program.ops):
            if op.micro_batch is not None:
                at = self.stages[op.stage]
                self.positions[index] = (at, self.sizes[at])
                self.sizes[at] += 1
                self.makers.update(dict.fromkeys(op.results, index))
                for value in op.reads:
                    self.readers.setdefault(value, []).append(index)
            elif op.verb == "prefetch" and op.reads[0].kind == "dw":
                self.fetches.setdefault(op.reads[0], []).append(self.stages[op.stage])
        gathers = [op for op in program.ops if op.verb == "gather"]
        late = [op.into[0] for op in program.ops if op.verb == "update" and op.stage == FILL]
        self.late = {placement.by_unit[value.unit or 0].group_of(value).when for value in late}
        units = dict.fromkeys(value.unit for value in late)
        self.first_stage = {unit: place for place, unit in enumerate(units)}  # one by one, if nothing else runs
        self.first_stage |= {op.results[0].unit: self._index(op.stage) for op in reversed(gathers)}

    def ops(self) -> Iterator[Op]:
        slots: list[Slot] = []
        limits = _Limits()
        for index, op in enumerate(self.program.ops):
            slots.append(max(self._slot(index, op), limits.earliest(op, slots)))
            limits.note(index, op)
        for index in sorted(range(len(slots)), key=lambda index: (slots[index], index)):
            yield replace(self.program.ops[index], stage=self._stage(slots[index].stage))

    def _index(self, stage: Stage) -> int:
        return -1 if stage == FILL else self.last if stage == DRAIN else self.stages[stage]

    def _stage(self, index: int) -> Stage:
        if 0 <= index < self.last:
            return self.names[index]
        return FILL if index < 0 else DRAIN

    # Where each operation belongs ------------------------------------------------------------------------------------

    def _slot(self, index: int, op: Op) -> Slot:
        if index in self.positions:
            return Slot(*self.positions[index], AT)
        here = self._index(op.stage)
        value = (*op.results, *op.into, *op.reads)[0]
        tiers = ((*op.reads, value)[0].tier, (*op.results, *op.into, value)[0].tier)
        match op.verb, value.kind, tiers:
            case "alias", "dw", ("host", "device"):
                return Slot(here)
            case (("norm" | "alias" | "clip"), ("norm" | "dw" | "scale"), _):
                return Slot(here, self._size(here), AFTER)
            case "alias", _, _:
                return self._beside(index, op, value, ahead=0)
            case (("prefetch" | "offload"), ("x" | "dx"), (("host", "device") | ("device", "host"))):
                return self._beside(index, op, value, ahead=1)
            case "prefetch", "x", _:
                return Slot(here - 1, rank=READS_FIRST["x"])
            case "offload", "x", _:
                return Slot(here + 1)
            case "offload", "dw", ("host", "ssd"):
                return Slot(min(here + 1 + self.placement.separate, self._comes_back(op.results[0], here)))
            case "offload", "dw", _:
                return Slot(here + 1)
            case "prefetch", "dw", ("ssd", "host"):
                return Slot(here - 1 - self.placement.separate, rank=READS_FIRST["dw"])
            case "prefetch", "dw", _:
                return Slot(here - 1)
            case "prefetch", "w", ("host", "device") if value.piece is not None:
                return self._piece(here - 1, value.piece)
            case (("prefetch" | "offload" | "update" | "empty"), _, _):
                return self._optimizer(here, op, value)
        return Slot(here)

    def _optimizer(self, here: int, op: Op, value: Value) -> Slot:
        verb = "offload" if op.into else op.verb  # home may be the device
        what = "update" if op.verb == "update" else f"{verb} {homed(value).kind}"
        rank = READS_FIRST[value.kind] if verb == "prefetch" else 3
        before, after = self._turn(op, here)
        if here < 0:
            unit = (*op.into, *op.results, *op.reads)[0].unit
            return Slot(self.first_stage[unit] + LATE[what] - after, rank=rank)
        if what not in EARLY:
            return Slot(here - (2 if self.placement.separate else 1), rank=rank)  # parameters, for their stage
        return Slot(here + EARLY[what] + before - (not self.placement.separate), rank=rank)

    def _turn(self, op: Op, here: int) -> tuple[int, int]:
        """How many groups of its unit come before and after an update: a unit of many takes as many stages."""
        value = next(value for value in map(homed, (*op.into, *op.results)) if value.kind in ("w", "s"))
        unit = self.placement.by_unit[value.unit or 0]
        group = unit.group_of(value)
        groups = unit.trained(*(self.late if here < 0 else {group.when}))
        return (groups.index(group), len(groups) - 1 - groups.index(group)) if groups else (0, 0)

    def _comes_back(self, value: Value, here: int) -> int:
        """The stage that needs a value again which leaves after stage `here`: there it has to have left."""
        return next(stage for stage in self.fetches[value] if stage > here)

    def _piece(self, stage: int, piece: int) -> Slot:
        """Piece k goes beside the k-th micro-batch, so that it shares the link with that one's checkpoint."""
        return Slot(stage, piece, BEFORE) if 0 <= stage < self.last else Slot(stage)

    def _beside(self, index: int, op: Op, value: Value, *, ahead: int) -> Slot:
        """Next to the computation that makes the value, or so many micro-batches ahead of the one that reads it."""
        if value.tier == "host":
            return Slot(*self.positions[self.makers[op.reads[0]]], AFTER)
        stage, position = self.positions[next(reader for reader in self.readers[value] if reader > index)]
        if position < ahead:
            return Slot(stage - 1, self._size(stage - 1) - 1, BEFORE) if stage else Slot(stage - 1)
        return Slot(stage, position - ahead, BEFORE)

    def _size(self, stage: int) -> int:
        return self.sizes[stage] if 0 <= stage < self.last else 0


class _Limits:
    """What an operation must come after: who defines what it reads, who used what it defines or changes anew.

    A gathered unit is in the memory of its parts, so those are in use as long as it is.
    """

    def __init__(self) -> None:
        self.users: dict[Value, list[int]] = {}
        self.makers: dict[Value, int] = {}
        self.sources: dict[Value, tuple[Value, ...]] = {}

    def earliest(self, op: Op, slots: list[Slot]) -> Slot:
        before = [self.makers[value] for value in (*op.reads, *op.into) if value in self.makers]
        for value in (*op.results, *op.into):
            before += self.users.get(value, [])
        return max((slots[index] for index in before), default=Slot(-len(LATE)))

    def note(self, index: int, op: Op) -> None:
        for value in (*op.results, *op.into):
            self.makers[value] = index
            self.users[value] = []
        for value in (*op.reads, *op.into):
            for used in (value, *self.sources.get(value, ())):
                self.users.setdefault(used, []).append(index)
        if op.verb == "gather":
            self.sources[op.results[0]] = op.reads
