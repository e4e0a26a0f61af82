"""The laws of a step program, checked between any two passes. A broken one is always a fault of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from gs_compile.errors import ProgramError
from gs_compile.placement.laws import Collectives, Gathers, Lifetimes, Updates, at_the_end
from gs_compile.placement.placement import STARTS, Placement, StepContext
from gs_compile.placement.sealing import Seals
from gs_compile.program.ir import DRAIN, EPILOGUE, FILL, KINDS, PROLOGUE, Op, Program, Stage, Value, height
from gs_compile.program.verbs import JOINING, LAWS, SIGNATURES

_Position = tuple[int, float]
_Law = Callable[[Op], Iterator[str]]
Known = dict[object, set[int]]  # `id` of operations, by the sizes of the step


def verify(
    program: Program,
    placement: Placement | None = None,
    context: StepContext = STARTS,
    *,
    known: Known | None = None,
) -> None:
    """Raise ProgramError unless `program` is well-formed; the error says pass, line, operation and value:

        after snake, line 19: x2_0.device = forward(x1_0.device, w1.device): x1_0.device was freed

    The line is that of the unfolded text. One walk over the operations, so checking is as cheap as printing.
    A program is also checked against the `placement` and the step's `context`, as far as its form has them: what is
    there at the start and at the end, that each part of a unit is updated once, before its forward or after its
    gradient, what makes a step durable, and the planned peaks.

    known: the operations of earlier snapshots of the same step, for which the laws on one operation by itself are not
    checked again. New ones are added. They go by `id`, so the caller keeps the snapshots alive.
    """
    form = program.form
    placement = placement if form != "compute" else None
    present = placement.homes(late=context.late, redo=context.redo, warm=context.warm) if placement else frozenset()
    waiting = context.waiting(placement) if placement else ()
    stages, updates = Stages(program), Updates(placement, waiting)
    lifetimes = Lifetimes(program, placement, present)
    stores = form in ("tiers", "freed")
    sealing = Seals(placement, context) if placement and stores else None
    sizes = program.num_layers, program.num_micro_batches, program.joints
    asked = ({} if known is None else known).setdefault(sizes, set())
    by_itself: list[_Law] = [partial(_numbers, program), partial(_signature, program, program.joints)]
    laws: list[_Law] = [stages.breaks, partial(_once, by_itself, asked), updates.breaks]
    laws += [partial(_saved, placement)] if placement else []
    laws += [*([sealing.breaks] if sealing else []), Collectives().breaks]
    laws += [*([Gathers().breaks] if placement and form == "freed" else []), lifetimes.breaks]
    for index, op in enumerate(program.ops):
        for complaint in chain.from_iterable(law(op) for law in laws):
            raise _error(program, index, complaint)
    for complaint in stages.unfinished():
        raise _error(program, len(program.ops) - 1, complaint)
    for stage in stages.missing(placement):
        raise ProgramError(f"after {program.made_by}: stage {stage} is missing")
    for complaint in at_the_end(program, sealing, updates, lifetimes) if sealing and form == "freed" else ():
        raise ProgramError(f"after {program.made_by}: at the end, {complaint}")


def _once(laws: Sequence[_Law], asked: set[int], op: Op) -> Iterator[str]:
    """What an operation breaks of the laws on one operation by itself."""
    if id(op) not in asked:
        for law in laws:
            yield from law(op)
        asked.add(id(op))


def _error(program: Program, index: int, complaint: str) -> ProgramError:
    return ProgramError(f"after {program.made_by}, line {program.line_of(index)}: {program.ops[index]}: {complaint}")


class Stages:
    """Stages are contiguous and in the schedule's order; each compute verb of one runs once per micro-batch."""

    def __init__(self, program: Program) -> None:
        self.program, self.by_micro_batch = program, program.by_micro_batch
        self.now: Stage | None = None
        self.seen: set[Stage] = set()
        self.tracks: dict[object, tuple[_Position, Stage]] = {}  # the last position on each track, and its stage
        self.done: Counter[tuple[str, int | None]] = Counter()  # operations of the stage, by verb and micro-batch

    def breaks(self, op: Op) -> Iterator[str]:
        if op.stage != self.now:
            yield from self.unfinished()
            yield from self._begin(op.stage)
        self.done[op.verb, op.micro_batch] += 1
        if op.verb in SIGNATURES and self.done[op.verb, op.micro_batch] > 1:
            yield f"micro-batch {op.micro_batch} a second time in this stage"
        if op.verb in SIGNATURES and op.stage.micro_batch not in (None, op.micro_batch):
            yield f"micro-batch {op.micro_batch} in a stage of another"

    def _begin(self, stage: Stage) -> Iterator[str]:
        if stage in self.seen:
            yield f"stage {stage} was left and comes again"
        if stage.unit is not None and (stage.micro_batch is None) == self.by_micro_batch:
            yield f"stage {stage} is of all micro-batches, and others are of one each"
        for track, position in _positions(stage).items():
            last, before = self.tracks.get(track, (position, stage))
            if position < last:
                yield f"stage {stage} comes after {before}"
            self.tracks[track] = position, stage
        self.now = stage
        self.seen.add(stage)
        self.done.clear()

    def unfinished(self) -> Iterator[str]:
        """The micro-batches that the current stage, which ends here, has left out."""
        for verb in {verb for verb, _ in self.done if verb in SIGNATURES}:
            assert self.now is not None
            of, number = self.now.micro_batch, self.program.num_micro_batches
            micro_batches: Sequence[int] = range(number) if of is None else (of,)
            for j in micro_batches:
                if not self.done[verb, j]:
                    yield f"stage {self.now} has ended without micro-batch {j}"

    def missing(self, placement: Placement | None) -> Iterator[Stage]:
        """The forward stages that are missing: every unit has one, unless the program has only updates. The head may
        run in the backward.
        """
        if placement is not None and self.seen <= {FILL, DRAIN}:
            return
        for j in range(self.program.num_micro_batches) if self.by_micro_batch else (None,):
            for unit in (PROLOGUE, *range(self.program.num_layers)):
                if Stage("forward", unit, j) not in self.seen:
                    yield Stage("forward", unit, j)
            if not self.seen & {Stage("forward", EPILOGUE, j), Stage("backward", EPILOGUE, j)}:
                yield Stage("forward", EPILOGUE, j)


