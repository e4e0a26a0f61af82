"""candidates: of placements that may be faster, those that keep the budgets, and of these the fastest.

A ladder is what one idea proposes: placements, each of which takes no less memory than the one before. The last one
that keeps the budgets is a candidate; among candidates and the step at hand the simulator decides. The ideas:

    boundary    parameters stay in memory from one step to the next; the last states of a step are read earlier
    saved       the topmost layers save activations in memory that gradients and states need later
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gs_compile.placement.placement import Placement
from gs_compile.planner.problem import NOTHING, Problem
from gs_compile.planner.simulate.simulator import Simulation

Ladder = Sequence[Placement]


def highest(ladders: Iterable[Ladder], fits: Callable[[Placement], bool]) -> Iterator[Placement]:
    """Of each ladder the last placement that fits, if any does."""
    for ladder in ladders:
        if number := bisect_left(ladder, True, key=lambda each: not fits(each)):
            yield ladder[number - 1]


def fastest(
    problem: Problem, plain: Simulation, ladders: Iterable[Ladder], spare: Mapping[str, int] = NOTHING
) -> Simulation:
    """The fastest step of what ladders propose and `plain`, which is taken where none is faster.

    spare: by tier, bytes that are left free.
    """
    found = [plain]
    for placement in highest(ladders, lambda each: problem.fits(each, spare)):
        program = problem.at(len(placement.x_nbytes)).program(placement)
        found.append(problem.predicted(program, placement))
    return min(found, key=lambda each: each.seconds)
