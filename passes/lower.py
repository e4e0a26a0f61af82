"""The passes from a layer-major step to the program that runs, on one page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.passes.baselines.spec import ScheduleSpec
from gs_compile.passes.decode import decode
from gs_compile.passes.free import free
from gs_compile.passes.offload import offload
from gs_compile.passes.overlap import overlap
from gs_compile.passes.pipeline import pipeline
from gs_compile.passes.save import save
from gs_compile.passes.shard import shard
from gs_compile.passes.snake import snake
from gs_compile.placement.placement import ALL_LATE, STARTS, Placement, StepContext
from gs_compile.placement.verify import Known, verify
from gs_compile.program.ir import Program, Schedule, StepShape

Pass = Callable[[Program], Program]  # a pure function. It keeps the meaning: loss, gradients and outputs


@dataclass(frozen=True)
class StepSpec:
    """A step to lower.

    placement: where everything lives; None: on the device. A placement names its schedule itself.
    schedule: of a step that trains; any other is vertical, so that each unit is loaded once.
    snake: False leaves that pass out, as the horizontal order does.
    planned: False leaves out the memory plan: peaks and offsets.
    """

    num_layers: int
    num_micro_batches: int
    shape: StepShape = field(default_factory=StepShape)
    placement: Placement | None = None
    schedule: Schedule = "vertical"
    snake: bool = True
    context: StepContext = STARTS
    planned: bool = True

    @property
    def order(self) -> ScheduleSpec:
        schedule = self.placement.layout.schedule if self.placement else self.schedule
        return SCHEDULES[schedule if self.shape.training else "vertical"]


def passes(step: StepSpec) -> tuple[Pass, ...]:
    """In this order, each with its reason."""
    turns = (snake,) if step.snake and step.order.turns else ()  # one micro-batch stays on the device between layers
    if (placement := step.placement) is None:
        return (*turns, free)
    late = placement.has_late and step.shape.training  # gradients wait for the next step
    own_pass = (partial(step.order.own_pass, placement=placement, late=late),) if step.order.own_pass else ()
    return (
        *turns,
        *((partial(save, placement=placement),) if placement.decision.shares else ()),  # what is not computed again
        partial(overlap, placement=placement, context=step.context),  # the optimizer beside the backward
        # Every value to the tier it is stored on and back, just in time.
        partial(offload, placement=placement, context=step.context),
        *((partial(shard, placement=placement),) if placement.world > 1 else ()),  # units among the ranks
        partial(pipeline, placement=placement),  # each transfer in the latest stage that still hides it
        *own_pass,  # what only this schedule has
        *((partial(decode, placement=placement),) if placement.decodes else ()),  # what is stored encoded
        # Last: lifetimes follow from the reads that are left.
        partial(free, placement=placement, late=late, planned=step.planned),
    )


def lower(step: StepSpec, *, computations: Program | None = None, verified: bool = True) -> list[Program]:
    """Every snapshot from the schedule's pass to the program that runs, which is the last; `made_by` names each.

    computations: the result of `scheduled`, where that is known. verified: each that has operations is checked; False
        for candidates that will not run.
    """
    program = computations or scheduled(step)
    snapshots = [program]
    snapshots += [program := rewrite(program) for rewrite in passes(step)]
    known: Known = {}
    expected = step.context if step.shape.training else replace(step.context, copies=False)
    for snapshot in snapshots if verified else ():
        if snapshot.ops:
            verify(snapshot, step.placement, expected, known=known)
    return snapshots


def scheduled(step: StepSpec) -> Program:
    """The computations of a step in the order of its schedule: the same wherever its data is stored."""
    return step.order.build(step.num_layers, step.num_micro_batches, shape=step.shape)


def flush(placement: Placement, context: StepContext = ALL_LATE) -> list[Program]:
    """The late updates alone, which bring all parameters up to date between two steps, and commit them if asked."""
    num_layers, shape = placement.layout.num_layers, StepShape(training=False)
    nothing = Program((), num_layers, 1, made_by="vertical")
    step = StepSpec(num_layers, 1, shape=shape, placement=placement, snake=False, context=context)
    return lower(step, computations=nothing)
