"""decide: where everything of a step lives and how its updates run, for a named model and for one in this process.

What needs no figures of the machine is settled first (`settled`). Otherwise each of these makes one choice: it asks the
next one for both plans, and takes the one that is faster in simulation.

    decide              masters: split ones, or whole ones
    _solved             updates and layers: whole, or in pieces; in pieces also where whole ones do not fit
    _best_clipping      updates with clipping: delayed, or speculative
    plan_stacks         ratios: the same for all stacks, or of their own
    saved               activations: computed again, or saved
    choose              homes: by the linear program, with less memory or another alpha, or nothing in host memory
    boundary            what stays in memory between two uses, and what is read earlier
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from gs_compile.errors import MemoryBudgetError
from gs_compile.planner import settled
from gs_compile.planner.builder import SCARCE_UPDATES
from gs_compile.planner.choose import choose
from gs_compile.planner.in_pieces import faster, smaller, with_layer_tokens
from gs_compile.planner.ladders import CLEARLY_FASTER
from gs_compile.planner.problem import Problem
from gs_compile.planner.saved import with_saved
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import RATIO_OF
from gs_compile.planner.variants import with_variant

log = logging.getLogger(__name__)

MOST_NAMED = 8  # units, in a note


def decide(problem: Problem) -> StepPlan:
    """The plan of a step of the problem's micro-batches; updates are in pieces if whole ones do not fit.

    Raises `PlanError` or `OptionError` if the request cannot be met, `MemoryBudgetError` if not even the smallest step
    fits; for a step that is going to run, before anything is measured.
    """
    problem = problem.updated_in(1)
    try:
        plan = _decided(problem)
    except MemoryBudgetError as error:
        if problem.whole_masters is None:
            raise
        log.info("the plan does not fit with split masters, so masters are whole: %s", error)
        with suppress(MemoryBudgetError):
            return _decided(problem.whole_masters().like(problem))
        raise  # what split ones need, which is mostly less
    if plan.problem.whole_masters is None or not any(unit.num_resident for unit in plan.placement.units):
        return plan
    return _faster_masters(plan, plan.problem.whole_masters().like(problem))


def _faster_masters(plan: StepPlan, whole: Problem) -> StepPlan:
    """The plan with whole masters, if that is faster: with split ones, parameters on a device have to move to the host
    for their update, and late updates need the old halves.
    """
    most = CLEARLY_FASTER * plan.seconds
    with suppress(MemoryBudgetError):
        if whole.best.seconds < most and (other := _decided(whole)).seconds < most:
            return other
    return plan


def _decided(problem: Problem) -> StepPlan:
    """The plan with one kind of masters."""
    found = settled.undecided(problem)
    plan = _solved(found) if isinstance(found, Problem) else found
    plan = with_layer_tokens(with_variant(plan) if problem.request.spec.fills_memory else plan)
    return replace(plan, notes=(*plan.notes, *_of_timing(plan))) if plan.is_solved else plan


def _of_timing(plan: StepPlan) -> Iterator[str]:
    """Notes on the units whose code was not timed, in a run, or beside others whose code was."""
    costs = plan.workload.costs
    unknown = [str(unit) for unit, cost in costs.items() if cost.seconds is None]
    if unknown and (plan.problem.will_run or len(unknown) < len(costs)):
        first = ", ".join(unknown[:MOST_NAMED]) + (", ..." if len(unknown) > MOST_NAMED else "")
        yield (
            f"The code of {len(unknown)} of {len(costs)} units ({first}) was not timed, as what it computes depends on "
            "a batch's values: its seconds are estimated from its operations."
        )


def _solved(problem: Problem) -> StepPlan:
    """The plan by the linear program and the simulator, with whole updates and layers, or with some in pieces."""
    try:
        best = plan = _best_clipping(problem)
    except MemoryBudgetError:
        return _scarce(problem)
    for pieces, part in faster(problem):
        with suppress(MemoryBudgetError):
            other = _best_clipping(pieces)
            best = other if other.seconds < min(part * plan.seconds, best.seconds) else best
    return best


def _scarce(problem: Problem) -> StepPlan:
    """The plan if the linear program finds none for whole updates: the faster of updates in pieces, and of layers in
    pieces if the device has no room for whole ones; or the smallest step, whose need an error then names.
    """
    try:
        least = settled.least(problem)
    except MemoryBudgetError:
        raise settled.refusal(problem.updated_in(SCARCE_UPDATES)) from None
    tries = smaller(problem)
    next(tries)  # itself
    plans = _first([next(tries)])
    if not plans or least is problem:  # it is not host memory alone that is short
        plans += _first(tries)
    if plans:
        return min(plans, key=lambda each: each.seconds)
    note = "no plan fits by the linear program's bounds: host memory keeps the least it can"
    for each in smaller(problem):
        placement = settled.placed(each.steps, 0.0)
        if each.layer_updates >= least.layer_updates and settled.keeps_budgets(each, placement):
            return settled.unsimulated(each, placement, note)
    raise settled.refusal(each)


def _first(problems: Iterable[Problem]) -> list[StepPlan]:
    """The plan of the first of these problems for which the linear program finds one; [] if it finds none."""
    for problem in problems:
        with suppress(MemoryBudgetError):
            return [_best_clipping(problem)]
    return []


def _best_clipping(problem: Problem) -> StepPlan:
    """The plan with the clipping that is asked for, or that is faster; of equally fast ones, with delayed updates."""
    request, problem = problem.request, problem.priced
    chosen = plan_stacks(problem)
    is_settled = request.clipping is not None or request.alpha is not None or request.accumulate
    if not request.clip or is_settled:
        return chosen
    try:
        other = _best_clipping(problem.asked(replace(request, clipping="speculative")))
    except MemoryBudgetError:
        return replace(chosen, notes=(*chosen.notes, "Speculative updates do not fit."))
    seconds = f"{chosen.seconds:.3g} s a step with delayed updates, {other.seconds:.3g} s with speculative ones"
    if other.seconds < CLEARLY_FASTER * chosen.seconds:
        note = f"Clipping is speculative: {seconds}, of which none is expected to be rolled back."
        return replace(other, notes=(*other.notes, note))
    return replace(chosen, notes=(*chosen.notes, f"Clipping is delayed: {seconds}."))


def plan_stacks(problem: Problem) -> StepPlan:
    """The plan with saved activations; each of several stacks has its own ratios if that is faster.

    With the same ratios for all, transfers are spread evenly over a step, so that computation hides them everywhere.
    With their own, memory goes where it saves the most time: to activations of wide layers, which take the most
    computation for each byte, or to a stack that is trained, whose parameters move more often. The linear program knows
    a phase only as a whole, and prefers the latter. Raises `MemoryBudgetError` if no program keeps the budgets.
    """
    if len(problem.formulas.stacks) == 1:
        return with_saved(choose(problem))
    try:
        alike = with_saved(choose(replace(problem, apart=False)))
    except MemoryBudgetError:
        return with_saved(choose(problem))
    try:
        apart = with_saved(choose(problem))
    except MemoryBudgetError:
        return alike
    if apart.seconds > CLEARLY_FASTER * alike.seconds:
        return alike
    return replace(apart, notes=(*apart.notes, *_of_stacks(apart, alike)))


def _of_stacks(apart: StepPlan, alike: StepPlan) -> Iterator[str]:
    """A note on what each stack has in host memory, and what that brings."""
    ratios = [each.given() for each in apart.placement.decision.ratios]
    names = [name for name in RATIO_OF.values() if len({each[name] for each in ratios}) > 1]
    parts = (f"{name} {', '.join(f'{each[name]:.0%}' for each in ratios)}" for name in names)
    faster = f"{alike.seconds / apart.seconds - 1:.0%} faster than with the same of all"
    yield f"Stacks have parts of their own in host memory ({'; '.join(parts) or 'activations'}): {faster}."
