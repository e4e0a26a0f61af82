"""spec: what other code needs to know of a schedule, and what a schedule may provide beside the order of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from gs_compile.passes.baselines.lifetime import Rooms
from gs_compile.program.ir import Program
from gs_compile.schedules import Schedule

if TYPE_CHECKING:
    from gs_compile.capture.graph import BlockCut

Variants: TypeAlias = Rooms  # of the only schedule that has some


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One schedule: how its programs are built, and how it differs from the others.

    build: lays a step out as compute operations alone: of so many layers and micro-batches, and of a `shape`.
    turns: neighbouring stages take the micro-batches in opposite orders (`snake`).
    own_pass: runs before `free`, on a program, with its `placement`; `late`: gradients are left to the next step.
    block_cut: returns how each block is cut into several layers; None: a layer is a block.
    whole_batch: the whole batch is one micro-batch.
    batch_like: the schedule whose batch it is planned for, so that the two can be compared; None: its own.
    as_published: as others publish it: updates are left to the next step, and parameters kept for it, only if asked
        for.
    variants: other placements of the same homes, which differ in `Decision.own`; the planner takes the fastest.
    heading: of the section that a simulation's report has on these decisions; "": there is none.
    """

    build: Callable[..., Program]
    turns: bool = False
    own_pass: Callable[..., Program] | None = None
    block_cut: Callable[[], BlockCut] | None = None
    whole_batch: bool = False
    batch_like: Schedule | None = None
    as_published: bool = False
    variants: Variants | None = None
    heading: str = ""

    @property
    def fills_memory(self) -> bool:
        """Whether the schedule itself fills the memory that its homes leave."""
        return self.variants is not None