def _positions(stage: Stage) -> dict[object, _Position]:
    """Where a stage stands on each track, along which positions never fall: first up, then down through the units.

    The layer-major order has one track. In the micro-batch-major order each micro-batch has one, and so has each phase,
    in which the micro-batches follow each other.
    """
    if stage.unit is None:
        return {"step": (0, 0.0) if stage == FILL else (3, 0.0)}
    position = (2, -height(stage.unit)) if stage.phase == "backward" else (1, height(stage.unit))
    if stage.micro_batch is None:
        return {"step": position}
    return {"step": (1, 0.0), stage.micro_batch: position, stage.phase: (stage.micro_batch, 0.0)}


def _numbers(program: Program, op: Op) -> Iterator[str]:
    """Kinds are known, layers and micro-batches in range."""
    num_layers, num_micro_batches = program.num_layers, program.num_micro_batches
    if isinstance(op.stage.unit, int) and not 0 <= op.stage.unit < num_layers:
        yield f"layer {op.stage.unit} is not one of 0 .. {num_layers - 1}"
    for value in op.values:
        if value.kind not in KINDS:
            yield f"{value}: no kind is called {value.kind}"
        if isinstance(value.unit, int) and not 0 <= value.unit <= num_layers:
            yield f"{value}: no boundary {value.unit} between {num_layers} layers"
    for j in (op.micro_batch, op.stage.micro_batch, *(value.micro_batch for value in op.values)):
        if j is not None and not 0 <= j < num_micro_batches:
            yield f"micro-batch {j} is not one of 0 .. {num_micro_batches - 1}"


def _signature(program: Program, joints: frozenset[int], op: Op) -> Iterator[str]:
    """A verb reads, defines and changes what its row of the table says, in that order."""
    if op.verb in LAWS:
        words, is_obeyed = LAWS[op.verb]
        if not is_obeyed(op) or (op.verb == "count" and len(op.reads) != program.num_micro_batches):
            yield f"{op.verb} {words}"
    elif op.verb not in SIGNATURES:
        yield f"no verb is called {op.verb}"
    else:
        signature = SIGNATURES[op.verb]
        if (op.stage.phase, op.stage.unit_class) not in signature.stages:
            yield f"{op.verb} does not belong in stage {op.stage}"
        if op.stage.unit in joints and op.verb not in JOINING:
            yield f"{op.verb} in the stage of a joint"
        if op.micro_batch is None:
            yield f"{op.verb} works on one micro-batch, and none is named"
        if op.stage.unit is None:
            return
        for operands, values, does in (
            (signature.reads, op.reads, "reads"),
            (signature.results, op.results, "defines"),
            (signature.into, op.into, "changes"),
        ):
            layers = program.num_layers, joints
            expected = [operand.value(op.unit, op.micro_batch or 0, *layers) for operand in operands]
            needed = [not operand.optional for operand in operands]
            yield from (f"{op.verb} {does} {misfit}" for misfit in _misfits(expected, needed, values))


def _misfits(expected: list[Value], needed: list[bool], values: tuple[Value, ...]) -> Iterator[str]:
    """How values differ from the expected ones, in their order."""
    rest = list(values)
    for value, is_needed in zip(expected, needed, strict=True):
        if rest and rest[0] == value:
            rest.pop(0)
        elif is_needed:
            yield f"{value} here, not {rest[0] if rest else 'nothing'}"
    if rest:
        yield f"no {rest[0]} here"


def _saved(placement: Placement, op: Op) -> Iterator[str]:
    """A backward reads what its level saves, and no more."""
    if op.verb != "backward":
        return
    level = placement.activations.level_of(Value("a", op.unit, op.micro_batch))
    expected = ["x"] if level is None else ["x", "a"] if level.reads_input else ["a"]
    if (found := [value.kind for value in op.reads if value.kind in ("x", "a")]) != expected:
        yield f"it reads {' and '.join(found) or 'nothing'}, and {' and '.join(expected)} is saved for it"
