"""outline: when a step uses what, without its micro-batches: the stages, and what is read and made in each.

All formulas of the planner (`volumes`, `footprint`) start from here. It is taken from the program of one micro-batch,
so that frozen layers, tied units and gradients from outside need no cases of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import Stage, StepShape, Unit


@dataclass(frozen=True, slots=True)
class Journey:
    """A layer's input (`x`) or its gradient (`dx`): the stage that makes it, and those that read it."""

    kind: str
    layer: int
    made: int
    reads: tuple[int, ...]

    def crossings(self, read: int, num_micro_batches: int) -> int:
        """How many micro-batches come back to the device for a stage: those that are not still there."""
        return num_micro_batches - ((read - 1) in (self.made, *self.reads))

    def leaving(self, num_micro_batches: int) -> int:
        """How many leave the device: where every read follows at once, one stays."""
        stays = all((read - 1) in (self.made, *self.reads) for read in self.reads)
        return num_micro_batches - (stays and (len(self.reads) == 1 or num_micro_batches == 1))


@dataclass(frozen=True)
class Outline:
    """A step by stages, numbered from 0.

    uses: the stages that read a unit's parameters, in order; opened, complete: where its gradient begins and is added
    to for the last time.
    """

    stages: tuple[Stage, ...]
    num_layers: int
    uses: Mapping[Unit, tuple[int, ...]]
    opened: Mapping[Unit, int]
    complete: Mapping[Unit, int]
    journeys: tuple[Journey, ...]

    def phase(self, stage: int) -> str:
        """Forward or backward, as the formulas count seconds."""
        return self.stages[stage].phase

    def is_checkpoint(self, journey: Journey) -> bool:
        """Whether it is read again in the backward, and may wait for it on any tier."""
        return self.is_kept(journey) and journey.layer != self.num_layers

    def is_kept(self, journey: Journey) -> bool:
        """Whether it is a layer's or the head's input that is read twice."""
        return journey.kind == "x" and len(journey.reads) > 1


def outline(num_layers: int, shape: StepShape) -> Outline:
    """The outline of a training step."""
    program = vertical(num_layers, 1, shape=shape)
    stages = tuple(stage for stage, _ in program.stages())
    number = {stage: index for index, stage in enumerate(stages)}
    uses: dict[Unit, dict[int, None]] = {}
    opened: dict[Unit, int] = {}
    complete: dict[Unit, int] = {}
    made: dict[tuple[str, int], int] = {}
    reads: dict[tuple[str, int], list[int]] = {}
    for op in program.ops:
        here = number[op.stage]
        for value in op.reads:
            if value.kind == "w" and value.unit is not None:
                uses.setdefault(value.unit, {})[here] = None
            if value.kind in ("x", "dx") and isinstance(value.unit, int):
                reads.setdefault((value.kind, value.unit), []).append(here)
        for value in op.into:
            if value.kind == "dw" and value.unit is not None:
                opened.setdefault(value.unit, here)
                complete[value.unit] = here
        for value in op.results:
            if value.kind in ("x", "dx") and isinstance(value.unit, int):
                made[value.kind, value.unit] = here
    journeys = tuple(Journey(*key, made[key], tuple(stages)) for key, stages in reads.items() if key in made)
    return Outline(stages, num_layers, {unit: tuple(u) for unit, u in uses.items()}, opened, complete, journeys)
