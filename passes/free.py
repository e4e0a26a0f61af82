"""End every value after its last use. Runs last, when all other passes have settled which operations use it."""

from __future__ import annotations

from dataclasses import replace

from gs_compile.placement.kinds import ends_in_step
from gs_compile.placement.placement import Placement
from gs_compile.placement.slab import planned_memory
from gs_compile.program.ir import Op, Program, Value
from gs_compile.program.verbs import forward_end

RESIDENT = Placement()  # everything is on the device


def free(program: Program, placement: Placement = RESIDENT, *, late: bool = False, planned: bool = True) -> Program:
    """The same program with `free(value)` right after the last operation that uses the value, and its planned memory:
    the peak of each tier, and the offset of all that is in host memory.

    A value that nothing uses ends where it is defined. One that is defined again, because it is fetched twice, also
    ends after its last use before that.

    placement: values end on all tiers, except those that live on from step to step.
    late: gradients are left for the next step. planned: False leaves out the planned memory.
    """
    ops = with_frees(program.ops, placement.homes(late=late, warm=program.trains), placement)
    peaks, offsets = planned_memory(ops, placement) if placement.layout.x_nbytes and planned else ((), {})
    needed = dict(peaks).get("host", 0)
    return replace(program.with_ops(ops, made_by="free"), peaks=peaks, offsets=offsets, slab_nbytes=needed)


def with_frees(ops: tuple[Op, ...], lasting: frozenset[Value], placement: Placement) -> tuple[Op, ...]:
    """The operations with `free` among them, before anything is planned."""
    ends = _ends(ops, lasting, placement)
    freed: list[Op] = []
    for index, op in enumerate(ops):
        freed.append(op)
        if ending := ends.get(index):
            used, ended = dict.fromkeys((*op.reads, *op.into, *op.results, *ending)), set(ending)
            freed += [Op("free", (value,), op.stage) for value in used if value in ended]
    return tuple(freed)


def _ends(ops: tuple[Op, ...], lasting: frozenset[Value], placement: Placement) -> dict[int, list[Value]]:
    """The values that end after each operation. What is at home ends in the backward half: the user may drop the loss,
    so that there is no backward, or evaluate before it.
    """
    at_home, backward = placement.homes(late=False), forward_end(ops)
    last_use: dict[Value, int] = {}
    ends: dict[int, list[Value]] = {}
    for index, op in enumerate(ops):
        for value in op.results:
            if value in last_use and ends_in_step(placement, value):
                ends.setdefault(last_use[value], []).append(value)
        for value in op.values:
            last_use[value] = index
    for value, index in last_use.items():
        if value not in lasting and ends_in_step(placement, value):
            ends.setdefault(max(index, backward) if value in at_home else index, []).append(value)
    return ends
