"""ladders: the fastest of several placements that keeps the budgets.

A ladder is a sequence of placements, each of which takes no less memory than the one before, and is expected to be
faster. The last one that fits is a candidate, which is simulated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TypeVar

from gs_compile.placement.placement import Placement
from gs_compile.planner.problem import Problem
from gs_compile.planner.simulate.simulator import Simulation

T = TypeVar("T")
Ladder = Sequence[Placement]

FASTER = 0.999  # of the time of a step that takes less memory: a smaller gain counts as none
CLEARLY_FASTER = 0.99  # of the time of another kind of plan: a smaller gain is not worth it, or within timing noise


def each_of(ladder: Ladder) -> Iterator[Ladder]:
    """Each placement as a ladder of its own, if later ones may not be faster."""
    return ([each] for each in ladder)


def highest(ladder: Ladder, fitting: Callable[[Placement], T | None]) -> tuple[Placement, T] | None:
    """The last placement of a ladder that fits, if any does, with the result of `fitting` for it.

    The top is tried first: with room for all of a ladder, no other is lowered.
    """
    if ladder and (result := fitting(ladder[-1])):
        return ladder[-1], result
    last: tuple[Placement, T] | None = None

    def is_over(each: Placement) -> bool:
        nonlocal last
        if result := fitting(each):
            last = each, result
        return not result

    bisect_left(ladder, True, hi=len(ladder) - 1, key=is_over)
    return last


def fastest(problem: Problem, plain: Simulation, ladders: Iterable[Ladder], part: float = 1.0) -> Simulation:
    """The first step that is as fast as the fastest one, among `plain` and then the candidates of the ladders in order.

    part: a step counts as fast as the fastest one if that takes at least this part of its time.
    """
    fitting = cache(problem.fitting)  # ladders may have placements in common
    ends = (highest(ladder, fitting) for ladder in ladders)
    programs = dict(each for each in ends if each)  # where memory is short, ladders end at the same placement
    simulations = [plain, *(problem.predicted(*each) for each in programs.items())]
    least = min(each.seconds for each in simulations)
    return next(each for each in simulations if part * each.seconds <= least)
