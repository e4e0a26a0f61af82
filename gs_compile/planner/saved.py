"""saved: layers save activations in addition to their inputs, or in place of these, if that makes a step faster.

    none            every backward runs its layer's forward again
    by program      the linear program also chooses what is saved
    at the turn     the topmost layers save what memory has room for until gradients and states come, or a part of it

The fastest in simulation is taken. Saving is tried if a step may gain by it: if the linear program says so for a step
without any recomputation; or if the step computes nearly all the time, as the linear program does not know what stays
in memory between two uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from gs_compile.errors import MemoryBudgetError
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Decision, Placement
from gs_compile.placement.workload import Workload
from gs_compile.planner.choose import choose, is_small_step
from gs_compile.planner.ladders import CLEARLY_FASTER, fastest
from gs_compile.planner.lp.counting import CLASSES
from gs_compile.planner.problem import Problem
from gs_compile.planner.reasons import WORTH_SAYING, richer
from gs_compile.planner.request import Request
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import ON
from gs_compile.program.ir import TIERS, Tier

STEPS = 16  # in which the part of items that save activations is tried
PARTS = (1, 3 / 4, 1 / 2, 1 / 4)  # of all items, at most: fewer leave more computation to hide transfers behind
MOST_COMPUTED = 0.9  # of a step: above it, recomputation costs time, whatever the linear program says of drives


def is_open(request: Request) -> bool:
    """Whether the planner chooses what is saved."""
    is_given = request.recompute != "auto" or request.ratios.activation is not None
    return not is_given and not request.spec.fills_memory


def with_saved(plan: StepPlan) -> StepPlan:
    """The plan with saved activations, if that is faster than `plan`, which has none."""
    if not is_open(plan.problem.request) or not _may_pay(plan):
        return plan
    wider = plan.problem.wider
    if wider is plan.problem or not wider.workload.worthwhile:
        return plan
    plans = [plan, *_by_program(wider, plan)]
    best = min([*plans, *(_at_the_turn(wider, each) for each in plans)], key=lambda each: each.seconds)
    if not best.placement.decision.shares:
        return plan
    return replace(best, notes=(*best.notes, *text(best, plan.seconds)))


def _by_program(problem: Problem, plan: StepPlan) -> Iterator[StepPlan]:
    """The plan with what the linear program saves, if that is worth it."""
    with suppress(MemoryBudgetError):
        if problem.best.decision.shares and problem.best.seconds <= CLEARLY_FASTER * plan.bound_seconds:
            yield choose(problem)


def _at_the_turn(problem: Problem, plan: StepPlan) -> StepPlan:
    """The plan in which as many items of the topmost layers as fit save activations in the memory from which the device
    computes, if that is faster: their memory is free again before the backward needs it, which the linear program does
    not know. They replace other saved items if these leave no room, and everything in host memory if that is faster.
    """
    here: Tier = "device" if problem.profile.separate else "host"
    others = Shares(share for share in plan.shares if share.tier != here)
    steps, chosen = problem.steps, plan.placement.decision

    def placed(decision: Decision, shares: Shares) -> Placement:
        left = min(1.0, (1.0 - shares.part()) / others.part()) if others else 0.0
        rest = (share._replace(part=left * share.part) for share in others)
        return steps.builder.placement(replace(decision, shares=Shares((*shares, *rest))))

    emptied = _emptied(problem, chosen) if here == "host" else chosen
    decisions, levels = dict.fromkeys((chosen, emptied)), problem.workload.worthwhile
    tops = [(decision, ladder) for decision in decisions for ladder in topmost(levels, here)]
    ladders = ([placed(decision, shares) for shares in ladder] for decision, ladder in tops)
    parts = PARTS if is_small_step(problem) else PARTS[:1]
    simulation = fastest(steps, plan.simulation, (each[: int(part * STEPS)] for each in ladders for part in parts))
    return replace(plan, problem=problem, placement=simulation.placement, simulated=simulation)


def _emptied(problem: Problem, decision: Decision) -> Decision:
    """The decision with nothing in host memory of the classes without a given ratio: the most room for saving."""
    given = problem.emptied.request.ratios.given()
    ratios = {name: given[name] for name in CLASSES}
    return replace(decision, ratios=tuple(replace(each, **ratios) for each in decision.ratios))


def topmost(levels: Sequence[int], tier: Tier) -> Iterator[list[Shares]]:
    """Shares that take more and more memory: topmost items at each level, alone, and with all others a level below."""
    for below, level in pairwise((0, *levels)):
        tops = [Share(level, tier, step / STEPS, is_topmost=True) for step in range(1, STEPS + 1)]
        yield [Shares([top]) for top in tops]
        if below:
            yield [Shares([top, Share(below, tier, 1 - top.part, is_topmost=True)]) for top in tops[:-1]]


def computed(workload: Workload, shares: Shares) -> float:
    """What layers compute for a mean micro-batch, in the unit of `Workload.computed`."""
    none, *levels = workload.computed
    more = sum(share.part * (levels[share.level - 1] - none) for share in shares)
    return none + more / (workload.savable(range(workload.num_layers)) or 1.0)


def _may_pay(plan: StepPlan) -> bool:
    """Whether the step would be faster without any recomputation, if saving took no memory."""
    if plan.simulation.busy["compute"] > MOST_COMPUTED:
        return True
    workload = plan.workload
    layers = range(workload.num_layers)
    costs = {unit: cost.without_recomputation() if unit in layers else cost for unit, cost in workload.costs.items()}
    without = plan.problem.of(replace(workload, costs=costs)).solved(plan.num_micro_batches)
    return without is not None and without.seconds < CLEARLY_FASTER * plan.bound_seconds


# What is said of it ---------------------------------------------------------------------------------------------------


def text(plan: StepPlan, seconds: float) -> Iterator[str]:
    """Notes on what saving brings to a step that would take `seconds` without, and on what would allow more of it."""
    shares, number = plan.placement.decision.shares, plan.num_micro_batches * plan.workload.num_layers
    words = f"{next(saved_text(shares, number))}: {seconds / plan.seconds - 1:.0%} faster"
    part, better = shares.part(), list[tuple[float, str]]()
    for what, more_of_it in richer(plan.problem).items():
        solution = more_of_it(plan.problem).solved(plan.num_micro_batches, plan.alpha)
        better += [(solution.decision.shares.part(), what)] if solution else []
    most, what = max(better)
    more = f"; {what} would make it {round(most * number)}" if most > part + WORTH_SAYING else ""
    yield words + more


def saved_text(shares: Shares, number: int) -> Iterator[str]:
    """``44 of 192 layer inputs keep their activations in host memory``, if any do; `number`: of all items."""
    by_tier = {tier: round(number * shares.part(tier)) for tier in TIERS}
    parts = [f"{count} {ON[tier]}" for tier, count in by_tier.items() if count]
    first = f" of {number} layer inputs keep their activations "
    if parts:
        yield ", ".join([parts[0].replace(" ", first, 1), *parts[1:]])
