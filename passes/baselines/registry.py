"""registry: every schedule by name: the paper's own and those it is compared with.

A new one is a row here, and a file of its own beside this one. Nothing else asks for a schedule by its name: what the
rest has to know of one is a field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.baselines.lifetime import lifetime
from gs_compile.passes.baselines.single import single
from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import ORDERS, Order, Program, Schedule, StepShape


class Builder(Protocol):
    """Lays a step out, as compute operations only."""

    def __call__(self, num_layers: int, num_micro_batches: int, *, shape: StepShape | None = None) -> Program: ...


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One schedule: how its programs are built, and how it differs from the others.

    turns: neighbouring stages take the micro-batches in opposite orders (`snake`).
    own_pass: what only it has, given the placement and whether gradients are left to the next step; before `free`.
    halves_blocks: a layer of its programs is half a block, and the whole batch is one micro-batch.
    fills_memory: tensors stay where they are while there is room, so that a placement of it has a `Room`.
    """

    order: Order
    build: Builder
    turns: bool = False
    own_pass: Callable[..., Program] | None = None
    halves_blocks: bool = False
    fills_memory: bool = False


SCHEDULES: dict[Schedule, ScheduleSpec] = {
    "vertical": ScheduleSpec(order=ORDERS["vertical"], build=vertical, turns=True),
    "horizontal": ScheduleSpec(order=ORDERS["horizontal"], build=horizontal),
    "single": ScheduleSpec(order=ORDERS["single"], build=single, halves_blocks=True),
    "lifetime": ScheduleSpec(
        order=ORDERS["lifetime"],
        build=horizontal,
        own_pass=lifetime,
        fills_memory=True,
    ),
}
