"""settled: plans that need no figures of the machine: everything is given, or fits as a whole, or nothing can fit.

    all is given                ratios, alpha, and what layers save are taken as they are
    everything fits             in host memory, with all that is worth saving, if the device reads host memory itself
    not even the least fits     refused, with what it needs

For a run nothing is measured then: the first step begins, or is refused, sooner.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gs_compile.errors import MemoryBudgetError, NoFitError
from gs_compile.machine import format_bytes
from gs_compile.options import Ratios
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Decision, Placement
from gs_compile.placement.workload import NOISE, beside_slab
from gs_compile.planner.boundary import carrying, retaining
from gs_compile.planner.builder import SCARCE_UPDATES, planned_peak
from gs_compile.planner.ladders import Ladder, highest
from gs_compile.planner.lp.counting import host_classes
from gs_compile.planner.lp.search import shortfall
from gs_compile.planner.problem import Problem, fits
from gs_compile.planner.request import Request
from gs_compile.planner.saved import computed, is_open, saved_text, topmost
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import Tier

NEXT_TO_NO_MORE = 1.02  # times the host memory of a step, which unrequested improvements may take


def undecided(problem: Problem) -> Problem | StepPlan:
    """The plan, if it is settled without figures of the machine; otherwise the problem that needs them."""
    problem.check()
    problem = problem.wider if problem.request.saves else problem
    if problem.will_run:
        return _settled(least(problem)) or problem  # `least` refuses before anything is measured
    plan = _settled(problem)
    return plan if plan and keeps_budgets(plan.problem, plan.placement) else problem


def _settled(problem: Problem) -> StepPlan | None:
    """The plan without figures of the machine; None: the linear program decides."""
    request, separate = problem.request, problem.builder.layout.separate
    if separate and len(request.alphas) > 1:
        return None
    steps = problem.steps
    smallest, largest = (placed(steps, part) for part in (0.0, 1.0))
    may_save = is_open(request) and problem.wider is not problem
    if smallest == largest and len(request.alphas) == 1 and not may_save:
        return unsimulated(
            problem, _boundary_for_free(steps, smallest), "ratios and alpha are given: nothing was planned"
        )
    ratios = _ratios(problem, 1.0).given()
    moves_nothing = all(ratios[name] == 1.0 for name in host_classes(problem.builder.layout))
    if separate or not _fits_host(steps, largest) or (not moves_nothing and (may_save or len(request.alphas) > 1)):
        return None
    reason = "all that may be in host memory fits there: nothing was planned"
    if not may_save:
        return unsimulated(problem, _boundary_for_free(steps, largest), reason)
    wider = problem.wider.steps
    chosen = _boundary_for_free(wider, _filled(wider, largest))
    workload, shares = wider.workload, chosen.decision.shares
    if computed(workload, shares) > (1 + NOISE) * min(workload.computed):  # of the rest drives may take some
        return None
    words = saved_text(shares, problem.builder.layout.num_items)
    return unsimulated(problem.wider, chosen, "; ".join([reason, *words]))


def _filled(problem: Problem, plain: Placement) -> Placement:
    """The placement that saves what host memory has room for, and so computes least: nothing moves that takes time."""
    workload, builder, decision = problem.workload, problem.builder, plain.decision

    def saving(shares: Shares) -> Placement:
        return builder.placement(replace(decision, shares=shares))

    ladders = (list(map(saving, ladder)) for ladder in topmost(workload.worthwhile, "host"))
    fitting = (highest(ladder, partial(_fits_host, problem)) for ladder in ladders)
    filled = [plain, *(each for each, _ in filter(None, fitting))]
    return min(filled, key=lambda each: computed(workload, each.decision.shares))


def _boundary_for_free(problem: Problem, plain: Placement) -> Placement:
    """`plain` with as much carried and retained as takes next to no more memory: less moves, and nothing waits, so no
    plan is needed. A schedule as others publish it stays as it is.
    """
    if problem.request.spec.as_published:
        return plain
    for ladder in (carrying, retaining):
        plain = _last_for_free(problem, plain, ladder(plain))
    return plain


def _last_for_free(problem: Problem, plain: Placement, ladder: Ladder) -> Placement:
    """The last placement of a ladder that takes no more host memory than `plain`, or next to no more in the budget."""
    if not ladder:
        return plain
    needed = planned_peak(problem.builder.program(plain), "host")
    most = {"host": max(needed, min(int(needed * NEXT_TO_NO_MORE), problem.host_nbytes))}
    last = highest(ladder, lambda each: fits(problem.builder.programs(each), most))
    return last[0] if last else plain


def least(problem: Problem) -> Problem:
    """The problem, if its steps fit with the least in host memory; with updates in pieces if whole ones do not fit.

    Raises `MemoryBudgetError` if not even these fit.
    """
    for each in (problem, problem.updated_in(SCARCE_UPDATES)):
        placement = placed(each.steps, 0.0)
        if _fits_host(each.steps, placement):
            _check_device(each, placement)
            return each
    raise MemoryBudgetError(_too_large(each.steps, placement))


def unsimulated(problem: Problem, placement: Placement, note: str) -> StepPlan:
    """The plan of a placement that is not simulated; raises as `_check_device`."""
    _check_device(problem, placement)
    return StepPlan(problem=problem, placement=placement, notes=(note,))


def _check_device(problem: Problem, placement: Placement) -> None:
    """Raise `MemoryBudgetError` if the device has no room for a step's values."""
    budget = problem.device_nbytes
    if budget is not None and (needed := planned_peak(problem.steps.builder.program(placement), "device")) > budget:
        raise MemoryBudgetError(
            f"device_memory is {format_bytes(budget)}; this step keeps {format_bytes(needed)} there, and what a layer "
            f"computes with comes on top: {remedies(problem.request)}"
        )


