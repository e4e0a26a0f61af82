"""Give each transfer its stage: as late as it can be without a wait (arXiv 2512.17570, sections 4.2 to 4.4).

The table below says it: with S the stage of the layer itself, in the forward or the backward, a transfer is issued in
S + the number in its row. The second column is for a device that reads host memory itself: no stage is spent on the way
between them. A unit that is updated in several groups, as it is larger than a layer, takes one stage more for each.

What would come before the first stage stands in `fill`, what would come after the last in `drain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import DRAIN, FILL, Op, Program, Stage, Value, homed

# In the stage: at its start; after the computation that makes the value (made); before the one that reads it, one
# micro-batch ahead where it is copied (read); piece k beside micro-batch k (piece); after all computation (end).
Place = Literal["start", "made", "read", "piece", "end"]

# `store` is what brings the result of an update to where it is stored: SSD, or the device.
#
# what is moved                own memory   one memory   place
_TABLE = """
  prefetch w  ssd>host            -2           -1        start    parameters, the whole unit
  prefetch w  host>device         -1           -1        piece
  prefetch x  ssd>host            -1           -1        start    a checkpoint, all micro-batches of the layer
  prefetch x  host>device          0            0        read     the first is still there
  prefetch dx host>device          0            0        read
  offload  x  device>host          0            0        made
  offload  dx device>host          0            0        made
  offload  x  host>ssd             1            1        start    all micro-batches of the layer
  alias    x  device>host          0            0        made
  alias    x  host>device          0            0        read

  norm     dw                      0            0        end
  alias    dw device>host          0            0        end
  clip     norm                    0            0        end
  offload  dw device>host          1            1        start    a complete gradient, or a sum between micro-batches
  offload  dw host>ssd             2            1        start    a sum, but before its next use
  prefetch dw ssd>host            -2           -1        start
  prefetch dw host>device         -1           -1        start

  early prefetch s                 1            0        start
  early empty w                    2            1        start
  early update                     2            1        start
  early store w                    3            2        start
  early store s                    3            2        start

  late prefetch w                 -3           -3        start    S in the forward
  late prefetch s                 -3           -3        start
  late empty w                    -2           -2        start
  late update                     -2           -2        start
  late store w                    -1           -1        start
  late store s                    -1           -1        start
"""
READS_FIRST = {"x": 0, "w": 1, "dw": 1, "s": 2}  # on the SSD's read lane, by how soon they are needed
OTHERS = 3
BEFORE, AT, AFTER = -1, 0, 1


class Row(NamedTuple):
    """Stages from the unit's own, and the place in that stage."""

    own_memory: int
    one_memory: int
    place: Place


class Slot(NamedTuple):
    """A place in the order of issue."""

    stage: int
    position: int = -1  # of the micro-batch in the stage; -1: before all of them
    moment: int = 0  # before, at or after that computation
    rank: int = OTHERS


def _rows() -> Iterator[tuple[str, Row]]:
    places: tuple[Place, ...] = ("start", "made", "read", "piece", "end")
    for line in filter(None, map(str.split, _TABLE.splitlines())):
        at = next(at for at, word in enumerate(line) if word in places)
        yield " ".join(line[: at - 2]), Row(int(line[at - 2]), int(line[at - 1]), places[places.index(line[at])])


ROWS = dict(_rows())
HERE = Row(0, 0, "start")  # what takes no time stays in its stage


@dataclass(frozen=True)
class Pipeline:
    """The same operations, each issued in the stage that the table above gives it."""

    name: ClassVar[str] = "pipeline"

    placement: Placement

    def __call__(self, program: Program) -> Program:
        return program.with_ops(_StageAssigner(program, self.placement).ops(), made_by=self.name)


def _row_of(op: Op) -> str:
    """The name of an operation's row."""
    value = (*op.reads, *op.results)[0]
    if op.verb == "update":
        what = "update"
    elif op.verb == "empty" or (op.into and op.verb in ("prefetch", "offload")):
        what = f"{'empty' if op.verb == 'empty' else 'store'} {value.kind}"
    elif op.verb == "prefetch" and (value.kind == "s" or op.stage == FILL):
        what = f"prefetch {value.kind}"
    elif op.results and op.results[0].kind == value.kind:
        return f"{op.verb} {value.kind} {value.tier}>{op.results[0].tier}"
    else:
        return f"{op.verb} {value.kind}"
    return f"{'late' if op.stage == FILL else 'early'} {what}"


