"""variants: a schedule may offer other placements for the same homes, of which the fastest is taken.

The simulator compares each with the plain placement. So a schedule with variants is never slower than without, as far
as a simulation can tell. The schedule itself defines its variants, and how they are reported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.passes.baselines.spec import Variants
from gs_compile.passes.lower import lower
from gs_compile.placement.placement import Placement, StepContext
from gs_compile.planner import summary
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.problem import Problem
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import TRANSFER_LANES, Program


def with_variant(plan: StepPlan) -> StepPlan:
    """The plan with the fastest of its schedule's variants, also of placements that leave more host memory to them.

    With gaps in the slab, a variant may need more host memory than there is: then it is left out.
    """
    steps, plain = plan.problem.priced.steps, plan.priced
    variants, program = _variants(plain), steps.builder.program
    if program(plain).ops == program(plain.decided(own=variants.unbounded)).ops:
        return replace(plan, simulated=plan.simulation, is_solved=True, notes=(variants.none, *plan.notes))
    others = []
    for part in variants.spare_parts if plan.is_solved else ():
        less = replace(steps.budgets, host_nbytes=int(steps.budgets.host_nbytes * (1 - part)))
        solution = steps.solved(steps.number, plan.alpha, budgets=less)
        others += [steps.builder.placement(solution.decision)] if solution else []
    own, simulations = own_within(steps, variants), [plan.simulation]
    for placement in dict.fromkeys(each.decided(own=own) for each in (plain, *others)):
        if not steps.excess(program(placement)).keys() - {"device"}:
            simulations.append(steps.predicted(placement))
    fastest = min(reversed(simulations), key=lambda each: each.seconds)
    notes = (variants.why(simulations[0], fastest), *plan.notes)
    return replace(plan, placement=fastest.placement, simulated=fastest, is_solved=True, notes=notes)


def own_within(problem: Problem, variants: Variants) -> object:
    """What budgets leave, as the schedule's `own`; of device memory without the workspace of code.

    If the device reads host memory itself, a copy reads and writes there.
    """
    budgets, profile = problem.budgets, problem.profile
    return variants.within(
        device_nbytes=problem.values_nbytes,
        host_nbytes=budgets.host_nbytes,
        bytes_per_second={lane: profile.transfer_rate(lane) for lane in TRANSFER_LANES.values()},
    )


# What is told of it ---------------------------------------------------------------------------------------------------


def table(placement: Placement, builder: StepBuilder) -> str:
    """For people: what a schedule has decided in a step; "" if it has decided nothing."""
    if placement.decision.own is None:
        return ""
    headings, rows, numbers = _variants(placement).table(_program(placement, builder), placement)
    return summary.table(headings, rows, right=numbers)


def as_dict(placement: Placement, builder: StepBuilder) -> dict[str, Any]:
    """The same for JSON, by the schedule's names."""
    return dict(_variants(placement).as_dict(_program(placement, builder), placement))


def _variants(placement: Placement) -> Variants:
    variants = SCHEDULES[placement.layout.schedule].variants
    assert variants is not None, f"the schedule {placement.layout.schedule} has no variants"
    return variants


def _program(placement: Placement, builder: StepBuilder) -> Program:
    """A step, as the schedule's own pass gets it: after `pipeline`."""
    snapshots = lower(builder.step(placement, StepContext(late=placement.has_late)), verified=False)
    return next(each for each in snapshots if each.made_by == "pipeline")
