"""lifetimes: the schedule `lifetime` for data whose homes are chosen: what stays where it is, if that is faster at all.

The program that keeps what there is room for is held against the plain horizontal one by the simulator, and is taken
where it is faster. So the schedule is never slower than the one it begins with, as far as can be known before a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gs_compile.machine import format_bytes
from gs_compile.passes.baselines.lifetime import Period, decide
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.placement import Placement, Room
from gs_compile.planner import summary
from gs_compile.planner.builder import peak
from gs_compile.planner.problem import Problem
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import TRANSFER_LANES, WORDS, StepShape

ENDLESS = 1 << 60  # bytes, where no budget is known
EVERYTHING = Room(
    device_nbytes=ENDLESS,
    host_nbytes=ENDLESS,
    bytes_per_second=tuple(dict.fromkeys(TRANSFER_LANES.values(), 1.0).items()),
)
SPARE_PARTS = (0.25, 0.5)  # of host memory, that ratios of their own leave to what is inactive
INACTIVE = {"w": "between two uses", "x": "from forward to backward", "dw": "between two micro-batches"}
NEXT = {"device": "host", "host": "SSD"}  # where a tensor goes that does not stay


def with_room(problem: Problem, plan: StepPlan) -> StepPlan:
    """`plan` of the schedule `lifetime`, with what is inactive kept as far as that is faster."""
    problem, number = problem.bundled(plan.num_micro_batches)
    others = []
    for part in SPARE_PARTS:
        less = replace(problem.budgets, host_nbytes=int(problem.budgets.host_nbytes * (1 - part)))
        solution = problem.solved(number, plan.alpha, budgets=less)
        others += [problem.placed(solution)] if solution else []
    simulation, reason = prolonged(problem, plan.placement, others)
    return replace(plan, simulation=simulation, notes=(reason,))


def prolonged(problem: Problem, plain: Placement, others: Sequence[Placement] = ()) -> tuple[Simulation, str]:
    """Of a horizontal step, alone and with what there is room for kept, the fastest; and in a sentence why it is.

    others: placements that leave more room. With gaps between what is in host memory, what is kept may need more than
    there is room for: then it is left out.
    """
    program = problem.builder.program
    bare = program(plain)
    found = [problem.predicted(bare, plain)]
    if bare.ops == program(replace(plain, room=EVERYTHING)).ops:
        return found[0], "nothing is moved away and back within a step: there is nothing to keep"
    room = room_of(problem)
    for placement in dict.fromkeys(replace(each, room=room) for each in (plain, *others)):
        kept = program(placement)
        if peak(kept, "host") <= room.host_nbytes:
            found.append(problem.predicted(kept, placement))
    fastest = min(reversed(found), key=lambda each: each.seconds)
    return fastest, why(found[0], fastest)


def room_of(problem: Problem) -> Room:
    """What budgets leave: of the device's memory what its code does not compute in.

    Where the device reads host memory itself a copy reads and writes there.
    """
    budgets, profile = problem.budgets, problem.profile
    spare = budgets.values_nbytes(problem.workload.workspace_nbytes)
    return Room(
        device_nbytes=ENDLESS if spare is None else spare,
        host_nbytes=budgets.host_nbytes,
        bytes_per_second=tuple((lane, profile.transfer_rate(lane)) for lane in TRANSFER_LANES.values()),
    )


def why(plain: Simulation, chosen: Simulation) -> str:
    """In a sentence, what keeping brings, or that it would bring nothing."""
    before, after = plain.seconds, chosen.seconds
    if chosen is plain:
        return f"to keep what there is room for would not be faster than {before:.3g} s: nothing is kept"
    saved = plain.moved_nbytes - chosen.moved_nbytes
    words = f"{format_bytes(saved)} less are moved" if saved >= 0 else f"{format_bytes(-saved)} more are moved"
    return (
        f"what there is room for stays where it is: {words} in a step, which takes {after:.3g} s in simulation, and "
        f"{before:.3g} s by the horizontal schedule"
    )


# What is told of it ---------------------------------------------------------------------------------------------------


def table(placement: Placement, shape: StepShape) -> str:
    """For people: the periods in which tensors are inactive, by kind, and what becomes of them."""
    headings = ("", "on", "inactive", "times", "bytes", "stay", "bytes that stay", "others go to")
    numbers = ("times", "bytes", "stay", "bytes that stay")
    return summary.table(headings, _rows(periods(placement, shape)), right=numbers)


def periods(placement: Placement, shape: StepShape) -> tuple[Period, ...]:
    """All of a step among others, each with what was decided."""
    late = placement.has_late
    step = StepSpec(placement.num_layers, len(placement.x_nbytes), shape=shape, placement=placement, late=late)
    program = next(program for program in lower(step, verified=False) if program.made_by == "pipeline")
    return decide(program, placement, late=late)[1]


def as_dicts(found: Iterable[Period]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "tensor": str(period.value),
            "since": str(period.since),
            "until": str(period.until),
            "nbytes": period.nbytes,
            "stays": period.kept,
        }
        for period in found
    ]


def _rows(found: Iterable[Period]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Period]] = {}
    for period in found:
        groups.setdefault((period.value.kind, str(period.value.tier)), []).append(period)
    for (kind, tier), members in groups.items():
        kept = [period for period in members if period.kept]
        elsewhere = NEXT[tier] if len(kept) < len(members) else ""
        yield WORDS[kind], tier, INACTIVE[kind], *_totals(members), *_totals(kept), elsewhere


def _totals(found: Sequence[Period]) -> tuple[str, str]:
    return str(len(found)), format_bytes(sum(period.nbytes for period in found))
