"""choose: from the linear program's solution to the fastest placement whose step program keeps the budgets.

The linear program (LP) is only an approximation of the step program:

* It does not know cuts at whole tensors, nor how values fit beside each other in memory. If a step program exceeds a
  budget, the LP is solved again with less of it.
* A late update that costs nothing in the LP, because the forward hides its traffic, may delay the next step in the
  program. So other alphas are tried.
* If parameters fill a device's memory, operations wait for the room of values that leave it late. So plans are tried
  that leave some free.
* It does not know what `boundary` could use memory for. So for a small step the fastest plan that stores nothing in
  host memory is finished, too.

`boundary` finishes what is found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from gs_compile.errors import MemoryBudgetError
from gs_compile.placement.placement import Placement
from gs_compile.planner import boundary
from gs_compile.planner.ladders import FASTER
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.problem import Problem
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.planner.step_plan import StepPlan, commits_text

MOST_ROUNDS = 8  # of solving again with less: each takes off what the program before was over the budget
SPARE_LAYERS = (1, 2, 4)  # layers' parameters and gradients for which device memory is left free, while that is faster
LEAST_PART = 32  # alphas are tried with less and less host memory, down to one part of so many
SMALL = 400  # computations of a forward
MIDDLING = 0.3  # an alpha that is tried beside the one that is fastest before `boundary` changes the step
NOTHING: Mapping[str, int] = {"host": 0, "device": 0, "ssd": 0}  # the LP gets all memory
GOOD_ENOUGH = 1.03  # times the LP's seconds with the same memory: then nothing else is tried


@dataclass(frozen=True)
class Candidate:
    """A solution, and the simulation of its program; less: by tier, the bytes that the linear program did not get."""

    solution: Solution
    simulation: Simulation
    less: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.simulation.seconds

    @property
    def is_good_enough(self) -> bool:
        return self.seconds <= GOOD_ENOUGH * self.solution.seconds


def choose(problem: Problem) -> StepPlan:
    """The plan that follows from the best solution. Raises `MemoryBudgetError` if no program keeps the budgets."""
    steps, is_small, found = problem.steps, is_small_step(problem), _to_finish(problem, problem.best)
    finished = [boundary.with_boundary(steps, each.simulation, is_small=is_small) for each in found]
    chosen, simulation = min(zip(found, finished, strict=True), key=lambda pair: pair[1].seconds)
    placement = simulation.placement
    notes = (*_of_commits(problem, placement), *_of_boundary(chosen.simulation, simulation))
    return StepPlan(problem=problem, placement=placement, simulated=simulation, is_solved=True, notes=notes)


def _to_finish(problem: Problem, best: Solution) -> list[Candidate]:
    """What `refined` finds; and of plans that store nothing in host memory, which leave most room for `boundary`, the
    fastest, and one with a middling alpha: their speed depends most on what `boundary` does.

    Raises `MemoryBudgetError` if none keeps the budgets.
    """
    candidates, emptied = refined(problem, best), problem.emptied
    lasts = problem.budgets.wear_bytes_per_second is not None  # what stores nothing in memory writes most
    is_open = emptied is not problem and not problem.profile.separate and not lasts
    if is_open and is_small_step(problem) and not any(each.is_good_enough for each in candidates):
        with suppress(MemoryBudgetError):
            candidates.append(min(refined(emptied, best), key=lambda each: each.seconds))
            is_another = MIDDLING in emptied.request.alphas and candidates[-1].solution.alpha != MIDDLING
            if is_another and (middling := _candidate(emptied, MIDDLING)):
                candidates.append(middling)
    return candidates


def is_small_step(problem: Problem) -> bool:
    """Whether a step is quickly simulated."""
    return problem.number * problem.workload.num_layers <= SMALL


def _of_commits(problem: Problem, placement: Placement) -> tuple[str, ...]:
    """A note on what durable steps cost, if there are any."""
    if not placement.durability:
        return ()
    plain = replace(problem, builder=problem.builder.laid_out(durability=0))
    slower = f"{problem.best.seconds / plain.best.seconds - 1:.1%} slower by the linear program"
    return (f"Commits: {commits_text(placement)}; {slower}.",)


def _of_boundary(plain: Simulation, chosen: Simulation) -> tuple[str, ...]:
    """A note on what `boundary` has changed, and what that brings, if it has changed anything."""
    words = boundary.said(chosen.placement)
    return (f"{words[0].upper()}{words[1:]}: {plain.seconds / chosen.seconds - 1:.1%} faster.",) if words else ()


def refined(problem: Problem, best: Solution) -> list[Candidate]:
    """The fastest of a few placements, by the simulator, all within the budgets; for a small step the fastest of each
    alpha.

    Raises `MemoryBudgetError` if none keeps the budgets.
    """
    by_alpha: dict[float, Candidate] = {}
    for tried in sorted(_tries(problem.trial, best), key=lambda each: each.seconds):
        if candidate := _whole(problem, tried):
            by_alpha.setdefault(candidate.solution.alpha, candidate)
        if by_alpha and not is_small_step(problem):
            break
    if not by_alpha and (scarce := _of_any_alpha(problem)):
        return [scarce]
    if not by_alpha:
        raise MemoryBudgetError(
            "no program of a plan by the linear program keeps the budgets: give more host_memory or device_memory, or "
            "a smaller micro_batch_size"
        )
    return list(by_alpha.values())


def _whole(problem: Problem, tried: Candidate) -> Candidate | None:
    """A candidate of a problem's trial as one for its whole steps; None if these do not fit."""
    alpha, steps = tried.solution.alpha, problem.steps
    if steps is not problem.trial:
        return _candidate(steps, alpha, tried.less)
    return tried if steps is problem or problem.solved(problem.number, alpha) else None


