"""Programs of steps, each made once in a process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gs_compile.passes.lower import StepSpec, lower
from gs_compile.planner import builder, programs
from gs_compile.program.ir import Program

SMALL = 64  # layers times micro-batches: programs of larger steps take much memory


def lower_once() -> None:
    """Equal small steps of all runs and plans of a process have one program: lowering takes a fifth of what a run does.

    Tests of passes call `lower` itself.
    """
    known = lru_cache(256)(lambda step, verified: lower(step, verified=verified))

    def lowered(step: StepSpec, *, verified: bool = True, **computations: Any) -> list[Program]:
        if step.num_layers * step.num_micro_batches > SMALL:
            return lower(step, verified=verified, **computations)
        return known(step, verified)

    for module in (builder, programs):
        module.lower = lowered
