"""settle: a solution of the linear program as a placement whose own program keeps the budget, and keeps time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import Workload
from gs_compile.planner.lp.fit import host_needed
from gs_compile.planner.lp.search import Search, allowed_alphas
from gs_compile.planner.lp.solve import Budgets, Fixed, Solution
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.prediction import Prediction
from gs_compile.planner.reasons import Again
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import Program

MOST_ROUNDS = 8  # of solving again with less: each takes off what the program before was over
SPARE_TURNS = (0, 1, 2, 4)  # of a layer's data, left free for writes that lag behind; tried in this order
GOOD_ENOUGH = 1.03  # of the linear program's time, which no program beats: what spare memory could still bring


@dataclass(frozen=True)
class Settled:
    """A solution, the homes it became, and how their program runs."""

    solution: Solution
    placement: Placement
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.simulation.seconds

    def search(self, found: Search, again: Again) -> Search:
        """The search as if it had ended with this alpha, so that what is said of the plan is said of this one."""
        if self.solution.alpha == found.best.alpha:
            return found
        best = again(found.best.num_micro_batches, self.solution.alpha)
        assert best is not None, "what fits in less memory fits"
        return replace(found, best=best)

    def plan(self, workload: Workload, profile: Profile, budgets: Budgets, found: Search) -> StepPlan:
        """As a plan; `found` is the search that has led here."""
        rows = [(number, solution.seconds) for number, solution in found.history if solution is not None]
        return StepPlan(
            workload=workload,
            profile=profile,
            budgets=budgets,
            alpha=self.solution.alpha,
            ratios=self.solution.ratios,
            device_ratios=self.solution.device_ratios,
            placement=self.placement,
            prediction=self.prediction,
            bound_seconds=found.best.seconds,
            history=tuple((number, seconds, number * workload.tokens / seconds) for number, seconds in rows),
        )


def settle(
    again: Again,
    num_micro_batches: int,
    alphas: Sequence[float],
    make: Callable[[Solution], Placement],
    lowered: Callable[[Placement], Program],
    predicted: Callable[[Program, Placement], Prediction],
    workload: Workload,
    budgets: Budgets,
) -> Settled:
    """The fastest of a few placements, by the simulator; all keep the budget of host memory by their planned peaks.

    A full host memory can cost more than it brings: where the drive is busy, writes end later than the plan issues
    them, and the step waits for their buffers. So some memory is left free where that is faster. `alphas`: the linear
    program's choice, and what else to try. Raises `MemoryBudgetError`.
    """

    def settled(alpha: float, turns: int) -> Settled | None:
        room = replace(budgets, host_nbytes=budgets.host_nbytes - turns * _turn_nbytes(workload))
        kept = _kept(lambda room: again(num_micro_batches, alpha, room=room), make, lowered, room)
        if kept is None:
            return None
        solution, placement, program = kept
        return Settled(solution, placement, predicted(program, placement))

    found: dict[int, Settled] = {}
    for turns in SPARE_TURNS:
        one = settled(alphas[0], turns)
        if one is None:
            break
        found[turns] = one
        if one.seconds <= GOOD_ENOUGH * found[0].solution.seconds:
            return one
    spare = min(found, key=lambda turns: found[turns].seconds, default=0)
    others = (settled(alpha, spare) for alpha in alphas[1:])
    fitting = [one for one in (found.get(spare), *others) if one is not None]
    if not fitting:
        raise MemoryBudgetError(
            f"host memory of {format_bytes(budgets.host_nbytes)} is too little for this step: give it more, fewer "
            "micro-batches, or a smaller micro_batch_size"
        )
    return min(fitting, key=lambda each: each.seconds)


def alphas_of(best: Solution, fixed: Fixed) -> tuple[float, ...]:
    """What to settle with: the best alpha by the linear program; where that was free to choose, also none late.

    In the linear program a late update costs nothing as long as the forward hides its traffic. In the step that of the
    first units stands between two steps, and every part is an operation of its own.
    """
    return (best.alpha, 0.0) if best.alpha and 0.0 in allowed_alphas(fixed) else (best.alpha,)


def _turn_nbytes(workload: Workload) -> int:
    """What the largest layer's update has in host memory: its state, its parameters, its gradient."""
    layers = [size for size in workload.sizes if isinstance(size.unit, int)]
    return max(
        (size.num_trained * (size.state_itemsize + size.itemsize + size.gradient_itemsize) for size in layers),
        default=0,
    )


def _kept(
    solve: Callable[[Budgets], Solution | None],
    make: Callable[[Solution], Placement],
    lowered: Callable[[Placement], Program],
    budgets: Budgets,
) -> tuple[Solution, Placement, Program] | None:
    """A solution whose program keeps the budget; None if there is none.

    The linear program bounds working buffers from above but not cuts that are rounded to whole tensors and pages.
    Where the program itself needs more, the linear program is given that much less.
    """
    allowed = budgets.host_nbytes
    for _ in range(MOST_ROUNDS):
        solution = solve(replace(budgets, host_nbytes=allowed)) if allowed > 0 else None
        if solution is None:
            return None
        placement = make(solution)
        program = lowered(placement)
        excess = host_needed(program) - budgets.host_nbytes
        if excess <= 0:
            return solution, placement, program
        allowed -= excess
    return None
