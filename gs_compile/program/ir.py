"""The step program: what one training step does, one operation a line.

A program is a tuple of operations in issue order. Every operation names a verb, the values it reads, the values it
defines and the values it changes in place (`into`). A value has one definition. A pass is a pure function from program
to program. The text with its inverse (`text.py`), the checker (`placement/verify.py`), the tests' reference, the
executor and every drawing read this one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from gs_compile.errors import ProgramError
from gs_compile.program.values import (
    COPIES,
    DRAIN,
    EPILOGUE,
    FILL,
    KINDS,
    PROLOGUE,
    SHADOWS,
    TIED,
    TIERS,
    WORDS,
    Stage,
    Tier,
    Unit,
    Value,
    beginning,
    height,
    homed,
    whole_kind,
)
from gs_compile.program.verbs import (
    JOINING,
    LANES,
    MEMORY_VERBS,
    NORMS,
    TRANSFER_LANES,
    TRANSFERS,
    VERBS,
    Op,
    forward_end,
)
from gs_compile.schedules import Schedule

# fmt: off
__all__ = [  # the whole language, for whoever reads or makes programs
    "COPIES", "DRAIN", "EPILOGUE", "FILL", "KINDS", "LANES", "MEMORY_VERBS", "PROLOGUE", "SHADOWS", "TIED",
    "TIERS", "TRANSFERS", "TRANSFER_LANES", "VERBS", "WORDS", "DeviceBound", "Op", "Program", "Schedule",
    "Stage", "StepShape", "Tier", "Unit", "Value", "beginning", "height", "homed", "shifted", "whole_kind",
]
# fmt: on

# Which operations a program has so far: computations; also updates of parts, all on the device; also transfers between
# tiers; also frees.
Form = Literal["compute", "updates", "tiers", "freed"]

VERSION = "0.1"  # of the text: a new one when old text no longer parses
MIN_FOLDED_STAGES = 3  # fewer are easier to read unfolded
PERIODS = (1, 2)  # two, because `snake` turns every second stage round

Stages = list[tuple[Stage, tuple[Op, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The parts that the step of one model has, beside its layers: all that `vertical` needs to know."""

    training: bool = True  # False: the forward alone
    has_loss: bool = True  # the head computes a loss
    has_total: bool = False  # the loss divides by what is counted over the whole batch
    joints: frozenset[int] = frozenset()  # layers that begin another stack
    sides: frozenset[Unit] = frozenset()  # units that make side inputs: the prologue and joints, which begin a stack
    side_gradients: frozenset[Unit] = frozenset()  # of `sides`, those that need the gradient of their side inputs
    emits: frozenset[Unit] = frozenset()  # units that make other outputs of the model
    outside: frozenset[Unit] = frozenset()  # gradients arrive from outside for x of layer i (i), or for the head ("h")
    frozen: frozenset[Unit] = frozenset()  # units without trainable parameters
    tied: frozenset[Unit] = frozenset()  # units that read the parameters of "t"
    first_grad: Unit = PROLOGUE  # the lowest unit that needs a gradient: there the backward ends
    input_gradient: bool = False  # inputs of the batch need one: the backward may also end where a stack begins

    def __post_init__(self) -> None:
        shares = self.first_grad in self.tied and TIED not in self.frozen
        ends_at_input = self.first_grad in {PROLOGUE, *self.joints} and self.input_gradient
        if self.training and self.first_grad in self.frozen and not (shares or ends_at_input):
            raise ProgramError(f"first_grad is {self.first_grad}, which is frozen: the backward would end at nothing")
        if not self.sides <= {PROLOGUE, *self.joints}:
            raise ProgramError("side inputs are made by what begins a stack: the prologue and joints")
        if not self.side_gradients <= self.sides:
            raise ProgramError("side_gradients without sides: there is nothing to have the gradient")

    @property
    def forward_alone(self) -> StepShape:
        return replace(self, training=False, outside=frozenset())

    def needs_grad_below(self, unit: Unit) -> bool:
        """Whether anything that comes before `unit` needs a gradient."""
        return height(self.first_grad) < height(unit)

    def has_side_gradient(self, unit: Unit) -> bool:
        """Whether a unit adds to the gradient of its stack's side inputs."""
        begin = beginning(unit, self.joints)
        return begin in self.side_gradients and height(self.first_grad) <= height(begin)


class DeviceBound(NamedTuple):
    """The device memory that a step may have, and what operations take of it and give back, by their index.

    nbytes: the bound; present_nbytes: in use before the first operation.
    waiting_nbytes: in use between a call's forward and its backward, and not shared with another call.
    takes: bytes. gives: of each `free`, the slot that its value is in, and the slot's bytes if no other value is in it.
    """

    nbytes: int
    present_nbytes: int
    waiting_nbytes: int
    takes: Mapping[int, int]
    gives: Mapping[int, tuple[object, int]]


