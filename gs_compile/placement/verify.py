"""The laws of a step program, checked between any two passes. A broken one is always a fault of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from gs_compile.errors import ProgramError
from gs_compile.placement.placement import Placement
from gs_compile.placement.speculation import Speculation, is_speculative
from gs_compile.program.ir import DRAIN, EPILOGUE, FILL, KINDS, PROLOGUE, Op, Program, Stage, Tier, Value, height, homed
from gs_compile.program.verbs import LAWS, MOVEMENTS, SIGNATURES, Slot

_Place = tuple[int, float]

INPUT_KINDS = frozenset({"batch", "w", "dy"})  # defined before the step begins


def verify(program: Program, placement: Placement | None = None, *, late: bool = False, redo: bool = True) -> None:
    """Raise ProgramError unless `program` is well-formed; the error says pass, line, operation and value:

        after snake, line 19: x2_0.device = forward(x1_0.device, w1.device): x1_0.device was freed

    The line is that of the unfolded text. One walk over the operations, so checking is as cheap as printing.
    With a `placement`, what it says of homes and of late updates (`late`: the step before has left gradients, `redo`:
    those of speculative updates too) holds too: what is there at the start and at the end, each part of a unit updated
    once, before its forward or after its gradient, and planned peaks that are true.
    """
    _Walk(program, placement, late, redo).run()


class _Walk:
    """What is known about each value and stage at one point of the program."""

    def __init__(self, program: Program, placement: Placement | None, late: bool, redo: bool) -> None:
        self.program = program
        self.placement = placement
        self.present = placement.homes(late=late, redo=redo) if placement else frozenset()
        waiting = placement.waiting(redo=redo) if placement and late else ()
        self.waiting = _parts(placement, *waiting) if placement and waiting else set()  # until their late update
        self.speculation = Speculation(placement) if placement and placement.speculative else None
        self.updated: set[Value] = set()
        self.empty: set[Value] = set()  # parts on their way to an update that fills them
        self.changed: set[Value] = set()  # parts that an update has changed in host memory, and whose home is elsewhere
        self.gathered: dict[Value, tuple[Value, ...]] = {}  # wholes, and what they are in the memory of
        self.defined: set[Value] = set()
        self.freed: set[Value] = set()
        self.additions: Counter[Value] = Counter()  # how many operations have added to an accumulator
        self.all_additions = Counter(value for op in program.ops for value in op.into if value.kind == "dw")
        self.order = program.order
        self.stages: list[Stage] = []
        self.seen: set[Stage] = set()
        self.tracks: dict[object, tuple[_Place, Stage]] = {}  # the last place on each line of stages, and its stage
        self.done: Counter[tuple[str, int | None]] = Counter()  # operations of the stage, by verb and micro-batch

    def run(self) -> None:
        for index, op in enumerate(self.program.ops):
            for complaint in self._complaints(op):
                raise self._error(index, complaint)
        for complaint in self._unfinished_stage():
            raise self._error(len(self.program.ops) - 1, complaint)
        for stage in self._missing_stages():
            raise ProgramError(f"after {self.program.made_by}: stage {stage} is missing")
        for complaint in self._breaks_homes():
            raise ProgramError(f"after {self.program.made_by}: at the end, {complaint}")

    def _complaints(self, op: Op) -> Iterator[str]:
        """What is wrong with one operation; each law sees what the ones before it have let pass."""
        yield from self._breaks_stages(op)
        yield from self._breaks_numbers(op)
        yield from self._breaks_signature(op)
        yield from self._breaks_updates(op)
        yield from self._breaks_gathered(op)
        yield from self._breaks_lifetimes(op)

    def _breaks_stages(self, op: Op) -> Iterator[str]:
        """Stages are contiguous and in the schedule's order; each compute verb of one runs once per micro-batch."""
        if not self.stages or op.stage != self.stages[-1]:
            yield from self._unfinished_stage()
            if op.stage in self.seen:
                yield f"stage {op.stage} was left and comes again"
            if op.stage.unit is not None and (op.stage.micro_batch is None) != (self.order == "vertical"):
                yield f"stage {op.stage} is of another order than {self.order}"
            for track, place in _places(op.stage).items():
                last, before = self.tracks.get(track, (place, op.stage))
                if place < last:
                    yield f"stage {op.stage} comes after {before}"
                self.tracks[track] = place, op.stage
            self.stages.append(op.stage)
            self.seen.add(op.stage)
            self.done.clear()
        self.done[op.verb, op.micro_batch] += 1
        if op.verb in SIGNATURES and self.done[op.verb, op.micro_batch] > 1:
            yield f"micro-batch {op.micro_batch} a second time in this stage"
        if op.verb in SIGNATURES and op.stage.micro_batch not in (None, op.micro_batch):
            yield f"micro-batch {op.micro_batch} in a stage of another"

    def _micro_batches(self, stage: Stage) -> Sequence[int]:
        """Those that a stage is of."""
        return range(self.program.num_micro_batches) if stage.micro_batch is None else (stage.micro_batch,)

    def _unfinished_stage(self) -> Iterator[str]:
        """Whether the stage that ends here has left a micro-batch out."""
        for verb in {verb for verb, _ in self.done if verb in SIGNATURES}:
            for j in self._micro_batches(self.stages[-1]):
                if not self.done[verb, j]:
                    yield f"stage {self.stages[-1]} has ended without micro-batch {j}"

    def _missing_stages(self) -> Iterator[str]:
        """Every unit runs forward, unless all there is are updates, if any; the head may do so in the backward."""
        if self.placement is not None and self.seen <= {FILL, DRAIN}:
            return
        each = range(self.program.num_micro_batches) if self.order == "horizontal" else (None,)
        for j in each:
            for unit in (PROLOGUE, *range(self.program.num_layers)):
                if Stage("forward", unit, j) not in self.seen:
                    yield str(Stage("forward", unit, j))
            if not self.seen & {Stage("forward", EPILOGUE, j), Stage("backward", EPILOGUE, j)}:
                yield str(Stage("forward", EPILOGUE, j))

    def _breaks_numbers(self, op: Op) -> Iterator[str]:
        """Kinds are known, layers and micro-batches in range."""
        num_layers, num_micro_batches = self.program.num_layers, self.program.num_micro_batches
        if isinstance(op.stage.unit, int) and not 0 <= op.stage.unit < num_layers:
            yield f"layer {op.stage.unit} is not one of 0 .. {num_layers - 1}"
        for value in (*op.reads, *op.into, *op.results):
            if value.kind not in KINDS:
                yield f"{value}: no kind is called {value.kind}"
            if isinstance(value.unit, int) and not 0 <= value.unit <= num_layers:
                yield f"{value}: no boundary {value.unit} between {num_layers} layers"
        for j in (
            op.micro_batch,
            op.stage.micro_batch,
            *(value.micro_batch for value in (*op.reads, *op.into, *op.results)),
        ):
            if j is not None and not 0 <= j < num_micro_batches:
                yield f"micro-batch {j} is not one of 0 .. {num_micro_batches - 1}"

    def _breaks_signature(self, op: Op) -> Iterator[str]:
        """What the verb reads, defines and changes is what the table of signatures says, in that order."""
        if op.verb in SIGNATURES:
            signature = SIGNATURES[op.verb]
            if (op.stage.phase, op.stage.unit_class) not in signature.stages:
                yield f"{op.verb} does not belong in stage {op.stage}"
            if op.micro_batch is None:
                yield f"{op.verb} works on one micro-batch, and none is named"
            if op.stage.unit is None:
                return
            yield from self._misfits(op, signature.reads, op.reads, "reads")
            yield from self._misfits(op, signature.results, op.results, "defines")
            yield from self._misfits(op, signature.into, op.into, "changes")
        elif op.verb in LAWS:
            words, is_obeyed = LAWS[op.verb]
            if not is_obeyed(op) or (op.verb == "count" and len(op.reads) != self.program.num_micro_batches):
                yield f"{op.verb} {words}"
        else:
            yield f"no verb is called {op.verb}"

    def _misfits(self, op: Op, slots: tuple[Slot, ...], values: tuple[Value, ...], doing: str) -> Iterator[str]:
        rest = list(values)
        for slot in slots:
            expected = slot.value(op.unit, op.micro_batch or 0, self.program.num_layers)
            if rest and rest[0] == expected:
                rest.pop(0)
            elif not slot.optional:
                yield f"{op.verb} {doing} {expected} here, not {rest[0] if rest else 'nothing'}"
        if rest:
            yield f"{op.verb} {doing} no {rest[0]} here"

    def _breaks_updates(self, op: Op) -> Iterator[str]:
        """A part is updated once, used neither before its late update nor without contents, and goes home changed.

        Speculative updates are held to laws of their own, and may come after a late one of the same part.
        """
        if self.speculation is not None:
            yield from self.speculation.breaks(op)
            if is_speculative(op):
                self.updated.difference_update(replace(value, tier=None) for value in op.into)
        if op.verb == "update":
            for value in op.into:
                part = replace(value, tier=None)
                if part in self.updated:
                    yield f"{value} is updated twice"
                self.updated.add(part)
                self.waiting.discard(part)
                self.empty.discard(part)
                if value.tier == "host" and self._home(value) in ("ssd", "device"):
                    self.changed.add(part)
        elif op.verb in MOVEMENTS:
            yield from self._breaks_contents(op)

    def _breaks_contents(self, op: Op) -> Iterator[str]:
        """What a movement reads is what it should be, and what it overwrites is needed no more."""
        to_device = (*op.results, *op.into)[0].tier == "device"
        for value in op.reads:
            part = replace(value, tier=None)
            if to_device and part in self.waiting:
                yield f"{value} is used before its late update"
            if part in self.empty:
                yield f"{value} is empty until its update"
            if value.tier != "host" and part in self.changed:
                yield f"{value} is not what the update has made"
        for value in op.results:
            part = replace(value, tier=None)
            made = self.speculation.begun if self.speculation else self.updated  # a late update may come before
            if value.tier == "host" and (part in self.changed or (op.verb == "empty" and part in made)):
                yield f"{value} would lose what the update has made"
            if op.verb == "empty":
                self.empty.add(part)
        self.changed.difference_update(replace(homed(value), tier=None) for value in op.into)

    def _breaks_gathered(self, op: Op) -> Iterator[str]:
        """What the device reads where it lives does not change while its unit is gathered."""
        if self.placement is None or self.program.made_by != "free":
            return
        for value in (*op.results, *op.into):
            whole = Value("w", value.unit)
            if value.part and value in self.gathered.get(whole, ()):
                yield f"{value} changes while {whole} is in use"
        if op.verb == "gather":
            self.gathered[op.results[0]] = op.reads
        elif op.verb == "free":
            self.gathered.pop(op.reads[0], None)

    def _home(self, value: Value) -> str | None:
        unit = self.placement.by_unit.get(value.unit) if self.placement and value.unit is not None else None
        parts = unit and (unit.w if homed(value).kind == "w" else unit.s)
        return parts[value.part].tier if parts and value.part in parts else None

    def _breaks_lifetimes(self, op: Op) -> Iterator[str]:
        """Defined before all uses, freed after them, and not defined again but by a movement; sums complete when read.

        A movement may bring a value back, freed before or not.
        """
        for value in (*op.reads, *op.into):
            if value in self.freed:
                yield f"{value} was freed"
            if value not in self.defined and not self._is_input(value):
                yield f"{value} is not defined"
        for value in op.reads:
            whole = self.all_additions[replace(value, tier="device")] if _is_sum(value) else 0
            if _is_sum(value) and self.additions[value] != whole and not self._keeps_sum(op, value):
                yield f"{value} is read after {self.additions[value]} of {whole} micro-batches"
        for value in op.into:
            self.additions[value] += 1
        for value in op.results:
            if _is_sum(value):
                self.additions[value] = self.additions[op.reads[0]] if op.reads else 0
        for value in op.results:
            if value in self.defined and op.verb not in MOVEMENTS:
                yield f"{value} is defined twice"
            self.defined.add(value)
            self.freed.discard(value)
        if op.verb == "free":
            self.freed.update(op.reads)

    def _keeps_sum(self, op: Op, value: Value) -> bool:
        """Whether an incomplete sum is only moved, or ends where it has been moved to."""
        if op.verb != "free":
            return op.verb in MOVEMENTS and all(replace(value, tier=result.tier) == result for result in op.results)
        others = (replace(value, tier=tier) for tier in get_args(Tier) if tier != value.tier)
        return any(
            other in self.defined and other not in self.freed and self.additions[other] == self.additions[value]
            for other in others
        )

    def _is_input(self, value: Value) -> bool:
        """Whether a value is there before the step begins."""
        placed = self.placement is not None and (value.unit in self.placement.by_unit or value.kind == "scale")
        if not placed or value.kind not in ("w", "s", "sw", "ss", "dw", "scale"):
            return value.kind in INPUT_KINDS
        if self.program.made_by == "overlap":  # all on the device still
            return bool(value.part) or value.kind == "scale"
        return value in self.present

    def _breaks_homes(self) -> Iterator[str]:
        """What must outlive the step does, nothing else is left behind, and the planned peaks are true."""
        if self.placement is None or self.program.made_by != "free":
            return
        late = self.placement.has_late and any(op.verb == "norm" for op in self.program.ops)
        homes = self.placement.homes(late=late)
        for value in sorted(self.waiting, key=str):
            yield f"{value} has not had its late update"
        complete = {value.unit for value in self.all_additions}
        for value in sorted(_parts(self.placement, "early"), key=str):
            if value.unit in complete and not self.speculation and value not in self.updated:
                yield f"{value} has not had its update"
        if self.speculation is not None:
            yield from self.speculation.unfinished(complete)
        for value in sorted(homes, key=str):
            if replace(value, tier=None) in self.changed:
                yield f"{value} is not what the update has made"
            if value in self.freed or (value not in self.defined and value not in self.present):
                yield f"{value} is not at home"
        for value in sorted(self.defined - self.freed - homes - self.present, key=str):
            if value.tier != "device" or (value.kind in ("w", "dw") and value.unit in self.placement.by_unit):
                yield f"{value} is left behind"
        if self.program.peaks and self.program.peaks != self.placement.peaks(self.program.ops):
            yield f"the peaks are not {self.program.peaks}"

    def _error(self, index: int, complaint: str) -> ProgramError:
        where = f"after {self.program.made_by}, line {self.program.line_of(index)}"
        return ProgramError(f"{where}: {self.program.ops[index]}: {complaint}")


def _places(stage: Stage) -> dict[object, _Place]:
    """Where a stage stands on each line of stages that is in order: up through the forward, down through the backward.

    In the vertical order that is one line. In the horizontal order each micro-batch has one, and in each phase the
    micro-batches follow each other.
    """
    if stage.unit is None:
        return {"step": (0, 0.0) if stage == FILL else (3, 0.0)}
    place = (2, -height(stage.unit)) if stage.phase == "backward" else (1, height(stage.unit))
    if stage.micro_batch is None:
        return {"step": place}
    return {"step": (1, 0.0), stage.micro_batch: place, stage.phase: (stage.micro_batch, 0.0)}


def _is_sum(value: Value) -> bool:
    """Whether it is all of a unit's gradient, wherever it is."""
    return value.kind == "dw" and not value.part


def _parts(placement: Placement, *when: str) -> set[Value]:
    """The parts of parameters that are updated early, or late, wherever they are."""
    parts = ((unit, part) for unit in placement.units for group in unit.trained(*when) for part in group.w)
    return {replace(unit.value("w", part), tier=None) for unit, part in parts}