def _tries(problem: Problem, best: Solution) -> list[Candidate]:
    """Candidates with the best alpha, and with others that may be faster."""
    candidates = _with_spare(problem, None)
    first = candidates[-1] if candidates else None
    if first and first.is_good_enough:
        return candidates
    for alpha in _other_alphas(problem, first.solution if first else best):
        bound = problem.solved(problem.number, alpha)
        if bound and (first is None or bound.seconds < first.seconds):
            candidates += _with_spare(problem, alpha)
    return candidates


def _with_spare(problem: Problem, alpha: float | None) -> list[Candidate]:
    """A candidate, and those with memory left free on the device that it fills, as long as that is faster."""
    last = _candidate(problem, alpha)
    found = [last] if last else []
    if last is None or not any(part for each in last.solution.decision.ratios for part in each.on_device().values()):
        return found
    sizes = (each for each in problem.workload.sizes if isinstance(each.unit, int))
    layer = max((each.num_trained * (each.itemsize + each.gradient_itemsize) for each in sizes), default=0)
    for number in SPARE_LAYERS:
        if last.is_good_enough:
            break
        less = {**found[0].less, "device": found[0].less["device"] + int(number * layer)}
        other = _candidate(problem, last.solution.alpha, less)
        if other is None or other.seconds > FASTER * last.seconds:
            break
        found.append(last := other)
    return found


def _other_alphas(problem: Problem, best: Solution) -> Iterator[float]:
    """Alpha 0; and for a small step, which is quickly simulated, the largest alpha that costs nothing in the LP."""
    alphas = problem.request.alphas
    if best.alpha and 0.0 in alphas:
        yield 0.0
    above = [alpha for alpha in alphas if alpha > best.alpha]
    if above and is_small_step(problem):

        def costs(alpha: float) -> bool:
            solution = problem.solved(problem.number, alpha)
            return solution is None or solution.seconds > GOOD_ENOUGH * best.seconds

        free = bisect_left(above, True, key=costs)
        if free:
            yield above[free - 1]


def _of_any_alpha(problem: Problem) -> Candidate | None:
    """If memory is scarce, the first candidate that fits, with the alphas that are best with less and less memory."""
    budgets, tried = problem.budgets, set()
    for part in range(MOST_ROUNDS):
        less = replace(budgets, host_nbytes=budgets.host_nbytes - part * budgets.host_nbytes // LEAST_PART)
        best = problem.solved(problem.number, None, budgets=less)
        if best is None:
            return None
        if best.alpha not in tried and (candidate := _candidate(problem.steps, best.alpha)):
            return candidate
        tried.add(best.alpha)
    return None


def _candidate(problem: Problem, alpha: float | None, less: Mapping[str, int] = NOTHING) -> Candidate | None:
    """A candidate whose program keeps the budgets; None if there is none.

    alpha: None: in each round the best one with the memory that is left, as some alphas need less than others.
    """
    less = dict(less)
    times: Counter[str] = Counter()  # each time twice as much is taken off: whole tensors may not move for less
    for _ in range(MOST_ROUNDS):
        left = {f"{tier}_nbytes": getattr(problem.budgets, f"{tier}_nbytes") - nbytes for tier, nbytes in less.items()}
        if left["host_nbytes"] <= 0 or left["device_nbytes"] < 0:
            return None
        solution = problem.solved(problem.number, alpha, budgets=replace(problem.budgets, **left))
        if solution is None:
            return None
        placement = problem.builder.placement(solution.decision)
        program = problem.builder.program(placement)
        over = problem.excess(program)
        if not over:
            return Candidate(solution, problem.predicted(placement, program), less)
        for tier, nbytes in over.items():
            less[tier] += nbytes << times[tier]
            times[tier] += 1
    return None