@dataclass(frozen=True)
class Program:
    """A training step (or a forward-only step) of `num_layers` layers over `num_micro_batches` micro-batches."""

    ops: tuple[Op, ...]
    num_layers: int
    num_micro_batches: int
    made_by: str  # the last pass that ran
    peaks: tuple[tuple[str, int], ...] = ()  # the planned peak of each tier in bytes, once `free` has counted it
    offsets: Mapping[object, int] = field(default_factory=dict, compare=False, repr=False)  # in host memory, by slot
    slab_nbytes: int = field(default=0, compare=False, repr=False)  # of the host memory that these offsets are in
    device: DeviceBound | None = field(default=None, compare=False, repr=False)  # None: without a bound

    @property
    def joints(self) -> frozenset[int]:
        """The layers that begin another stack: their verbs say so."""
        return frozenset(op.stage.unit for op in self.ops if op.verb in JOINING and isinstance(op.stage.unit, int))

    @property
    def by_micro_batch(self) -> bool:
        """Whether each stage is of one micro-batch, not of all."""
        return any(op.stage.micro_batch is not None for op in self.ops)

    @cached_property
    def forward_end(self) -> int:
        """The index of the first operation of the backward half."""
        return forward_end(self.ops)

    @cached_property
    def trains(self) -> bool:
        """Whether it completes gradients, which neither an evaluation does nor a program of late updates alone."""
        return any(op.verb in NORMS for op in self.ops)

    @property
    def form(self) -> Form:
        """How far passes have lowered it, by the operations that it has."""
        if any(op.verb == "free" for op in self.ops):
            return "freed"
        if any(value.tier in ("host", "ssd") for op in self.ops for value in op.values):
            return "tiers"
        return "updates" if any(op.verb in ("gather", "update", "seal") for op in self.ops) else "compute"

    def with_ops(self, ops: Iterable[Op], made_by: str) -> Program:
        return replace(self, ops=tuple(ops), made_by=made_by)

    def stages(self) -> Iterator[tuple[Stage, tuple[Op, ...]]]:
        """The operations grouped by stage, in issue order."""
        return ((stage, tuple(ops)) for stage, ops in groupby(self.ops, attrgetter("stage")))

    def line_of(self, index: int) -> int:
        """The line, from 1, on which operation `index` stands in the unfolded text."""
        stages = sum(at <= index and (at == 0 or op.stage != self.ops[at - 1].stage) for at, op in enumerate(self.ops))
        return 1 + stages + index + 1

    def text(self, *, fold: bool = True) -> str:
        """The program as text. With `fold`, a run of equal stages is one line that names the stages it repeats.

        Equal means: the same operations with all layer numbers moved by the same amount, one or two stages back.
        """
        peaks = ", ".join(f"{tier} {nbytes}" for tier, nbytes in self.peaks)
        lines = [
            f"# gs_compile program {VERSION}   after {self.made_by}   "
            f"{self.num_layers} layers x {self.num_micro_batches} micro-batches"
            + (f"   peak {peaks} bytes" if peaks else "")
        ]
        stages, at = list(self.stages()), 0
        while at < len(stages):
            length, period = max(((_repeats(stages, at, p), p) for p in PERIODS), key=lambda run: run[0])
            if fold and length >= MIN_FOLDED_STAGES:
                (first, _), (last, _) = stages[at], stages[at + length - 1]
                models = " ".join(str(stage.unit) for stage, _ in stages[at - period : at])
                end = str(last).removeprefix(f"{last.phase} ")
                lines.append(f"# {first._replace(micro_batch=None)} .. {end}   repeat {first.phase} {models}")
                at += length
            else:
                lines += _stage_lines(*stages[at])
                at += 1
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text()


def _stage_lines(stage: Stage, ops: Iterable[Op]) -> list[str]:
    ops = tuple(ops)
    order = " ".join(str(op.micro_batch) for op in ops if op.micro_batch is not None)
    heading = f"# {stage}" if stage.micro_batch is not None else f"# {stage}   micro-batches {order}".rstrip()
    return [heading, *map(str, ops)]


def _repeats(stages: Stages, at: int, period: int) -> int:
    """How many stages from `at` on equal the one `period` before, moved by as many layers."""
    if at < period:
        return 0
    step = _step(stages, at)
    here = at
    while step and here < len(stages) and stages[here] == shifted(*stages[here - period], step * period):
        here += 1
    return here - at


def _step(stages: Stages, at: int) -> int:
    """By how many layers a stage is from the one before: 1, -1, or 0 where the run of layers is broken."""
    before, here = stages[at - 1][0].unit, stages[at][0].unit
    step = here - before if isinstance(here, int) and isinstance(before, int) else 0
    return step if step in (1, -1) else 0


def shifted(stage: Stage, ops: Iterable[Op], by: int) -> tuple[Stage, tuple[Op, ...]]:
    """The stage `by` layers on."""

    def move(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(v._replace(unit=v.unit + by) if isinstance(v.unit, int) else v for v in values)

    there = stage._replace(unit=stage.unit + by) if isinstance(stage.unit, int) else stage
    return there, tuple(
        replace(op, reads=move(op.reads), results=move(op.results), into=move(op.into), stage=there) for op in ops
    )
