"""spec: what other code needs to know of a schedule, and what a schedule may provide beside the order of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Program, StepShape
from gs_compile.schedules import Schedule

if TYPE_CHECKING:
    from gs_compile.capture.graph import BlockCut


class OwnPass(Protocol):
    """A pass that only one schedule has. late: gradients are left to the next step."""

    def __call__(self, program: Program, placement: Placement, *, late: bool) -> Program: ...


class Builder(Protocol):
    """Lays a step out, as compute operations only."""

    def __call__(self, num_layers: int, num_micro_batches: int, *, shape: StepShape | None = None) -> Program: ...


class Outcome(Protocol):
    """What a simulation says of a step."""

    @property
    def seconds(self) -> float: ...

    @property
    def moved_nbytes(self) -> int: ...


class Variants(Protocol):
    """Other placements of the same homes: they differ in `Decision.own`, which the schedule's own pass follows.

    unbounded: the `own` that no budget bounds. Where it changes nothing, there are no variants, and `none` says so.
    spare_parts: of host memory, what other homes may leave to variants.
    """

    @property
    def unbounded(self) -> object: ...

    @property
    def none(self) -> str: ...

    @property
    def spare_parts(self) -> Sequence[float]: ...

    def within(self, *, device_nbytes: int | None, host_nbytes: int, bytes_per_second: Mapping[str, float]) -> object:
        """The `own` of a variant within budgets; bytes_per_second: of each lane that moves data, alone."""

    def why(self, plain: Outcome, chosen: Outcome) -> str:
        """In a sentence, what the chosen variant brings, or that it would bring nothing."""

    def table(
        self, program: Program, placement: Placement
    ) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]:
        """Headings, rows, and the headings of numbers: what was decided on `program`, which its own pass gets."""

    def as_dict(self, program: Program, placement: Placement) -> Mapping[str, Any]:
        """The same for JSON."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One schedule: how its programs are built, and how it differs from the others.

    turns: neighbouring stages take the micro-batches in opposite orders (`snake`).
    own_pass: runs before `free`.
    block_cut: returns how each block is cut into several layers; None: a layer is a block.
    whole_batch: the whole batch is one micro-batch.
    batch_like: the schedule whose batch it is planned for, so that the two can be compared; None: its own.
    as_published: as others publish it: updates are left to the next step, and parameters kept for it, only if asked
        for.
    variants: other placements of the same homes, of which the planner takes the fastest.
    heading: of the section that a simulation's report has on these decisions; "": there is none.
    """

    build: Builder
    turns: bool = False
    own_pass: OwnPass | None = None
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
