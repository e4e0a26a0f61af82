"""apart: whether each stack keeps parts of its own in memory, or all keep the same.

    the same      what is moved is spread evenly over a step, so that computation hides it everywhere
    of its own    memory goes where it saves the most time: to activations of wide layers, which take the most computing
                  for each byte, or to a stack that is trained, as its parameters move more often than a frozen one's

The linear program knows a phase as a whole, and prefers the second; the simulator says what is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from gs_compile.errors import MemoryBudgetError
from gs_compile.planner.choose import choose
from gs_compile.planner.lp.search import GROWTH, Search
from gs_compile.planner.problem import Problem
from gs_compile.planner.saved import with_saved
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import RATIO_OF


def plan_stacks(problem: Problem, search: Search) -> StepPlan:
    """The plan that the search's best becomes, with whatever layers save; its stacks are apart where that is faster.

    Raises `MemoryBudgetError` where no program keeps the budgets.
    """
    alike = _alike(problem)
    try:
        apart = with_saved(choose(problem, search))
    except MemoryBudgetError:
        if alike is None:
            raise
        return alike
    if alike is None:
        return apart
    if apart.seconds * GROWTH > alike.seconds:
        return alike
    return replace(apart, notes=(*apart.notes, *_text(apart, alike)))


def _alike(problem: Problem) -> StepPlan | None:
    """The plan whose stacks all have the same ratios; None where it does not fit, or there is one stack."""
    if len(problem.formulas.stacks) == 1:
        return None
    alike = replace(problem, apart=False)
    with suppress(MemoryBudgetError):
        return with_saved(choose(alike, alike.search()))
    return None


def _text(apart: StepPlan, alike: StepPlan) -> Iterator[str]:
    """What is in host memory of each stack, and what that brings."""
    names = [name for name in RATIO_OF.values() if len({ratios.given()[name] for ratios in apart.relaxed.ratios}) > 1]
    parts = (f"{name} {', '.join(f'{r.given()[name]:.0%}' for r in apart.relaxed.ratios)}" for name in names)
    faster = f"{alike.seconds / apart.seconds - 1:.0%} faster than with the same of all"
    yield f"Stacks have parts of their own in host memory ({'; '.join(parts) or 'activations'}): {faster}."