class _StageAssigner:
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
                self._note_computation(index, op)
            elif op.verb == "prefetch" and op.reads[0].kind == "dw":
                self.fetches.setdefault(op.reads[0], []).append(self.stages[op.stage])
        gathers = [op for op in program.ops if op.verb == "gather"]
        late = [op.into[0] for op in program.ops if op.verb == "update" and op.stage == FILL]
        self.late = {placement.by_unit[value.unit or 0].group_of(value).when for value in late}
        units = dict.fromkeys(value.unit for value in late)
        self.first_stage = {unit: place for place, unit in enumerate(units)}  # one by one, if nothing else runs
        self.first_stage |= {op.results[0].unit: self._index(op.stage) for op in reversed(gathers)}

    def _note_computation(self, index: int, op: Op) -> None:
        at = self.stages[op.stage]
        self.positions[index] = (at, self.sizes[at])
        self.sizes[at] += 1
        self.makers.update(dict.fromkeys(op.results, index))
        for value in op.reads:
            self.readers.setdefault(value, []).append(index)

    def ops(self) -> Iterator[Op]:
        slots: list[Slot] = []
        dependencies = _Dependencies()
        for index, op in enumerate(self.program.ops):
            slots.append(max([self._slot(index, op), *(slots[before] for before in dependencies.of(op))]))
            dependencies.note(index, op)
        for index in sorted(range(len(slots)), key=lambda index: (slots[index], index)):
            yield replace(self.program.ops[index], stage=self._stage(slots[index].stage))

    def _index(self, stage: Stage) -> int:
        return -1 if stage == FILL else self.last if stage == DRAIN else self.stages[stage]

    def _stage(self, index: int) -> Stage:
        if 0 <= index < self.last:
            return self.names[index]
        return FILL if index < 0 else DRAIN

    def _size(self, stage: int) -> int:
        return self.sizes[stage] if 0 <= stage < self.last else 0

    def _slot(self, index: int, op: Op) -> Slot:
        """Where an operation belongs by its row."""
        if index in self.positions:
            return Slot(*self.positions[index], AT)
        name = _row_of(op)
        row = ROWS.get(name, HERE)
        stage = self._origin(op, name) + (row.own_memory if self.placement.separate else row.one_memory)
        match row.place:
            case "made":
                return Slot(*self.positions[self.makers[op.reads[0]]], AFTER)
            case "read":
                return self._before_reader(index, op)
            case "piece":  # so that it shares the link with that micro-batch's checkpoint
                return Slot(stage, op.results[0].piece or 0, BEFORE) if 0 <= stage < self.last else Slot(stage)
            case "end":
                return Slot(stage, self._size(stage), AFTER)
        if name == "offload dw host>ssd":  # has to have left before the stage that needs it again
            stage = min(stage, next(at for at in self.fetches[op.results[0]] if at > self._index(op.stage)))
        from_ssd = op.verb == "prefetch" and op.lane == "ssd_read"
        return Slot(stage, rank=READS_FIRST[op.reads[0].kind] if from_ssd else OTHERS)

    def _origin(self, op: Op, name: str) -> int:
        """The stage that a row counts from. Of several groups of a unit each has one of its own."""
        here, when = self._index(op.stage), name.split()[0]
        if when not in ("early", "late"):
            return here
        value = next(value for value in map(homed, (*op.into, *op.results)) if value.kind in ("w", "s"))
        unit = self.placement.by_unit[value.unit or 0]
        group = unit.group_of(value)
        if when == "early":
            return here + unit.trained(group.when).index(group)
        groups = unit.trained(*self.late)
        return self.first_stage[unit.unit] - (len(groups) - 1 - groups.index(group))

    def _before_reader(self, index: int, op: Op) -> Slot:
        """Before the computation that reads a value, or what is copied one micro-batch before that."""
        ahead = 0 if op.verb == "alias" else 1
        reader = next(reader for reader in self.readers[op.results[0]] if reader > index)
        stage, position = self.positions[reader]
        if position < ahead:
            return Slot(stage - 1, self._size(stage - 1) - 1, BEFORE) if stage else Slot(stage - 1)
        return Slot(stage, position - ahead, BEFORE)


class _Dependencies:
    """What an operation must come after: who defines what it reads, who used what it defines or changes anew.

    A gathered unit is in the memory of its parts, so those are in use as long as it is.
    """

    def __init__(self) -> None:
        self.users: dict[Value, list[int]] = {}
        self.makers: dict[Value, int] = {}
        self.sources: dict[Value, tuple[Value, ...]] = {}

    def of(self, op: Op) -> Iterator[int]:
        yield from (self.makers[value] for value in (*op.reads, *op.into) if value in self.makers)
        for value in (*op.results, *op.into):
            yield from self.users.get(value, ())

    def note(self, index: int, op: Op) -> None:
        for value in (*op.results, *op.into):
            self.makers[value] = index
            self.users[value] = []
        for value in (*op.reads, *op.into):
            for used in (value, *self.sources.get(value, ())):
                self.users.setdefault(used, []).append(index)
        if op.verb == "gather":
            self.sources[op.results[0]] = op.reads
