"""The laws of a step program, checked between any two passes. A broken one is always a fault of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gs_compile.errors import ProgramError
from gs_compile.program import EPILOGUE, KINDS, PROLOGUE, Op, Program, Stage, Value, height
from gs_compile.signatures import SIGNATURES, Slot, stage_class
from gs_compile.text import format_op, line_of

INPUT_KINDS = frozenset({"batch", "w", "dy"})  # defined before the step begins
ACCUMULATOR_KINDS = frozenset({"dw", "dside"})  # what zeros makes, and no other verb: so all that `into` may name


def verify(program: Program) -> None:
    """Raise ProgramError unless `program` is well-formed; the error says pass, line, operation and value:

        after snake, line 19: x2_0.device = forward(x1_0.device, w1.device): x1_0.device was freed

    The line is that of the unfolded text. One walk over the operations, so checking is as cheap as printing.
    """
    _Walk(program).run()


class _Walk:
    """What is known about each value and stage at one point of the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.defined: set[Value] = set()
        self.freed: set[Value] = set()
        self.additions: Counter[Value] = Counter()  # how many operations have added to an accumulator
        self.stages: list[Stage] = []
        self.done: Counter[tuple[str, int | None]] = Counter()  # operations of the stage, by verb and micro-batch

    def run(self) -> None:
        for index, op in enumerate(self.program.ops):
            for complaint in self._complaints(op):
                raise self._error(index, complaint)
        for complaint in self._unfinished_stage():
            raise self._error(len(self.program.ops) - 1, complaint)
        for stage in self._missing_stages():
            raise ProgramError(f"after {self.program.made_by}: stage {stage} is missing")

    def _complaints(self, op: Op) -> Iterator[str]:
        """What is wrong with one operation; each law sees what the ones before it have let pass."""
        yield from self._breaks_stages(op)
        yield from self._breaks_numbers(op)
        yield from self._breaks_signature(op)
        yield from self._breaks_lifetimes(op)

    def _breaks_stages(self, op: Op) -> Iterator[str]:
        """Stages are contiguous and in layer order; each compute verb of a stage runs once per micro-batch."""
        if not self.stages or op.stage != self.stages[-1]:
            yield from self._unfinished_stage()
            if op.stage in self.stages:
                yield f"stage {op.stage} was left and comes again"
            if self.stages and _place(op.stage) <= _place(self.stages[-1]):
                yield f"stage {op.stage} comes after {self.stages[-1]}"
            self.stages.append(op.stage)
            self.done.clear()
        self.done[op.verb, op.micro_batch] += 1
        if op.verb in SIGNATURES and self.done[op.verb, op.micro_batch] > 1:
            yield f"micro-batch {op.micro_batch} a second time in this stage"

    def _unfinished_stage(self) -> Iterator[str]:
        """Whether the stage that ends here has left a micro-batch out."""
        for verb in {verb for verb, _ in self.done if verb in SIGNATURES}:
            for j in range(self.program.num_micro_batches):
                if not self.done[verb, j]:
                    yield f"stage {self.stages[-1]} has ended without micro-batch {j}"

    def _missing_stages(self) -> Iterator[str]:
        """Every unit runs forward; the head may do so as part of the backward."""
        present = {str(stage) for stage in self.stages}
        for unit in (PROLOGUE, *range(self.program.num_layers)):
            if f"forward {unit}" not in present:
                yield f"forward {unit}"
        if not present & {f"forward {EPILOGUE}", f"backward {EPILOGUE}"}:
            yield f"forward {EPILOGUE}"

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
        for j in (op.micro_batch, *(value.micro_batch for value in (*op.reads, *op.into, *op.results))):
            if j is not None and not 0 <= j < num_micro_batches:
                yield f"micro-batch {j} is not one of 0 .. {num_micro_batches - 1}"

    def _breaks_signature(self, op: Op) -> Iterator[str]:
        """What the verb reads, defines and changes is what the table of signatures says, in that order."""
        if op.verb in SIGNATURES:
            signature = SIGNATURES[op.verb]
            if (op.stage.phase, stage_class(op.stage.unit)) not in signature.stages:
                yield f"{op.verb} does not belong in stage {op.stage}"
            if op.micro_batch is None:
                yield f"{op.verb} works on one micro-batch, and none is named"
            yield from self._misfits(op, signature.reads, op.reads, "reads")
            yield from self._misfits(op, signature.results, op.results, "defines")
            yield from self._misfits(op, signature.into, op.into, "changes")
        elif op.verb == "count":
            batches = (Value("batch", micro_batch=j, tier=None) for j in range(self.program.num_micro_batches))
            if (op.reads, op.results, op.into) != (tuple(batches), (Value("total"),), ()):
                yield "count reads every batch in order and defines total.device"
        elif op.verb == "zeros":
            made = [value.kind for value in op.results]
            if op.reads or op.into or len(made) != 1 or made[0] not in ACCUMULATOR_KINDS:
                yield "zeros reads nothing and defines one accumulator, dw or dside"
        elif op.verb == "free":
            if op.results or op.into or len(op.reads) != 1:
                yield "free takes one value and defines nothing"
        else:
            yield f"no verb is called {op.verb}"

    def _misfits(self, op: Op, slots: tuple[Slot, ...], values: tuple[Value, ...], doing: str) -> Iterator[str]:
        rest = list(values)
        for slot in slots:
            expected = slot.value(op.stage.unit, op.micro_batch or 0, self.program.num_layers)
            if rest and rest[0] == expected:
                rest.pop(0)
            elif not slot.optional:
                yield f"{op.verb} {doing} {expected} here, not {rest[0] if rest else 'nothing'}"
        if rest:
            yield f"{op.verb} {doing} no {rest[0]} here"

    def _breaks_lifetimes(self, op: Op) -> Iterator[str]:
        """Defined once before all uses, freed at most once after them; accumulators are complete when read."""
        for value in (*op.reads, *op.into):
            if value in self.freed:
                yield f"{value} was freed"
            if value not in self.defined and value.kind not in INPUT_KINDS:
                yield f"{value} is not defined"
        for value in op.reads:
            if value.kind == "dw" and self.additions[value] != self.program.num_micro_batches:
                yield f"{value} is read after {self.additions[value]} of {self.program.num_micro_batches} micro-batches"
        for value in op.into:
            self.additions[value] += 1
        for value in op.results:
            if value in self.defined:
                yield f"{value} is defined twice"
            self.defined.add(value)
        if op.verb == "free":
            self.freed.update(op.reads)

    def _error(self, index: int, complaint: str) -> ProgramError:
        where = f"after {self.program.made_by}, line {line_of(self.program, index)}"
        return ProgramError(f"{where}: {format_op(self.program.ops[index])}: {complaint}")


def _place(stage: Stage) -> tuple[bool, float]:
    """Up through the forward, down through the backward."""
    backward = stage.phase == "backward"
    return backward, -height(stage.unit) if backward else height(stage.unit)