def _ratios(problem: Problem, part: float) -> Ratios:
    """The given ratios; for all other classes `part` is in host memory, or all that is not on the device."""
    given = replace(problem.request.ratios, activation=None).given()
    names = host_classes(problem.builder.layout)
    left = {name: min(part, 1.0 - given.get(f"device_{name}", 0.0)) for name in names}
    return Ratios(**(left | given))


def placed(problem: Problem, part: float, alpha: float | None = None) -> Placement:
    """The placement with the ratios of `_ratios`, and with the least alpha that may be chosen or the one given here."""
    request, shares = problem.request, Shares()
    if request.saves:  # at the last level, as nothing says at which
        tier: Tier = "host" if part or not request.saves_all else "ssd"
        most = max(map(len, problem.builder.layout.levels))
        asked = request.ratios.activation
        shares = Shares([Share(most, tier, 1.0 if asked is None else asked)])
    return problem.builder.placement(
        Decision(
            ratios=(_ratios(problem, part),),
            alpha=request.alphas[0] if alpha is None else alpha,
            shares=shares,
            speculative=request.speculative,
            layer_updates=problem.layer_updates,
        )
    )


def _fits_host(problem: Problem, placement: Placement) -> bool:
    """Whether a step keeps the budget of host memory."""
    return fits([problem.builder.program(placement)], {"host": problem.host_nbytes})


def keeps_budgets(problem: Problem, placement: Placement) -> bool:
    """Whether a step keeps the budgets of all tiers, including the workspace of its code."""
    with suppress(NoFitError):  # the device has no room for the code alone
        return problem.steps.fitting(placement) is not None
    return False


def refusal(problem: Problem) -> NoFitError | MemoryBudgetError:
    """The error with what the smallest step lacks: with that it fits, whatever the linear program says."""
    lacking = problem.steps.lacking(placed(problem.steps, 0.0))
    said = shortfall(problem.data, problem.number, lacking)
    return MemoryBudgetError(said) if problem.will_run else NoFitError(said)


def _too_large(problem: Problem, placement: Placement) -> str:
    """In words, how much host memory the smallest step needs, and what can be done."""
    request, beside = problem.request, beside_slab(problem.builder.sizes)  # which the budget is without
    nbytes = beside + planned_peak(problem.builder.program(placement), "host")
    ratios = _ratios(problem, 0.0).given()
    words = ", ".join(f"{name} {ratios[name]:g}" for name in host_classes(problem.builder.layout))
    message = (
        f"host_memory is {format_bytes(problem.host_nbytes + beside)}; this step needs {format_bytes(nbytes)} "
        f"({nbytes} bytes) of it at least, with ratios {words}: {remedies(request)}"
    )
    alpha = placement.decision.alpha
    if alpha and not (request.speculative or request.accumulate) and (most := _most_alpha(problem, alpha)) is not None:
        why = " (max_grad_norm makes all gradients wait)" if request.clip else ""
        message += (
            ". Late gradients need the memory that obsolete parameters and checkpoints leave: the largest alpha "
            f"possible here is {most:.2f}, not {alpha:g}{why}"
        )
    return message


def _most_alpha(problem: Problem, alpha: float) -> float | None:
    """The largest alpha of 0.00, 0.01 ... below the given one with which the smallest step fits, if there is one."""

    def is_too_large(hundredths: int) -> bool:
        return not _fits_host(problem, placed(problem, 0.0, hundredths / 100))

    number = bisect_left(range(round(100 * alpha)), True, key=is_too_large)
    return (number - 1) / 100 if number else None


def remedies(request: Request) -> str:
    """In words, the settings that would still make a step smaller."""
    changes = ["give it more"]
    changes += ["lower ratios"] if any(request.ratios.given().values()) else []
    changes += ["have activations computed again (recompute)"] if request.saves_all else []
    changes += ["give a smaller micro_batch_size"] if (request.micro_batch_size or 1) > 1 else []
    return ", or ".join(changes)
